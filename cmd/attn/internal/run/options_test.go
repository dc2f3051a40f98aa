package run

import (
	"encoding/binary"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/seed90331342/attn/cmd/internal/cli/clitest"
	"github.com/seed90331342/attn/kernels"
)

// runCase is a problem in files, with the result of plain attention.
type runCase struct {
	plainAttention
	dir, layout string
	files       []string // flags of q, k and v
	flags       []string // further ones
}

func newRunCase(t *testing.T, layout string) *runCase {
	c := &runCase{plainAttention{b: 2, h: 4, hkv: 2, sq: 5, sk: 7, d: 8, dv: 6, scale: 1 / math.Sqrt(8)}, t.TempDir(), layout, nil, nil}
	c.q, c.k, c.v = clitest.Normal(1, c.b*c.h*c.sq*c.d), clitest.Normal(2, c.b*c.hkv*c.sk*c.d), clitest.Normal(3, c.b*c.hkv*c.sk*c.dv)
	c.files = []string{"--layout", layout, "--q", c.save(t, "q.npy", c.q, c.h, c.sq, c.d),
		"--k", c.save(t, "k.npy", c.k, c.hkv, c.sk, c.d), "--v", c.save(t, "v.npy", c.v, c.hkv, c.sk, c.dv)}
	return c
}

// ordered returns [B,H,S,D] data in the layout, with its shape.
func (c *runCase) ordered(data []float64, heads, seq, dim int) ([]float64, []int) {
	if c.layout == "bshd" {
		return swapHeads(data, c.b, heads, seq, dim), []int{c.b, seq, heads, dim}
	}
	return data, []int{c.b, heads, seq, dim}
}

// save writes [B,H,S,D] data in the layout.
func (c *runCase) save(t *testing.T, name string, data []float64, heads, seq, dim int) string {
	data, shape := c.ordered(data, heads, seq, dim)
	return clitest.Save(t, c.dir, name, "<f4", data, shape...)
}

// file writes an array and appends it as a flag.
func (c *runCase) file(t *testing.T, flag, descr string, data []float64, shape ...int) {
	c.flags = append(c.flags, flag, clitest.Save(t, c.dir, flag[2:]+".npy", descr, data, shape...))
}

// run runs the problem with more flags, and compares output, log-sum-exp and, if they are
// written, weights with plain attention. The numbers are a few units at most: float32 keeps
// them to 1e-6.
func (c *runCase) run(t *testing.T, flags ...string) {
	t.Helper()
	args := slices.Concat([]string{"run", "--backend=cpu", "--check", "--out", c.dir + "/o.npy", "--lse", c.dir + "/l.npy"}, c.files, flags)
	if out := mustRun(t, args...); !strings.HasPrefix(out, "check: 16 rows against float64: ") {
		t.Errorf("--check printed %q", out)
	}
	wantO, wantLSE, wantW := c.solve()
	wantO, shape := c.ordered(wantO, c.h, c.sq, c.dv)
	wantArray(t, c.dir+"/o.npy", wantO, 1e-5, shape...)
	wantArray(t, c.dir+"/l.npy", wantLSE, 1e-5, c.b, c.h, c.sq)
	if slices.Contains(flags, "--weights") {
		wantArray(t, c.dir+"/w.npy", wantW, 1e-6, c.b, c.h, c.sq, c.sk)
	}
}

func readFile(t *testing.T, path string) []byte {
	t.Helper()
	text := clitest.ReadFile(t, path)
	return text
}

