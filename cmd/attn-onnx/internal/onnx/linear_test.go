package onnx

import (
	"math"
	"slices"
	"strings"

	"github.com/seed90331342/attn/backend/oracle"
	"github.com/seed90331342/attn/cmd/attn-onnx/internal/onnxfile"
	"github.com/seed90331342/attn/cmd/internal/cli/clitest"
)

// randn draws numbers of the normal distribution by the polar method (Marsaglia and Bray 1964), as numpy.random.randn:
// two at a time, of which the second comes first.
func (r *mersenne) randn(shape ...int) []float64 {
	data := make([]float64, clitest.Elements(shape))
	for i := range data {
		if r.spare != nil {
			data[i], r.spare = *r.spare, nil
			continue
		}
		for {
			x, y := 2*r.float64()-1, 2*r.float64()-1
			if s := float64(x*x) + float64(y*y); s < 1 && s != 0 {
				f := math.Sqrt(-2 * math.Log(s) / s)
				r.spare, data[i] = new(f*x), f*y
				break
			}
		}
	}
	return data
}

// normal draws a tensor of randn.
func (r *mersenne) normal(d onnxfile.DataType, shape ...int) *onnxfile.Tensor {
	return filled(d, r.randn(shape...), shape...)
}

// times returns x·y, in float32 and rounded to the type of x.
func times(x *onnxfile.Tensor, y float32) *onnxfile.Tensor {
	data := make([]float64, x.Elements())
	for i := range data {
		data[i] = float64(float32(x.At(i)) * y)
	}
	return filled(x.Type, data, x.Shape...)
}

// normalised returns keys of 8 elements divided by their length, each step rounded to their type, as numpy.linalg.norm:
// it adds squares in pairs, in float32.
func normalised(x *onnxfile.Tensor) *onnxfile.Tensor {
	round := func(v float32) float32 { return float32(filled(x.Type, []float64{float64(v)}).At(0)) }
	data := make([]float64, x.Elements())
	for i := 0; i < len(data); i += 8 {
		var s [8]float32
		for e := range s {
			v := float32(x.At(i + e))
			s[e] = round(v * v)
		}
		length := round(float32(math.Sqrt(float64(round(((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7])))))))
		for e := range s {
			data[i+e] = float64(float32(x.At(i+e)) / length)
		}
	}
	return filled(x.Type, data, x.Shape...)
}

// linearProblem is a call of LinearAttention.
type linearProblem struct {
	onnxFiles
	batch, tokens, heads, keyHeads, kvHeads, dim, valueDim int
}

// head returns the first n tokens of an output head and a state head.
func (p *linearProblem) head(b, out, h, n int) oracle.Linear {
	rows := func(input, heads, h int) []float32 {
		x := p.in[input]
		if x == nil {
			return nil
		}
		var list []float32
		size := x.Shape[2] / heads
		for t := range n {
			for i := range size {
				list = append(list, float32(x.At(((b*p.tokens+t)*heads+h)*size+i)))
			}
		}
		return list
	}
	l := oracle.Linear{
		K: p.dim, V: p.valueDim, Q: rows(linQuery, p.heads, out*p.heads/max(p.heads, p.kvHeads)), Key: rows(linKey, p.keyHeads, h*p.keyHeads/p.kvHeads),
		Value: rows(linValue, p.kvHeads, h), Decay: rows(linDecay, p.kvHeads, h), Scale: 1, Chunk: min(n, 64),
	}
	if beta := p.in[linBeta]; beta != nil {
		l.Beta = rows(linBeta, beta.Shape[2], h%beta.Shape[2])
	}
	if past := p.in[linPast]; past != nil {
		block := p.dim * p.valueDim
		first := past.Elements() - (p.batch*p.kvHeads-b*p.kvHeads-h)*block // of the last state
		l.State = float32s(elementsOf(past)[first:][:block])
	}
	return l
}

