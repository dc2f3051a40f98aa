package main

import (
	"encoding/binary"
	"fmt"

	. "github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/ir"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

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

// loadConfig loads the shapes of the tiles from 64 bytes at p.
func loadConfig(p reg.GPPhysical) {
	n := number(p)
	encoded("ldtilecfg [r"+names[n]+"]", append(vex(prefixNone, 0, n, 0, 0x49), n&7), p)
}

// release ends the use of tiles. Their state is then no longer part of a thread's.
func release() { encoded("tilerelease", append(vex(prefixNone, 0, 0, 0, 0x49), 0xc0)) }

// zero clears a tile.
func (t tmm) zero() {
	encoded("tilezero "+t.String(), append(vex(prefixF2, 0, 0, 0, 0x49), 0xc0|byte(t)<<3))
}

// load loads rows that are ld bytes apart, the first disp bytes after p.
func (t tmm) load(p, ld reg.GPPhysical, disp int) {
	t.move("tileloadd "+t.String()+","+rows(p, ld, disp), prefixF2, p, ld, disp)
}

// store stores the rows.
func (t tmm) store(p, ld reg.GPPhysical, disp int) {
	t.move("tilestored "+rows(p, ld, disp)+","+t.String(), prefixF3, p, ld, disp)
}

func (t tmm) move(text string, prefix byte, p, ld reg.GPPhysical, disp int) {
	base, index := number(p), number(ld)
	code := append(vex(prefix, 0, base, index, 0x4b), 0x80|byte(t)<<3|4, index&7<<3|base&7)
	encoded(text, binary.LittleEndian.AppendUint32(code, uint32(disp)), p, ld)
}

// addProduct adds the product of a and b, whose elements are pairs of bf16: to each element of t
// the sum of the products of the lower halves plus that of the upper halves.
func (t tmm) addProduct(a, b tmm) {
	encoded("tdpbf16ps "+t.String()+","+a.String()+","+b.String(), append(vex(prefixF3, int(b), 0, 0, 0x5c), 0xc0|byte(t)<<3|byte(a)))
}

func (t tmm) String() string { return "tmm" + string(rune('0'+t)) }

// names are the numbers of general registers in their names.
var names = [16]string{"ax", "cx", "dx", "bx", "sp", "bp", "si", "di", "8", "9", "10", "11", "12", "13", "14", "15"}

func rows(p, ld reg.GPPhysical, disp int) string {
	return fmt.Sprintf("[r%s+r%s*1+%#x]", names[number(p)], names[number(ld)], disp)
}

// pairTiles writes the product of bf16 matrices in tiles, sum = x·y, some groups of 16 rows at a
// time, so that four tiles are computed at once:
//
//	sum [16·groups, a.cols vectors]    x [16·groups, 32·steps]    y [16·steps, a.cols vectors] of pairs
//
// The sums of some groups are stored at to. Their rows, of which there are at most left, are
// passed to finish when those of the next groups are computed, because loads wait for the
// stores of tiles.
func (a *isa) pairTiles(x, ldx, y string, to reg.GPPhysical, left reg.GPVirtual, stored func(groups int), finish func(label string, rows reg.GPVirtual)) {
	ld, row, groups, step, config := reg.RSI, reg.RDX, GP64(), GP64(), reg.RBX
	in, right := [4]reg.GPPhysical{reg.R8, reg.R9, reg.R10, reg.R11}, reg.RBX
	Load(Param("config"), config)
	loadConfig(config)
	MOVQ(U32(uint32(a.rowBytes())), ld)
	Load(Param(ldx), row)
	Load(Param(x), in[0])
	MOVQ(argument("groups"), groups)
	most, pending := 4/a.cols, GP64()
	XORQ(pending, pending)
	drain := func(label string) {
		TESTQ(pending, pending)
		JZ(LabelRef(label + "_stored"))
		finish(label, pending)
		Label(label + "_stored")
	}
	some := func(label string, n int) {
		for i := range n * a.cols {
			tmm(i).zero()
		}
		for g := 1; g < n; g++ {
			LEAQ(Mem{Base: in[g-1], Index: row, Scale: 8}, in[g])
			LEAQ(Mem{Base: in[g], Index: row, Scale: 8}, in[g])
		}
		next := GP64()
		LEAQ(Mem{Base: in[n-1], Index: row, Scale: 8}, next)
		LEAQ(Mem{Base: next, Index: row, Scale: 8}, next)
		MOVQ(argument(y), right)
		MOVQ(argument("steps"), step)
		loop(label+"_step", step, 1, func() {
			if n == 4 {
				tmm(7).load(right, ld, 0)
				for g := range n {
					tmm(4+g%3).load(in[g], row, 0)
					tmm(g).addProduct(tmm(4+g%3), 7)
				}
			} else {
				for g := range n {
					tmm(4+g).load(in[g], row, 0)
				}
				for v := range a.cols {
					tmm(6+v%2).load(right, ld, v*a.bytes())
					for g := range n {
						tmm(g*a.cols+v).addProduct(tmm(4+g), tmm(6+v%2))
					}
				}
			}
			for g := range n {
				ADDQ(Imm(64), in[g])
			}
			ADDQ(U32(uint32(16*a.rowBytes())), right)
		})
		drain(label)
		for g := range n {
			for v := range a.cols {
				tmm(g*a.cols+v).store(to, ld, 16*g*a.rowBytes()+v*a.bytes())
			}
		}
		MOVQ(next, in[0])
		MOVQ(U32(uint32(16*n)), pending)
		CMPQ(left, pending)
		CMOVQLT(left, pending)
		SUBQ(pending, left)
		stored(n)
	}
	Label("some")
	CMPQ(groups, Imm(uint64(most)))
	JL(LabelRef("rest"))
	some("some", most)
	SUBQ(Imm(uint64(most)), groups)
	JMP(LabelRef("some"))
	Label("rest")
	if most > 1 {
		TESTQ(groups, groups)
		JZ(LabelRef("done"))
		some("rest", 1)
		DECQ(groups)
		JMP(LabelRef("rest"))
		Label("done")
	}
	drain("last")
	release()
}

// pairScores writes the scores of keys in tiles, times scale, and their maxima.
func (a *isa) pairScores() {
	a.kernel("pairScores")
	s, p, left, mx := reg.RDI, GP64(), GP64(), GP64()
	Load(Param("s"), s)
	MOVQ(s, p)
	scale := a.broadcastParam("scale")
	MOVQ(argument("mx"), mx)
	m := a.row(mx)
	MOVQ(argument("keys"), left)
	a.pairTiles("k", "ldk", "q", s, left, func(groups int) { ADDQ(U32(uint32(16*groups*a.rowBytes())), s) }, func(label string, rows reg.GPVirtual) {
		loop(label+"_row", rows, 1, func() {
			for v := range m {
				x := a.vec()
				VMULPS(a.at(p, v), scale, x)
				VMOVUPS(x, a.at(p, v))
				VMAXPS(m[v], x, m[v]) // m where x is NaN
			}
			ADDQ(U32(uint32(a.rowBytes())), p)
		})
	})
	MOVQ(argument("mx"), mx)
	a.store(m, mx)
	end()
}

// pairValues writes outputs: alpha times the former ones, plus the sums over the values of tiles.
func (a *isa) pairValues() {
	a.kernel("pairValues")
	sums, o, left, p := reg.RDI, param("o"), GP64(), param("alpha")
	alpha := a.row(p)
	Load(Param("sums"), sums)
	MOVQ(argument("groups"), left)
	SHLQ(Imm(4), left)
	a.pairTiles("v", "ldv", "p", sums, left, func(int) {}, func(label string, rows reg.GPVirtual) {
		MOVQ(sums, p)
		loop(label+"_row", rows, 1, func() {
			for v := range alpha {
				x := a.vec()
				VMOVUPS(a.at(o, v), x)
				VFMADD213PS(a.at(p, v), alpha[v], x)
				VMOVUPS(x, a.at(o, v))
			}
			advance(a.rowBytes(), p, o)
		})
	})
	end()
}

// addDots writes an instruction that adds, to each lane of acc, the dot product of two bf16 at a row of
// p and the pair in y. Rows are ld bytes apart.
func addDots(acc, y reg.VecPhysical, p, ld reg.GPPhysical, row, disp int) {
	d, v, base, index := byte(acc.PhysicalIndex()), byte(y.PhysicalIndex()), number(p), number(ld)
	at, modrm := "[r"+names[base], 0x80|d&7<<3
	code := []byte{0x62, ^d>>3&1<<7 | 0x40 | ^base>>3&1<<5 | ^d>>4&1<<4 | 2, ^v&15<<3 | 4 | prefixF3, 0x50 | ^v>>4&1<<3, 0x52}
	if row == 0 {
		code = append(code, modrm|base&7)
	} else {
		at += fmt.Sprintf("+r%s*%d", names[index], row)
		code[1] = code[1]&^0x40 | ^index>>3&1<<6
		code = append(code, modrm|4, byte(row-1)<<6|index&7<<3|base&7)
	}
	code = binary.LittleEndian.AppendUint32(code, uint32(disp))
	encoded(fmt.Sprintf("vdpbf16ps zmm%d,zmm%d,DWORD BCST %s+%#x]", d, v, at, disp), code, acc, y, p, ld)
}

// zmm are the vector registers.
var zmm = []reg.VecPhysical{reg.Z0, reg.Z1, reg.Z2, reg.Z3, reg.Z4, reg.Z5, reg.Z6, reg.Z7, reg.Z8, reg.Z9, reg.Z10, reg.Z11, reg.Z12, reg.Z13, reg.Z14, reg.Z15,
	reg.Z16, reg.Z17, reg.Z18, reg.Z19, reg.Z20, reg.Z21, reg.Z22, reg.Z23, reg.Z24, reg.Z25, reg.Z26, reg.Z27, reg.Z28, reg.Z29, reg.Z30, reg.Z31}

// dotTiles writes the product of bf16 matrices as pairTiles does, in registers: some rows of x at a
// time, whose sums finish gets.
func (a *isa) dotTiles(x, ldx, y string, left reg.GPVirtual, finish func(acc [][]reg.VecPhysical)) {
	in, row, right, step := [4]reg.GPPhysical{reg.R8, reg.R9, reg.R10, reg.R11}, reg.RDX, reg.RBX, GP64()
	Load(Param(ldx), row)
	Load(Param(x), in[0])
	some := func(label string, rows int) {
		acc := make([][]reg.VecPhysical, rows)
		for r := range acc {
			acc[r] = zmm[8+r*a.cols:][:a.cols]
			for _, sum := range acc[r] {
				VPXORD(sum, sum, sum)
			}
			if r%3 == 0 && r > 0 {
				LEAQ(Mem{Base: in[r/3-1], Index: row, Scale: 2}, in[r/3])
				ADDQ(row, in[r/3])
			}
		}
		next := GP64()
		last := (rows - 1) / 3
		MOVQ(in[last], next)
		for range rows - 3*last {
			ADDQ(row, next)
		}
		MOVQ(argument(y), right)
		MOVQ(argument("steps"), step)
		SHLQ(Imm(2), step)
		loop(label+"_pairs", step, 1, func() {
			for pair := range 4 {
				for v := range a.cols {
					VMOVUPS(Mem{Base: right, Disp: pair*a.rowBytes() + v*a.bytes()}, zmm[v])
				}
				for r := range acc {
					for v, sum := range acc[r] {
						addDots(sum, zmm[v], in[r/3], row, r%3, 4*pair)
					}
				}
			}
			for i := range last + 1 {
				ADDQ(Imm(16), in[i])
			}
			ADDQ(U32(uint32(4*a.rowBytes())), right)
		})
		MOVQ(next, in[0])
		finish(acc)
		SUBQ(Imm(uint64(rows)), left)
	}
	most := min(24/a.cols, 12)
	Label("next")
	TESTQ(left, left)
	JZ(LabelRef("done"))
	CMPQ(left, Imm(8)) // two times 4
	JEQ(LabelRef("four"))
	CMPQ(left, Imm(uint64(most)))
	JGE(LabelRef("most"))
	CMPQ(left, Imm(4))
	JGE(LabelRef("four"))
	some("one", 1)
	JMP(LabelRef("next"))
	Label("four")
	some("four", 4)
	JMP(LabelRef("next"))
	Label("most")
	some("most", most)
	JMP(LabelRef("next"))
	Label("done")
}

// dotScores is pairScores with sums in registers.
func (a *isa) dotScores() {
	a.kernel("dotScores")
	s, left, mx, scale := param("s"), param("keys"), reg.RSI, reg.Z4
	a.dotTiles("k", "ldk", "q", left, func(acc [][]reg.VecPhysical) {
		Load(Param("mx"), mx)
		VBROADCASTSS(argument("scale"), scale)
		for v := range a.cols {
			VMOVUPS(a.at(mx, v), reg.Z5)
			for r := range acc {
				VMULPS(scale, acc[r][v], acc[r][v])
				VMOVUPS(acc[r][v], Mem{Base: s, Disp: r*a.rowBytes() + v*a.bytes()})
				VMAXPS(reg.Z5, acc[r][v], reg.Z5) // Z5 where the score is NaN
			}
			VMOVUPS(reg.Z5, a.at(mx, v))
		}
		ADDQ(U32(uint32(len(acc)*a.rowBytes())), s)
	})
	end()
}

// dotValues is pairValues with sums in registers.
func (a *isa) dotValues() {
	a.kernel("dotValues")
	o, left, alpha := param("o"), param("groups"), reg.RSI
	SHLQ(Imm(4), left)
	a.dotTiles("v", "ldv", "p", left, func(acc [][]reg.VecPhysical) {
		Load(Param("alpha"), alpha)
		for v := range a.cols {
			VMOVUPS(a.at(alpha, v), reg.Z4)
			for r := range acc {
				at := Mem{Base: o, Disp: r*a.rowBytes() + v*a.bytes()}
				VFMADD231PS(at, reg.Z4, acc[r][v])
				VMOVUPS(acc[r][v], at)
			}
		}
		ADDQ(U32(uint32(len(acc)*a.rowBytes())), o)
	})
	end()
}

// turn writes the transpose of squares of 16 x 16 pairs of bf16, the second right of the first.
// Where rows is set, a pair is the elements of two rows of src.
func (a *isa) turn(name string, rows int) {
	a.kernel(name)
	dst, ldd, src, lds, squares := param("dst"), param("ldd"), param("src"), param("lds"), param("squares")
	loop("square", squares, 1, func() {
		p, in := GP64(), a.vecs(16)
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
		for _, y := range a.transposed(in) {
			VMOVUPS(y, Mem{Base: dst})
			ADDQ(ldd, dst)
		}
		ADDQ(Imm(uint64(64/rows)), src)
	})
	end()
}

// alternate is the order that makes pairs of the words of two vectors.
var alternate *Mem

// paired returns the pairs of bf16 of two vectors.
func paired(first, second Op) reg.VecPhysical {
	if alternate == nil {
		alternate = new(GLOBL("alternate", RODATA|NOPTR))
		for i := range 32 {
			DATA(2*i, U16(uint16(i/2+i%2*16)))
		}
	}
	order := ZMM()
	VMOVUPS(*alternate, order)
	VMOVUPS(first, reg.Z0)
	VMOVUPS(second, reg.Z1)
	// EVEX of the map 0F38 on 512 bits
	encoded("vcvtne2ps2bf16 zmm0,zmm1,zmm0", []byte{0x62, 0xf2, ^byte(1)&15<<3 | 4 | prefixF2, 0x48, 0x72, 0xc0}, reg.Z0, reg.Z1)
	VPERMW(reg.Z0, order, reg.Z0)
	return reg.Z0
}

// roundPairs writes pairs of bf16: those of rows 2j and 2j+1 of src.
func (a *isa) roundPairs() {
	a.kernel("roundPairs")
	dst, src, pairs, vectors, lds, second := param("dst"), param("src"), param("pairs"), GP64(), param("vectors"), GP64()
	SHLQ(Imm(6), lds)
	loop("pair", pairs, 1, func() {
		LEAQ(Mem{Base: src, Index: lds, Scale: 1}, second)
		MOVQ(argument("vectors"), vectors)
		loop("vector", vectors, 1, func() {
			VMOVUPS(paired(a.at(src, 0), a.at(second, 0)), a.at(dst, 0))
			ADDQ(Imm(64), src)
			ADDQ(Imm(64), second)
			ADDQ(Imm(64), dst)
		})
		ADDQ(lds, src)
	})
	end()
}

// pairWeights is weights and roundPairs, without the weights of float32.
func (a *isa) pairWeights() {
	a.kernel("pairWeights")
	pairs := param("pairs")
	a.weightsTo(param("s"), func(_ reg.GPVirtual, p []reg.VecVirtual, j int) {
		for u := 0; u < len(p); u += 2 {
			VMOVUPS(paired(p[u], p[u+1]), a.at(pairs, u/2*a.cols+j))
		}
		if j == a.cols-1 {
			ADDQ(U32(uint32(2*a.rowBytes())), pairs)
		}
	})
}

// pairFMAs writes loops of products of pairs, in tiles and in registers, which return their operations.
func (a *isa) pairFMAs() {
	a.kernel("tileFMA")
	p, n, operations := reg.R8, param("n"), GP64()
	Load(Param("config"), p)
	loadConfig(p)
	for i := range 8 {
		tmm(i).zero()
	}
	const each = 4 // products of 16 x 16 sums over 32 elements
	IMUL3Q(U32(each*2*16*16*32), n, operations)
	loop("next", n, 1, func() {
		for i := range each {
			tmm(i).addProduct(tmm(4+i/2), tmm(6+i%2))
		}
	})
	Store(operations, ReturnIndex(0))
	release()
	end()

	a.kernel("dotFMA")
	n, operations = param("n"), GP64()
	chains := zmm[1:17]
	IMUL3Q(U32(uint32(4*a.lanes*len(chains))), n, operations)
	VPXORD(reg.Z0, reg.Z0, reg.Z0)
	for _, c := range chains {
		VPXORD(c, c, c)
	}
	LEAQ(argument("n"), p)
	loop("next", n, 1, func() {
		for _, c := range chains {
			addDots(c, reg.Z0, p, p, 0, 0)
		}
	})
	Store(operations, ReturnIndex(0))
	end()
}

// cpuid returns what identifies the processor.
func cpuid() {
	TEXT("cpuid", NOSPLIT, "func(leaf uint32) (eax, ebx uint32)")
	Doc("cpuid returns two of the registers that CPUID sets.")
	Load(Param("leaf"), reg.EAX)
	XORL(reg.ECX, reg.ECX)
	CPUID()
	Store(reg.EAX, ReturnIndex(0))
	Store(reg.EBX, ReturnIndex(1))
	RET()
}
