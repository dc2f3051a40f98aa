package main

import (
	"fmt"
	"log"
	"strings"

	"github.com/seed90331342/attn/cpu/internal/vec/_generate/tables"
)

// lanes is the number of float32 in a vector, cols the number of vectors in a row of a
// tile. A tile of 4 rows takes 16 of the 32 registers.
const (
	lanes    = 4
	cols     = 4
	bytes    = 4 * lanes
	rowBytes = cols * bytes
)

// vec is a vector register, gp a general one.
type (
	vec int
	gp  int
)

func (v vec) s4() string  { return fmt.Sprintf("V%d.S4", v) }
func (v vec) d2() string  { return fmt.Sprintf("V%d.D2", v) }
func (v vec) b16() string { return fmt.Sprintf("V%d.B16", v) }

// String returns the register's name. R18 belongs to the system; R27 to R30 belong to Go.
func (r gp) String() string {
	if r >= 18 {
		r++
	}
	return fmt.Sprintf("R%d", int(r))
}

const gps = 26

// kind is what an instruction does, for the counts in the listing.
type kind int

const (
	multiplyAdd kind = iota
	load
	store
	vector
	integer
	kinds
)

// function is the assembly of one function.
type function struct {
	name   string
	doc    string
	args   []argument
	size   int // of the arguments, in bytes
	lines  []string
	counts [kinds]int
	vecs   int // registers in use
	gps    int
}

type argument struct {
	name, kind string
	offset     int
	result     bool
}

var functions []*function

// kernel begins the function for a field of package vec's tables.
func kernel(field string) *function { return oneOf(field, tables.Which{}) }

// oneOf begins one of the functions of a field.
func oneOf(field string, which tables.Which) *function {
	name, doc, params, results := tables.Kernel("NEON", field, "NEON", which)
	f := &function{name: name, doc: doc}
	functions = append(functions, f)
	f.parse(params, false)
	if results != "" {
		f.size = (f.size + 7) &^ 7
		f.parse(results, true)
	}
	return f
}

// parse lays out arguments, "a, b int, c float32".
func (f *function) parse(list string, result bool) {
	parts, kind := strings.Split(list, ", "), ""
	added := make([]argument, len(parts))
	for i := len(parts) - 1; i >= 0; i-- {
		name, own, typed := strings.Cut(parts[i], " ")
		if typed {
			kind = own
		}
		added[i] = argument{name: name, kind: kind, result: result}
	}
	for _, a := range added {
		size := 8
		if strings.HasSuffix(a.kind, "32") && a.kind[0] != '*' {
			size = 4
		}
		f.size = (f.size + size - 1) / size * size
		a.offset = f.size
		f.size += size
		f.args = append(f.args, a)
	}
}

func (f *function) arg(name string) string {
	for _, a := range f.args {
		if a.name == name {
			return fmt.Sprintf("%s+%d(FP)", name, a.offset)
		}
	}
	log.Fatalf("%s has no argument %s", f.name, name)
	return ""
}

func (f *function) emit(k kind, format string, args ...any) {
	f.counts[k]++
	f.lines = append(f.lines, "\t"+fmt.Sprintf(format, args...))
}

// word writes an instruction that Go's assembler does not have.
func (f *function) word(k kind, code uint32, format string, args ...any) {
	f.emit(k, "WORD $%#08x // %s", code, fmt.Sprintf(format, args...))
}

// vec and gp return a free register, until the end of the scope.
func (f *function) vec() vec {
	if f.vecs == 32 {
		log.Fatalf("%s needs more than 32 vector registers", f.name)
	}
	f.vecs++
	return vec(f.vecs - 1)
}

func (f *function) vectors(n int) []vec {
	v := make([]vec, n)
	for i := range v {
		v[i] = f.vec()
	}
	return v
}

func (f *function) gp() gp {
	if f.gps == gps {
		log.Fatalf("%s needs more than %d general registers", f.name, gps)
	}
	f.gps++
	return gp(f.gps - 1)
}

// scope frees the registers that body takes.
func (f *function) scope(body func()) {
	vecs, gps := f.vecs, f.gps
	body()
	f.vecs, f.gps = vecs, gps
}

