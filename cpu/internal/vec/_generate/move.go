package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"

	"github.com/seed90331342/attn/cpu/internal/vec/_generate/tables"
)

// transposed returns the transpose of lanes rows of lanes elements. Between its instructions it
// calls all of jobs.
func (a *isa) transposed(r []reg.VecVirtual, jobs ...func()) []reg.VecVirtual {
	n := len(r)
	between := among(n+4, jobs)
	pairs := make([]reg.VecVirtual, n)
	for i := 0; i < n; i += 2 {
		pairs[i], pairs[i+1] = a.vec(), a.vec()
		VUNPCKLPS(r[i+1], r[i], pairs[i])
		VUNPCKHPS(r[i+1], r[i], pairs[i+1])
		between()
	}
	// quads[4g+c] holds, in each 128 bits, column c of that part of rows 4g..4g+3.
	quads := make([]reg.VecVirtual, n)
	for g := 0; g < n; g += 4 {
		for c := range 2 {
			quads[g+2*c], quads[g+2*c+1] = a.vec(), a.vec()
			VUNPCKLPD(pairs[g+2+c], pairs[g+c], quads[g+2*c])
			VUNPCKHPD(pairs[g+2+c], pairs[g+c], quads[g+2*c+1])
			between()
		}
	}
	out := make([]reg.VecVirtual, n)
	for c := range 4 {
		between()
		if !a.wide() {
			out[c], out[c+4] = a.vec(), a.vec()
			VPERM2F128(Imm(0x20), quads[4+c], quads[c], out[c])
			VPERM2F128(Imm(0x31), quads[4+c], quads[c], out[c+4])
			continue
		}
		even, odd, even2, odd2 := a.vec(), a.vec(), a.vec(), a.vec()
		VSHUFF32X4(U8(0x88), quads[4+c], quads[c], even) // columns c and 8+c of rows 0..7
		VSHUFF32X4(U8(0xdd), quads[4+c], quads[c], odd)  // columns 4+c and 12+c
		VSHUFF32X4(U8(0x88), quads[12+c], quads[8+c], even2)
		VSHUFF32X4(U8(0xdd), quads[12+c], quads[8+c], odd2)
		for i := range 4 {
			out[c+4*i] = a.vec()
		}
		VSHUFF32X4(U8(0x88), even2, even, out[c])
		VSHUFF32X4(U8(0x88), odd2, odd, out[c+4])
		VSHUFF32X4(U8(0xdd), even2, even, out[c+8])
		VSHUFF32X4(U8(0xdd), odd2, odd, out[c+12])
	}
	return out
}

// transpose writes the transpose of a square of lanes x lanes, times mul. It prefetches
// the rows 16 rows after those of both squares.
func (a *isa) transpose() {
	a.kernel("transpose")
	dst, ldd, src, lds, mul := param("dst"), param("ldd"), param("src"), param("lds"), param("mul")
	m, zero := a.vec(), a.vec()
	VMOVUPS(a.at(mul, 0), m)
	a.zero(zero)
	// Large tensors are not in the cache, and the processor does not predict so many rows.
	rows, from, to := a.vecs(a.lanes), GP64(), GP64()
	MOVQ(lds, from)
	SHLQ(Imm(4), from)
	MOVQ(ldd, to)
	SHLQ(Imm(4), to)
	for i := range rows {
		// Two steps: one FMA leaves -0 where a negative product underflows.
		VMULPS(a.at(src, 0), m, rows[i])
		VADDPS(zero, rows[i], rows[i])
		PREFETCHT0(Mem{Base: src, Index: from, Scale: 1})
		if i < len(rows)-1 {
			ADDQ(lds, src)
		}
	}
	out := a.transposed(rows)
	for i := range out {
		VMOVUPS(out[i], a.at(dst, 0))
		PREFETCHT0(Mem{Base: dst, Index: to, Scale: 1})
		if i < len(out)-1 {
			ADDQ(ldd, dst)
		}
	}
	end()
}

// biasSquares adds the transposes of squares of biases to squares of scores.
func (a *isa) biasSquares() {
	a.kernel("biasSquares")
	s, b, ld, squares, within := param("s"), param("b"), param("ldb"), param("squares"), a.limit()
	p, scale, m := GP64(), a.constant(cLog2E), a.vec()
	loop("square", squares, 1, func() {
		rows := a.vecs(a.lanes)
		MOVQ(b, p)
		for i := range rows {
			VMOVUPS(a.at(p, 0), rows[i])
			if i < len(rows)-1 {
				ADDQ(ld, p)
			}
		}
		MOVQ(argument("mx"), p)
		out := a.transposed(rows)
		VMOVUPS(a.at(p, 0), m)
		for i, y := range out {
			x := a.vec()
			VMOVUPS(Mem{Base: s, Disp: i * a.rowBytes()}, x)
			a.addBounded(x, y, within(y), scale)
			VMOVUPS(x, Mem{Base: s, Disp: i * a.rowBytes()})
			VMAXPS(m, x, m) // m where x is NaN
		}
		VMOVUPS(m, a.at(p, 0))
		ADDQ(U32(uint32(a.lanes*a.rowBytes())), s)
		ADDQ(U32(uint32(a.bytes())), b)
	})
	end()
}

