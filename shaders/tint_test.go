package shaders_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
	"github.com/seed90331342/attn/shaders"
)

// tint compiles WGSL with Tint, the compiler of Chrome, Edge and Dawn, and returns its errors
// and warnings, a line each, by the modules' names. It follows the specification where naga
// accepts more. Without Node or Tint the test is skipped, or fails where CI promises them.
func tint(t *testing.T, modules map[string]string) map[string][]string {
	t.Helper()
	missing := t.Skipf
	if os.Getenv("CI") == "true" {
		missing = t.Fatalf
	}
	node, err := exec.LookPath("node")
	if err != nil {
		missing("node is not installed, kernels are not compiled with Tint (on Debian: apt-get install nodejs npm)")
	}
	dir := t.TempDir()
	for name, src := range modules {
		must.Do(t, os.WriteFile(filepath.Join(dir, name+".wgsl"), []byte(src), 0o600))
	}
	var stderr strings.Builder
	cmd := exec.CommandContext(t.Context(), node, "testdata/tint/compile.mjs", dir)
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ExitCode() == 2 {
		missing("kernels are not compiled with Tint (cd shaders/testdata/tint && npm ci --ignore-scripts): %s", strings.TrimSpace(stderr.String()))
	}
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	last := len(lines) - 1
	if want := fmt.Sprintf("%d files", len(modules)); lines[last] != want || (err != nil) != (last > 0) {
		t.Fatalf("compile.mjs: %v, %q is not %q\n%s", err, lines[last], want, stderr.String())
	}
	messages := map[string][]string{}
	for _, line := range lines[:last] {
		name, message, _ := strings.Cut(line, ".wgsl:")
		messages[name] = append(messages[name], message)
	}
	return messages
}

// wantNone fails the test for each kind of message, with the first module that has it.
func wantNone(t *testing.T, modules map[string]string) {
	t.Helper()
	first, count := map[string]string{}, map[string]int{}
	rejected := tint(t, modules)
	for name, messages := range rejected {
		for _, m := range messages {
			at, kind, _ := strings.Cut(m, ": ")
			if count[kind]++; first[kind] == "" {
				first[kind] = name + ":" + at
			}
		}
	}
	for kind, n := range count {
		t.Errorf("%d times %s, first in %s", n, kind, first[kind])
	}
	t.Logf("%d modules, %d of them with messages", len(modules), len(rejected))
}

// Tint rejects what naga accepts, and its warnings count.
func TestTintFinds(t *testing.T) {
	const out = "@group(0) @binding(0) var<storage, read_write> o: array<u32>;\n"
	const main = "@compute @workgroup_size(1) fn main(@builtin(global_invocation_id) id: vec3<u32>) {\n"
	want := map[string]string{
		"infinity":    "error: value -inf cannot be represented as 'f32'",
		"hidden":      "error: cannot use 'let paired' as call target",
		"parentheses": "error: mixing '|' and '<<' requires parenthesis",
		"unreachable": "warning: code is unreachable",
		"right":       "",
	}
	got := tint(t, map[string]string{
		"infinity":    "const MINUS_INF: u32 = 0xff800000u;\n" + out + main + "o[id.x] = u32(bitcast<f32>(MINUS_INF) < 0.0); }",
		"hidden":      out + "fn paired(x: u32) -> u32 { return x; }\n" + main + "let paired = id.x;\no[paired] = paired(id.y); }",
		"parentheses": out + main + "o[id.x] = id.y | id.z << 8u; }",
		"unreachable": out + main + "return;\no[0] = 1u; }",
		"right":       out + main + "o[id.x] = id.y | (id.z << 8u); }",
	})
	for name, message := range want {
		if all := strings.Join(got[name], "\n"); (all == "") != (message == "") || !strings.Contains(all, message) {
			t.Errorf("%s: %q, want %q", name, all, message)
		}
	}
}

// TestKernelsCompileInTint compiles what TestKernelsCompile compiles.
func TestKernelsCompileInTint(t *testing.T) {
	modules := map[string]string{}
	shaders.Rendered(t, func(name, src string) { modules[fmt.Sprintf("%s-%d", name, len(modules))] = src })
	wantNone(t, modules)
}

// TestEmittedKernelsCompileInTint compiles what attn tune --emit writes.
func TestEmittedKernelsCompileInTint(t *testing.T) {
	modules := map[string]string{}
	distinct := map[string]bool{}
	for i, c := range emissions() {
		if testing.Short() && (c.departures() > 1 || c.departures() == 1 && i%9 > 0) {
			continue
		}
		list := must.Get(gpu.KernelSources(c.call(t), c.staged))(must.In(t, "%+v", c))
		for _, k := range list {
			if !distinct[k.WGSL] {
				distinct[k.WGSL] = true
				modules[fmt.Sprintf("%s-%03d-%s-%v-%d", k.Kernel, c.dim, strings.ReplaceAll(k.Variant, "/", "-"), c.in, len(modules))] = k.WGSL
			}
		}
	}
	wantNone(t, modules)
}

// emission is a call of attn tune --emit.
type emission struct {
	dim         int
	in, kv      backend.DType
	seqQ, group int    // query heads on a key head
	option      string // none, one or all
	staged      bool
}

// emissions returns calls that differ in their kernels.
func emissions() (all []emission) {
	for _, dim := range []int{32, 40, 64, 80, 96, 128, 256} {
		for _, in := range []backend.DType{backend.F32, backend.F16, backend.BF16} {
			all = append(all, emission{dim: dim, in: in, kv: in, seqQ: 512, group: 1, staged: true})
			for _, kv := range []backend.DType{in, backend.Q8, backend.Q4, backend.F8} {
				if kv == backend.Q4 && dim%32 > 0 { // rows are whole blocks
					continue
				}
				prefill := emission{dim: dim, in: in, kv: kv, seqQ: 512, group: 1}
				for _, prefill.option = range []string{"", "mask", "bias", "alibi", "softcap", "all"} {
					all = append(all, prefill)
				}
				for _, group := range []int{1, 4, 8} {
					all = append(all, emission{dim: dim, in: in, kv: kv, seqQ: 1, group: group})
				}
			}
		}
	}
	return all
}

// departures counts how a call differs from one of f32 with the usual head sizes.
func (c emission) departures() (n int) {
	for _, differs := range []bool{c.dim != 64 && c.dim != 128, c.in != backend.F32, c.kv != c.in, c.option != ""} {
		if differs {
			n++
		}
	}
	return n
}

// call returns the call, on tensors without memory.
func (c emission) call(t *testing.T) *backend.Call {
	t.Helper()
	const heads, seq = 8, 512
	meta := func(dtype backend.DType, h, rows, n int) backend.Tensor {
		return must.Get(backend.Meta(dtype, backend.Shape{1, h, rows, n}))(t)
	}
	q, k := meta(c.in, heads, c.seqQ, c.dim), meta(c.kv, heads/c.group, seq, c.dim)
	x := &backend.Call{Q: q, K: k, V: k, O: q, Problem: backend.Problem{Scale: 0.125, Visible: backend.Everything()}}
	has := func(option string) bool { return c.option == option || c.option == "all" }
	if has("mask") {
		x.Mask = meta(backend.Bool, 1, c.seqQ, seq)
	}
	if has("bias") {
		x.Bias = meta(backend.F32, 1, c.seqQ, seq)
	}
	if has("alibi") {
		x.Slopes = make([]float32, heads)
	}
	if has("softcap") {
		x.Softcap = 30
	}
	return x
}
