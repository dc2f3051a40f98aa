package main

import (
	"context"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels/kvcache"
	"github.com/seed90331342/attn/kernels/nn"
)

// pageSize is the number of tokens in a page of the cache.
const pageSize = 16

// writer writes the stories of one run.
type writer struct {
	*model
	*tokenizer
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
	layers [layers]*kvcache.Sequence // keys and values
	rng    *rand.Rand
}

// write computes the prompt once, forks its cache for each story, and continues all stories
// token by token. The first is printed as it grows, the others when all have ended.
func (w *writer) write(ctx context.Context, prompt []int) error {
	pages := w.batch * layers * (w.steps/pageSize + 1)
	cache, err := kvcache.NewPaged(ctx, w.dev, kvcache.PagedConfig{KVHeads: kvHeads, Dim: headDim, PageSize: pageSize, Pages: pages})
	if err != nil {
		return fmt.Errorf("no cache for --batch %d and --steps %d, lower either: %w", w.batch, w.steps, err)
	}
	first := &story{tokens: prompt}
	for i := range first.layers {
		if first.layers[i], err = cache.NewSequence(); err != nil {
			return err
		}
	}
	if _, err := io.WriteString(w.out, w.decode(beginning, prompt[1:]...)); err != nil {
		return err
	}
	began := time.Now()
	logits, _, err := w.forward(ctx, [][]int{prompt}, batches(cache, first))
	if err != nil {
		return err
	}
	w.prefill, w.prompted = time.Since(began), len(prompt)
	for i := range w.batch {
		s := &story{slices.Clone(prompt), first.layers, rand.New(rand.NewPCG(w.seed, uint64(i)))}
		for j := 0; i > 0 && j < layers; j++ {
			if s.layers[j], err = first.layers[j].Fork(); err != nil {
				return err
			}
		}
		w.stories = append(w.stories, s)
	}
	logits, began = slices.Repeat(logits, w.batch), time.Now()
	for running := w.stories; ; {
		var rest []*story
		var next [][]int
		for i, s := range running {
			token, after := sample(logits[i], w.temperature, s.rng), s.tokens[len(s.tokens)-1]
			if token == beginning || token == ending {
				continue
			}
			if s == w.stories[0] {
				if _, err := io.WriteString(w.out, w.decode(after, token)); err != nil {
					return err
				}
			}
			if s.tokens = append(s.tokens, token); len(s.tokens) <= w.steps {
				rest, next = append(rest, s), append(next, []int{token})
			}
		}
		if running = rest; len(running) == 0 {
			break
		}
		if logits, _, err = w.forward(ctx, next, batches(cache, running...)); err != nil {
			return err
		}
		w.decoded += len(running)
	}
	w.decoding, w.pages = time.Since(began), pages-cache.FreePages()
	_, err = fmt.Fprintln(w.out)
	for i := 1; i < w.batch && err == nil; i++ {
		_, err = fmt.Fprintf(w.out, "\n%s\n", w.decode(beginning, w.stories[i].tokens[1:]...))
	}
	return err
}

// batches returns the sequences of stories for each layer.
func batches(cache *kvcache.Paged, stories ...*story) (list []nn.KVCache) {
	for i := range layers {
		var sequences []*kvcache.Sequence
		for _, s := range stories {
			sequences = append(sequences, s.layers[i])
		}
		list = append(list, cache.Batch(sequences...))
	}
	return list
}

// sample draws a token from softmax(logits/temperature): the largest logit after Gumbel
// noise is added (Gumbel 1954). At 0 it returns the most probable token.
func sample(logits []float32, temperature float64, rng *rand.Rand) (token int) {
	best := math.Inf(-1)
	for i, x := range logits {
		y := float64(x)
		if temperature > 0 {
			y = y/temperature - math.Log(rng.ExpFloat64())
		}
		if y > best {
			best, token = y, i
		}
	}
	return token
}

// report prints speed and memory.
func (w *writer) report(to io.Writer) error {
	speed := func(n int, d time.Duration) string {
		return fmt.Sprintf("%4d tokens, %.0f a second", n, float64(n)/max(d.Seconds(), 1e-9))
	}
	share := 100 * w.attending.Seconds() / (w.prefill + w.decoding).Seconds()
	info, bytes := w.dev.Info(), w.pages*pageSize*2*kvHeads*headDim*backend.F32.Size()
	_, err := fmt.Fprintf(to, "\ndevice    %s, %s\nprefill   %s\ndecode    %s\nattention %3.0f%% of the time, with its projections\ncache     %d bytes in %d pages\n",
		info.Name, info.Device, speed(w.prompted, w.prefill), speed(w.decoded, w.decoding), share, bytes, w.pages)
	return err
}
