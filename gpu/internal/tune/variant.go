// Package tune chooses kernels: a variant of the prefill kernel, flash.wgsl, by rule or by measuring, the tiling
// of decode.wgsl, and kernels on matrix units.
//
// A [Variant] is one way to divide the tiles of flash.wgsl among the threads of a workgroup. All variants compute the
// same bits. Which one is the fastest depends on the device and on the [Shape] of the call. [Shape.Rule] estimates it
// from the shape and the device's limits; a [Tuner] measures it, compares the results of each variant with those of the
// plain kernel, and keeps its choice in a file for later processes.
//
// The package runs calls through a small interface, [Runner], and knows no device.
package tune

import (
	"cmp"
	"fmt"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/shaders"
)

// Tiling is the part of the order of operations that depends on the head size. The
// prefill kernel and the decode kernel share it, so that both compute the same bits.
type Tiling struct {
	Width int // the largest head size, of keys and of values
	Keys  int // of a tile
	Lanes int // parts of a row's sum: key j is in part j mod Lanes
	Split int // keys of a split: the multiple of Keys that is nearest to 256
}

var tilings = []Tiling{
	{32, 32, 4, 256}, {64, 64, 8, 256}, {80, 80, 10, 240}, {96, 96, 12, 288}, {128, 128, 16, 256}, {256, 64, 16, 256},
}

// TilingOf returns the smallest tiling that holds heads of both sizes, else the largest.
func TilingOf(dim, valueDim int) Tiling {
	for _, c := range tilings {
		if max(dim, valueDim) <= c.Width {
			return c
		}
	}
	return tilings[len(tilings)-1]
}

// RowThreads returns the threads along rows of a workgroup with so many along keys or columns: at most 128 together, because with
// more, 8x8 tiles leave registers for one workgroup only on a processor. Threads come in pairs along rows.
func RowThreads(others int) int { return min(128/others, 16) &^ 1 }

// Variant is one way to divide tiles among threads. The zero Variant stands for the plain kernel, attention.wgsl.
type Variant struct {
	Name string
	Tiling
	tiles shaders.Flash // the part of the kernel that does not depend on the shape
	// Expand is the level to which loops are unrolled, as in package shaders.
	Expand shaders.Expand
	// Scalar loads elements one at a time even where four are adjacent.
	Scalar bool
}

// Shape is the part of a call that the choice of a variant depends on.
type Shape struct {
	Pairs
	Tiling   Tiling
	ValueDim int
	Heads    int // of all batches
	SeqQ     int

	In, KV   backend.DType // of queries, and of keys and values
	Partial  bool          // keys have fewer elements than Tiling.Width, or values than whole vec4 of lanes
	Wide     bool          // elements along D are adjacent, and rows begin at multiples of 4
	Eights   bool          // the same with multiples of 8
	Half     bool          // the output has 16-bit elements
	Software bool          // the device is a software driver
	Direct   bool          // the device is fastest with D; set by Tuner
	NVIDIA   bool          // the device is a GPU of NVIDIA; set by Tuner
	OwnExp2  bool          // kernels use the device's exp2
	Limits   Limits
}

// Limits are the limits of a device that a variant must keep.
type Limits struct {
	Threads int    // of a workgroup
	Memory  int    // of a workgroup, in bytes
	Binding uint64 // bytes of a storage buffer binding
}

// blocking is what a thread and a stage have of a tile.
type blocking struct {
	name       string
	rowVecs    int // vec4 of rows of a thread: 2 for 8 rows, 1 for 4
	rowThreads int // threads along rows
	// What a stage holds in workgroup memory: vec4 of depths of Q and K, and keys of P and V
	// for each thread along keys. Without depths a stage holds weights only.
	stagedDepths, stagedKeys int
	columnVecs               int // vec4 of columns of a thread at a time; more columns take several turns
}

// blockings are those of the variants for each width of tilings. L has tiles of 8 rows by 8 keys and 8 columns a thread
// (width 256: 4 keys and 16 columns). M has 4 rows, which takes half the registers. S has 4 rows and half the threads
// or a few more, for small grids. They fit in 16 KiB of workgroup memory. L32 and L48 stage twice as much at once, or
// have more rows, in 32 and 48 KiB. D stages weights only, for software drivers: there a read of workgroup memory costs
// as much as one of a buffer, and a barrier more than both.
var blockings = map[int][]blocking{
	32:  {{"L", 2, 16, 4, 4, 2}, {"M", 1, 16, 4, 4, 2}, {"S", 1, 8, 4, 4, 2}, {"L32", 2, 16, 8, 8, 2}, {"D", 2, 4, 0, 8, 2}},
	64:  {{"L", 2, 16, 4, 2, 2}, {"M", 1, 16, 4, 2, 2}, {"S", 1, 8, 4, 2, 2}, {"L32", 2, 16, 8, 4, 2}, {"D", 2, 4, 0, 8, 2}},
	80:  {{"L", 2, 12, 4, 1, 2}, {"M", 1, 12, 4, 1, 2}, {"S", 1, 8, 4, 1, 2}, {"L32", 2, 12, 8, 2, 2}, {"D", 2, 2, 0, 8, 2}},
	96:  {{"L", 2, 10, 4, 1, 2}, {"M", 1, 10, 4, 1, 2}, {"S", 1, 8, 4, 1, 2}, {"L32", 2, 10, 8, 2, 2}, {"D", 2, 2, 0, 8, 2}},
	128: {{"L48", 2, 16, 8, 2, 2}, {"L", 2, 8, 4, 1, 2}, {"M", 1, 8, 4, 1, 2}, {"S", 1, 4, 4, 1, 2}, {"L32", 2, 8, 8, 2, 2}, {"D", 2, 2, 0, 8, 2}},
	256: {{"L", 2, 8, 4, 1, 2}, {"M", 1, 8, 4, 1, 2}, {"S", 1, 4, 4, 1, 2}, {"L32", 2, 8, 4, 1, 4}, {"D", 2, 4, 0, 4, 2}},
}

