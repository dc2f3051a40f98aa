package kernelstest

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/backend/oracle"
	"github.com/seed90331342/attn/kernels"
)

// linearCase is a call of linear attention.
type linearCase struct {
	name                 string
	batch, hq, hk, hv, t int
	k, v                 int
	decay, beta          int // 0, 1 or K of a head; 0, or the heads of beta
	dtype, out           backend.DType
	layout               Layout
	cuQ                  []int
	past                 bool
	chunk                int
	g                    []float32 // of tokens in turns, in place of small ones
	length               float32   // of keys, in place of 1
}

// linearDecays are log decays far below 0, between others.
var linearDecays = []float32{-0.1, -1e4, -0.01, -2, float32(math.Inf(-1)), -5, -130, 0, -30, -50}

// linearGrowth are log decays of heads that grow for 12 tokens and fall for 13, and channelGrowth those of 16 channels.
var (
	linearGrowth  = slices.Concat(slices.Repeat([]float32{4}, 12), slices.Repeat([]float32{-4}, 13))
	channelGrowth = slices.Concat(slices.Repeat([]float32{4}, 12*16), slices.Repeat([]float32{-4}, 13*16))
)

func linearCases() []linearCase {
	f32, f16, bf16, one := backend.F32, backend.F16, backend.BF16, []float32{-0.05}
	return []linearCase{
		{"linear", 2, 2, 2, 2, 70, 8, 8, 0, 0, f32, f32, Contiguous, nil, false, 0, nil, 0},
		{"gated, decays of heads", 1, 2, 2, 2, 65, 16, 5, 1, 0, f32, f32, Padded, nil, true, 16, nil, 0},
		{"gated, decays of channels", 1, 2, 2, 2, 49, 20, 16, 20, 0, f32, f32, BSHD, nil, true, 0, nil, 0},
		{"delta", 2, 2, 2, 2, 97, 24, 16, 0, 2, f32, f32, BSHD, nil, false, 32, nil, 0},
		{"gated delta, one beta", 1, 3, 3, 3, 129, 32, 32, 1, 1, f32, f32, Contiguous, nil, true, 64, nil, 0},
		{"gated delta, decays of channels", 1, 2, 2, 2, 77, 32, 17, 32, 2, f32, f32, Swapped, nil, true, 0, nil, 0},
		{"value heads share key heads", 1, 2, 2, 4, 40, 128, 128, 1, 4, bf16, bf16, BSHD, nil, true, 0, nil, 0},
		{"query heads share states", 2, 6, 2, 2, 40, 16, 16, 1, 2, f16, f16, Padded, nil, true, 0, nil, 0},
		{"one key head for all", 1, 1, 1, 5, 33, 64, 16, 1, 0, f32, bf16, Transposed, nil, false, 0, nil, 0},
		{"query heads share states that share key heads", 1, 4, 1, 2, 35, 16, 16, 16, 2, bf16, f32, Contiguous, nil, true, 0, nil, 0},
		{"one token", 3, 4, 2, 4, 1, 128, 128, 1, 4, bf16, f32, BSHD, nil, true, 0, nil, 0},
		{"one token of grouped queries, decays of channels", 2, 4, 2, 2, 1, 20, 24, 20, 2, f32, f16, Swapped, nil, true, 0, nil, 0},
		{"packed, one empty and one of a token", 1, 2, 2, 2, 60, 16, 16, 1, 2, f32, f32, Padded, []int{0, 17, 17, 18, 60}, true, 0, nil, 0},
		{"no tokens", 2, 2, 2, 2, 0, 8, 4, 1, 2, f32, f32, Contiguous, nil, true, 0, nil, 0},
		{"K and V of 1", 1, 2, 1, 2, 19, 1, 1, 1, 2, f32, f32, Padded, nil, true, 0, nil, 0},
		{"decays far below 0", 1, 2, 2, 2, 75, 16, 16, 1, 2, f32, f32, Contiguous, nil, true, 0, linearDecays, 0},
		{"decays of channels far below 0", 1, 2, 2, 2, 75, 16, 16, 16, 2, f32, f32, Contiguous, nil, true, 0, linearDecays, 0},
		{"gated, decays of channels far below 0", 1, 2, 2, 2, 75, 16, 16, 16, 0, f32, f32, Contiguous, nil, true, 0, linearDecays, 0},
		{"decays of channels of -5", 1, 1, 1, 1, 40, 16, 16, 16, 1, f32, f32, Contiguous, nil, true, 0, []float32{-5}, 0},
		{"keys longer than 1", 1, 2, 2, 2, 40, 16, 16, 1, 2, f32, f32, Contiguous, nil, true, 0, one, 1.5},
		{"keys shorter than 1", 1, 2, 2, 2, 40, 16, 16, 16, 2, f32, f32, Contiguous, nil, true, 0, nil, 0.1},
		{"decays that grow", 1, 2, 2, 2, 50, 16, 16, 1, 2, f32, f32, Contiguous, nil, true, 0, []float32{0.1, -0.3, 0.2}, 0},
		{"decays of channels that grow", 1, 2, 2, 2, 50, 16, 16, 16, 2, f32, f32, Contiguous, nil, true, 0, []float32{0.1, -0.3, 0.2}, 0},
		{"decays that grow by exp(48) in a dozen tokens", 1, 2, 2, 2, 50, 16, 16, 1, 2, f32, f32, Contiguous, nil, true, 0, linearGrowth, 0},
		{"decays of channels that grow by exp(48) in a dozen tokens", 1, 2, 2, 2, 50, 16, 16, 16, 2, f32, f32, Contiguous, nil, true, 0, channelGrowth, 0},
		{"the same keys", 1, 1, 1, 1, 66, 1, 16, 1, 1, f32, f32, Contiguous, nil, true, 64, one, 0},
	}
}

