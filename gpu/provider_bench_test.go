package gpu

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/cut"
	"github.com/seed90331342/attn/gpu/internal/queue"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/shaders"
)

// BenchmarkProvider times the same work through whichever WebGPU library the build
// has, for one to be compared with the other:
//
//	go test -run '^$' -bench Provider ./gpu
//	CGO_ENABLED=0 go test -run '^$' -bench Provider ./gpu
func BenchmarkProvider(b *testing.B) {
	be := open(b, Options{})
	defer be.Close()
	seq, heads := 4096, 16
	if be.info.Type == backend.CPU { // half a second on a software driver, not minutes
		seq, heads = 512, 4
	}
	const dim, keys = 64, 32768

	b.Run("launch", func(b *testing.B) {
		for b.Loop() {
			if _, err := be.LaunchTime(b.Context()); err != nil {
				b.Fatal(err)
			}
		}
		b.ReportMetric(float64(b.Elapsed())/float64(b.N*launches), "ns/launch")
	})
	for _, c := range []struct {
		name  string
		dtype backend.DType
		seqQ  int
		seqK  int
	}{
		{"attention/f32", backend.F32, seq, seq},
		{"attention/bf16", backend.BF16, seq, seq},
		{"decode/f32", backend.F32, 1, keys},
	} {
		b.Run(c.name, func(b *testing.B) {
			q := drawn(b, be, c.dtype, backend.Shape{1, heads, c.seqQ, dim})
			k := drawn(b, be, c.dtype, backend.Shape{1, heads, c.seqK, dim})
			v := drawn(b, be, c.dtype, backend.Shape{1, heads, c.seqK, dim})
			o := drawn(b, be, c.dtype, backend.Shape{1, heads, c.seqQ, dim})
			call := prepare(b, be, q, k, v, kernels.Options{})
			repeat(b, 4*float64(heads*c.seqQ*c.seqK*dim), func(ctx context.Context) error {
				return call.RunInto(ctx, kernels.Result{O: o})
			})
		})
	}
	b.Run("stages", func(b *testing.B) {
		x := drawn(b, be, backend.F32, backend.Shape{1, heads, seq, dim})
		o := drawn(b, be, backend.F32, backend.Shape{1, heads, seq, dim})
		s := drawn(b, be, backend.F32, backend.Shape{1, heads, seq, seq})
		flops := 2 * float64(heads*seq*seq*dim)
		b.Run("QK", func(b *testing.B) {
			repeat(b, flops, func(ctx context.Context) error { return be.QK(ctx, s, x, x) })
		})
		b.Run("softmax", func(b *testing.B) {
			p := &backend.Problem{Scale: 1, Visible: backend.Everything()}
			repeat(b, 0, func(ctx context.Context) error { return be.Softmax(ctx, s, backend.Tensor{}, p) })
		})
		b.Run("PV", func(b *testing.B) {
			repeat(b, flops, func(ctx context.Context) error { return be.PV(ctx, o, s, x) })
		})
	})
	for _, c := range []struct {
		name    string
		measure func(context.Context) (float64, error)
		unit    string
	}{
		{"fma", be.PeakFLOPS, "GFLOP/s"}, {"copy", be.copyRate, "GB/s"}, {"workgroup memory", be.workgroupRate, "GB/s"},
		{"upload", be.uploadRate, "GB/s"}, {"download", be.downloadRate, "GB/s"},
	} {
		b.Run(c.name, func(b *testing.B) {
			var rates []float64
			for b.Loop() {
				rate, err := c.measure(b.Context())
				if err != nil {
					b.Fatal(err)
				}
				rates = append(rates, rate/1e9)
			}
			b.ReportMetric(median(rates), c.unit)
		})
	}
}

// drawn returns a tensor of numbers between 0 and 1 that lives as long as b.
func drawn(b *testing.B, be *Backend, dtype backend.DType, shape backend.Shape) backend.Tensor {
	b.Helper()
	data := make([]float32, shape.Elements())
	for i := range data {
		data[i] = float32(i*7919%1024) / 1024
	}
	t, err := kernels.NewDevice(be).FromFloat32(b.Context(), dtype, data, shape)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(t.Release)
	return t
}

