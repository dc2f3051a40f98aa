package speed

import (
	"fmt"
	"path"
	"runtime"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
)

// namedOption is a row of BenchmarkOptions.
type namedOption struct {
	name   string
	decode bool // BenchmarkInference decodes with it
	do     option
}

var options = []namedOption{
	{"causal", false, causal},
	{"window256", false, window(256)},
	{"klen75%", false, func(c *backend.Call) { c.Visible.KLen = []int{c.Dims().SeqK * 3 / 4} }},
	{"softcap", true, softcap},
	{"mask/SqSk", true, mask(1)},
	{"mask/BHSqSk", true, mask(8)},
	{"bias/f32/SqSk", true, bias(1, kernels.F32)},
	{"bias/f32/BHSqSk", true, bias(8, kernels.F32)},
	{"bias/f16/SqSk", false, bias(1, kernels.F16)},
	{"bias/f16/BHSqSk", false, bias(8, kernels.F16)},
	{"alibi", true, alibi},
	{"alibi+mask", true, func(c *backend.Call) { alibi(c); mask(1)(c) }},
	{"relative", true, relative},
	{"relative+bias", true, func(c *backend.Call) { relative(c); bias(1, kernels.F32)(c) }},
	{"sinks", false, func(c *backend.Call) { c.Sinks = make([]float32, c.Dims().Heads) }},
	{"blocks64", false, blocks(64, 75)},
	{"dropout", true, func(c *backend.Call) { c.Dropout = backend.Dropout{P: 0.1, Seed: 1} }},
	{"dropout/row1", false, func(c *backend.Call) { c.Dropout = backend.Dropout{P: 0.1, Seed: 1, First: [4]int{0, 0, 1}} }},
}

func causal(c *backend.Call) { c.Visible.Right = 0 }

func window(keys int) option {
	return func(c *backend.Call) { c.Visible = backend.Visibility{Left: keys - 1} }
}

func softcap(c *backend.Call) { c.Softcap = 20 }

// mask hides a quarter of the keys of each row; heads is 1 or the number of query heads.
func mask(heads int) option {
	return func(c *backend.Call) {
		d := c.Dims()
		c.Mask = must(flags(75, kernels.Shape{1, heads, d.SeqQ, d.SeqK}).Broadcast(kernels.Shape{1, d.Heads, d.SeqQ, d.SeqK}))
	}
}

func bias(heads int, dtype kernels.DType) option {
	return func(c *backend.Call) {
		d := c.Dims()
		x := random(10, kernels.Shape{1, heads, d.SeqQ, d.SeqK})
		if dtype != kernels.F32 {
			from := must(x.Float32s())
			bits := make([]uint16, len(from))
			for i, f := range from {
				bits[i] = dtype.Encode(f)
			}
			x = must(kernels.Host(bits, dtype, x.Shape()))
		}
		c.Bias = must(x.Broadcast(kernels.Shape{1, d.Heads, d.SeqQ, d.SeqK}))
	}
}

func alibi(c *backend.Call) {
	for h := range c.Dims().Heads {
		c.Slopes = append(c.Slopes, 1/float32(int(2)<<h))
	}
}

func relative(c *backend.Call) {
	d := c.Dims()
	c.Relative = random(11, kernels.Shape{1, d.Heads, 1, d.SeqQ + d.SeqK - 1})
}

// blocks shows that percentage of the blocks of size rows and keys.
func blocks(size, percent int) option {
	return func(c *backend.Call) {
		d := c.Dims()
		c.BlockQ, c.BlockK = size, size
		c.Blocks = flags(percent, kernels.Shape{1, d.Heads, (d.SeqQ + size - 1) / size, d.SeqK / size})
	}
}

// with returns the row against the same without o, on one thread.
func (r row) with(o namedOption, want float64) row {
	r.name, r.option, r.againstPlain, r.one, r.want = path.Join(r.name, o.name), o.do, true, true, [2]float64{want}
	return r
}

// optionRows returns r with each option, and in 16 bits.
func optionRows(r row, want float64) (rows []row) {
	for _, o := range options {
		rows = append(rows, r.with(o, want))
	}
	for _, dtype := range []kernels.DType{kernels.F16, kernels.BF16} {
		r := r.with(namedOption{name: dtype.String()}, want)
		r.dtype = dtype
		rows = append(rows, r)
	}
	return rows
}

// BenchmarkOptions measures what each option costs a call of 2,048 rows and keys, on one
// thread and in turns with the plain call. In the instructions of AVX2:
//
//	ATTN_CPU_TIER=avx2 go test -run '^$' -bench Options ./bench/internal/speed
func BenchmarkOptions(b *testing.B) {
	for _, r := range optionRows(row{sq: 2048, dim: 64}, 60) {
		b.Run(r.label(), func(b *testing.B) { r.bench(b, 1) })
	}
	for _, g := range regions {
		b.Run(g.name+"/s2048d64", func(b *testing.B) { benchRegions(b, g.options, false) })
	}
}

// BenchmarkBlocks measures masks of blocks by their density, 8,192 rows and keys: xBase is
// how many times as fast the call is as the one without a mask.
func BenchmarkBlocks(b *testing.B) {
	for _, size := range []int{16, 32, 64, 128} {
		for _, percent := range []int{5, 10, 25, 50, 100} {
			r := row{heads: 1, sq: 8192, dim: 64}.with(namedOption{do: blocks(size, percent)}, 0)
			b.Run(fmt.Sprintf("block%d/density%d%%", size, percent), func(b *testing.B) { r.bench(b, 1) })
		}
	}
}

