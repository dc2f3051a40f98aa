package tune

import (
	"crypto/sha256"
	"encoding/hex"
	"slices"
	"strings"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/tunefile"
	"github.com/seed90331342/attn/shaders"
)

// class is what calls that share a choice have in common: the constants of their kernel
// and the size of their grid. The number of keys is not part of it, because a workgroup
// takes the tiles of keys one after the other with any variant.
type class struct {
	dim, valueDim int
	in, kv        backend.DType
	pairs         Pairs // of the calls that are measured
	wide, half    bool
	partial       bool
	rows          int  // the most rows of all heads; 0 is no bound
	short         bool // at most shortRows a head, so that large tiles are partly empty
}

// rowClasses are the bounds of class.rows. In workgroups of 128 rows they are 4, 32 and
// 256, the last of which keeps a large GPU busy.
var rowClasses = []int{512, 4096, 32768}

const shortRows = 64

func (s Shape) class() class {
	columns := 4 * s.Tiling.Lanes
	k := class{
		dim: s.Tiling.Width, valueDim: (s.ValueDim + columns - 1) / columns * columns,
		in: s.In, kv: s.KV, pairs: s.measured(), wide: s.Wide, half: s.Half, short: s.SeqQ <= shortRows, partial: s.Partial,
	}
	for _, n := range rowClasses {
		if s.Heads*s.SeqQ <= n {
			k.rows = n
			break
		}
	}
	return k
}

// exercised are the options of the calls that are measured for all calls with options on
// software drivers, whose kernel with options is one for all of them.
var exercised = Pairs{Mask: true, Bias: true, Softcap: true}

// measured returns the options of the calls that stand for s. Masks of both kinds and biases
// of all kinds cost about the same.
func (s Shape) measured() Pairs {
	p := s.Pairs
	if s.Software && p != (Pairs{}) {
		return exercised
	}
	return Pairs{Mask: p.Mask || p.Blocks, Bias: p.Bias || p.OtherBias, Slopes: p.Slopes, Softcap: p.Softcap, Dropout: p.Dropout}
}

// typical returns the shape that stands for those of its class.
func (s Shape) typical() Shape {
	k := s.class()
	s.ValueDim, s.Pairs = k.valueDim, k.pairs
	return s
}

// unhashed returns the class as the file has it, without Source.
func (k class) unhashed() tunefile.Class {
	var features []string
	for _, f := range []struct {
		on   bool
		name string
	}{{k.kv != k.in, "kv-" + k.kv.String()}, {k.pairs.Mask, "mask"}, {k.pairs.Bias, "bias"}, {k.pairs.Slopes, "alibi"}, {k.pairs.Softcap, "softcap"},
		{k.pairs.Dropout, "dropout"}, {!k.wide, "scalar"}, {k.half, "half-out"}, {k.short, "short"}, {k.partial, "partial"}} {
		if f.on {
			features = append(features, f.name)
		}
	}
	return tunefile.Class{DType: k.in.String(), Dim: k.dim, ValueDim: k.valueDim, Features: strings.Join(features, " "), Rows: k.rows}
}

// stored returns the class of the shape as the file has it. Source is a hash of the
// kernel's source and of the candidates' constants.
func (s Shape) stored() tunefile.Class {
	s = s.typical()
	var keys []string
	for _, v := range s.Candidates() {
		keys = append(keys, v.Label()+" "+shaders.Key(s.Kernel(v)))
	}
	slices.Sort(keys) // their order depends on the shape
	c := s.class().unhashed()
	kernel, common := shaders.Text(shaders.Flash{})
	c.Source = hash(kernel + common + "\n" + strings.Join(keys, "\n"))
	return c
}

// code returns a hash of the source that is compiled for v. Rendering takes about
// 50 ms and is done for the best variant only.
func (s Shape) code(v Variant) (string, error) {
	src, err := shaders.Render(s.typical().Kernel(v))
	return hash(src), err
}

func hash(text string) string {
	h := sha256.Sum256([]byte(text))
	return hex.EncodeToString(h[:8])
}
