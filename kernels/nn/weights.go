package nn

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/internal/op"
	"github.com/seed90331342/attn/kernels/internal/weights"
)

// MultiHeadWeights are the weights of a [MultiHeadAttention] in host memory, F32 and contiguous, for y = x·W + B:
//
//	Wq [1, 1, Model, Heads·D]       Bq [1, 1, 1, Heads·D]
//	Wk [1, 1, Memory, KVHeads·D]    Bk [1, 1, 1, KVHeads·D]
//	Wv [1, 1, Memory, KVHeads·Dv]   Bv [1, 1, 1, KVHeads·Dv]
//	Wo [1, 1, Heads·Dv, Model]      Bo [1, 1, 1, Model]
//
// The lengths are those of the [MultiHeadConfig]. Either all biases are present or none.
// These are present if the config has a Norm with weights, Sinks or a Gate:
//
//	QNorm [1, 1, 1, D], or [1, 1, 1, Heads·D] for a Norm of the whole Projection, or [1, Heads, 1, D] with Mean
//	KNorm [1, 1, 1, D], or [1, 1, 1, KVHeads·D], or [1, KVHeads, 1, D]
//	Sinks [1, Heads, 1, 1]
//	Wg    [1, 1, Model, Heads·Dv], or [1, 1, Model, Heads] for GateHeads    Bg [1, 1, 1, N]
//
// With KeysAsValues there are no Wv and Bv, and with SharedKeys no Wk, Bk, Wv, Bv and KNorm. KScale and VScale [1, 1,
// 1, 1], or the zero Tensor for 1, are for [MultiHeadAttention.CacheConfig]. The columns of a head are adjacent, for Wo
// its rows. PyTorch's Linear stores the transpose, see [Transposed].
type MultiHeadWeights struct {
	Wq, Wk, Wv, Wo kernels.Tensor
	Bq, Bk, Bv, Bo kernels.Tensor

	QNorm, KNorm, Sinks kernels.Tensor
	Wg, Bg              kernels.Tensor
	KScale, VScale      kernels.Tensor
}

// list returns the weights with the shapes that they have in a layer of config c, which has its
// defaults. The zero config gives them no shapes.
func (w *MultiHeadWeights) list(c MultiHeadConfig) weights.List {
	q, k, v, o, gates := c.Heads*c.HeadDim, c.KVHeads*c.HeadDim, c.KVHeads*c.ValueDim, c.Heads*c.ValueDim, c.Heads*c.ValueDim
	if c.Gate == GateHeads {
		gates = c.Heads
	}
	hasNorm, qnorm, knorm, qheads, kheads := c.Norm != nil && !c.Norm.Weightless, c.HeadDim, c.HeadDim, 1, 1
	if hasNorm && c.Norm.Projection {
		qnorm, knorm = q, k
	} else if hasNorm && c.Norm.Mean {
		qheads, kheads = c.Heads, c.KVHeads
	}
	hasK, hasGate := c.Heads > 0 && !c.SharedKeys, c.Gate != GateNone
	hasV := hasK && !c.KeysAsValues
	shape := func(has bool, heads, in, out int) (s kernels.Shape) {
		if has {
			s = kernels.Shape{1, heads, in, out}
		}
		return s
	}
	return weights.List{
		{Name: "wq", T: &w.Wq, Shape: shape(c.Heads > 0, 1, c.Model, q), Of: "q projection"},
		{Name: "wk", T: &w.Wk, Shape: shape(hasK, 1, c.Memory, k), Of: "k projection"},
		{Name: "wv", T: &w.Wv, Shape: shape(hasV, 1, c.Memory, v), Of: "v projection"},
		{Name: "wo", T: &w.Wo, Shape: shape(c.Heads > 0, 1, o, c.Model), Of: "o projection"},
		{Name: "bq", T: &w.Bq, Shape: shape(c.Bias, 1, 1, q), Of: "Bias", Vector: true},
		{Name: "bk", T: &w.Bk, Shape: shape(c.Bias && hasK, 1, 1, k), Of: "Bias", Vector: true},
		{Name: "bv", T: &w.Bv, Shape: shape(c.Bias && hasV, 1, 1, v), Of: "Bias of values", Vector: true},
		{Name: "bo", T: &w.Bo, Shape: shape(c.Bias, 1, 1, c.Model), Of: "Bias", Vector: true},
		{Name: "qnorm", T: &w.QNorm, Shape: shape(hasNorm, qheads, 1, qnorm), Of: "Norm with weights", Vector: true, Tensor: "q_norm.weight"},
		{Name: "knorm", T: &w.KNorm, Shape: shape(hasNorm && hasK, kheads, 1, knorm), Of: "Norm with weights", Vector: true, Tensor: "k_norm.weight"},
		{Name: "sinks", T: &w.Sinks, Shape: shape(c.Sinks, c.Heads, 1, 1), Of: "Sinks", Vector: true, Tensor: "sinks"},
		{Name: "wg", T: &w.Wg, Shape: shape(hasGate, 1, c.Model, gates), Of: "Gate", Tensor: "g_proj.weight"},
		{Name: "bg", T: &w.Bg, Shape: shape(c.Bias && hasGate, 1, 1, gates), Of: "Gate with Bias", Vector: true, Tensor: "g_proj.bias"},
		{Name: "kscale", T: &w.KScale, Shape: shape(!w.KScale.IsZero(), 1, 1, 1), Vector: true, F32: true},
		{Name: "vscale", T: &w.VScale, Shape: shape(!w.VScale.IsZero(), 1, 1, 1), Vector: true, F32: true},
	}
}

