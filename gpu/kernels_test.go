package gpu

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/meter"
	"github.com/seed90331342/attn/gpu/internal/queue"
	"github.com/seed90331342/attn/gpu/internal/tune"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
	"github.com/seed90331342/attn/shaders"
)

// timer measures kernels by the device's clock.
type timer struct {
	*testing.B
	be   *Backend
	peak float64 // operations a second
}

// wake computes until the clock rate of a GPU, which falls while the host compiles, has risen.
func (x *timer) wake() {
	for end := time.Now().Add(400 * time.Millisecond); time.Now().Before(end); {
		var err error
		x.peak, err = meter.Peak(x.Context(), x.be.dev)
		check(x, err)
	}
}

// measure reports the best time of the kernels of op, in at least 10 ms at a time, with the rate of
// operations or bytes.
func (x *timer) measure(name string, operations, bytes float64, op *queue.Op) {
	x.Run(name, func(b *testing.B) {
		run := func(rounds int) float64 {
			took := must.Get(meter.Time(b.Context(), x.be.dev, func(r *queue.Runner) error {
				for range rounds {
					if err := r.Queue(op); err != nil {
						return err
					}
				}
				return nil
			}))(b)
			return took.Seconds() / float64(rounds)
		}
		began := time.Now()
		best := run(1)
		compile := time.Since(began).Seconds() - best
		x.wake()
		rounds := int(min(max(0.01/run(1), 1), 64))
		for b.Loop() {
			best = min(best, run(rounds))
		}
		b.ReportMetric(best*1e6, "us-kernel")
		b.ReportMetric(compile, "s-compile")
		if operations > 0 {
			b.ReportMetric(operations/best/1e12, "TFLOP/s")
			b.ReportMetric(100*operations/best/x.peak, "%peak")
		}
		if bytes > 0 {
			b.ReportMetric(bytes/best/1e9, "GB/s")
		}
	})
}

