package main

import "github.com/seed90331342/attn/cpu/internal/vec/_generate/tables"

// accumulators returns the registers of a tile of rows, which it clears.
func (f *function) accumulators(rows, cols int) [][]vec {
	acc := make([][]vec, rows)
	for i := range acc {
		acc[i] = f.vectors(cols)
	}
	return acc
}

func (f *function) clear(acc [][]vec) {
	for i := range acc {
		f.zero(acc[i]...)
	}
}

// scores writes the score tile: rows keys against all lanes, groups times.
func scores(rows int) {
	f := oneOf("scores", tables.Which{Rows: rows})
	s, k, ld, qt, d, groups, mx := f.param("s"), f.param("k"), f.param("ldk"), f.param("qt"), f.param("d"), f.param("groups"), f.param("mx")
	q, kp := f.gp(), make([]gp, rows)
	for i := range kp {
		kp[i] = f.gp()
	}
	acc, keys, b := f.accumulators(rows, cols), f.vectors(rows), [2][]vec{f.vectors(cols), f.vectors(cols)}
	f.loop("group", groups, func() {
		f.mov(qt, q)
		f.mov(k, kp[0])
		for i := 1; i < rows; i++ {
			f.addTo(kp[i-1], ld, 0, kp[i])
		}
		f.clear(acc)
		f.byFour("dim", d, func(n int) {
			for i := range kp {
				if n == 4 {
					f.ldNext(kp[i], keys[i])
				} else {
					f.ld(kp[i], 0, 1, keys[i])
					f.addI(4, kp[i])
				}
			}
			for u := range n {
				f.ldRow(q, u*rowBytes, b[u%2])
				f.outer(acc, b[u%2], func(i int) (vec, int) { return keys[i], u })
			}
			f.addI(n*rowBytes, q)
		})
		for i := range acc {
			f.stRow(acc[i], s, i*rowBytes)
		}
		for step := 1; step < rows; step *= 2 {
			for i := 0; i+step < rows; i += 2 * step {
				for j := range cols {
					f.larger(acc[i][j], acc[i+step][j], acc[i][j])
				}
			}
		}
		f.ldRow(mx, 0, b[0])
		for j, m := range b[0] {
			f.larger(m, acc[0][j], m)
		}
		f.stRow(b[0], mx, 0)
		f.addI(rows*rowBytes, s)
		f.addTo(k, ld, map[int]int{4: 2, 1: 0}[rows], k)
	})
	f.ret()
}

// outer writes rows x cols multiply-adds: acc[i][j] += lane(i)·b[j].
func (f *function) outer(acc [][]vec, b []vec, lane func(i int) (vec, int)) {
	for i := range acc {
		x, at := lane(i)
		for j := range b {
			f.fmaAt(b[j], x, at, acc[i][j])
		}
	}
}

// values writes the value tile: rows elements of the outputs of all lanes, groups times. The
// values are those of n runs.
func values(rows int) {
	f := oneOf("values", tables.Which{Rows: rows})
	o, ld, first, groups, alpha := f.param("o"), f.param("ldv"), f.param("first"), f.param("groups"), f.param("alpha")
	run, left, vp, ahead, n, p := f.gp(), f.gp(), f.gp(), f.gp(), f.gp(), f.gp()
	acc, x, b := f.accumulators(rows, cols), f.vectors(2), [2][]vec{f.vectors(cols), f.vectors(cols)}
	f.loop("group", groups, func() {
		f.loadParam("p", p)
		f.clear(acc)
		f.loadParam("runs", run)
		f.loadParam("n", left)
		f.loop("run", left, func() {
			f.nextRun(run, vp, ahead, n)
			f.add(first, vp)
			f.byFour("key", n, func(n int) {
				for u := range n {
					if rows == 4 {
						f.ldStep(vp, ld, x[u%2])
					} else {
						f.ld(vp, 0, 1, x[u%2])
						f.add(ld, vp)
					}
					f.ldRow(p, u*rowBytes, b[u%2])
					f.outer(acc, b[u%2], func(i int) (vec, int) { return x[u%2], i })
				}
				f.addI(n*rowBytes, p)
			})
		})
		a, old := b[0], b[1]
		f.ldRow(alpha, 0, a)
		for i := range acc {
			f.ldRow(o, i*rowBytes, old)
			for j := range old {
				f.fma(old[j], a[j], acc[i][j])
			}
			f.stRow(acc[i], o, i*rowBytes)
		}
		f.addI(rows*rowBytes, o)
		f.addI(4*rows, first)
	})
	f.ret()
}

