package main

const degree = 6

// exponential holds the polynomial's coefficients and the flush threshold.
type exponential struct {
	*function
	c     []vec
	flush vec
}

func (f *function) exponential() exponential {
	of := []constant{cFlush}
	for i := range degree + 1 {
		of = append(of, cExp0+constant(i))
	}
	v := f.constants(of...)
	return exponential{f, v[1:], v[0]}
}

// of replaces y by 2^y. With n = floor(y) and f = y-n,
//
//	2^y = 2^n · (1 + f·(c1 + f·(... + f·c6)))
//
// A mask clears results below 2^-126. NaN stays NaN.
func (e exponential) of(y vec) {
	e.scope(func() {
		n, lost, r, t := e.vec(), e.vec(), e.vec(), e.vec()
		e.greater(e.flush, y, lost) // false for NaN
		e.floor(y, n)
		e.fsub(y, n, y)
		r = e.horner(e.c, y, r, t)
		e.toInt(n, n)
		e.emit(vector, "VSHL $23, %s, %s", n.s4(), n.s4())
		e.words("VADD", r, n, r)
		e.andNot(r, lost, y)
	})
}

// horner computes the polynomial c of x in r and t, and returns which has it.
func (f *function) horner(c []vec, x, r, t vec) vec {
	last := len(c) - 1
	f.copy(c[last-1], r)
	f.fma(c[last], x, r)
	for i := last - 2; i >= 0; i-- {
		f.copy(c[i], t)
		f.fma(r, x, t)
		r, t = t, r
	}
	return r
}

// weights turns a score tile into weights.
func weights() {
	f := kernel("weights")
	p := f.params("s", "fours", "m", "mx", "l", "alpha")
	s, fours, pm, mx, l, alpha := p[0], p[1], p[2], p[3], p[4], p[5]
	e := f.exponential()
	m, sum := f.vectors(cols), f.vectors(cols)
	f.ldRow(pm, 0, sum)
	f.ldRow(mx, 0, m)
	f.stRow(m, pm, 0)
	for j := range m {
		f.fsub(sum[j], m[j], sum[j])
		e.of(sum[j])
	}
	f.stRow(sum, alpha, 0)
	f.zero(sum...)
	f.loop("row", fours, func() {
		p := f.vectors(4)
		for j := range m {
			for u := range p {
				f.ld(s, u*rowBytes+j*bytes, 4, p[u])
				f.fsub(p[u], m[j], p[u])
				e.of(p[u])
				f.st(p[u], s, u*rowBytes+j*bytes)
			}
			f.fadd(p[0], p[1], p[0])
			f.fadd(p[2], p[3], p[2])
			f.fadd(p[0], p[2], p[0])
			f.fadd(sum[j], p[0], sum[j])
		}
		f.addI(4*rowBytes, s)
	})
	x, old := m, f.vectors(cols)
	f.ldRow(alpha, 0, x)
	f.ldRow(l, 0, old)
	for j := range x {
		f.fmul(x[j], old[j], x[j])
		f.fadd(x[j], sum[j], x[j])
	}
	f.stRow(x, l, 0)
	f.ret()
}

// exp2 replaces vectors of x by 2^(x-m).
func exp2() {
	f := kernel("exp2")
	x, vectors := f.param("x"), f.param("vectors")
	m, e, y := f.broadcastParam("m"), f.exponential(), f.vec()
	f.each(x, vectors, y, y, func() {
		f.fsub(y, m, y)
		e.of(y)
	})
	f.ret()
}

// exp2Sum replaces vectors of x by 2^(x-m) and adds them to sum, lane by lane.
func exp2Sum() {
	f := kernel("exp2Sum")
	x, vectors, sum := f.param("x"), f.param("vectors"), f.param("sum")
	m, e, y, s := f.broadcastParam("m"), f.exponential(), f.vec(), f.vec()
	f.ld(sum, 0, 4, s)
	f.each(x, vectors, y, y, func() {
		f.fsub(y, m, y)
		e.of(y)
		f.fadd(s, y, s)
	})
	f.st(s, sum, 0)
	f.ret()
}

// scaleMax multiplies vectors of x by c and writes the largest product to mx.
func scaleMax() {
	f := kernel("scaleMax")
	x, vectors, mx := f.param("x"), f.param("vectors"), f.param("mx")
	c, m, y := f.broadcastParam("c"), f.constant(cNegInf), f.vec()
	f.loop("next", vectors, func() {
		f.ld(x, 0, 4, y)
		f.fmul(y, c, y)
		f.st(y, x, 0)
		f.larger(m, y, m)
		f.addI(bytes, x)
	})
	f.largestLane(m) // none is NaN
	f.emit(store, "FMOVS F%d, (%v)", m, mx)
	f.ret()
}

