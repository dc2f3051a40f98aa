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
}

// linear is a layout of PyTorch's Linear modules.
func linear(q, k, v, o string) layout {
	l := layout{weights: [4]string{q, k, v, o}}
	for i, name := range l.weights {
		l.weights[i], l.biases[i] = name+".weight", name+".bias"
	}
	return l
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
	{weights: [4]string{"wq", "wk", "wv", "wo"}, biases: [4]string{"bq", "bk", "bv", "bo"}, columns: true},
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
// Heads are adjacent rows of [out, in] and columns of [in, out]; grouped heads are fewer
// rows of k and v. Llama's rotary embedding pairs element i of a head with i+D/2, as [RoPE]
// does; the weights of Meta need [RoPE].Interleaved. Elements are F16, BF16, F32 or F64. With
// Bias, projections whose bias is not in the file have zeros, but one bias must exist.
//
// Other tensors below the prefix are refused by name, because the layer would compute something
// else without them: norms of q and k, sinks, gates, indexers, adapters, scales of quantised weights,
// learned relative positions. Those that change nothing may be there: frequencies of a rotary embedding
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
	l, err := layoutOf(h, prefix)
	if err != nil {
		return w, err
	}
	var known []string
	for _, name := range slices.Concat(l.weights[:], l.biases[:], harmless) {
		known = append(known, prefix+name)
	}
	if others := h.List(prefix, known...); others != "none" {
		return w, fmt.Errorf("the layer would ignore %s: compute it from its Projections, or remove what changes nothing from the file: %w", others, kernels.ErrFile)
	}
	biases := 0
	for i, p := range w.named() {
		names, shape := l.weights, c.shapeOf(p.name)
		if p.bias {
			names = l.biases
		}
		name := prefix + names[i%4]
		switch exists := h.Has(name); {
		case p.bias && !exists && !c.Bias:
			continue
		case p.bias && !c.Bias:
			return w, fmt.Errorf("there is a tensor %q, but the config has no Bias: %w", name, kernels.ErrShape)
		case p.bias && !exists:
			if *p.t, err = kernels.AllocHost(kernels.F32, shape); err != nil {
				return w, err
			}
			continue
		}
		part := part{transposed: !l.columns && !p.bias, bias: p.bias, rows: shape[kernels.Seq], columns: shape[kernels.Dim]}
		for j, other := range "qkvo" {
			if names[j] != names[i%4] {
				continue
			}
			if c.shapeOf(p.name[:1] + string(other))[kernels.Seq] != part.rows {
				return w, fmt.Errorf("%q has the weights of q, k and v, but Model is %d and Memory %d: they must be equal: %w", name, c.Model, c.Memory, kernels.ErrShape)
			}
			if j == i%4 {
				part.first = part.total
			}
			part.total += c.shapeOf(p.name[:1] + string(other))[kernels.Dim]
		}
		data, err := part.read(r, h, name)
		if err == nil {
			*p.t, err = kernels.HostF32(data, shape)
		}
		if err != nil {
			return w, fmt.Errorf("%s: %w", name, err)
		}
		if p.bias {
			biases++
		}
	}
	if c.Bias && biases == 0 {
		return w, fmt.Errorf("the config has Bias, but there is no %s%s: %w", prefix, l.biases[0], kernels.ErrFile)
	}
	return w, nil
}

// layoutOf returns the layout of the tensors whose names begin with prefix.
func layoutOf(h *safetensors.Header, prefix string) (layout, error) {
	var firsts []string
	for _, l := range layouts {
		missing := slices.ContainsFunc(l.weights[:], func(name string) bool { return !h.Has(prefix + name) })
		if !missing {
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

// part is a weight or a bias [rows, columns], alone in a tensor or next to others.
type part struct {
	rows, columns    int
	first, total     int // its first column in those of the tensor
	transposed, bias bool
}

// read reads a part of the named tensor.
func (p part) read(r io.ReaderAt, headers *safetensors.Header, name string) ([]float32, error) {
	h, err := headers.Tensor(name)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", err, kernels.ErrDType)
	}
	want := []int{p.rows, p.total}
	switch {
	case p.bias:
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
	// Lines of the file are rows, or columns from the first on.
	line, end, width := 0, p.rows, p.total
	if p.transposed {
		line, end, width = p.first, p.first+p.columns, p.rows
	}
	const block = 16 // lines: whole cache lines of the transpose
	most := min(block, end-line) * width
	if err := kernels.CheckMemory(4*int64(p.rows)*int64(p.columns) + int64(most)*int64(4+h.Size)); err != nil {
		return nil, err
	}
	data, lines, raw := make([]float32, p.rows*p.columns), make([]float32, most), make([]byte, most*h.Size)
	overflows := 0
	for ; line < end; line += block {
		n := min(block, end-line)
		if got, err := r.ReadAt(raw[:n*width*h.Size], h.Start+int64(line*width*h.Size)); got < n*width*h.Size {
			return nil, fmt.Errorf("%w: %w", err, kernels.ErrFile)
		}
		overflows += h.Float32s(lines[:n*width], raw)
		if !p.transposed {
			for i := range n {
				copy(data[(line+i)*p.columns:][:p.columns], lines[i*width+p.first:])
			}
			continue
		}
		for row := range p.rows {
			to := data[row*p.columns+line-p.first:][:n]
			for i := range to {
				to[i] = lines[i*width+row]
			}
		}
	}
	if overflows > 0 {
		return nil, fmt.Errorf("numbers out of the range of float32: %d: %w", overflows, kernels.ErrDType)
	}
	return data, nil
}