// variants are the variants of each tiling.
var variants = map[Tiling][]Variant{}

func init() {
	for _, c := range tilings {
		for _, x := range blockings[c.Width] {
			k := shaders.Flash{
				TX: c.Lanes, TY: x.rowThreads, RV: x.rowVecs, KT: c.Keys / c.Lanes, CV: x.columnVecs, QD: x.stagedDepths, JJ: x.stagedKeys, ER: 1, Split: c.Split,
			}
			for 2*k.ER <= 4*k.RV && 2*k.ER*k.TX <= k.RV*max(4*k.QD, k.JJ*k.TX) { // rows that fit the memory of the weights
				k.ER *= 2
			}
			variants[c] = append(variants[c], Variant{Name: x.name, Tiling: c, tiles: k, Expand: shaders.Full})
		}
	}
}

// plainName is the label of the plain kernel.
const plainName = "plain"

// Label names a variant among [Shape.Candidates].
func (v Variant) Label() string {
	if v.Expand == shaders.Registers {
		return v.Name + "/registers"
	}
	return cmp.Or(v.Name, plainName)
}

// Quick returns the variant for software drivers: it compiles in a third of the time,
// and there is one of it instead of two.
func (v Variant) Quick() Variant {
	v.Expand, v.Scalar = shaders.Registers, !v.direct()
	return v
}

// Rows returns the query rows of a workgroup.
func (v Variant) Rows() int { return 4 * v.tiles.RV * v.tiles.TY }

// direct reports whether only weights are staged.
func (v Variant) direct() bool { return v.tiles.QD == 0 }

// Area returns the vec4 of state that a workgroup leaves for values of dv columns: output, maxima and sums.
func (v Variant) Area(dv int) int {
	k := v.tiles
	return (4*k.RV*k.CV*v.turns(dv) + 2*k.RV) * k.TX * k.TY
}

// turns returns the turns that values of dv columns take.
func (v Variant) turns(dv int) int {
	once := 4 * v.Lanes * v.tiles.CV
	return (dv + once - 1) / once
}

// memory returns the bytes of workgroup memory with a mask.
func (v Variant) memory() int {
	k := v.tiles
	k.Masks = shaders.Present
	return shaders.Describe(k).WorkgroupMemory
}

// safeMemory is the workgroup memory of every WebGPU device. Drivers have lost devices
// over kernels with more, even within their own limits.
const safeMemory = 16 << 10

// risky reports whether a variant may lose the device. It is measured on request only.
func (s Shape) risky(v Variant) bool { return v.memory() > safeMemory && !s.proven(v) }

// proven reports whether v is one for particular devices that has run on this one: L48 is 8% faster than L on an H200.
func (s Shape) proven(v Variant) bool { return s.NVIDIA && v.Name == "L48" }

// Loops returns a bound on the rounds of loops that a thread makes for one tile.
func (v Variant) Loops(dim, dv int, mask bool) int {
	k, turns := v.tiles, v.turns(dv)
	depths := 4 * max(k.QD, 1)
	stages, steps := (dim+depths-1)/depths, k.KT/k.JJ
	perStage, perStep, rest := 1, 1, 1
	if v.Expand < shaders.Full { // with the loops of @unroll(deep)
		perStage += k.QD
		perStep += turns * k.JJ * k.TX
		rest += k.RV*k.TX + 8*k.RV*k.KT
	}
	if mask { // each thread stages some words, see MW in flash.wgsl
		each, threads := 32/k.TX, k.TX*k.TY
		words := v.Rows() * ((k.KT + each - 1) / each)
		rest += (words + threads - 1) / threads * (1 + 32)
	}
	return rest + stages*perStage + steps*perStep
}

