package main

import (
	"fmt"

	"github.com/seed90331342/attn/cpu/internal/vec/_generate/tables"
)

// element is the type of keys or values in memory.
type element struct {
	suffix string
	bytes  int
	lead   int // bytes of a row's scale, which precedes its elements
}

var elements = []element{{"", 4, 0}, {"F16", 2, 0}, {"BF16", 2, 0}, {"Q8", 1, 4}, {"F8", 1, 0}}

// load reads the vector at base+offset, of a row whose scale is in all lanes of scale. For F8 scale has what fromF8 takes.
func (e element) load(f *function, base gp, offset int, scale, to vec) {
	f.ld(base, e.lead+offset, e.bytes, to)
	switch e.suffix {
	case "F16":
		f.fromF16(to, to)
	case "BF16":
		f.fromBF16(to, to)
	case "Q8":
		f.fromBytes(true, to, to)
		f.fromInt(to, to)
		f.fmul(to, scale, to)
	case "F8":
		f.fromF8(to, scale, to)
	}
}

// open reads what load takes for all rows.
func (e element) open(f *function, scale vec) {
	if e.suffix == "F8" {
		f.loadF8Factors(scale)
	}
}

// loadScale reads the scale of a row, back bytes before at.
func (e element) loadScale(f *function, at, back gp, to vec) {
	if e.lead == 0 {
		return
	}
	f.scope(func() {
		row := f.gp()
		f.emit(integer, "SUB %v, %v, %v", back, at, row)
		f.spread(row, to)
	})
}

// dots writes scores with keys as lanes. It transposes squares of K in registers, so
// each score is summed in the same order as in scores. A tile is 4 or 1 vectors of keys by 4
// or 1 heads.
func dots(e element) {
	f := oneOf("dots", tables.Which{Element: e.suffix})
	p := f.params("s", "lds", "k", "ldk", "run", "q", "ldq", "heads", "chunks", "groups")
	s, lds, k, ldk, ahead, q, ldq, heads, chunks, groups := p[0], p[1], p[2], p[3], p[4], p[5], p[6], p[7], p[8], p[9]
	again, qc, sp, kp, at, row, c := f.gp(), f.gp(), f.gp(), f.gp(), f.gp(), f.gp(), f.gp()
	f.emit(load, "MOVD 8(%v), %v", ahead, ahead)
	f.emit(integer, "SUB %v, %v, %v", k, ahead, ahead) // from a row to the one to prefetch
	f.byFour("group", groups, func(vectors int) {
		f.emit(integer, "MOVD $0, %v", again)
		f.mov(q, qc)
		f.mov(s, sp)
		f.byFour(fmt.Sprintf("head%d", vectors), heads, func(rows int) {
			tile := fmt.Sprintf("tile%dx%d", vectors, rows)
			qp := make([]gp, rows)
			for r := range qp {
				qp[r] = f.gp()
				f.mov(qc, qp[r])
				f.add(ldq, qc)
			}
			acc, queries, keys, scale := f.accumulators(vectors, rows), f.vectors(rows), f.vectors(lanes), f.vec()
			f.clear(acc)
			e.open(f, scale)
			f.mov(k, kp)
			f.emit(integer, "MOVD $0, %v", at) // bytes from the beginning of a row
			f.mov(chunks, c)
			f.loop(tile, c, func() {
				f.skip(tile+"_read", func(skip string) {
					// The first heads prefetch a line of each row whenever one has been read.
					f.emit(integer, "AND $63, %v, %v", at, row)
					f.emit(integer, "ORR %v, %v, %v", again, row, row)
					f.emit(integer, "CBNZ %v, %s", row, skip)
				}, func() {
					f.addTo(kp, ahead, 0, row)
					for range vectors * lanes {
						f.prefetch(row, 0)
						f.add(ldk, row)
					}
				})
				for r := range queries {
					f.ldNext(qp[r], queries[r])
				}
				f.mov(kp, row)
				for _, sums := range acc {
					for i := range keys {
						e.loadScale(f, row, at, scale)
						e.load(f, row, 0, scale, keys[i])
						f.add(ldk, row)
					}
					f.transpose(keys)
					for i, key := range keys {
						for r, query := range queries {
							f.fmaAt(key, query, i, sums[r])
						}
					}
				}
				f.addI(lanes*e.bytes, kp, at)
			})
			f.emit(integer, "MOVD $1, %v", again)
			for r := range rows {
				sums := make([]vec, vectors)
				for v := range sums {
					sums[v] = acc[v][r]
				}
				f.stRow(sums, sp, 0)
				f.add(lds, sp)
			}
		})
		f.addI(vectors*bytes, s)
		f.addTo(k, ldk, map[int]int{4: 4, 1: 2}[vectors], k)
	})
	f.ret()
}

