package nn

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/internal/op"
	"github.com/seed90331342/attn/kernels/safetensors"
)

// layout is how a family of models names and stores the weights and biases of q, k, v and
// o. Equal names are parts of one tensor, in this order.
type layout struct {
	weights, biases [4]string
	columns         bool // a weight is [in, out], as in [MultiHeadWeights]; otherwise [out, in]
	own             bool // that of WriteSafetensors, with its names
	gated           bool // the rows of q are those of a head's query, then of its gate
}

// linear is a layout of PyTorch's Linear modules.
func linear(q, k, v, o string) layout {
	l := layout{weights: [4]string{q, k, v, o}}
	for i, name := range l.weights {
		l.weights[i], l.biases[i] = name+".weight", name+".bias"
	}
	return l
}

// others are the names of weights that have one name in all layouts but our own.
var others = map[string]string{"qnorm": "q_norm.weight", "knorm": "k_norm.weight", "sinks": "sinks", "wg": "g_proj.weight", "bg": "g_proj.bias"}

// tensor returns the name of the tensor with a weight, number i of those of a layer.
func (l layout) tensor(i int, p weight) string {
	switch {
	case l.gated && p.name == "wg":
		return l.weights[0]
	case l.gated && p.name == "bg":
		return l.biases[0]
	case i < 4:
		return l.weights[i]
	case i < 8:
		return l.biases[i-4]
	case l.own:
		return p.name
	}
	return others[p.name]
}

// layouts are listed in the comment of LoadSafetensors. The first whose weights exist is read.
var layouts = []layout{
	linear("q_proj", "k_proj", "v_proj", "o_proj"),
	linear("q_proj", "k_proj", "v_proj", "out_proj"),
	linear("wq", "wk", "wv", "wo"),
	linear("self.query", "self.key", "self.value", "output.dense"),
	linear("qkv_proj", "qkv_proj", "qkv_proj", "o_proj"),
	linear("qkv", "qkv", "qkv", "proj"),
	{weights: [4]string{"in_proj_weight", "in_proj_weight", "in_proj_weight", "out_proj.weight"},
		biases: [4]string{"in_proj_bias", "in_proj_bias", "in_proj_bias", "out_proj.bias"}},
	{weights: [4]string{"q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight"},
		biases: [4]string{"in_proj_bias", "in_proj_bias", "in_proj_bias", "out_proj.bias"}},
	{weights: [4]string{"c_attn.weight", "c_attn.weight", "c_attn.weight", "c_proj.weight"},
		biases: [4]string{"c_attn.bias", "c_attn.bias", "c_attn.bias", "c_proj.bias"}, columns: true},
	{weights: [4]string{"wq", "wk", "wv", "wo"}, biases: [4]string{"bq", "bk", "bv", "bo"}, columns: true, own: true},
}

// harmless are tensors below the prefix of a layer that change no number of it.
var harmless = []string{
	"rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached", "inner_attention.rope.freqs", // Llama and others: RoPE has them
	"bias", "masked_bias", // GPT-2, GPT-Neo and GPT-J: the causal mask, and the score of hidden keys, -1e9
	"output.LayerNorm.weight", "output.LayerNorm.bias", "output.LayerNorm.gamma", "output.LayerNorm.beta", // BERT: the norm after the layer
	"relative_position_index", // BEiT and Swin: places in a table of biases, which is refused
}

