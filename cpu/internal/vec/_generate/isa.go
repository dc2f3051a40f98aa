package main

import (
	"log"

	"github.com/mmcloughlin/avo/attr"
	. "github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"

	"github.com/seed90331342/attn/cpu/internal/vec/_generate/tables"
)

// isa is an instruction set with the shapes of its register tiles: rows by cols vectors
// of accumulators. 4x4 takes 16 of 32 registers and leaves room for the 4 vectors and the
// broadcasts that feed them; 4x3 takes 12 of 16. Narrow tiles have more rows, so that
// there are at least 8 chains of FMAs: two a cycle take 4 cycles each.
type isa struct {
	name  string
	lanes int
	cols  int
	rows  []int // of the register tiles, in descending order
	temps int   // registers for broadcasts; 0: FMAs broadcast from memory
	vec   func() reg.VecVirtual
	tier  string
	like  string // see tables.Table
}

var (
	avx512 = &isa{"AVX512", 16, 4, []int{4, 1}, 3, ZMM, "avx512", ""}
	avx2   = &isa{"AVX2", 8, 3, []int{4, 1}, 1, YMM, "avx2", ""}
	// ordered is AVX-512 for adjacent rows of keys or values, see inOrder.
	ordered = &isa{"AVX512Ordered", 16, 4, nil, 3, ZMM, "avx512", ""}
	// vbmi is AVX-512 with VBMI, for F8: numbers are looked up, see tablesF8.
	vbmi = &isa{"AVX512VBMI", 16, 4, nil, 3, ZMM, "avx512", ""}
	// half is AVX-512 with vectors of 8 query rows.
	half = &isa{"AVX512Half", 8, 1, []int{16, 4, 1}, 0, YMM, "avx512", "AVX2"}
	// narrow are instruction sets with narrower query tiles.
	narrow = []*isa{
		{"AVX512x2", 16, 2, []int{8, 4, 1}, 3, ZMM, "avx512", "AVX512"},
		{"AVX512x1", 16, 1, []int{16, 4, 1}, 0, ZMM, "avx512", "AVX512"},
		{"AVX2x2", 8, 2, []int{6, 4, 1}, 2, YMM, "avx2", "AVX2"},
		{"AVX2x1", 8, 1, []int{12, 8, 1}, 3, YMM, "avx2", "AVX2"},
	}
)

func (a *isa) bytes() int    { return 4 * a.lanes }
func (a *isa) rowBytes() int { return a.cols * a.bytes() }
func (a *isa) wide() bool    { return a.lanes == 16 }

// masks reports whether a has the instructions of AVX-512.
func (a *isa) masks() bool { return a == half || a.wide() }

// inOrder reports whether kernels prefetch adjacent rows in the order of their addresses, into the first-level cache, and
// touch each page of 4 KiB of the next block once. Zen 5 then reads them as fast as memory is. With a line of each of
// 16 rows in turns and four streams it reads two thirds as fast.
func (a *isa) inOrder() bool { return a == ordered }

// Kernels that are inOrder prefetch keys and values so many bytes ahead of those they read. With 32,768 rows of 64 and 128 f16
// or bf16, 4 KiB for keys is up to 10% slower and 12 KiB as fast; 2 KiB for values is as fast and 8 KiB up to 20% slower.
const keysAhead, valuesAhead = 8192, 4096

// table returns the head of the table of a's kernels.
func (a *isa) table() tables.Table {
	return tables.Table{Name: a.name, Tier: a.tier, Lanes: a.lanes, Width: a.cols * a.lanes, Like: a.like}
}

// kernel begins the function for a field of package vec's tables.
func (a *isa) kernel(field string) { a.oneOf(field, tables.Which{}) }

// oneOf begins one of the functions of a field.
func (a *isa) oneOf(field string, which tables.Which) { a.text(a, field, which, NOSPLIT) }

// text begins a function, whose name ends with that of a, for a field of the table of another
// instruction set.
func (a *isa) text(of *isa, field string, which tables.Which, flags attr.Attribute) {
	name, doc, params, results := tables.Kernel(of.name, field, a.name, which)
	if results != "" {
		results = " (" + results + ")"
	}
	TEXT(name, flags, "func("+params+")"+results)
	Doc(doc)
}