// linearProblem is a case with its operands.
type linearProblem struct {
	linearCase
	sequences                      int
	q, key, value, g, betas, state operand
}

func (c linearCase) draw(seed uint64) linearProblem {
	rng := rand.New(rand.NewPCG(seed, 0x6c696e))
	type shape = backend.Shape
	p := linearProblem{linearCase: c, sequences: backend.Sequences(c.cuQ, c.batch),
		q: drawn(rng, shape{c.batch, c.hq, c.t, c.k}, c.dtype), key: drawn(rng, shape{c.batch, c.hk, c.t, c.k}, c.dtype),
		value: drawn(rng, shape{c.batch, c.hv, c.t, c.v}, c.dtype)}
	for i := 0; i < len(p.key.data); i += c.k {
		row, sum := p.key.data[i:i+c.k], 0.0
		for _, x := range row {
			sum += float64(x) * float64(x)
		}
		length := 1.0
		if c.length > 0 {
			length = float64(c.length)
		}
		for j, x := range row {
			row[j] = c.dtype.Round(float32(float64(x) / math.Sqrt(sum) * length))
		}
	}
	if c.decay > 0 {
		p.g = drawn(rng, shape{c.batch, c.hv, c.t, c.decay}, c.dtype)
		for i, x := range p.g.data {
			p.g.data[i] = c.dtype.Round(-0.2 * x * x)
			if c.g != nil {
				p.g.data[i] = c.g[i%len(c.g)]
			}
		}
	}
	if c.beta > 0 {
		p.betas = drawn(rng, shape{c.batch, c.beta, c.t, 1}, c.dtype)
		for i, x := range p.betas.data {
			p.betas.data[i] = c.dtype.Round(float32(2 / (1 + math.Exp(-2*float64(x)))))
		}
	}
	if c.past {
		p.state = drawn(rng, shape{p.sequences, c.hv, c.k, c.v}, backend.F32)
	}
	return p
}

