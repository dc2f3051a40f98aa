package run

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cmd/internal/cli"
	"github.com/seed90331342/attn/cmd/internal/cli/clitest"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// problem is a call over [B,H,S,D] data.
type problem struct {
	kernels.Dims
	q, k, v []float64
	opt     kernels.Options
}

// newProblem draws q, k and v.
func newProblem(d kernels.Dims) problem {
	return problem{Dims: d, q: clitest.Normal(1, d.Batch*d.Heads*d.SeqQ*d.Dim), k: clitest.Normal(2, d.Batch*d.KVHeads*d.SeqK*d.Dim),
		v: clitest.Normal(3, d.Batch*d.KVHeads*d.SeqK*d.ValueDim)}
}

// tensor returns data, of at most four axes, in float32 or as booleans.
func tensor(t *testing.T, descr string, data []float64, shape ...int) kernels.Tensor {
	t.Helper()
	full := kernels.Shape{1, 1, 1, 1}
	copy(full[4-len(shape):], shape)
	numbers, flags := make([]float32, len(data)), make([]bool, len(data))
	for i, x := range data {
		numbers[i], flags[i] = float32(x), x != 0
	}
	if descr == "|b1" {
		return must.Get(kernels.HostBool(flags, full))(t)
	}
	return must.Get(kernels.HostF32(numbers, full))(t)
}

// numbers returns the elements of x.
func numbers(t *testing.T, dev *kernels.Device, x kernels.Tensor) []float64 {
	t.Helper()
	return widened(must.Get(dev.ToFloat32(t.Context(), x))(t))
}

func widened(x []float32) (data []float64) {
	for _, y := range x {
		data = append(data, float64(y))
	}
	return data
}

// prepare returns the call by package kernels, whose results the conformance suite compares with float64.
func (p problem) prepare(t *testing.T) (*kernels.Device, *kernels.Call) {
	t.Helper()
	dev := clitest.Open(t, "cpu")
	p.opt.LSE = true
	return dev, must.Get(dev.Prepare(tensor(t, "<f4", p.q, p.Batch, p.Heads, p.SeqQ, p.Dim), tensor(t, "<f4", p.k, p.Batch, p.KVHeads, p.SeqK, p.Dim),
		tensor(t, "<f4", p.v, p.Batch, p.KVHeads, p.SeqK, p.ValueDim), p.opt))(t)
}

func (p problem) solve(t *testing.T) (o, lse, weights []float64) {
	t.Helper()
	p.opt.Weights = true
	dev, call := p.prepare(t)
	r := must.Get(call.Run(t.Context()))(t)
	return numbers(t, dev, r.O), numbers(t, dev, r.LSE), numbers(t, dev, r.Weights)
}

// save writes q, k and v, all of one shape, and returns their flags.
func (p problem) save(t *testing.T, dir, descr string, shape ...int) []string {
	t.Helper()
	return []string{"--q", clitest.Save(t, dir, "q.npy", descr, p.q, shape...), "--k", clitest.Save(t, dir, "k.npy", descr, p.k, shape...),
		"--v", clitest.Save(t, dir, "v.npy", descr, p.v, shape...)}
}

// wantArray compares a file of f4 elements with numbers and a shape.
func wantArray(t *testing.T, path string, want []float64, tolerance float64, shape ...int) {
	t.Helper()
	got, gotShape, descr := clitest.Load(t, path)
	if !slices.Equal(gotShape, shape) || descr != "<f4" {
		t.Errorf("%s is %v %s, should be %v <f4", filepath.Base(path), gotShape, descr, shape)
	}
	clitest.Near(t, filepath.Base(path), got, want, tolerance)
}

// swapHeads turns [B,H,S,D] data into [B,S,H,D].
func swapHeads(data []float64, b, h, s, d int) []float64 {
	var out []float64
	for bi := range b {
		for si := range s {
			for hi := range h {
				at := ((bi*h+hi)*s + si) * d
				out = append(out, data[at:at+d]...)
			}
		}
	}
	return out
}

