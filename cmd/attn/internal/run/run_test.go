package run

import (
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/sbinet/npyio/npy"
	"gonum.org/v1/gonum/mat"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cmd/internal/cli/clitest"
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

// TestRunOptions compares each option, and those that interact, with plain attention:
// output, log-sum-exp and weights, fused and staged.
func TestRunOptions(t *testing.T) {
	base := plainAttention{b: 2, h: 4, hkv: 2, sq: 5, sk: 7, d: 8, dv: 6}
	base.scale = 1 / math.Sqrt(8)
	maskAt := clitest.Normal(9, base.b*base.h*base.sq*base.sk)
	at := func(b, h, i, j int) int { return ((b*base.h+h)*base.sq+i)*base.sk + j }
	tests := []struct {
		name string
		args []string
		mask func(t *testing.T, dir string) string
		set  func(p *plainAttention)
	}{
		{name: "plain"},
		{name: "scale 1", args: []string{"--scale", "1"}, set: func(p *plainAttention) { p.scale = 1 }},
		{name: "scale 0", args: []string{"--scale=0"}, set: func(p *plainAttention) { p.scale = 0 }},
		{name: "negative scale", args: []string{"--scale", "-.5"}, set: func(p *plainAttention) { p.scale = -.5 }},
		{name: "softcap", args: []string{"--softcap", "1.5"}, set: func(p *plainAttention) { p.softcap = 1.5 }},
		{name: "causal from the top left", args: []string{"--causal"}, set: func(p *plainAttention) {
			p.hidden = func(_, _, i, j int) bool { return j > i }
		}},
		{name: "causal from the bottom right", args: []string{"--causal", "--causal-align", "bottom-right"}, set: func(p *plainAttention) {
			p.hidden = func(_, _, i, j int) bool { return j > i+2 }
		}},
		{name: "window from the top left", args: []string{"--window", "2,1"}, set: func(p *plainAttention) {
			p.hidden = func(_, _, i, j int) bool { return j < i-2 || j > i+1 }
		}},
		{name: "window from the bottom right", args: []string{"--window", "1,0", "--causal-align", "bottom-right"}, set: func(p *plainAttention) {
			p.hidden = func(_, _, i, j int) bool { return j < i+2-1 || j > i+2 }
		}},
		{name: "window without a left side", args: []string{"--window", "inf,1"}, set: func(p *plainAttention) {
			p.hidden = func(_, _, i, j int) bool { return j > i+1 }
		}},
		{name: "key lengths, one of them 0", args: []string{"--klen", "0,3"}, set: func(p *plainAttention) {
			p.hidden = func(b, _, _, j int) bool { return j >= []int{0, 3}[b] }
		}},
		{name: "bool mask [Sq,Sk]", mask: func(t *testing.T, dir string) string {
			var m []float64
			for i := range base.sq * base.sk {
				m = append(m, float64((i+1)%2))
			}
			return clitest.Save(t, dir, "m.npy", "|b1", m, base.sq, base.sk)
		}, set: func(p *plainAttention) {
			p.hidden = func(_, _, i, j int) bool { return (i*base.sk+j+1)%2 == 0 }
		}},
		{name: "bool mask [B,1,1,Sk]", mask: func(t *testing.T, dir string) string {
			var m []float64
			for i := range base.b * base.sk {
				m = append(m, float64(i%3))
			}
			return clitest.Save(t, dir, "m.npy", "|b1", m, base.b, 1, 1, base.sk)
		}, set: func(p *plainAttention) {
			p.hidden = func(b, _, _, j int) bool { return (b*base.sk+j)%3 == 0 }
		}},
		{name: "float mask [B,H,Sq,Sk]", mask: func(t *testing.T, dir string) string {
			return clitest.Save(t, dir, "m.npy", "<f4", maskAt, base.b, base.h, base.sq, base.sk)
		}, set: func(p *plainAttention) {
			p.bias = func(b, h, i, j int) float64 { return maskAt[at(b, h, i, j)] }
		}},
		{name: "half precision mask [H,Sq,1] with causal", args: []string{"--causal"}, mask: func(t *testing.T, dir string) string {
			return clitest.Save(t, dir, "m.npy", "<f2", maskAt[:base.h*base.sq], base.h, base.sq, 1)
		}, set: func(p *plainAttention) {
			p.bias = func(_, h, i, _ int) float64 { return maskAt[h*base.sq+i] }
			p.hidden = func(_, _, i, j int) bool { return j > i }
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			for _, layout := range []string{"bhsd", "bshd"} {
				p := base
				p.q = clitest.Normal(1, p.b*p.h*p.sq*p.d)
				p.k = clitest.Normal(2, p.b*p.hkv*p.sk*p.d)
				p.v = clitest.Normal(3, p.b*p.hkv*p.sk*p.dv)
				if tt.set != nil {
					tt.set(&p)
				}
				dir := t.TempDir()
				args := []string{"run", "--backend", "cpu", "--check", "--layout", layout, "--out", dir + "/o.npy", "--lse", dir + "/l.npy"}
				if layout == "bhsd" {
					args = append(args, "--q", clitest.Save(t, dir, "q.npy", "<f4", p.q, p.b, p.h, p.sq, p.d),
						"--k", clitest.Save(t, dir, "k.npy", "<f4", p.k, p.b, p.hkv, p.sk, p.d),
						"--v", clitest.Save(t, dir, "v.npy", "<f4", p.v, p.b, p.hkv, p.sk, p.dv))
				} else {
					args = append(args, "--q", clitest.Save(t, dir, "q.npy", "<f4", swapHeads(p.q, p.b, p.h, p.sq, p.d), p.b, p.sq, p.h, p.d),
						"--k", clitest.Save(t, dir, "k.npy", "<f4", swapHeads(p.k, p.b, p.hkv, p.sk, p.d), p.b, p.sk, p.hkv, p.d),
						"--v", clitest.Save(t, dir, "v.npy", "<f4", swapHeads(p.v, p.b, p.hkv, p.sk, p.dv), p.b, p.sk, p.hkv, p.dv))
				}
				args = append(args, tt.args...)
				if tt.mask != nil {
					args = append(args, "--mask", tt.mask(t, dir))
				}
				wantO, wantLSE, wantW := p.solve()
				wantShape := []int{p.b, p.h, p.sq, p.dv}
				if layout == "bshd" {
					wantO = swapHeads(wantO, p.b, p.h, p.sq, p.dv)
					wantShape = []int{p.b, p.sq, p.h, p.dv}
				}
				for _, weights := range []bool{false, true} {
					run := args
					if weights {
						run = append(slices.Clone(args), "--weights", dir+"/w.npy")
					}
					if out := mustRun(t, run...); !strings.HasPrefix(out, "check: 16 rows against float64: ") {
						t.Errorf("%s: --check printed %q", layout, out)
					}
					// The numbers are a few units at most: float32 keeps them to 1e-6.
					o, shape, descr := clitest.Load(t, dir+"/o.npy")
					if !slices.Equal(shape, wantShape) || descr != "<f4" {
						t.Errorf("%s: output is %v %s, should be %v <f4", layout, shape, descr, wantShape)
					}
					clitest.Near(t, layout+" output", o, wantO, 1e-5)
					lse, shape, _ := clitest.Load(t, dir+"/l.npy")
					if !slices.Equal(shape, []int{p.b, p.h, p.sq}) {
						t.Errorf("%s: lse has shape %v, should be [B H Sq]", layout, shape)
					}
					clitest.Near(t, layout+" lse", lse, wantLSE, 1e-5)
					if weights {
						w, shape, _ := clitest.Load(t, dir+"/w.npy")
						if !slices.Equal(shape, []int{p.b, p.h, p.sq, p.sk}) {
							t.Errorf("%s: weights have shape %v, should be [B H Sq Sk]", layout, shape)
						}
						clitest.Near(t, layout+" weights", w, wantW, 1e-6)
					}
				}
			}
		})
	}
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
	mustRun(t, "run", "--backend=cpu", "--causal", "--out", dir+"/o.npy", "--mask", clitest.Save(t, dir, "m.npy", "<f4", m, 3, 4, 1),
		"--q", clitest.Save(t, dir, "q.npy", "<f4", p.q, 3, 4, 2), "--k", clitest.Save(t, dir, "k.npy", "<f4", p.k, 3, 4, 2), "--v", clitest.Save(t, dir, "v.npy", "<f4", p.v, 3, 4, 2))
	o, shape, _ := clitest.Load(t, dir+"/o.npy")
	if !slices.Equal(shape, []int{3, 4, 2}) {
		t.Errorf("output has shape %v, should be [3 4 2]", shape)
	}
	clitest.Near(t, "output", o, want, 1e-6)

	p.b, p.q, p.k, p.v, p.bias = 1, p.q[:8], p.k[:8], p.v[:8], nil
	want, _, _ = p.solve()
	mustRun(t, "run", "--backend=cpu", "--causal", "--out", dir+"/o2.npy",
		"--q", clitest.Save(t, dir, "q2.npy", "<f4", p.q, 4, 2), "--k", clitest.Save(t, dir, "k2.npy", "<f4", p.k, 4, 2), "--v", clitest.Save(t, dir, "v2.npy", "<f4", p.v, 4, 2))
	o, shape, _ = clitest.Load(t, dir+"/o2.npy")
	if !slices.Equal(shape, []int{4, 2}) {
		t.Errorf("output has shape %v, should be [4 2]", shape)
	}
	clitest.Near(t, "output", o, want, 1e-6)
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
		{"<f4", "", "<f4", "", backend.F32.UnitRoundoff()},
		{">f4", "", "<f4", "", backend.F32.UnitRoundoff()},
		{"<f2", "", "<f2", "", backend.F16.UnitRoundoff()},
		{">f2", "f32", "<f4", "", backend.F32.UnitRoundoff()},
		{"<f8", "", "<f4", "is f8, rounded to f4", backend.F32.UnitRoundoff()},
		{">f8", "f16", "<f2", "is f8, rounded to f4", backend.F16.UnitRoundoff()},
		{"<f4", "f16", "<f2", "", backend.F16.UnitRoundoff()},
		{"<f4", "bf16", "<f4", "", backend.BF16.UnitRoundoff()},
	}
	for _, tt := range tests {
		t.Run(tt.descr+" "+tt.dtype, func(t *testing.T) {
			dir := t.TempDir()
			code, _, stderr := attn(t, "run", "--backend=cpu", "--check", "--dtype", tt.dtype, "--out", dir+"/o.npy",
				"--q", clitest.Save(t, dir, "q.npy", tt.descr, p.q, 9, 4), "--k", clitest.Save(t, dir, "k.npy", tt.descr, p.k, 9, 4), "--v", clitest.Save(t, dir, "v.npy", tt.descr, p.v, 9, 4))
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
	if err != nil {
		t.Fatal(err)
	}
	if err := npy.Write(f, mat.NewDense(2, 2, []float64{1, 0, 0, 1})); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
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
	for _, want := range []string{"computed as f16", "33280 visible", "2.13 MFLOP", "backend", "why", "chunks"} {
		if !strings.Contains(out, want) {
			t.Errorf("the plan does not say %q:\n%s", want, out)
		}
	}
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
	mustFail(t, "names the same file", args("--out", x, "--present-k", dir+"/./x.npy", "--overwrite-inputs")...)
	mustRun(t, args("--out", x, "--present-k", dir+"/k.npy", "--overwrite-inputs")...)
	for name, want := range map[string][]float64{"x.npy": first(clitest.Load(t, dir+"/o.npy")), "k.npy": clitest.Normal(1, 30*8)} {
		clitest.Near(t, name, first(clitest.Load(t, filepath.Join(dir, name))), want, 0)
	}
}

func first(data []float64, _ []int, _ string) []float64 { return data }
