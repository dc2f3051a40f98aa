package main

import (
	. "github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/ir"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// amx is AVX-512 with tiles for bf16.
var amx = &isa{name: "AMX", lanes: 16, vec: ZMM}

// tmm is a tile of 16 rows of 64 bytes.
type tmm int

// Prefixes of opcodes, as VEX and EVEX encode them.
const (
	prefixNone = iota
	prefix66
	prefixF3
	prefixF2
)

// number returns the number of a general register in encodings.
func number(r reg.Physical) byte { return byte(r.PhysicalIndex()) }

// encoded writes an instruction that Go's assembler lacks, as bytes. Its registers are physical: the
// bytes contain their numbers. A test compares each comment with the text of a disassembler.
func encoded(text string, code []byte, registers ...Op) {
	Comment(text)
	for _, b := range code {
		Instruction(&ir.Instruction{Opcode: "BYTE", Operands: []Op{U8(b)}, Inputs: registers})
	}
}

// vex returns the first four bytes of an instruction of the map 0F38 on 128 bits, with a second
// operand v.
func vex(prefix byte, v int, base, index, opcode byte) []byte {
	return []byte{0xc4, 0x82 | ^index>>3&1<<6 | ^base>>3&1<<5, byte(^v&15)<<3 | prefix, opcode}
}

// config loads the shapes of the tiles from 64 bytes at p.
func config(p reg.GPPhysical) {
	n := number(p)
	encoded("ldtilecfg [r"+names[n]+"]", append(vex(prefixNone, 0, n, 0, 0x49), n&7), p)
}

// release ends the use of tiles. Their state is then no longer part of a thread's.
func release() { encoded("tilerelease", append(vex(prefixNone, 0, 0, 0, 0x49), 0xc0)) }

// zero clears a tile.
func (t tmm) zero() {
	encoded("tilezero "+t.String(), append(vex(prefixF2, 0, 0, 0, 0x49), 0xc0|byte(t)<<3))
}

// load loads rows that are ld bytes apart, the first at p.
func (t tmm) load(p, ld reg.GPPhysical) {
	t.move("tileloadd "+t.String()+","+rows(p, ld), prefixF2, p, ld)
}

// store stores the rows.
func (t tmm) store(p, ld reg.GPPhysical) {
	t.move("tilestored "+rows(p, ld)+","+t.String(), prefixF3, p, ld)
}

func (t tmm) move(text string, prefix byte, p, ld reg.GPPhysical) {
	base, index := number(p), number(ld)
	encoded(text, append(vex(prefix, 0, base, index, 0x4b), byte(t)<<3|4, index&7<<3|base&7), p, ld)
}

// addProduct adds the product of a and b, whose elements are pairs of bf16: to each element of t
// the sum of the products of the lower halves plus that of the upper halves.
func (t tmm) addProduct(a, b tmm) {
	encoded("tdpbf16ps "+t.String()+","+a.String()+","+b.String(), append(vex(prefixF3, int(b), 0, 0, 0x5c), 0xc0|byte(t)<<3|byte(a)))
}

func (t tmm) String() string { return "tmm" + string(rune('0'+t)) }

// names are the numbers of general registers in their names.
var names = [16]string{"ax", "cx", "dx", "bx", "sp", "bp", "si", "di", "8", "9", "10", "11", "12", "13", "14", "15"}

func rows(p, ld reg.GPPhysical) string {
	return "[r" + names[number(p)] + "+r" + names[number(ld)] + "*1]"
}

// product writes the product of bf16 matrices in tiles, c = a·b, where b has pairs of rows:
//
//	c [16·groups, 16·vectors]    a [16·groups, 32·steps]    b [16·steps, 16·vectors] of pairs
//
// Four groups of rows share each tile of b: a step of theirs takes 64 cycles, of which loads fill 40.
func product() {
	amx.kernel("product")
	c, ldc, lda, b, ldb := reg.RDI, reg.RSI, reg.RDX, reg.RBX, reg.RCX
	rows, at, step, groups := [4]reg.GPPhysical{reg.R8, reg.R9, reg.R10, reg.R11}, GP64(), GP64(), GP64()
	Load(Param("config"), rows[0])
	config(rows[0])
	Load(Param("ldc"), ldc)
	Load(Param("lda"), lda)
	Load(Param("ldb"), ldb)
	down := func(from reg.Register, ld, to reg.GPPhysical) { // to = from + 16·ld
		LEAQ(Mem{Base: from, Index: ld, Scale: 8}, to)
		LEAQ(Mem{Base: to, Index: ld, Scale: 8}, to)
	}
	some := func(label string, n int) {
		MOVQ(at, rows[0])
		for i := range n {
			tmm(i).zero()
			if i > 0 {
				down(rows[i-1], lda, rows[i])
			}
		}
		MOVQ(argument("b"), b)
		MOVQ(argument("steps"), step)
		loop(label, step, 1, func() {
			tmm(7).load(b, ldb)
			for i := range n {
				t := tmm(4 + i%3)
				t.load(rows[i], lda)
				tmm(i).addProduct(t, 7)
				ADDQ(Imm(64), rows[i])
			}
			down(b, ldb, b)
		})
		for i := range n {
			tmm(i).store(c, ldc)
			down(c, ldc, c)
			LEAQ(Mem{Base: at, Index: lda, Scale: 8}, at)
			LEAQ(Mem{Base: at, Index: lda, Scale: 8}, at)
		}
		SUBQ(Imm(uint64(n)), groups)
	}
	Label("vector")
	MOVQ(argument("a"), at)
	MOVQ(argument("c"), c)
	MOVQ(argument("groups"), groups)
	Label("four")
	CMPQ(groups, Imm(4))
	JL(LabelRef("one"))
	some("four_step", 4)
	JMP(LabelRef("four"))
	Label("one")
	TESTQ(groups, groups)
	JZ(LabelRef("next"))
	some("one_step", 1)
	JMP(LabelRef("one"))
	Label("next")
	ADDQ(Imm(64), argument("b"))
	ADDQ(Imm(64), argument("c"))
	DECQ(argument("vectors"))
	JNZ(LabelRef("vector"))
	release()
	RET()
}

// turn writes the transpose of squares of 16 x 16 pairs of bf16, the second right of the first.
// Where rows is set, a pair is the elements of two rows of src.
func turn(name string, rows int) {
	amx.kernel(name)
	dst, ldd, src, lds, squares := param("dst"), param("ldd"), param("src"), param("lds"), param("squares")
	loop("square", squares, 1, func() {
		p, in := GP64(), amx.vecs(16)
		MOVQ(src, p)
		for i, x := range in {
			if rows == 1 {
				VMOVUPS(Mem{Base: p}, x)
			} else {
				second := ZMM()
				VPMOVZXWD(Mem{Base: p}, x)
				VPMOVZXWD(Mem{Base: p, Index: lds, Scale: 1}, second)
				VPSLLD(Imm(16), second, second)
				VPORD(second, x, x)
			}
			if i < 15 {
				LEAQ(Mem{Base: p, Index: lds, Scale: uint8(rows)}, p)
			}
		}
		for _, y := range amx.transposed(in) {
			VMOVUPS(y, Mem{Base: dst})
			ADDQ(ldd, dst)
		}
		ADDQ(Imm(uint64(64/rows)), src)
	})
	end()
}

// roundPairs writes pairs of bf16: those of rows 2j and 2j+1 of src.
func roundPairs() {
	amx.kernel("roundPairs")
	dst, src, pairs, vectors := param("dst"), param("src"), param("pairs"), GP64()
	lds, second, order := GP64(), GP64(), ZMM()
	alternate := GLOBL("alternate", RODATA|NOPTR)
	for i := range 32 {
		DATA(2*i, U16(uint16(i/2+i%2*16)))
	}
	VMOVDQU16(alternate, order)
	MOVQ(argument("vectors"), lds)
	SHLQ(Imm(6), lds)
	loop("pair", pairs, 1, func() {
		LEAQ(Mem{Base: src, Index: lds, Scale: 1}, second)
		MOVQ(argument("vectors"), vectors)
		loop("vector", vectors, 1, func() {
			VMOVUPS(Mem{Base: src}, reg.Z0)
			VMOVUPS(Mem{Base: second}, reg.Z1)
			// EVEX of the map 0F38 on 512 bits
			encoded("vcvtne2ps2bf16 zmm0,zmm1,zmm0", []byte{0x62, 0xf2, ^byte(1)&15<<3 | 4 | prefixF2, 0x48, 0x72, 0xc0}, reg.Z0, reg.Z1)
			VPERMW(reg.Z0, order, reg.Z0)
			VMOVUPS(reg.Z0, Mem{Base: dst})
			ADDQ(Imm(64), src)
			ADDQ(Imm(64), second)
			ADDQ(Imm(64), dst)
		})
		ADDQ(lds, src)
	})
	end()
}
