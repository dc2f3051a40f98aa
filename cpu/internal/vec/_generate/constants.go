package main

import (
	"math"

	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/seed90331342/attn/cpu/internal/vec/_generate/fit"
)

// constant is an index into the table of constants. Each is repeated over 64 bytes, so
// both instruction sets can use it as a memory operand.
type constant int

const (
	cExp0  constant = 0                  // exp2 polynomial, degree 0 to 6
	cTanh0 constant = cExp0 + degree + 1 // tanh polynomial, degree 0 to 5
)

const (
	cOne constant = cTanh0 + 6 + iota
	cTwo
	cTen // tanh is 1 in float32 from 9.02 on
	c2Log2E
	cSmall
	cAbs
	cSign
	cLog2E
	cInf
	cNegInf
	cLeast // -127
	cHigh
	cLow
	cUpper // half of a word
	cByte0
	cByte1
	cBiased0 // 2^23 + 128
	cBiased1 // 2^15 + 128
	cTiny    // 2^-102
	cDown    // 2^-24
	cBiased  // 2^23 + 127
	cOffset  // 128 in each byte
	cEight   // integers 8
	cLow4    // the lower half of a byte
	cMask8   // bits 8 to 11
	cMask16  // bits 16 to 19
	cPower8  // 2^15
	cPower16 // 2^7
	cBias8   // -(2^15+8)
	cBias16  // -(2^7+8)
	cHalfF8  // bits 15 and 13 to 7 of both halves of a word
	cNaNF8   // 0x7f00 in both halves of a word
	cUpF8    // 2^8
	cBits    // 1, 2, 4 and so on, one to a lane
	cToTop   // four shuffles of bytes: the n-th moves byte n of a word to its top

	cNumbers = cToTop + 4   // -8 to 7, one to a lane
	cSplitF8 = cNumbers + 1 // two shuffles of bytes: bytes 2n of four words to the upper bytes of 64 bits, bytes 2n+1 to the others
	cOrder   = cSplitF8 + 2 // 64-bit lanes 0, 2, 4, 6, 1, 3, 5, 7
	cExpm0   = cOrder + 1   // fit.Exp2Minus1

	cHalfBF16  = cExpm0 + 6    // half a unit of bf16, less 1
	cQuiet     = cHalfBF16 + 1 // the bit of a quiet NaN
	cLongLog2E = cQuiet + 1    // in float64

	cUpperF8   = cLongLog2E + 1 // the upper bytes of the numbers of 128 codes
	cLowerF8   = cUpperF8 + 2   // their second bytes
	cRowsF8    = cLowerF8 + 2   // words of 32 bits 0, 4, 8, 12, 1, 5 and so on
	cColumnsF8 = cRowsF8 + 1    // bytes 0, 4, 8, 12, 1, 5 and so on of 128 bits
)

var table Mem

func (c constant) mem() Mem { return table.Offset(64 * int(c)) }

// layConstants writes the table. The Go twin in ../twin_test.go has the same numbers.
func layConstants() {
	bits := append(fit.Bits(1, 2, 10, 2*math.Log2E, 0.625), 0x7fffffff, 0x80000000, math.Float32bits(math.Log2E), 0x7f800000, 0xff800000, math.Float32bits(-127),
		math.Float32bits(0x1p127), math.Float32bits(-0x1p127), 0xffff0000,
		0xff, 0xff00, math.Float32bits(0x1p23+128), math.Float32bits(0x1p15+128),
		math.Float32bits(0x1p-102), math.Float32bits(0x1p-24), math.Float32bits(0x1p23+127), 0x80808080,
		8, 15, 15<<8, 15<<16, math.Float32bits(0x1p15), math.Float32bits(0x1p7), math.Float32bits(-0x1p15-8), math.Float32bits(-0x1p7-8),
		0xbf80bf80, 0x7f007f00, math.Float32bits(256))
	table = GLOBL("constants", RODATA|NOPTR)
	at := 0
	put := func(word func(lane uint32) uint32) {
		for lane := range uint32(16) {
			DATA(at, U32(word(lane)))
			at += 4
		}
	}
	for _, b := range bits {
		put(func(uint32) uint32 { return b })
	}
	put(func(lane uint32) uint32 { return 1 << lane })
	for n := range uint32(4) {
		put(func(lane uint32) uint32 { return (lane%4*4+n)<<24 | 0x808080 })
	}
	put(func(lane uint32) uint32 { return math.Float32bits(float32(lane) - 8) })
	for n := range uint32(2) {
		put(func(lane uint32) uint32 {
			first := lane%2*8 + 2*n + lane/2%2
			return (first+4)<<24 | first<<8 | 0x800080
		})
	}
	for lane := range 8 {
		DATA(at, U64(lane%4*2+lane/4))
		at += 8
	}
	for _, x := range fit.Exp2Minus1 {
		put(func(uint32) uint32 { return math.Float32bits(x) })
	}
	for _, b := range []uint32{0x7fff, 1 << 22} {
		put(func(uint32) uint32 { return b })
	}
	put(func(lane uint32) uint32 { return uint32(math.Float64bits(math.Log2E) >> (lane % 2 * 32)) })
	for _, shift := range []uint32{24, 16} {
		for half := range uint32(2) {
			put(func(lane uint32) (word uint32) {
				for i := range uint32(4) {
					word |= numberF8(64*half+4*lane+i) >> shift & 0xff << (8 * i)
				}
				return word
			})
		}
	}
	put(func(lane uint32) uint32 { return lane%4*4 + lane/4 })
	put(func(lane uint32) uint32 { return 0x0c080400 + lane%4*0x01010101 })
}

// numberF8 returns the bits of a code's number.
func numberF8(code uint32) uint32 {
	switch {
	case code == 127:
		return 0x7fc00000
	case code < 8:
		return math.Float32bits(float32(code) / 512)
	}
	return code<<20 + 120<<23
}
