package tune

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/alecthomas/kong"
	"github.com/google/go-cmp/cmp"
	"github.com/seed90331342/attn/cmd/attn/internal/bench"
	"github.com/seed90331342/attn/cmd/internal/cli"
	"github.com/seed90331342/attn/cmd/internal/cli/clitest"
	"github.com/seed90331342/attn/gpu"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

func grammar() any {
	return &struct {
		Tune  Command       `cmd:""`
		Bench bench.Command `cmd:""`
	}{}
}

var program = cli.Program{Name: "attn", Grammar: grammar, Options: []kong.Option{bench.Vars()}}

var _, mustRun, mustFail = clitest.Named(program)

// TestMain runs the command line in place of the tests in processes that tests start.
func TestMain(m *testing.M) { clitest.Main(m, func() { program.Main(os.Args[1:]) }) }

// TestTune measures a shape. It then shows the kept choice, uses it and clears it.
func TestTune(t *testing.T) {
	clitest.NeedBackend(t, "gpu")
	if runtime.GOOS != "linux" {
		t.Skip("the user's cache folder can be moved on Linux only")
	}
	cache := t.TempDir()
	mustFail(t, "nonesuch", "tune", "--file", filepath.Join(cache, "x.json"), "--backend", "gpu:nonesuch")
	shaders := os.Getenv("MESA_SHADER_CACHE_DIR")
	if shaders == "" { // that of compiled shaders stays
		if dir, err := os.UserCacheDir(); err == nil {
			shaders = dir
		}
	}
	process := func(args ...string) (stdout, stderr string) {
		t.Helper()
		cmd := clitest.Process(args...)
		cmd.Env = append(cmd.Env, "XDG_CACHE_HOME="+cache, "MESA_SHADER_CACHE_DIR="+shaders)
		var out, err bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &err
		if e := cmd.Run(); e != nil {
			t.Fatalf("attn %s: %v, %s", strings.Join(args, " "), e, err.String())
		}
		return out.String(), err.String()
	}
	plan := func() string {
		t.Helper()
		out, _ := process("bench", "--backend", "gpu", "--heads", "1", "--seq", "500", "--dim", "32", "--plan")
		return out
	}
	if out := plan(); !strings.Contains(out, "this shape was not measured") {
		t.Errorf("before: %s", out)
	}
	out, stderr := process("tune", "--dim", "32", "--seq", "300,512")
	row := regexp.MustCompile(`(?m)^  \S+ +[0-9.]+ +[0-9.]+ +[0-9.]+% `)
	if n := len(row.FindAllString(out, -1)); n < 4 || strings.Count(out, "fastest, in use") != 1 || stderr != "" {
		t.Errorf("%d variants were timed:\n%s%s", n, out, stderr)
	}
	path := filepath.Join(cache, "attn", "tuning.json")
	list, err := gpu.ReadTuneFile(path)
	if err != nil || len(list) != 1 || list[0].Peak <= 0 {
		t.Fatalf("the file holds %+v, %v", list, err)
	}
	if out := plan(); !strings.Contains(out, "measured on") {
		t.Errorf("after: %s", out)
	}
	shown, _ := process("tune", "--show")
	if !strings.Contains(shown, list[0].Device.Adapter) || strings.Count(shown, "fastest, in use") != 1 {
		t.Errorf("shown: %s", shown)
	}
	if out, _ := process("tune", "--clear"); !strings.Contains(out, "1 entries removed") {
		t.Errorf("cleared: %s", out)
	}
	if out, _ := process("tune", "--show"); !strings.Contains(out, "no measurements") {
		t.Errorf("shown after: %s", out)
	}
}

// TestTuneFiles shows files that are of no use.
func TestTuneFiles(t *testing.T) {
	for _, c := range []struct{ name, data, says string }{
		{"damaged", `{"format": "attn tuning"`, "damaged"},
		{"foreign", `{"name": "left-pad"}`, "not a tuning file"},
		{"newer", `{"format": "attn tuning", "version": 99}`, "another version"},
	} {
		path := filepath.Join(t.TempDir(), "tuning.json")
		must.Do(t, os.WriteFile(path, []byte(c.data), 0o600))
		mustFail(t, path+" … "+c.says, "tune", "--show", "--file", path)
		must.Fail(t, c.name, must.Err(gpu.ReadTuneFile(path)), kernels.ErrFile)
	}
}