// head returns output head h of sequence n, and where its tokens are.
func (p *linearProblem) head(n, h int) (l oracle.Linear, b, lo, hi int) {
	b, lo, hi = backend.Sequence(p.cuQ, n, p.t)
	outs := max(p.hq, p.hv)
	state := h * p.hv / outs
	rows := func(o operand, h int) []float32 {
		if o.data == nil {
			return nil
		}
		d := o.shape[backend.Dim]
		return o.data[((b*o.shape[backend.Heads]+h)*p.t+lo)*d:][:(hi-lo)*d]
	}
	l = oracle.Linear{K: p.k, V: p.v, Q: rows(p.q, h*p.hq/outs), Key: rows(p.key, state*p.hk/p.hv), Value: rows(p.value, state), Decay: rows(p.g, state),
		Beta: rows(p.betas, state*p.beta/p.hv), Scale: float32(1 / math.Sqrt(float64(p.k))), Chunk: 64}
	if p.past {
		l.State = p.state.data[(n*p.hv+state)*p.k*p.v:][:p.k*p.v]
	}
	return l, b, lo, hi
}

// on uploads p. The states lie in a layout of their own.
func (p *linearProblem) on(t *testing.T, dev *kernels.Device, states Layout) (c kernels.LinearAttention, o, present flat, release func()) {
	up := func(x operand, l Layout) flat {
		if x.data == nil {
			return flat{}
		}
		return put(t, dev, x, l)
	}
	nan, outs := float32(math.NaN()), backend.Shape{p.batch, max(p.hq, p.hv), p.t, p.v}
	o, present = put(t, dev, filled(nan, outs, p.out), p.layout), put(t, dev, filled(nan, backend.Shape{p.sequences, p.hv, p.k, p.v}, backend.F32), states)
	all := []flat{o, up(p.q, p.layout), up(p.key, p.layout), up(p.value, p.layout), up(p.g, p.layout), up(p.betas, p.layout), up(p.state, states), present}
	c = kernels.LinearAttention{O: o.view, Q: all[1].view, K: all[2].view, V: all[3].view, Decay: all[4].view, Beta: all[5].view,
		PastState: all[6].view, PresentState: present.view, CuQ: p.cuQ, ChunkSize: p.chunk}
	return c, o, present, func() {
		for _, f := range all {
			f.release()
		}
	}
}

// check compares outputs and states with float64.
func (p *linearProblem) check(t *testing.T, what string, o, state []float32) {
	t.Helper()
	worst := p.worst(what, o, state)
	if err := worst.Err(); err != nil {
		t.Error(err)
	}
	t.Logf("%.2g of the bound at worst, at %s", worst.Off, worst.Where)
}

func (p *linearProblem) worst(what string, o, state []float32) (worst oracle.Worst) {
	outs := max(p.hq, p.hv)
	for n := range p.sequences {
		for h := range outs {
			l, b, lo, hi := p.head(n, h)
			want, wantState := l.Attend()
			got := o[((b*outs+h)*p.t+lo)*p.v:][:(hi-lo)*p.v]
			for i, e := range want {
				worst.See(float64(got[i]), e.Value, e.Bound(p.out), func() string {
					return fmt.Sprintf("%s: sequence %d, head %d, token %d, element %d", what, n, h, i/p.v, i%p.v)
				})
			}
			gotState := state[(n*p.hv+h*p.hv/outs)*p.k*p.v:]
			for i, e := range wantState {
				worst.See(float64(gotState[i]), e.Value, e.Bound(backend.F32), func() string {
					return fmt.Sprintf("%s: state of sequence %d, head %d, row %d, column %d", what, n, h, i/p.v, i%p.v)
				})
			}
		}
	}
	return worst
}

