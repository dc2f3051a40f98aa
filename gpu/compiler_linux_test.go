package gpu

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/source"
	"github.com/seed90331342/attn/gpu/internal/wgsl"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// radv is the manifest of Mesa's driver for AMD GPUs in Debian. It contains a compiler and
// compiles for a GPU that is not there when RADV_FORCE_FAMILY names one.
const radv = "/usr/share/vulkan/icd.d/radeon_icd.x86_64.json"

// compiledKernel is a kernel with what a compiler for GPUs made of it.
type compiledKernel struct {
	KernelSource
	name  string
	stats map[string]int // of the compiler, and those that the test counts itself
}

// Stats that the test counts itself.
const (
	dynamicRule = "dynamic indices of private arrays"
	waitRule    = "loads of k and v waited for at once"
)

// rules are the most that kernels may have of a stat, and those that decode.
var rules = []struct {
	stat         string
	most, decode int
}{
	{"VGPRs", 224, 96},
	{"Spilled VGPRs", 0, 0},
	{"Spilled SGPRs", 0, 0},
	{"Scratch size", 0, 0},
	{dynamicRule, 0, 0},
	{waitRule, math.MaxInt, 0},
}

// exceptions are the kernels that break a rule today, with their largest figure. An exception
// goes when its kernels keep the rule.
var exceptions = []struct {
	kernels *regexp.Regexp
	stat    string
	figure  int
	why     string
}{
	{regexp.MustCompile(`^flash-(080|128)-L32-`), "VGPRs", 240, "32 KiB of workgroup memory, for devices on which it was measured"},
	{regexp.MustCompile(`^flash-032-L32-`), "VGPRs", 256, "32 KiB of workgroup memory, as above"},
	{regexp.MustCompile(`^flash-256-L`), "VGPRs", 256, "a thread has 8 rows of 16 columns"},
	{regexp.MustCompile(`^decode-(032|064|128)-r4-f32$`), "VGPRs", 128, "this compiler loads 16 vec4 of weights at once, also where only 4 values are loaded ahead"},
	{regexp.MustCompile(`^decode-(080|096|128)-.*f16$`), "VGPRs", 128, "a thread converts two columns of up to 16 keys at once"},
	{regexp.MustCompile(`^decode-080-.*f16$`), waitRule, 2, "the compiler swaps registers of the next chunk of K right after it loads them"},
	{regexp.MustCompile(`^decode-256-`), "VGPRs", 160, "a thread has four columns of up to 4 rows, or eight of 2"},
}

// exceptionsOf is the version of the driver that exceptions are for. Other versions may need fewer.
const exceptionsOf = "22.3.6"

// TestCompiler compiles the kernels for an AMD GPU of 2020 (navi21), without one, and holds the
// machine code to the rules. It prints a line a kernel. Where the environment variable ATTN_RADV
// names the manifest of a newer driver, it also compiles for RDNA 3 and 4, without spills and
// scratch memory. No kernel has fewer waves a SIMD than testdata/waves.txt has.
func TestCompiler(t *testing.T) {
	if _, err := os.Stat(radv); err != nil {
		t.Skipf("needs Mesa's driver for AMD GPUs (mesa-vulkan-drivers): %v", err)
	}
	program := buildCompiler(t)
	kernels := shippedKernels(t)
	waves := readWaves(t)
	version := compileAll(t, program, radv, "navi21", kernels)
	waves.check(t, "navi21", version, kernels)
	matched, needed := make([]bool, len(exceptions)), make([]bool, len(exceptions))
	for _, k := range kernels {
		t.Logf("%-30s registers %3d, workgroup memory %5d, instructions %5d, branches %4d, waves a SIMD %2d", k.name,
			k.stats["VGPRs"], k.stats["LDS size"], k.stats["Instructions"], k.stats["Branches"], k.stats["Subgroups per SIMD"])
		for _, r := range rules {
			rule := r.most
			if k.Kernel == "decode" {
				rule = r.decode
			}
			most := rule
			for i, x := range exceptions {
				if x.stat == r.stat && x.kernels.MatchString(k.name) {
					matched[i], needed[i] = true, needed[i] || k.stats[r.stat] > rule
					most = x.figure
				}
			}
			if n := k.stats[r.stat]; n > most {
				t.Errorf("%s: %d %s, at most %d are allowed", k.name, n, r.stat, most)
			}
		}
	}
	for i, x := range exceptions {
		if matched[i] && !needed[i] && version == exceptionsOf && !testing.Short() {
			t.Errorf("%v keep the rule about %s: the exception (%s) is not needed", x.kernels, x.stat, x.why)
		}
	}
	if newer := os.Getenv("ATTN_RADV"); newer == "" {
		t.Log("not compiled for navi31 and gfx1201: ATTN_RADV names no manifest of Mesa 25 or later")
	} else {
		for _, family := range []string{"navi31", "gfx1201"} {
			version := compileAll(t, program, newer, family, kernels)
			waves.check(t, family, version, kernels)
			for _, k := range kernels {
				for _, stat := range []string{"Spilled VGPRs", "Spilled SGPRs", "Scratch size"} {
					if n := k.stats[stat]; n > 0 {
						t.Errorf("%s for %s, Mesa %s: %s: %d", k.name, family, version, stat, n)
					}
				}
			}
		}
	}
	waves.write(t, kernels)
}

