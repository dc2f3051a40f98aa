package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// elementF8 is not one of elements: AVX-512 converts rows first. To take one byte of 16 words out of a
// vector it needs two shuffles, and there was no such processor to measure what else would be faster.
var elementF8 = element{"F8", 1, 0, (*isa).readF8, splitF8, nil}

// halvesF8 turns words of 16 bits into float16. Bits 15 and 14 of a word are the sign of a number in e4m3fn and bits 13
// to 7 the rest of it, which has the value that they have in float16 times 2^8, exactly, also for subnormal numbers: the
// conversion of these takes no longer, while multiplying subnormal float32 does on many processors. NaN becomes ±480.
func halvesF8(words reg.Register) { VPAND(cHalfF8.mem(), words, words) }

// readHalvesF8 reads bytes as float16, as halvesF8 does.
func readHalvesF8(m Mem, words reg.Register) {
	VPMOVSXBW(m, words)
	VPSLLW(Imm(7), words, words)
	halvesF8(words)
}

// readF8 is element.load.
func (a *isa) readF8(m, _ Mem, to reg.VecVirtual) {
	var words, t reg.Register = to.AsX(), a.vec().AsX()
	if a.wide() {
		words, t = to.AsY(), a.vec().AsY()
	}
	readHalvesF8(m, words)
	VPADDW(words, words, t) // without its sign
	VPCMPEQW(cNaNF8.mem(), t, t)
	VPOR(t, words, words)
	VCVTPH2PS(words, to)
	VMULPS(cUpF8.mem(), to, to)
}

// seenF8 has the largest of the bytes seen at each place, with bit 7 set: 255 means that one was NaN. A kernel looks for
// it once, after many bytes: NaN makes a whole score or output NaN, whatever its other factor is.
type seenF8 struct{ most, bit7 reg.VecVirtual }

func (a *isa) seenF8() *seenF8 {
	return &seenF8{a.vec(), a.constant(cOffset)}
}

// read reads vectors, 1, 2 or 4, at m that are 2^8 times smaller, with NaN as ±480.
func (s *seenF8) read(a *isa, m Mem, x []reg.VecVirtual) {
	t := a.vec()
	switch len(x) {
	case 1:
		VMOVQ(m, t.AsX())
		VPOR(t.AsX(), s.bit7.AsX(), t.AsX())
		VPMAXUB(t.AsX(), s.most.AsX(), s.most.AsX())
		readHalvesF8(m, x[0].AsX())
		VCVTPH2PS(x[0].AsX(), x[0])
		return
	case 2:
		VPOR(m, s.bit7.AsX(), t.AsX())
		VPMAXUB(t.AsX(), s.most.AsX(), s.most.AsX())
	default:
		VPOR(m, s.bit7, t)
		VPMAXUB(t, s.most, s.most)
	}
	for j := 0; j < len(x); j += 2 {
		low, high := x[j], x[j+1]
		readHalvesF8(m.Offset(j*a.lanes), high)
		VCVTPH2PS(high.AsX(), low)
		VEXTRACTI128(Imm(1), high, high.AsX())
		VCVTPH2PS(high.AsX(), high)
	}
}

// spread makes acc, the sums of vectors, NaN in the places where s has seen it.
func (s *seenF8) spread(a *isa, acc [][]reg.VecVirtual) {
	VPCMPEQD(s.bit7, s.bit7, s.bit7)
	VPCMPEQB(s.bit7, s.most, s.most)
	for j := range acc[0] {
		nan := a.vec()
		VPMOVSXBD(s.most.AsX(), nan)
		for h := range acc {
			VPOR(nan, acc[h][j], acc[h][j])
		}
		switch {
		case j == len(acc[0])-1:
		case j == 1:
			VEXTRACTI128(Imm(1), s.most, s.most.AsX())
		default:
			VPSRLDQ(Imm(8), s.most.AsX(), nan.AsX())
			VPBLENDD(Imm(3), nan, s.most, s.most) // the lower half is done
		}
	}
}

func (a *isa) loadF8() {
	a.loadVectors("F8", 1, func(src Mem, dst reg.VecVirtual) { a.readF8(src, Mem{}, dst) })
}

// splitF8 is element.split for numbers that are 2^8 times smaller, with NaN as ±480. It converts two elements of each row
// at once.
func splitF8(a *dotsKernel, w reg.VecVirtual, _ Mem) func(int) reg.VecVirtual {
	both := a.vec()
	return func(n int) reg.VecVirtual {
		x := a.vec()
		if n%2 == 0 {
			VPSHUFB((cSplitF8 + constant(n/2)).mem(), w, both)
			VPSRAW(Imm(1), both, both)
			halvesF8(both)
			VPERMQ(Imm(0xd8), both, both)
			VCVTPH2PS(both.AsX(), x)
		} else {
			VEXTRACTI128(Imm(1), both, x.AsX())
			VCVTPH2PS(x.AsX(), x)
		}
		return x
	}
}

// seeF8 adds words of a group's rows to what it has seen, as seenF8 does.
func (d *dotsKernel) seeF8(words []reg.VecVirtual, g int) {
	most, t := d.vec(), d.vec()
	VMOVUPS(d.seen.Offset(g*d.isa.bytes()), most)
	for _, w := range words {
		VPOR(cOffset.mem(), w, t)
		VPMAXUB(t, most, most)
	}
	VMOVUPS(most, d.seen.Offset(g*d.isa.bytes()))
}

// scoresF8 turns the sums of a group into scores.
func (t *dotsTile) scoresF8(g int) {
	ones, nan := t.d.vec(), t.d.vec()
	VPCMPEQD(ones, ones, ones)
	VPCMPEQB(t.d.seen.Offset(g*t.d.isa.bytes()), ones, nan)
	zero := t.d.vec()
	t.d.zero(zero)
	VPCMPEQD(zero, nan, nan)
	VPXOR(ones, nan, nan)
	for _, x := range t.acc[g] {
		VMULPS(cUpF8.mem(), x, x)
		VPOR(nan, x, x)
	}
}
