package run

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/seed90331342/attn/cmd/attn/internal/array"
	"github.com/seed90331342/attn/cmd/internal/cli/clitest"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// stored is a tensor of a .safetensors file; its type is one of the format.
type stored struct {
	dtype string
	shape []int
	data  []float64
}

// descrs are numpy's names of the format's types. bf16 is the upper half of f4.
var descrs = map[string]string{"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<f4", "BOOL": "|b1", "U8": "|u1", "F8_E4M3": "|u1"}

// saveTensors writes a .safetensors file, its header padded so that the data starts at a multiple
// of 8 bytes plus an odd number.
func saveTensors(t *testing.T, dir, name string, odd int, tensors map[string]stored) string {
	t.Helper()
	var data []byte
	header := map[string]any{}
	for _, name := range slices.Sorted(maps.Keys(tensors)) {
		x, start := tensors[name], len(data)
		raw := clitest.Encode(descrs[x.dtype], x.data)
		for i := range raw {
			if x.dtype != "BF16" || i%4 >= 2 {
				data = append(data, raw[i])
			}
		}
		header[name] = map[string]any{"dtype": x.dtype, "shape": x.shape, "data_offsets": []int{start, len(data)}}
	}
	text := must.Get(json.Marshal(header))(t)
	text = append(text, strings.Repeat(" ", (8-len(text)%8)%8+odd)...)
	return clitest.WriteFile(t, dir, name, append(append(binary.LittleEndian.AppendUint64(nil, uint64(len(text))), text...), data...))
}

// TestRunSafetensors runs the same call from .npy files and from a .safetensors file in which
// every flag names a tensor: the outputs are equal.
func TestRunSafetensors(t *testing.T) {
	for _, c := range []struct {
		dtype  string
		odd    int
		args   []string
		mapped bool
	}{
		{"F32", 0, nil, true},
		{"F32", 1, nil, false},
		{"F16", 0, nil, true},
		{"F64", 0, []string{"--dtype=f32"}, false},
		{"BF16", 0, []string{"--dtype=bf16"}, true},
		{"BF16", 0, []string{"--dtype=f32"}, false},
	} {
		dir := t.TempDir()
		tensors := map[string]stored{
			"q": {c.dtype, []int{1, 4, 6, 8}, clitest.Normal(1, 192)}, "k": {c.dtype, []int{1, 2, 8, 8}, clitest.Normal(2, 128)}, "v": {c.dtype, []int{1, 2, 8, 8}, clitest.Normal(3, 128)},
			"mask": {"BOOL", []int{6, 8}, slices.Repeat([]float64{1, 0, 1, 1}, 12)}, "bias": {c.dtype, []int{4, 6, 8}, clitest.Normal(6, 192)},
			"sinks": {c.dtype, []int{4}, clitest.Normal(7, 4)}, "rows": {"U8", []int{6}, []float64{0, 0, 1, 1, 1, 1}}, "keys": {"U8", []int{8}, []float64{0, 0, 0, 0, 0, 1, 1, 1}},
		}
		path := saveTensors(t, dir, "x.safetensors", c.odd, tensors)
		npy := append([]string{"run", "--backend=cpu", "--check", "--out=" + dir + "/npy.npy"}, c.args...)
		st := append([]string{"run", "--backend=cpu", "--check", "--out=" + dir + "/st.npy"}, c.args...)
		if c.dtype == "BF16" && c.mapped {
			st = slices.Delete(st, len(st)-1, len(st)) // bf16 is the type of the files
		}
		for _, f := range [][2]string{{"q", "q"}, {"k", "k"}, {"v", "v"}, {"mask", "mask"}, {"bias", "bias"},
			{"sinks", "sinks"}, {"segments", "rows"}, {"kv-segments", "keys"}} {
			x := tensors[f[1]]
			npy = append(npy, "--"+f[0], clitest.Save(t, dir, f[1]+".npy", descrs[x.dtype], x.data, x.shape...))
			st = append(st, "--"+f[0], path+"#"+f[1])
		}
		for _, args := range [][]string{npy, st} {
			if code, _, stderr := attn(t, args...); code != 0 {
				t.Fatalf("%v: %s", args, stderr)
			}
		}
		a, errA := os.ReadFile(dir + "/npy.npy")
		b, errB := os.ReadFile(dir + "/st.npy")
		if errA != nil || errB != nil || !bytes.Equal(a, b) {
			t.Errorf("%s %v: the outputs differ, %v, %v", c.dtype, c.args, errA, errB)
		}
		x := must.Get(array.Open("q", path+"#q", false))(t)
		dtype := x.DType()
		if slices.Contains(c.args, "--dtype=f32") {
			dtype = kernels.F32
		}
		if (x.Memory(dtype) == 0) != c.mapped {
			t.Errorf("%s %v with %d bytes more: mapped %t", c.dtype, c.args, c.odd, !c.mapped)
		}
	}
}

