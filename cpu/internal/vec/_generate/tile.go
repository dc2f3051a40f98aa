package main

import (
	"fmt"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"

	"github.com/seed90331342/attn/cpu/internal/vec/_generate/tables"
)

// outer writes rows x cols multiply-adds: acc[i][j] += broadcast(at(i)) * b[j].
func (a *isa) outer(acc [][]reg.VecVirtual, b, t []reg.VecVirtual, u int, at func(i int) Mem) {
	for i := range acc {
		if len(t) == 0 {
			for j := range b {
				VFMADD231PS_BCST(at(i), b[j], acc[i][j])
			}
			continue
		}
		x := t[(u*len(acc)+i)%len(t)]
		VBROADCASTSS(at(i), x)
		for j := range b {
			VFMADD231PS(b[j], x, acc[i][j])
		}
	}
}

// accumulators returns the registers of a tile.
func (a *isa) accumulators(rows, cols int) [][]reg.VecVirtual {
	acc := make([][]reg.VecVirtual, rows)
	for i := range acc {
		acc[i] = a.vecs(cols)
	}
	return acc
}

// rowAt addresses element disp of row i of 4 rows ld apart; ld3 holds 3·ld.
func rowAt(base, ld, ld3 reg.Register, i, disp int) Mem {
	m := Mem{Base: base, Disp: disp}
	switch i {
	case 1:
		m.Index, m.Scale = ld, 1
	case 2:
		m.Index, m.Scale = ld, 2
	case 3:
		m.Index, m.Scale = ld3, 1
	}
	return m
}

// tripled returns 3·ld in a new register.
func tripled(ld reg.Register) reg.GPVirtual {
	ld3 := GP64()
	LEAQ(Mem{Base: ld, Index: ld, Scale: 2}, ld3)
	return ld3
}

// scores writes the score tile: rows keys against all lanes, groups times.
func (a *isa) scores(rows int) { a.scoresOf("scores", tables.Which{Rows: rows}, a.cols) }

// stepped reports whether kernels leave out vectors of rows from which keys are hidden. With vectors of 8 rows that takes as
// much time as it saves.
func (a *isa) stepped() bool { return a.wide() && a.cols > 1 }

// partialScores writes the score tiles of some vectors, which begin at any of the tile.
func (a *isa) partialScores() {
	for vectors := 1; vectors < a.cols; vectors++ {
		rows := a.rows[0]
		for rows*vectors < 8 { // chains
			rows *= 2
		}
		for _, rows := range []int{rows, 1} {
			a.scoresOf("someScores", tables.Which{Rows: rows, Vectors: vectors}, vectors)
		}
	}
}

// scoresOf writes the score tile of so many vectors of each row.
func (a *isa) scoresOf(field string, which tables.Which, vectors int) {
	rows := which.Rows
	a.oneOf(field, which)
	s, k, ld, qt, d, groups := param("s"), param("k"), param("ldk"), argument("qt"), argument("d"), argument("groups")
	ld3 := tripled(ld)
	q := GP64()
	kp := make([]reg.GPVirtual, (rows+3)/4) // keys 0, 4, 8 and so on of the group
	for g := range kp {
		kp[g] = GP64()
	}
	acc, b, t := a.accumulators(rows, vectors), a.vecs(vectors), a.vecs(a.temps)
	ahead := held(argument("run"))
	Label("group")
	if rows >= 8 {
		ahead.overlap(1)
	}
	MOVQ(k, kp[0])
	for g := range kp[1:] {
		LEAQ(Mem{Base: kp[g], Index: ld, Scale: 4}, kp[g+1])
	}
	MOVQ(qt, q)
	a.clear(acc)
	countByFour("dim", d, func(n int, left reg.GPVirtual) {
		keepUp := ahead.keepUp("dim", left, n, rows)
		for u := range n {
			for j := range b {
				VMOVUPS(a.at(q, u*a.cols+j), b[j])
			}
			a.outer(acc, b, t, u, func(i int) Mem { return rowAt(kp[i/4], ld, ld3, i%4, 4*u) })
			keepUp()
		}
		ADDQ(U32(uint32(n*a.rowBytes())), q)
		for g := range kp {
			ADDQ(Imm(uint64(4*n)), kp[g])
		}
	})
	for i := range acc {
		for j := range b {
			VMOVUPS(acc[i][j], a.at(s, i*a.cols+j))
		}
	}
	for step := 1; step < rows; step *= 2 {
		for i := 0; i+step < rows; i += 2 * step {
			for j := range b {
				VMAXPS(acc[i+step][j], acc[i][j], acc[i][j])
			}
		}
	}
	mx := param("mx")
	for j := range b {
		VMAXPS(a.at(mx, j), acc[0][j], acc[0][j])
		VMOVUPS(acc[0][j], a.at(mx, j))
	}
	ADDQ(U32(uint32(rows*a.rowBytes())), s)
	for range rows / 4 {
		LEAQ(Mem{Base: k, Index: ld, Scale: 4}, k)
	}
	for range rows % 4 {
		ADDQ(ld, k)
	}
	DECQ(groups)
	JNZ(LabelRef("group"))
	ahead.save()
	end()
}

