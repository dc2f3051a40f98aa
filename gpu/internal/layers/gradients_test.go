package layers_test

import (
	"cmp"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
	"github.com/seed90331342/attn/kernels/nn"
)

// layer64 is a layer in float64, for central differences: causal attention with as many heads
// as fit, RoPE over whole heads in halves, biases, and all that its config adds.
type layer64 struct {
	nn.MultiHeadConfig
	batch, rows, keys int
	weights           map[string][]float64
}

// linear64 returns x [rows, n]·w [n, m] + b.
func linear64(x, w, b []float64, rows int) []float64 {
	m := len(b)
	n := len(w) / m
	y := make([]float64, rows*m)
	for i := range rows {
		for c := range m {
			sum := b[c]
			for k := range n {
				sum += x[i*n+k] * w[k*m+c]
			}
			y[i*m+c] = sum
		}
	}
	return y
}

// rotated returns t [batch·rows, heads·dim] with each head rotated by its row's position.
func (l *layer64) rotated(t []float64, rows, heads int) []float64 {
	if l.RoPE == nil {
		return t
	}
	y := slices.Clone(t)
	half := l.HeadDim / 2
	for r := range l.batch * rows {
		for h := range heads {
			for i := range half {
				sin, cos := math.Sincos(float64(r%rows) * math.Pow(10000, -float64(i)/float64(half)))
				a := (r*heads+h)*l.HeadDim + i
				y[a], y[a+half] = t[a]*cos-t[a+half]*sin, t[a]*sin+t[a+half]*cos
			}
		}
	}
	return y
}

// normed returns the RMS norm of each n elements of t, with factors w, or without.
func (l *layer64) normed(t, w []float64, n int) []float64 {
	var y []float64
	for row := range slices.Chunk(t, n) {
		squares := 0.0
		for _, x := range row {
			squares += x * x
		}
		for i, x := range row {
			y = append(y, x/math.Sqrt(squares/float64(n)+cmp.Or(l.Norm.Epsilon, 1e-6)))
			if w != nil && l.Norm.PlusOne {
				y[len(y)-1] *= 1 + w[i]
			} else if w != nil {
				y[len(y)-1] *= w[i]
			}
		}
	}
	return y
}

// operand returns a projection of queries or keys after its norm and its rotation.
func (l *layer64) operand(t, w []float64, rows, heads int) []float64 {
	switch n := l.HeadDim; {
	case l.Norm == nil:
		return l.rotated(t, rows, heads)
	case l.Norm.AfterRoPE:
		return l.normed(l.rotated(t, rows, heads), w, n)
	case l.Norm.Projection:
		return l.rotated(l.normed(t, w, n*heads), rows, heads)
	default:
		return l.rotated(l.normed(t, w, n), rows, heads)
	}
}

// loss returns Σ dy·y of the layer's output for x and the memory z.
func (l *layer64) loss(x, z, dy []float64) float64 {
	w := l.weights
	q := l.operand(linear64(x, w["wq"], w["bq"], l.batch*l.rows), w["qnorm"], l.rows, l.Heads)
	k := linear64(z, w["wk"], w["bk"], l.batch*l.keys)
	v := k
	if !l.KeysAsValues {
		v = linear64(z, w["wv"], w["bv"], l.batch*l.keys)
	}
	if l.Norm != nil && l.Norm.Values {
		v = l.normed(v, nil, l.HeadDim)
	}
	k = l.operand(k, w["knorm"], l.keys, l.KVHeads)
	if t := l.Temperature; t != nil {
		for i := range q {
			q[i] *= 1 + t.Scale*math.Log1p(math.Floor(float64(i/(l.Heads*l.HeadDim)%l.rows+1)/float64(t.Floor)))
		}
	}
	o := make([]float64, len(q))
	scale := 1 / math.Sqrt(float64(l.HeadDim))
	for b := range l.batch {
		for h := range l.Heads {
			for i := range l.rows {
				at := ((b*l.rows+i)*l.Heads + h) * l.HeadDim
				sum := math.Exp(w["sinks"][h])
				for j := range min(i+1, l.keys) {
					if l.Chunk > 0 && i/l.Chunk != j/l.Chunk {
						continue
					}
					key := ((b*l.keys+j)*l.KVHeads + h/(l.Heads/l.KVHeads)) * l.HeadDim
					s := 0.0
					for c := range l.HeadDim {
						s += q[at+c] * k[key+c]
					}
					p := math.Exp(scale * s)
					sum += p
					for c := range l.HeadDim {
						o[at+c] += p * v[key+c]
					}
				}
				for c := range l.HeadDim {
					o[at+c] /= sum
				}
			}
		}
	}
	if l.Gate != nn.GateNone {
		gate := linear64(x, w["wg"], w["bg"], l.batch*l.rows)
		for i := range o {
			o[i] /= 1 + math.Exp(-gate[i*len(gate)/len(o)])
		}
	}
	total := 0.0
	for i, y := range linear64(o, w["wo"], w["bo"], l.batch*l.rows) {
		total += y * dy[i]
	}
	return total
}