// TestRunOptions compares each option, and those that interact, with plain attention, fused
// and staged.
func TestRunOptions(t *testing.T) {
	slopes := []float64{.25, .0625, .015625, .00390625} // of 4 heads
	mask := clitest.Normal(9, 2*4*5*7)
	for _, tt := range []struct {
		name, flags string
		set         func(t *testing.T, c *runCase)
	}{
		{"plain", "", func(*testing.T, *runCase) {}},
		{"scale 1", "--scale 1", func(_ *testing.T, c *runCase) { c.scale = 1 }},
		{"scale 0", "--scale=0", func(_ *testing.T, c *runCase) { c.scale = 0 }},
		{"negative scale", "--scale -.5", func(_ *testing.T, c *runCase) { c.scale = -.5 }},
		{"softcap", "--softcap 1.5", func(_ *testing.T, c *runCase) { c.softcap = 1.5 }},
		{"causal from the top left", "--causal", func(_ *testing.T, c *runCase) {
			c.hidden = func(_, _, i, j int) bool { return j > i }
		}},
		{"causal from the bottom right", "--causal --causal-align bottom-right", func(_ *testing.T, c *runCase) {
			c.hidden = func(_, _, i, j int) bool { return j > i+2 }
		}},
		{"offset", "--causal --offset=1", func(_ *testing.T, c *runCase) {
			c.hidden = func(_, _, i, j int) bool { return j > i+1 }
		}},
		{"offsets of batches", "--causal --offset -1,2", func(_ *testing.T, c *runCase) {
			c.hidden = func(b, _, i, j int) bool { return j > i+[]int{-1, 2}[b] }
		}},
		{"prefixes", "--causal --prefix=3,0", func(_ *testing.T, c *runCase) {
			c.hidden = func(b, _, i, j int) bool { return j > i && j >= []int{3, 0}[b] }
		}},
		{"window from the top left", "--window 2,1", func(_ *testing.T, c *runCase) {
			c.hidden = func(_, _, i, j int) bool { return j < i-2 || j > i+1 }
		}},
		{"window from the bottom right", "--window 1,0 --causal-align bottom-right", func(_ *testing.T, c *runCase) {
			c.hidden = func(_, _, i, j int) bool { return j < i+2-1 || j > i+2 }
		}},
		{"window without a left side", "--window inf,1", func(_ *testing.T, c *runCase) {
			c.hidden = func(_, _, i, j int) bool { return j > i+1 }
		}},
		{"key lengths, one of them 0", "--klen 0,3", func(_ *testing.T, c *runCase) {
			c.hidden = func(b, _, _, j int) bool { return j >= []int{0, 3}[b] }
		}},
		{"documents", "--segments=1,1,2,2,9", func(t *testing.T, c *runCase) {
			q, k := []int{1, 1, 2, 2, 9}, []float64{1, 1, 1, 2, 2, 2, 2}
			c.hidden = func(_, _, i, j int) bool { return q[i] != int(k[j]) }
			c.file(t, "--kv-segments", "|i1", slices.Concat(k, k), 2, 7)
		}},
		{"bool mask [Sq,Sk]", "", func(t *testing.T, c *runCase) {
			var m []float64
			for i := range c.sq * c.sk {
				m = append(m, float64((i+1)%2))
			}
			c.hidden = func(_, _, i, j int) bool { return (i*c.sk+j+1)%2 == 0 }
			c.file(t, "--mask", "|b1", m, c.sq, c.sk)
		}},
		{"bool mask [B,1,1,Sk]", "", func(t *testing.T, c *runCase) {
			var m []float64
			for i := range c.b * c.sk {
				m = append(m, float64(i%3))
			}
			c.hidden = func(b, _, _, j int) bool { return (b*c.sk+j)%3 == 0 }
			c.file(t, "--mask", "|b1", m, c.b, 1, 1, c.sk)
		}},
		{"float mask [B,H,Sq,Sk]", "", func(t *testing.T, c *runCase) {
			c.bias = func(b, h, i, j int) float64 { return mask[((b*c.h+h)*c.sq+i)*c.sk+j] }
			c.file(t, "--mask", "<f4", mask, c.b, c.h, c.sq, c.sk)
		}},
		{"half precision mask [H,Sq,1] with causal", "--causal", func(t *testing.T, c *runCase) {
			c.bias = func(_, h, i, _ int) float64 { return mask[h*c.sq+i] }
			c.hidden = func(_, _, i, j int) bool { return j > i }
			c.file(t, "--mask", "<f2", mask[:c.h*c.sq], c.h, c.sq, 1)
		}},
		{"a bool mask and a bias", "", func(t *testing.T, c *runCase) {
			c.bias = func(_, h, i, j int) float64 { return mask[(h*5+i)*7+j] }
			c.hidden = func(_, _, _, j int) bool { return j%2 == 1 }
			c.file(t, "--bias", "<f4", mask[:4*5*7], 4, 5, 7)
			c.file(t, "--mask", "|b1", []float64{1, 0, 1, 0, 1, 0, 1}, 7)
		}},
		{"a mask of blocks with a window", "--block-size=3 --window=4,3", func(t *testing.T, c *runCase) {
			m := []float64{1, 0, 1, 0, 1, 1}
			c.hidden = func(_, _, i, j int) bool { return m[i/3*3+j/3] == 0 || j < i-4 || j > i+3 }
			c.file(t, "--block-mask", "|b1", m, 2, 3)
		}},
		{"alibi as in the paper", "--alibi auto", func(_ *testing.T, c *runCase) {
			c.bias = func(_, h, i, j int) float64 { return -slopes[h] * math.Abs(float64(i-j)) }
		}},
		{"alibi by batch and head in a file, at the end", "--causal-align bottom-right", func(t *testing.T, c *runCase) {
			c.bias = func(b, h, i, j int) float64 { return -slopes[h] * float64(1+b) * math.Abs(float64(i+2-j)) }
			c.file(t, "--alibi", "<f4", []float64{.25, .0625, .015625, .00390625, .5, .125, .03125, .0078125}, 2, 4)
		}},
		{"a bias by distance, causal", "--causal", func(t *testing.T, c *runCase) {
			r := clitest.Normal(5, 4*11)
			c.bias = func(_, h, i, j int) float64 { return r[h*11+j-i+4] }
			c.hidden = func(_, _, i, j int) bool { return j > i }
			c.file(t, "--relative-bias", "<f2", r, 4, 11)
		}},
		{"sinks, one of them none", "--sinks 1,-2,-inf,.5", func(_ *testing.T, c *runCase) {
			c.sinks = []float64{1, -2, math.Inf(-1), .5}
		}},
		{"dropout", "--dropout=.25 --seed=12", func(_ *testing.T, c *runCase) {
			c.keeps, c.kept = kernels.Dropout{P: .25, Seed: 12}.Keeps, 1/.75
		}},
		{"everything", "--window=2,2 --offset=1 --klen=7,3 --softcap=3 --sinks=0,0,1,1 --alibi=0,.25,.5,.75", func(t *testing.T, c *runCase) {
			r := clitest.Normal(5, 11)
			c.bias = func(_, h, i, j int) float64 { return r[j-i+4] - float64(h)/4*math.Abs(float64(i+1-j)) }
			c.hidden = func(b, _, i, j int) bool { return j > i+3 || j < i-1 || j >= []int{7, 3}[b] }
			c.sinks, c.softcap = []float64{0, 0, 1, 1}, 3
			c.file(t, "--relative-bias", "<f4", r, 11)
		}},
	} {
		for _, layout := range []string{"bhsd", "bshd"} {
			t.Run(tt.name+" "+layout, func(t *testing.T) {
				c := newRunCase(t, layout)
				tt.set(t, c)
				flags := append(c.flags, strings.Fields(tt.flags)...)
				c.run(t, flags...)
				c.run(t, append(flags, "--weights", c.dir+"/w.npy")...)
			})
		}
	}
}