// values writes the value tile: rows elements of the outputs of all lanes, groups times. The
// values are those of n runs.
func (a *isa) values(rows int) {
	a.oneOf("values", tables.Which{Rows: rows})
	o, ld, groups, first := param("o"), param("ldv"), param("groups"), argument("first")
	ld3 := tripled(ld)
	vp, p, ahead := GP64(), GP64(), chainOfRuns()
	acc, b, t := a.accumulators(rows, a.cols), a.vecs(a.cols), a.vecs(a.temps)
	Label("group")
	if rows >= 8 {
		ahead.overlap(1)
	}
	MOVQ(argument("p"), p)
	a.clear(acc)
	if a.stepped() {
		runs, before := GP64(), GP64()
		MOVQ(argument("up"), before)
		TESTQ(before, before)
		JZ(LabelRef("all"))
		MOVQ(argument("runs"), runs)
		MOVQ(Mem{Base: runs, Disp: runRows}, vp)
		ADDQ(first, vp)
		IMULQ(ld, before)
		SUBQ(before, vp)
		a.stairs("up", acc, b, t, vp, p, ld)
		Label("all")
	}
	eachRun(vp, first, ahead, func(keys Mem, ahead *lookahead) {
		countByFour("key", keys, func(n int, left reg.GPVirtual) {
			keepUp := ahead.keepUp("key", left, n, rows)
			for u := range n {
				for j := range b {
					VMOVUPS(a.at(p, u*a.cols+j), b[j])
				}
				a.outer(acc, b, t, u, func(i int) Mem { return rowAt(vp, ld, ld3, u, 4*i) })
				keepUp()
			}
			ADDQ(U32(uint32(n*a.rowBytes())), p)
			skip(n, vp, ld)
		})
	})
	if a.stepped() {
		a.stairs("down", acc, b, t, vp, p, ld)
	}
	a.load(param("alpha"), b)
	for i := range acc {
		for j := range b {
			VFMADD231PS(a.at(o, i*a.cols+j), b[j], acc[i][j])
			VMOVUPS(acc[i][j], a.at(o, i*a.cols+j))
		}
	}
	ADDQ(U32(uint32(rows*a.rowBytes())), o)
	ADDQ(Imm(uint64(4*rows)), first)
	DECQ(groups)
	JNZ(LabelRef("group"))
	ahead.saveChain()
	end()
}

// stairs adds the products of as many values as an argument states, of which each lanes are seen by one vector more, from
// the first vector on, or by one less, to the last.
func (a *isa) stairs(argumentName string, acc [][]reg.VecVirtual, b, t []reg.VecVirtual, vp, p, ld reg.GPVirtual) {
	left, n := GP64(), GP64()
	MOVQ(argument(argumentName), left)
	for v := 1; v < a.cols; v++ {
		from, to := v, a.cols
		if argumentName == "up" {
			from, to = 0, v
		}
		next := fmt.Sprint(argumentName, v+1)
		if argumentName == "up" { // all but those of the steps that follow
			LEAQ(Mem{Base: left, Disp: -(a.cols - 1 - v) * a.lanes}, n)
			TESTQ(n, n)
			JLE(LabelRef(next))
		} else {
			MOVQ(U32(uint32(a.lanes)), n)
			CMPQ(left, n)
			CMOVQLT(left, n)
			TESTQ(n, n)
			JZ(LabelRef(next))
		}
		SUBQ(n, left)
		sums := make([][]reg.VecVirtual, len(acc))
		for i := range acc {
			sums[i] = acc[i][from:to]
		}
		loop(argumentName+fmt.Sprint("_vectors", v), n, 1, func() {
			for j := from; j < to; j++ {
				VMOVUPS(a.at(p, j), b[j])
			}
			a.outer(sums, b[from:to], t, 0, func(i int) Mem { return Mem{Base: vp, Disp: 4 * i} })
			ADDQ(U32(uint32(a.rowBytes())), p)
			ADDQ(ld, vp)
		})
		Label(next)
	}
}