// BenchmarkMatrices measures decoding, prefill and a layer on matrix units, by rule and with other workgroups. Decoding shows the bytes a second of what it
// reads and writes, next to the kernel of float32 products; others show the share of what a loop of products of matrices reaches.
func BenchmarkMatrices(b *testing.B) {
	be := openMatrices(b, Options{Tune: TuneOff})
	x := &timer{B: b, be: be}
	peak := must.Get(be.MatrixFLOPS(b.Context()))(b)
	b.Logf("products of matrices: %.4g TFLOP/s", peak/1e12)
	sizes, all, keys := []int{4096, 16384}, []int{8, 4, 2}, 65536
	if be.info.Type == backend.CPU {
		sizes, all, keys = []int{128}, nil, 1024
	}
	x.peak = peak
	for _, dtype := range []backend.DType{backend.F16, backend.BF16, backend.F8} {
		for _, seq := range []int{4, 1} {
			of := dtype
			if dtype == backend.F8 {
				of = backend.BF16
			}
			q := x.heads(of, 32, seq, 128)
			c := &backend.Call{Q: q, K: x.heads(dtype, 8, keys, 128), V: x.heads(dtype, 8, keys, 128), O: q, Problem: backend.Problem{Scale: 0.125, Visible: backend.Everything()}}
			decode := func(name string, low bool, change func(k *shaders.Matrix)) {
				c.LowPrecision = low
				d := must.Get(be.newDecode(c))(b)
				if k, ok := d.kernel.(shaders.Matrix); ok {
					change(&k)
					d.kernel, d.tiling.Split, d.cutter.Granule = k, k.Split, k.Split
					d.merge = shaders.SplitMerge{Split: k.Split, TX: 1, Quads: k.Columns / 4}
					name = fmt.Sprintf("KEYS=%d/SPLIT=%d/ahead=%t", k.Keys, k.Split, k.Ahead)
				}
				x.measure(fmt.Sprintf("decode/%v/H=32,8/rows=%d/S=%d/D=128/%s", dtype, 4*seq, keys, name), 0, float64(backend.NewPlan(c).Bytes), d.op())
			}
			decode("", true, func(*shaders.Matrix) {})
			if decode("float32 products", false, nil); dtype == backend.F16 && all != nil {
				decode("", true, func(k *shaders.Matrix) { k.Keys, k.Ahead = 32, true })
				decode("", true, func(k *shaders.Matrix) { k.Keys, k.Ahead = 32, false })
				decode("", true, func(k *shaders.Matrix) { k.Split = 512 })
				decode("", true, func(k *shaders.Matrix) { k.Split = 1024 })
			}
		}
	}
	prefill := func(dtype backend.DType, dim, seq, right int, name string, change func(k *shaders.Matrix)) {
		t := func() backend.Tensor { return x.heads(dtype, 16, seq, dim) }
		c := &backend.Call{Q: t(), K: t(), V: t(), O: t(), Problem: backend.Problem{LowPrecision: true, Scale: 0.125, Visible: backend.Everything()}}
		c.Visible.Right = right
		var made shaders.Matrix
		op, whyNot, err := must.Get(x.be.newAttention(c))(b).matrixPrefill(func(s tune.Shape, dim int) (shaders.Matrix, string) {
			k, whyNot := x.be.matrices.Kernel(s, dim)
			change(&k)
			if d := shaders.Describe(k); d.WorkgroupMemory > s.Limits.Memory || d.Threads > s.Limits.Threads {
				whyNot = "too large"
			}
			made = k
			return k, whyNot
		})
		if check(b, err); whyNot != "" {
			return
		}
		if x.peak = peak; c.Split() { // three products for one
			x.peak /= 3
		}
		x.measure(fmt.Sprintf("%s/%v/D=%d/S=%d/TY=%d/KEYS=%d", name, dtype, dim, seq, made.TY, made.Keys), float64(backend.NewPlan(c).FLOPs), 0, op.op())
	}
	square := func() backend.Tensor { return x.heads(backend.F16, 1, sizes[0], sizes[0]) }
	layer := product{y: square(), a: square(), w: square(), names: [3]string{"y", "x", "w"}}
	x.measure(fmt.Sprintf("project/%v/N=%d", backend.F16, sizes[0]), 2*math.Pow(float64(sizes[0]), 3), 0, be.product(layer))
	for _, dtype := range []backend.DType{backend.F16, backend.BF16, backend.F32} {
		for _, dim := range []int{64, 128} {
			for _, seq := range sizes {
				prefill(dtype, dim, seq, backend.Unbounded, "plain", func(*shaders.Matrix) {})
				prefill(dtype, dim, seq, 0, "causal", func(*shaders.Matrix) {})
			}
			for _, ty := range all {
				for _, keys := range []int{32, 16} {
					prefill(dtype, dim, sizes[0], backend.Unbounded, "other", func(k *shaders.Matrix) { k.TY, k.Keys = ty, keys })
				}
			}
		}
	}
	for _, dim := range []int{64, 128} {
		x.peak = peak
		x.gradients(backend.F16, sizes[0], dim, true)
		x.gradients(backend.BF16, sizes[0], dim, true)
	}
	// Not in the kernel: rows of scores and weights next to each other, so that an SM of 48 KiB holds three workgroups with D=128 and TY=4.
	dense := strings.NewReplacer("const SS: u32 = 6u;", "const SS: u32 = 4u;", "const PS: u32 = 6u;", "const PS: u32 = 4u;")
	edit := func(wgsl string) string {
		edited := dense.Replace(wgsl)
		if edited == wgsl {
			b.Error("the kernel has no such constants")
		}
		return edited
	}
	x.be = must.Get(newBackend(&mutated{Device: be.dev.Port, kernel: "matrix ", edit: edit}, be.info, Options{Tune: TuneOff}))(b)
	for _, dim := range []int{64, 128} {
		for _, ty := range []int{8, 4} {
			prefill(backend.F16, dim, sizes[0], backend.Unbounded, "dense", func(k *shaders.Matrix) { k.TY, k.Keys = ty, 16 })
		}
	}
}

// heads returns a tensor of [1, heads, rows, dim].
func (x *timer) heads(dtype backend.DType, heads, rows, dim int) backend.Tensor {
	return tensor(x, x.be, dtype, backend.Shape{1, heads, rows, dim}, func(i int) float32 { return float32(i*7919%8191)/4096 - 1 })
}