// rowWeights is weights for rows of scores with keys as lanes.
func rowWeights() {
	f := kernel("rowWeights")
	s, lds, vectors, rows, pm, l, alpha := f.param("s"), f.param("lds"), f.param("vectors"), f.param("rows"), f.param("m"), f.param("l"), f.param("alpha")
	e, y, mx, factor, sum := f.exponential(), f.vec(), f.vec(), f.vec(), f.vec()
	low := f.constant(cNegInf)
	x, n := f.gp(), f.gp()
	f.loop("row", rows, func() {
		f.copy(low, mx)
		f.mov(s, x)
		f.mov(vectors, n)
		f.loop("max", n, func() {
			f.ld(x, 0, 4, y)
			f.larger(mx, y, mx)
			f.addI(bytes, x)
		})
		f.largestLane(mx) // none is NaN
		f.emit(store, "FMOVS F%d, (%v)", mx, alpha)
		f.spread(alpha, mx)
		f.spread(pm, factor)
		f.larger(mx, factor, mx)
		f.emit(store, "FMOVS F%d, (%v)", mx, pm)
		f.fsub(factor, mx, factor)
		e.of(factor)
		f.emit(store, "FMOVS F%d, (%v)", factor, alpha)
		f.zero(sum)
		f.mov(s, x)
		f.mov(vectors, n)
		f.loop("vector", n, func() {
			f.ld(x, 0, 4, y)
			f.fsub(y, mx, y)
			e.of(y)
			f.st(y, x, 0)
			f.faddPairs(y, y, y)
			f.faddPairs(y, y, y)
			f.fadd(sum, y, sum)
			f.addI(bytes, x)
		})
		f.spread(l, y)
		f.fmul(factor, y, y)
		f.fadd(y, sum, y)
		f.emit(store, "FMOVS F%d, (%v)", y, l)
		f.add(lds, s)
		f.addI(4, pm, l, alpha)
	})
	f.ret()
}

// softcap replaces vectors of x by c·tanh(x).
func softcap() {
	f := kernel("softcap")
	x, vectors := f.param("x"), f.param("vectors")
	c, e := f.broadcastParam("c"), f.exponential()
	one := e.c[0]
	v := f.constants(cTwo, cTen, c2Log2E, cSmall, cSign)
	two, ten, scale, small, sign := v[0], v[1], v[2], v[3], v[4]
	tanh := f.constants(cTanh0, cTanh0+1, cTanh0+2, cTanh0+3, cTanh0+4, cTanh0+5)
	y := f.vec()
	f.each(x, vectors, y, y, func() {
		size, big := f.vec(), f.vec()
		f.abs(y, size)
		// 1 - 2/(e^2|y| + 1), with y's sign.
		f.fmin(ten, size, big)
		f.fmul(big, scale, big)
		e.of(big)
		f.fadd(big, one, big)
		f.fdiv(two, big, big)
		f.fsub(one, big, big)
		f.where(sign, y, big)
		// y + y·z·q(z), z = y²
		z, q, t := f.vec(), f.vec(), f.vec()
		f.fmul(y, y, z)
		q = f.horner(tanh, z, q, t)
		f.fmul(y, z, z)
		f.fma(q, z, y)
		f.greater(size, small, size)
		f.where(size, big, y)
		f.fmul(y, c, y)
	})
	f.ret()
}

// bounds holds the constants of biases.
type bounds struct{ scale, high, low, inf vec }

func (f *function) bounds() bounds {
	v := f.constants(cLog2E, cHigh, cLow, cInf)
	return bounds{v[0], v[1], v[2], v[3]}
}

// bounded writes y bounded to ±2^127 to d; NaN stays NaN.
func (f *function) bounded(b bounds, y, d vec) {
	f.fmax(y, b.low, d)
	f.fmin(d, b.high, d)
}

// addBias computes s += log2(e)·y, with finite y bounded to ±2^127, or s = y where y is
// infinite.
func (f *function) addBias(b bounds, s, y vec) {
	f.scope(func() {
		t := f.vec()
		f.bounded(b, y, t)
		f.addBounded(b, s, y, t)
	})
}

// addBounded computes s += log2(e)·t, or s = y where y is infinite, and overwrites t.
func (f *function) addBounded(b bounds, s, y, t vec) {
	f.fma(t, b.scale, s)
	f.absAtLeast(y, b.inf, t)
	f.where(t, y, s)
}

// bias adds log2(e)·b to vectors of x.
func bias() {
	f := kernel("bias")
	x, b, vectors := f.param("x"), f.param("b"), f.param("vectors")
	limits, s, y := f.bounds(), f.vec(), f.vec()
	f.loop("next", vectors, func() {
		f.ld(b, 0, 4, y)
		f.ld(x, 0, 4, s)
		f.addBias(limits, s, y)
		f.st(s, x, 0)
		f.addI(bytes, x, b)
	})
	f.ret()
}

