package main

import (
	"context"
	"math"
	"math/rand/v2"

	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/nn"
)

// The task: a sequence shows pairs of a key and a value, each key at most once, and then a
// key alone. The answer is the value that was shown with it. Only attention moves it there.
const (
	symbols = 16 // keys, and values
	pairs   = 8  // of a sequence
	rows    = pairs + 1
	width   = 32 // of a token
	heads   = 2
)

// problem is one sequence.
type problem struct {
	keys, values [pairs]int
	asked        int // index of the pair whose key is asked for
}

func draw(rng *rand.Rand, batch int) []problem {
	list := make([]problem, batch)
	for i := range list {
		p := &list[i]
		for j, key := range rng.Perm(symbols)[:pairs] {
			p.keys[j], p.values[j] = key, rng.IntN(symbols)
		}
		p.asked = rng.IntN(pairs)
	}
	return list
}

// parameter is a matrix that the training changes, with its gradient and the two running
// means of Adam (Kingma & Ba 2015).
type parameter struct {
	w, grad, mean, square []float32
}

func newParameter(w []float32) *parameter {
	return &parameter{w, make([]float32, len(w)), make([]float32, len(w)), make([]float32, len(w))}
}

// update makes step n of Adam and clears the gradient.
func (p *parameter) update(n int) {
	const rate, keepMean, keepSquare = 3e-3, 0.9, 0.99
	a, b := 1-math.Pow(keepMean, float64(n)), 1-math.Pow(keepSquare, float64(n))
	for i, g := range p.grad {
		p.mean[i] = float32(keepMean*float64(p.mean[i]) + (1-keepMean)*float64(g))
		p.square[i] = float32(keepSquare*float64(p.square[i]) + (1-keepSquare)*float64(g)*float64(g))
		p.w[i] -= float32(rate * float64(p.mean[i]) / a / (math.Sqrt(float64(p.square[i])/b) + 1e-8))
	}
	clear(p.grad)
}

// model adds the embeddings of a token's key and value, lets the last row attend to all rows,
// and compares it with a vector of each value:
//
//	x = Ekey + Evalue    y = x + attention(x)    logits = y_last·U
type model struct {
	dev                 *kernels.Device
	config              nn.MultiHeadConfig
	weights             nn.MultiHeadWeights
	key, value, unembed *parameter    // [symbols, width], [symbols+1, width], [width, symbols]
	layer               [4]*parameter // wq, wk, wv, wo
}

// question is the embedding that the last row has in place of a value's.
const question = symbols

func newModel(dev *kernels.Device, seed uint64) (*model, error) {
	m := &model{dev: dev, config: nn.MultiHeadConfig{Model: width, Heads: heads}}
	rng := rand.New(rand.NewPCG(seed, 0))
	random := func(n int, scale float64) *parameter {
		w := make([]float32, n)
		for i := range w {
			w[i] = float32(rng.NormFloat64() * scale)
		}
		return newParameter(w)
	}
	m.key, m.value = random(symbols*width, 1), random((symbols+1)*width, 1)
	m.unembed = random(width*symbols, 1/math.Sqrt(width))
	var err error
	if m.weights, err = m.config.Initialise(nn.Initialiser{Seed: seed}); err != nil {
		return nil, err
	}
	for i, w := range m.matrices() {
		data, err := w.Float32s()
		if err != nil {
			return nil, err
		}
		m.layer[i] = newParameter(data)
	}
	return m, nil
}

func (m *model) matrices() [4]kernels.Tensor {
	return [4]kernels.Tensor{m.weights.Wq, m.weights.Wk, m.weights.Wv, m.weights.Wo}
}

// embed returns the tokens of the problems, [B, 1, rows, width].
func (m *model) embed(list []problem) []float32 {
	x := make([]float32, 0, len(list)*rows*width)
	for _, p := range list {
		for j := range rows {
			key, value := p.token(j)
			for c := range width {
				x = append(x, m.key.w[key*width+c]+m.value.w[value*width+c])
			}
		}
	}
	return x
}

