package kernelstest

import (
	"bytes"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"pgregory.net/rapid"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/nn"
)

// TestTorchMultiheadAttention compares layers of the CPU backend with PyTorch's
// nn.MultiheadAttention in float64, with weights from a file of its state_dict: self and cross
// attention, key_padding_mask, attn_mask, need_weights, add_zero_attn, in training and in
// evaluation, for which PyTorch has another code path.
func TestTorchMultiheadAttention(t *testing.T) {
	peer := startTorch(t)
	dev := kernels.NewDevice(cpu.New(cpu.Options{}))
	defer dev.Close()
	var problems, rows, blind, numbers, weights int
	var all compared
	failed := map[string]int{}
	check(t, draws(500, 500), func(rt *rapid.T) {
		var here compared
		l := drawTorchLayer(rt)
		given := must(peer.solve(l.problem()))(rt)
		w := must(l.config.LoadSafetensors(bytes.NewReader(given.file), int64(len(given.file)), ""))(rt)
		y, mine, err := l.run(t, dev, w)
		if err != nil {
			rt.Fatal(err)
		}
		problems++
		if given.failed != "" {
			failed[given.failed]++
		}
		for batch := range l.batch {
			for i := range l.rows {
				want, p, ok := l.row(w, batch, i)
				rows++
				at := (batch*l.rows + i) * l.config.Model
				if !ok { // a head sees nothing
					blind++
					if x := given.o[at]; !math.IsNaN(x) {
						numbers++
					}
					continue
				}
				for m, ref := range want {
					name := func() string { return fmt.Sprintf("y[%d,%d,%d]", batch, i, m) }
					here.see(float64(y[at+m]), ref.x, given.o[at+m], ref.err, ref.err, name)
				}
				for h := range p {
					for j, ref := range p[h] {
						got := float64(mine[((batch*l.config.Heads+h)*l.rows+i)*l.keys+j])
						name := func() string { return fmt.Sprintf("weight[%d,%d,%d,%d]", batch, h, i, j) }
						switch {
						case given.weights == nil:
							here.mine.See(got, ref.x, ref.err, name)
						case !l.average:
							weights++
							theirs := given.weights[((batch*l.config.Heads+h)*l.rows+i)*l.keys+j]
							here.see(got, ref.x, theirs, ref.err, ref.err, name)
						case h == 0: // the mean of the heads
							weights++
							mean, exact, bound := 0.0, 0.0, 0.0
							for h := range p {
								mean += float64(mine[((batch*l.config.Heads+h)*l.rows+i)*l.keys+j]) / float64(l.config.Heads)
								exact += p[h][j].x / float64(l.config.Heads)
								bound += p[h][j].err / float64(l.config.Heads)
							}
							here.see(mean, exact, given.weights[(batch*l.rows+i)*l.keys+j], bound, bound, name)
						}
					}
				}
			}
		}
		if err := all.add(here); err != nil {
			rt.Fatalf("%+v: %v", l, err)
		}
	})
	t.Logf("PyTorch %s: %d layers, %d rows, %d weights: %v", peer.version, problems, rows, weights, all)
	t.Logf("PyTorch %s differs: %d of %d rows with a head that sees no key are NaN, here the head adds 0", peer.version, blind-numbers, blind)
	for text, n := range failed {
		t.Logf("PyTorch %s differs: %d layers fail in evaluation, and are compared in training: %s", peer.version, n, text)
	}
}

// torchLayer is a call of nn.MultiheadAttention.
type torchLayer struct {
	config                        nn.MultiHeadConfig
	batch, rows, keys             int
	cross, zero, eval, float      bool
	needWeights, average, perHead bool
	seed                          uint64
	x, z                          []float32
	padding, mask                 []bool // true hides: [B, Sk], and [Sq, Sk] or [B, H, Sq, Sk]
}

func drawTorchLayer(t *rapid.T) *torchLayer {
	n := func(name string, lo, hi int) int { return rapid.IntRange(lo, hi).Draw(t, name) }
	yes := func(name string) bool { return rapid.Bool().Draw(t, name) }
	l := &torchLayer{batch: n("batch", 1, 3), rows: n("rows", 1, 20), cross: yes("cross"), eval: yes("eval"), needWeights: yes("need_weights"), average: yes("average"), seed: uint64(n("seed", 0, 1<<20))}
	l.config = nn.MultiHeadConfig{Heads: n("heads", 1, 4), Bias: yes("bias")}
	l.config.Model = l.config.Heads * n("head size", 1, 16)
	l.config.Memory, l.keys = l.config.Model, l.rows
	if l.cross {
		l.keys = n("keys", 1, 30)
		if yes("kdim") {
			l.config.Memory = n("memory", 1, 40)
		}
	}
	l.zero = n("add_zero_attn", 0, 3) == 0
	rng := rand.New(rand.NewPCG(l.seed, 0x6d6861))
	normal := func(n int) []float32 {
		data := make([]float32, n)
		for i := range data {
			data[i] = float32(rng.NormFloat64())
		}
		return data
	}
	l.x = normal(l.batch * l.rows * l.config.Model)
	if l.z = l.x; l.cross {
		l.z = normal(l.batch * l.keys * l.config.Memory)
	}
	if yes("padding") {
		l.padding = make([]bool, l.batch*l.keys)
		for b := range l.batch {
			for j := n("length", 0, l.keys); j < l.keys; j++ {
				l.padding[b*l.keys+j] = true
			}
		}
	}
	switch n("mask", 0, 3) {
	case 0: // causal
		l.float = yes("float mask")
		l.mask = make([]bool, l.rows*l.keys)
		for i := range l.mask {
			l.mask[i] = i%l.keys > i/l.keys
		}
	case 1:
		l.float, l.perHead = yes("float mask"), true
		l.mask = make([]bool, l.batch*l.config.Heads*l.rows*l.keys)
		for i := range l.mask {
			l.mask[i] = rng.IntN(4) == 0
		}
	}
	return l
}