// LoadSafetensors reads the weights of a layer from a .safetensors file of the given size.
// The names of its tensors begin with prefix, such as "model.layers.0.self_attn.", and go on as
// one of these layouts has them:
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
//	q_norm k_norm                       .weight [D], or [H·D] and [Hkv·D] for a norm of the Projection
//	sinks                               [H]
//	g_proj                              .weight [out, in] and .bias [out] of a gate
//	qnorm knorm sinks wg bg             [MultiHeadWeights]
//
// With GateInQuery the rows of q are D of the query and D of the gate for each head, but in the last
// layout, and with KeysAsValues there is no tensor for v.
//
// Heads are adjacent rows of [out, in] and columns of [in, out]; grouped heads are fewer
// rows of k and v. Llama's rotary embedding pairs element i of a head with i+D/2, as [RoPE]
// does; the weights of Meta need [RoPE].Interleaved. Elements are F16, BF16, F32 or F64. With
// Bias, projections whose bias is not in the file have zeros, but one bias must exist.
//
// Other tensors below the prefix are refused by name, because the layer would compute something
// else without them: norms, sinks and gates that the config does not ask for, indexers, adapters, scales of
// quantised weights, learned relative positions. Those that change nothing may be there: frequencies of a rotary embedding
// (rotary_emb.inv_freq), causal masks of GPT-2 (bias, masked_bias), the norm after BERT's layer
// (output.LayerNorm) and indices of relative positions. With the prefix "" the file has the layer alone.
//
// Errors: ErrFile for a file that is damaged, lacks a tensor or has others of the layer, ErrShape and
// ErrDType for a tensor that does not match c, ErrOption for the config, ErrMemory, and those of r.
func (c MultiHeadConfig) LoadSafetensors(r io.ReaderAt, size int64, prefix string) (w MultiHeadWeights, err error) {
	defer op.Annotate(&err, "weights")
	if c, err = c.withDefaults(); err != nil {
		return w, err
	}
	if r == nil {
		return w, fmt.Errorf("the reader is nil, give a file: %w", kernels.ErrOption)
	}
	h, err := safetensors.ReadHeader(r, size)
	if errors.Is(err, kernels.ErrMemory) {
		return w, err
	}
	if err != nil {
		return w, fmt.Errorf("%w: %w", err, kernels.ErrFile)
	}
	l, err := layoutOf(h, prefix, c)
	if err != nil {
		return w, err
	}
	biased, known := c, []string(nil)
	biased.Bias = true // others are refused below
	for _, name := range harmless {
		known = append(known, prefix+name)
	}
	for i, p := range w.named() {
		if biased.shapeOf(p.name) != (kernels.Shape{}) {
			known = append(known, prefix+l.tensor(i, p))
		}
	}
	if others := h.List(prefix, known...); others != "none" {
		return w, fmt.Errorf("the layer would ignore %s: set the field of the config for it, compute the layer from its Projections, or remove what changes nothing from the file: %w", others, kernels.ErrFile)
	}
	biases := 0
	for i, p := range w.named() {
		shape, name := c.shapeOf(p.name), prefix+l.tensor(i, p)
		switch exists := h.Has(name); {
		case shape == (kernels.Shape{}) && exists && p.bias() && !c.Bias:
			return w, fmt.Errorf("there is a tensor %q, but the config has no Bias: %w", name, kernels.ErrShape)
		case shape == (kernels.Shape{}):
			continue
		case !exists && p.bias():
			if *p.t, err = kernels.AllocHost(kernels.F32, shape); err != nil {
				return w, err
			}
			continue
		case !exists:
			return w, fmt.Errorf("the config has %s, but there is no %q: %w", p.of, name, kernels.ErrFile)
		}
		rows := shape[kernels.Seq]
		part := part{transposed: !l.columns && !p.vector, vector: p.vector, rows: rows, columns: shape.Elements() / rows}
		for j, other := range w.named() {
			s := c.shapeOf(other.name)
			if prefix+l.tensor(j, other) != name || s == (kernels.Shape{}) {
				continue
			}
			if s[kernels.Seq] != rows {
				return w, fmt.Errorf("%q has the weights of q, k and v, but Model is %d and Memory %d: they must be equal: %w", name, c.Model, c.Memory, kernels.ErrShape)
			}
			if j == i {
				part.first = part.total
			}
			part.total += s.Elements() / rows
		}
		part.run = part.columns
		if i := strings.IndexByte("qg", p.name[1]); l.gated && i >= 0 {
			part.first, part.run, part.step = i*c.HeadDim, c.HeadDim, 2*c.HeadDim
		}
		data, err := part.read(r, h, name)
		if err == nil {
			*p.t, err = kernels.HostF32(data, shape)
		}
		if err != nil {
			return w, fmt.Errorf("%s: %w", name, err)
		}
		if p.bias() {
			biases++
		}
	}
	if c.Bias && biases == 0 {
		return w, fmt.Errorf("the config has Bias, but there is no %s%s: %w", prefix, l.biases[0], kernels.ErrFile)
	}
	return w, nil
}

