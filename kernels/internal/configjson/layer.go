package configjson

import (
	"cmp"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/seed90331342/attn/kernels"
)

// The kinds of layers.
const (
	Full    = "full_attention"
	Sliding = "sliding_attention"
	Linear  = "linear_attention"
	Chunked = "chunked_attention"
)

// Layer is the attention of a layer.
type Layer struct {
	Kind                            string
	Model, Heads, KVHeads, HeadDim  int
	Bias, Sinks, KeysAsValues, Gate bool    // the gate of Qwen, which is in the query projection
	Shared                          int     // the layer whose keys and values it reads; -1 for its own
	Window                          int     // 0 for none; it counts the row itself
	Chunk                           int     // 0 for none
	Scale, Softcap                  float64 // 0 for the default, and for none
	Norm                            *Norm
	Rope                            *Rope
	Temperature                     *Temperature
	Latent                          *Latent
	Linear                          *Delta
}

// Norm is the norm of queries and keys.
type Norm struct {
	kernels.Norm
	Projection, Mean, Weightless, AfterRoPE, Values bool
}

// Temperature is the factor of queries by their positions.
type Temperature struct {
	Scale float64
	Floor int
}

// Latent has the sizes of latent attention.
type Latent struct{ QueryRank, Rank, NopeDim, RopeDim, ValueDim int }

// Delta has the sizes of linear attention with the gated delta rule, as package nn has them.
type Delta struct {
	Model, KeyHeads, ValueHeads, KeyDim, ValueDim, Conv int

	Channels   bool
	Rank       int
	LowerBound float64
	Gate       kernels.Activation
	Epsilon    float64
	DType      kernels.DType
}

// Rope is rope_scaling or rope_parameters, of all layers or with one object for each kind. That of a Layer is of
// its kind, and has all defaults.
type Rope struct {
	Kind                string  `json:"rope_type"` // of the scaling, or "default"
	OldKind             string  `json:"type"`
	Factor              float64 `json:"factor"`
	Original            int     `json:"original_max_position_embeddings"`
	Truncate            *bool   `json:"truncate"`
	Base                float64 `json:"rope_theta"`
	Partial             float64 `json:"partial_rotary_factor"`
	Sections            []int   `json:"mrope_section"`
	SectionsInterleaved bool    `json:"mrope_interleaved"`
	Full                *Rope   `json:"full_attention"`
	Sliding             *Rope   `json:"sliding_attention"`

	Dim         int    `json:"-"` // 0 for all elements
	Interleaved bool   `json:"-"`
	Text        []byte `json:"-"` // the whole object, with the other fields of the scaling
}

// UnmarshalJSON also keeps the text.
func (r *Rope) UnmarshalJSON(text []byte) error {
	type fields Rope
	r.Text = append(r.Text[:0], text...)
	return json.Unmarshal(text, (*fields)(r))
}

// Kind returns the kind of layer i.
func (c *Config) Kind(i int) string {
	switch {
	case c.Family == "gemma4" && i == c.Layers-1:
		return Full // whatever layer_types has
	case len(c.Kinds) > 0:
		return c.Kinds[i]
	case c.Family == "llama4" && c.Rotates(i):
		return Chunked
	case slices.Contains(c.Kimi.Linear, i+1):
		return Linear
	case len(c.Kimi.Full)+len(c.Kimi.Linear) > 0:
		return Full
	case c.FullInterval > 0 && (i+1)%c.FullInterval != 0:
		return Linear
	case c.Window == nil || i < c.FullLayers && c.Family != "qwen3_moe" || c.Pattern > 0 && (i+1)%c.Pattern == 0 || c.Family == "smollm3" && c.Rotates(i):
		return Full
	}
	return Sliding
}

// Rotates reports whether layer i has a RoPE, unless it is linear.
func (c *Config) Rotates(i int) bool {
	switch {
	case c.Family == "cohere2":
		return c.Kind(i) == Sliding
	case c.Family != "smollm3" && c.Family != "llama4":
		return true
	case len(c.Rotated) > 0:
		return c.Rotated[i] != 0
	}
	return c.NoRoPE == 0 || (i+1)%c.NoRoPE != 0
}

// shared returns the layer whose keys and values layer i reads: the last of its kind that has its own, or -1 for itself.
func (c *Config) shared(i int) (int, error) {
	first := c.Layers - c.Shared
	if i < first {
		return -1, nil
	}
	for j := first - 1; j >= 0; j-- {
		if c.Kind(j) == c.Kind(i) {
			return j, nil
		}
	}
	return 0, fmt.Errorf("num_kv_shared_layers is %d, but none of the first %d layers is %s: %w", c.Shared, first, c.Kind(i), kernels.ErrFile)
}

// Prefix returns how the names of the tensors of layer i begin.
func (c *Config) Prefix(i int) string {
	module := "self_attn."
	if c.Kind(i) == Linear && c.Family != "kimi_linear" {
		module = "linear_attn."
	}
	return fmt.Sprintf("%slayers.%d.%s", c.prefix, i, module)
}

