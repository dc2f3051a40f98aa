package run

import (
	"strings"
	"testing"

	"github.com/seed90331342/attn/cmd/internal/cli/clitest"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

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