// buildCompiler builds testdata/vkcompile.
func buildCompiler(t *testing.T) string {
	t.Helper()
	gcc, err := exec.LookPath("gcc")
	if err != nil {
		t.Skipf("needs gcc to build a program that calls Vulkan: %v", err)
	}
	program := filepath.Join(t.TempDir(), "compile")
	if out, err := exec.CommandContext(t.Context(), gcc, "-O1", "-o", program, filepath.Join("testdata", "vkcompile", "compile.c"), "-lvulkan").CombinedOutput(); err != nil {
		t.Skipf("needs Vulkan's headers (libvulkan-dev) to build a program: %v\n%.300s", err, out)
	}
	return program
}

// softwareExp2 names kernels that do not use the device's exp2.
const softwareExp2 = "software-exp2"

// shippedKernels returns the kernels of calls with head sizes of every tiling and of every type of
// storage, each once. All of them take a processor several minutes; with -short only those of
// head size 64 without 16-bit types and options.
func shippedKernels(t *testing.T) (list []*compiledKernel) {
	t.Helper()
	seen := map[string]bool{}
	add := func(suffix string, q, k backend.Shape, in, kv backend.DType, staged bool, change func(c *backend.Call)) {
		x, kept := metaOf(t, in, q), metaOf(t, kv, k)
		c := &backend.Call{Q: x, K: kept, V: kept, O: x, Problem: backend.Problem{Scale: 1, Visible: backend.Everything()}}
		if change != nil {
			change(c)
		}
		sources := must.Get(kernelSources(c, staged, suffix != softwareExp2))(t)
		sources = append(sources, gradientSources(t, c)...)
		for _, s := range sources {
			if seen[s.WGSL] {
				continue
			}
			seen[s.WGSL] = true
			name := []string{s.Kernel, fmt.Sprintf("%03d", q[backend.Dim])}
			if s.Kernel == "decode" {
				name = append(name, fmt.Sprintf("r%d", s.Constants["ROWS"]))
			} else if s.Kernel == "gradient" {
				name = append(name, []string{"dkv", "dq", "ds"}[s.Constants["OF"]])
			} else if s.Variant != "" {
				name = append(name, strings.NewReplacer(" ", "-", "/", "-").Replace(s.Variant))
			}
			name = append(name, kv.String())
			if suffix != "" {
				name = append(name, suffix)
			}
			list = append(list, &compiledKernel{KernelSource: s, name: strings.Join(name, "-")})
		}
	}
	f32 := backend.F32
	dims, types := []int{32, 64, 80, 96, 128, 256}, []backend.DType{backend.F32, backend.BF16, backend.F16}
	if testing.Short() {
		dims, types = []int{64}, types[:1]
	}
	const n = 4096
	for _, d := range dims {
		long := backend.Shape{1, 16, n, d}
		for _, dtype := range types {
			add("", long, long, dtype, dtype, false, nil)
		}
		if !testing.Short() {
			add(softwareExp2, long, long, f32, f32, false, nil)
			add("mask", long, long, f32, f32, false, func(c *backend.Call) {
				c.Mask, _ = backend.Meta(backend.Bool, backend.Shape{1, 1, n, n})
			})
			add("alibi", long, long, f32, f32, false, func(c *backend.Call) { c.Slopes = make([]float32, long[backend.Heads]) })
			add("softcap", long, long, f32, f32, false, func(c *backend.Call) { c.Softcap = 30 })
			add("bias", long, long, f32, f32, false, func(c *backend.Call) {
				c.Bias, _ = backend.Meta(f32, backend.Shape{1, 1, n, n})
			})
		}
		for _, rows := range []int{1, 4, 8} {
			for _, dtype := range append(slices.Clip(types), backend.Q8, backend.Q4, backend.F8) {
				if dtype == backend.Q4 && d%32 != 0 {
					continue
				}
				in := dtype
				if dtype.Quantised() {
					in = f32
				}
				add("", backend.Shape{1, 8 * rows, 1, d}, backend.Shape{1, 8, n, d}, in, dtype, false, nil)
			}
		}
		add("", long, long, f32, f32, true, nil)
	}
	return list
}

