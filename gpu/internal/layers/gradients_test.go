package layers_test

import (
	"math"
	"slices"
	"testing"

	"github.com/seed90331342/attn/backend/backendtest/must"
	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/nn"
)

// layer64 is a layer in float64, for central differences: causal attention with as many heads
// as fit, RoPE over whole heads in halves, biases. weights are wq, wk, wv, wo, bq, bk, bv, bo.
type layer64 struct {
	batch, rows, keys, model, memory, heads, kvHeads, dim int
	weights                                               [8][]float64
	sinks                                                 []float64
	rope                                                  bool
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
	if !l.rope {
		return t
	}
	y := slices.Clone(t)
	half := l.dim / 2
	for r := range l.batch * rows {
		for h := range heads {
			for i := range half {
				sin, cos := math.Sincos(float64(r%rows) * math.Pow(10000, -float64(i)/float64(half)))
				a := (r*heads+h)*l.dim + i
				y[a], y[a+half] = t[a]*cos-t[a+half]*sin, t[a]*sin+t[a+half]*cos
			}
		}
	}
	return y
}

// loss returns Σ dy·y of the layer's output for x and the memory z.
func (l *layer64) loss(x, z, dy []float64) float64 {
	w := l.weights
	q := l.rotated(linear64(x, w[0], w[4], l.batch*l.rows), l.rows, l.heads)
	k := l.rotated(linear64(z, w[1], w[5], l.batch*l.keys), l.keys, l.kvHeads)
	v := linear64(z, w[2], w[6], l.batch*l.keys)
	o := make([]float64, len(q))
	scale := 1 / math.Sqrt(float64(l.dim))
	for b := range l.batch {
		for h := range l.heads {
			for i := range l.rows {
				at := ((b*l.rows+i)*l.heads + h) * l.dim
				sum := math.Exp(l.sinks[h])
				for j := range min(i+1, l.keys) {
					key := ((b*l.keys+j)*l.kvHeads + h/(l.heads/l.kvHeads)) * l.dim
					s := 0.0
					for c := range l.dim {
						s += q[at+c] * k[key+c]
					}
					p := math.Exp(scale * s)
					sum += p
					for c := range l.dim {
						o[at+c] += p * v[key+c]
					}
				}
				for c := range l.dim {
					o[at+c] /= sum
				}
			}
		}
	}
	total := 0.0
	for i, y := range linear64(o, w[3], w[7], l.batch*l.rows) {
		total += y * dy[i]
	}
	return total
}

