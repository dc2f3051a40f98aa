package speed

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kvcache"
	"github.com/seed90331342/attn/kernels/nn"
)

// inference returns the rows of BenchmarkInference.
func inference() []row {
	const long = 32768
	rows := []row{
		{name: "decode", sq: 1, sk: long, dim: 128, want: [2]float64{88, 92}},
		{name: "decode/f16", sq: 1, sk: long, dim: 128, dtype: kernels.F16, want: [2]float64{85, 90}},
		{name: "decode/bf16", sq: 1, sk: long, dim: 128, dtype: kernels.BF16, want: [2]float64{85, 90}},
		{name: "decode", kv: 1, sq: 1, sk: long, dim: 128, want: [2]float64{50, 50}},
		{name: "decode", kv: 1, sq: 1, sk: 4 * long, dim: 128, want: [2]float64{88, 88}},
		{name: "decode/latent", heads: 128, kv: 1, sq: 1, sk: 8192, dim: 576, latent: 512, want: [2]float64{80, 80}},
		{name: "decode/latent/bf16", heads: 128, kv: 1, sq: 1, sk: 8192, dim: 576, latent: 512, dtype: kernels.BF16, want: [2]float64{80, 80}},
	}
	for _, dim := range []int{64, 128} {
		q8 := row{name: "decode/q8", sq: 1, sk: long, dim: dim, dtype: kernels.Q8, againstPlain: true, want: [2]float64{300, 300}}
		rows = append(rows, q8)
		q8.name, q8.pages, q8.want = q8.name+"/pages16", 16, [2]float64{100, 100}
		rows = append(rows, q8)
		rows = append(rows, row{name: "decode/f8", sq: 1, sk: long, dim: dim, dtype: kernels.F8, againstPlain: true, want: [2]float64{300, 300}})
	}
	for _, dtype := range []kernels.DType{kernels.Q8, kernels.F8} { // groups of four rows
		rows = append(rows, row{name: fmt.Sprintf("decode/%v", dtype), heads: 32, kv: 8, sq: 1, sk: long, dim: 128, dtype: dtype, againstPlain: true})
	}
	for _, pages := range []int{16, 64} {
		rows = append(rows, row{name: fmt.Sprintf("decode/pages%d", pages), heads: 32, kv: 4, sq: 1, sk: long, dim: 128,
			pages: pages, againstPlain: true, want: [2]float64{95, 95}})
	}
	for _, r := range []row{{dim: 64}, {dim: 128}, {kv: 1, dim: 64}} {
		r.name, r.sq, r.sk = "decode", 1, long
		for _, o := range options {
			if o.decode {
				rows = append(rows, r.with(o, 80))
			}
		}
	}
	for _, sq := range []int{4, 8, 16, 32} {
		want := [2]float64{75, 75}
		if sq == 32 {
			want = [2]float64{82, 82}
		}
		for _, sk := range []int{4096, long} {
			for _, dim := range []int{64, 128} {
				rows = append(rows, row{name: "rows", sq: sq, sk: sk, dim: dim, want: want})
			}
		}
	}
	return append(rows,
		row{name: "prefill/window256", sq: 8192, dim: 64, option: window(256), want: [2]float64{75, 75}},
		row{name: "prefill", sq: 256, dim: 64, want: [2]float64{87, 70}},
		row{name: "prefill", heads: 1, sq: 256, dim: 64},
		row{name: "prefill/causal", sq: 1024, dim: 64, option: causal, want: [2]float64{86, 80}},
		row{name: "prefill/causal", sq: 4096, dim: 64, option: causal, want: [2]float64{80, 80}},
		row{name: "prefill/causal", sq: 4096, dim: 128, option: causal},
		row{name: "prefill", sq: 1024, dim: 64, want: [2]float64{86, 85}},
		row{name: "prefill", sq: 4096, dim: 64, want: [2]float64{86, 85}},
		row{name: "prefill/f16", sq: 4096, dim: 64, dtype: kernels.F16, want: [2]float64{82, 82}},
		row{name: "prefill/bf16", sq: 4096, dim: 64, dtype: kernels.BF16, want: [2]float64{82, 82}},
		row{name: "prefill", sq: 1024, dim: 128, want: [2]float64{89, 88}},
		row{name: "prefill", sq: 4096, dim: 128, want: [2]float64{93, 88}},
		row{name: "prefill", sq: 2048, dim: 80, want: [2]float64{80, 80}},
		row{name: "prefill", sq: 2048, dim: 96, want: [2]float64{80, 80}},
		row{name: "prefill", sq: 2048, dim: 256, want: [2]float64{80, 80}},
		row{name: "prefill/bias", sq: 2048, dim: 64, option: bias(1, kernels.F32), want: [2]float64{75, 75}},
		row{name: "prefill/softcap", sq: 2048, dim: 64, option: softcap, want: [2]float64{60, 60}})
}