// TestLayerGradients compares all gradients of a layer with central differences in float64.
//
// Six products follow each other between dy and dx, each sum of at most 64 terms has an error of 6·√64·u times its
// magnitudes, which exceed the largest gradient less than 16 times here: 6·48·16·u < 3e-4 of the largest one. The
// differences, with a step of 1e-5, are exact to 1e-8. A forgotten term changes gradients by their own size.
func TestLayerGradients(t *testing.T) {
	for _, c := range []struct {
		name      string
		config    nn.MultiHeadConfig
		keys      int  // of a memory; 0 is self-attention
		threads   int  // of the CPU; 0 is the GPU
		scattered bool // dy and x are views with gaps
	}{
		{"self", nn.MultiHeadConfig{Model: 8, Heads: 2}, 0, 1, false},
		{"biases, grouped heads, rope", grouped(nn.MultiHeadConfig{}), 0, 2, true},
		{"memory", nn.MultiHeadConfig{Model: 8, Memory: 6, Heads: 2, Bias: true, RoPE: &nn.RoPE{}}, 5, 3, false},
		{"norm of each head", grouped(nn.MultiHeadConfig{Norm: &nn.Norm{}}), 0, 2, true},
		{"1 + w, gate in the query, sinks", grouped(nn.MultiHeadConfig{Norm: &nn.Norm{Norm: kernels.Norm{PlusOne: true, Epsilon: 1e-5}}, Gate: nn.GateInQuery, Sinks: true}), 0, 2, false},
		{"norm of the projection, gate of elements", grouped(nn.MultiHeadConfig{Norm: &nn.Norm{Projection: true}, Gate: nn.GateElements}), 0, 2, false},
		{"norm after rope without weights, gate of heads", grouped(nn.MultiHeadConfig{Norm: &nn.Norm{Weightless: true, AfterRoPE: true}, Gate: nn.GateHeads}), 0, 2, true},
		{"norm after rope", grouped(nn.MultiHeadConfig{Norm: &nn.Norm{AfterRoPE: true}}), 0, 2, false},
		{"chunks and a temperature", grouped(nn.MultiHeadConfig{Norm: &nn.Norm{}, Chunk: 3, Temperature: &nn.Temperature{Scale: 0.5, Floor: 2}}), 0, 2, true},
		{"norm of values", grouped(nn.MultiHeadConfig{Norm: &nn.Norm{Norm: kernels.Norm{Epsilon: 0.1}, Values: true}}), 0, 2, false},
		{"keys as values", grouped(nn.MultiHeadConfig{KeysAsValues: true}), 0, 2, true},
		{"keys as values, their norm, memory", grouped(nn.MultiHeadConfig{Memory: 6, Norm: &nn.Norm{Values: true}, KeysAsValues: true, Gate: nn.GateHeads}), 5, 2, true},
		{"grouped heads on the GPU", grouped(nn.MultiHeadConfig{}), 0, 0, true},
		{"memory on the GPU", nn.MultiHeadConfig{Model: 8, Memory: 6, Heads: 2, Bias: true, RoPE: &nn.RoPE{}}, 5, 0, false},
		{"all on the GPU", grouped(nn.MultiHeadConfig{Norm: &nn.Norm{Values: true}, KeysAsValues: true, Gate: nn.GateHeads, Sinks: true}), 0, 0, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			var dev *kernels.Device
			if c.threads == 0 {
				dev = onGPU(t)
			} else {
				dev = kernels.NewDevice(cpu.New(cpu.Options{Threads: c.threads}))
				defer dev.Close()
			}
			testLayerGradients(t, dev, c.config, c.keys, c.scattered)
		})
	}
}

// grouped adds biases, a rotation and two heads for each head of keys to a config.
func grouped(c nn.MultiHeadConfig) nn.MultiHeadConfig {
	c.Model, c.Heads, c.KVHeads, c.HeadDim, c.Bias, c.RoPE = 12, 4, 2, 4, true, &nn.RoPE{}
	return c
}

// byName returns tensors of weights by their names.
func byName(w nn.MultiHeadWeights) map[string]kernels.Tensor {
	return map[string]kernels.Tensor{"wq": w.Wq, "wk": w.Wk, "wv": w.Wv, "wo": w.Wo, "bq": w.Bq, "bk": w.Bk, "bv": w.Bv, "bo": w.Bo,
		"qnorm": w.QNorm, "knorm": w.KNorm, "sinks": w.Sinks, "wg": w.Wg, "bg": w.Bg}
}

