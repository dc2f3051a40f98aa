package main

import "math"

// rankOne computes o = alpha*o + p·x for rows of o, each with a number of alpha and one of p. It does not prefetch.
func rankOne() {
	f := kernel("rankOne")
	o, ldo, x, p, alpha, rows, vectors := f.param("o"), f.param("ldo"), f.param("x"), f.param("p"), f.param("alpha"), f.param("rows"), f.param("vectors")
	w, factor, old, y, op, xp, n := f.vec(), f.vec(), f.vec(), f.vec(), f.gp(), f.gp(), f.gp()
	f.loop("row", rows, func() {
		f.spread(p, w)
		f.spread(alpha, factor)
		f.mov(o, op)
		f.mov(x, xp)
		f.mov(vectors, n)
		f.loop("vector", n, func() {
			f.ldNext(xp, y)
			f.fmul(y, w, y)
			f.ld(op, 0, 4, old)
			f.fma(old, factor, y)
			f.st(y, op, 0)
			f.addI(bytes, op)
		})
		f.add(ldo, o)
		f.addI(4, p, alpha)
	})
	f.ret()
}

// productSum computes o = x·y + z.
func productSum() {
	f := kernel("productSum")
	args := f.params("o", "x", "y", "z", "vectors")
	a, b, sum := f.vec(), f.vec(), f.vec()
	f.loop("vector", args[4], func() {
		f.ldNext(args[1], a)
		f.ldNext(args[2], b)
		f.ldNext(args[3], sum)
		f.fma(a, b, sum)
		f.st(sum, args[0], 0)
		f.addI(bytes, args[0])
	})
	f.ret()
}

// silu replaces vectors of x by x/(1 + exp(-x)). With e = exp(-|x|) it is x/(1+e), times e where x is negative.
func silu() {
	f := kernel("silu")
	x, vectors := f.param("x"), f.param("vectors")
	e, v, y, p, size, factor := f.exponential(), f.constants(cLog2E, cSign), f.vec(), f.vec(), f.vec(), f.vec()
	one := e.c[0]
	f.each(x, vectors, y, y, func() {
		f.abs(y, size)
		f.bits("VORR", v[1], size, p)
		f.fmul(p, v[0], p)
		e.of(p)
		f.copy(p, factor)
		f.equal(y, size, size)
		f.where(size, one, factor)
		f.fmul(y, factor, y)
		f.fadd(p, one, p)
		f.fdiv(y, p, y)
	})
	f.ret()
}

// sumsFrom replaces columns of x by their sums less those up to row ref, in units of log2 e. It computes both sums twice
// rather than keep them.
func sumsFrom() {
	f := kernel("sumsFrom")
	args := f.params("x", "minus", "ld", "rows", "ref", "at", "vectors")
	x, minus, ld, rows, ref, at, vectors := args[0], args[1], args[2], args[3], args[4], args[5], args[6]
	xp, mp, n, scale, before, sums, y, to := f.gp(), f.gp(), f.gp(), f.vec(), f.vectors(2), f.vectors(2), f.vectors(2), f.vec()
	f.emit(integer, "MOVD $%#x, %v", math.Float64bits(math.Log2E), n)
	f.emit(vector, "VDUP %v, %s", n, scale.d2())
	double := func(base uint32, name string, n, m, d vec) {
		f.word(vector, base|uint32(m)<<16|uint32(n)<<5|uint32(d), "%s V%d.2D, V%d.2D, V%d.2D", name, d, n, m)
	}
	add := func(sums []vec) { // the row at xp
		f.ldStep(xp, ld, to)
		for i, half := range []uint32{0, 1 << 30} { // the upper half of a vector
			f.word(vector, half|0x0e617800|uint32(to)<<5|uint32(y[i]), "FCVTL V%d.2D, V%d.2S", y[i], to)
			double(0x4e60d400, "FADD", sums[i], y[i], sums[i])
		}
	}
	round := func() {
		for i, half := range []uint32{0, 1 << 30} {
			double(0x6e60dc00, "FMUL", y[i], scale, y[i])
			f.word(vector, half|0x0e616800|uint32(y[i])<<5|uint32(to), "FCVTN V%d.2S, V%d.2D", to, y[i])
		}
	}
	f.loop("vector", vectors, func() {
		f.mov(x, xp)
		f.zero(append(before, sums...)...)
		f.emit(integer, "ADD $1, %v, %v", ref, n)
		f.loop("before", n, func() { add(before) })
		f.mov(x, xp)
		f.mov(minus, mp)
		f.mov(rows, n)
		f.loop("row", n, func() {
			row := f.gp()
			f.mov(xp, row)
			add(sums)
			for i := range y {
				double(0x4ee0d400, "FSUB", sums[i], before[i], y[i])
			}
			round()
			f.st(to, row, 0)
			f.two(0x6ea0f800, "FNEG", to, to)
			f.st(to, mp, 0)
			f.add(ld, mp)
		})
		for i := range y {
			f.copy(before[i], y[i])
		}
		round()
		f.st(to, at, 0)
		f.addI(bytes, x, minus, at)
	})
	f.ret()
}