// Layer returns layer i.
func (c *Config) Layer(i int) (Layer, error) {
	kind := c.Kind(i)
	shared, err := c.shared(i)
	l := Layer{Kind: kind, Shared: shared, Model: c.Model, Heads: c.Heads, KVHeads: c.KVHeads, HeadDim: c.HeadDim, Bias: c.Bias}
	if err != nil {
		return l, err
	}
	switch kind {
	case Linear:
		return l, c.linear(&l)
	case Sliding:
		if c.Window == nil {
			return l, fmt.Errorf("it is %s, but sliding_window is not set: %w", kind, kernels.ErrFile)
		}
		l.Window = *c.Window
	case Full:
		if c.Family == "gemma4" {
			l.HeadDim, l.KeysAsValues = c.GlobalHeadDim, c.KeysAsValues
		}
		if l.KeysAsValues {
			l.KVHeads = c.GlobalKVHeads
		}
	case Chunked:
		if c.Chunk == nil {
			return l, fmt.Errorf("it is %s, but attention_chunk_size is not set: %w", kind, kernels.ErrFile)
		}
		l.Chunk = *c.Chunk
	default:
		return l, fmt.Errorf("layer_types has %q, it must be one of %s, %s, %s and %s: %w", kind, Full, Sliding, Linear, Chunked, kernels.ErrUnsupported)
	}
	rotates := c.Rotates(i)
	l.Sinks, l.Gate, l.Scale = c.Own.Sinks, c.Own.Gate, c.Own.Scale
	if n := c.Own.Norm; n != nil && rotates && (c.QKNorm || c.Family != "cohere" && c.Family != "llama4") {
		l.Norm = new(*n)
		if l.Norm.Epsilon = c.Epsilon; n.Mean {
			l.Norm.Epsilon = c.LayerEpsilon
		}
	}
	switch {
	case latent(c.Family):
		l.Latent = &Latent{*cmp.Or(c.QueryRank, new(0)), c.Rank, c.NopeDim, c.RopeDim, c.ValueDim}
		l.HeadDim, rotates = c.RopeDim, !c.NoPE
	case c.Family == "gemma2" || c.Family == "gemma3":
		l.Scale, l.Softcap = 1/math.Sqrt(c.QueryScalar), *cmp.Or(c.Softcap, new(0.0))
	case c.Family == "llama4" && !rotates && c.Tuning != nil && c.Tuning != false && c.Tuning != 0.0:
		l.Temperature = &Temperature{c.TuningScale, c.TuningFloor}
	}
	if !rotates {
		return l, nil
	}
	return l, c.rope(&l)
}

// linear sets the linear attention of l.
func (c *Config) linear(l *Layer) error {
	d := Delta{Model: c.Model, KeyHeads: c.KeyHeads, ValueHeads: c.ValueHeads, KeyDim: c.LinearKeyDim, ValueDim: c.LinearDim, Conv: c.Conv, Gate: kernels.SiLU, Epsilon: c.Epsilon}
	switch k := c.Kimi; c.Family {
	case "kimi_linear":
		d = Delta{Model: c.Model, KeyHeads: k.Heads, ValueHeads: k.Heads, KeyDim: k.Dim, ValueDim: k.Dim, Conv: k.Conv, Gate: kernels.Sigmoid, Epsilon: c.Epsilon,
			Channels: true, Rank: k.Dim, LowerBound: *cmp.Or(k.LowerBound, new(0.0))}
	case "qwen3_next", "qwen3_5", "qwen3_5_moe":
	default:
		return fmt.Errorf("%s has linear attention, which is read of kimi_linear, qwen3_next, qwen3_5 and qwen3_5_moe alone: %w", c.Family, kernels.ErrUnsupported)
	}
	l.Linear = &d
	return nil
}

// rope sets the RoPE of l.
func (c *Config) rope(l *Layer) error {
	p, theta := cmp.Or(c.RopeScaling, c.RopeParams, c.RopeDefault, &Rope{}), c.Theta
	switch flat := p.Full == nil && p.Sliding == nil; {
	case l.Kind == Sliding && flat && (c.Family == "gemma3" || c.Family == "gemma3n" || c.Family == "olmo3"):
		p = nil // one object is that of full layers
	case l.Kind == Sliding && !flat:
		p = p.Sliding
	case !flat:
		p = p.Full
	}
	if l.Kind == Sliding {
		theta = cmp.Or(c.LocalTheta, theta)
	}
	p = cmp.Or(p, &Rope{})
	r, part := *p, cmp.Or(p.Partial, c.Partial)
	r.Base, r.Dim, r.Interleaved = cmp.Or(p.Base, theta), int(part*float64(l.HeadDim)), l.Latent != nil && c.Interleave || c.Own.Interleaved
	switch r.Kind = cmp.Or(p.Kind, p.OldKind, "default"); r.Kind {
	case "mrope": // an older name, which Sections have replaced
		r.Kind = "default"
	case "proportional":
		r.Dim = 2 * int(part*float64(l.HeadDim)/2)
	case "dynamic":
		r.Original = c.Longest
	case "llama3", "yarn", "longrope", "su":
		r.Original = cmp.Or(c.Original, r.Original, c.Longest)
		r.Factor = cmp.Or(r.Factor, float64(c.Longest)/float64(r.Original))
		if r.Kind == "su" || r.Kind == "yarn" && c.Family == "phi3" {
			r.Kind = "longrope" // these are older names
		}
	}
	if !(part > 0 && part <= 1) || r.Dim == 0 {
		return fmt.Errorf("partial_rotary_factor is %v, it must be up to 1 and leave 2 of %d elements: %w", part, l.HeadDim, kernels.ErrFile)
	}
	if r.Dim == l.HeadDim {
		r.Dim = 0
	}
	// The code of Qwen3-VL and Qwen3.5 interleaves sections, whatever their files have.
	r.SectionsInterleaved = p.SectionsInterleaved || len(p.Sections) > 0 && strings.HasPrefix(c.Family, "qwen3")
	l.Rope = &r
	return nil
}
