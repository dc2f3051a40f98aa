package tune

import (
	"crypto/sha256"
	"encoding/hex"
	"slices"
	"strings"

	"github.com/seed90331342/attn/gpu/internal/tunefile"
	"github.com/seed90331342/attn/shaders"
)

// What the tuning file holds.
type (
	Class = tunefile.Class
	Pairs = tunefile.Pairs
	Trial = tunefile.Trial
	Entry = tunefile.Entry
)

// rowClasses are the bounds of Class.Rows. In workgroups of 128 rows they are 4, 32 and
// 256, the last of which keeps a large GPU busy.
var rowClasses = []int{512, 4096, 32768}

const shortRows = 64

// class returns the class of s without Source.
func (s Shape) class() Class {
	c := Class{
		Dim: s.Tiling.Width, ValueDim: roundUp(s.ValueDim, 4*s.Tiling.Lanes), In: s.In.String(), KV: s.KV.String(),
		Pairs: s.measured(), Scalar: !s.Wide, Half: s.Half, Short: s.SeqQ <= shortRows, Partial: s.Partial,
	}
	if i := slices.IndexFunc(rowClasses, func(n int) bool { return s.Heads*s.SeqQ <= n }); i >= 0 {
		c.Rows = rowClasses[i]
	}
	return c
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
	c := s.class()
	s.ValueDim, s.Pairs = c.ValueDim, c.Pairs
	return s
}

// stored returns the class of the shape with its Source.
func (s Shape) stored() Class {
	s = s.typical()
	var keys []string
	for _, v := range s.Candidates() {
		keys = append(keys, v.Label()+" "+shaders.Key(s.Kernel(v)))
	}
	slices.Sort(keys) // their order depends on the shape
	c := s.class()
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
