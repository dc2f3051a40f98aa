package story

import (
	"context"
	"errors"
	"math"
	"strings"
	"testing"

	"github.com/seed90331342/attn/cmd/internal/llama"
	_ "github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

func newWriter(t *testing.T) *Writer {
	t.Helper()
	dev := must.Get(kernels.Open("cpu"))(t)
	t.Cleanup(func() { dev.Close() })
	return must.Get(New(t.Context(), dev, llama.CheckpointFile, llama.TokenizerFile))(t)
}

// TestWrite: a greedy story is that of llama2.c, also after a beginning, and its weights sum to 1.
func TestWrite(t *testing.T) {
	const want = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."
	w := newWriter(t)
	for _, prompt := range []string{"", "Once upon a time, there"} {
		var text strings.Builder
		calls := 0
		err := w.Write(t.Context(), Request{Prompt: prompt, Steps: 40}, func(texts []string, rate float64) {
			if calls++; (rate == 0) != (calls < 3) {
				t.Errorf("call %d has rate %v", calls, rate)
			}
			text.WriteString(strings.Join(texts, ""))
		})
		if err != nil || !strings.HasPrefix(text.String(), want) || len(w.tokens) != 40 {
			t.Errorf("%q: %d tokens, %q, %v", prompt, len(w.tokens), &text, err)
		}
	}
	for _, i := range []int{0, 1, 39} {
		weights, err := w.Weights(t.Context(), i)
		if err != nil || len(weights) != llama.Layers {
			t.Fatalf("%d layers, %v", len(weights), err)
		}
		for layer, heads := range weights {
			for head, row := range heads {
				sum := 0.0
				for _, x := range row {
					sum += float64(x)
				}
				if len(heads) != llama.Heads || len(row) != i+1 || !(math.Abs(sum-1) <= 1e-6) {
					t.Errorf("token %d, layer %d, head %d of %d: %d weights with sum %v", i, layer, head, len(heads), len(row), sum)
				}
			}
		}
	}
}

func TestErrors(t *testing.T) {
	w := newWriter(t)
	none := func([]string, float64) {}
	if err := w.Write(t.Context(), Request{Prompt: "The little dog", Steps: 3}, none); err == nil || !strings.Contains(err.Error(), "it must have fewer than 3") {
		t.Error(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	err := w.Write(ctx, Request{Steps: 40}, func([]string, float64) {
		if len(w.tokens) == 5 {
			cancel()
		}
	})
	if !errors.Is(err, context.Canceled) || len(w.tokens) != 5 {
		t.Errorf("%d tokens: %v", len(w.tokens), err)
	}
	for _, i := range []int{-1, 5} {
		if _, err := w.Weights(t.Context(), i); err == nil {
			t.Errorf("token %d has weights", i)
		}
	}
	dev := must.Get(kernels.Open("cpu"))(t)
	defer dev.Close()
	if _, err := New(t.Context(), dev, llama.CheckpointFile[:100], llama.TokenizerFile); err == nil {
		t.Error("a model of 100 bytes loads")
	}
}
