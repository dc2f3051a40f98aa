package gpu

import (
	"fmt"
	"sync"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/shaders"
)

// flashVariant is one way to cut a class's tiles: how much a thread and a workgroup
// have at once.
type flashVariant struct {
	name string
	headClass
	rv int // vec4 of rows a thread: 2 for 8 rows, 1 for 4
	ty int // threads along rows
	// Per stage in workgroup memory: vec4 of depths of Q and K, keys of P and V for
	// each thread along keys, and vec4 of columns a thread, of which one with many
	// takes several turns.
	qd, jj, cv int
	// expand is how far loops are unrolled, in the terms of package shaders.
	expand uint32
	// scalar loads elements one by one even where four lie side by side.
	scalar bool
}

// flashVariants holds the variants of each class. L has tiles of 8 rows by 8 keys and
// 8 columns a thread (class 256: 4 keys and 16 columns), M has 4 rows, which takes
// half the registers, S does with half the threads, for grids that would be small.
// They fit in 16 KiB of workgroup memory; L32 and L48 stage twice as much at once,
// or have more rows, in as many KiB.
var flashVariants = map[headClass][]flashVariant{}

func init() {
	for _, c := range headClasses {
		flashVariants[c] = variantsOf(c)
	}
}

func variantsOf(c headClass) []flashVariant {
	ty := 16
	if c.lanes == 16 {
		ty = 8 // 128 threads, as 256 with 8x8 tiles leave no choice to the scheduler
	}
	l := flashVariant{name: "L", headClass: c, rv: 2, ty: ty, qd: 4, jj: max(16/c.lanes, 1), cv: 2, expand: shaders.Full}
	m, s, l32, l48 := l, l, l, l
	m.name, m.rv = "M", 1
	s.name, s.rv, s.ty = "S", 1, ty/2
	l32.name, l32.qd, l32.jj = "L32", 8, 2*l.jj
	if c.width == 256 {
		l32.qd, l32.jj, l32.cv = 4, 1, 4 // all columns in one turn
	}
	vs := []flashVariant{l, m, s, l32}
	if c.width == 128 {
		l48.name, l48.ty, l48.qd, l48.jj = "L48", 16, 8, 2
		vs = append(vs, l48)
	}
	return vs
}

func (v flashVariant) rows() int    { return 4 * v.rv * v.ty }
func (v flashVariant) kt() int      { return v.keys / v.lanes } // keys of a tile a thread
func (v flashVariant) threads() int { return v.lanes * v.ty }

// turns is how many times cv columns it takes for values of dv columns.
func (v flashVariant) turns(dv int) int {
	once := 4 * v.lanes * v.cv
	return (dv + once - 1) / once
}

// together is how many rows of a thread are written to o at once: a power of two
// for which they fit where its weights do.
func (v flashVariant) together() int {
	n := 1
	for 2*n <= 4*v.rv && 2*n*v.lanes <= max(4*v.rv*v.qd, v.jj*v.lanes*v.rv, v.lanes*v.rv) {
		n *= 2
	}
	return n
}

// lengths are those of the rows of a and b in flash.wgsl, in vec4: odd.
func (v flashVariant) lengths() (sa, sb int) {
	sa = max(4*v.rv*v.qd, v.jj*v.lanes*v.rv, v.lanes*max(v.rv, v.together()))
	sb = max(v.kt()*v.qd, v.jj*v.lanes*v.cv)
	return sa | 1, sb | 1
}

// memory is the workgroup memory in bytes.
func (v flashVariant) memory() int {
	sa, sb := v.lengths()
	return 16 * (v.ty*sa + v.lanes*sb)
}

// keep is how many vec4 of state a thread has: output, maxima and sums.
func (v flashVariant) keep(dv int) int {
	return 4*v.rv*v.cv*v.turns(dv) + 2*v.rv
}

// area is how many vec4 of state a workgroup leaves.
func (v flashVariant) area(dv int) int { return v.keep(dv) * v.threads() }

// perWord returns how many multiply-adds a thread does for each word that it reads
// from workgroup memory, for heads as large as the class holds. 4 is what an SM of 128
// multiply-adds and 32 words a clock needs to be bound by the former.
func (v flashVariant) perWord() float64 {
	rows, columns, turns := 4*v.rv, 4*v.cv, v.turns(v.width)
	scores, values := rows*v.kt()*v.width, rows*columns*turns*v.keys
	read := (rows+v.kt())*v.width + (rows+columns)*turns*v.keys
	return float64(scores+values) / float64(read)
}

// loops bounds the rounds of loops that a thread makes for one tile.
func (v flashVariant) loops(dim, dv int) int {
	turns := v.turns(dv)
	chunks := (dim + 4*v.qd - 1) / (4 * v.qd)
	steps := v.kt() / v.jj
	perChunk, perStep, rest := 1, 1, 1
	if v.expand < shaders.Full { // with the loops marked 'unroll deep'
		perChunk += v.qd
		perStep += turns * v.jj * v.lanes
		rest += v.rv*v.lanes + 8*v.rv*v.kt()
	}
	if v.expand < shaders.Registers { // and with the others
		rows, n := 4*v.rv, v.rv*v.kt()
		staged := (v.rows()*v.qd+v.keys*v.qd+v.jj*v.lanes*v.lanes*v.cv)/v.threads() + 3
		perChunk += 2*staged + v.qd*(v.rv+v.kt()+n)
		perStep += turns * (2*staged + steps + v.jj + v.jj*v.rv + v.jj*v.lanes*(v.rv+v.cv+v.cv*rows))
		rest += 2*n + 4*(v.rv+n) + 8*n + 3*(rows+rows*v.cv*turns)
	}
	return rest + chunks*perChunk + steps*perStep
}