// BenchmarkKernels measures the kernels of prefill in all their variants, of decoding and of gradients by the
// device's clock, each after it has compiled and the clock rate has risen. A software driver gets small calls.
func BenchmarkKernels(b *testing.B) {
	be := open(b, Options{Tune: TuneOff})
	x := &timer{B: b, be: be}
	seq, keys := 4096, 65536
	if be.info.Type == backend.CPU {
		seq, keys = 128, 1024
	}
	prefill := func(name string, dim int, dtype backend.DType, all bool, change func(p *backend.Problem)) {
		t := func() backend.Tensor { return x.heads(dtype, 16, seq, dim) }
		c := &backend.Call{Q: t(), K: t(), V: t(), O: t(), Problem: backend.Problem{Scale: 0.125, Visible: backend.Everything()}}
		if change != nil {
			change(&c.Problem)
		}
		a := must.Get(be.newPrefill(c, be.choose))(b)
		for i, v := range a.shape().Candidates() {
			if i > 0 && !all {
				break
			}
			op := must.Get(be.newPrefill(c, func(tune.Shape) (tune.Variant, string) { return v, "" }))(b)
			x.measure(fmt.Sprintf("prefill/%s/D=%d/%v/%s", name, dim, dtype, v.Label()), float64(backend.NewPlan(c).FLOPs), 0, op.op())
		}
	}
	prefill("plain", 64, backend.F32, true, nil)
	prefill("plain", 128, backend.F32, true, nil)
	for _, dim := range []int{80, 96, 256} {
		prefill("plain", dim, backend.F32, false, nil)
	}
	for _, dim := range []int{64, 128} {
		prefill("plain", dim, backend.BF16, false, nil)
		prefill("causal", dim, backend.F32, false, func(p *backend.Problem) { p.Visible.Right = 0 })
	}
	prefill("softcap", 64, backend.F32, false, func(p *backend.Problem) { p.Softcap = 30 })
	prefill("bias", 64, backend.F32, false, func(p *backend.Problem) { p.Bias = x.heads(backend.F32, 1, seq, seq) })
	for _, d := range []struct {
		heads, kvHeads, keys, dim int
		types                     []backend.DType
	}{
		{32, 8, keys, 128, []backend.DType{backend.F32, backend.BF16, backend.Q8, backend.Q4}}, {128, 32, keys / 4, 128, []backend.DType{backend.BF16}},
		{32, 32, keys / 4, 128, []backend.DType{backend.F32}}, {32, 8, keys, 64, []backend.DType{backend.F32, backend.BF16}},
	} {
		for _, kv := range d.types {
			q := x.heads(backend.F32, d.heads, 1, d.dim)
			c := &backend.Call{Q: q, K: x.heads(kv, d.kvHeads, d.keys, d.dim), V: x.heads(kv, d.kvHeads, d.keys, d.dim), O: q, Problem: backend.Problem{Scale: 0.125, Visible: backend.Everything()}}
			op := must.Get(be.newDecode(c))(b)
			x.measure(fmt.Sprintf("decode/H=%d,%d/S=%d/D=%d/%v", d.heads, d.kvHeads, d.keys, d.dim, kv), 0, float64(backend.NewPlan(c).Bytes), op.op())
		}
	}
	for _, dim := range []int{64, 128} {
		x.gradients(backend.F32, seq, dim, false)
	}
}

// gradients measures the kernels of gradients of 16 heads.
func (x *timer) gradients(dtype backend.DType, seq, dim int, low bool) {
	t := func() backend.Tensor { return x.heads(dtype, 16, seq, dim) }
	g := &backend.Gradients{Call: backend.Call{Q: t(), K: t(), V: t(), O: t(), LSE: x.heads(backend.F32, 16, seq, 1), Problem: backend.Problem{LowPrecision: low, Scale: 0.125, Visible: backend.Everything()}}, DO: t(), DQ: t(), DK: t(), DV: t()}
	all := must.Get(x.be.newGradients(g, func(dtype backend.DType, s backend.Shape) (backend.Tensor, error) {
		return x.be.alloc(x.Context(), dtype, s)
	}))(x)
	product := 2 * 16 * float64(seq) * float64(seq) * float64(dim)
	for i, name := range []string{"delta", "dkv", "dq"} {
		x.measure(fmt.Sprintf("gradients/%v/D=%d/%s", dtype, dim, name), []float64{0, 4, 3}[i]*product, 0, all.ops[i])
	}
}