// problem returns the call for PyTorch.
func (l *torchLayer) problem() torchProblem {
	p := torchProblem{
		Op: "mha", Dims: []int{l.batch, l.config.Heads, l.rows, l.keys, l.config.Model, l.config.Memory}, Q: raw(l.x), Seed: l.seed, LayerBias: l.config.Bias, Zero: l.zero,
		Eval: l.eval, Padding: raw(l.padding), Mask: raw(l.mask), MaskShape: []int{l.rows, l.keys}, FloatMask: l.float, NeedWeights: l.needWeights, Average: l.average,
	}
	if l.cross {
		p.K = raw(l.z)
	}
	if l.perHead {
		p.MaskShape = []int{l.batch * l.config.Heads, l.rows, l.keys}
	}
	return p
}

// hides reports whether a head of a row does not see a key.
func (l *torchLayer) hides(batch, h, i, j int) bool {
	at := i*l.keys + j
	if l.perHead {
		at += (batch*l.config.Heads + h) * l.rows * l.keys
	}
	return l.padding != nil && l.padding[batch*l.keys+j] || l.mask != nil && l.mask[at]
}

// run applies the layer on a device and returns its output and weights.
func (l *torchLayer) run(t *testing.T, dev *kernels.Device, w nn.MultiHeadWeights) (y, weights []float32, err error) {
	ctx := t.Context()
	layer, err := nn.NewMultiHeadAttention(ctx, dev, l.config, w)
	if err != nil {
		return nil, nil, err
	}
	defer layer.Release()
	opt := nn.MultiHeadOptions{Options: kernels.Options{Weights: true}}
	if l.zero {
		opt.Sinks = make([]float32, l.config.Heads)
	}
	x, err := dev.FromFloat32(ctx, backend.F32, l.x, backend.Shape{l.batch, 1, l.rows, l.config.Model})
	if err != nil {
		return nil, nil, err
	}
	defer x.Release()
	if l.cross {
		if opt.Memory, err = dev.FromFloat32(ctx, backend.F32, l.z, backend.Shape{l.batch, 1, l.keys, l.config.Memory}); err != nil {
			return nil, nil, err
		}
		defer opt.Memory.Release()
	}
	shape := backend.Shape{l.batch, l.config.Heads, l.rows, l.keys}
	seen := make([]bool, shape.Elements())
	for i := range seen {
		seen[i] = !l.hides(i/l.keys/l.rows/l.config.Heads, i/l.keys/l.rows%l.config.Heads, i/l.keys%l.rows, i%l.keys)
	}
	mask, err := backend.Host(seen, backend.Bool, shape)
	if err == nil {
		opt.Mask, err = dev.Upload(ctx, mask)
	}
	if err != nil {
		return nil, nil, err
	}
	defer opt.Mask.Release()
	r, err := layer.Apply(ctx, x, opt)
	if err != nil {
		return nil, nil, err
	}
	defer r.Release()
	return read(t, dev, r.O), read(t, dev, r.Weights), nil
}

// row returns a row of the output with the weights of each head, in float64 with the bounds of
// float32. It reports false if a head sees no key.
func (l *torchLayer) row(w nn.MultiHeadWeights, batch, i int) (y []num, weights [][]num, ok bool) {
	columns := func(data []float32, row, size int) (out []num) {
		for _, x := range data[(row)*size : (row+1)*size] {
			out = append(out, num{x: float64(x)})
		}
		return out
	}
	apply := func(x []num, w, b backend.Tensor, from, n int) (out []num) {
		weight, _ := w.Float32s()
		bias := make([]float32, w.Shape()[backend.Dim])
		if l.config.Bias {
			bias, _ = b.Float32s()
		}
		for c := from; c < from+n; c++ {
			out = append(out, affine(x, func(m int) float64 { return float64(weight[m*len(bias)+c]) }, float64(bias[c]), backend.F32))
		}
		return out
	}
	d := l.config.Model / l.config.Heads
	var joined []num
	for h := range l.config.Heads {
		q := apply(columns(l.x, batch*l.rows+i, l.config.Model), w.Wq, w.Bq, h*d, d)
		var keys []int
		var k, v [][]num
		for j := range l.keys {
			if !l.hides(batch, h, i, j) {
				z := columns(l.z, batch*l.keys+j, l.config.Memory)
				keys, k, v = append(keys, j), append(k, apply(z, w.Wk, w.Bk, h*d, d)), append(v, apply(z, w.Wv, w.Bv, h*d, d))
			}
		}
		if l.zero { // a key of zeros
			k, v = append(k, make([]num, d)), append(v, make([]num, d))
		}
		if len(k) == 0 {
			return nil, nil, false
		}
		o, _, p := attend(q, k, v, backend.F32)
		all := make([]num, l.keys)
		for n, j := range keys {
			all[j] = p[n]
		}
		joined, weights = append(joined, o...), append(weights, all)
	}
	return apply(joined, w.Wo, w.Bo, 0, l.config.Model), weights, true
}