// quick is the variant for software drivers: it compiles in a third of the time, and
// half as often.
func (v flashVariant) quick() flashVariant {
	v.expand, v.scalar = shaders.Registers, true
	return v
}

// kernel returns the kernel of the variant for values of dv columns, queries of type in
// and keys and values of type kv. paired says that there is a mask, a bias or softcap, wide that neighbours
// along D lie side by side and rows begin at multiples of 4, half that o takes 16-bit
// elements.
func (v flashVariant) kernel(dv int, in, kv backend.DType, paired, wide, half bool) variant {
	key := kernelKey{v, v.turns(dv), in, kv, paired, wide && !v.scalar, half}
	if k, ok := flashKernels.Load(key); ok {
		return k.(variant)
	}
	turns := v.turns(dv)
	sa, sb := v.lengths()
	up := func(n int) int { return (n + v.threads() - 1) / v.threads() }
	rows := 4 * v.rv
	k := shaders.Flash
	k.WorkgroupMemory, k.Threads = v.memory(), v.threads()
	c := map[string]uint32{
		"EXPAND": v.expand, "IN": uint32(in), "KV": uint32(kv),
		"OUT16": uint32(when(half, 1)), "VEC": uint32(when(key.wide, 1)), "PAIRED": uint32(when(paired, 1)),
	}
	for name, n := range map[string]int{
		"TX": v.lanes, "TY": v.ty, "THREADS": v.threads(), "RV": v.rv, "KT": v.kt(), "CV": v.cv, "VP": turns,
		"QD": v.qd, "JJ": v.jj, "ER": v.together(), "SA": sa, "SB": sb, "S4": v.rv * v.kt(), "ROWS": rows,
		"COLS": v.cv * turns, "O4": rows * v.cv * turns, "KEEP": v.keep(dv), "STEPS": v.kt() / v.jj, "SPLIT": v.split,
		"QN": up(v.rows() * v.qd), "KN": up(v.keys * v.qd), "VN": up(v.jj * v.lanes * v.lanes * v.cv),
	} {
		c[name] = uint32(n)
	}
	flashKernels.Store(key, variant{k, c})
	return variant{k, c}
}

// flashKernels are the kernels that calls asked for, by kernelKey: a call that is
// repeated makes none of its constants again.
var flashKernels sync.Map

type kernelKey struct {
	flashVariant
	turns              int
	in, kv             backend.DType
	paired, wide, half bool
}

// flashShape is what the choice of a variant depends on.
type flashShape struct {
	class    headClass
	valueDim int
	heads    int // of all batches
	seqQ     int
	// What the kernel is specialised on, as flashVariant.kernel has it.
	in, kv             backend.DType
	paired, wide, half bool
	software           bool
	limits             gputypes.Limits
}

// chooser picks a variant for a shape and says why; a variant without a name stands
// for the plain kernel.
type chooser func(flashShape) (v flashVariant, why string)

// fits says why a variant cannot run, or "".
func (s flashShape) fits(v flashVariant) string {
	switch l := s.limits; {
	case v.threads() > int(l.MaxComputeInvocationsPerWorkgroup):
		return fmt.Sprintf("%s has %d threads a workgroup, the device up to %d", v.name, v.threads(), l.MaxComputeInvocationsPerWorkgroup)
	case v.memory() > int(l.MaxComputeWorkgroupStorageSize):
		return fmt.Sprintf("%s takes %d bytes of workgroup memory, the device has %d", v.name, v.memory(), l.MaxComputeWorkgroupStorageSize)
	case uint64(2*16*v.area(s.valueDim)) > maxWindow(l):
		return fmt.Sprintf("%s leaves %d bytes of state a workgroup, %d can be bound", v.name, 2*16*v.area(s.valueDim), maxWindow(l))
	}
	return ""
}

// busy is how many workgroups keep a large GPU busy: two for each of 132 SMs.
const busy = 264

// chooseVariant picks a variant by rule: the largest tiles of which there are enough
// to keep a large GPU busy, else the smallest. name is "" when none can run. Measured
// choices come before it, see tuner.choose.
func chooseVariant(s flashShape) (v flashVariant, why string) {
	for _, c := range flashVariants[s.class] {
		if len(c.name) > 1 {
			continue // L32 and L48 are for devices on which they were measured
		}
		if bad := s.fits(c); bad != "" {
			why = bad
			continue
		}
		v = c
		n := s.heads * ((s.seqQ + c.rows() - 1) / c.rows())
		why = fmt.Sprintf("%d workgroups", n)
		if n >= busy {
			why += " keep a GPU busy"
			break
		}
	}
	if v.name != "" && s.software {
		v = v.quick()
	}
	return v, why
}
