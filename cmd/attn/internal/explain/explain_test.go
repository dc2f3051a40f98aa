package explain

import (
	"flag"
	"fmt"
	"image"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/seed90331342/attn/cmd/internal/cli"
	"github.com/seed90331342/attn/cmd/internal/cli/clitest"
	"github.com/seed90331342/attn/cmd/internal/flags"
	"github.com/seed90331342/attn/cmd/internal/matrix"
	"github.com/seed90331342/attn/cmd/internal/pagetest"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

var update = flag.Bool("update", false, "write the golden files anew")

// TestExplainWorkedExamples runs every published example on every
// backend: its numbers must be those of the file. On the CPU the text must also be
// that of the golden file; another backend may differ in the last printed digit.
func TestExplainWorkedExamples(t *testing.T) {
	examples, err := filepath.Glob("../../../../kernels/kernelstest/testdata/worked-examples/*.json")
	if err != nil || len(examples) < 3 {
		t.Fatal(examples, err)
	}
	checked := map[string]string{
		"batched-single-head.json":        "scores: 32 numbers agree",
		"five-token-scaled.json":          "softmax: 25 numbers agree",
		"illustrated-self-attention.json": "outputs_exact: 9 numbers agree",
	}
	const rounded = "illustrated-self-attention.json"
	for _, example := range examples {
		for _, variant := range []struct {
			suffix string
			args   []string
			shows  []string
		}{{"", nil, nil}, {".gradients", []string{"--gradients"}, nil}, {".round1", []string{"--round", "1"}, []string{
			"x1  0.0  0.5  0.5", "x2  0.0  1.0  0.0", "x3  0.0  0.9  0.1", "x1  2.0  7.0  1.5", "x2  2.0  8.0  0.0", "x3  2.0  7.8  0.3",
			"weighted_values_rounded: 27 numbers agree", "outputs_rounded: 9 numbers agree"}}} {
			name := filepath.Base(example)
			if variant.shows != nil && name != rounded {
				continue
			}
			golden := filepath.Join("testdata", strings.TrimSuffix(name, ".json")+variant.suffix+".golden")
			for _, be := range []string{"cpu", "gpu"} {
				t.Run(name+variant.suffix+"/"+be, func(t *testing.T) {
					clitest.NeedBackend(t, be)
					out := mustRun(t, append([]string{"explain", example, "--backend", be}, variant.args...)...)
					if want := checked[name]; !strings.Contains(out, want) {
						t.Errorf("it does not say %q", want)
					}
					clitest.Contains(t, out, variant.shows...)
					lines := strings.Split(out, "\n")
					lines = slices.DeleteFunc(lines, func(l string) bool { return strings.HasPrefix(l, "backend ") })
					out = strings.Join(lines, "\n")
					if *update && be == "cpu" {
						must.Do(t, os.WriteFile(golden, []byte(out), 0o644))
					}
					want := clitest.ReadFile(t, golden)
					if diff := cmp.Diff(string(want), out); diff != "" && be == "cpu" {
						t.Errorf("the text differs from %s (-want +got):\n%s", golden, diff)
					}
				})
			}
		}
	}
}

// TestExplainProjectionBias adds a bias to each projection, and uses the default
// scale: x = [[1, 2], [3, 4]], w = 2·I, b = [1, -1] yield queries [[3, 3], [7, 7]].
func TestExplainProjectionBias(t *testing.T) {
	file := clitest.WriteFile(t, t.TempDir(), "x.json", []byte(`{"x": [[1, 2], [3, 4]], "labels": ["one", "two"],
		"w_query": [[2, 0], [0, 2]], "b_query": [1, -1], "w_key": [[1, 0], [0, 1]], "b_key": [0, 1], "w_value": [[1, 0], [0, 1]], "b_value": [10, 0],
		"queries": [[3, 3], [7, 7]], "keys": [[1, 3], [3, 5]], "values": [[11, 2], [13, 4]],
		"scores": [[8.485281, 16.97056], [19.79899, 39.59798]]}`))
	out := mustRun(t, "explain", "--backend=cpu", file)
	clitest.Contains(t, out, "w_query", "b_query", "Queries = x · w_query + b_query", "Keys = x · w_key + b_key", "  query one\n", "scores: 4 numbers agree")
}

// TestExplainRounding: rounding that float32 cannot avoid is no difference, and weights that underflow are 0.
func TestExplainRounding(t *testing.T) {
	for _, text := range []string{`{"x": [[1000]], "w_query": [[1]], "b_query": [0.1]}`, `{"x": [[0], [15]], "scale": 1, "softmax": [[0.5, 0.5], [0, 1]]}`} {
		mustRun(t, "explain", "--backend=cpu", clitest.WriteFile(t, t.TempDir(), "x.json", []byte(text)))
	}
}

// TestExplainWrongDevice: a device's NaN or infinity is a difference.
func TestExplainWrongDevice(t *testing.T) {
	for _, got := range []float32{float32(math.NaN()), float32(math.Inf(1)), 2} {
		if err := wrong("a score", got, 1, 1e-6, 1); err == nil {
			t.Errorf("%v passes for 1", got)
		}
	}
}

// TestExplainDifferences changes one number of an example at a time, by about one unit
// of its last printed digit. The error names the first number that differs.
func TestExplainDifferences(t *testing.T) {
	read := func(name string) string {
		b := clitest.ReadFile(t, "../../../../kernels/kernelstest/testdata/worked-examples/"+name)
		return string(b)
	}
	illustrated, five, batched := read("illustrated-self-attention.json"), read("five-token-scaled.json"), read("batched-single-head.json")
	tests := []struct{ text, old, new, want string }{
		{illustrated, "[0.0,0.9,0.1]]", "[0.0,0.8,0.1]]", "softmax_rounded[2][1] is 0.9"},
		{illustrated, "[0.2,0.6,0.3]", "[0.2,0.6,0.31]", "weighted_values_rounded[2][2][2] is 0.3"},
		{illustrated, "[2,7.8,0.3]]", "[2,7.7,0.3]]", "outputs_rounded[2][1] is 7."},
		{illustrated, `"keys":    [[0,1,1],[4,4,0]`, `"keys":    [[0,1,1],[4,4.000001,0]`, "keys[1][1] is 4, the file expects 4.000001"},
		{illustrated, "[4,16,12]", "[4,16,13]", "scores[1][2] is 12, the file expects 13"},
		{illustrated, "6.3378938e-02", "6.3380938e-02", "softmax[0][0] is 0.0633789"},
		{illustrated, "1.9366210616669624", "1.9366510616669624", "outputs_exact[0][0] is 1.93662"},
		{five, "[0.2976,0.1095", "[0.2976,0.1097", "softmax[0][1] is 0.109"},
		{five, "[1.0000,0.0000,0.5000,0.5000,0.7500]", "[1.0000,0.0000,0.5000,0.5000,0.7502]", "scores[0][4] is 0.75, the file expects 0.7502"},
		{batched, "[0.9250,0.7811,0.6655,1.0000]", "[0.9255,0.7811,0.6655,1.0000]", "scores[1][3][0] is 0.92"},
		{batched, "0.2823,0.2535", "0.2826,0.2535", "softmax[0][0][0] is 0.282"},
	}
	for _, tt := range tests {
		t.Run(tt.new, func(t *testing.T) {
			text := strings.Replace(tt.text, tt.old, tt.new, 1)
			if text == tt.text {
				t.Fatalf("%s is not in the file", tt.old)
			}
			dir := t.TempDir()
			file := clitest.WriteFile(t, dir, "x.json", []byte(text))
			code, _, stderr := attn(t, "explain", "--backend=cpu", "--round=1", "--png", dir+"/h.png", file)
			clitest.WantFailure(t, code, "", stderr, file+": "+tt.want+" … allowed difference")
			if got := clitest.Files(t, dir); len(got) != 1 {
				t.Errorf("the folder holds %v", got)
			}
		})
	}
}

// TestExplainBadFiles checks the errors of invalid examples.
func TestExplainBadFiles(t *testing.T) {
	tests := []struct{ name, text, want string }{
		{"empty", "", "line 1: not JSON"},
		{"not JSON", "{\"x\": [[1]],\n oops}", "line 2: not JSON"},
		{"no object", "[1, 2]", "not a JSON object"},
		{"no input", `{"scale": 1}`, "x is missing"},
		{"a ragged input", `{"x": [[1, 2], [3]]}`, "x[1] has shape [1], x[0] has [2]"},
		{"rows and numbers mixed", `{"x": [[1, 2], 3]}`, "x[1] has shape [], x[0] has [2]"},
		{"a word as a number", `{"x": [[1, "a"]]}`, `x[0][1] is "a", it must be a number`},
		{"null as a number", `{"x": [[1, null]]}`, "x[0][1] is null, it must be a number"},
		{"a number beyond float32", `{"x": [[1, 1e300]]}`, "beyond the range of float32"},
		{"a number as the input", `{"x": 1}`, "x is a number"},
		{"a vector as the input", `{"x": [1, 2]}`, "x has shape [2], it must be [S, dModel] or [B, S, dModel]"},
		{"an empty input", `{"x": []}`, "x is empty"},
		{"4-D", `{"x": [[[[1]]]]}`, "x has shape [1 1 1 1]"},
		{"5-D", `{"x": [[[[[1]]]]]}`, "x[0][0][0][0] is an array, it must be a number: arrays have at most 4 axes"},
		{"thousands of axes", `{"x": ` + strings.Repeat("[", 9000) + "1" + strings.Repeat("]", 9000) + "}", "x[0][0][0][0] is an array, it must be a number"},
		{"a number of many digits", `{"x": [[1` + strings.Repeat("0", 9000) + `]]}`, "x[0][0] is 1" + strings.Repeat("0", 39) + ", beyond the range of float32"},
		{"a projection that does not fit", `{"x": [[1, 2]], "w_query": [[1, 2, 3]]}`, "w_query has shape [1 3], x has 2 columns"},
		{"queries and keys that do not fit", `{"x": [[1, 2]], "w_query": [[1], [2]]}`, "keys have 2 columns, queries 1"},
		{"a bias that does not fit", `{"x": [[1, 2]], "w_key": [[1, 0], [0, 1]], "b_key": [1]}`, "b_key has shape [1], it must be [2]"},
		{"a bias alone", `{"x": [[1, 2]], "b_key": [1, 2]}`, "b_key is given without w_key"},
		{"scores of another shape", `{"x": [[1, 2]], "scores": [[1, 2]]}`, "scores has shape [1 2], it must be [1 1]"},
		{"too few labels", `{"x": [[1, 2], [3, 4]], "labels": ["a"]}`, "labels names 1 tokens, x has 2"},
		{"labels that are numbers", `{"x": [[1, 2]], "labels": [1]}`, "labels"},
		{"a scale that is a word", `{"x": [[1, 2]], "scale": "big"}`, "scale is a string, it must be a number"},
		{"a scale beyond float32", `{"x": [[1, 2]], "scale": 1e300}`, "scale is 1e+300"},
		{"a negative softcap", `{"x": [[1, 2]], "softcap": -1}`, "softcap is -1, it must be positive, or 0 for none"},
		{"a gradient of another shape", `{"x": [[1, 2]], "d_outputs": [[1]]}`, "d_outputs has shape [1 1], it must be [1 2]"},
		{"rounded values of another shape", `{"x": [[1, 2]], "weighted_values_rounded": [[1, 2]]}`, "weighted_values_rounded has shape [1 2], it must be [1 1 2]"},
		{"negative digits", `{"x": [[1, 2]], "digits": -1}`, "digits is -1"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			file := clitest.WriteFile(t, dir, "x.json", []byte(tt.text))
			code, stdout, stderr := attn(t, "explain", "--backend=cpu", "--png", dir+"/h.png", file)
			if clitest.WantFailure(t, code, stdout, stderr, file+" … "+tt.want); code != flags.ExitFailed {
				t.Errorf("exit code %d, a file that does not fit is no wrong usage", code)
			}
			if got := clitest.Files(t, dir); len(got) != 1 {
				t.Errorf("the folder holds %v", got)
			}
		})
	}
}

