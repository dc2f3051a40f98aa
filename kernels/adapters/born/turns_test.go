package born_test

import (
	"slices"
	"testing"
	"time"

	"github.com/born-ml/born/models/llama"
	"github.com/seed90331342/attn/kernels"
	attnborn "github.com/seed90331342/attn/kernels/adapters/born"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// BenchmarkTurns times a LLaMA that born loads from a GGUF file with born's own attention and with attn, in turns, and reports the
// median of each in milliseconds: a prompt of 512 tokens, and a step of decoding over a cache of 512.
//
//	go test -run '^$' -bench Turns -benchtime 20x
func BenchmarkTurns(b *testing.B) {
	dev := must.Get(kernels.Open("cpu"))(b)
	defer dev.Close()
	config := llama.Config{VocabSize: 256, HiddenSize: 256, NumLayers: 4, NumHeads: 8, NumKVHeads: 2, HeadDim: 32,
		FFNSize: 688, MaxSeqLen: 4096, RopeTheta: 10000, NormEpsilon: 1e-5}
	model := loaded(b, config)
	functions := [2]llama.AttentionFunc[Backend]{nil, attnborn.New[Backend](ctx, dev, nil)}
	turns := func(b *testing.B, step func()) {
		var times [2][]float64
		for b.Loop() {
			for i, f := range functions {
				model.SetAttentionFunc(f)
				start := time.Now()
				step()
				times[i] = append(times[i], float64(time.Since(start).Microseconds())/1000)
			}
		}
		for _, t := range times {
			slices.Sort(t)
		}
		born, attn := times[0][len(times[0])/2], times[1][len(times[1])/2]
		b.ReportMetric(0, "ns/op")
		b.ReportMetric(born, "born-ms")
		b.ReportMetric(attn, "attn-ms")
		b.ReportMetric(born/attn, "born/attn")
	}
	prompt := tokens(1, 512, 1)
	b.Run("prompt", func(b *testing.B) {
		turns(b, func() { model.Forward(prompt, nil, 0) })
	})
	b.Run("decode", func(b *testing.B) {
		cache := llama.NewModelCache(config, config.MaxSeqLen, backend)
		model.Forward(prompt, cache, 0)
		at := 512
		turns(b, func() {
			model.Forward(tokens(1, 1, at), cache, at)
			at++
		})
	})
}