// TestRunRanks: the output has q's rank, and a 3-D mask is [B,Sq,Sk].
func TestRunRanks(t *testing.T) {
	p := newProblem(kernels.Dims{Batch: 3, Heads: 1, KVHeads: 1, SeqQ: 4, SeqK: 4, Dim: 2, ValueDim: 2})
	m := clitest.Normal(4, 3*4)
	p.opt = kernels.Options{Causal: true, Bias: tensor(t, "<f4", m, 3, 1, 4, 1)}
	want, _, _ := p.solve(t)
	dir := t.TempDir()
	run := func(want []float64, mask []string, shape ...int) {
		t.Helper()
		mustRun(t, slices.Concat([]string{"run", "--backend=cpu", "--causal", "--out", dir + "/o.npy"}, mask, p.save(t, dir, "<f4", shape...))...)
		wantArray(t, dir+"/o.npy", want, 1e-6, shape...)
	}
	run(want, []string{"--mask", clitest.Save(t, dir, "m.npy", "<f4", m, 3, 4, 1)}, 3, 4, 2)

	p.Batch, p.q, p.k, p.v, p.opt = 1, p.q[:8], p.k[:8], p.v[:8], kernels.Options{Causal: true}
	want, _, _ = p.solve(t)
	run(want, nil, 4, 2)
}

// TestRunTypes checks the types of the files, of the computation and of the output.
func TestRunTypes(t *testing.T) {
	p := newProblem(kernels.Dims{Batch: 1, Heads: 1, KVHeads: 1, SeqQ: 9, SeqK: 9, Dim: 4, ValueDim: 4})
	want, _, _ := p.solve(t)
	tests := []struct {
		descr, dtype, written string
		note                  string
		roundoff              float64
	}{
		{"<f4", "", "<f4", "", kernels.F32.UnitRoundoff()},
		{">f4", "", "<f4", "", kernels.F32.UnitRoundoff()},
		{"<f2", "", "<f2", "", kernels.F16.UnitRoundoff()},
		{">f2", "f32", "<f4", "", kernels.F32.UnitRoundoff()},
		{"<f8", "", "<f4", "is f8, rounded to f4", kernels.F32.UnitRoundoff()},
		{">f8", "f16", "<f2", "is f8, rounded to f4", kernels.F16.UnitRoundoff()},
		{"<f4", "f16", "<f2", "", kernels.F16.UnitRoundoff()},
		{"<f4", "bf16", "<f4", "", kernels.BF16.UnitRoundoff()},
		{"<V2", "", "<f4", "", kernels.BF16.UnitRoundoff()},
		{">V2", "f32", "<f4", "", kernels.F32.UnitRoundoff()},
	}
	for _, tt := range tests {
		t.Run(tt.descr+" "+tt.dtype, func(t *testing.T) {
			dir := t.TempDir()
			args := append([]string{"run", "--backend=cpu", "--check", "--dtype", tt.dtype, "--out", dir + "/o.npy"}, p.save(t, dir, tt.descr, 9, 4)...)
			code, _, stderr := attn(t, args...)
			notes := 0
			if tt.note != "" {
				notes = 3 // one a file
			}
			if code != 0 || strings.Count(stderr, "\n") != notes || strings.Count(stderr, tt.note) < notes {
				t.Fatalf("exit code %d, stderr %q", code, stderr)
			}
			o, _, descr := clitest.Load(t, dir+"/o.npy")
			if descr != tt.written {
				t.Errorf("written as %s, should be %s", descr, tt.written)
			}
			// The inputs are exact in all types; outputs are below 4.
			clitest.Near(t, "output", o, want, 16*tt.roundoff)
		})
	}
}