// testLinear compares linear attention with the recurrence in float64: in one call, in one with the state in place, and
// token after token.
func testLinear(t *testing.T, dev *kernels.Device) {
	if !implements[backend.LinearAttender](dev) {
		t.Logf("%s has no linear attention", dev.Info().Name)
		return
	}
	for i, c := range linearCases() {
		t.Run(c.name, func(t *testing.T) {
			p := c.draw(uint64(i))
			call, o, present, release := p.on(t, dev, []Layout{Contiguous, Padded, Transposed}[i%3])
			defer release()
			noError(t, dev.LinearAttention(t.Context(), call))
			var out []float32
			if c.t > 0 {
				out = o.get(t, dev, "o")
			}
			final := present.get(t, dev, "present state")
			p.check(t, "a call", out, final)
			if c.past {
				call.PresentState = call.PastState
				noError(t, dev.LinearAttention(t.Context(), call))
				if c.t > 0 && !slices.Equal(o.get(t, dev, "o"), out) || !slices.Equal(read(t, dev, copied(t, dev, call.PastState)), final) {
					t.Error("other results with the state in place")
				}
			}
			if c.cuQ == nil && c.t > 1 {
				p.steps(t, dev)
			}
		})
	}
	t.Run("NaN stays in its sequence", func(t *testing.T) { testLinearAlone(t, dev) })
}

// copied returns a contiguous copy of x.
func copied(t *testing.T, dev *kernels.Device, x backend.Tensor) backend.Tensor {
	y := must(dev.Alloc(t.Context(), x.DType(), x.Shape()))(t)
	t.Cleanup(y.Release)
	noError(t, dev.Copy(t.Context(), []backend.Tensor{y}, []backend.Tensor{x}))
	return y
}

// steps computes p with a call for each token.
func (p *linearProblem) steps(t *testing.T, dev *kernels.Device) {
	call, o, present, release := p.on(t, dev, Contiguous)
	defer release()
	for i := range p.t {
		c := call
		for _, x := range []*backend.Tensor{&c.O, &c.Q, &c.K, &c.V, &c.Decay, &c.Beta} {
			if !x.IsZero() {
				*x = must(x.Slice(backend.Seq, i, i+1))(t)
			}
		}
		if i > 0 {
			c.PastState = c.PresentState
		}
		noError(t, dev.LinearAttention(t.Context(), c))
	}
	p.check(t, "steps", o.get(t, dev, "o"), present.get(t, dev, "present state"))
}

// testLinearAlone puts a NaN in each input of one sequence. Other sequences keep their bits, and earlier tokens are right.
func testLinearAlone(t *testing.T, dev *kernels.Device) {
	for _, decay := range []int{1, 16} {
		c := linearCase{batch: 1, hq: 1, hk: 1, hv: 1, t: 120, k: 16, v: 16, decay: decay, beta: 1, cuQ: []int{0, 40, 80, 120}, past: true}
		results := func(p linearProblem) (o, state []float32) {
			call, out, present, release := p.on(t, dev, Contiguous)
			defer release()
			noError(t, dev.LinearAttention(t.Context(), call))
			return out.get(t, dev, "o"), present.get(t, dev, "present state")
		}
		p := c.draw(1)
		o, state := results(p)
		const token = 61
		for name, x := range map[string]*operand{"q": &p.q, "k": &p.key, "v": &p.value, "decay": &p.g, "beta": &p.betas} {
			old := x.data
			x.data = slices.Clone(old)
			x.data[token*x.shape[backend.Dim]] = float32(math.NaN())
			gotO, gotState := results(p)
			x.data = old
			for i, y := range gotO {
				switch n := i / c.v; {
				case (n < 40 || n >= 80) && y != o[i]:
					t.Errorf("NaN in %s of another sequence: token %d has %v, else %v", name, n, y, o[i])
				case n >= 40 && n < token && !(math.Abs(float64(y-o[i])) <= 1e-3): // a bit more than both bounds
					t.Errorf("NaN in %s of token %d: token %d before it has %v, else %v", name, token, n, y, o[i])
				case n == token && i%c.v == 0 && y == y:
					t.Errorf("NaN in %s does not reach its token", name)
				}
			}
			for n := range 3 {
				if at := n * c.k * c.v; n != 1 && !slices.Equal(gotState[at:at+c.k*c.v], state[at:at+c.k*c.v]) {
					t.Errorf("NaN in %s of another sequence changes the state of sequence %d", name, n)
				}
			}
		}
	}
}