func (a *isa) vecs(n int) []reg.VecVirtual {
	v := make([]reg.VecVirtual, n)
	for i := range v {
		v[i] = a.vec()
	}
	return v
}

func (a *isa) zero(r reg.VecVirtual) {
	if a.masks() {
		VPXORD(r, r, r)
		return
	}
	VXORPS(r, r, r)
}

// clear sets the sums of a tile to 0.
func (a *isa) clear(acc [][]reg.VecVirtual) {
	for _, sums := range acc {
		for _, sum := range sums {
			a.zero(sum)
		}
	}
}

// load reads vectors from p on, and store writes them.
func (a *isa) load(p reg.Register, to []reg.VecVirtual) {
	for i, x := range to {
		VMOVUPS(a.at(p, i), x)
	}
}

func (a *isa) store(from []reg.VecVirtual, p reg.Register) {
	for i, x := range from {
		VMOVUPS(x, a.at(p, i))
	}
}

// row loads a row of the tile's vectors at p.
func (a *isa) row(p reg.Register) []reg.VecVirtual {
	x := a.vecs(a.cols)
	a.load(p, x)
	return x
}

// at addresses the i-th vector after a pointer.
func (a *isa) at(base reg.Register, i int) Mem { return Mem{Base: base, Disp: i * a.bytes()} }

// param loads an argument into a register.
func param(name string) reg.GPVirtual { return Load(Param(name), GP64()).(reg.GPVirtual) }

// argument addresses an argument in memory.
func argument(name string) Mem {
	arg, err := Param(name).Resolve()
	if err != nil {
		log.Fatalf("parameter %s: %v", name, err)
	}
	return arg.Addr
}

// constant loads a vector of the table of constants.
func (a *isa) constant(c constant) reg.VecVirtual {
	v := a.vec()
	VMOVUPS(c.mem(), v)
	return v
}

// broadcastParam loads a float32 argument into all lanes.
func (a *isa) broadcastParam(name string) reg.VecVirtual {
	v := a.vec()
	VBROADCASTSS(argument(name), v)
	return v
}

// advance moves pointers by so many bytes.
func advance(by int, pointers ...Op) {
	for _, p := range pointers {
		ADDQ(U32(uint32(by)), p)
	}
}

// skip moves p by n rows, 1 or 4, that are ld bytes apart.
func skip(n int, p, ld reg.Register) {
	if n == 4 {
		LEAQ(Mem{Base: p, Index: ld, Scale: 4}, p)
	} else {
		ADDQ(ld, p)
	}
}

func end() {
	VZEROUPPER()
	RET()
}

// each replaces vectors of x by what body returns for them.
func (a *isa) each(x, vectors reg.GPVirtual, body func(y reg.VecVirtual) reg.VecVirtual) {
	loop("next", vectors, 1, func() {
		y := a.vec()
		VMOVUPS(a.at(x, 0), y)
		VMOVUPS(body(y), a.at(x, 0))
		advance(a.bytes(), x)
	})
}

// loop repeats body until counter, a positive multiple of step, has counted down to 0.
func loop(label string, counter Op, step int, body func()) {
	Label(label)
	body()
	SUBQ(U32(uint32(step)), counter)
	JNZ(LabelRef(label))
}

// byFour runs body(4) total/4 times and body(1) total%4 times.
func byFour(label string, total Op, body func(n int)) {
	countByFour(label, total, func(n int, _ reg.GPVirtual) { body(n) })
}

// countByFour is byFour, whose bodies also get the number of those that are left, with theirs.
func countByFour(label string, total Op, body func(n int, left reg.GPVirtual)) {
	n := GP64()
	MOVQ(total, n)
	SHRQ(Imm(2), n)
	JZ(LabelRef(label + "_rest"))
	loop(label, n, 1, func() { body(4, n) })
	Label(label + "_rest")
	MOVQ(total, n)
	ANDQ(Imm(3), n)
	JZ(LabelRef(label + "_done"))
	loop(label+"_one", n, 1, func() { body(1, n) })
	Label(label + "_done")
}