// TestRunPairs checks the outputs with an element for each query and key: scores at
// each stage, largest weights, and the mask of dropout.
func TestRunPairs(t *testing.T) {
	c := newRunCase(t, "bhsd")
	c.softcap = 2
	c.hidden = func(_, _, i, j int) bool { return j > i }
	bias := clitest.Normal(8, 5*7)
	c.bias = func(_, _, i, j int) float64 { return bias[i*7+j] }
	flags := slices.Concat([]string{"run", "--backend=cpu", "--out", c.dir + "/o.npy", "--causal", "--softcap=2", "--mask", clitest.Save(t, c.dir, "m.npy", "<f4", bias, 5, 7)}, c.files)
	for at, point := range []string{"scaled", "capped", "biased"} {
		mustRun(t, append(slices.Clone(flags), "--scores", c.dir+"/s.npy", "--scores-at", point)...)
		var want []float64
		for n := range c.b * c.h * c.sq * c.sk {
			j, i, h, b := n%c.sk, n/c.sk%c.sq, n/c.sk/c.sq%c.h, n/c.sk/c.sq/c.h
			s := 0.0
			for x := range c.d {
				s += c.q[((b*c.h+h)*c.sq+i)*c.d+x] * c.k[((b*c.hkv+h/2)*c.sk+j)*c.d+x]
			}
			s *= c.scale
			if at >= 1 {
				s = 2 * math.Tanh(s/2)
			}
			switch {
			case at == 2 && j > i:
				s = math.Inf(-1)
			case at == 2:
				s += bias[i*7+j]
			}
			want = append(want, s)
		}
		wantArray(t, c.dir+"/s.npy", want, 1e-5, c.b, c.h, c.sq, c.sk)
	}

	mustRun(t, append(slices.Clone(flags), "--lse", c.dir+"/l.npy", "--weights", c.dir+"/all.npy", "--scores", c.dir+"/s.npy", "--topk=3", "--topk-keys", c.dir+"/i.npy", "--topk-weights", c.dir+"/w.npy")...)
	_, _, weights := c.solve()
	rows := readFile(t, c.dir+"/i.npy")
	keys := rows[len(rows)-4*3*c.b*c.h*c.sq:]
	var want []float64
	for n := range c.b * c.h * c.sq {
		row := weights[n*c.sk : (n+1)*c.sk]
		sorted := slices.Sorted(slices.Values(row))
		for x := range 3 {
			want = append(want, sorted[c.sk-1-x])
			key := int32(binary.LittleEndian.Uint32(keys[4*(3*n+x):]))
			if w := sorted[c.sk-1-x]; w == 0 && key != -1 || w > 0 && math.Abs(row[max(key, 0)]-w) > 1e-5 {
				t.Errorf("row %d: largest weight %d is %v, listed is key %d", n, x, w, key)
			}
		}
	}
	wantArray(t, c.dir+"/w.npy", want, 1e-5, c.b, c.h, c.sq, 3)

	mustRun(t, append(slices.Clone(flags), "--dropout=.5", "--seed=3", "--keep-mask", c.dir+"/keep.npy")...)
	raw := readFile(t, c.dir+"/keep.npy")
	drop := kernels.Dropout{P: .5, Seed: 3}
	for n, kept := range raw[len(raw)-c.b*c.h*c.sq*c.sk:] {
		if (kept == 1) != drop.Keeps(n/c.sk/c.sq/c.h, n/c.sk/c.sq%c.h, n/c.sk%c.sq, n%c.sk) {
			t.Fatalf("element %d of the keep mask is %d", n, kept)
		}
	}
	for _, bad := range []struct {
		flags []string
		want  string
	}{
		{[]string{"--topk-keys", c.dir + "/i.npy"}, "--topk is missing"},
		{[]string{"--topk=-1"}, "--topk is -1, it must be at least 1"},
		{[]string{"--keep-mask", c.dir + "/k.npy"}, "without a --dropout"},
		{[]string{"--scores", c.dir + "/s.npy", "--scores-at=softmax"}, "--scores-at must be one of"},
	} {
		mustFail(t, bad.want, append(slices.Clone(flags), bad.flags...)...)
	}
}