// BenchmarkInference measures what inference does: decoding, few rows, prefill, many small
// problems, a step through a cache, and a cancellation, on one thread and on two. The whole
// table, and the rows of one thread in the instructions of AVX2:
//
//	go test -run '^$' -bench Inference ./bench/internal/speed
//	ATTN_CPU_TIER=avx2 go test -run '^$' -bench Inference/threads1 ./bench/internal/speed
func BenchmarkInference(b *testing.B) {
	for threads := 1; threads <= min(2, runtime.GOMAXPROCS(0)); threads++ {
		b.Run(fmt.Sprintf("threads%d", threads), func(b *testing.B) {
			for _, r := range inference() {
				if threads == 1 || !r.one {
					b.Run(r.label(), func(b *testing.B) { r.bench(b, threads) })
				}
			}
			if threads == 1 {
				for _, r := range []row{{sq: 1, dim: 8}, {sq: 4, dim: 8}, {sq: 8, dim: 16}} {
					r.name, r.batch, r.heads = "small/b100000", 100_000, 1
					b.Run(r.label(), func(b *testing.B) { benchSmall(b, r) })
				}
				b.Run("step/plain", func(b *testing.B) { benchStep(b, nil) })
				b.Run("step/rotary", func(b *testing.B) { benchStep(b, &nn.RoPE{}) })
			}
			b.Run("cancel/s2048d64/weights", func(b *testing.B) { benchCancel(b, threads) })
		})
	}
}

// benchSmall measures r against a loop in plain Go over the same memory.
func benchSmall(b *testing.B, r row) {
	be := must(cpu.Open(cpu.Options{Threads: 1}))
	defer be.Close()
	own := r.job(b, be)
	c := r.call(b, be)
	q, k, v, o := must(c.Q.Float32s()), must(c.K.Float32s()), must(c.V.Float32s()), must(c.O.Float32s())
	scores := make([]float32, r.sq)
	measure(b, be, own, &job{pairs: own.pairs, run: func() error {
		n := r.sq * r.dim
		for i := range r.batch {
			plainLoop(o[i*n:], q[i*n:], k[i*n:], v[i*n:], scores, r.sq, r.dim, c.Scale)
		}
		return nil
	}}, 100)
}

// plainLoop is attention as a program would write it.
func plainLoop(o, q, k, v, s []float32, seq, dim int, scale float32) {
	for i := range seq {
		row, m := q[i*dim:(i+1)*dim], float32(math.Inf(-1))
		for j := range s {
			key, sum := k[j*dim:(j+1)*dim], float32(0)
			for c, x := range row {
				sum += x * key[c]
			}
			s[j] = scale * sum
			m = max(m, s[j])
		}
		sum := float32(0)
		for j, x := range s {
			s[j] = float32(math.Exp(float64(x - m)))
			sum += s[j]
		}
		out := o[i*dim : (i+1)*dim]
		clear(out)
		for j, w := range s {
			w /= sum
			for c, x := range v[j*dim : (j+1)*dim] {
				out[c] += w * x
			}
		}
	}
}

