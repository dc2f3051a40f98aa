package run

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cmd/internal/cli/clitest"
)

// runCase is a problem in files, with the result of plain attention.
type runCase struct {
	plainAttention
	dir   string
	files []string // flags
}

func newRunCase(t *testing.T) runCase {
	c := runCase{plainAttention: plainAttention{b: 2, h: 4, hkv: 2, sq: 5, sk: 7, d: 8, dv: 6, scale: 1 / math.Sqrt(8)}, dir: t.TempDir()}
	c.q, c.k, c.v = clitest.Normal(1, c.b*c.h*c.sq*c.d), clitest.Normal(2, c.b*c.hkv*c.sk*c.d), clitest.Normal(3, c.b*c.hkv*c.sk*c.dv)
	c.files = []string{"--q", clitest.Save(t, c.dir, "q.npy", "<f4", c.q, c.b, c.h, c.sq, c.d),
		"--k", clitest.Save(t, c.dir, "k.npy", "<f4", c.k, c.b, c.hkv, c.sk, c.d),
		"--v", clitest.Save(t, c.dir, "v.npy", "<f4", c.v, c.b, c.hkv, c.sk, c.dv)}
	return c
}

// run runs the problem with more flags, compares output and log-sum-exp with plain
// attention, and returns the bytes of the output.
func (c *runCase) run(t *testing.T, flags ...string) []byte {
	t.Helper()
	return c.compare(t, slices.Concat(c.files, flags)...)
}

