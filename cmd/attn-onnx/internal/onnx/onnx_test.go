package onnx

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/seed90331342/attn/backend/oracle"
	"github.com/seed90331342/attn/cmd/attn-onnx/internal/onnxfile"
	"github.com/seed90331342/attn/cmd/internal/cli"
	"github.com/seed90331342/attn/cmd/internal/cli/clitest"
	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
	"google.golang.org/protobuf/encoding/protowire"
)

const publishedONNX = "../../testdata/onnx"

// publishedCases returns all 38 published cases.
func publishedCases(t *testing.T) []string {
	t.Helper()
	dirs, err := filepath.Glob(filepath.Join(publishedONNX, "test_*"))
	if err != nil || len(dirs) != 38 {
		t.Fatalf("%d cases in %s, %v", len(dirs), publishedONNX, err)
	}
	return dirs
}

// wantPassed runs cases and fails the test unless all pass.
func wantPassed(t *testing.T, device string, dirs []string) {
	t.Helper()
	code, stdout, stderr := attn(t, append([]string{"--backend", device}, dirs...)...)
	lines := strings.Split(strings.TrimSuffix(stdout, "\n"), "\n")
	if last := fmt.Sprintf("%d passed, 0 failed", len(dirs)); code != 0 || stderr != "" || len(lines) != len(dirs)+1 || lines[len(lines)-1] != last {
		t.Errorf("exit code %d, stderr %q, should end with %q:\n%s", code, stderr, last, stdout)
	}
}

// wantOutcome runs a case on the CPU. It must pass if says is empty, and else fail with an error that contains says.
func wantOutcome(t *testing.T, dir, says string) {
	t.Helper()
	if says == "" {
		wantPassed(t, "cpu", []string{dir})
		return
	}
	code, stdout, stderr := attn(t, "--backend", "cpu", dir)
	if code != 1 || stderr != "" || !strings.HasPrefix(stdout, "FAIL  "+dir+": ") || !strings.Contains(stdout, says) || !strings.HasSuffix(stdout, "\n0 passed, 1 failed\n") {
		t.Errorf("exit code %d, stderr %q, should say %q:\n%s", code, stderr, says, stdout)
	}
}

// everywhere runs a test on every instruction set of the CPU and on the GPU.
func everywhere(t *testing.T, run func(t *testing.T, backend string)) {
	for _, tier := range cpu.Tiers() {
		t.Run("cpu/"+tier, func(t *testing.T) {
			t.Setenv("ATTN_CPU_TIER", tier)
			run(t, "cpu")
		})
	}
	t.Run("gpu", func(t *testing.T) {
		clitest.NeedBackend(t, "gpu")
		run(t, "gpu")
	})
}

// TestONNXPublished runs the published cases on every instruction set of the CPU and on the GPU.
func TestONNXPublished(t *testing.T) {
	dirs := publishedCases(t)
	everywhere(t, func(t *testing.T, backend string) {
		var some []string
		for i, dir := range dirs {
			if backend == "cpu" || !testing.Short() || i%6 == 0 {
				some = append(some, dir)
			}
		}
		wantPassed(t, backend, some)
	})
}

// copyCase copies a published case, for a test that damages it.
func copyCase(t *testing.T, name string) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), name)
	must.Do(t, os.CopyFS(dir, os.DirFS(filepath.Join(publishedONNX, name))))
	return dir
}

