package run

import (
	"bytes"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/sbinet/npyio/npy"
	"gonum.org/v1/gonum/mat"

	"github.com/seed90331342/attn/cmd/internal/cli/clitest"
	"github.com/seed90331342/attn/kernels"
)

// plainAttention is attention by its definition in float64, over [B,H,S,D] data.
// hidden and bias are functions of (b, h, i, j).
type plainAttention struct {
	b, h, hkv, sq, sk, d, dv int
	q, k, v                  []float64
	scale, softcap           float64
	hidden                   func(b, h, i, j int) bool
	bias                     func(b, h, i, j int) float64
	sinks                    []float64 // of heads
	keeps                    func(b, h, i, j int) bool
	kept                     float64 // factor of the weights that stay
}

func (p plainAttention) solve() (o, lse, weights []float64) {
	for b := range p.b {
		for h := range p.h {
			kv := b*p.hkv + h/(p.h/p.hkv)
			for i := range p.sq {
				s := make([]float64, p.sk)
				sum := 0.0
				if p.sinks != nil {
					sum = math.Exp(p.sinks[h])
				}
				for j := range s {
					for c := range p.d {
						s[j] += p.q[((b*p.h+h)*p.sq+i)*p.d+c] * p.k[(kv*p.sk+j)*p.d+c]
					}
					s[j] *= p.scale
					if p.softcap > 0 {
						s[j] = p.softcap * math.Tanh(s[j]/p.softcap)
					}
					if p.bias != nil {
						s[j] += p.bias(b, h, i, j)
					}
					if p.hidden != nil && p.hidden(b, h, i, j) {
						s[j] = math.Inf(-1)
					}
					s[j] = math.Exp(s[j])
					sum += s[j]
				}
				lse = append(lse, math.Log(sum))
				for j := range s {
					switch {
					case p.keeps == nil:
					case p.keeps(b, h, i, j):
						s[j] *= p.kept
					default:
						s[j] = 0
					}
				}
				for c := range p.dv {
					x := 0.0
					for j := range s {
						if s[j] > 0 {
							x += s[j] / sum * p.v[(kv*p.sk+j)*p.dv+c]
						}
					}
					o = append(o, x)
				}
				for j := range s {
					if sum > 0 {
						s[j] /= sum
					}
				}
				weights = append(weights, s...)
			}
		}
	}
	return o, lse, weights
}

// save writes q, k and v, all of one shape, and returns their flags.
func (p plainAttention) save(t *testing.T, dir, descr string, shape ...int) []string {
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
	p := plainAttention{b: 3, h: 1, hkv: 1, sq: 4, sk: 4, d: 2, dv: 2, scale: 1 / math.Sqrt2}
	p.q, p.k, p.v = clitest.Normal(1, 24), clitest.Normal(2, 24), clitest.Normal(3, 24)
	m := clitest.Normal(4, 3*4)
	p.bias = func(b, _, i, _ int) float64 { return m[b*4+i] }
	p.hidden = func(_, _, i, j int) bool { return j > i }
	want, _, _ := p.solve()
	dir := t.TempDir()
	run := func(want []float64, mask []string, shape ...int) {
		t.Helper()
		mustRun(t, slices.Concat([]string{"run", "--backend=cpu", "--causal", "--out", dir + "/o.npy"}, mask, p.save(t, dir, "<f4", shape...))...)
		wantArray(t, dir+"/o.npy", want, 1e-6, shape...)
	}
	run(want, []string{"--mask", clitest.Save(t, dir, "m.npy", "<f4", m, 3, 4, 1)}, 3, 4, 2)

	p.b, p.q, p.k, p.v, p.bias = 1, p.q[:8], p.k[:8], p.v[:8], nil
	want, _, _ = p.solve()
	run(want, nil, 4, 2)
}

// TestRunTypes checks the types of the files, of the computation and of the output.
func TestRunTypes(t *testing.T) {
	p := plainAttention{b: 1, h: 1, hkv: 1, sq: 9, sk: 9, d: 4, dv: 4, scale: .5}
	p.q, p.k, p.v = clitest.Normal(1, 36), clitest.Normal(2, 36), clitest.Normal(3, 36)
	want, _, _ := p.solve()
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

// TestRunReadsOtherWriters reads a file that npyio wrote.
func TestRunReadsOtherWriters(t *testing.T) {
	dir := t.TempDir()
	f, err := os.Create(filepath.Join(dir, "x.npy"))
	clitest.NoError(t, err)
	clitest.NoError(t, npy.Write(f, mat.NewDense(2, 2, []float64{1, 0, 0, 1})))
	clitest.NoError(t, f.Close())
	code, _, stderr := attn(t, "run", "--backend=cpu", "--scale=0", "--out", dir+"/o.npy", "--q", f.Name(), "--k", f.Name(), "--v", f.Name())
	if code != 0 {
		t.Fatal(stderr)
	}
	o, _, _ := clitest.Load(t, dir+"/o.npy")
	clitest.Near(t, "output", o, []float64{.5, .5, .5, .5}, 0)
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

// TestRunOutputPaths writes to a device, which stays one, and replaces an input once it is
// read.
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
	if !bytes.Equal(readFile(t, x), readFile(t, dir+"/o.npy")) {
		t.Error("the output that replaces the inputs differs")
	}
}
