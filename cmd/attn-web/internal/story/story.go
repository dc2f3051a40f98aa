// Package story writes a story with the model of package llama for the page of attn-web, token by
// token, and returns the attention weights of a token.
package story

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/seed90331342/attn/cmd/internal/llama"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kvcache"
	"github.com/seed90331342/attn/kernels/nn"
)

// Request is a story that the page asks for.
type Request struct {
	// Device is the name of the device that computes.
	Device string `json:"device"`
	Prompt string `json:"prompt"`
	// Steps is the largest number of tokens, with those of the prompt.
	Steps int `json:"steps"`
	// Temperature 0 takes the most probable token, larger values are more random.
	Temperature float64 `json:"temperature"`
	Seed        uint64  `json:"seed"`
}

// Writer writes a story. The caller closes its device.
type Writer struct {
	model     *llama.Model
	tokenizer *llama.Tokenizer
	tokens    []int
}

// New loads the model from its two files.
func New(ctx context.Context, dev *kernels.Device, checkpoint, tokenizer []byte) (*Writer, error) {
	m, err := llama.Load(ctx, dev, checkpoint)
	if err != nil {
		return nil, err
	}
	return &Writer{model: m, tokenizer: llama.LoadTokenizer(tokenizer)}, nil
}

// Write writes the story and calls each with the texts of the tokens that are new, and with how many
// tokens a second the device computes one by one; 0 for the prompt.
func (w *Writer) Write(ctx context.Context, req Request, each func(texts []string, perSecond float64)) error {
	w.tokens = w.tokenizer.Encode(req.Prompt)
	steps := min(req.Steps, llama.Positions)
	if len(w.tokens) >= steps {
		return fmt.Errorf("the beginning has %d tokens, it must have fewer than %d", len(w.tokens), steps)
	}
	var caches []*kvcache.Cache
	defer func() {
		for _, c := range caches {
			c.Release()
		}
	}()
	for range llama.Layers {
		c, err := kvcache.New(ctx, w.model.Dev, kvcache.Config{KVHeads: llama.KVHeads, Dim: llama.HeadDim, Capacity: steps})
		if err != nil {
			return err
		}
		caches = append(caches, c)
	}
	each(w.tokenizer.Texts(w.tokens), 0)
	rng, next, began := rand.New(rand.NewPCG(req.Seed, 0)), w.tokens, time.Now()
	for n := 0; len(w.tokens) < steps; n++ {
		logits, _, err := w.model.Forward(ctx, [][]int{next}, func(layer int) nn.MultiHeadOptions {
			return nn.MultiHeadOptions{Cache: caches[layer]}
		})
		if err != nil {
			return err
		}
		if n == 0 { // the prompt, and what the device compiles
			began = time.Now()
		}
		token := llama.Sample(logits[0], req.Temperature, rng)
		if token == llama.Beginning || token == llama.Ending {
			return nil
		}
		w.tokens = append(w.tokens, token)
		next = w.tokens[len(w.tokens)-1:]
		rate := 0.0
		if passed := time.Since(began).Seconds(); n > 0 && passed > 0 {
			rate = float64(n) / passed
		}
		each(w.tokenizer.Texts(w.tokens[len(w.tokens)-2:]), rate)
	}
	return nil
}

// Weights returns the attention weights with which the i-th token of the story, counted from the special token at its
// beginning, sees itself and earlier ones: [Layers][Heads][i+1]. It computes the story up to there again.
func (w *Writer) Weights(ctx context.Context, i int) ([][][]float32, error) {
	if i < 0 || i >= len(w.tokens) {
		return nil, fmt.Errorf("the story has no token %d", i)
	}
	n := i + 1
	_, weights, err := w.model.Forward(ctx, [][]int{w.tokens[:n]}, llama.Whole)
	if err != nil {
		return nil, err
	}
	all := make([][][]float32, llama.Layers)
	for layer, of := range weights { // [Heads][n][n]
		for head := range llama.Heads {
			all[layer] = append(all[layer], of[(head*n+i)*n:][:n])
		}
	}
	return all, nil
}