// regions are calls over 2,048 tokens that package kernels computes by several calls.
var regions = []struct {
	name    string
	options kernels.Options
}{
	{"prefix1024", kernels.Options{Causal: true, Prefix: []int{1024}}},
	{"documents8", kernels.Options{QSegments: segments(func(i int) int { return i / 256 })}},
	{"documents33", kernels.Options{QSegments: segments(func(i int) int { return min(i/32, 32) })}},
	{"documents33/causal", kernels.Options{Causal: true, QSegments: segments(func(i int) int { return min(i/32, 32) })}},
	{"packed8", kernels.Options{CuQ: []int{0, 256, 512, 768, 1024, 1280, 1536, 1792, 2048}}},
}

// segments returns the documents of 2,048 tokens.
func segments(of func(token int) int) [][]int32 {
	ids := make([]int32, 2048)
	for i := range ids {
		ids[i] = int32(of(i))
	}
	return [][]int32{ids}
}

// benchRegions measures a call with opt, or its gradients of q, k and v, against plain
// attention over the same operands.
func benchRegions(b *testing.B, opt kernels.Options, backward bool) {
	be, ctx := must(cpu.Open(cpu.Options{Threads: 1})), b.Context()
	defer be.Close()
	r := row{sq: 2048, dim: 64, backward: backward}
	base, c := r.job(b, be), r.call(b, be)
	opt.LSE = backward
	call := must(kernels.NewDevice(be).Prepare(c.Q, c.K, c.V, opt))
	result := must(call.Run(ctx))
	plan, run := must(call.Plan(ctx)), func() error { return call.RunInto(ctx, result) }
	if backward {
		grads := must(call.AllocGradients(ctx, call.Gradients().Operands()))
		plan, run = must(call.PlanBackward(ctx, call.Gradients().Operands())), func() error { return call.Backward(ctx, grads, kernels.Result{O: c.O}, result) }
	}
	measure(b, be, job{run: run, pairs: float64(plan.Pairs), flops: float64(plan.FLOPs), reads: []kernels.Tensor{c.K, c.V}}, &base, 60)
}

// BenchmarkBackward measures gradients of q, k and v: 2.5 times the operations of the forward call.
func BenchmarkBackward(b *testing.B) {
	for _, r := range []row{
		{sq: 1024, dim: 64, want: [2]float64{78, 78}},
		{sq: 4096, dim: 64, want: [2]float64{78, 78}},
		{sq: 8192, dim: 64, want: [2]float64{78, 78}},
		{sq: 1024, dim: 128, want: [2]float64{78, 78}},
		{sq: 4096, dim: 128, want: [2]float64{78, 78}},
		{name: "causal", sq: 4096, dim: 64, option: causal, want: [2]float64{72, 72}},
		{name: "causal", sq: 4096, dim: 128, option: causal, want: [2]float64{72, 72}},
		{heads: 1, sq: 4096, dim: 64},
		{name: "bias", sq: 2048, dim: 64, option: bias(1, kernels.F32)},
		{name: "softcap", sq: 2048, dim: 64, option: softcap},
		{name: "f16", sq: 2048, dim: 64, dtype: kernels.F16},
	} {
		r.backward = true
		for threads := range min(2, runtime.GOMAXPROCS(0)) {
			b.Run(fmt.Sprintf("%s/threads%d", r.label(), threads+1), func(b *testing.B) { r.bench(b, threads+1) })
		}
	}
}

// BenchmarkGradients is BenchmarkOptions for gradients of q, k and v, and for those of options.
func BenchmarkGradients(b *testing.B) {
	const heads, s = 8, 2048
	base := row{sq: s, dim: 64, backward: true}
	rows := optionRows(base, 60)
	for _, g := range []struct {
		name    string
		do      option
		request func(g *backend.Gradients)
	}{
		{"dbias/BHSqSk", bias(heads, kernels.F32), func(g *backend.Gradients) { g.DBias = random(12, kernels.Shape{1, heads, s, s}) }},
		{"dbias/SqSk", bias(1, kernels.F32), func(g *backend.Gradients) { g.DBias = random(12, kernels.Shape{1, 1, s, s}) }},
		{"dbias/HSk", bias(heads, kernels.F32), func(g *backend.Gradients) { g.DBias = random(12, kernels.Shape{1, heads, 1, s}) }},
		{"drelative/H", relative, func(g *backend.Gradients) { g.DRelative = random(12, kernels.Shape{1, heads, 1, 2*s - 1}) }},
		{"drelative/1", relative, func(g *backend.Gradients) { g.DRelative = random(12, kernels.Shape{1, 1, 1, 2*s - 1}) }},
		{"dslopes", alibi, func(g *backend.Gradients) { g.DSlopes = random(12, kernels.Shape{1, heads, 1, 1}) }},
		{"dsinks", func(c *backend.Call) { c.Sinks = make([]float32, heads) }, func(g *backend.Gradients) { g.DSinks = random(12, kernels.Shape{1, heads, 1, 1}) }},
		{"heads8on2", func(c *backend.Call) { shareHeads(c, 2) }, nil},
		{"heads8on1", func(c *backend.Call) { shareHeads(c, 1) }, nil},
	} {
		r := base.with(namedOption{name: g.name, do: g.do}, 60)
		r.gradients = g.request
		rows = append(rows, r)
	}
	for _, r := range rows {
		b.Run(r.label(), func(b *testing.B) { r.bench(b, 1) })
	}
	for _, g := range regions {
		b.Run(g.name+"/s2048d64", func(b *testing.B) { benchRegions(b, g.options, true) })
	}
}

// shareHeads replaces keys and values by those of n heads.
func shareHeads(c *backend.Call, n int) {
	shape := c.K.Shape()
	shape[kernels.Heads] = n
	c.K, c.V = random(2, shape), random(3, shape)
}