func (c *runCase) compare(t *testing.T, flags ...string) []byte {
	t.Helper()
	args := slices.Concat([]string{"run", "--backend=cpu", "--check", "--out", c.dir + "/o.npy", "--lse", c.dir + "/l.npy"}, flags)
	mustRun(t, args...)
	wantO, wantLSE, _ := c.solve()
	o, _, _ := clitest.Load(t, c.dir+"/o.npy")
	clitest.Near(t, "output", o, wantO, 1e-5)
	lse, _, _ := clitest.Load(t, c.dir+"/l.npy")
	clitest.Near(t, "lse", lse, wantLSE, 1e-5)
	raw, err := os.ReadFile(c.dir + "/o.npy")
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

// TestRunMoreOptions compares options from numbers and files with plain attention. It
// then runs the printed problem of the same flags, which must yield the same bytes.
func TestRunMoreOptions(t *testing.T) {
	slopes := []float64{.25, .0625, .015625, .00390625} // of 4 heads
	for _, tt := range []struct {
		name  string
		flags func(t *testing.T, c *runCase) []string
	}{
		{"alibi as in the paper", func(_ *testing.T, c *runCase) []string {
			c.bias = func(_, h, i, j int) float64 { return -slopes[h] * math.Abs(float64(i-j)) }
			return []string{"--alibi", "auto"}
		}},
		{"alibi by batch and head in a file, at the end", func(t *testing.T, c *runCase) []string {
			c.bias = func(b, h, i, j int) float64 { return -slopes[h] * float64(1+b) * math.Abs(float64(i+2-j)) }
			file := clitest.Save(t, c.dir, "a.npy", "<f4", []float64{.25, .0625, .015625, .00390625, .5, .125, .03125, .0078125}, 2, 4)
			return []string{"--alibi", file, "--causal-align", "bottom-right"}
		}},
		{"a bias by distance, causal", func(t *testing.T, c *runCase) []string {
			r := clitest.Normal(5, 4*11)
			c.bias = func(_, h, i, j int) float64 { return r[h*11+j-i+4] }
			c.hidden = func(_, _, i, j int) bool { return j > i }
			return []string{"--relative-bias", clitest.Save(t, c.dir, "r.npy", "<f2", r, 4, 11), "--causal"}
		}},
		{"sinks, one of them none", func(_ *testing.T, c *runCase) []string {
			c.sinks = []float64{1, -2, math.Inf(-1), .5}
			return []string{"--sinks", "1,-2,-inf,.5"}
		}},
		{"a mask of blocks with a window", func(t *testing.T, c *runCase) []string {
			m := []float64{1, 0, 1, 0, 1, 1}
			c.hidden = func(_, _, i, j int) bool { return m[i/3*3+j/3] == 0 || j < i-4 || j > i+3 }
			return []string{"--block-mask", clitest.Save(t, c.dir, "b.npy", "|b1", m, 2, 3), "--block-size=3", "--window=4,3"}
		}},
		{"a bool mask and a bias", func(t *testing.T, c *runCase) []string {
			bias := clitest.Normal(6, 4*5*7)
			c.bias = func(_, h, i, j int) float64 { return bias[(h*5+i)*7+j] }
			c.hidden = func(_, _, _, j int) bool { return j%2 == 1 }
			return []string{"--bias", clitest.Save(t, c.dir, "x.npy", "<f4", bias, 4, 5, 7), "--mask", clitest.Save(t, c.dir, "m.npy", "|b1", []float64{1, 0, 1, 0, 1, 0, 1}, 7)}
		}},
		{"prefixes", func(_ *testing.T, c *runCase) []string {
			c.hidden = func(b, _, i, j int) bool { return j > i && j >= []int{3, 0}[b] }
			return []string{"--causal", "--prefix=3,0"}
		}},
		{"documents", func(t *testing.T, c *runCase) []string {
			q, k := []int{1, 1, 2, 2, 9}, []int{1, 1, 1, 2, 2, 2, 2}
			c.hidden = func(_, _, i, j int) bool { return q[i] != k[j] }
			raw := []byte{1, 1, 1, 2, 2, 2, 2, 1, 1, 1, 2, 2, 2, 2}
			file := clitest.WriteFile(t, c.dir, "ids.npy", clitest.RawNPY(clitest.Dict("|i1", false, 2, 7), raw))
			return []string{"--segments=1,1,2,2,9", "--kv-segments", file}
		}},
		{"offset", func(_ *testing.T, c *runCase) []string {
			c.hidden = func(_, _, i, j int) bool { return j > i+1 }
			return []string{"--causal", "--offset=1"}
		}},
		{"dropout", func(_ *testing.T, c *runCase) []string {
			drop := backend.Dropout{P: .25, Seed: 12}
			c.keeps = drop.Keeps
			c.kept = 1 / .75
			return []string{"--dropout=.25", "--seed=12"}
		}},
		{"everything", func(t *testing.T, c *runCase) []string {
			r := clitest.Normal(5, 11)
			c.bias = func(_, h, i, j int) float64 { return r[j-i+4] - float64(h)/4*math.Abs(float64(i+1-j)) }
			c.hidden = func(b, _, i, j int) bool { return j > i+3 || j < i-1 || j >= []int{7, 3}[b] }
			c.sinks = []float64{0, 0, 1, 1}
			c.softcap = 3
			return []string{"--relative-bias", clitest.Save(t, c.dir, "r.npy", "<f4", r, 11), "--window=2,2", "--offset=1", "--klen=7,3", "--softcap=3",
				"--sinks=0,0,1,1", "--alibi=0,.25,.5,.75"}
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := newRunCase(t)
			flags := tt.flags(t, &c)
			direct := c.run(t, flags...)
			text := mustRun(t, slices.Concat([]string{"run", "--print-problem"}, c.files, flags)...)
			file := clitest.WriteFile(t, c.dir, "problem.json", []byte(text))
			if again := c.compare(t, "--problem", file); !bytes.Equal(direct, again) {
				t.Errorf("the printed problem gives another output:\n%s", text)
			}
			if second := mustRun(t, "run", "--print-problem", "--problem", file); second != text {
				t.Errorf("the problem prints as\n%s\nand read again as\n%s", text, second)
			}
		})
	}
}

// TestRunPast splits keys and values into earlier and new ones: causal queries are at
// the end, and the present output is the whole.
func TestRunPast(t *testing.T) {
	for _, layout := range []string{"bhsd", "bshd"} {
		c := newRunCase(t)
		c.hidden = func(_, _, i, j int) bool { return j > i+2 } // the past has 2 keys
		const past = 2
		file := func(name string, data []float64, from, to, d int) string {
			var part []float64
			for g := range c.b * c.hkv {
				part = append(part, data[(g*c.sk+from)*d:(g*c.sk+to)*d]...)
			}
			if layout == "bshd" {
				return clitest.Save(t, c.dir, name, "<f4", swapHeads(part, c.b, c.hkv, to-from, d), c.b, to-from, c.hkv, d)
			}
			return clitest.Save(t, c.dir, name, "<f4", part, c.b, c.hkv, to-from, d)
		}
		q := clitest.Save(t, c.dir, "q2.npy", "<f4", c.q, c.b, c.h, c.sq, c.d)
		if layout == "bshd" {
			q = clitest.Save(t, c.dir, "q2.npy", "<f4", swapHeads(c.q, c.b, c.h, c.sq, c.d), c.b, c.sq, c.h, c.d)
		}
		mustRun(t, "run", "--backend=cpu", "--layout", layout, "--causal", "--out", c.dir+"/o.npy", "--q", q,
			"--past-k", file("pk.npy", c.k, 0, past, c.d), "--k", file("nk.npy", c.k, past, c.sk, c.d),
			"--past-v", file("pv.npy", c.v, 0, past, c.dv), "--v", file("nv.npy", c.v, past, c.sk, c.dv),
			"--present-k", c.dir+"/k3.npy", "--present-v", c.dir+"/v3.npy")
		want, _, _ := c.solve()
		wantK, wantV := c.k, c.v
		if layout == "bshd" {
			want = swapHeads(want, c.b, c.h, c.sq, c.dv)
			wantK, wantV = swapHeads(c.k, c.b, c.hkv, c.sk, c.d), swapHeads(c.v, c.b, c.hkv, c.sk, c.dv)
		}
		o, _, _ := clitest.Load(t, c.dir+"/o.npy")
		clitest.Near(t, layout+" output", o, want, 1e-5)
		k, shape, _ := clitest.Load(t, c.dir+"/k3.npy")
		clitest.Near(t, layout+" present keys", k, wantK, 0)
		if shape[2] != map[string]int{"bhsd": c.sk, "bshd": c.hkv}[layout] {
			t.Errorf("%s: present keys have shape %v", layout, shape)
		}
		v, _, _ := clitest.Load(t, c.dir+"/v3.npy")
		clitest.Near(t, layout+" present values", v, wantV, 0)
	}
}

// TestRunPairs checks the outputs with an element for each query and key: scores at
// each stage, largest weights, and the mask of dropout.
func TestRunPairs(t *testing.T) {
	c := newRunCase(t)
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
		got, shape, _ := clitest.Load(t, c.dir+"/s.npy")
		if !slices.Equal(shape, []int{c.b, c.h, c.sq, c.sk}) {
			t.Errorf("scores have shape %v", shape)
		}
		clitest.Near(t, "scores "+point, got, want, 1e-5)
	}

	mustRun(t, append(slices.Clone(flags), "--lse", c.dir+"/l.npy", "--weights", c.dir+"/all.npy", "--scores", c.dir+"/s.npy", "--topk=3", "--topk-keys", c.dir+"/i.npy", "--topk-weights", c.dir+"/w.npy")...)
	_, _, weights := c.solve()
	top, shape, _ := clitest.Load(t, c.dir+"/w.npy")
	if !slices.Equal(shape, []int{c.b, c.h, c.sq, 3}) {
		t.Errorf("top weights have shape %v", shape)
	}
	rows, err := os.ReadFile(c.dir + "/i.npy")
	if err != nil {
		t.Fatal(err)
	}
	keys := rows[len(rows)-4*len(top):]
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
	clitest.Near(t, "top weights", top, want, 1e-5)

	mustRun(t, append(slices.Clone(flags), "--dropout=.5", "--seed=3", "--keep-mask", c.dir+"/keep.npy")...)
	raw, err := os.ReadFile(c.dir + "/keep.npy")
	if err != nil {
		t.Fatal(err)
	}
	drop := backend.Dropout{P: .5, Seed: 3}
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
	o, shape, _ := clitest.Load(t, dir+"/o.npy")
	if !slices.Equal(shape, []int{9, heads, dv}) {
		t.Errorf("the output has shape %v", shape)
	}
	clitest.Near(t, "output", o, wantO, 1e-5)
	lse, shape, _ := clitest.Load(t, dir+"/l.npy")
	if !slices.Equal(shape, []int{heads, 9}) {
		t.Errorf("lse has shape %v", shape)
	}
	clitest.Near(t, "lse", lse, slices.Concat(wantLSE...), 1e-5)
	first, err := os.ReadFile(dir + "/o.npy")
	if err != nil {
		t.Fatal(err)
	}
	text := mustRun(t, append(slices.Clone(flags), "--print-problem")...)
	mustRun(t, "run", "--backend=cpu", "--out", dir+"/o.npy", "--problem", clitest.WriteFile(t, dir, "p.json", []byte(text)))
	again, err := os.ReadFile(dir + "/o.npy")
	if err != nil || !bytes.Equal(first, again) {
		t.Errorf("the printed problem gives another output, %v:\n%s", err, text)
	}
	if plan := mustRun(t, append(slices.Clone(flags), "--plan")...); !strings.Contains(plan, "path") {
		t.Errorf("the plan is %s", plan)
	}
	for _, bad := range []struct{ flags, want string }{
		{"--cu-k=0,5,9", "cuK has 3 entries, cuQ has 4"},
		{"--cu-k=0,6,5,9", "cuK[2] is 5, less than cuK[1]"},
		{"--cu-k=0,5,5,8", "cuK[3] is 8, there are 9 keys"},
		{"--weights=" + dir + "/w.npy", "Weights is set, but packed sequences differ in length"},
	} {
		mustFail(t, bad.want, append(slices.Clone(flags), bad.flags)...)
	}
}

