package gpu

import (
	"crypto/sha256"
	"encoding/hex"
	"io"
	"slices"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/tuned"
	"github.com/seed90331342/attn/shaders"
)

// tuneClass is what calls have in common that share a choice: what their kernel is
// specialised on, and how large their grid is. The number of keys is not in it: a
// workgroup takes them one tile after the other, whatever the variant.
type tuneClass struct {
	dim, valueDim      int
	in, kv             backend.DType
	paired, wide, half bool
	rows               int  // at most, of all heads; 0 is no bound
	short              bool // at most shortRows a head, so that large tiles are partly empty
}

// rowClasses are the bounds of tuneClass.rows: in workgroups of 128 rows 4, 32 and
// 256, the last of which keeps a large GPU busy.
var rowClasses = []int{512, 4096, 32768}

const shortRows = 64

func (s flashShape) tuneClass() tuneClass {
	columns := 4 * s.class.lanes
	k := tuneClass{
		dim: s.class.width, valueDim: (s.valueDim + columns - 1) / columns * columns,
		in: s.in, kv: s.kv, paired: s.paired, wide: s.wide, half: s.half, short: s.seqQ <= shortRows,
	}
	for _, n := range rowClasses {
		if s.heads*s.seqQ <= n {
			k.rows = n
			break
		}
	}
	return k
}

// stored returns the class as the file has it, with a hash of the kernel and of the
// variants' constants.
func (k tuneClass) stored(s flashShape, list []flashVariant) tuned.Class {
	h := sha256.New()
	io.WriteString(h, shaders.Flash.Text()) // a hash takes everything
	var keys []string
	for _, v := range list {
		keys = append(keys, v.label()+" "+s.kernel(v, k.valueDim).key())
	}
	slices.Sort(keys) // the rule's comes first, which may be another for each shape of a class
	for _, key := range keys {
		io.WriteString(h, "\n"+key)
	}
	return tuned.Class{
		DType: k.in.String(), Dim: k.dim, ValueDim: k.valueDim, Features: k.features(), Rows: k.rows, Source: short(h.Sum(nil)),
	}
}

// code returns a hash of v's source as it is compiled for values of dv columns. To
// make that takes some 50 ms, so that it is done for the best one only.
func (s flashShape) code(v flashVariant, dv int) (string, error) {
	kernel := s.kernel(v, dv)
	src, err := kernel.kernel.Specialise(kernel.consts)
	h := sha256.Sum256([]byte(src))
	return short(h[:]), err
}

func short(hash []byte) string { return hex.EncodeToString(hash[:8]) }

// like reports whether a stored class is k but for its source.
func (k tuneClass) like(c tuned.Class) bool {
	return c.DType == k.in.String() && c.Dim == k.dim && c.ValueDim == k.valueDim && c.Features == k.features() && c.Rows == k.rows
}

func (k tuneClass) features() string {
	text := ""
	if k.kv != k.in {
		text = "kv-" + k.kv.String()
	}
	for _, f := range []struct {
		on   bool
		name string
	}{{k.paired, "paired"}, {!k.wide, "scalar"}, {k.half, "half-out"}, {k.short, "short"}} {
		if f.on {
			if text != "" {
				text += " "
			}
			text += f.name
		}
	}
	return text
}

// kernel is the one of v for calls of shape s with values of dv columns.
func (s flashShape) kernel(v flashVariant, dv int) variant {
	return v.kernel(dv, s.in, s.kv, s.paired, s.wide, s.half)
}

// candidates returns the variants that could run calls of shape s, what the rule
// takes first. On a GPU there is also L with fewer loops written out, as its code is
// the longest.
func (s flashShape) candidates() []flashVariant {
	s.valueDim = s.tuneClass().valueDim
	var list []flashVariant
	add := func(v flashVariant) {
		if s.fits(v) == "" {
			list = append(list, v)
		}
	}
	for _, v := range flashVariants[s.class] {
		if s.software {
			v = v.quick()
		}
		add(v)
		if v.name == "L" && !s.software {
			v.expand = shaders.Registers
			add(v)
		}
	}
	first, _ := chooseVariant(s)
	for i, v := range list {
		if v.label() == first.label() {
			copy(list[1:i+1], list[:i])
			list[0] = v
		}
	}
	return list
}

// label names a variant among candidates.
func (v flashVariant) label() string {
	if v.expand == shaders.Registers {
		return v.name + "/registers"
	}
	return v.name
}

// safeMemory is what every WebGPU device has for a workgroup. Drivers have lost
// devices over more, also within what they offer.
const safeMemory = 16 << 10

// risky reports whether a variant may only be tried where the loss of the device
// harms nobody.
func (v flashVariant) risky() bool { return v.memory() > safeMemory }