// repeat times call, once warm, and reports medians: the call by the clock on the
// wall and, where there is one, by the device's; and operations a second.
func repeat(b *testing.B, flops float64, call func(ctx context.Context) error) {
	b.Helper()
	var walls, kernels []float64
	for n := -1; n < 0 || b.Loop(); n++ {
		begin := time.Now()
		if err := call(b.Context()); err != nil {
			b.Fatal(err)
		}
		if n >= 0 {
			walls = append(walls, time.Since(begin).Seconds())
		}
	}
	var kernel time.Duration
	ctx := backend.WithTrace(b.Context(), &backend.Trace{Kernel: func(took time.Duration) { kernel += took }})
	for range min(len(walls), 5) {
		kernel = 0
		if err := call(ctx); err != nil {
			b.Fatal(err)
		}
		kernels = append(kernels, kernel.Seconds())
	}
	b.ReportMetric(median(walls)*1e3, "ms/median")
	if k := median(kernels); k > 0 {
		b.ReportMetric(k*1e3, "kernel-ms")
	}
	if flops > 0 {
		b.ReportMetric(flops/median(walls)/1e9, "GFLOP/s")
	}
}

func median(xs []float64) float64 {
	slices.Sort(xs)
	return xs[len(xs)/2]
}

// indexForms are ways to write the same product of a 32 x 32 tile from workgroup
// memory, which differ in what a compiler that keeps indices within arrays must
// add: go-webgpu's clamps every dynamic index of an array in workgroup or private
// memory, gogpu's none.
var indexForms = []struct {
	name string
	// a and w index the two tiles at row and column; s is result r.
	a, w, s func(row, col string) string
	// expanded writes a round out with literal numbers instead of loops.
	expanded bool
}{
	{"dynamic", flat("as_"), flat("ws"), func(r, _ string) string { return "s[" + r + "]" }, false},
	{"clamped", clamped("as_"), clamped("ws"), func(r, _ string) string { return "s[min(" + r + ", 3u)]" }, false},
	{"constant", flat("as_"), flat("ws"), func(r, _ string) string { return "s" + strings.TrimSuffix(r, "u") }, true},
	{"constant, nested", nested("as_"), nested("ws"), func(r, _ string) string { return "s" + strings.TrimSuffix(r, "u") }, true},
}

func flat(tile string) func(row, col string) string {
	return func(row, col string) string { return fmt.Sprintf("%s[(%s) * 9u + %s]", tile, row, col) }
}

func clamped(tile string) func(row, col string) string {
	return func(row, col string) string { return fmt.Sprintf("%s[min((%s) * 9u + %s, 287u)]", tile, row, col) }
}

func nested(tile string) func(row, col string) string {
	return func(row, col string) string { return fmt.Sprintf("%s[%s][%s]", tile, row, col) }
}

