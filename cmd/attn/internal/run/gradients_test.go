package run

import (
	"strings"
	"testing"

	"github.com/seed90331342/attn/cmd/internal/cli/clitest"
)

// TestRunGradients compares gradients of all outputs, in both layouts, with central
// differences of plain attention in float64, which are exact to 1e-8 here. The numbers are
// a few units, and float32 keeps them to 1e-5.
func TestRunGradients(t *testing.T) {
	p := plainAttention{b: 2, h: 4, hkv: 2, sq: 5, sk: 7, d: 4, dv: 3, scale: 0.5, softcap: 2, sinks: []float64{0, 1, -1, 0.5}}
	p.q, p.k, p.v = clitest.Normal(1, p.b*p.h*p.sq*p.d), clitest.Normal(2, p.b*p.hkv*p.sk*p.d), clitest.Normal(3, p.b*p.hkv*p.sk*p.dv)
	do, bias := clitest.Normal(4, p.b*p.h*p.sq*p.dv), clitest.Normal(5, p.h*p.sk)
	p.bias = func(_, h, _, j int) float64 { return bias[h*p.sk+j] }
	p.hidden = func(_, _, i, j int) bool { return j > i+2 }
	differences := func(x []float64) []float64 {
		const step = 1e-5
		loss := func() (sum float64) {
			o, _, _ := p.solve()
			for i, y := range o {
				sum += y * do[i]
			}
			return sum
		}
		d := make([]float64, len(x))
		for i, was := range x {
			x[i] = was + step
			up := loss()
			x[i] = was - step
			d[i] = (up - loss()) / (2 * step)
			x[i] = was
		}
		return d
	}
	want := [5][]float64{differences(p.q), differences(p.k), differences(p.v), differences(bias), differences(p.sinks)}
	for _, layout := range []string{"bhsd", "bshd"} {
		dir := t.TempDir()
		save := func(name string, data []float64, heads, seq, dim int) string {
			if layout == "bshd" {
				return clitest.Save(t, dir, name, "<f4", swapHeads(data, p.b, heads, seq, dim), p.b, seq, heads, dim)
			}
			return clitest.Save(t, dir, name, "<f4", data, p.b, heads, seq, dim)
		}
		out := mustRun(t, "run", "--check", "--backend=cpu", "--layout", layout, "--scale=0.5", "--softcap=2", "--causal", "--causal-align=bottom-right", "--sinks=0,1,-1,0.5",
			"--q", save("q.npy", p.q, p.h, p.sq, p.d), "--k", save("k.npy", p.k, p.hkv, p.sk, p.d), "--v", save("v.npy", p.v, p.hkv, p.sk, p.dv),
			"--bias", clitest.Save(t, dir, "b.npy", "<f4", bias, 1, p.h, 1, p.sk), "--do", save("do.npy", do, p.h, p.sq, p.dv),
			"--dq", dir+"/dq.npy", "--dk", dir+"/dk.npy", "--dv", dir+"/dv.npy", "--dbias", dir+"/dbias.npy", "--dsinks", dir+"/dsinks.npy")
		// 16 rows of dq, 16 of dk and dv.
		if want := "check: 32 rows of dq, dk and dv against float64: largest error "; !strings.Contains(out, want) {
			t.Errorf("%s: the output lacks %q:\n%s", layout, want, out)
		}
		for i, f := range []struct {
			name            string
			heads, seq, dim int
			shape           []int
		}{
			{"dq", p.h, p.sq, p.d, nil}, {"dk", p.hkv, p.sk, p.d, nil}, {"dv", p.hkv, p.sk, p.dv, nil},
			{"dbias", 0, 0, 0, []int{1, p.h, 1, p.sk}}, {"dsinks", 0, 0, 0, []int{p.h}},
		} {
			expected := want[i]
			if f.shape == nil {
				f.shape = []int{p.b, f.heads, f.seq, f.dim}
				if layout == "bshd" {
					f.shape = []int{p.b, f.seq, f.heads, f.dim}
					expected = swapHeads(expected, p.b, f.heads, f.seq, f.dim)
				}
			}
			wantArray(t, dir+"/"+f.name+".npy", expected, 2e-5, f.shape...)
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