func (w *MultiHeadWeights) release() { w.list(MultiHeadConfig{}).Release() }

// WriteSafetensors writes w to a .safetensors file, under the names wq, wk, wv, wo, bq, bk, bv,
// bo, qnorm, knorm, sinks, wg, bg, kscale and vscale, which [MultiHeadConfig.LoadSafetensors] reads.
//
// Errors: ErrShape, ErrDType and ErrReleased for weights that are not as in
// [MultiHeadWeights], found before anything is written, and those of to.
func (w MultiHeadWeights) WriteSafetensors(to io.Writer) (err error) {
	defer op.Annotate(&err, "weights")
	return w.list(MultiHeadConfig{}).Write(to)
}

// layout is how a family of models names and stores the weights of q, k, v and o, then their
// biases. Equal names are parts of one tensor, in this order.
type layout struct {
	names   []string
	columns bool // a weight is [in, out], as in [MultiHeadWeights]; otherwise [out, in]
	own     bool // that of WriteSafetensors, with its names
}

// linear is a layout of PyTorch's Linear modules.
func linear(modules string) (l layout) {
	for _, suffix := range []string{".weight", ".bias"} {
		for _, name := range strings.Fields(modules) {
			l.names = append(l.names, name+suffix)
		}
	}
	return l
}

// place returns the weights of a config with the places where files have them. Those of the four projections are
// first, then their biases.
func (l layout) place(w *MultiHeadWeights, c MultiHeadConfig) weights.List {
	list := w.list(c)
	gated := c.Gate == GateInQuery // the rows of q are those of a head's query, then of its gate
	for i := range list {
		w := &list[i]
		w.Columns, w.Optional = l.columns, w.Name[0] == 'b'
		switch {
		case l.own:
			w.Tensor = w.Name
		case gated && (w.Name == "wq" || w.Name == "wg"):
			w.Tensor, w.Groups = l.names[0], c.Heads
		case gated && (w.Name == "bq" || w.Name == "bg"):
			w.Tensor, w.Groups = l.names[4], c.Heads
		case i < len(l.names):
			w.Tensor = l.names[i]
		}
	}
	return list
}

// layouts are listed in the comment of LoadSafetensors. The first whose weights exist is read.
var layouts = []layout{
	linear("q_proj k_proj v_proj o_proj"),
	linear("q_proj k_proj v_proj out_proj"),
	linear("wq wk wv wo"),
	linear("self.query self.key self.value output.dense"),
	linear("qkv_proj qkv_proj qkv_proj o_proj"),
	linear("qkv qkv qkv proj"),
	{names: strings.Fields("in_proj_weight in_proj_weight in_proj_weight out_proj.weight in_proj_bias in_proj_bias in_proj_bias out_proj.bias")},
	{names: strings.Fields("q_proj_weight k_proj_weight v_proj_weight out_proj.weight in_proj_bias in_proj_bias in_proj_bias out_proj.bias")},
	{names: strings.Fields("c_attn.weight c_attn.weight c_attn.weight c_proj.weight c_attn.bias c_attn.bias c_attn.bias c_proj.bias"), columns: true},
	{names: strings.Fields("wq wk wv wo bq bk bv bo"), columns: true, own: true},
}

// harmless are tensors below the prefix of a layer that change no number of it.
var harmless = []string{
	"rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached", "inner_attention.rope.freqs", // Llama and others: RoPE has them
	"bias", "masked_bias", // GPT-2, GPT-Neo and GPT-J: the causal mask, and the score of hidden keys, -1e9
	"output.LayerNorm.weight", "output.LayerNorm.bias", "output.LayerNorm.gamma", "output.LayerNorm.beta", // BERT: the norm after the layer
	"relative_position_index", // BEiT and Swin: places in a table of biases, which is refused
}

