// Package llama has stories260K of llama2.c, a decoder of 260,000 parameters that was trained on TinyStories (Eldan &
// Li 2023). A program may have its files from elsewhere than this package, which then is linked without them.
package llama

import (
	"context"
	_ "embed"
	"encoding/binary"
	"math"
	"slices"

	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/nn"
)

// The files of the model.
var (
	//go:embed stories260K/checkpoint_legacy.bin
	CheckpointFile []byte
	//go:embed stories260K/tokenizer.bin
	TokenizerFile []byte
)

// The lengths of the model: Positions is the largest number of tokens of a text.
const (
	Layers, Heads, HeadDim, KVHeads, Positions = 5, 8, dim / Heads, 4, 512

	dim, hidden, vocab = 64, 172, 512
)

// checkpoint is a file of llama2.c, version 0, with weights as [outputs][inputs]. What
// follows in the file are cosines and sines, which package nn computes.
type checkpoint struct {
	Header         [7]int32
	Embedding      [vocab * dim]float32
	Norm           [Layers][dim]float32
	Wq             [Layers][dim * dim]float32
	Wk, Wv         [Layers][KVHeads * HeadDim * dim]float32
	Wo             [Layers][dim * dim]float32
	FeedNorm       [Layers][dim]float32
	Gate, Down, Up [Layers][hidden * dim]float32
	LastNorm       [dim]float32
}

// Model is a decoder of the Llama family (Touvron et al. 2023). Each layer computes
//
//	x += attention(norm(x))    x += down(silu(gate(h))·up(h)), h = norm(x)
//
// Attention and matrix products run on the device, the rest on the host. Closing the device frees the weights.
type Model struct {
	checkpoint
	// Dev is the device that computes.
	Dev          *kernels.Device
	attention    [Layers]*nn.MultiHeadAttention
	gateUp, down [Layers]*nn.Linear
	classifier   *nn.Linear
}

// Load reads the model from a file like CheckpointFile and moves its weights to a device. It returns
// an error for a file that is too short and of the device.
func Load(ctx context.Context, dev *kernels.Device, file []byte) (*Model, error) {
	m := &Model{Dev: dev}
	_, err := binary.Decode(file, binary.LittleEndian, &m.checkpoint)
	transposed := func(w []float32) (t kernels.Tensor) {
		if err == nil {
			t, err = nn.Transposed(w, dim)
		}
		return t
	}
	linear := func(w []float32, inputs int) (l *nn.Linear) {
		if err == nil {
			l, err = nn.NewLinear(ctx, dev, inputs, w, nil)
		}
		return l
	}
	c := nn.MultiHeadConfig{Model: dim, Heads: Heads, KVHeads: KVHeads, RoPE: &nn.RoPE{Interleaved: true}}
	for i := range Layers {
		w := nn.MultiHeadWeights{Wq: transposed(m.Wq[i][:]), Wk: transposed(m.Wk[i][:]), Wv: transposed(m.Wv[i][:]), Wo: transposed(m.Wo[i][:])}
		if err == nil {
			m.attention[i], err = nn.NewMultiHeadAttention(ctx, dev, c, w)
		}
		m.gateUp[i], m.down[i] = linear(slices.Concat(m.Gate[i][:], m.Up[i][:]), dim), linear(m.Down[i][:], hidden)
	}
	m.classifier = linear(m.Embedding[:], dim)
	return m, err
}

// Forward appends the same number of tokens to each sequence and returns the logits of its
// next token, [B][512]. options returns those of a layer: its cache, or [Whole]. For whole
// sequences, weights are the attention weights of each layer, [B][Heads][S][S].
func (m *Model) Forward(ctx context.Context, tokens [][]int, options func(layer int) nn.MultiHeadOptions) (logits, weights [][]float32, err error) {
	var x, last []float32
	for _, t := range slices.Concat(tokens...) {
		x = append(x, m.Embedding[t*dim:][:dim]...)
	}
	for i := range Layers {
		attended, w, err := m.attention[i].ApplyFloat32(ctx, norm(x, m.Norm[i][:]), len(tokens), options(i))
		if err != nil {
			return nil, nil, err
		}
		weights = append(weights, w)
		add(x, attended)
		gateUp, err := m.gateUp[i].ApplyFloat32(ctx, norm(x, m.FeedNorm[i][:]))
		if err != nil {
			return nil, nil, err
		}
		var h []float32
		for row := range slices.Chunk(gateUp, 2*hidden) { // SwiGLU (Shazeer 2020)
			for j, gate := range row[:hidden] {
				h = append(h, row[hidden+j]*gate/(1+float32(math.Exp(-float64(gate)))))
			}
		}
		fed, err := m.down[i].ApplyFloat32(ctx, h)
		if err != nil {
			return nil, nil, err
		}
		add(x, fed)
	}
	for sequence := range slices.Chunk(x, len(x)/len(tokens)) {
		last = append(last, sequence[len(sequence)-dim:]...)
	}
	all, err := m.classifier.ApplyFloat32(ctx, norm(last, m.LastNorm[:]))
	return slices.Collect(slices.Chunk(all, vocab)), weights, err
}

// Whole returns the options of a layer for whole sequences.
func Whole(int) nn.MultiHeadOptions {
	return nn.MultiHeadOptions{Options: kernels.Options{Causal: true, Weights: true}}
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