// gradientSources returns the kernels of the gradients of c, unless its keys are quantised.
func gradientSources(t *testing.T, c *backend.Call) []KernelSource {
	t.Helper()
	if c.K.DType().Quantised() {
		return nil
	}
	d := c.Dims()
	g := &backend.Gradients{Call: *c, DO: c.O, DQ: c.Q, DK: c.K, DV: c.V, DBias: metaOf(t, backend.F32, backend.Shape{1, 1, d.SeqQ, d.SeqK})}
	g.LSE = metaOf(t, backend.F32, backend.Shape{d.Batch, d.Heads, d.SeqQ, 1})
	return must.Get(GradientSources(g))(t)
}

// compileAll sets stats for a family of GPUs and returns the version of the driver
// with that manifest. A process compiles on one thread.
func compileAll(t *testing.T, program, manifest, family string, kernels []*compiledKernel) (version string) {
	t.Helper()
	// A driver outside the system's folders has its libraries next to it.
	var driver struct {
		ICD struct {
			Path string `json:"library_path"`
		}
	}
	text := must.Get(os.ReadFile(manifest))(t)
	check(t, json.Unmarshal(text, &driver))
	libraries := filepath.Dir(driver.ICD.Path) + ":" + os.Getenv("LD_LIBRARY_PATH")
	dir := t.TempDir()
	var inputs [2]bytes.Buffer
	for i, k := range kernels {
		var code bytes.Buffer
		_ = binary.Write(&code, binary.LittleEndian, k.SPIRV) // a buffer takes everything
		check(t, os.WriteFile(filepath.Join(dir, fmt.Sprint(i)), code.Bytes(), 0o600))
		fmt.Fprintf(&inputs[i%len(inputs)], "%d ", i)
		for _, b := range k.Bindings {
			inputs[i%len(inputs)].WriteByte(map[bool]byte{true: 'u', false: 's'}[b.Kind == "uniform"])
		}
		inputs[i%len(inputs)].WriteByte('\n')
	}
	var wg sync.WaitGroup
	var outputs [len(inputs)][]byte
	for i := range inputs {
		wg.Go(func() {
			cmd := exec.CommandContext(t.Context(), program)
			cmd.Dir, cmd.Stdin = dir, &inputs[i]
			cmd.Env = append(os.Environ(), "VK_ICD_FILENAMES="+manifest, "VK_DRIVER_FILES="+manifest, "LD_LIBRARY_PATH="+libraries, "RADV_FORCE_FAMILY="+family, "RADV_PERFTEST=cswave32", "MESA_SHADER_CACHE_DISABLE=true")
			var stderr bytes.Buffer
			cmd.Stderr = &stderr
			var err error
			if outputs[i], err = cmd.Output(); err != nil {
				t.Errorf("the compiler: %v\n%s", err, stderr.Bytes())
			}
		})
	}
	wg.Wait()
	for _, out := range outputs {
		head, _, _ := strings.Cut(string(out), "\n")
		version = strings.TrimPrefix(head, "driver ")
		for text := range strings.SplitSeq(string(out), "\nkernel ") {
			name, text, _ := strings.Cut(text, "\n")
			if n, err := strconv.Atoi(name); err == nil {
				kernels[n].read(text)
			}
		}
	}
	for _, k := range kernels {
		if k.stats["Instructions"] == 0 {
			t.Fatalf("%s was not compiled", k.name)
		}
	}
	return version
}

var (
	statLine    = regexp.MustCompile(`(?m)^stat (.*) = (\d+)$`)
	descriptor  = regexp.MustCompile(`s_load_dwordx(\d+) s\[(\d+):\d+\], s\[2:3\], (null|0x[0-9a-f]+)`)
	globalLoad  = regexp.MustCompile(`buffer_load_\w+ .*, s\[(\d+):\d+\],`)
	waitForAll  = regexp.MustCompile(`s_waitcnt .*vmcnt\(0\)`)
	instruction = regexp.MustCompile(`(?m)^\t\S.*$`)
)