// param loads an argument into a register.
func (f *function) param(name string) gp {
	r := f.gp()
	f.loadParam(name, r)
	return r
}

func (f *function) loadParam(name string, r gp) { f.emit(load, "MOVD %s, %v", f.arg(name), r) }

func (f *function) params(names ...string) []gp {
	r := make([]gp, len(names))
	for i, name := range names {
		r[i] = f.param(name)
	}
	return r
}

// broadcastParam loads a float32 argument into all lanes.
func (f *function) broadcastParam(name string) vec {
	v := f.vec()
	f.scope(func() {
		r := f.gp()
		f.emit(load, "MOVWU %s, %v", f.arg(name), r)
		f.dup(r, v)
	})
	return v
}

func (f *function) ret() { f.emit(integer, "RET") }

// label begins a block.
func (f *function) label(name string) { f.lines = append(f.lines, name+":") }

// loop repeats body until counter, which is positive, has counted down to 0. The listing
// has the number of instructions of a turn.
func (f *function) loop(label string, counter gp, body func()) {
	at, before := len(f.lines), f.counts
	f.label(label)
	f.scope(body)
	f.addI(-1, counter)
	f.emit(integer, "CBNZ %v, %s", counter, label)
	for i, line := range f.lines[at+1:] {
		if name, is := strings.CutPrefix(line, skipped); is {
			f.lines[at+1+i] = name
		} else if strings.HasSuffix(line, ":") {
			return // the counts of a loop with loops in it mean little
		}
	}
	var c [kinds]int
	for i := range c {
		c[i] = f.counts[i] - before[i]
	}
	note := fmt.Sprintf("\t// A turn: multiply-adds %d, loads %d, stores %d, other vector instructions %d, others %d.",
		c[multiplyAdd], c[load], c[store], c[vector], c[integer])
	f.lines = append(f.lines[:at], append([]string{note}, f.lines[at:]...)...)
}

// each repeats body for each vector of x, which it reads to from and replaces by to.
func (f *function) each(x, vectors gp, from, to vec, body func()) {
	f.loop("next", vectors, func() {
		f.ld(x, 0, 4, from)
		body()
		f.st(to, x, 0)
		f.addI(bytes, x)
	})
}

// skipped marks the end of a block whose instructions are not counted.
const skipped = "!"

// byFour runs body(4) total/4 times and body(1) total%4 times.
func (f *function) byFour(label string, total gp, body func(n int)) {
	f.scope(func() {
		n := f.gp()
		f.emit(integer, "LSR $2, %v, %v", total, n)
		f.emit(integer, "CBZ %v, %s_rest", n, label)
		f.loop(label, n, func() { body(4) })
		f.label(label + "_rest")
		f.emit(integer, "AND $3, %v, %v", total, n)
		f.emit(integer, "CBZ %v, %s_done", n, label)
		f.loop(label+"_one", n, func() { body(1) })
		f.label(label + "_done")
	})
}

// Integers.

func (f *function) mov(from, to gp) { f.emit(integer, "MOVD %v, %v", from, to) }

func (f *function) add(by, to gp) { f.emit(integer, "ADD %v, %v, %v", by, to, to) }

// addTo computes to = x + y<<shift.
func (f *function) addTo(x, y gp, shift int, to gp) {
	f.emit(integer, "ADD %v<<%d, %v, %v", y, shift, x, to)
}

func (f *function) addI(by int, to ...gp) {
	name := "ADD"
	if by < 0 {
		name, by = "SUB", -by
	}
	for _, r := range to {
		f.emit(integer, "%s $%d, %v, %v", name, by, r, r)
	}
}

// prefetch asks for the line at base+offset.
func (f *function) prefetch(base gp, offset int) {
	f.emit(integer, "PRFM %d(%v), PLDL1KEEP", offset, base)
}

// Moves of vectors.

// ld loads n float32 from base+offset, 4, 2 or 1; the other lanes become 0.
func (f *function) ld(base gp, offset, n int, to vec) {
	f.emit(load, "%s %d(%v), F%d", map[int]string{4: "FMOVQ", 2: "FMOVD", 1: "FMOVS"}[n], offset, base, to)
}