// join adds vectors of b, which are bounded, to those of x, which it bounds before and
// after. Infinite elements win over finite ones, and -Inf over +Inf.
func join() {
	f := kernel("join")
	x, b, vectors := f.param("x"), f.param("b"), f.param("vectors")
	limits, negInf := f.bounds(), f.constant(cNegInf)
	y, z, sum := f.vec(), f.vec(), f.vec()
	f.loop("next", vectors, func() {
		f.ld(x, 0, 4, y)
		f.ld(b, 0, 4, z)
		f.joined(limits, negInf, y, z, z, sum)
		f.st(sum, x, 0)
		f.addI(bytes, x, b)
	})
	f.ret()
}

// joined writes the sum of the biases y and z to sum; bounded is z where that is finite.
func (f *function) joined(limits bounds, negInf, y, z, bounded, sum vec) {
	f.scope(func() {
		is := f.vec()
		f.bounded(limits, y, sum)
		f.fadd(sum, bounded, sum)
		f.bounded(limits, sum, sum)
		for _, v := range []vec{z, y} {
			f.absAtLeast(v, limits.inf, is)
			f.where(is, v, sum)
		}
		f.equal(z, negInf, is)
		f.where(is, z, sum)
	})
}

// limit returns a function that bounds y to ±limit, a parameter, and writes it to z.
func (f *function) limit() func(y, z vec) {
	high, low := f.broadcastParam("limit"), f.vec()
	f.zero(low)
	f.fsub(low, high, low)
	return func(y, z vec) {
		f.fmax(y, low, z)
		f.fmin(z, high, z)
	}
}

// bound clamps finite elements of vectors of x to ±limit.
func bound() {
	f := kernel("bound")
	x, vectors := f.param("x"), f.param("vectors")
	within, inf, y, z, is := f.limit(), f.constant(cInf), f.vec(), f.vec(), f.vec()
	f.each(x, vectors, y, z, func() {
		within(y, z)
		f.absAtLeast(y, inf, is)
		f.where(is, y, z)
	})
	f.ret()
}

// biasSquares adds the transposes of squares of biases to squares of scores.
func biasSquares() {
	f := kernel("biasSquares")
	s, b, ldb, squares, mx := f.param("s"), f.param("b"), f.param("ldb"), f.param("squares"), f.param("mx")
	limits, within, rows, m, x, z, from := f.bounds(), f.limit(), f.vectors(lanes), f.vec(), f.vec(), f.vec(), f.gp()
	f.ld(mx, 0, 4, m)
	f.loop("square", squares, func() {
		f.mov(b, from)
		for i := range rows {
			f.ldStep(from, ldb, rows[i])
		}
		f.transpose(rows)
		for i, y := range rows {
			f.ld(s, i*rowBytes, 4, x)
			within(y, z)
			f.addBounded(limits, x, y, z)
			f.st(x, s, i*rowBytes)
			f.larger(m, x, m)
		}
		f.addI(lanes*rowBytes, s)
		f.addI(bytes, b)
	})
	f.st(m, mx, 0)
	f.ret()
}

// diagonal adds biases by distance: each row of scores reads the biases one element
// before those of the previous row.
func diagonal() {
	f := kernel("diagonal")
	s, b, rows, mx := f.param("s"), f.param("b"), f.param("rows"), f.param("mx")
	limits, m, x, y := f.bounds(), f.vectors(cols), f.vectors(cols), f.vectors(cols)
	f.ldRow(mx, 0, m)
	f.loop("row", rows, func() {
		f.ldRow(b, 0, y)
		f.ldRow(s, 0, x)
		for c := range m {
			f.addBias(limits, x[c], y[c])
			f.larger(m[c], x[c], m[c])
		}
		f.stRow(x, s, 0)
		f.addI(-4, b)
		f.addI(rowBytes, s)
	})
	f.stRow(m, mx, 0)
	f.ret()
}

// slopes adds multiples of the distances between rows and keys, d at the first key.
func slopes() {
	f := kernel("slopes")
	p := f.params("s", "d", "factors", "fours", "mx")
	s, fours, mx := p[0], p[3], p[4]
	c, at, factors, m, x, far := f.constants(cOne, cLog2E), f.vectors(cols), f.vectors(cols), f.vectors(cols), f.vectors(cols), f.vec()
	f.ldRow(p[1], 0, at)
	f.ldRow(p[2], 0, factors)
	f.ldRow(mx, 0, m)
	f.loop("row", fours, func() {
		for range 4 {
			f.ldRow(s, 0, x)
			for j := range m {
				f.abs(at[j], far)
				f.fmul(factors[j], far, far)
				f.fma(far, c[1], x[j])
				f.larger(m[j], x[j], m[j])
				f.fadd(at[j], c[0], at[j])
			}
			f.stRow(x, s, 0)
			f.addI(rowBytes, s)
		}
	})
	f.stRow(m, mx, 0)
	f.ret()
}