// nonFinite returns a number other than 0 when one of rows x vectors has NaN or Inf.
func (a *isa) nonFinite() {
	a.kernel("nonFinite")
	x, ld, rows, vectors := param("x"), param("ld"), param("rows"), param("vectors")
	zero, sums := a.vec(), a.vecs(4) // as many as hide the latency of an FMA
	a.zero(zero)
	for i := range sums {
		a.zero(sums[i])
	}
	p := GP64()
	loop("row", rows, 1, func() {
		MOVQ(x, p)
		byFour("vector", vectors, func(n int) {
			for i := range n {
				VFMADD231PS(a.at(p, i), zero, sums[i]) // 0·x is NaN for NaN and Inf only
			}
			ADDQ(U32(uint32(n*a.bytes())), p)
		})
		ADDQ(ld, x)
	})
	acc := sums[0]
	for _, s := range sums[1:] {
		VADDPS(s, acc, acc)
	}
	r := GP32()
	if a.wide() {
		k := K()
		VCMPPS(Imm(3), acc, acc, k) // unordered
		KMOVW(k, r)
	} else {
		VCMPPS(Imm(3), acc, acc, acc)
		VMOVMSKPS(acc, r)
	}
	Store(r, Return("found"))
	end()
}

// loadRows writes rows of numbers as float32. begin writes what precedes all rows and open what
// precedes a row. convert reads some vectors of size bytes in all.
func (a *isa) loadRows(element, label string, vectors, size int, begin func(), open func(src reg.GPVirtual), convert func(from Mem, x []reg.VecVirtual)) {
	a.oneOf("load", tables.Which{Element: element})
	dst, ldd, src, lds, rows, count := param("dst"), param("ldd"), param("src"), param("lds"), param("rows"), param("vectors")
	to, from, n, ahead := GP64(), GP64(), GP64(), GP64()
	begin()
	loop("row", rows, 1, func() {
		MOVQ(dst, to)
		MOVQ(src, from)
		MOVQ(count, n)
		// Prefetch 32 rows ahead, as in mix.
		MOVQ(lds, ahead)
		SHLQ(Imm(5), ahead)
		ADDQ(src, ahead)
		open(src)
		loop(label, n, vectors, func() {
			x := a.vecs(vectors)
			PREFETCHT1(Mem{Base: ahead})
			advance(size, ahead)
			convert(Mem{Base: from}, x)
			a.store(x, to)
			advance(vectors*a.bytes(), to)
			advance(size, from)
		})
		ADDQ(ldd, dst)
		ADDQ(lds, src)
	})
	end()
}

// loadVectors is loadRows for rows without scales, which convert writes a vector at a time.
func (a *isa) loadVectors(element string, size int, convert func(src Mem, dst reg.VecVirtual)) {
	a.loadRows(element, "vector", 1, a.lanes*size, func() {}, func(reg.GPVirtual) {}, func(from Mem, x []reg.VecVirtual) { convert(from, x[0]) })
}

// loadQ8 writes integers times the scale at the beginning of their row.
func (a *isa) loadQ8() {
	var scale reg.VecVirtual
	a.loadRows("Q8", "vector", 1, a.lanes, func() {}, func(src reg.GPVirtual) {
		scale = a.vec()
		VBROADCASTSS(Mem{Base: src}, scale)
	}, func(from Mem, x []reg.VecVirtual) {
		VPMOVSXBD(from.Offset(4), x[0])
		VCVTDQ2PS(x[0], x[0])
		VMULPS(scale, x[0], x[0])
	})
}

func (a *isa) loadF16() {
	a.loadVectors("F16", 2, func(src Mem, dst reg.VecVirtual) { VCVTPH2PS(src, dst) })
}

func (a *isa) loadBF16() {
	a.loadVectors("BF16", 2, func(src Mem, dst reg.VecVirtual) {
		VPMOVZXWD(src, dst)
		VPSLLD(Imm(16), dst, dst)
	})
}

// storeVectors rounds vectors of src to 16 bits. convert writes one of them.
func (a *isa) storeVectors(element string, convert func(x reg.VecVirtual, dst Mem)) {
	a.oneOf("store", tables.Which{Element: element})
	dst, src, vectors := param("dst"), param("src"), param("vectors")
	loop("next", vectors, 1, func() {
		x := a.vec()
		VMOVUPS(a.at(src, 0), x)
		convert(x, Mem{Base: dst})
		advance(a.bytes(), src)
		advance(a.bytes()/2, dst)
	})
	end()
}

func (a *isa) storeF16() {
	a.storeVectors("F16", func(x reg.VecVirtual, dst Mem) { VCVTPS2PH(Imm(0), x, dst) })
}

// storeBF16 writes the upper half of x + 0x7fff + b, where b is the lowest bit of that half. For NaN it writes a quiet
// NaN, which the sum might not be. VCVTNEPS2BF16 has another result for subnormal numbers.
func (a *isa) storeBF16() {
	a.storeVectors("BF16", func(x reg.VecVirtual, dst Mem) {
		sum, quiet := a.vec(), a.vec()
		VPSLLD(Imm(15), x, sum)
		VPSRLD(Imm(31), sum, sum)
		VPADDD(x, sum, sum)
		VPADDD(cHalfBF16.mem(), sum, sum)
		if a.masks() {
			k := K()
			VPORD(cQuiet.mem(), x, quiet)
			VCMPPS(Imm(3), x, x, k) // NaN
			VMOVAPS(quiet, k, sum)
			VPSRLD(Imm(16), sum, sum)
			VPMOVDW(sum, dst)
			return
		}
		VPOR(cQuiet.mem(), x, quiet)
		VCMPPS(Imm(3), x, x, x)
		VBLENDVPS(x, quiet, sum, sum)
		VPSRLD(Imm(16), sum, sum)
		VPACKUSDW(sum, sum, sum) // each half twice
		VPERMQ(Imm(8), sum, sum)
		VMOVUPS(sum.AsX(), dst)
	})
}