// option returns what kernels of v know about an option. Scalar ones look at flags if the call has any option.
func (s Shape) option(v Variant, present bool) shaders.Option {
	switch {
	case (v.Scalar || v.direct()) && s.Pairs != Pairs{}:
		return shaders.Flagged
	case present:
		return shaders.Present
	}
	return shaders.Absent
}

// ahead reports whether v loads values a step ahead. The registers that this takes pay only
// where the head size, the exponentials, what is staged and the absence of options leave
// enough of them. M and S are for devices with fewer registers.
func (s Shape) ahead(v Variant) bool {
	if v.tiles.RV < 2 || v.direct() || v.memory() > safeMemory || !s.Wide || v.Scalar || s.Pairs != (Pairs{}) || s.In != backend.F32 || s.KV != backend.F32 {
		return false
	}
	switch v.Width {
	case 96, 128:
		return true
	case 64, 256:
		return s.OwnExp2
	}
	return false
}

// Kernel returns the kernel of v for calls of shape s.
func (s Shape) Kernel(v Variant) shaders.Flash {
	k := v.tiles
	k.Expand, k.In, k.KV, k.Out16 = v.Expand, shaders.Type(s.In), shaders.Type(s.KV), s.Half
	k.Vec, k.Ahead, k.VP = s.Wide && !v.Scalar, s.ahead(v), v.turns(s.ValueDim)
	// Rows fill what v stages of them, so that it need not look for their end.
	k.Full = k.Vec && !s.Partial && v.Width%(4*max(k.QD, 1)) == 0 && s.ValueDim%(4*v.Lanes*k.CV) == 0
	k.Masks, k.Blocked, k.Biases = s.option(v, s.Mask), s.option(v, s.Blocks), s.option(v, s.Bias)
	if s.OtherBias || s.Bias && s.Slopes { // only a plain float32 bias has a kernel of its own
		k.Biases = shaders.Flagged
	}
	k.Sloped, k.Capped, k.Drops = s.option(v, s.Slopes), s.option(v, s.Softcap), s.option(v, s.Dropout)
	return k
}

// Fits returns "" for variants that can run calls of the shape, else the reason.
func (s Shape) Fits(v Variant) string {
	state, threads := uint64(2*16*v.Area(s.ValueDim)), v.tiles.TX*v.tiles.TY
	switch l := s.Limits; {
	case threads > l.Threads:
		return fmt.Sprintf("%s has %d threads a workgroup, the device up to %d", v.Name, threads, l.Threads)
	case v.memory() > l.Memory:
		return fmt.Sprintf("%s needs %d bytes of workgroup memory, the device has %d", v.Name, v.memory(), l.Memory)
	case state > l.Binding:
		return fmt.Sprintf("%s leaves %d bytes of state a workgroup, %d can be bound", v.Name, state, l.Binding)
	}
	return ""
}

// Busy is the number of workgroups that keep a large GPU busy: two for each of 132 SMs.
// softwareBusy keeps the threads of a software driver busy, each of which runs whole workgroups.
const (
	Busy         = 264
	softwareBusy = 16
)

// Rule returns a variant by rule: the one with the largest tiles of which there are enough to keep a large GPU or the
// threads of a software driver busy, else the one with the smallest. Tiles with twice the rows of a head are too large.
// It returns the zero Variant when none fits. why is the reason in either case. Measured choices take precedence, see
// [Tuner.Choose].
func (s Shape) Rule() (v Variant, why string) {
	busy, what := Busy, "a GPU"
	if s.Software {
		busy, what = softwareBusy, "a software driver"
	}
	for _, c := range variants[s.Tiling] {
		if len(c.Name) > 1 && !s.proven(c) || c.direct() != s.Direct {
			continue
		}
		if c.Name != "S" && !s.Direct && c.Rows() >= 2*s.SeqQ {
			continue // half of its rows or more would be idle
		}
		if bad := s.Fits(c); bad != "" {
			why = bad
			continue
		}
		v = c
		n := s.Heads * ((s.SeqQ + c.Rows() - 1) / c.Rows())
		why = fmt.Sprintf("%d workgroups", n)
		if n >= busy {
			why += " keep " + what + " busy"
			break
		}
	}
	if v.Name != "" && s.Software {
		v = v.Quick()
	}
	return v, why
}

// Candidates returns the variants that can run calls of the shape, the choice of [Shape.Rule] first. GPUs also get L
// with fewer unrolled loops, because its code is the longest.
func (s Shape) Candidates() []Variant {
	s = s.typical()
	var list []Variant
	add := func(v Variant) {
		if s.Fits(v) == "" {
			list = append(list, v)
		}
	}
	for _, v := range variants[s.Tiling] {
		if s.Software {
			add(v.Quick())
		} else if !v.direct() {
			add(v)
		}
		if v.Name == "L" && !s.Software {
			v.Expand = shaders.Registers
			add(v)
		}
	}
	first, _ := s.Rule()
	for i, v := range list {
		if v.Label() == first.Label() {
			copy(list[1:i+1], list[:i])
			list[0] = v
		}
	}
	return list
}