func testLayerGradients(t *testing.T, dev *kernels.Device, config nn.MultiHeadConfig, keys int, scattered bool) {
	const batch, rows = 2, 7
	ctx := t.Context()
	w := must.Get(config.Initialise(nn.Initialiser{Seed: 5}))(t)
	rng := rand.New(rand.NewPCG(5, 6))
	wide := func(x kernels.Tensor) []float64 {
		data, err := x.Float32s()
		if !x.OnHost() {
			data, err = dev.ToFloat32(ctx, x)
		}
		must.Do(t, err)
		y := make([]float64, x.Shape().Elements())
		for i := range y {
			y[i] = float64(data[i])
		}
		return y
	}
	ref := layer64{MultiHeadConfig: config, batch: batch, rows: rows, keys: cmp.Or(keys, rows), weights: map[string][]float64{}}
	ref.KVHeads, ref.HeadDim, ref.Memory = cmp.Or(config.KVHeads, config.Heads), cmp.Or(config.HeadDim, config.Model/config.Heads), cmp.Or(config.Memory, config.Model)
	opt := nn.MultiHeadOptions{Options: kernels.Options{Causal: true}}
	of := byName(w)
	for _, name := range slices.Sorted(maps.Keys(of)) {
		x := of[name]
		if x.IsZero() {
			continue
		}
		if name[0] != 'w' { // factors, sinks and biases, which are all 1 or 0
			data := must.Get(x.Float32s())(t)
			for i := range data {
				data[i] += float32(rng.Float64() - 0.5)
			}
		}
		ref.weights[name] = wide(x)
	}
	for _, p := range []struct {
		name string
		n    int
	}{{"bq", ref.Heads * ref.HeadDim}, {"bk", ref.KVHeads * ref.HeadDim}, {"bv", ref.KVHeads * ref.HeadDim}, {"bo", ref.Model}} {
		if !config.Bias {
			ref.weights[p.name] = make([]float64, p.n)
		}
	}
	l := must.Get(nn.NewMultiHeadAttention(ctx, dev, config, w))(t)
	defer l.Release()
	if !config.Sinks {
		for h := range config.Heads {
			opt.Sinks = append(opt.Sinks, float32(h)/2)
			ref.weights["sinks"] = append(ref.weights["sinks"], float64(h)/2)
		}
	}
	x := random(t, dev, 1, batch, 1, rows, config.Model)
	dy := random(t, dev, 2, batch, 1, rows, config.Model)
	xs, dys := wide(x), wide(dy)
	zs := xs
	if keys > 0 {
		opt.Memory = random(t, dev, 3, batch, 1, keys, ref.Memory)
		zs = wide(opt.Memory)
	}
	if scattered {
		x, dy = withGaps(t, dev, x), withGaps(t, dev, dy)
	}
	pass := must.Get(l.Forward(ctx, x, opt))(t)
	defer pass.Release()
	g := must.Get(l.Backward(ctx, pass, dy))(t)
	defer g.Release()
	gradients, at := byName(g.Weights), maps.Clone(ref.weights)
	for name, x := range of {
		if got := gradients[name]; got.Shape() != x.Shape() {
			t.Errorf("d%s has shape %v, the weight has %v", name, got.Shape(), x.Shape())
		}
	}
	if !config.Sinks {
		gradients["sinks"] = g.Attention.Sinks
	}
	gradients["x"], at["x"] = g.X, xs
	if keys > 0 {
		gradients["memory"], at["memory"] = g.Memory, zs
	}
	for name, gradient := range gradients {
		if gradient.IsZero() {
			continue
		}
		got, of := must.Get(dev.ToFloat32(ctx, gradient))(t), at[name]
		if len(got) != len(of) {
			t.Fatalf("d%s has %d elements, want %d", name, len(got), len(of))
		}
		want, largest := make([]float64, len(got)), 0.0
		for i, was := range of {
			const h = 1e-5
			of[i] = was + h
			up := ref.loss(xs, zs, dys)
			of[i] = was - h
			want[i] = (up - ref.loss(xs, zs, dys)) / (2 * h)
			of[i] = was
			largest = max(largest, math.Abs(want[i]))
		}
		if name == "bk" { // a bias of all keys changes nothing without rotation; here it is small
			largest = max(largest, 1)
		}
		for i := range got {
			if e := math.Abs(float64(got[i]) - want[i]); !(e <= 3e-4*largest) {
				t.Errorf("d%s[%d] is %v, central differences give %v, the largest is %v", name, i, got[i], want[i], largest)
				break
			}
		}
	}
}

// withGaps returns a view with the elements of t, [B, 1, S, M], and memory between its rows.
func withGaps(t *testing.T, dev *kernels.Device, from kernels.Tensor) kernels.Tensor {
	t.Helper()
	s := from.Shape()
	mem := must.Get(dev.Alloc(t.Context(), kernels.F32, kernels.Shape{s[0], 1, s[2] + 1, s[3] + 3}))(t)
	t.Cleanup(mem.Release)
	view := must.Get(mem.View(s, mem.Strides(), 2))(t)
	must.Do(t, dev.Copy(t.Context(), []kernels.Tensor{view}, []kernels.Tensor{from}))
	return view
}
