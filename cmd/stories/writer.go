package main

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/seed90331342/attn/cmd/internal/llama"
	"github.com/seed90331342/attn/kernels/kvcache"
	"github.com/seed90331342/attn/kernels/nn"
)

// pageSize is the number of tokens in a page of the cache.
const pageSize = 16

// writer writes the stories of one run.
type writer struct {
	*llama.Model
	*llama.Tokenizer
	out          io.Writer
	steps, batch int
	temperature  float64
	seed         uint64

	stories           []*story
	prefill, decoding time.Duration
	prompted, decoded int // tokens
	pages             int // in use at the end
}

// story is a text that grows.
type story struct {
	tokens []int
	layers [llama.Layers]*kvcache.Sequence // keys and values
	rng    *rand.Rand
}

// write computes the prompt once, forks its cache for each story, and continues all stories
// token by token. The first is printed as it grows, the others when all have ended.
func (w *writer) write(ctx context.Context, prompt []int) error {
	pages := w.batch * llama.Layers * (w.steps/pageSize + 1)
	cache, err := kvcache.NewPaged(ctx, w.Dev, kvcache.PagedConfig{KVHeads: llama.KVHeads, Dim: llama.HeadDim, PageSize: pageSize, Pages: pages})
	if err != nil {
		return fmt.Errorf("no cache for --batch %d and --steps %d, lower either: %w", w.batch, w.steps, err)
	}
	first := &story{tokens: prompt}
	for i := range first.layers {
		if first.layers[i], err = cache.NewSequence(); err != nil {
			return err
		}
	}
	text, began := w.Decode(prompt), time.Now()
	for running, next := []*story{first}, [][]int{prompt}; len(running) > 0; {
		if _, err := io.WriteString(w.out, text); err != nil {
			return err
		}
		logits, _, err := w.Forward(ctx, next, func(layer int) nn.MultiHeadOptions {
			var sequences []*kvcache.Sequence
			for _, s := range running {
				sequences = append(sequences, s.layers[layer])
			}
			return nn.MultiHeadOptions{Cache: cache.Batch(sequences...)}
		})
		if err != nil {
			return err
		}
		if w.stories == nil { // next was the prompt
			for i := range w.batch {
				s := &story{slices.Clone(prompt), first.layers, rand.New(rand.NewPCG(w.seed, uint64(i)))}
				for j := 0; i > 0 && j < llama.Layers; j++ {
					if s.layers[j], err = first.layers[j].Fork(); err != nil {
						return err
					}
				}
				w.stories = append(w.stories, s)
			}
			running, logits = w.stories, slices.Repeat(logits, w.batch)
			w.prefill, w.prompted, began = time.Since(began), len(prompt), time.Now()
		}
		stories := running
		text, running, next = "", nil, nil
		for i, s := range stories {
			token := llama.Sample(logits[i], w.temperature, s.rng)
			if token == llama.Beginning || token == llama.Ending {
				continue
			}
			if s.tokens = append(s.tokens, token); s == w.stories[0] {
				text = w.Decode(s.tokens[len(s.tokens)-2:])
			}
			if len(s.tokens) <= w.steps {
				running, next = append(running, s), append(next, []int{token})
			}
		}
		w.decoded += len(running)
	}
	w.decoding, w.pages = time.Since(began), pages-cache.FreePages()
	_, err = fmt.Fprintln(w.out, text)
	for i := 1; i < w.batch && err == nil; i++ {
		_, err = fmt.Fprintf(w.out, "\n%s\n", w.Decode(w.stories[i].tokens))
	}
	return err
}

// report prints speed and memory.
func (w *writer) report(to io.Writer) {
	prefill, decoding := max(w.prefill, 1).Seconds(), max(w.decoding, 1).Seconds()
	info := w.Dev.Info()
	fmt.Fprintf(to, "\ndevice    %s, %s\n", info.Name, info.Device)
	fmt.Fprintf(to, "prefill   %4d tokens, %.0f a second\n", w.prompted, float64(w.prompted)/prefill)
	fmt.Fprintf(to, "decode    %4d tokens, %.0f a second\n", w.decoded, float64(w.decoded)/decoding)
	fmt.Fprintf(to, "cache     %d bytes in %d pages\n", w.pages*pageSize*2*llama.KVHeads*llama.HeadDim*4, w.pages)
}