func (f *function) st(from vec, base gp, offset int) {
	f.emit(store, "FMOVQ F%d, %d(%v)", from, offset, base)
}

// ldStep loads a vector from base and adds a register to base.
func (f *function) ldStep(base, step gp, to vec) {
	f.emit(load, "VLD1.P (%v)(%v), [%s]", base, step, to.s4())
}

// ldNext loads a vector from base and moves base behind it.
func (f *function) ldNext(base gp, to vec) { f.emit(load, "VLD1.P 16(%v), [%s]", base, to.s4()) }

// ldRow and stRow move the vectors of a row, two with an instruction.
func (f *function) ldRow(base gp, offset int, to []vec) {
	for i := 0; i+1 < len(to); i += 2 {
		f.emit(load, "FLDPQ %d(%v), (F%d, F%d)", offset+i*bytes, base, to[i], to[i+1])
	}
	if n := len(to); n%2 == 1 {
		f.ld(base, offset+(n-1)*bytes, 4, to[n-1])
	}
}

func (f *function) stRow(from []vec, base gp, offset int) {
	for i := 0; i+1 < len(from); i += 2 {
		f.emit(store, "FSTPQ (F%d, F%d), %d(%v)", from[i], from[i+1], offset+i*bytes, base)
	}
	if n := len(from); n%2 == 1 {
		f.st(from[n-1], base, offset+(n-1)*bytes)
	}
}

// spread loads a float32 into all lanes.
func (f *function) spread(base gp, to vec) { f.emit(load, "VLD1R (%v), [%s]", base, to.s4()) }

func (f *function) dup(from gp, to vec) { f.emit(vector, "VDUP %v, %s", from, to.s4()) }

func (f *function) zero(v ...vec) {
	for _, x := range v {
		f.emit(vector, "VMOVI $0, %s", x.b16())
	}
}

func (f *function) copy(from, to vec) { f.emit(vector, "VMOV %s, %s", from.b16(), to.b16()) }

// Instructions on vectors; d is the destination.

func (f *function) three(k kind, base uint32, name string, n, m, d vec) {
	f.word(k, base|uint32(m)<<16|uint32(n)<<5|uint32(d), "%s V%d.4S, V%d.4S, V%d.4S", name, d, n, m)
}

func (f *function) two(base uint32, name string, n, d vec) {
	f.word(vector, base|uint32(n)<<5|uint32(d), "%s V%d.4S, V%d.4S", name, d, n)
}

// fma computes d += n·m, fmaAt d += n·m[i] with one lane of m, and fmulAt d = n·m[i].
func (f *function) fma(n, m, d vec) {
	f.emit(multiplyAdd, "VFMLA %s, %s, %s", m.s4(), n.s4(), d.s4())
}

func (f *function) fmaAt(n, m vec, i int, d vec) {
	code := 0x4f801000 | uint32(i&1)<<21 | uint32(m)<<16 | uint32(i>>1)<<11 | uint32(n)<<5 | uint32(d)
	f.word(multiplyAdd, code, "FMLA V%d.4S, V%d.4S, V%d.S[%d]", d, n, m, i)
}

func (f *function) fmulAt(n, m vec, i int, d vec) {
	code := 0x4f809000 | uint32(i&1)<<21 | uint32(m)<<16 | uint32(i>>1)<<11 | uint32(n)<<5 | uint32(d)
	f.word(vector, code, "FMUL V%d.4S, V%d.4S, V%d.S[%d]", d, n, m, i)
}

func (f *function) fadd(n, m, d vec) { f.three(vector, 0x4e20d400, "FADD", n, m, d) }

// faddPairs adds neighbouring lanes of n, then of m.
func (f *function) faddPairs(n, m, d vec) { f.three(vector, 0x6e20d400, "FADDP", n, m, d) }
func (f *function) fsub(n, m, d vec)      { f.three(vector, 0x4ea0d400, "FSUB", n, m, d) }
func (f *function) fmul(n, m, d vec)      { f.three(vector, 0x6e20dc00, "FMUL", n, m, d) }
func (f *function) fdiv(n, m, d vec)      { f.three(vector, 0x6e20fc00, "FDIV", n, m, d) }

