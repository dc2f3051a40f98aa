package main

import (
	"context"
	"encoding/binary"
	"math"
	"slices"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/nn"
)

// The lengths of stories260K: positions is the largest number of tokens of a text.
const (
	dim, hidden, layers, heads, kvHeads, vocab, positions = 64, 172, 5, 8, 4, 512, 512

	headDim = dim / heads
)

// checkpoint is a file of llama2.c, version 0, with weights as [outputs][inputs]. What
// follows in the file are cosines and sines, which package nn computes.
type checkpoint struct {
	Header         [7]int32
	Embedding      [vocab * dim]float32
	Norm           [layers][dim]float32
	Wq             [layers][dim * dim]float32
	Wk, Wv         [layers][kvHeads * headDim * dim]float32
	Wo             [layers][dim * dim]float32
	FeedNorm       [layers][dim]float32
	Gate, Down, Up [layers][hidden * dim]float32
	LastNorm       [dim]float32
}

// model is a decoder of the Llama family (Touvron et al. 2023). Each layer computes
//
//	x += attention(norm(x))    x += down(silu(gate(h))·up(h)), h = norm(x)
//
// Attention and matrix products run on the device, the rest on the host. Closing the device
// frees the weights.
type model struct {
	checkpoint
	dev          *kernels.Device
	attention    [layers]*nn.MultiHeadAttention
	gateUp, down [layers]backend.Tensor
	classifier   backend.Tensor
	attending    time.Duration // in attention layers
}

func loadModel(ctx context.Context, dev *kernels.Device) (*model, error) {
	m := &model{dev: dev}
	_, err := binary.Decode(checkpointFile, binary.LittleEndian, &m.checkpoint)
	// host returns weights [outputs][in] as [1, 1, in, outputs].
	host := func(w []float32, in int) (t backend.Tensor) {
		out, transposed := len(w)/in, make([]float32, len(w))
		for i, x := range w {
			transposed[i%in*out+i/in] = x
		}
		if err == nil {
			t, err = backend.HostF32(transposed, backend.Shape{1, 1, in, out})
		}
		return t
	}
	upload := func(w []float32, in int) (t backend.Tensor) {
		if t = host(w, in); err == nil {
			t, err = dev.Upload(ctx, t)
		}
		return t
	}
	c := nn.MultiHeadConfig{Model: dim, Heads: heads, KVHeads: kvHeads, RoPE: &nn.RoPE{Interleaved: true}}
	for i := range layers {
		w := nn.MultiHeadWeights{Wq: host(m.Wq[i][:], dim), Wk: host(m.Wk[i][:], dim), Wv: host(m.Wv[i][:], dim), Wo: host(m.Wo[i][:], dim)}
		if err == nil {
			m.attention[i], err = nn.NewMultiHeadAttention(ctx, dev, c, w)
		}
		m.gateUp[i], m.down[i] = upload(slices.Concat(m.Gate[i][:], m.Up[i][:]), dim), upload(m.Down[i][:], hidden)
	}
	m.classifier = upload(m.Embedding[:], dim)
	return m, err
}

// forward appends the same number of tokens to each sequence and returns the logits of its
// next token, [B][vocab]. caches[i] is that of layer i. Without caches, tokens are whole
// sequences, and weights are the attention weights of each layer, [B][heads][S][S].
func (m *model) forward(ctx context.Context, tokens [][]int, caches []nn.KVCache) (logits, weights [][]float32, err error) {
	n := len(tokens[0])
	var x, last []float32
	for _, t := range slices.Concat(tokens...) {
		x = append(x, m.Embedding[t*dim:][:dim]...)
	}
	for i := range layers {
		began := time.Now()
		opt := nn.MultiHeadOptions{}
		if opt.Causal, opt.Weights = caches == nil, caches == nil; caches != nil {
			opt.Cache = caches[i]
		}
		attended, w, err := m.run(ctx, norm(x, m.Norm[i][:]), backend.Shape{len(tokens), 1, n, dim}, func(x backend.Tensor) (kernels.Result, error) {
			return m.attention[i].Apply(ctx, x, opt)
		})
		weights = append(weights, w)
		m.attending += time.Since(began)
		if err != nil {
			return nil, nil, err
		}
		add(x, attended)
		gateUp, err := m.project(ctx, norm(x, m.FeedNorm[i][:]), m.gateUp[i])
		if err != nil {
			return nil, nil, err
		}
		var h []float32
		for row := range slices.Chunk(gateUp, 2*hidden) { // SwiGLU (Shazeer 2020)
			for j, gate := range row[:hidden] {
				h = append(h, row[hidden+j]*gate/(1+float32(math.Exp(-float64(gate)))))
			}
		}
		fed, err := m.project(ctx, h, m.down[i])
		if err != nil {
			return nil, nil, err
		}
		add(x, fed)
	}
	for sequence := range slices.Chunk(x, n*dim) {
		last = append(last, sequence[(n-1)*dim:]...)
	}
	all, err := m.project(ctx, norm(last, m.LastNorm[:]), m.classifier)
	return slices.Collect(slices.Chunk(all, vocab)), weights, err
}

// project returns the rows of x times w, [1, 1, inputs, outputs].
func (m *model) project(ctx context.Context, x []float32, w backend.Tensor) (y []float32, err error) {
	in, out := w.Shape()[backend.Seq], w.Shape()[backend.Dim]
	y, _, err = m.run(ctx, x, backend.Shape{1, 1, len(x) / in, in}, func(x backend.Tensor) (r kernels.Result, err error) {
		if r.O, err = m.dev.Alloc(ctx, backend.F32, backend.Shape{1, 1, x.Shape()[backend.Seq], out}); err == nil {
			err = m.dev.Project(ctx, r.O, x, w, backend.Tensor{})
		}
		return r, err
	})
	return y, err
}

// run copies x to the device, and the result of f back.
func (m *model) run(ctx context.Context, x []float32, shape backend.Shape, f func(backend.Tensor) (kernels.Result, error)) (o, weights []float32, err error) {
	in, err := m.dev.FromFloat32(ctx, backend.F32, x, shape)
	if err != nil {
		return nil, nil, err
	}
	defer in.Release()
	r, err := f(in)
	defer r.Release()
	if err == nil {
		o, err = m.dev.Float32s(ctx, r.O)
	}
	if err == nil && !r.Weights.IsZero() {
		weights, err = m.dev.Float32s(ctx, r.Weights)
	}
	return o, weights, err
}

// norm divides each row of x by its root mean square (Zhang & Sennrich 2019).
func norm(x, scale []float32) (y []float32) {
	for row := range slices.Chunk(x, len(scale)) {
		sum := 0.
		for _, v := range row {
			sum += float64(v) * float64(v)
		}
		by := float32(1 / math.Sqrt(sum/float64(len(row))+1e-5))
		for i, v := range row {
			y = append(y, scale[i]*(by*v))
		}
	}
	return y
}

func add(x, y []float32) {
	for i := range x {
		x[i] += y[i]
	}
}