// tileProduct returns the kernel of a form: 4 x 4 results a thread of 8 x 8, over
// and over the same tiles, 1,024 operations a round.
func tileProduct(form int) shaders.Kernel {
	f := indexForms[form]
	kind := "array<vec4<f32>, 288>"
	if strings.HasSuffix(f.name, "nested") {
		kind = "array<array<vec4<f32>, 9>, 32>"
	}
	var body, head, tail strings.Builder
	row := func(x, r string) {
		fmt.Fprintf(&body, "let v%s = %s;\n", strings.TrimSuffix(r, "u"), f.a("4u * ty + "+r, x))
		s := f.s(r, "")
		fmt.Fprintf(&body, "%s = fma(vec4<f32>(v%[2]s.w), b3, fma(vec4<f32>(v%[2]s.z), b2, fma(vec4<f32>(v%[2]s.y), b1, fma(vec4<f32>(v%[2]s.x), b0, %[1]s))));\n",
			s, strings.TrimSuffix(r, "u"))
	}
	columns := func(x string) {
		for i := range 4 {
			fmt.Fprintf(&body, "let b%d = %s;\n", i, f.w(fmt.Sprintf("4u * %s + %du", x, i), "tx"))
		}
	}
	if f.expanded {
		for r := range 4 {
			fmt.Fprintf(&head, "var s%d = vec4<f32>(0.0);\n", r)
			fmt.Fprintf(&tail, "out[4u * id.x + %du] = s%d;\n", r, r)
		}
		for x := range 8 {
			body.WriteString("{\n")
			columns(fmt.Sprintf("%du", x))
			for r := range 4 {
				row(fmt.Sprintf("%du", x), fmt.Sprintf("%du", r))
			}
			body.WriteString("}\n")
		}
	} else {
		head.WriteString("var s: array<vec4<f32>, 4>;\nfor (var r = 0u; r < 4u; r++) { s[r] = vec4<f32>(0.0); }\n")
		tail.WriteString("for (var r = 0u; r < 4u; r++) { out[4u * id.x + r] = s[r]; }\n")
		body.WriteString("for (var x = 0u; x < 8u; x++) {\n")
		columns("x")
		body.WriteString("for (var r = 0u; r < 4u; r++) {\n")
		row("x", "r")
		body.WriteString("}\n}\n")
	}
	return shaders.Kernel{Name: "tile product, " + f.name, Bindings: "wu", WorkgroupMemory: 9216, Threads: 64, Source: `
struct Params { rounds: u32 }
@group(0) @binding(0) var<storage, read_write> out: array<vec4<f32>>;
@group(0) @binding(1) var<uniform> p: Params;
var<workgroup> as_: ` + kind + `;
var<workgroup> ws: ` + kind + `;
@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3<u32>, @builtin(local_invocation_index) t: u32) {
let tx = t % 8u;
let ty = t / 8u;
for (var i = 0u; i < 4u; i++) {
` + f.a("8u * i + ty", "tx") + ` = vec4<f32>(f32(t + i) * 0.001);
` + f.w("8u * i + ty", "tx") + ` = vec4<f32>(f32(t * i % 7u) * 0.001);
}
workgroupBarrier();
` + head.String() + `for (var n = 0u; n < p.rounds; n++) {
` + body.String() + `}
` + tail.String() + `}
`}
}

// tileSteps returns the step that runs a form for so many rounds.
func tileSteps(form int, out cut.Window, groups int) func(rounds int) []probe {
	k := tileProduct(form)
	return func(rounds int) []probe {
		return []probe{{k, []cut.Window{out}, &shaders.BanksParams{Rounds: rounds}, groups}}
	}
}

const (
	tileOps   = 1024 // operations of a thread in a round
	tileBytes = 64 * 4 * 16
	// tileGrid is enough to fill a large GPU.
	tileGrid = 2048
)

// BenchmarkIndexClamps times the forms, for what the clamps cost and which way of
// writing avoids them: docs/gpu.md has what was found.
func BenchmarkIndexClamps(b *testing.B) {
	be := open(b, Options{})
	defer be.Close()
	groups, bytes := be.grid(tileGrid, tileBytes)
	buf, err := be.dev.Pool.Get(bytes, queue.StorageUsage)
	if err != nil {
		b.Fatal(err)
	}
	defer be.dev.Pool.Put(buf, queue.StorageUsage)
	for form, f := range indexForms {
		b.Run(f.name, func(b *testing.B) {
			var rates []float64
			for b.Loop() {
				rounds, took, err := be.fastest(b.Context(), cut.MaxLoops/64, tileSteps(form, cut.Window{Buf: buf, Size: bytes}, groups))
				if err != nil {
					b.Fatal(err)
				}
				rates = append(rates, float64(groups)*64*tileOps*float64(rounds)/took.Seconds()/1e9)
			}
			b.ReportMetric(median(rates), "GFLOP/s")
		})
	}
}

// The forms of BenchmarkIndexClamps compute the same, to the bit.
func TestIndexFormsAgree(t *testing.T) {
	be := open(t, Options{})
	defer be.Close()
	var first []float32
	for form, f := range indexForms {
		out := ones(t, be, tileBytes/4)
		runSteps(t, be, tileSteps(form, cut.Window{Buf: cut.StoreOf(out).Parts[0], Size: tileBytes}, 1)(3)...)
		got := downloaded(t, be, out)
		if form == 0 {
			first = got
			if slices.Max(got) == 0 {
				t.Error("nothing was computed")
			}
		}
		if !slices.Equal(got, first) {
			t.Errorf("%s differs from %s", f.name, indexForms[0].name)
		}
	}
}