// read sets the stats of k from what vkcompile printed.
func (k *compiledKernel) read(text string) {
	stats, code, _ := strings.Cut(text, "\ncode\n")
	k.stats = map[string]int{dynamicRule: dynamicIndices(k.SPIRV), waitRule: k.waits(instruction.FindAllString(code, -1))}
	for _, m := range statLine.FindAllStringSubmatch("\n"+stats, -1) {
		k.stats[m[1]], _ = strconv.Atoi(m[2]) // hashes are too large
	}
}

// waits counts the loads of k and v that one of the next two instructions waits for.
func (k *compiledKernel) waits(code []string) (n int) {
	bound := map[string]int{} // bindings by the first register of the descriptor
	for i, line := range code {
		if m := descriptor.FindStringSubmatch(line); m != nil {
			at, _ := strconv.ParseInt(strings.TrimPrefix(m[3], "0x"), 16, 32) // null is 0
			first, _ := strconv.Atoi(m[2])
			words, _ := strconv.Atoi(m[1])
			for j := 0; j < words; j += 4 {
				bound[strconv.Itoa(first+j)] = int(at)/16 + j/4
			}
		}
		m := globalLoad.FindStringSubmatch(line)
		if m == nil {
			continue
		}
		b, ok := bound[m[1]]
		if !ok || k.Bindings[b].Name != "k" && k.Bindings[b].Name != "v" {
			continue
		}
		if slices.ContainsFunc(code[i+1:min(i+3, len(code))], waitForAll.MatchString) {
			n++
		}
	}
	return n
}

// dynamicIndices counts the accesses of a SPIR-V module to private arrays by an index that is
// not constant. Drivers may keep such an array in memory.
func dynamicIndices(words []uint32) (n int) {
	const (
		opConstantTrue, opConstantNull, opSpecConstant = 41, 46, 50
		opVariable, opAccessChain, opInBounds          = 59, 65, 66
		classPrivate, classFunction                    = 6, 7
	)
	constant, private := map[uint32]bool{}, map[uint32]bool{}
	for i := 5; i < len(words); {
		op, in := words[i]&0xffff, words[i:i+int(words[i]>>16)]
		i += len(in)
		switch {
		case op >= opConstantTrue && op <= opConstantNull || op == opSpecConstant:
			constant[in[2]] = true
		case op == opVariable:
			private[in[2]] = in[3] == classPrivate || in[3] == classFunction
		case (op == opAccessChain || op == opInBounds) && private[in[3]]:
			private[in[2]] = true
			if slices.ContainsFunc(in[4:], func(index uint32) bool { return !constant[index] }) {
				n++
			}
		}
	}
	return n
}

// dynamicIndices counts accesses by a variable, and none by a constant or of other memory.
func TestDynamicIndices(t *testing.T) {
	const shader = `
@group(0) @binding(0) var<storage, read_write> x: array<f32>;
var<workgroup> w: array<f32, 64>;
@compute @workgroup_size(64)
fn main(@builtin(local_invocation_index) t: u32) {
	var a: array<f32, 4>;
	var b: array<vec4<f32>, 2>;
	w[t] = x[t];
	a[1] = w[63u - t];
	b[1].x = 2.0;
	x[t] = a[INDEX] + b[1].x;
}`
	for index, want := range map[string]bool{"1": false, "t % 4u": true} {
		words := must.Get(wgsl.SPIRV(strings.ReplaceAll(shader, "INDEX", index)))(t)
		if n := dynamicIndices(words); n > 0 != want {
			t.Errorf("a[%s]: %d dynamic indices, want some: %v", index, n, want)
		}
	}
}

// waits counts loads of K and V alone, and waits within two instructions.
func TestWaits(t *testing.T) {
	k := compiledKernel{KernelSource: KernelSource{Bindings: []source.Binding{{Name: "q"}, {Name: "k"}, {Name: "v"}, {Name: "p"}}}}
	load := func(binding string, rest ...string) []string {
		return append([]string{"\ts_load_dwordx4 s[36:39], s[2:3], " + binding, "\tbuffer_load_dwordx4 v[16:19], v3, s[36:39], 0 offen"}, rest...)
	}
	const all, some, other = "\ts_waitcnt vmcnt(0)", "\ts_waitcnt vmcnt(1)", "\tv_mov_b32_e32 v1, v2"
	for _, c := range []struct {
		code []string
		want int
	}{
		{load("0x10", all), 1},
		{load("0x20", other, all), 1},
		{load("0x20", other, other, all), 0},
		{load("0x10", some), 0},
		{load("null", all), 0},
		{load("0x30", all), 0},
		{load("0x10"), 0},
	} {
		if n := k.waits(c.code); n != c.want {
			t.Errorf("%d waits, want %d:\n%s", n, c.want, strings.Join(c.code, "\n"))
		}
	}
}