// fmax and fmin return NaN where an operand is; larger returns the other operand.
func (f *function) fmax(n, m, d vec)   { f.three(vector, 0x4e20f400, "FMAX", n, m, d) }
func (f *function) fmin(n, m, d vec)   { f.three(vector, 0x4ea0f400, "FMIN", n, m, d) }
func (f *function) larger(n, m, d vec) { f.three(vector, 0x4e20c400, "FMAXNM", n, m, d) }

// Comparisons set all bits of a lane where they hold. abs is for magnitudes.
func (f *function) equal(n, m, d vec)      { f.three(vector, 0x4e20e400, "FCMEQ", n, m, d) }
func (f *function) greater(n, m, d vec)    { f.three(vector, 0x6ea0e400, "FCMGT", n, m, d) }
func (f *function) absAtLeast(n, m, d vec) { f.three(vector, 0x6e20ec00, "FACGE", n, m, d) }
func (f *function) intGreater(n, m, d vec) { f.three(vector, 0x4ea03400, "CMGT", n, m, d) }
func (f *function) intAtLeast(n, m, d vec) { f.three(vector, 0x4ea03c00, "CMGE", n, m, d) }
func (f *function) wordAtLeast(n, m, d vec) {
	f.three(vector, 0x6ea03c00, "CMHS", n, m, d)
}

func (f *function) isZero(n, d vec) {
	f.word(vector, 0x4ea0d800|uint32(n)<<5|uint32(d), "FCMEQ V%d.4S, V%d.4S, #0.0", d, n)
}

func (f *function) isIntZero(n, d vec) {
	f.word(vector, 0x4ea09800|uint32(n)<<5|uint32(d), "CMEQ V%d.4S, V%d.4S, #0", d, n)
}

func (f *function) abs(n, d vec)     { f.two(0x4ea0f800, "FABS", n, d) }
func (f *function) floor(n, d vec)   { f.two(0x4e219800, "FRINTM", n, d) }
func (f *function) toInt(n, d vec)   { f.two(0x4ea1b800, "FCVTZS", n, d) }
func (f *function) fromInt(n, d vec) { f.two(0x4e21d800, "SCVTF", n, d) }

// widen converts the lower half of n.
func (f *function) widen(base uint32, name, tail string, n, d vec) {
	from, to := "4H", "4S"
	if strings.HasPrefix(tail, "8B") {
		from, to, tail = "8B", "8H", tail[2:]
	}
	f.word(vector, base|uint32(n)<<5|uint32(d), "%s V%d.%s, V%d.%s%s", name, d, to, n, from, tail)
}

func (f *function) fromF16(n, d vec)  { f.widen(0x0e217800, "FCVTL", "", n, d) }
func (f *function) fromBF16(n, d vec) { f.widen(0x2e613800, "SHLL", ", #16", n, d) }

// fromBytes extends the lowest four bytes to words, with their signs or with zeros.
func (f *function) fromBytes(signed bool, n, d vec) {
	if signed {
		f.widen(0x0f08a400, "SXTL", "8B", n, d)
		f.widen(0x0f10a400, "SXTL", "", d, d)
		return
	}
	f.widen(0x2f08a400, "UXTL", "8B", n, d)
	f.widen(0x2f10a400, "UXTL", "", d, d)
}

// fromF8 converts the lowest four bytes. With a byte shifted to the bits of float16, and bit 14 cleared, which is a copy of
// the sign, its number is 2^8 times as large, exactly. 480, which stands for NaN, is the only one whose product with the
// second factor overflows, so that 0 times the product is NaN.
func (f *function) fromF8(n, factors, d vec) {
	f.scope(func() {
		t := f.vec()
		f.widen(0x0f0fa400, "SSHLL", "8B, #7", n, d)
		f.word(vector, 0x6f02b400|uint32(d), "BIC V%d.8H, #0x40, LSL #8", d)
		f.fromF16(d, d)
		f.fmulAt(d, factors, 1, t)
		f.fmulAt(d, factors, 0, d)
		f.fmaAt(t, factors, 2, d)
	})
}

// loadF8Factors reads what fromF8 takes.
func (f *function) loadF8Factors(factors vec) {
	f.scope(func() { f.copy(f.constant(cF8), factors) })
}