// solve computes want: the recurrence in float64, a token after the other, with the bounds of package oracle. States that
// are kept between tokens are float32. The scale adds its rounding.
func (p *linearProblem) solve() {
	scale := float64(p.floats["scale"])
	if scale == 0 {
		scale = 1 / math.Sqrt(float64(p.dim))
	}
	outHeads, window := max(p.heads, p.kvHeads), int(p.ints["state_window"])
	slots, block := max(window, 1), p.dim*p.valueDim
	y, present := make([]oracle.Element, p.batch*p.tokens*outHeads*p.valueDim), make([]oracle.Element, slots*p.batch*p.kvHeads*block)
	for b := range p.batch {
		for out := range outHeads {
			h := out * p.kvHeads / outHeads
			o, _ := p.head(b, out, h, p.tokens).Attend()
			for i, e := range o {
				e.Err = scale*e.Err + math.Abs(scale-float64(float32(scale)))*math.Abs(e.Value)
				e.Value *= scale
				y[((b*p.tokens+i/p.valueDim)*outHeads+out)*p.valueDim+i%p.valueDim] = e
			}
			for slot := max(0, slots-p.tokens); slot < slots; slot++ {
				_, state := p.head(b, out, h, p.tokens-slots+1+slot).Attend()
				copy(present[((slot*p.batch+b)*p.kvHeads+h)*block:], state)
			}
		}
	}
	shape := []int{p.batch, p.kvHeads, p.dim, p.valueDim}
	if window > 0 {
		shape = append([]int{window}, shape...)
	}
	state := p.in[linQuery].Type
	if past := p.in[linPast]; past != nil {
		state = past.Type
	}
	p.want, p.elements = nil, nil
	p.expect(p.in[linQuery].Type, y, p.batch, p.tokens, outHeads*p.valueDim)
	p.expect(state, present, shape...)
}

// linearCases are the cases of LinearAttention that the ONNX project has as code, under their names there.
func linearCases() map[string]*onnxFiles {
	cases := map[string]*onnxFiles{}
	type options struct {
		rule                    string // "" is the default, gated_delta
		heads, kvHeads          int    // 0 is 4
		tokens                  int    // 0 is 4
		past, zeros             bool
		headDecay, oneBeta, f16 bool
		scale                   float32
	}
	add := func(name string, o options) {
		rng := newMersenne(0)
		or := func(n int) int {
			if n == 0 {
				return 4
			}
			return n
		}
		p := &linearProblem{batch: 2, tokens: or(o.tokens), heads: or(o.heads), kvHeads: or(o.kvHeads), dim: 8, valueDim: 8}
		p.keyHeads = p.kvHeads
		p.operator, p.opset = "LinearAttention", 27
		p.ints = map[string]int64{"q_num_heads": int64(p.heads), "kv_num_heads": int64(p.kvHeads)}
		rule := "gated_delta"
		if o.rule != "" {
			rule, p.texts = o.rule, map[string]string{"update_rule": o.rule}
		}
		if o.scale != 0 {
			p.floats = map[string]float32{"scale": o.scale}
		}
		d := onnxfile.Float
		if o.f16 {
			d = onnxfile.Float16
		}
		p.in = make([]*onnxfile.Tensor, 3, 6)
		p.in[linQuery] = rng.normal(d, 2, p.tokens, p.heads*8)
		p.in[linKey] = rng.normal(d, 2, p.tokens, p.kvHeads*8)
		if strings.HasSuffix(rule, "delta") {
			p.in[linKey] = normalised(p.in[linKey])
		}
		p.in[linValue] = rng.normal(d, 2, p.tokens, p.kvHeads*8)
		if rule != "linear" {
			p.in = p.in[:6]
		}
		if state := []int{2, p.kvHeads, 8, 8}; o.past {
			p.in[linPast] = times(rng.normal(d, state...), 0.1)
		} else if o.zeros {
			p.in[linPast] = repeated(d, 0, state...)
		}
		if strings.HasPrefix(rule, "gated") {
			shape := []int{2, p.tokens, p.kvHeads * 8}
			if o.headDecay {
				shape[2] = p.kvHeads
			}
			data := rng.randn(shape...)
			for i, x := range data {
				if data[i] = -math.Abs(x); o.f16 {
					data[i] *= 0.1
				}
			}
			if p.in[linDecay] = filled(d, data, shape...); !o.f16 {
				p.in[linDecay] = times(p.in[linDecay], 0.1)
			}
		}
		if strings.HasSuffix(rule, "delta") {
			width := p.kvHeads
			if o.oneBeta {
				width = 1
			}
			beta := rng.uniform(2, p.tokens, width)
			p.in[linBeta] = filled(d, beta, 2, p.tokens, width)
		}
		for p.in[len(p.in)-1] == nil {
			p.in = p.in[:len(p.in)-1]
		}
		full := p.in
		p.in = append(slices.Clone(full), make([]*onnxfile.Tensor, 6-len(full))...)
		p.solve()
		p.in = full
		cases["test_linear_attention_"+name] = &p.onnxFiles
	}
	add("linear", options{rule: "linear"})
	add("gated", options{rule: "gated"})
	add("gated_per_head_decay", options{rule: "gated", headDecay: true})
	add("delta", options{rule: "delta"})
	add("gated_delta", options{})
	add("gated_delta_beta_scalar", options{oneBeta: true})
	add("gated_delta_gqa", options{heads: 8})
	add("gated_delta_mqa", options{heads: 8, kvHeads: 1})
	add("decode_step", options{tokens: 1, past: true})
	add("prefill_with_past", options{past: true})
	add("no_past_explicit_zeros", options{zeros: true})
	add("explicit_scale", options{scale: 0.25})
	add("fp16", options{heads: 8, f16: true})
	add("linear_t1_no_past", options{rule: "linear", tokens: 1})
	return cases
}

