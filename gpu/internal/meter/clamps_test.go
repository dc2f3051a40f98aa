package meter

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/gpu/internal/cut"
	"github.com/seed90331342/attn/shaders"
)

// indexForms are ways to write the same product of a 32 x 32 tile from workgroup memory.
// They differ in the index clamps that a compiler adds: that of go-webgpu clamps every
// dynamic index of an array in workgroup or private memory, that of gogpu none.
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
func tileProduct(form int) shaders.Variant {
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
	return shaders.Custom{Title: "tile product, " + f.name, WGSL: `
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

// tileProbes returns the probe that runs a form for so many rounds.
func tileProbes(form int, out cut.Window, groups int) func(rounds int) []probe {
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

// BenchmarkIndexClamps times the forms: what the clamps cost and which form avoids them.
// docs/gpu.md has the results.
func BenchmarkIndexClamps(b *testing.B) {
	d := open(b, gputypes.Limits{})
	groups, bytes := grid(d, tileGrid, tileBytes)
	for form, f := range indexForms {
		b.Run(f.name, func(b *testing.B) {
			var rates []float64
			for b.Loop() {
				rate, err := borrow(b.Context(), d, 1, bytes, func(out []cut.Window) (float64, error) {
					return fastest(b.Context(), d, f.name, float64(groups*64*tileOps), cut.MaxLoops/64, tileProbes(form, out[0], groups))
				})
				if err != nil {
					b.Fatal(err)
				}
				rates = append(rates, rate/1e9)
			}
			slices.Sort(rates)
			b.ReportMetric(rates[len(rates)/2], "GFLOP/s")
		})
	}
}

// The forms of BenchmarkIndexClamps compute the same, to the bit.
func TestIndexFormsAgree(t *testing.T) {
	d := open(t, gputypes.Limits{})
	var first []float32
	for form, f := range indexForms {
		out := filled(t, d, tileBytes/4, 1)
		run(t, d, tileProbes(form, cut.Window{Buf: out.Parts[0], Size: tileBytes}, 1)(3)...)
		got := elements(t, d, out, tileBytes/4)
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