// TestExplainUnknownFields: unknown fields, which may be misspelt, are noted.
func TestExplainUnknownFields(t *testing.T) {
	file := clitest.WriteFile(t, t.TempDir(), "x.json", []byte(`{"x": [[1, 2]], "w_querry": [[1, 0], [0, 1]], "note": "known"}`))
	code, _, stderr := attn(t, "explain", "--backend=cpu", file)
	if want := fmt.Sprintf("attn: note: %s: unknown fields: w_querry\n", file); code != 0 || stderr != want {
		t.Errorf("exit code %d, stderr %q, should be %q", code, stderr, want)
	}
}

// TestRoundRow has rows in which keeping the sum differs from rounding each weight.
func TestRoundRow(t *testing.T) {
	for _, c := range []struct {
		row      []float32
		decimals int
		want     []float32
	}{
		{[]float32{0.0634, 0.4683, 0.4683}, 1, []float32{0, .5, .5}}, // one by one: 0.1
		{[]float32{1. / 3, 1. / 3, 1. / 3}, 2, []float32{.34, .33, .33}},
		{[]float32{.3, .7}, 1, []float32{.3, .7}},
		{[]float32{.6, .4}, 0, []float32{1, 0}},
		{[]float32{0, 0}, 1, []float32{0, 0}},
		{[]float32{1}, 15, []float32{1}},
	} {
		if got := roundRow(c.row, c.decimals); !slices.Equal(got, c.want) {
			t.Errorf("%v to %d decimals is %v, should be %v", c.row, c.decimals, got, c.want)
		}
	}
}