// TestRunPlan: a plan reads only headers and writes nothing.
func TestRunPlan(t *testing.T) {
	dir := t.TempDir()
	q := clitest.Save(t, dir, "q.npy", "<f2", clitest.Normal(1, 2*64*8*16), 2, 64, 8, 16)
	k := clitest.Save(t, dir, "k.npy", "<f2", clitest.Normal(2, 2*64*2*16), 2, 64, 2, 16)
	out := mustRun(t, "run", "--plan", "--backend=cpu", "--layout=bshd", "--causal", "--q", q, "--k", k, "--v", k)
	// 64·65/2 pairs, 2 batches, 8 heads; 2·(16+16) operations each.
	clitest.Contains(t, out, "computed as f16", "33280 visible", "2.13 MFLOP", "backend", "provider", "gonum", "why", "chunks")
	if got := clitest.Files(t, dir); !slices.Equal(got, []string{"k.npy", "q.npy"}) {
		t.Errorf("the folder holds %v", got)
	}
	if out := mustRun(t, "run", "--plan", "--backend=cpu", "--layout=bshd", "--weights=w.npy", "--q", q, "--k", k, "--v", k); !strings.Contains(out, "QK and Softmax for weights") {
		t.Errorf("the plan with weights is\n%s", out)
	}
}

// TestRunOutputPaths writes to a device, which stays one, and replaces an input once it is read.
func TestRunOutputPaths(t *testing.T) {
	dir := t.TempDir()
	x := clitest.Save(t, dir, "x.npy", "<f4", clitest.Normal(1, 30*8), 30, 8)
	args := func(flags ...string) []string {
		return append([]string{"run", "--backend=cpu", "--q", x, "--k", x, "--v", x}, flags...)
	}
	mustRun(t, args("--out", dir+"/o.npy")...)
	mustRun(t, args("--out", os.DevNull, "--lse", os.DevNull)...)
	if info, err := os.Lstat(os.DevNull); err != nil || info.Mode()&os.ModeDevice == 0 {
		t.Fatalf("%s became %v, %v", os.DevNull, info.Mode(), err)
	}
	mustFail(t, "names the same file", args("--out", x, "--lse", dir+"/./x.npy", "--overwrite-inputs")...)
	mustRun(t, args("--out", x, "--overwrite-inputs")...)
	if !bytes.Equal(clitest.ReadFile(t, x), clitest.ReadFile(t, dir+"/o.npy")) {
		t.Error("the output that replaces the inputs differs")
	}
}

var program = cli.Program{Name: "attn", Grammar: func() any {
	return &struct {
		Run Command `cmd:""`
	}{}
}}

var attn, mustRun, mustFail = clitest.Named(program)

// hooks are called around fused calls.
type hooks struct {
	before func(ctx context.Context, c *backend.Call) error
	after  func(c *backend.Call)
}

// register registers the CPU with the hooks as the family hooked.
func (h hooks) register() {
	backend.Register("hooked", clitest.OnCPU(func(be backend.Backend) backend.Backend { return hooked{be, h} }))
}

type hooked struct {
	backend.Backend
	hooks
}

// Attention implements backend.Backend.
func (h hooked) Attention(ctx context.Context, calls ...*backend.Call) error {
	for _, c := range calls {
		if h.before != nil {
			if err := h.before(ctx, c); err != nil {
				return err
			}
		}
	}
	err := h.Backend.Attention(ctx, calls...)
	for _, c := range calls {
		if h.after != nil {
			h.after(c)
		}
	}
	return err
}

