package bench

import (
	"time"

	"github.com/seed90331342/attn/bench/report"
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
	return []Preset{
		{Name: "quick", About: "plain, causal and decoding at a few lengths, half a minute", Budget: 40 * time.Second, Series: []Series{
			{Name: "plain", Seqs: []int{256, 1 * k, 4 * k}},
			{"causal", []int{1 * k, 4 * k}, report.Case{Causal: true}},
			{"decode", []int{4 * k, 32 * k}, report.Case{SeqQ: 1}},
		}},
		{Name: "long", About: "one head, full attention from 4k and a window of 4096 from 64k, both up to 1M; what would take too long is predicted", Budget: 10 * time.Minute, Series: []Series{
			{"full", doubling(4*k, 1*M), report.Case{Heads: 1}},
			{"window of 4096", doubling(64*k, 1*M), report.Case{Heads: 1, Causal: true, WindowLeft: new(4095), WindowRight: new(0)}},
		}},
		{Name: "decode", About: "one query on 1k to 128k cached keys, 32 heads on 8, f32, bf16, q8, q4 and f8", Budget: 5 * time.Minute, Series: []Series{
			{"decode f32", doubling(1*k, 128*k), report.Case{SeqQ: 1, Heads: 32, KVHeads: 8, Dim: 128}},
			{"decode bf16", doubling(1*k, 128*k), report.Case{SeqQ: 1, Heads: 32, KVHeads: 8, Dim: 128, DType: "bf16"}},
			{"decode q8", doubling(1*k, 128*k), report.Case{SeqQ: 1, Heads: 32, KVHeads: 8, Dim: 128, Cache: "q8"}},
			{"decode q4", doubling(1*k, 128*k), report.Case{SeqQ: 1, Heads: 32, KVHeads: 8, Dim: 128, Cache: "q4"}},
			{"decode f8", doubling(1*k, 128*k), report.Case{SeqQ: 1, Heads: 32, KVHeads: 8, Dim: 128, Cache: "f8"}},
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
			{"f32, D=64", []int{8 * k}, report.Case{Heads: 16}},
			{"f32, D=128", []int{8 * k}, report.Case{Heads: 16, Dim: 128}},
			{"f32, D=64, causal", []int{8 * k}, report.Case{Heads: 16, Causal: true}},
			{"f32, D=128, causal", []int{8 * k}, report.Case{Heads: 16, Dim: 128, Causal: true}},
			{"f32, D=80", []int{8 * k}, report.Case{Heads: 16, Dim: 80}},
			{"f32, D=96", []int{8 * k}, report.Case{Heads: 16, Dim: 96}},
			{"f32, D=256", []int{8 * k}, report.Case{Heads: 16, Dim: 256}},
			{"bf16, D=64", []int{8 * k}, report.Case{Heads: 16, DType: "bf16"}},
			{"bf16, D=128", []int{8 * k}, report.Case{Heads: 16, Dim: 128, DType: "bf16"}},
			{"f16, D=64, low precision", []int{4 * k, 16 * k}, report.Case{Heads: 16, DType: "f16", LowPrecision: true}},
			{"f16, D=128, low precision", []int{4 * k, 16 * k}, report.Case{Heads: 16, Dim: 128, DType: "f16", LowPrecision: true}},
			{"f16, D=128, causal, low precision", []int{4 * k, 16 * k}, report.Case{Heads: 16, Dim: 128, Causal: true, DType: "f16", LowPrecision: true}},
			{"bf16, D=128, low precision", []int{4 * k, 16 * k}, report.Case{Heads: 16, Dim: 128, DType: "bf16", LowPrecision: true}},
			{"f32, D=64, low precision", []int{4 * k, 16 * k}, report.Case{Heads: 16, LowPrecision: true}},
			{"f32, D=128, low precision", []int{4 * k, 16 * k}, report.Case{Heads: 16, Dim: 128, LowPrecision: true}},
			{"decode bf16, H=32, 8 kv heads, D=128", []int{64 * k}, report.Case{SeqQ: 1, Heads: 32, KVHeads: 8, Dim: 128, DType: "bf16"}},
			{"decode bf16, H=32, 8 kv heads, D=128, low precision", []int{64 * k}, report.Case{SeqQ: 1, Heads: 32, KVHeads: 8, Dim: 128, DType: "bf16", LowPrecision: true}},
			{"one head, D=64, f16, low precision", []int{1 * M}, report.Case{Heads: 1, DType: "f16", LowPrecision: true}},
			{"one head, D=64", []int{1 * M}, report.Case{Heads: 1}},
			{"16,384 queries, D=64", []int{256 * k}, report.Case{SeqQ: 16 * k, Heads: 1}},
		}},
		// A single thread gets a processor to itself at times, however busy the machine is,
		// and calls of a fifth of a millisecond complete within a time slice. The keys of
		// the decoding case fit the cache of a core, which other processes do not disturb.
		{Name: "ci", About: "short cases on one thread of the CPU, for attn compare", Budget: time.Minute, Backends: []string{"cpu"}, Threads: 1, Series: []Series{
			{"plain", []int{64, 128}, report.Case{Heads: 4}},
			{"causal bf16", []int{256}, report.Case{Heads: 1, Causal: true, DType: "bf16"}},
			{"decode", []int{512}, report.Case{Heads: 4, KVHeads: 1, SeqQ: 1}},
		}},
	}
}

// model returns the head shape of a model from its published configuration.
func model(name string, heads, kvHeads, dim int, causal bool) Series {
	return Series{name, []int{1 << 10, 4 << 10}, report.Case{Heads: heads, KVHeads: kvHeads, Dim: dim, Causal: causal}}
}
