package tune

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"slices"
	"strings"

	"github.com/seed90331342/attn/shaders"
)

// Class is what calls that share a choice have in common: the constants of their kernel
// and the size of their grid. The number of keys is not part of it, because a workgroup
// takes the tiles of keys one after the other with any variant.
type Class struct {
	In       string `json:"dtype"`
	KV       string `json:"kv"` // dtype of keys and values
	Dim      int    `json:"dim"`
	ValueDim int    `json:"value_dim"`
	Rows     int    `json:"rows"`  // the most query rows of all heads; 0 is no bound
	Pairs    Pairs  `json:"pairs"` // of the calls that are measured
	Scalar   bool   `json:"scalar,omitempty"`
	Half     bool   `json:"half,omitempty"`
	Short    bool   `json:"short,omitempty"` // at most shortRows a head, so that large tiles are partly empty
	Partial  bool   `json:"partial,omitempty"`
	// Source is a hash of the kernel and of its variants' constants, "" until it is needed.
	Source string `json:"source"`
}

// String describes c for a reader.
func (c Class) String() string {
	rows := "more rows"
	if c.Rows > 0 {
		rows = fmt.Sprintf("up to %d rows", c.Rows)
	}
	text := fmt.Sprintf("%s · D=%d Dv=%d · %s", c.In, c.Dim, c.ValueDim, rows)
	features := []string{}
	for _, f := range []struct {
		on   bool
		name string
	}{
		{c.KV != c.In, "kv-" + c.KV}, {c.Pairs.Mask, "mask"}, {c.Pairs.Bias, "bias"}, {c.Pairs.Slopes, "alibi"}, {c.Pairs.Softcap, "softcap"},
		{c.Pairs.Dropout, "dropout"}, {c.Scalar, "scalar"}, {c.Half, "half-out"}, {c.Short, "short"}, {c.Partial, "partial"},
	} {
		if f.on {
			features = append(features, f.name)
		}
	}
	if len(features) > 0 {
		text += " · " + strings.Join(features, " ")
	}
	return text
}

// rowClasses are the bounds of Class.Rows. In workgroups of 128 rows they are 4, 32 and
// 256, the last of which keeps a large GPU busy.
var rowClasses = []int{512, 4096, 32768}

const shortRows = 64

// class returns the class of s without Source.
func (s Shape) class() Class {
	columns := 4 * s.Tiling.Lanes
	c := Class{
		Dim: s.Tiling.Width, ValueDim: (s.ValueDim + columns - 1) / columns * columns, In: s.In.String(), KV: s.KV.String(),
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