// rowValues writes the values of a tile of b's query rows with elements as lanes: the outputs
// of all rows, some vectors at a time. Masks end the last ones. After the keys of the runs come those of the stairs, each of
// which one row less takes.
func (a *isa) rowValues(b *isa, vectors int) {
	a.text(b, "rowValues", tables.Which{Rows: b.lanes, Vectors: vectors}, NOSPLIT)
	o, ld, left, first := param("o"), param("ldv"), param("d"), argument("first")
	ld3 := tripled(ld)
	vp, p, ahead := GP64(), GP64(), chainOfRuns()
	x, w, k := a.vecs(vectors), a.vecs(3), make([]reg.OpmaskVirtual, vectors)
	acc := a.accumulators(b.lanes, vectors)
	// add adds the products of key u of the next ones for the rows from r on.
	add := func(u, r int, fetch func()) {
		for j := range x {
			VMOVUPS_Z(rowAt(vp, ld, ld3, u, j*a.bytes()), k[j], x[j])
		}
		for ; r < len(acc); r++ {
			weight, y := Mem{Base: p, Disp: u*b.bytes() + 4*r}, w[(u*len(acc)+r)%len(w)]
			if vectors > 1 {
				VBROADCASTSS(weight, y)
			}
			for j := range x {
				if vectors > 1 {
					VFMADD231PS(x[j], y, acc[r][j])
				} else {
					VFMADD231PS_BCST(weight, x[j], acc[r][j])
				}
			}
			fetch()
		}
	}
	advanceKeys := func(n int) {
		ADDQ(U32(uint32(n*b.bytes())), p)
		skip(n, vp, ld)
	}
	Label("strip")
	ahead.overlap(4)
	mask := GP64()
	MOVQ(I32(-1), mask)
	CMPQ(left, U32(uint32(vectors*a.lanes)))
	JGE(LabelRef("whole"))
	BZHIQ(left, mask, mask)
	Label("whole")
	for j := range k {
		k[j] = K()
		KMOVW(mask.As32(), k[j])
		SHRQ(Imm(uint64(a.lanes)), mask)
	}
	MOVQ(argument("p"), p)
	a.clear(acc)
	eachRun(vp, first, ahead, func(keys Mem, ahead *lookahead) {
		byFour("key", keys, func(n int) {
			var lines []func()
			if n == 4 {
				lines = ahead.lines("key", 4*vectors*a.bytes()/256)
			}
			fetch := among(n*len(acc), lines)
			for u := range n {
				add(u, 0, fetch)
			}
			advanceKeys(n)
		})
	})
	stairs := GP64()
	MOVQ(argument("stairs"), stairs)
	for r := 1; r < len(acc); r++ {
		DECQ(stairs)
		JS(LabelRef("added"))
		add(0, r, func() {})
		advanceKeys(1)
	}
	Label("added")
	op, alpha := GP64(), GP64()
	MOVQ(o, op)
	MOVQ(argument("alpha"), alpha)
	for r := range acc {
		VBROADCASTSS(Mem{Base: alpha, Disp: 4 * r}, w[0])
		for j := range x {
			VMOVUPS_Z(a.at(op, j), k[j], x[j])
			VFMADD231PS(x[j], w[0], acc[r][j])
			VMOVUPS(acc[r][j], k[j], a.at(op, j))
		}
		ADDQ(argument("ldo"), op)
	}
	advance(vectors*a.bytes(), o, first)
	SUBQ(U32(uint32(vectors*a.lanes)), left)
	JG(LabelRef("strip"))
	ahead.saveChain()
	end()
}