// turnPairs is the definition of rotary embedding of half-split pairs, over [.., S, D]
// data whose row i has position from+i.
func turnPairs(x []float64, seq, d, from int, base float64) []float64 {
	y := slices.Clone(x)
	for row := range len(x) / d {
		for i := range d / 2 {
			angle := float64(from+row%seq) * math.Pow(base, -2*float64(i)/float64(d))
			sin, cos := math.Sincos(angle)
			a, b := x[row*d+i], x[row*d+i+d/2]
			y[row*d+i], y[row*d+i+d/2] = a*cos-b*sin, a*sin+b*cos
		}
	}
	return y
}

// TestRunRoPE rotates queries and keys, all of them and those after rotated earlier
// ones.
func TestRunRoPE(t *testing.T) {
	c := newRunCase(t)
	q, k := c.q, c.k
	const base = 100
	c.q, c.k = turnPairs(q, c.sq, c.d, 0, base), turnPairs(k, c.sk, c.d, 0, base)
	c.run(t, "--rope=100")
	c.run(t, "--rope=100", "--problem=") // an empty name is none
	text := mustRun(t, slices.Concat([]string{"run", "--print-problem", "--rope=100"}, c.files)...)
	c.compare(t, "--problem", clitest.WriteFile(t, c.dir, "rope.json", []byte(text)))

	const past = 3
	part := func(name string, data []float64, from, to, d int) string {
		var rows []float64
		for g := range c.b * c.hkv {
			rows = append(rows, data[(g*c.sk+from)*d:(g*c.sk+to)*d]...)
		}
		return clitest.Save(t, c.dir, name, "<f4", rows, c.b, c.hkv, to-from, d)
	}
	c.q = turnPairs(q, c.sq, c.d, past, base)
	c.compare(t, "--rope=100", "--q", c.files[1], "--past-k", part("pk.npy", c.k, 0, past, c.d), "--k", part("nk.npy", k, past, c.sk, c.d),
		"--past-v", part("pv.npy", c.v, 0, past, c.dv), "--v", part("nv.npy", c.v, past, c.sk, c.dv), "--present-k", c.dir+"/present.npy")
	present, _, _ := clitest.Load(t, c.dir+"/present.npy")
	clitest.Near(t, "present keys", present, c.k, 1e-5)

	for _, bad := range []struct{ flag, want string }{
		{"--rope=0", "--rope is 0"},
		{"--rope-dim=4", "without a --rope"},
		{"--rope=-1", "base"},
	} {
		mustFail(t, bad.want, slices.Concat([]string{"run", "--backend=cpu", "--out", c.dir + "/o.npy", bad.flag}, c.files)...)
	}
	mustFail(t, "3", slices.Concat([]string{"run", "--backend=cpu", "--out", c.dir + "/o.npy", "--rope=100", "--rope-dim=3"}, c.files)...)
}