// convCases are the cases of CausalConvWithState that the ONNX project has as code, under their names there.
func convCases() map[string]*onnxFiles {
	cases := map[string]*onnxFiles{}
	add := func(name, activation string, batch, channels, length, width int, bias, past, f16 bool) {
		rng := newMersenne(0)
		c := &onnxFiles{operator: "CausalConvWithState", opset: 27, in: make([]*onnxfile.Tensor, 4)}
		if activation != "" {
			c.texts = map[string]string{"activation": activation}
		}
		d, draw := onnxfile.Float, rng.randn
		if f16 {
			d, draw = onnxfile.Float16, rng.uniform
		}
		tensor := func(shape ...int) *onnxfile.Tensor { return filled(d, draw(shape...), shape...) }
		c.in[convInput], c.in[convWeight] = tensor(batch, channels, length), tensor(channels, 1, width)
		if bias {
			c.in[convBias] = tensor(channels)
		}
		if past {
			c.in[convPast] = tensor(batch, channels, width-1)
		}
		c.solveConv(batch, channels, length, width, activation != "")
		for c.in[len(c.in)-1] == nil {
			c.in = c.in[:len(c.in)-1]
		}
		cases["test_causal_conv_with_state_"+name] = c
	}
	add("basic", "", 2, 4, 8, 4, false, false, false)
	add("with_bias", "", 2, 4, 8, 4, true, false, false)
	add("with_past_state", "", 2, 4, 8, 4, false, true, false)
	add("silu", "silu", 2, 4, 8, 4, false, false, false)
	add("swish_alias", "swish", 2, 4, 8, 4, false, false, false)
	add("decode_step", "", 2, 4, 1, 4, true, true, false)
	add("kernel_size_one", "", 2, 4, 8, 1, false, false, false)
	add("with_bias_and_past_state", "", 2, 4, 8, 4, true, true, false)
	add("silu_with_past_state", "silu", 2, 4, 8, 4, false, true, false)
	add("b1_c1_degenerate", "", 1, 1, 6, 4, false, false, false)
	add("short_input_no_past_state", "", 2, 4, 2, 5, false, false, false)
	add("fp16", "", 2, 4, 8, 4, false, false, true)
	add("silu_fp16", "silu", 2, 4, 8, 4, false, false, true)
	return cases
}

// convStates returns the shape of the states of a convolution with weights [channels, 1, width].
func (c *onnxFiles) convStates(width int) []int {
	shape := slices.Clone(c.in[convInput].Shape)
	shape[2-c.ints["channels_last"]] = (width - 1) * max(1, int(c.ints["dilation"]))
	if n := int(c.ints["state_window"]); n > 0 {
		shape = append([]int{n}, shape...)
	}
	return shape
}

// solveConv computes want of a convolution in float64, with the bounds of package oracle.
func (c *onnxFiles) solveConv(batch, channels, length, width int, silu bool) {
	dilation, slots := max(1, int(c.ints["dilation"])), max(1, int(c.ints["state_window"]))
	kept := (width - 1) * dilation
	// at returns the place of element i, of n, of a channel.
	at := func(b, ch, i, n int) int {
		if c.ints["channels_last"] == 1 {
			return (b*n+i)*channels + ch
		}
		return (b*channels+ch)*n + i
	}
	y, present := make([]oracle.Element, batch*channels*length), make([]oracle.Element, slots*batch*channels*kept)
	for n := range batch * channels {
		b, ch := n/channels, n%channels
		row, w, taps, bias := make([]float32, kept, kept+length), make([]float32, width), make([]float32, width), float32(0)
		for i := range row {
			if past := c.in[convPast]; past != nil {
				row[i] = float32(past.At(at((slots-1)*batch+b, ch, i, kept)))
			}
		}
		for i := range w {
			w[i] = float32(c.in[convWeight].At(ch*width + i))
		}
		if x := c.in[convBias]; x != nil {
			bias = float32(x.At(ch))
		}
		for s := range length {
			row = append(row, float32(c.in[convInput].At(at(b, ch, s, length))))
			for i := range taps {
				taps[i] = row[s+i*dilation] // zeros between the weights are exact
			}
			y[at(b, ch, s, length)] = oracle.CausalConv(taps, w, bias, silu)
			for i := range kept {
				if slot := slots - length + s; slot >= 0 {
					present[at(slot*batch+b, ch, i, kept)].Value = float64(row[s+1+i])
				}
			}
		}
	}
	d := c.in[convInput].Type
	c.want, c.elements = nil, nil
	c.expect(d, y, c.in[convInput].Shape...)
	c.expect(d, present, c.convStates(width)...)
}