// skip writes a condition, which may branch to the label, and a body before it. The
// counts in the listing leave out the body.
func (f *function) skip(label string, condition func(label string), body func()) {
	condition(label)
	counts := f.counts
	body()
	f.counts = counts
	f.lines = append(f.lines, skipped+label+":")
}

// nextRun loads what the kernels read of the Run at run, and advances run by its eleven words.
func (f *function) nextRun(run, rows, next, n gp) {
	for i, to := range []gp{rows, next, n} {
		f.emit(load, "MOVD %d(%v), %v", 8*i, run, to)
	}
	f.addI(88, run)
}

// mix writes the value product of heads rows with elements as lanes: strips of
// vectors vectors, o = alpha·o + Σ p·v with the sum from zero. The values are those of
// n runs.
func mix(e element, heads, vectors int) {
	f := oneOf("mix", tables.Which{Element: e.suffix, Rows: heads, Vectors: vectors})
	o, ldo, ldv, off, strips := f.param("o"), f.param("ldo"), f.param("ldv"), f.param("first"), f.param("strips")
	run, left, vp, ahead, n, temp := f.gp(), f.gp(), f.gp(), f.gp(), f.gp(), f.gp()
	p := make([]gp, heads)
	for h := range p {
		p[h] = f.gp()
	}
	acc, weights, x, scale := f.accumulators(heads, vectors), f.vectors(heads), [2][]vec{f.vectors(vectors), f.vectors(vectors)}, f.vec()
	e.open(f, scale)
	f.loop("strip", strips, func() {
		f.clear(acc)
		f.loadParam("p", p[0])
		f.loadParam("ldp", temp)
		for h := 1; h < heads; h++ {
			f.addTo(p[h-1], temp, 0, p[h])
		}
		f.loadParam("runs", run)
		f.loadParam("n", left)
		f.loop("run", left, func() {
			f.nextRun(run, vp, ahead, n)
			f.add(off, vp)
			f.add(off, ahead)
			f.byFour("key", n, func(m int) {
				for h := range p {
					if m == 4 {
						f.ldNext(p[h], weights[h])
					} else {
						f.ld(p[h], 0, 1, weights[h])
						f.addI(4, p[h])
					}
				}
				for u := range m {
					for j := 0; j < vectors*lanes*e.bytes; j += 64 {
						f.prefetch(ahead, j)
					}
					e.loadScale(f, vp, off, scale)
					values := x[u%2]
					if e.bytes == 4 {
						f.ldRow(vp, 0, values)
					} else {
						for j := range values {
							e.load(f, vp, j*lanes*e.bytes, scale, values[j])
						}
					}
					f.outer(acc, values, func(h int) (vec, int) { return weights[h], u })
					f.add(ldv, vp)
					f.add(ldv, ahead)
				}
			})
		})
		f.loadParam("alpha", temp)
		f.mov(o, run)
		for h := range acc {
			a, old := weights[0], x[0]
			f.ld(temp, 4*h, 1, a)
			f.ldRow(run, 0, old)
			for j := range old {
				f.fmaAt(old[j], a, 0, acc[h][j])
			}
			f.stRow(acc[h], run, 0)
			f.add(ldo, run)
		}
		f.addI(vectors*bytes, o)
		f.addI(vectors*lanes*e.bytes, off)
	})
	f.ret()
}