// TestONNXFailures runs damaged cases: each has an error in its line and counts as failed, while others pass.
func TestONNXFailures(t *testing.T) {
	const set = "test_data_set_0"
	edit := func(file string, change func([]byte) []byte) func(t *testing.T, dir string) {
		return func(t *testing.T, dir string) {
			path := filepath.Join(dir, file)
			data := must.Get(os.ReadFile(path))(t)
			must.Do(t, os.WriteFile(path, change(data), 0o644))
		}
	}
	replace := func(old, new string) func([]byte) []byte {
		return func(b []byte) []byte {
			s := string(b)
			if strings.Count(s, old) == 0 || len(old) != len(new) {
				panic("nothing to replace, or other lengths")
			}
			return []byte(strings.Replace(s, old, new, 1))
		}
	}
	remove := func(file string) func(t *testing.T, dir string) {
		return func(t *testing.T, dir string) {
			must.Do(t, os.RemoveAll(filepath.Join(dir, file)))
		}
	}
	for _, c := range []struct {
		name   string
		damage func(t *testing.T, dir string)
		says   string
	}{
		{"another node", edit("model.onnx", replace("\tAttention", "\tAttentive")), `the node is "Attentive"`},
		{"an older opset", edit("model.onnx", func(b []byte) []byte { return append(b[:len(b)-1:len(b)-1], 22) }), "opset 22"},
		{"a model cut short", edit("model.onnx", func(b []byte) []byte { return b[:len(b)/2] }), "model.onnx: model: its bytes do not parse"},
		{"a tensor cut short", edit(set+"/input_1.pb", func(b []byte) []byte { return b[:len(b)-5] }), set + ": input_1.pb: tensor: its bytes do not parse"},
		{"an empty tensor file", edit(set+"/output_0.pb", func([]byte) []byte { return nil }), "output_0.pb: tensor"},
		{"no model", remove("model.onnx"), "model.onnx"},
		{"no data", remove(set), "no test_data_set_0"},
		{"no input", remove(set + "/input_2.pb"), `the graph's input "V"`},
		{"no output", remove(set + "/output_0.pb"), `the graph's output "Y"`},
		{"no folder", remove(""), "model.onnx"},
		{"an input too many", func(t *testing.T, dir string) {
			clitest.WriteFile(t, filepath.Join(dir, set), "input_3.pb", nil)
		}, "input_3.pb is one too many"},
		{"another type expected", edit(set+"/output_0.pb", func(b []byte) []byte {
			x := &onnxfile.Tensor{Type: onnxfile.Double, Shape: []int{2, 3, 4, 8}, Data: make([]byte, 8*192)}
			return tensorFile(x)
		}), "Y is f32, should be f64"},
		{"another shape expected", edit(set+"/output_0.pb", func(b []byte) []byte {
			x, err := onnxfile.DecodeTensor(b)
			if err != nil {
				panic(err)
			}
			x.Shape = []int{2, 4, 3, 8}
			return tensorFile(x)
		}), "Y has shape [2 3 4 8], should have [2 4 3 8]"},
		{"another number expected", edit(set+"/output_0.pb", func(b []byte) []byte { b[len(b)-2]++; return b }), "Y[1][2][3][7] is "},
		{"NaN expected", edit(set+"/output_0.pb", func(b []byte) []byte { b[len(b)-1], b[len(b)-2] = 0x7f, 0xc0; return b }), "should be NaN"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := copyCase(t, "test_attention_4d_scaled")
			c.damage(t, dir)
			good := filepath.Join(publishedONNX, "test_attention_3d")
			code, stdout, stderr := attn(t, "--backend", "cpu", dir, good)
			pattern := `^FAIL  ` + regexp.QuoteMeta(dir) + `: .*` + regexp.QuoteMeta(c.says) + `.*\nok    ` + regexp.QuoteMeta(good) + `: .*\n1 passed, 1 failed\n$`
			if code != 1 || stderr != "" || !regexp.MustCompile(pattern).MatchString(stdout) {
				t.Errorf("exit code %d, stderr %q, stdout should say %q:\n%s", code, stderr, c.says, stdout)
			}
		})
	}
}

// TestONNXUsage: nothing runs without a case or without the backend.
func TestONNXUsage(t *testing.T) {
	code, stdout, stderr := attn(t)
	clitest.WantFailure(t, code, stdout, stderr, "<case>")
	mustFail(t, `"npu"`, "--backend", "npu", filepath.Join(publishedONNX, "test_attention_3d"))
	file := publishedJSONC(t)[0]
	code, stdout, stderr = attn(t, "--backend", "cpu", file)
	if want := "FAIL  " + file + ": it is a file, not a folder: files of operator tests need --jsonc\n0 passed, 1 failed\n"; code != 1 || stdout != want || stderr != "" {
		t.Errorf("exit code %d, stderr %q, stdout %q, should be %q", code, stderr, stdout, want)
	}
}