// TestRunPacked packs two sequences, and one without keys between them, and compares
// each with plain attention.
func TestRunPacked(t *testing.T) {
	const heads, kvHeads, d, dv = 4, 2, 8, 6
	lengths := [][2]int{{3, 5}, {2, 0}, {4, 4}} // rows and keys
	dir := t.TempDir()
	var q, k, v, wantO []float64
	wantLSE := make([][]float64, heads)
	for n, l := range lengths {
		p := plainAttention{b: 1, h: heads, hkv: kvHeads, sq: l[0], sk: l[1], d: d, dv: dv, scale: 1 / math.Sqrt(d)}
		p.q, p.k, p.v = clitest.Normal(uint64(n), heads*l[0]*d), clitest.Normal(uint64(n+9), kvHeads*l[1]*d), clitest.Normal(uint64(n+19), kvHeads*l[1]*dv)
		p.hidden = func(_, _, i, j int) bool { return j > i+l[1]-l[0] }
		o, lse, _ := p.solve()
		q, k, v = append(q, swapHeads(p.q, 1, heads, l[0], d)...), append(k, swapHeads(p.k, 1, kvHeads, l[1], d)...), append(v, swapHeads(p.v, 1, kvHeads, l[1], dv)...)
		wantO = append(wantO, swapHeads(o, 1, heads, l[0], dv)...)
		for h := range heads {
			wantLSE[h] = append(wantLSE[h], lse[h*l[0]:(h+1)*l[0]]...)
		}
	}
	cu := clitest.WriteFile(t, dir, "cu.npy", clitest.RawNPY(clitest.Dict("<i4", false, 4), []byte{0, 0, 0, 0, 3, 0, 0, 0, 5, 0, 0, 0, 9, 0, 0, 0}))
	flags := []string{"run", "--backend=cpu", "--check", "--causal", "--causal-align=bottom-right", "--out", dir + "/o.npy", "--lse", dir + "/l.npy",
		"--q", clitest.Save(t, dir, "q.npy", "<f4", q, 9, heads, d), "--k", clitest.Save(t, dir, "k.npy", "<f4", k, 9, kvHeads, d),
		"--v", clitest.Save(t, dir, "v.npy", "<f4", v, 9, kvHeads, dv), "--cu-q", cu, "--cu-k=0,5,5,9"}
	mustRun(t, flags...)
	wantArray(t, dir+"/o.npy", wantO, 1e-5, 9, heads, dv)
	wantArray(t, dir+"/l.npy", slices.Concat(wantLSE...), 1e-5, heads, 9)
	if plan := mustRun(t, append(slices.Clone(flags), "--plan")...); !strings.Contains(plan, "path") {
		t.Errorf("the plan is %s", plan)
	}
	for _, bad := range []struct{ flags, want string }{
		{"--cu-k=0,5,9", "cuQ has 4 entries and cuK 3"},
		{"--cu-k=" + clitest.WriteFile(t, dir, "two.npy", clitest.RawNPY(clitest.Dict("|i1", false, 2, 2), []byte{0, 9, 0, 9})), "--cu-k: the file has 2 rows, it must have one axis"},
		{"--cu-k=0,6,5,9", "cuK[2] is 5, after 6"},
		{"--cu-k=0,5,5,8", "cuK[3] is 8, there are 9 keys"},
		{"--weights=" + dir + "/w.npy", "Weights is set, but packed sequences differ in length"},
	} {
		mustFail(t, bad.want, append(slices.Clone(flags), bad.flags)...)
	}
}