// layoutOf returns the layout of the tensors whose names begin with prefix.
func layoutOf(h *safetensors.Header, prefix string, c MultiHeadConfig) (layout, error) {
	var firsts []string
	for _, l := range layouts {
		have := 0
		for i, name := range l.weights {
			if h.Has(prefix+name) || i == 2 && c.KeysAsValues {
				have++
			}
		}
		if l.gated = c.Gate == GateInQuery && !l.own; have == len(l.weights) && l.gated && l.weights[0] == l.weights[1] {
			return l, fmt.Errorf("%q has the weights of q, k and v, which is not read with GateInQuery: %w", prefix+l.weights[0], kernels.ErrUnsupported)
		}
		if have == len(l.weights) {
			return l, nil
		}
		firsts = append(firsts, l.weights[0])
	}
	have := prefix
	if h.List(prefix) == "none" {
		have = ""
	}
	return layout{}, fmt.Errorf("no layout has all of its weights after the prefix %q (one starts with %s); the file has %s: %w",
		prefix, strings.Join(slices.Compact(firsts), ", "), h.List(have), kernels.ErrFile)
}

// part is a weight [rows, columns], alone in a tensor or next to others.
type part struct {
	rows, columns      int
	first, total       int // its first column in those of the tensor
	run, step          int // so many columns are adjacent, and so many from one run to the next
	transposed, vector bool
}

// column returns the place of a column in the tensor.
func (p part) column(i int) int { return p.first + i/p.run*p.step + i%p.run }

// read reads a part of the named tensor.
func (p part) read(r io.ReaderAt, headers *safetensors.Header, name string) ([]float32, error) {
	h, err := headers.Tensor(name)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", err, kernels.ErrDType)
	}
	want := []int{p.rows, p.total}
	switch {
	case p.vector:
		want = want[1:]
	case p.transposed:
		want = []int{p.total, p.rows}
	}
	if !slices.Equal(h.Shape, want) {
		return nil, fmt.Errorf("shape is %v, for the config it must be %v: %w", h.Shape, want, kernels.ErrShape)
	}
	if h.Kind != 'f' && h.Kind != 'w' {
		return nil, fmt.Errorf("elements are %s, they must be f2, f4, f8 or bf16: %w", h.TypeName(), kernels.ErrDType)
	}
	// Lines of the file are rows, or columns.
	end, width := p.rows, p.total
	if p.transposed {
		end, width = p.columns, p.rows
	}
	const block = 16 // lines: whole cache lines of the transpose
	most := min(block, end) * width
	if err := kernels.CheckMemory(4*int64(p.rows)*int64(p.columns) + int64(most)*int64(4+h.Size)); err != nil {
		return nil, err
	}
	data, lines, raw := make([]float32, p.rows*p.columns), make([]float32, most), make([]byte, most*h.Size)
	overflows := 0
	for at, n := 0, 0; at < end; at += n {
		line := at
		if n = min(block, end-at); p.transposed {
			line, n = p.column(at), min(n, p.run-at%p.run)
		}
		if got, err := r.ReadAt(raw[:n*width*h.Size], h.Start+int64(line*width*h.Size)); got < n*width*h.Size {
			return nil, fmt.Errorf("%w: %w", err, kernels.ErrFile)
		}
		overflows += h.Float32s(lines[:n*width], raw)
		if p.transposed {
			for row := range p.rows {
				to := data[row*p.columns+at:][:n]
				for i := range to {
					to[i] = lines[i*width+row]
				}
			}
			continue
		}
		for i := 0; i < n*p.columns; i += p.run {
			copy(data[at*p.columns+i:][:p.run], lines[i/p.columns*width+p.column(i%p.columns):])
		}
	}
	if overflows > 0 {
		return nil, fmt.Errorf("numbers out of the range of float32: %d: %w", overflows, kernels.ErrDType)
	}
	return data, nil
}