// TestRunGradients compares gradients of all outputs, in both layouts, with those by package kernels.
func TestRunGradients(t *testing.T) {
	p := newProblem(kernels.Dims{Batch: 2, Heads: 4, KVHeads: 2, SeqQ: 5, SeqK: 7, Dim: 4, ValueDim: 3})
	do, bias := clitest.Normal(4, p.Batch*p.Heads*p.SeqQ*p.ValueDim), clitest.Normal(5, p.Heads*p.SeqK)
	p.opt = kernels.Options{Scale: new(0.5), Softcap: 2, Causal: true, Align: kernels.LowerRight, Sinks: []float32{0, 1, -1, 0.5}, Bias: tensor(t, "<f4", bias, p.Heads, 1, p.SeqK)}
	dev, call := p.prepare(t)
	r := must.Get(call.Run(t.Context()))(t)
	grads := must.Get(call.AllocGradients(t.Context(), call.Gradients()))(t)
	must.Do(t, call.Backward(t.Context(), grads, kernels.Result{O: tensor(t, "<f4", do, p.Batch, p.Heads, p.SeqQ, p.ValueDim)}, r))
	for _, layout := range []string{"bhsd", "bshd"} {
		dir := t.TempDir()
		save := func(name string, data []float64, heads, seq, dim int) string {
			if layout == "bshd" {
				return clitest.Save(t, dir, name, "<f4", swapHeads(data, p.Batch, heads, seq, dim), p.Batch, seq, heads, dim)
			}
			return clitest.Save(t, dir, name, "<f4", data, p.Batch, heads, seq, dim)
		}
		out := mustRun(t, "run", "--check", "--backend=cpu", "--layout", layout, "--scale=0.5", "--softcap=2", "--causal", "--causal-align=bottom-right", "--sinks=0,1,-1,0.5",
			"--q", save("q.npy", p.q, p.Heads, p.SeqQ, p.Dim), "--k", save("k.npy", p.k, p.KVHeads, p.SeqK, p.Dim), "--v", save("v.npy", p.v, p.KVHeads, p.SeqK, p.ValueDim),
			"--bias", clitest.Save(t, dir, "b.npy", "<f4", bias, 1, p.Heads, 1, p.SeqK), "--do", save("do.npy", do, p.Heads, p.SeqQ, p.ValueDim),
			"--dq", dir+"/dq.npy", "--dk", dir+"/dk.npy", "--dv", dir+"/dv.npy", "--dbias", dir+"/dbias.npy", "--dsinks", dir+"/dsinks.npy")
		// 16 rows of dq, 16 of dk and dv.
		if want := "check: 32 rows of dq, dk and dv against float64: largest error "; !strings.Contains(out, want) {
			t.Errorf("%s: the output lacks %q:\n%s", layout, want, out)
		}
		for name, x := range map[string]kernels.Tensor{"dq": grads.Q, "dk": grads.K, "dv": grads.V, "dbias": grads.Bias, "dsinks": grads.Sinks} {
			s := x.Shape()
			shape, expected := s[:], numbers(t, dev, x)
			switch {
			case name == "dsinks":
				shape = s[1:2]
			case layout == "bshd" && name != "dbias":
				shape, expected = []int{s[0], s[2], s[1], s[3]}, swapHeads(expected, s[0], s[1], s[2], s[3])
			}
			wantArray(t, dir+"/"+name+".npy", expected, 2e-5, shape...)
		}
	}
}

func TestRunGradientsRefuse(t *testing.T) {
	dir := t.TempDir()
	q := clitest.Save(t, dir, "q.npy", "<f4", clitest.Normal(1, 12), 4, 3)
	small := clitest.Save(t, dir, "small.npy", "<f4", clitest.Normal(1, 9), 3, 3)
	for _, c := range []struct {
		args []string
		says string
	}{
		{[]string{"--do", q}, "--do has no output"},
		{[]string{"--do", small, "--dq", dir + "/d.npy"}, "shape is [3 3], the output has [4 3]"},
		{[]string{"--do", dir + "/none.npy", "--dq", dir + "/d.npy"}, "none.npy"},
		{[]string{"--do", q, "--dbias", dir + "/d.npy"}, "--dbias is given without a --bias"},
		{[]string{"--do", q, "--dsinks", dir + "/d.npy"}, "--dsinks is given without --sinks"},
		{[]string{"--do", q, "--dq", dir + "/d.npy", "--rope=10000"}, "--do cannot be given with a --rope"},
		{[]string{"--do", q, "--dq", dir + "/d.npy", "--dk", dir + "/d.npy"}, "d.npy"},
	} {
		mustFail(t, c.says, append([]string{"run", "--backend=cpu", "--out", dir + "/o.npy", "--q", q, "--k", q, "--v", q}, c.args...)...)
	}
}