// TestExplainRoundsOtherwise: expected values of other decimals are noted, and not checked.
func TestExplainRoundsOtherwise(t *testing.T) {
	code, out, stderr := attn(t, "explain", "--backend=cpu", "--round=2", "../../../../kernels/kernelstest/testdata/worked-examples/illustrated-self-attention.json")
	if code != 0 || !strings.Contains(out, "x1  0.06  0.47  0.47") || strings.Contains(out, "outputs_rounded") || !strings.Contains(stderr, "its rounded values have --round 1") {
		t.Errorf("exit code %d, stderr %q, it prints\n%s", code, stderr, out)
	}
}

// TestHeatMap checks the picture: queries go down, keys across, larger weights are
// darker, cells are square, margins are kept.
func TestHeatMap(t *testing.T) {
	dir := t.TempDir()
	// Each query finds one key: 1 sees 2, 2 sees 3, 3 sees 3.
	file := clitest.WriteFile(t, dir, "x.json", []byte(`{"title": "A title that is long enough for a second line above such a small map",
		"x": [[100, 0, 0], [0, 100, 0], [0, 0, 100]],
		"w_query": [[0, 1, 0], [0, 0, 1], [0, 0, 1]], "labels": ["the", "quick", "fox"]}`))
	mustRun(t, "explain", "--backend=cpu", "--png", dir+"/h.png", file)
	img := pagetest.ReadPNG(t, dir+"/h.png")
	dark := func(x, y int) bool {
		r, g, b, _ := img.At(x, y).RGBA()
		return r>>8 == 0x08 && g>>8 == 0x30 && b>>8 == 0x6b
	}
	// The first dark pixel from the top is the corner of row 0, column 1. Cells are
	// sampled at a quarter of their size, off their numbers.
	bounds := img.Bounds()
	first := image.Pt(-1, -1)
	for y := bounds.Min.Y; y < bounds.Max.Y && first.X < 0; y++ {
		for x := bounds.Min.X; x < bounds.Max.X*3/4; x++ { // the colour bar is to the right
			if dark(x, y) {
				first = image.Pt(x, y)
				break
			}
		}
	}
	const cell = 44 * 144 / 72 // of package picture
	for row := range 3 {
		for column := range 3 {
			x, y := first.X+cell/4+(column-1)*cell, first.Y+cell/4+row*cell
			if want := column == []int{1, 2, 2}[row]; dark(x, y) != want {
				t.Errorf("query %d, key %d: dark is %v, should be %v", row, column, dark(x, y), want)
			}
		}
	}
}