// benchStep measures the halves of a step of generation: 64 tokens, 8 heads of 64 elements. µs/over is the time that
// attention takes in addition to the backend's call, and allocs/step must be 0.
func benchStep(b *testing.B, rope kvcache.Rotary) {
	const heads, dim, tokens = 8, 64, 64
	dev, ctx := kernels.NewDevice(cpu.New(cpu.Options{Threads: 1})), b.Context()
	defer dev.Close()
	host := func(seq int) kernels.Tensor { return random(1, kernels.Shape{1, heads, seq, dim}) }
	k, q, out := host(1), host(1), kernels.Result{O: host(1)}
	own := []*backend.Call{{Q: q, K: host(tokens), V: host(tokens), O: out.O, Problem: backend.Problem{Scale: 0.125, Visible: backend.Everything()}}}
	cache := must(kvcache.New(ctx, dev, kvcache.Config{KVHeads: heads, Dim: dim, Capacity: 2 * tokens, RoPE: rope}))
	defer cache.Release()
	paged := must(kvcache.NewPaged(ctx, dev, kvcache.PagedConfig{KVHeads: heads, Dim: dim, Pages: 2, RoPE: rope}))
	defer paged.Release()
	pages := paged.Batch(must(paged.NewSequence()))
	for range tokens {
		check(cache.Append(ctx, k, k, nil))
		check(pages.Append(ctx, k, k, nil))
	}
	timed := func(do func() error) float64 {
		start := time.Now()
		for range 1000 {
			check(do())
		}
		return time.Since(start).Seconds() * 1e6 / 1000
	}
	kernel := func() error { return dev.Backend().Attention(ctx, own...) }
	for _, c := range []struct {
		name string
		do   func() error
	}{
		{"attention", func() error { return cache.AttentionInto(ctx, out, q, kvcache.CallOptions{}) }},
		{"pages", func() error { return pages.AttentionInto(ctx, out, q, kvcache.CallOptions{}) }},
		{"append", func() error {
			if err := cache.Append(ctx, k, k, nil); err != nil {
				return err
			}
			return cache.Rewind(0, tokens)
		}},
	} {
		b.Run(c.name, func(b *testing.B) {
			m := medians{}
			for b.Loop() {
				step := timed(c.do)
				m.add("ns/op", step*1e3)
				if c.name != "append" {
					m.add("µs/over", step-timed(kernel))
				}
			}
			m.report(b)
			b.ReportMetric(testing.AllocsPerRun(100, func() { check(c.do()) }), "allocs/step")
			if rope == nil && c.name != "append" {
				b.ReportMetric(2, "µs/wanted")
			}
		})
	}
}

// benchCancel cancels a call that returns weights at sixteen points in turn, and reports the time until it returns.
func benchCancel(b *testing.B, threads int) {
	dev := kernels.NewDevice(cpu.New(cpu.Options{Threads: threads}))
	defer dev.Close()
	x := random(1, kernels.Shape{1, 8, 2048, 64})
	attend := func(ctx context.Context) error {
		r, err := dev.Attention(ctx, x, x, x, kernels.Options{Weights: true})
		r.Release()
		return err
	}
	whole := perCall(func() error { return attend(b.Context()) })
	m := medians{}
	for b.Loop() {
		for i := range 16 {
			ctx, cancel := context.WithCancel(b.Context())
			stopped := make(chan time.Time)
			time.AfterFunc(time.Duration(whole*float64(i)/16*1e9), func() {
				cancel()
				stopped <- time.Now()
			})
			err := attend(ctx)
			end := time.Now()
			if took := end.Sub(<-stopped); errors.Is(err, context.Canceled) {
				m.add("ms/latency", took.Seconds()*1e3)
			}
		}
	}
	m.report(b)
	b.ReportMetric(slices.Max(m["ms/latency"]), "ms/most")
	b.ReportMetric(20, "ms/wanted")
	b.ReportMetric(0, "ns/op")
}
