package main

import "github.com/seed90331342/attn/cpu/internal/vec/_generate/tables"

// drawStride is the distance between the vectors of a Draw, of whose 64 bit numbers the lower words matter.
const drawStride = 64

// draw holds what the turns of a loop over four counters share.
type draw struct {
	*function
	p, at, stride       gp
	first, second       vec // words, the second without the base
	base, step          vec
	head, batch, m0, m1 vec
	threshold, factor   vec
	c                   [4]vec // counters, then random words
	temps               []vec
}

func (f *function) draw(p gp) *draw {
	d := &draw{function: f, p: p, at: f.gp(), stride: f.gp()}
	f.emit(integer, "MOVD $%d, %v", drawStride, d.stride)
	d.first, d.second, d.head = d.packed(tables.DrawCounters), d.packed(tables.DrawKeys), d.packed(tables.DrawHeads)
	for _, x := range []struct {
		v     *vec
		field int
	}{{&d.base, tables.DrawBase}, {&d.step, tables.DrawStep}, {&d.batch, tables.DrawBatch}, {&d.m0, tables.DrawM0}, {&d.m1, tables.DrawM1},
		{&d.threshold, tables.DrawThreshold}, {&d.factor, tables.DrawFactor}} {
		*x.v = f.vec()
		f.emit(integer, "ADD $%d, %v, %v", x.field, p, d.at)
		f.spread(d.at, *x.v)
	}
	d.c, d.temps = [4]vec(f.vectors(4)), f.vectors(7)
	return d
}

// packed loads the lower words of the counters of two groups, two of each.
func (d *draw) packed(field int) vec {
	v := d.vec()
	d.scope(func() {
		other := d.vec()
		d.ld(d.p, field, 4, v)
		d.ld(d.p, field+drawStride, 4, other)
		d.words("VUZP1", v, other, v)
	})
	return v
}

// philox computes the ten rounds of Philox4x32 on the next four counters and returns the four
// words of each: word i of all in the i-th vector.
func (d *draw) philox() [4]vec {
	d.copy(d.first, d.c[0])
	d.words("VADD", d.second, d.base, d.c[1])
	d.copy(d.head, d.c[2])
	d.copy(d.batch, d.c[3])
	d.words("VADD", d.base, d.step, d.base)
	d.mov(d.p, d.at)
	c, t := d.c, d.temps
	even, odd, key := t[0], t[1], t[2]
	high0, low0, high1, low1 := t[3], t[4], t[5], t[6]
	for range 10 {
		d.products(c[0], d.m0, even, odd)
		d.words("VUZP1", even, odd, low0)
		d.words("VUZP2", even, odd, high0)
		d.products(c[2], d.m1, even, odd)
		d.words("VUZP1", even, odd, low1)
		d.words("VUZP2", even, odd, high1)
		for _, x := range []struct{ word, to vec }{{c[1], high1}, {c[3], high0}} {
			d.emit(load, "VLD1R.P (%v)(%v), [%s]", d.at, d.stride, key.s4())
			d.xor(x.to, x.word, x.to)
			d.xor(x.to, key, x.to)
		}
		was := c
		c = [4]vec{high1, low1, high0, low0}
		high1, low1, high0, low0 = was[0], was[1], was[2], was[3]
	}
	return c
}

// dropped multiplies the vector at s by the factor where words are at least the
// threshold, and by 0 elsewhere.
func (d *draw) dropped(words vec, s gp, offset int) {
	d.wordAtLeast(words, d.threshold, words)
	d.and(words, d.factor, words)
	x := d.temps[0]
	d.ld(s, offset, 4, x)
	d.fmul(x, words, x)
	d.st(x, s, offset)
}

// drop applies dropout to rows of all lanes: four counters have the words of a row.
func drop() {
	f := kernel("drop")
	p := f.params("s", "times", "d")
	s, times := p[0], p[1]
	d := f.draw(p[2])
	f.loop("row", times, func() {
		w := d.philox()
		f.transpose(w[:])
		for i, words := range w {
			d.dropped(words, s, i*bytes)
		}
		f.addI(rowBytes, s)
	})
	f.ret()
}

// dropRow applies dropout to vectors, step bytes apart: four counters, one for each element,
// have one word each.
func dropRow() {
	f := kernel("dropRow")
	p := f.params("s", "vectors", "d", "word", "step")
	x, vectors, word, step, left := p[0], p[1], p[3], p[4], f.gp()
	d := f.draw(p[2])
	f.loop("vector", vectors, func() {
		w := d.philox()
		f.mov(word, left)
		chosen := f.vec()
		for i := range w {
			f.copy(w[i], chosen)
			if i < len(w)-1 {
				f.emit(integer, "CBZ %v, chosen", left)
				f.addI(-1, left)
			}
		}
		f.label("chosen")
		d.dropped(chosen, x, 0)
		f.add(step, x)
	})
	f.ret()
}