func (f *function) toF16(n, d vec) {
	f.word(vector, 0x0e216800|uint32(n)<<5|uint32(d), "FCVTN V%d.4H, V%d.4S", d, n)
}

// toBF16 writes the upper half of n + 0x7fff + b, where b is the lowest bit of that half, and a quiet NaN for NaN.
func (f *function) toBF16(n, d vec) {
	f.scope(func() {
		sum, bit, number := f.vec(), f.vec(), f.vec()
		f.word(vector, 0x4f03c7e0|uint32(sum), "MOVI V%d.4S, #0x7f, MSL #8", sum)
		f.emit(vector, "VSHL $15, %s, %s", n.s4(), bit.s4())
		f.emit(vector, "VUSRA $31, %s, %s", bit.s4(), sum.s4())
		f.words("VADD", n, sum, sum)
		f.equal(n, n, number)
		f.copy(n, bit)
		f.word(vector, 0x4f025400|uint32(bit), "ORR V%d.4S, #0x40, LSL #16", bit)
		f.whereNot(number, bit, sum)
		f.word(vector, 0x0f108400|uint32(sum)<<5|uint32(d), "SHRN V%d.4H, V%d.4S, #16", d, sum)
	})
}

// products computes the 64 bit products of the lower and of the upper words.
func (f *function) products(n, m, low, high vec) {
	f.word(vector, 0x2ea0c000|uint32(m)<<16|uint32(n)<<5|uint32(low), "UMULL V%d.2D, V%d.2S, V%d.2S", low, n, m)
	f.word(vector, 0x6ea0c000|uint32(m)<<16|uint32(n)<<5|uint32(high), "UMULL2 V%d.2D, V%d.4S, V%d.4S", high, n, m)
}

// largestLane and largestWord write the largest number of n, or word without a sign, to its
// lowest lane.
func (f *function) largestLane(n vec) {
	f.word(vector, 0x6e30c800|uint32(n)<<5|uint32(n), "FMAXNMV S%d, V%d.4S", n, n)
}

func (f *function) largestWord(n vec) {
	f.word(vector, 0x6eb0a800|uint32(n)<<5|uint32(n), "UMAXV S%d, V%d.4S", n, n)
}

// Bits. andNot computes d = n and not m; where replaces d by n where mask is set, whereNot
// where it is not.
func (f *function) bits(name string, m, n, d vec) {
	f.emit(vector, "%s %s, %s, %s", name, m.b16(), n.b16(), d.b16())
}
func (f *function) and(n, m, d vec)         { f.bits("VAND", m, n, d) }
func (f *function) xor(n, m, d vec)         { f.bits("VEOR", m, n, d) }
func (f *function) where(mask, n, d vec)    { f.bits("VBIT", mask, n, d) }
func (f *function) whereNot(mask, n, d vec) { f.bits("VBIF", mask, n, d) }
func (f *function) andNot(n, m, d vec) {
	f.word(vector, 0x4e601c00|uint32(m)<<16|uint32(n)<<5|uint32(d), "BIC V%d.16B, V%d.16B, V%d.16B", d, n, m)
}

func (f *function) words(name string, n, m, d vec) {
	f.emit(vector, "%s %s, %s, %s", name, m.s4(), n.s4(), d.s4())
}

func (f *function) pairs(name string, n, m, d vec) {
	f.emit(vector, "%s %s, %s, %s", name, m.d2(), n.d2(), d.d2())
}

// transpose transposes four vectors in place.
func (f *function) transpose(r []vec) {
	f.scope(func() {
		t := f.vectors(4)
		f.words("VTRN1", r[0], r[1], t[0])
		f.words("VTRN2", r[0], r[1], t[1])
		f.words("VTRN1", r[2], r[3], t[2])
		f.words("VTRN2", r[2], r[3], t[3])
		f.pairs("VZIP1", t[0], t[2], r[0])
		f.pairs("VZIP1", t[1], t[3], r[1])
		f.pairs("VZIP2", t[0], t[2], r[2])
		f.pairs("VZIP2", t[1], t[3], r[3])
	})
}