// fold writes o = o·a + x·b, with three roundings, for rows of all lanes.
func fold() {
	f := kernel("fold")
	p := f.params("o", "x", "rows", "a", "b")
	o, x, rows := p[0], p[1], p[2]
	a, b, l, r := f.vectors(cols), f.vectors(cols), f.vectors(cols), f.vectors(cols)
	f.ldRow(p[3], 0, a)
	f.ldRow(p[4], 0, b)
	f.loop("row", rows, func() {
		f.ldRow(o, 0, l)
		f.ldRow(x, 0, r)
		for j := range l {
			f.fmul(l[j], a[j], l[j])
			f.fmul(r[j], b[j], r[j])
			f.fadd(l[j], r[j], l[j])
		}
		f.stRow(l, o, 0)
		f.addI(rowBytes, o, x)
	})
	f.ret()
}

// columnMax writes mx = max(mx, s) over rows of all lanes.
func columnMax() {
	f := kernel("columnMax")
	s, rows, mx := f.param("s"), f.param("rows"), f.param("mx")
	m, x := f.vectors(cols), f.vectors(cols)
	f.ldRow(mx, 0, m)
	f.loop("row", rows, func() {
		f.ldRow(s, 0, x)
		for j := range m {
			f.larger(m[j], x[j], m[j])
		}
		f.addI(rowBytes, s)
	})
	f.stRow(m, mx, 0)
	f.ret()
}

// edge hides the keys outside of each lane's range.
func edge() {
	f := kernel("edge")
	p := f.params("s", "rows", "key", "lo", "hi")
	s, rows, key := p[0], p[1], p[2]
	hidden, j, one := f.constant(cNegInf), f.vec(), f.vec()
	f.dup(key, j)
	f.emit(integer, "MOVD $1, %v", key)
	f.dup(key, one)
	lo, hi, x := f.vectors(cols), f.vectors(cols), f.vectors(cols)
	f.ldRow(p[3], 0, lo)
	f.ldRow(p[4], 0, hi)
	f.loop("row", rows, func() {
		from, to := f.vec(), f.vec()
		f.ldRow(s, 0, x)
		for c := range x {
			f.intAtLeast(j, lo[c], from)
			f.intGreater(hi[c], j, to)
			f.and(from, to, from)
			f.whereNot(from, hidden, x[c])
		}
		f.stRow(x, s, 0)
		f.words("VADD", j, one, j)
		f.addI(rowBytes, s)
	})
	f.ret()
}

// outerSum adds sums over lanes to o, a tile of rows and vectors groups times.
func outerSum(rows, vectors int) {
	f := oneOf("outer", tables.Which{Rows: rows, Vectors: vectors})
	o, ldo, x, ldx, n, p, groups := f.param("o"), f.param("ldo"), f.param("x"), f.param("ldx"), f.param("n"), f.param("p"), f.param("groups")
	xp, pp := f.gp(), f.gp()
	acc, weights, b := f.accumulators(rows, vectors), f.vectors(rows), [2][]vec{f.vectors(vectors), f.vectors(vectors)}
	f.loop("group", groups, func() {
		f.mov(x, xp)
		f.mov(p, pp)
		f.clear(acc)
		f.byFour("lane", n, func(m int) {
			for i := range weights {
				f.ld(pp, i*rowBytes, m, weights[i])
			}
			for u := range m {
				f.ldRow(xp, 0, b[u%2])
				f.outer(acc, b[u%2], func(i int) (vec, int) { return weights[i], u })
				f.add(ldx, xp)
			}
			f.addI(4*m, pp)
		})
		old := b[0]
		for i := range acc {
			f.ldRow(o, 0, old)
			for j := range old {
				f.fadd(acc[i][j], old[j], old[j])
			}
			f.stRow(old, o, 0)
			f.add(ldo, o)
		}
		f.addI(rows*rowBytes, p)
	})
	f.ret()
}

// scoreGradients replaces rows of all lanes of ds, the gradients of weights, by those of scores.
func scoreGradients() {
	f := kernel("scoreGradients")
	args := f.params("ds", "p", "w", "rows", "dots")
	ds, p, w, rows := args[0], args[1], args[2], args[3]
	factor, dot := f.broadcastParam("factor"), f.vectors(cols)
	f.ldRow(args[4], 0, dot)
	x, dropped, weight := f.vectors(cols), f.vectors(cols), f.vectors(cols)
	f.loop("row", rows, func() {
		f.ldRow(ds, 0, x)
		f.ldRow(w, 0, dropped)
		f.ldRow(p, 0, weight)
		for j := range dot {
			f.fmul(x[j], factor, x[j])
			f.isZero(dropped[j], dropped[j])
			f.andNot(x[j], dropped[j], x[j])
			f.fsub(x[j], dot[j], x[j])
			f.fmul(x[j], weight[j], x[j])
			f.isZero(weight[j], weight[j])
			f.andNot(x[j], weight[j], x[j])
		}
		f.stRow(x, ds, 0)
		f.addI(rowBytes, ds, p, w)
	})
	f.ret()
}