// TestLayerGradients compares all gradients of a layer with central differences in float64.
//
// Six products follow each other between dy and dx, each sum of at most 64 terms has an
// error of 6·√64·u times its magnitudes, which exceed the largest gradient less than 16 times
// here: 6·48·16·u < 3e-4 of the largest one. The differences, with a step of 1e-5, are exact to
// 1e-8. A forgotten term changes gradients by their own size.
func TestLayerGradients(t *testing.T) {
	for _, c := range []struct {
		name      string
		config    nn.MultiHeadConfig
		keys      int  // of a memory; 0 is self-attention
		threads   int  // of the CPU; 0 is the GPU
		scattered bool // dy and x are views with gaps
	}{
		{"self", nn.MultiHeadConfig{Model: 8, Heads: 2}, 0, 1, false},
		{"biases, grouped heads, rope", nn.MultiHeadConfig{Model: 12, Heads: 4, KVHeads: 2, HeadDim: 4, Bias: true, RoPE: &nn.RoPE{}}, 0, 2, true},
		{"memory", nn.MultiHeadConfig{Model: 8, Memory: 6, Heads: 2, Bias: true, RoPE: &nn.RoPE{}}, 5, 3, false},
		{"grouped heads on the GPU", nn.MultiHeadConfig{Model: 12, Heads: 4, KVHeads: 2, HeadDim: 4, Bias: true, RoPE: &nn.RoPE{}}, 0, 0, true},
		{"memory on the GPU", nn.MultiHeadConfig{Model: 8, Memory: 6, Heads: 2, Bias: true, RoPE: &nn.RoPE{}}, 5, 0, false},
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

func testLayerGradients(t *testing.T, dev *kernels.Device, config nn.MultiHeadConfig, keys int, scattered bool) {
	const batch, rows = 2, 7
	ctx := t.Context()
	w := must.Get(config.Initialise(nn.Initialiser{Seed: 5}))(t)
	l := must.Get(nn.NewMultiHeadAttention(ctx, dev, config, w))(t)
	defer l.Release()
	d := config.Model / config.Heads
	if config.HeadDim > 0 {
		d = config.HeadDim
	}
	ref := layer64{batch: batch, rows: rows, keys: rows, model: config.Model, memory: config.Model, heads: config.Heads, kvHeads: config.Heads, dim: d,
		sinks: make([]float64, config.Heads), rope: config.RoPE != nil}
	if config.KVHeads > 0 {
		ref.kvHeads = config.KVHeads
	}
	wide := func(x kernels.Tensor, n int) []float64 {
		y := make([]float64, n)
		if !x.IsZero() {
			data, err := x.Float32s()
			if err != nil { // not in host memory
				data, err = dev.ToFloat32(ctx, x)
			}
			must.Do(t, err)
			for i, x := range data[:n] {
				y[i] = float64(x)
			}
		}
		return y
	}
	q, kv := ref.heads*d, ref.kvHeads*d
	x := random(t, dev, 1, batch, 1, rows, config.Model)
	dy := random(t, dev, 2, batch, 1, rows, config.Model)
	opt := nn.MultiHeadOptions{Options: kernels.Options{Causal: true, Sinks: make([]float32, config.Heads)}}
	for h := range opt.Sinks {
		opt.Sinks[h] = float32(h) / 2
		ref.sinks[h] = float64(opt.Sinks[h])
	}
	z := x
	if keys > 0 {
		ref.keys, ref.memory = keys, config.Memory
		z = random(t, dev, 3, batch, 1, keys, config.Memory)
		opt.Memory = z
	}
	ref.weights = [8][]float64{wide(w.Wq, config.Model*q), wide(w.Wk, ref.memory*kv), wide(w.Wv, ref.memory*kv), wide(w.Wo, q*config.Model),
		wide(w.Bq, q), wide(w.Bk, kv), wide(w.Bv, kv), wide(w.Bo, config.Model)}
	xs, zs, dys := wide(x, batch*rows*config.Model), wide(z, batch*ref.keys*ref.memory), wide(dy, batch*rows*config.Model)
	if scattered {
		x, dy = withGaps(t, dev, x), withGaps(t, dev, dy)
	}
	pass := must.Get(l.Forward(ctx, x, opt))(t)
	defer pass.Release()
	g := must.Get(l.Backward(ctx, pass, dy))(t)
	defer g.Release()
	checks := []struct {
		name string
		got  kernels.Tensor
		of   []float64
	}{
		{"dwq", g.Weights.Wq, ref.weights[0]}, {"dwk", g.Weights.Wk, ref.weights[1]}, {"dwv", g.Weights.Wv, ref.weights[2]}, {"dwo", g.Weights.Wo, ref.weights[3]},
		{"dsinks", g.Attention.Sinks, ref.sinks}, {"dx", g.X, xs},
	}
	if config.Bias {
		checks = append(checks, []struct {
			name string
			got  kernels.Tensor
			of   []float64
		}{{"dbq", g.Weights.Bq, ref.weights[4]}, {"dbk", g.Weights.Bk, ref.weights[5]}, {"dbv", g.Weights.Bv, ref.weights[6]}, {"dbo", g.Weights.Bo, ref.weights[7]}}...)
	}
	if keys > 0 {
		checks[5].of = xs
		checks = append(checks, struct {
			name string
			got  kernels.Tensor
			of   []float64
		}{"dmemory", g.Memory, zs})
	} else {
		zs = xs // one input
	}
	for _, c := range checks {
		got, err := dev.ToFloat32(ctx, c.got)
		if err != nil {
			t.Fatal(c.name, err)
		}
		if len(got) != len(c.of) {
			t.Fatalf("%s has %d elements, want %d", c.name, len(got), len(c.of))
		}
		want, largest := make([]float64, len(got)), 0.0
		for i, was := range c.of {
			const h = 1e-5
			c.of[i] = was + h
			up := ref.loss(xs, zs, dys)
			c.of[i] = was - h
			want[i] = (up - ref.loss(xs, zs, dys)) / (2 * h)
			c.of[i] = was
			largest = max(largest, math.Abs(want[i]))
		}
		if c.name == "dbk" { // a bias of all keys changes nothing without rotation; here it is small
			largest = max(largest, 1)
		}
		for i := range got {
			if e := math.Abs(float64(got[i]) - want[i]); !(e <= 3e-4*largest) {
				t.Errorf("%s[%d] is %v, central differences give %v, the largest is %v", c.name, i, got[i], want[i], largest)
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