// token returns the key and the value of row j.
func (p *problem) token(j int) (key, value int) {
	if j == pairs {
		return p.keys[p.asked], question
	}
	return p.keys[j], p.values[j]
}

// run computes the mean loss of the problems, -log of the probability of the right answer,
// and how many answers are right. With learn it also adds to the gradients.
func (m *model) run(ctx context.Context, list []problem, learn bool) (loss float64, right int, err error) {
	layer, err := nn.NewMultiHeadAttention(ctx, m.dev, m.config, m.weights)
	if err != nil {
		return 0, 0, err
	}
	defer layer.Release()
	shape := kernels.Shape{len(list), 1, rows, width}
	host := m.embed(list)
	x, err := m.dev.FromFloat32(ctx, kernels.F32, host, shape)
	if err != nil {
		return 0, 0, err
	}
	defer x.Release()
	pass, err := layer.Forward(ctx, x, nn.MultiHeadOptions{})
	if err != nil {
		return 0, 0, err
	}
	defer pass.Release()
	y, err := m.dev.ToFloat32(ctx, pass.O)
	if err != nil {
		return 0, 0, err
	}
	dy := make([]float32, len(y)) // 0 but in the last rows
	for b := range list {
		last := (b*rows + pairs) * width
		h := make([]float32, width)
		for c := range h {
			h[c] = host[last+c] + y[last+c]
		}
		l, ok := m.answer(h, dy[last:last+width], list[b].values[list[b].asked], len(list))
		loss += l / float64(len(list))
		if ok {
			right++
		}
	}
	if !learn {
		clear(m.unembed.grad)
		return loss, right, nil
	}
	return loss, right, m.learn(ctx, layer, pass, list, dy)
}

// answer returns the loss of the last row h, and adds the gradients of the mean over batch
// losses to dh and to that of the unembedding.
func (m *model) answer(h, dh []float32, want, batch int) (loss float64, right bool) {
	var logits [symbols]float64
	best, sum := 0, 0.0
	for s := range logits {
		for c, x := range h {
			logits[s] += float64(x) * float64(m.unembed.w[c*symbols+s])
		}
		if logits[s] > logits[best] {
			best = s
		}
	}
	top := logits[best]
	for _, l := range logits {
		sum += math.Exp(l - top)
	}
	for s, l := range logits {
		d := math.Exp(l-top) / sum
		if s == want {
			d--
		}
		d /= float64(batch)
		for c, x := range h {
			dh[c] += float32(d * float64(m.unembed.w[c*symbols+s]))
			m.unembed.grad[c*symbols+s] += float32(d * float64(x))
		}
	}
	return math.Log(sum) + top - logits[want], best == want
}

// learn adds the gradients of the embeddings and of the layer from dy, that of the last rows.
func (m *model) learn(ctx context.Context, layer *nn.MultiHeadAttention, pass *nn.Pass, list []problem, dy []float32) error {
	up, err := m.dev.FromFloat32(ctx, kernels.F32, dy, pass.O.Shape())
	if err != nil {
		return err
	}
	defer up.Release()
	g, err := layer.Backward(ctx, pass, up)
	if err != nil {
		return err
	}
	defer g.Release()
	dx, err := m.dev.ToFloat32(ctx, g.X)
	if err != nil {
		return err
	}
	for b := range list {
		for j := range rows {
			key, value := list[b].token(j)
			for c := range width {
				at := (b*rows+j)*width + c
				d := dx[at] + dy[at] // through the layer and past it
				m.key.grad[key*width+c] += d
				m.value.grad[value*width+c] += d
			}
		}
	}
	for i, t := range [4]kernels.Tensor{g.Weights.Wq, g.Weights.Wk, g.Weights.Wv, g.Weights.Wo} {
		d, err := m.dev.ToFloat32(ctx, t)
		if err != nil {
			return err
		}
		copy(m.layer[i].grad, d)
	}
	return nil
}

// update makes step n of the optimiser.
func (m *model) update(n int) {
	for _, p := range append(m.layer[:], m.key, m.value, m.unembed) {
		p.update(n)
	}
}