// turnPairs is the definition of rotary embedding of half-split pairs, over [.., S, D]
// data whose row i has position i.
func turnPairs(x []float64, seq, d int, base float64) []float64 {
	y := slices.Clone(x)
	for row := range len(x) / d {
		for i := range d / 2 {
			angle := float64(row%seq) * math.Pow(base, -2*float64(i)/float64(d))
			sin, cos := math.Sincos(angle)
			a, b := x[row*d+i], x[row*d+i+d/2]
			y[row*d+i], y[row*d+i+d/2] = a*cos-b*sin, a*sin+b*cos
		}
	}
	return y
}

// TestRunRoPE rotates queries and keys.
func TestRunRoPE(t *testing.T) {
	c := newRunCase(t, "bhsd")
	const base = 100
	c.q, c.k = turnPairs(c.q, c.sq, c.d, base), turnPairs(c.k, c.sk, c.d, base)
	c.run(t, "--rope=100")
	for _, bad := range []struct{ flags, want string }{
		{"--rope=0", "--rope is 0"},
		{"--rope-dim=4", "without a --rope"},
		{"--rope=-1", "base"},
		{"--rope=100 --rope-dim=3", "3"},
	} {
		mustFail(t, bad.want, slices.Concat([]string{"run", "--backend=cpu", "--out", c.dir + "/o.npy"}, c.files, strings.Fields(bad.flags))...)
	}
}