// TestRunBadSafetensors names tensors that cannot be taken.
func TestRunBadSafetensors(t *testing.T) {
	dir := t.TempDir()
	zeros := func(n int) []float64 { return make([]float64, n) }
	path := saveTensors(t, dir, "x.safetensors", 0, map[string]stored{
		"q": {"F32", []int{6, 8}, zeros(48)}, "half": {"F16", []int{6, 8}, zeros(48)}, "brain": {"BF16", []int{6, 8}, zeros(48)}, "cube": {"F32", []int{1, 1, 1, 6, 8}, zeros(48)},
		"ids": {"U8", []int{6}, zeros(6)}, "eight": {"F8_E4M3", []int{6, 8}, zeros(48)}, "mask": {"BOOL", []int{6, 6}, zeros(36)}, "none": {"U8", []int{0}, nil},
	})
	content := clitest.ReadFile(t, path)
	names := `the file has ["brain" "cube" "eight" "half" "ids" "mask" "none" "q"]`
	cut := clitest.WriteFile(t, dir, "cut.safetensors", content[:len(content)-1])
	other := clitest.Save(t, dir, "other.safetensors", "<f4", zeros(48), 6, 8)
	before := clitest.Files(t, dir)
	for _, c := range []struct {
		name string
		args []string // after those of a good call
		want string
	}{
		{"a missing tensor", []string{"--v", path + "#w"}, "--v " + path + `#w: there is no tensor "w", ` + names},
		{"no name", []string{"--v", path}, "--v " + path + ": name one of its tensors as " + path + "#NAME: it has [\"brain\""},
		{"an empty name", []string{"--v", path + "#"}, ": name one of its tensors as " + path + "#NAME"},
		{"two names", []string{"--v", path + "#q#k"}, `there is no tensor "q#k"`},
		{"a missing file", []string{"--v", dir + "/y.safetensors#q"}, "y.safetensors#q: no such file"},
		{"a truncated file", []string{"--v", cut + "#q"}, "--v " + cut + `#q: truncated: tensor "q" ends at byte`},
		{"a .npy file of that name", []string{"--v", other + "#q"}, "not a .safetensors file, or a damaged one"},
		{"a name in a .npy file", []string{"--v", dir + "/x.npy#q"}, "x.npy#q: no such file"},
		{"8-bit numbers", []string{"--v", path + "#eight"}, `#eight: tensor "eight" is F8_E4M3, which is not read: convert it to F32, F16 or BF16`},
		{"integers", []string{"--v", path + "#ids"}, "#ids: elements are u1, they must be numbers of F16, BF16, F32 or F64 (BOOL for a mask)"},
		{"a mask as values", []string{"--v", path + "#mask"}, "#mask: elements are bool"},
		{"numbers as segments", []string{"--segments", path + "#q"}, path + "#q: elements are f4, they must be integers"},
		{"no segments", []string{"--segments", path + "#none"}, "#none: shape [0] has no numbers"},
		{"segments without a name", []string{"--segments", path}, ": name one of its tensors as " + path + "#NAME"},
		{"integers as sinks", []string{"--sinks", path + "#ids"}, "#ids: elements are u1"},
		{"mixed types", []string{"--v", path + "#half"}, "#half: elements are f2, those of --q " + path + "#q are f4: choose a type with --dtype"},
		{"f16 and bf16", []string{"--q", path + "#half", "--k", path + "#half", "--v", path + "#brain"}, "#brain: elements are bf16, those of --q " + path + "#half are f2"},
		{"5-D", []string{"--q", path + "#cube"}, "#cube: shape [1 1 1 6 8] has 5 axes"},
	} {
		args := []string{"run", "--backend=cpu", "--out", dir + "/o.npy", "--q", path + "#q", "--k", path + "#q", "--v", path + "#q"}
		for i := 0; i < len(c.args); i += 2 {
			if at := slices.Index(args, c.args[i]); at >= 0 {
				args[at+1] = c.args[i+1]
			} else {
				args = append(args, c.args[i:i+2]...)
			}
		}
		mustFail(t, c.want, args...)
		if got := clitest.Files(t, dir); !slices.Equal(got, before) {
			t.Errorf("%s: the folder holds %v", c.name, got)
		}
	}
}