// TestONNXDataSets: a case passes if all of its data sets do.
func TestONNXDataSets(t *testing.T) {
	dir := copyCase(t, "test_attention_4d_scaled")
	must.Do(t, os.CopyFS(filepath.Join(dir, "test_data_set_1"), os.DirFS(filepath.Join(dir, "test_data_set_0"))))
	wantPassed(t, "cpu", []string{dir})
	must.Do(t, os.Remove(filepath.Join(dir, "test_data_set_1", "output_0.pb")))
	code, stdout, _ := attn(t, "--backend", "cpu", dir)
	if code != 1 || !strings.Contains(stdout, "test_data_set_1: ") || !strings.HasSuffix(stdout, "\n0 passed, 1 failed\n") {
		t.Errorf("exit code %d:\n%s", code, stdout)
	}
}

// TestONNXCompare checks the tolerance.
func TestONNXCompare(t *testing.T) {
	tensor := func(d onnxfile.DataType, data ...byte) *onnxfile.Tensor {
		return &onnxfile.Tensor{Type: d, Shape: []int{len(data) / d.Size()}, Data: data}
	}
	number := func(d onnxfile.DataType, x float64) *onnxfile.Tensor { return tensor(d, appendNumber(nil, d, x)...) }
	half := func(d onnxfile.DataType, bits uint16) *onnxfile.Tensor { return tensor(d, byte(bits), byte(bits>>8)) }
	for _, c := range []struct {
		name      string
		got, want *onnxfile.Tensor
		ok        bool
	}{
		{"f32 within 1e-6 + 1e-5·2", number(onnxfile.Float, 2+2.0e-5), number(onnxfile.Float, 2), true},
		{"f32 beyond it", number(onnxfile.Float, 2+2.2e-5), number(onnxfile.Float, 2), false},
		{"f64 as f32", number(onnxfile.Double, 2-2.0e-5), number(onnxfile.Double, 2), true},
		{"f64 beyond it", number(onnxfile.Double, 2-2.2e-5), number(onnxfile.Double, 2), false},
		{"f16 next to it", half(onnxfile.Float16, 0x3c00), half(onnxfile.Float16, 0x3bff), true},
		{"f16 two places off", half(onnxfile.Float16, 0x3c01), half(onnxfile.Float16, 0x3bff), false},
		{"f16 around zero", half(onnxfile.Float16, 0x8000), half(onnxfile.Float16, 0x0001), true},
		{"f16 across zero", half(onnxfile.Float16, 0x8001), half(onnxfile.Float16, 0x0001), false},
		{"bf16 next to it", half(onnxfile.BFloat16, 0xbf81), half(onnxfile.BFloat16, 0xbf80), true},
		{"bf16 two places off", half(onnxfile.BFloat16, 0xbf82), half(onnxfile.BFloat16, 0xbf80), false},
		{"the largest f16 and Inf", half(onnxfile.Float16, 0x7bff), half(onnxfile.Float16, 0x7c00), false},
		{"-Inf twice", half(onnxfile.Float16, 0xfc00), half(onnxfile.Float16, 0xfc00), true},
		{"NaN twice", half(onnxfile.Float16, 0x7e00), half(onnxfile.Float16, 0xfe01), true},
		{"NaN for a number", half(onnxfile.BFloat16, 0x7fc0), half(onnxfile.BFloat16, 0x3f80), false},
		{"a number for Inf", number(onnxfile.Float, 3e38), tensor(onnxfile.Float, 0, 0, 0x80, 0x7f), false},
		{"integers", tensor(onnxfile.Int64, 1, 2, 3, 4, 5, 6, 7, 8), tensor(onnxfile.Int64, 1, 2, 3, 4, 5, 6, 7, 8), true},
		{"integers that float64 cannot tell apart", tensor(onnxfile.Int64, 1, 2, 3, 4, 5, 6, 7, 8), tensor(onnxfile.Int64, 2, 2, 3, 4, 5, 6, 7, 8), false},
		{"bools", tensor(onnxfile.Bool, 1, 0), tensor(onnxfile.Bool, 1, 1), false},
	} {
		if off, err := exactly.compare("x", c.got, c.want); (err == nil) != c.ok || (off <= 1) != c.ok {
			t.Errorf("%s: %v, %v times the tolerance", c.name, err, off)
		}
	}
}

var attn, _, mustFail = clitest.Named(cli.Program{Name: "attn-onnx", Grammar: func() any { return &Command{} }})

