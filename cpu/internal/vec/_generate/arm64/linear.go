package main

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