// TestEmit writes the kernels of some calls, with -short of every second, and reads them as another program would.
func TestEmit(t *testing.T) {
	t.Setenv("VK_DRIVER_FILES", "/nonexistent") // no device is needed
	f32, bf16 := []string{"f32", "f32", "f32"}, []string{"bf16", "bf16", "bf16"}
	for i, c := range []struct {
		args string
		want []string    // among the names
		work []simulated // of those that are named, without what depends on the source
	}{
		{"--seq 2k --heads 16 --dim 32,64", []string{"flash-032-L-f32-2048", "flash-064-L-registers-f32-2048", "attention-064-f32-2048"}, []simulated{
			// 16 blocks of 128 rows. Workgroup 16 is the second of the first head: block 9.
			{Name: "flash-064-L-f32-2048", Total: 256, Group: 16, Useful: 128 * 2048 * 2 * 64, First: 1152, Rows: 128, Data: f32},
			{Name: "flash-032-M-f32-2048", Total: 512, Group: 16, Useful: 64 * 2048 * 2 * 32, First: 1088, Rows: 64, Data: f32},
		}},
		{"--seq 2k --heads 16 --dim 64 --dtype f32,bf16 --causal", []string{"flash-064-S-f32-causal-2048", "flash-064-M-bf16-causal-2048"}, []simulated{
			// Block 8, rows 1024 to 1151, which see 1025 to 1152 keys.
			{Name: "flash-064-L-f32-causal-2048", Total: 256, Group: 112, Useful: 128 * (1025 + 1152) / 2 * 2 * 64, First: 1024, Rows: 128, Data: f32},
			{Name: "flash-064-L-bf16-causal-2048", Total: 256, Group: 112, Useful: 128 * (1025 + 1152) / 2 * 2 * 64, First: 1024, Rows: 128, Data: bf16},
		}},
		{"--seq 256 --dim 64 --causal --alibi --mask --bias --softcap", []string{"flash-064-S-f32-causal-mask-bias-alibi-softcap-256"}, []simulated{
			{Name: "flash-064-L-f32-causal-mask-bias-alibi-softcap-256", Total: 2, Group: 0, Useful: 128 * (129 + 256) / 2 * 2 * 64, Data: []string{"f32", "f32", "f32", "bool", "f32"}},
		}},
		{"--seq 16k --seq-q 1 --heads 32 --kv-heads 8 --dim 128 --q8", []string{"splitmerge-128-f32-q8-kv8-1x16384"}, []simulated{
			// 64 splits of 256 keys of 8 heads, 4 rows each. A row of int8 has 4 bytes of scale.
			{Name: "decode-128-r4-f32-q8-kv8-1x16384", Total: 512, Group: 32, Useful: 4 * 256 * 2 * 128, Bytes: 2 * 256 * 132, First: 8192, Rows: 256, Data: []string{"f32", "q8", "q8"}},
		}},
		{"--seq 16k --seq-q 1 --heads 32 --kv-heads 8 --dim 128 --q4", []string{"splitmerge-128-f32-q4-kv8-1x16384"}, []simulated{
			// A row of q4 has 18 bytes for each 32 elements.
			{Name: "decode-128-r4-f32-q4-kv8-1x16384", Total: 512, Group: 32, Useful: 4 * 256 * 2 * 128, Bytes: 2 * 256 * 72, First: 8192, Rows: 256, Data: []string{"f32", "q4", "q4"}},
		}},
		{"--seq 16k --seq-q 1 --heads 32 --kv-heads 8 --dim 128 --f8", []string{"splitmerge-128-f32-f8-kv8-1x16384"}, []simulated{
			{Name: "decode-128-r4-f32-f8-kv8-1x16384", Total: 512, Group: 32, Useful: 4 * 256 * 2 * 128, Bytes: 2 * 256 * 128, First: 8192, Rows: 256, Data: []string{"f32", "f8", "f8"}},
		}},
		{"--seq 1k --seq-q 1 --heads 4 --kv-heads 1 --dim 64 --dtype f16", []string{"decode-064-r4-f16-kv1-1x1024"}, []simulated{
			{Name: "decode-064-r4-f16-kv1-1x1024", Total: 4, Group: 2, Useful: 4 * 256 * 2 * 64, Bytes: 2 * 256 * 128, First: 512, Rows: 256, Data: []string{"f16", "f16", "f16"}},
		}},
		{"--seq 512 --dim 64 --dtype bf16 --staged", []string{"matmul-064-qk-L-bf16-512", "matmul-064-pv-S-bf16-512", "softmax-064-bf16-512"}, []simulated{
			{Name: "matmul-064-qk-L-bf16-512", Total: 32, Group: 16, Useful: 512 * 512 * 64 / 32, Data: []string{"bf16", "bf16"}},
			{Name: "matmul-064-pv-L-bf16-512", Total: 4, Group: 2, Useful: 512 * 512 * 64 / 4, Data: []string{"f32", "bf16"}},
			{Name: "softmax-064-bf16-512", Total: 512, Group: 256, Bytes: 4 * 512, Data: []string{"bool"}},
		}},
		{"--seq 200 --heads 4 --kv-heads 2 --dim 80 --causal --gradients", []string{"delta-080-f32-kv2-causal-200", "convert-080-f32-kv2-causal-200"}, []simulated{
			// The third of five blocks of 48 keys, which 104 to 57 rows see, of two query heads each, and the second of three
			// blocks of 96 rows, which see 97 to 192 keys.
			{Name: "gradient-080-dkv-f32-kv2-causal-200", Total: 10, Group: 4, Useful: 4 * 80 * 2 * 48 * (57 + 104) / 2, First: 96, Rows: 48, Data: f32},
			{Name: "gradient-080-dq-f32-kv2-causal-200", Total: 12, Group: 4, Useful: 3 * 80 * 96 * (97 + 192) / 2, First: 96, Rows: 96, Data: f32},
		}},
	} {
		if testing.Short() && i%3 > 0 {
			continue
		}
		dir := filepath.Join(t.TempDir(), "new", "folder")
		out := mustRun(t, append([]string{"tune", "--emit", dir}, strings.Fields(c.args)...)...)
		paths := must.Get(filepath.Glob(filepath.Join(dir, "*.json")))(t)
		var names []string
		for _, path := range paths {
			e := emitted{simulation: new(simulation)}
			text, err := os.ReadFile(path)
			if err == nil {
				err = json.Unmarshal(text, &e)
			}
			must.Do(t, err)
			base := strings.TrimSuffix(path, ".json")
			names = append(names, e.Name)
			wgsl, err := os.ReadFile(base + ".wgsl")
			spirv, err2 := os.ReadFile(base + ".spv")
			must.Do(t, errors.Join(err, err2))
			if slices.Contains([]string{"flash", "decode", "matmul", "softmax", "gradient"}, e.Kernel) {
				checkSimulation(t, base)
			}
			if filepath.Base(base) != e.Name || !strings.Contains(out, e.Name+": ") || !strings.Contains(string(wgsl), "fn "+e.Entry+"(") ||
				len(spirv)%4 != 0 || binary.LittleEndian.Uint32(spirv) != 0x07230203 ||
				len(e.Bindings) == 0 || len(e.Uniform) == 0 || e.Groups < 1 || e.Threads < 1 {
				t.Errorf("attn tune %s: %s is %+v, %d bytes of WGSL and %d of SPIR-V", c.args, path, e.Call, len(wgsl), len(spirv))
			}
		}
		for _, name := range c.want {
			if !slices.Contains(names, name) {
				t.Errorf("attn tune %s wrote %q, not %s", c.args, names, name)
			}
		}
		for _, want := range c.work {
			got := readSimulated(t, filepath.Join(dir, want.Name))
			want.Threads, want.Sizes, want.Strides, want.Params, want.Args = got.Threads, got.Sizes, got.Strides, got.Params, got.Args
			if got.Data = got.Data[:min(len(want.Data), len(got.Data))]; !cmp.Equal(want, got) || len(got.Params) == 0 {
				t.Errorf("attn tune %s: (-want +got)\n%s", c.args, cmp.Diff(want, got))
			}
		}
		if n := strings.Count(out, "\n"); n != len(names)+1 {
			t.Errorf("attn tune %s: %d lines for %d kernels", c.args, n, len(names))
		}
	}
}

