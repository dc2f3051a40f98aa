package main

import (
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// elementF8 is not one of elements: its mixes differ.
var elementF8 = element{"F8", 1, 0, (*isa).readF8, splitF8, nil}

// tablesF8 are the upper halves of the numbers of codes, from which VPERMI2B reads byte by byte. It ignores bit 7 of a code.
type tablesF8 struct {
	upper, lower [2]reg.VecVirtual
	zero         reg.VecVirtual
}

func (a *isa) tablesF8() *tablesF8 {
	t := &tablesF8{zero: a.vec()}
	a.zero(t.zero)
	for i := range t.upper {
		t.upper[i], t.lower[i] = a.constant(cUpperF8+constant(i)), a.constant(cLowerF8+constant(i))
	}
	return t
}

// numbers returns a function that returns vectors of the numbers of codes in turns: of bytes 4n to 4n+3 of each 128 bits.
// Each 64 codes take two look-ups, which with FMAs bind: unpacking is twice as fast as they are.
func (t *tablesF8) numbers(a *isa, codes reg.VecVirtual) func(n int) reg.VecVirtual {
	upper := a.vec()
	VMOVAPS(codes, upper)
	VPERMI2B(t.upper[1], t.upper[0], upper)
	VPTERNLOGD(U8(0xf8), cOffset.mem(), codes, upper) // upper | codes & sign
	VPERMI2B(t.lower[1], t.lower[0], codes)
	words := a.vecs(2)
	return func(n int) reg.VecVirtual {
		x := a.vec()
		if n == 0 {
			VPUNPCKLBW(upper, codes, words[0])
			VPUNPCKHBW(upper, codes, words[1])
		}
		if n%2 == 0 {
			VPUNPCKLWD(words[n/2], t.zero, x)
		} else {
			VPUNPCKHWD(words[n/2], t.zero, x)
		}
		return x
	}
}

// read returns vectors at m. order has cRowsF8.
func (t *tablesF8) read(a *isa, m Mem, order reg.VecVirtual, vectors int) (x []reg.VecVirtual) {
	for i := 0; i < vectors; i += 4 {
		codes, n := a.vec(), min(4, vectors-i)
		VMOVUPS(m.Offset(i*a.lanes), part(codes, n*a.lanes))
		VPERMD(codes, order, codes)
		number := t.numbers(a, codes)
		for j := range n {
			x = append(x, number(j))
		}
	}
	return x
}

// halvesF8 turns words of 16 bits into float16. Bits 15 and 14 of a word are the sign of a number in e4m3fn and bits 13
// to 7 the rest of it, which has the value that they have in float16 times 2^8, exactly, also for subnormal numbers: the
// conversion of these takes no longer, while multiplying subnormal float32 does on many processors. NaN becomes ±480.
func (a *isa) halvesF8(words reg.Register) {
	if a.wide() {
		VPANDD(cHalfF8.mem(), words, words)
		return
	}
	VPAND(cHalfF8.mem(), words, words)
}

// lower is the lower half of r.
func (a *isa) lower(r reg.VecVirtual) reg.Register {
	if a.wide() {
		return r.AsY()
	}
	return r.AsX()
}

// part is the part of r that has so many bytes, or 16 of them.
func part(r reg.VecVirtual, bytes int) reg.Register {
	switch {
	case bytes <= 16:
		return r.AsX()
	case bytes == 32:
		return r.AsY()
	}
	return r
}

// upperF8 converts the upper half of r, 16 bits to an element.
func (a *isa) upperF8(r, to reg.VecVirtual) {
	half := a.lower(to)
	if a.wide() {
		VEXTRACTI64X4(Imm(1), r, half)
	} else {
		VEXTRACTI128(Imm(1), r, half)
	}
	VCVTPH2PS(half, to)
}

// readHalvesF8 reads bytes as float16, as halvesF8 does.
func (a *isa) readHalvesF8(m Mem, words reg.Register) {
	VPMOVSXBW(m, words)
	VPSLLW(Imm(7), words, words)
	a.halvesF8(words)
}

// readF8 is element.load.
func (a *isa) readF8(m, _ Mem, to reg.VecVirtual) {
	words, t := a.lower(to), a.lower(a.vec())
	a.readHalvesF8(m, words)
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

// see adds the bytes at m, or in m, of n vectors.
func (s *seenF8) see(a *isa, m Op, n int) {
	t := a.vec()
	of := func(r reg.VecVirtual) reg.Register { return part(r, n*a.lanes) }
	switch {
	case a.wide():
		VPORD(m, of(s.bit7), of(t))
	case n == 1:
		VMOVQ(m, t.AsX())
		VPOR(t.AsX(), s.bit7.AsX(), t.AsX())
	default:
		VPOR(m, of(s.bit7), of(t))
	}
	VPMAXUB(of(t), of(s.most), of(s.most))
}

// read reads vectors, 1, 2 or 4, at m that are 2^8 times smaller, with NaN as ±480.
func (s *seenF8) read(a *isa, m Mem, x []reg.VecVirtual) {
	s.see(a, m, len(x))
	if len(x) == 1 {
		words := a.lower(x[0])
		a.readHalvesF8(m, words)
		VCVTPH2PS(words, x[0])
		return
	}
	for j := 0; j < len(x); j += 2 {
		low, high := x[j], x[j+1]
		a.readHalvesF8(m.Offset(j*a.lanes), high)
		VCVTPH2PS(a.lower(high), low)
		a.upperF8(high, high)
	}
}

// nanF8 sets the bytes of nan to ones where those of most are 255, else to zeros.
func (a *isa) nanF8(most Op, nan reg.VecVirtual) {
	if a.wide() {
		k := K()
		VPTERNLOGD(U8(0xff), nan, nan, nan)
		VPCMPEQB(most, nan, k)
		VPMOVM2B(k, nan)
		return
	}
	VPCMPEQD(nan, nan, nan)
	VPCMPEQB(most, nan, nan)
}

// spread makes acc, the sums of vectors, NaN in the places where s has seen it.
func (s *seenF8) spread(a *isa, acc [][]reg.VecVirtual) {
	all := s.bit7
	a.nanF8(s.most, all)
	for j := range acc[0] {
		nan := a.vec()
		VPMOVSXBD(all.AsX(), nan)
		for h := range acc {
			if a.wide() {
				VPORD(nan, acc[h][j], acc[h][j])
			} else {
				VPOR(nan, acc[h][j], acc[h][j])
			}
		}
		switch {
		case j == len(acc[0])-1:
		case a.wide():
			VSHUFI64X2(U8(0x39), all, all, all)
		case j == 1:
			VEXTRACTI128(Imm(1), all, all.AsX())
		default:
			VPSRLDQ(Imm(8), all.AsX(), nan.AsX())
			VPBLENDD(Imm(3), nan, all, all) // the lower half is done
		}
	}
}

func (a *isa) loadF8() {
	a.loadVectors("F8", 1, func(src Mem, dst reg.VecVirtual) { a.readF8(src, Mem{}, dst) })
}

// splitF8 is element.split, without tables for numbers that are 2^8 times smaller, with NaN as ±480, of which it converts
// two elements of each row at once.
func splitF8(a *dotsKernel, w reg.VecVirtual, _ Mem) func(int) reg.VecVirtual {
	if a.tables != nil {
		VPSHUFB(cColumnsF8.mem(), w, w)
		return a.tables.numbers(a.isa, w)
	}
	both := a.vec()
	return func(n int) reg.VecVirtual {
		x := a.vec()
		if n%2 == 1 {
			a.upperF8(both, x)
			return x
		}
		VPSHUFB((cSplitF8 + constant(n/2)).mem(), w, both)
		VPSRAW(Imm(1), both, both)
		a.halvesF8(both)
		if a.wide() {
			VPERMQ(both, a.order, both)
		} else {
			VPERMQ(Imm(0xd8), both, both)
		}
		VCVTPH2PS(a.lower(both), x)
		return x
	}
}

// seeF8 adds words of a group's rows to what it has seen, as seenF8 does.
func (d *dotsKernel) seeF8(words []reg.VecVirtual, g int) {
	s := seenF8{d.vec(), d.vec()}
	VMOVUPS(d.seen.Offset(g*d.isa.bytes()), s.most)
	VMOVUPS(cOffset.mem(), s.bit7)
	for _, w := range words {
		s.see(d.isa, w, 4)
	}
	VMOVUPS(s.most, d.seen.Offset(g*d.isa.bytes()))
}

// scoresF8 turns the sums of a group into scores.
func (t *dotsTile) scoresF8(g int) {
	a, nan := t.d.isa, t.d.vec()
	a.nanF8(t.d.seen.Offset(g*a.bytes()), nan)
	if a.wide() {
		k := K()
		VPTESTMD(nan, nan, k)
		VPMOVM2D(k, nan)
	} else {
		zero, ones := a.vec(), a.vec()
		a.zero(zero)
		VPCMPEQD(ones, ones, ones)
		VPCMPEQD(zero, nan, nan)
		VPXOR(ones, nan, nan)
	}
	for _, x := range t.acc[g] {
		VMULPS(cUpF8.mem(), x, x)
		if a.wide() {
			VPORD(nan, x, x)
		} else {
			VPOR(nan, x, x)
		}
	}
}
