package main

import "github.com/seed90331342/attn/cpu/internal/vec/_generate/tables"

// transposeMul writes the transpose of a square of lanes x lanes, times mul.
func transposeMul() {
	f := kernel("transpose")
	p := f.params("dst", "ldd", "src", "lds", "mul")
	dst, ldd, src, lds := p[0], p[1], p[2], p[3]
	m, zero, x, rows := f.vec(), f.vec(), f.vec(), f.vectors(lanes)
	f.ld(p[4], 0, 4, m)
	f.zero(zero)
	for _, row := range rows {
		f.ldStep(src, lds, x)
		f.fmul(x, m, row) // two steps: one FMA leaves -0 where a negative product underflows
		f.fadd(row, zero, row)
	}
	f.transpose(rows)
	for i, row := range rows {
		f.st(row, dst, 0)
		if i < len(rows)-1 {
			f.add(ldd, dst)
		}
	}
	f.ret()
}

// nonFinite returns a number other than 0 when one of rows x vectors has NaN or Inf.
func nonFinite() {
	f := kernel("nonFinite")
	x, ld, rows, vectors := f.param("x"), f.param("ld"), f.param("rows"), f.param("vectors")
	zero, sums, y, p := f.vec(), f.vectors(4), f.vec(), f.gp() // as many sums as hide the latency of an FMA
	f.zero(zero)
	f.zero(sums...)
	f.loop("row", rows, func() {
		f.mov(x, p)
		f.byFour("vector", vectors, func(n int) {
			for _, sum := range sums[:n] {
				f.ldNext(p, y)
				f.fma(y, zero, sum) // 0·y is NaN for NaN and Inf only
			}
		})
		f.add(ld, x)
	})
	acc := sums[0]
	for _, sum := range sums[1:] {
		f.fadd(acc, sum, acc)
	}
	f.equal(acc, acc, acc) // all ones but where NaN
	f.bits("VEOR", acc, f.ones(), acc)
	f.largestWord(acc)
	f.emit(vector, "FMOVS F%d, %v", acc, p)
	f.emit(store, "MOVW %v, %s", p, f.arg("found"))
	f.ret()
}

// ones returns a register with all bits set.
func (f *function) ones() vec {
	v := f.vec()
	f.zero(v)
	f.isIntZero(v, v)
	return v
}

// load16 writes rows x vectors of 16 bit numbers as float32.
func load16(element string, convert func(f *function, n, d vec)) {
	f := oneOf("load", tables.Which{Element: element})
	f.rows(2, func(src, from, to gp) {
		x := f.vec()
		f.ld(from, 0, 2, x)
		convert(f, x, x)
		f.st(x, to, 0)
	}, nil)
	f.ret()
}

// rows repeats body for each vector of rows of src, whose elements have size bytes, and of
// dst. It calls begin at the beginning of a row.
func (f *function) rows(size int, body func(src, from, to gp), begin func(src gp)) {
	dst, ldd, src, lds, rows, vectors := f.param("dst"), f.param("ldd"), f.param("src"), f.param("lds"), f.param("rows"), f.param("vectors")
	to, from, n := f.gp(), f.gp(), f.gp()
	f.loop("row", rows, func() {
		f.mov(dst, to)
		f.mov(src, from)
		f.mov(vectors, n)
		if begin != nil {
			begin(src)
		}
		f.loop("vector", n, func() {
			body(src, from, to)
			f.addI(bytes, to)
			f.addI(lanes*size, from)
		})
		f.add(ldd, dst)
		f.add(lds, src)
	})
}

// loadQ8 writes rows x vectors of integers as float32, times the scale at the beginning
// of their row.
func loadQ8() {
	f := oneOf("load", tables.Which{Element: "Q8"})
	scale, x := f.vec(), f.vec()
	f.rows(1, func(_, from, to gp) {
		f.ld(from, 4, 1, x)
		f.fromBytes(true, x, x)
		f.fromInt(x, x)
		f.fmul(x, scale, x)
		f.st(x, to, 0)
	}, func(src gp) { f.spread(src, scale) })
	f.ret()
}

func loadF8() {
	f := oneOf("load", tables.Which{Element: "F8"})
	factors, x := f.vec(), f.vec()
	f.loadF8Factors(factors)
	f.rows(1, func(_, from, to gp) {
		f.ld(from, 0, 1, x)
		f.fromF8(x, factors, x)
		f.st(x, to, 0)
	}, nil)
	f.ret()
}

// store16 rounds vectors of src to 16 bits.
func store16(element string, convert func(f *function, n, d vec)) {
	f := oneOf("store", tables.Which{Element: element})
	dst, src, vectors := f.param("dst"), f.param("src"), f.param("vectors")
	x := f.vec()
	f.loop("next", vectors, func() {
		f.ldNext(src, x)
		convert(f, x, x)
		f.emit(store, "FMOVD F%d, (%v)", x, dst)
		f.addI(bytes/2, dst)
	})
	f.ret()
}

// hide writes -Inf to squares of scores where a mask, whose rows are lanes, is false.
func hide() {
	f := kernel("hide")
	s, mask, ld, squares := f.param("s"), f.param("mask"), f.param("ld"), f.param("squares")
	hidden, rows, x, p := f.constant(cNegInf), f.vectors(lanes), f.vec(), f.gp()
	f.loop("square", squares, func() {
		f.mov(mask, p)
		for i := range rows {
			f.ld(p, 0, 1, rows[i])
			f.fromBytes(false, rows[i], rows[i])
			if i < len(rows)-1 {
				f.add(ld, p)
			}
		}
		f.transpose(rows)
		for i, sees := range rows {
			f.ld(s, i*rowBytes, 4, x)
			f.isIntZero(sees, sees)
			f.where(sees, hidden, x)
			f.st(x, s, i*rowBytes)
		}
		f.addI(lanes*rowBytes, s)
		f.addI(lanes, mask)
	})
	f.ret()
}

// hideRow writes -Inf to vectors of x where mask is false.
func hideRow() {
	f := kernel("hideRow")
	x, mask, vectors := f.param("x"), f.param("mask"), f.param("vectors")
	hidden, sees, y := f.constant(cNegInf), f.vec(), f.vec()
	f.loop("next", vectors, func() {
		f.ld(mask, 0, 1, sees)
		f.fromBytes(false, sees, sees)
		f.isIntZero(sees, sees)
		f.ld(x, 0, 4, y)
		f.where(sees, hidden, y)
		f.st(y, x, 0)
		f.addI(bytes, x)
		f.addI(lanes, mask)
	})
	f.ret()
}
