package bench

import (
	"time"

	"github.com/seed90331342/attn/kernels"
)

// Preset is a named set of series.
type Preset struct {
	// Name is a word, About describes the set in a line.
	Name, About string
	// Series are measured within Budget.
	Series []Series
	Budget time.Duration
	// Backends are the names of the backends to measure; none means all.
	Backends []string
	// Threads is the number of threads on the CPU; 0 is the backend's default.
	Threads int
}

// Presets returns all presets.
func Presets() []Preset {
	const k, M = 1 << 10, 1 << 20
	// last lets a row see its own position and those before it, n in all.
	last := func(n int) *kernels.Window { return &kernels.Window{Left: n - 1} }
	return []Preset{
		{Name: "quick", About: "plain, causal and decoding at a few lengths, half a minute", Budget: 40 * time.Second, Series: []Series{
			{Name: "plain", Seqs: []int{256, 1 * k, 4 * k}},
			{Name: "causal", Seqs: []int{1 * k, 4 * k}, Causal: true},
			{Name: "decode", Seqs: []int{4 * k, 32 * k}, SeqQ: 1},
		}},
		{Name: "long", About: "one head, full attention from 4k and a window of 4096 from 64k, both up to 1M; what would take too long is predicted", Budget: 10 * time.Minute, Series: []Series{
			{Name: "full", Seqs: doubling(4*k, 1*M), Heads: 1},
			{Name: "window of 4096", Seqs: doubling(64*k, 1*M), Heads: 1, Causal: true, Window: last(4096)},
		}},
		{Name: "decode", About: "one query on 1k to 128k cached keys, 32 heads on 8, f32, bf16, q8 and q4", Budget: 5 * time.Minute, Series: []Series{
			{Name: "decode f32", Seqs: doubling(1*k, 128*k), SeqQ: 1, Heads: 32, KVHeads: 8, Dim: 128},
			{Name: "decode bf16", Seqs: doubling(1*k, 128*k), SeqQ: 1, Heads: 32, KVHeads: 8, Dim: 128, DType: kernels.BF16},
			{Name: "decode q8", Seqs: doubling(1*k, 128*k), SeqQ: 1, Heads: 32, KVHeads: 8, Dim: 128, Cache: kernels.Q8},
			{Name: "decode q4", Seqs: doubling(1*k, 128*k), SeqQ: 1, Heads: 32, KVHeads: 8, Dim: 128, Cache: kernels.Q4},
		}},
		{Name: "shapes", About: "the head shapes of well-known models at 1k and 4k", Budget: 5 * time.Minute, Series: []Series{
			model("BERT large", 16, 16, 64, false),
			model("GPT-2", 12, 12, 64, true),
			model("Whisper large, encoder", 20, 20, 64, false),
			model("Phi-2", 32, 32, 80, true),
			model("Phi-3 mini", 32, 32, 96, true),
			model("Llama 2 7B", 32, 32, 128, true),
			model("Llama 3 8B", 32, 8, 128, true),
			model("Qwen 2.5 7B", 28, 4, 128, true),
			model("Falcon 7B", 71, 1, 64, true),
			model("Gemma 7B", 16, 16, 256, true),
		}},
		{Name: "gpu", About: "the rows of docs/gpu.md", Budget: 20 * time.Minute, Backends: []string{"gpu"}, Series: []Series{
			{Name: "f32, D=64", Seqs: []int{8 * k}, Heads: 16},
			{Name: "f32, D=128", Seqs: []int{8 * k}, Heads: 16, Dim: 128},
			{Name: "f32, D=64, causal", Seqs: []int{8 * k}, Heads: 16, Causal: true},
			{Name: "f32, D=128, causal", Seqs: []int{8 * k}, Heads: 16, Dim: 128, Causal: true},
			{Name: "f32, D=80", Seqs: []int{8 * k}, Heads: 16, Dim: 80},
			{Name: "f32, D=96", Seqs: []int{8 * k}, Heads: 16, Dim: 96},
			{Name: "f32, D=256", Seqs: []int{8 * k}, Heads: 16, Dim: 256},
			{Name: "bf16, D=64", Seqs: []int{8 * k}, Heads: 16, DType: kernels.BF16},
			{Name: "bf16, D=128", Seqs: []int{8 * k}, Heads: 16, Dim: 128, DType: kernels.BF16},
			{Name: "f16, D=64, low precision", Seqs: []int{4 * k, 16 * k}, Heads: 16, DType: kernels.F16, LowPrecision: true},
			{Name: "f16, D=128, low precision", Seqs: []int{4 * k, 16 * k}, Heads: 16, Dim: 128, DType: kernels.F16, LowPrecision: true},
			{Name: "f16, D=128, causal, low precision", Seqs: []int{4 * k, 16 * k}, Heads: 16, Dim: 128, Causal: true, DType: kernels.F16, LowPrecision: true},
			{Name: "bf16, D=128, low precision", Seqs: []int{4 * k, 16 * k}, Heads: 16, Dim: 128, DType: kernels.BF16, LowPrecision: true},
			{Name: "f32, D=64, low precision", Seqs: []int{4 * k, 16 * k}, Heads: 16, LowPrecision: true},
			{Name: "f32, D=128, low precision", Seqs: []int{4 * k, 16 * k}, Heads: 16, Dim: 128, LowPrecision: true},
			{Name: "decode bf16, H=32, 8 kv heads, D=128", Seqs: []int{64 * k}, SeqQ: 1, Heads: 32, KVHeads: 8, Dim: 128, DType: kernels.BF16},
			{Name: "one head, D=64", Seqs: []int{1 * M}, Heads: 1},
			{Name: "16,384 queries, D=64", Seqs: []int{256 * k}, SeqQ: 16 * k, Heads: 1},
		}},
		// A single thread gets a processor to itself at times, however busy the machine is,
		// and calls of a fifth of a millisecond complete within a time slice. The keys of
		// the decoding case fit the cache of a core, which other processes do not disturb.
		{Name: "ci", About: "short cases on one thread of the CPU, for attn compare", Budget: time.Minute, Backends: []string{"cpu"}, Threads: 1, Series: []Series{
			{Name: "plain", Seqs: []int{64, 128}, Heads: 4},
			{Name: "causal bf16", Seqs: []int{256}, Heads: 1, Causal: true, DType: kernels.BF16},
			{Name: "decode", Seqs: []int{512}, Heads: 4, KVHeads: 1, SeqQ: 1},
		}},
	}
}

// model returns the head shape of a model from its published configuration.
func model(name string, heads, kvHeads, dim int, causal bool) Series {
	return Series{Name: name, Seqs: []int{1 << 10, 4 << 10}, Heads: heads, KVHeads: kvHeads, Dim: dim, Causal: causal}
}