// TestExample: the example of the help holds with all its expected values. The help has every field.
func TestExample(t *testing.T) {
	path := clitest.WriteFile(t, t.TempDir(), "example.json", []byte(example))
	out := mustRun(t, "explain", "--backend=cpu", "--round=1", path)
	for _, field := range slices.Concat(expectedFields, roundedFields) {
		if !strings.Contains(out, "\n  "+field+": ") {
			t.Errorf("%s is not checked:\n%s", field, out)
		}
	}
	help := mustRun(t, "explain", "--help")
	for _, field := range slices.Concat(expectedFields, roundedFields, []string{"w_query", "b_value", "scale", "softcap", "title", "labels", "digits", "d_outputs"}) {
		if !strings.Contains(help, field) {
			t.Errorf("the help has no %s", field)
		}
	}
}

var attn, mustRun, _ = clitest.Named(cli.Program{Name: "attn", Grammar: func() any {
	return &struct {
		Explain Command `cmd:""`
	}{}
}})

// differentiated parses a file and computes all its steps.
func differentiated(t *testing.T, dev *kernels.Device, text string) (*walkthrough, *steps, *gradients) {
	t.Helper()
	wt := &walkthrough{}
	must.Do(t, wt.parse([]byte(text)))
	st := must.Get(computeSteps(t.Context(), dev, wt))(t)
	t.Cleanup(st.close)
	g := must.Get(st.differentiate(t.Context(), wt))(t)
	return wt, st, g
}