// TestRunBadOptions checks the errors of wrong options on good files.
func TestRunBadOptions(t *testing.T) {
	c := newRunCase(t)
	array := func(name, descr string, shape ...int) string {
		return clitest.Save(t, c.dir, name, descr, clitest.Normal(1, clitest.Elements(shape)), shape...)
	}
	json := func(name, text string) string { return clitest.WriteFile(t, c.dir, name, []byte(text)) }
	block := array("block.npy", "|b1", 2, 3)
	good := mustRun(t, slices.Concat([]string{"run", "--print-problem"}, c.files)...)
	for _, tt := range []struct {
		name  string
		flags []string
		want  string
	}{
		{"too few slopes", []string{"--alibi=1,2"}, "alibi has 2 slopes, there are 4 heads"},
		{"a slope that is no number", []string{"--alibi=1,x"}, `--alibi: "x" is not a number`},
		{"an infinite slope", []string{"--alibi=1,1,1,inf"}, "alibi[3] is +Inf"},
		{"too many sinks", []string{"--sinks=1,2,3,4,5"}, "sinks has 5 logits, there are 4 heads"},
		{"a sink of NaN", []string{"--sinks=1,2,3,nan"}, "sinks[3] is NaN"},
		{"a short table of distances", []string{"--relative-bias", array("r.npy", "<f4", 4, 10)}, "relative bias: shape [1 4 1 10] does not broadcast to [2 4 1 11]"},
		{"a table with rows", []string{"--relative-bias", array("r4.npy", "<f4", 1, 4, 1, 11)}, "has 4 axes, it must be [Sq+Sk-1]"},
		{"blocks without a size", []string{"--block-mask", block}, "block size is 0"},
		{"a size without blocks", []string{"--block-size=4"}, "without a --block-mask"},
		{"blocks of another size", []string{"--block-mask", block, "--block-size=4"}, "block mask: shape [1 1 2 3] does not broadcast to [2 4 2 2]"},
		{"blocks of numbers", []string{"--block-mask", array("b4.npy", "<f4", 2, 3), "--block-size=3"}, "must be bool"},
		{"two masks of numbers", []string{"--mask", array("m.npy", "<f4", 5, 7), "--bias", array("m.npy", "<f4", 5, 7)}, "add them up in one file"},
		{"all dropped", []string{"--dropout=1"}, "dropout is 1, it must be at least 0 and less than 1"},
		{"ids for half of the rows", []string{"--segments=1,2"}, "segments"},
		{"ids that come back", []string{"--segments=1,1,1,1,1", "--kv-segments=1,1,2,2,1,1,1"}, "1"},
		{"ids that are words", []string{"--segments=a,b"}, `"a" is not a whole number of 32 bits`},
		{"ids as numbers with a point", []string{"--segments", c.files[1]}, "they must be integers"},
		{"too many prefixes", []string{"--causal", "--prefix=1,2,3"}, "prefix has 3"},
		{"a past without values", []string{"--past-k", c.files[3]}, "--past-k and --past-v go together"},
		{"a past of other heads", []string{"--past-k", array("p.npy", "<f4", 2, 4, 3, 8), "--past-v", array("p.npy", "<f4", 2, 4, 3, 8)}, "only the number of keys may differ"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			mustFail(t, tt.want, slices.Concat([]string{"run", "--backend=cpu", "--out", c.dir + "/o.npy"}, c.files, tt.flags)...)
		})
	}
	for _, tt := range []struct{ name, file, want string }{
		{"not there", c.dir + "/none.json", "none.json: no such file"},
		{"empty", json("empty.json", ""), "the file is cut short"},
		{"cut", json("cut.json", good[:len(good)/2]), "the file is cut short"},
		{"two", json("two.json", good+good), "something follows the object"},
		{"an unknown field", json("field.json", `{"q":"x","colour":1}`), `unknown field "colour"`},
		{"another layout", json("layout.json", `{"layout":"sbhd"}`), `layout is "sbhd"`},
		{"another type", json("type.json", `{"dtype":"f64"}`), `dtype is "f64"`},
		{"no keys", json("keys.json", `{"q":"q.npy","v":"v.npy"}`), "q, k or v is missing"},
		{"a past without values", json("past.json", strings.Replace(good, `"v":`, `"past_k":"k.npy","v":`, 1)), "--past-k and --past-v go together"},
		{"a list", json("list.json", "[1]"), "line 1: not a JSON object but an array"},
		{"a number as a file", json("file.json", "{\n\"q\": 1}"), "line 2: q is a number, it must be a string"},
		{"a string as a number", json("scale.json", `{"scale":"1"}`), "line 1: scale is a string, it must be a number"},
		{"a fraction as lengths", json("klen.json", `{"visible":{"klen":[1.5]}}`), "line 1: visible.klen is a number 1.5, it must be a whole number"},
		{"other lengths", json("dims.json", strings.Replace(good, `"seq_q": 5`, `"seq_q": 6`, 1)), "those of its files are"},
	} {
		t.Run("problem "+tt.name, func(t *testing.T) {
			mustFail(t, tt.want, "run", "--backend=cpu", "--out", c.dir+"/o.npy", "--problem", tt.file)
		})
	}
	mustFail(t, "excludes the flags of the problem", "run", "--out", c.dir+"/o.npy", "--causal", "--problem", json("good.json", good))
}

// TestPrintProblem checks the canonical form: defaults are resolved.
func TestPrintProblem(t *testing.T) {
	c := newRunCase(t)
	text := mustRun(t, slices.Concat([]string{"run", "--print-problem", "--causal", "--causal-align=bottom-right", "--window=3,9", "--sinks=-inf,1,2,3"}, c.files)...)
	var got map[string]any
	if err := json.Unmarshal([]byte(text), &got); err != nil {
		t.Fatalf("%v:\n%s", err, text)
	}
	// 7 keys, 5 queries: the diagonal starts at key 2.
	for key, want := range map[string]string{
		"scale": "0.35355339059327373", "dtype": "f32", "layout": "bhsd", "sinks": "[-Inf 1 2 3]",
		"visible": "map[left:3 offset:2 right:0]", "dims": "map[batch:2 dim:8 heads:4 kv_heads:2 seq_k:7 seq_q:5 value_dim:6]",
	} {
		if s := fmt.Sprint(got[key]); s != want {
			t.Errorf("%s is %s, should be %s", key, s, want)
		}
	}
}