// simulated is what a simulator of NVIDIA GPUs reads of a kernel.
type simulated struct {
	Name                  string
	Threads, Total, Group int
	Sizes, Strides        []uint64
	Params                []uint32
	Args, Data            []string
	Useful, Bytes         float64
	First, Rows           int
}

func readSimulated(t *testing.T, base string) (x simulated) {
	t.Helper()
	text, err := os.ReadFile(base + ".json")
	if err == nil {
		err = json.Unmarshal(text, &x)
	}
	must.Do(t, err)
	return x
}

// checkSimulation checks that a kernel in CUDA takes the arguments that its JSON lists.
func checkSimulation(t *testing.T, base string) {
	t.Helper()
	x := readSimulated(t, base)
	cuda := clitest.ReadFile(t, base+".cu")
	wgsl := clitest.ReadFile(t, base+".wgsl")
	bindings := regexp.MustCompile(`@binding\((\d+)\) var<(\w+)[^>]*> (\w+): (.*);`).FindAllStringSubmatch(string(wgsl), -1)
	if len(x.Sizes) != len(bindings) || len(x.Strides) != len(bindings) || len(x.Data) != len(bindings) || x.Group < 0 || x.Group >= x.Total {
		t.Fatalf("%s has %d bindings, its simulation is %+v", base, len(bindings), x)
	}
	number := map[string]string{"p": "p"}
	for i, b := range bindings {
		if b[2] != "uniform" {
			number[b[3]] = b[1]
		} else if x.Sizes[i] != 0 {
			t.Errorf("%s: a uniform of %d bytes", base, x.Sizes[i])
		}
		stride := map[string]uint64{"array<vec4<u32>>": 16, "array<vec4<f32>>": 16, "array<vec2<u32>>": 8}[b[4]]
		if x.Strides[i] != max(stride, 4) {
			t.Errorf("%s: binding %s is %s with elements of %d bytes", base, b[3], b[4], x.Strides[i])
		}
	}
	head := regexp.MustCompile(`extern "C" __global__ __attribute__\(\(launch_bounds\((\d+)\)\)\) void main_\(\n((?s:.*?))\n\) \{\n    uint t = verdict_thread\(\);`).FindStringSubmatch(string(cuda))
	if head == nil || head[1] != fmt.Sprint(x.Threads) {
		t.Fatalf("%s: %q is not the head of a kernel in CUDA with %d threads", base, head, x.Threads)
	}
	var args []string
	for line := range strings.Lines(head[2]) {
		words := strings.Fields(line)
		name := words[len(words)-1]
		if name != "_buffer_sizes" {
			args = append(args, number[regexp.MustCompile(`_\d*$`).ReplaceAllString(name, "")])
			continue
		}
		arg := "s"
		for _, m := range regexp.MustCompile(`(?m)^    uint size(\d+);$`).FindAllStringSubmatch(string(cuda), -1) {
			arg += " " + m[1]
		}
		args = append(args, arg)
	}
	if !slices.Equal(args, x.Args) || slices.Contains(args, "") {
		t.Errorf("%s: the kernel has the arguments %q, the JSON %q", base, args, x.Args)
	}
	for _, metal := range []string{"[[", "#include", "using metal", "kernel void"} {
		if strings.Contains(string(cuda), metal) {
			t.Errorf("%s: the CUDA has %q", base, metal)
		}
	}
}