// near compares a step with the expected numbers.
func near(t *testing.T, name string, got matrix.Matrix, want []float64, within float64) {
	t.Helper()
	if len(got.Data) != len(want) {
		t.Fatalf("%s has %d numbers, should have %d", name, len(got.Data), len(want))
	}
	for i, x := range got.Data {
		if !(math.Abs(float64(x)-want[i]) <= within) {
			t.Errorf("%s is %v, should be %v", name, got.Data, want)
			return
		}
	}
}

// TestGradientsAreThoseOfBackward compares the steps of the published examples, and of one with
// a softcap, with the fused backward pass.
func TestGradientsAreThoseOfBackward(t *testing.T) {
	texts := []string{`{"x": [[1, 2], [0.5, -1], [3, 0.25]], "softcap": 1.5, "d_outputs": [[1, 0.5], [-1, 2], [0.25, 3]]}`}
	examples, err := filepath.Glob("../../../../kernels/kernelstest/testdata/worked-examples/*.json")
	if err != nil || len(examples) < 3 {
		t.Fatal(examples, err)
	}
	for _, path := range examples {
		text := clitest.ReadFile(t, path)
		texts = append(texts, string(text))
	}
	for _, be := range []string{"cpu", "gpu"} {
		t.Run(be, func(t *testing.T) {
			dev := clitest.Open(t, be)
			for _, text := range texts {
				wt, st, g := differentiated(t, dev, text)
				call := must.Get(dev.Prepare(st.device[0], st.device[1], st.device[2], kernels.Options{Scale: new(wt.scale()), Softcap: wt.Softcap, LSE: true}))(t)
				r := must.Get(call.Run(t.Context()))(t)
				defer r.Release()
				dO := must.Get(st.upload(t.Context(), g.dO))(t)
				grads := must.Get(call.AllocGradients(t.Context(), call.Gradients().Operands()))(t)
				defer grads.Release()
				must.Do(t, call.Backward(t.Context(), grads, kernels.Result{O: dO}, r))
				for name, of := range map[string]struct {
					got  matrix.Matrix
					want kernels.Tensor
				}{"dQ": {g.dQ, grads.Q}, "dK": {g.dK, grads.K}, "dV": {g.dV, grads.V}} {
					data := must.Get(dev.ToFloat32(t.Context(), of.want))(t)
					want := make([]float64, len(data))
					for i, x := range data {
						want[i] = float64(x)
					}
					near(t, name+" of "+wt.Title, of.got, want, 2e-5) // of numbers up to 30
				}
			}
		})
	}
}