// LoadSafetensors reads the weights of a layer from a .safetensors file of the given size. The names of its tensors
// begin with prefix, such as "model.layers.0.self_attn.", and go on as one of these layouts has them:
//
//	q_proj k_proj v_proj o_proj         Llama, Mistral, Qwen: .weight [out, in], .bias [out]
//	q_proj k_proj v_proj out_proj       OPT, BART, Whisper, CLIP: the same
//	wq wk wv wo                         Llama of Meta: the same; positions are interleaved
//	self.query .key .value output.dense BERT: the same
//	qkv_proj o_proj                     Phi-3: the same, q, k and v packed [(H+Hkv)·D+Hkv·Dv, M]
//	qkv proj                            vision transformers of timm: the same
//	in_proj_weight out_proj.weight      PyTorch's MultiheadAttention: packed [3M, M],
//	                                    in_proj_bias [3M], out_proj.bias
//	q_proj_weight k_proj_weight ..      MultiheadAttention with kdim and vdim: [M, M], [M, Memory]
//	c_attn c_proj                       GPT-2: .weight [in, out], packed [M, 3M], .bias [3M]
//	wq wk wv wo, bq bk bv bo            [MultiHeadWeights]: [in, out], without .weight
//
// Next to each of them are the weights that the config asks for:
//
//	q_norm k_norm                       .weight [D], or [H·D] and [Hkv·D] for a norm of the Projection, or
//	                                    [H, D] and [Hkv, D] with its Mean
//	sinks                               [H]
//	g_proj                              .weight [out, in] and .bias [out] of a gate
//	qnorm knorm sinks wg bg             [MultiHeadWeights]
//
// and, for any config, KScale and VScale, [] or [1], under one of the names of vLLM: k_proj.k_scale, qkv_proj.k_scale,
// attn.k_scale, k_scale or k_proj.output_scale, the same with v, or kscale and vscale. An old kv_scale is both, and stands alone.
//
// With GateInQuery the rows of q are D of the query and D of the gate for each head, but in the last layout, and with KeysAsValues
// there is no tensor for v. With SharedKeys those of k and v, which files of Gemma 3n have, are not read.
//
// Heads are adjacent rows of [out, in] and columns of [in, out]; grouped heads are fewer rows of k and v. Llama's rotary
// embedding pairs element i of a head with i+D/2, as [RoPE] does; the weights of Meta need [RoPE].Interleaved. Elements are
// F16, BF16, F32 or F64. With Bias, projections whose bias is not in the file have zeros, but one bias must exist.
//
// Other tensors below the prefix are refused by name, because the layer would compute something else without them: norms, sinks
// and gates that the config does not ask for, indexers, adapters, scales of quantised weights, learned relative positions. Those
// that change nothing may be there, such as frequencies of a rotary embedding (rotary_emb.inv_freq). With the prefix "" the file
// has the layer alone.
//
// Errors: ErrFile for a file that is damaged, lacks a tensor or has others of the layer, ErrShape and
// ErrDType for a tensor that does not match c, ErrOption for the config, ErrMemory, and those of r.
func (c MultiHeadConfig) LoadSafetensors(r io.ReaderAt, size int64, prefix string) (w MultiHeadWeights, err error) {
	defer op.Annotate(&err, "weights")
	if c, err = c.withDefaults(); err != nil {
		return w, err
	}
	f, err := weights.Open(r, size, prefix)
	if err != nil {
		return w, err
	}
	at := slices.IndexFunc(layouts, func(l layout) bool {
		return !slices.ContainsFunc(l.place(&w, c)[:4], func(p weights.Weight) bool { return p.Has() && !f.Has(prefix+p.Tensor) })
	})
	if at < 0 {
		return w, noLayout(f)
	}
	l := layouts[at]
	switch packed := l.names[0] == l.names[1]; {
	case packed && c.Gate == GateInQuery:
		return w, fmt.Errorf("%q has the weights of q, k and v, which is not read with GateInQuery: %w", prefix+l.names[0], kernels.ErrUnsupported)
	case packed && c.Model != c.Memory:
		return w, fmt.Errorf("%q has the weights of q, k and v, but Model is %d and Memory %d: they must be equal: %w", prefix+l.names[0], c.Model, c.Memory, kernels.ErrShape)
	}
	list, unused := l.place(&w, c), harmless
	if c.Bias && !slices.ContainsFunc(list, func(p weights.Weight) bool { return p.Optional && p.Has() && f.Has(prefix+p.Tensor) }) {
		return w, fmt.Errorf("the config has Bias, but there is no %s%s: %w", prefix, l.names[4], kernels.ErrFile)
	}
	for i, x := range []string{"k", "v"} {
		for _, name := range strings.Fields("x_proj.x_scale qkv_proj.x_scale attn.x_scale x_scale x_proj.output_scale xscale xv_scale") {
			if name = strings.ReplaceAll(name, "x", x); f.Has(prefix+name) && (x == "k" || !f.Has(prefix+"kv_scale")) {
				p := &list[len(list)-2+i]
				p.Tensor, p.Shape = name, kernels.Shape{1, 1, 1, 1}
			}
		}
	}
	if c.SharedKeys {
		unused = append([]string{"k_proj.weight", "v_proj.weight", "k_norm.weight"}, harmless...)
	}
	if err = f.Load(list, unused...); f.Has(prefix + "kv_scale") {
		w.VScale = w.KScale // Load has refused other factors
	}
	return w, err
}

// noLayout is the error for a file that lacks weights of every layout.
func noLayout(f *weights.File) error {
	var firsts []string
	for _, l := range layouts {
		firsts = append(firsts, l.names[0])
	}
	have := f.List(f.Prefix)
	if have == "none" {
		have = f.List("")
	}
	return fmt.Errorf("no layout has all of its weights after the prefix %q (one starts with %s); the file has %s: %w",
		f.Prefix, strings.Join(slices.Compact(firsts), ", "), have, kernels.ErrFile)
}