// foldRows writes dst = x*a + y*b, with three roundings, for rows of vectors with a factor each. Without y it adds 0.
func (a *isa) foldRows() {
	a.kernel("foldRows")
	dst, ldd, x, y, rows, vectors := param("dst"), param("ldd"), param("x"), param("y"), param("rows"), param("vectors")
	pa, pb, to, n := param("a"), param("b"), GP64(), GP64()
	va, vb, l, r := a.vec(), a.vec(), a.vec(), a.vec()
	a.zero(r)
	loop("row", rows, 1, func() {
		VBROADCASTSS(Mem{Base: pa}, va)
		TESTQ(y, y)
		JZ(LabelRef("alone"))
		VBROADCASTSS(Mem{Base: pb}, vb)
		ADDQ(Imm(4), pb)
		Label("alone")
		ADDQ(Imm(4), pa)
		MOVQ(dst, to)
		MOVQ(vectors, n)
		loop("vector", n, 1, func() {
			VMULPS(a.at(x, 0), va, l)
			TESTQ(y, y)
			JZ(LabelRef("zero"))
			VMULPS(a.at(y, 0), vb, r)
			ADDQ(U32(uint32(a.bytes())), y)
			Label("zero")
			VADDPS(r, l, l)
			VMOVUPS(l, a.at(to, 0))
			advance(a.bytes(), x, to)
		})
		ADDQ(ldd, dst)
	})
	end()
}

// fold writes o = o*a + x*b, with three roundings, for rows of all lanes.
func (a *isa) fold() {
	a.kernel("fold")
	o, x, rows, pa, pb := param("o"), param("x"), param("rows"), param("a"), param("b")
	va, vb := a.vecs(a.cols), a.vecs(a.cols)
	for j := range va {
		VMOVUPS(a.at(pa, j), va[j])
		VMOVUPS(a.at(pb, j), vb[j])
	}
	loop("row", rows, 1, func() {
		for j := range va {
			l, r := a.vec(), a.vec()
			VMULPS(a.at(o, j), va[j], l)
			VMULPS(a.at(x, j), vb[j], r)
			VADDPS(r, l, l)
			VMOVUPS(l, a.at(o, j))
		}
		advance(a.rowBytes(), o, x)
	})
	end()
}

// columnMax writes mx = max(mx, s) over rows of all lanes.
func (a *isa) columnMax() {
	a.kernel("columnMax")
	s, rows, mx := param("s"), param("rows"), param("mx")
	m := [4][]reg.VecVirtual{} // as many as hide the latency of a maximum
	for u := range m {
		m[u] = a.row(mx)
	}
	byFour("row", rows, func(n int) {
		for u := range n {
			for j := range m[u] {
				VMAXPS(a.at(s, u*a.cols+j), m[u][j], m[u][j])
			}
		}
		ADDQ(U32(uint32(n*a.rowBytes())), s)
	})
	for j := range a.cols {
		for u := 1; u < len(m); u++ {
			VMAXPS(m[u][j], m[0][j], m[0][j])
		}
		VMOVUPS(m[0][j], a.at(mx, j))
	}
	end()
}

// edge hides the keys outside of each lane's range.
func (a *isa) edge() {
	a.kernel("edge")
	s, rows, lo, hi := param("s"), param("rows"), param("lo"), param("hi")
	j, one, hidden := a.vec(), a.vec(), a.constant(cNegInf)
	VPBROADCASTD(argument("key"), j) // an SSE move to a register takes 100 ns after wide vectors
	if a.masks() {
		VPTERNLOGD(U8(0xff), one, one, one)
	} else {
		VPCMPEQD(one, one, one)
	}
	los, his := a.vecs(a.cols), a.vecs(a.cols)
	for c := range los {
		VMOVUPS(a.at(lo, c), los[c])
		VMOVUPS(a.at(hi, c), his[c])
		if a.masks() { // key j is visible if j - lo is less than hi - lo, unsigned
			VPMAXSD(los[c], his[c], his[c])
			VPSUBD(los[c], his[c], his[c])
			VPSUBD(los[c], j, los[c])
		}
	}
	if a.masks() {
		loop("row", rows, 1, func() {
			for c := range los {
				k := K()
				VPCMPUD(Imm(5), his[c], los[c], k) // not less than
				VMOVUPS(hidden, k, a.at(s, c))
				VPSUBD(one, los[c], los[c])
			}
			ADDQ(U32(uint32(a.rowBytes())), s)
		})
		end()
		return
	}
	loop("row", rows, 1, func() {
		for c := range los {
			x := a.vec()
			before := a.vec()
			VPCMPGTD(j, los[c], before) // lo > j
			VPCMPGTD(j, his[c], x)      // hi > j
			VPANDN(x, before, x)
			VBLENDVPS(x, a.at(s, c), hidden, x)
			VMOVUPS(x, a.at(s, c))
		}
		VPSUBD(one, j, j)
		ADDQ(U32(uint32(a.rowBytes())), s)
	})
	end()
}