// onnxFiles is a case to write: an operator with values of its inputs and outputs; nil for missing ones.
type onnxFiles struct {
	operator string // qualified; "" is Attention
	producer string // the name of the program that wrote the model
	opset    int64
	ints     map[string]int64
	floats   map[string]float32
	texts    map[string]string
	in, want []*onnxfile.Tensor
	elements [][]oracle.Element // of want, with error bounds; nil in published and damaged cases
	constant int                // this input, when not 0, comes with the model
}

// name returns the domain and the name of the operator.
func (c *onnxFiles) name() (domain, operator string) {
	if name, ok := strings.CutPrefix(c.operator, microsoft+"."); ok {
		return microsoft, name
	}
	return "", cmp.Or(c.operator, "Attention")
}

// write writes the folder of a case.
func (c *onnxFiles) write(t *testing.T, dir string) string {
	t.Helper()
	set := filepath.Join(dir, "test_data_set_0")
	must.Do(t, os.MkdirAll(set, 0o755))
	var node, graph []byte
	put := func(b *[]byte, number protowire.Number, v []byte) {
		*b = protowire.AppendBytes(protowire.AppendTag(*b, number, protowire.BytesType), v)
	}
	varint := func(b *[]byte, number protowire.Number, v int64) {
		*b = protowire.AppendVarint(protowire.AppendTag(*b, number, protowire.VarintType), uint64(v))
	}
	tensors := func(kind string, number, graphNumber protowire.Number, names []string, list []*onnxfile.Tensor) {
		files := 0
		for i, x := range list {
			if x == nil {
				put(&node, number, nil)
				continue
			}
			put(&node, number, []byte(names[i]))
			named := *x
			named.Name = names[i]
			if kind == "input" && i == c.constant && i > 0 {
				put(&graph, 5, tensorFile(&named))
				continue
			}
			var value []byte
			put(&value, 1, []byte(names[i]))
			put(&graph, graphNumber, value)
			clitest.WriteFile(t, set, fmt.Sprintf("%s_%d.pb", kind, files), tensorFile(&named))
			files++
		}
	}
	domain, operator := c.name()
	schema := schemas[qualified(domain, operator)]
	tensors("input", 1, 11, schema.inputs, c.in)
	tensors("output", 2, 12, schema.outputs, c.want)
	put(&node, 4, []byte(operator))
	for _, name := range slices.Sorted(maps.Keys(c.ints)) {
		var a []byte
		put(&a, 1, []byte(name))
		varint(&a, 3, c.ints[name])
		varint(&a, 20, 2)
		put(&node, 5, a)
	}
	for _, name := range slices.Sorted(maps.Keys(c.floats)) {
		var a []byte
		put(&a, 1, []byte(name))
		a = protowire.AppendFixed32(protowire.AppendTag(a, 2, protowire.Fixed32Type), math.Float32bits(c.floats[name]))
		varint(&a, 20, 1)
		put(&node, 5, a)
	}
	for _, name := range slices.Sorted(maps.Keys(c.texts)) {
		var a []byte
		put(&a, 1, []byte(name))
		put(&a, 4, []byte(c.texts[name]))
		varint(&a, 20, 3)
		put(&node, 5, a)
	}
	var model, opset []byte
	if domain != "" {
		put(&node, 7, []byte(domain))
		put(&opset, 1, []byte(domain))
	}
	put(&graph, 1, node)
	if c.producer != "" {
		put(&model, 2, []byte(c.producer))
	}
	put(&model, 7, graph)
	varint(&opset, 2, c.opset)
	put(&model, 8, opset)
	clitest.WriteFile(t, dir, "model.onnx", model)
	return dir
}

// tensorFile encodes a tensor with raw data.
func tensorFile(x *onnxfile.Tensor) []byte {
	var b []byte
	for _, l := range x.Shape {
		b = protowire.AppendVarint(protowire.AppendTag(b, 1, protowire.VarintType), uint64(l))
	}
	b = protowire.AppendVarint(protowire.AppendTag(b, 2, protowire.VarintType), uint64(x.Type))
	b = protowire.AppendBytes(protowire.AppendTag(b, 8, protowire.BytesType), []byte(x.Name))
	return protowire.AppendBytes(protowire.AppendTag(b, 9, protowire.BytesType), x.Data)
}
