package run

import (
	"bytes"
	"encoding/binary"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/seed90331342/attn/cmd/internal/cli/clitest"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// runCase is a problem in files.
type runCase struct {
	problem
	dir, layout string
	files       []string // flags of q, k and v
}

func newRunCase(t *testing.T, layout string) *runCase {
	c := &runCase{newProblem(kernels.Dims{Batch: 2, Heads: 4, KVHeads: 2, SeqQ: 5, SeqK: 7, Dim: 8, ValueDim: 6}), t.TempDir(), layout, nil}
	c.files = []string{"--layout", layout, "--q", c.save(t, "q.npy", c.q, c.Heads, c.SeqQ, c.Dim),
		"--k", c.save(t, "k.npy", c.k, c.KVHeads, c.SeqK, c.Dim), "--v", c.save(t, "v.npy", c.v, c.KVHeads, c.SeqK, c.ValueDim)}
	return c
}

// ordered returns [B,H,S,D] data in the layout, with its shape.
func (c *runCase) ordered(data []float64, heads, seq, dim int) ([]float64, []int) {
	if c.layout == "bshd" {
		return swapHeads(data, c.Batch, heads, seq, dim), []int{c.Batch, seq, heads, dim}
	}
	return data, []int{c.Batch, heads, seq, dim}
}

// save writes [B,H,S,D] data in the layout.
func (c *runCase) save(t *testing.T, name string, data []float64, heads, seq, dim int) string {
	data, shape := c.ordered(data, heads, seq, dim)
	return clitest.Save(t, c.dir, name, "<f4", data, shape...)
}

// run runs the problem with more flags, and compares output, log-sum-exp and, if they are
// written, weights with those by package kernels.
func (c *runCase) run(t *testing.T, flags ...string) {
	t.Helper()
	args := slices.Concat([]string{"run", "--backend=cpu", "--check", "--out", c.dir + "/o.npy", "--lse", c.dir + "/l.npy"}, c.files, flags)
	if out := mustRun(t, args...); !strings.HasPrefix(out, "check: 16 rows against float64: ") {
		t.Errorf("--check printed %q", out)
	}
	wantO, wantLSE, wantW := c.solve(t)
	wantO, shape := c.ordered(wantO, c.Heads, c.SeqQ, c.ValueDim)
	wantArray(t, c.dir+"/o.npy", wantO, 1e-5, shape...)
	wantArray(t, c.dir+"/l.npy", wantLSE, 1e-5, c.Batch, c.Heads, c.SeqQ)
	if slices.Contains(flags, "--weights") {
		wantArray(t, c.dir+"/w.npy", wantW, 1e-6, c.Batch, c.Heads, c.SeqQ, c.SeqK)
	}
}

// TestRunOptions compares each flag, and those that interact, with the options that they stand for, fused and staged.
func TestRunOptions(t *testing.T) {
	type file struct {
		flag, descr string
		data        []float64
		shape       []int
		option      func(o *kernels.Options) *kernels.Tensor // which the file is; nil if it is a list
	}
	mask := func(o *kernels.Options) *kernels.Tensor { return &o.Mask }
	bias := func(o *kernels.Options) *kernels.Tensor { return &o.Bias }
	relative := func(o *kernels.Options) *kernels.Tensor { return &o.RelativeBias }
	blocks := func(o *kernels.Options) *kernels.Tensor { return &o.BlockMask }
	drawn := clitest.Normal(9, 2*4*5*7)
	for i := range drawn {
		drawn[i] = float64(kernels.F16.Round(float32(drawn[i])))
	}
	thirds := make([]float64, 5*7) // two of three are true
	for i := range thirds {
		thirds[i] = float64(i % 3)
	}
	slopes := []float64{.25, .0625, .015625, .00390625, .5, .125, .03125, .0078125} // of 4 heads, twice for batch 1
	var alibi []float32
	for _, x := range slopes {
		alibi = append(alibi, float32(x))
	}
	for _, tt := range []struct {
		name, flags string
		opt         kernels.Options
		files       []file
	}{
		{"plain", "", kernels.Options{}, nil},
		{"scale 1", "--scale 1", kernels.Options{Scale: new(1.0)}, nil},
		{"scale 0", "--scale=0", kernels.Options{Scale: new(0.0)}, nil},
		{"negative scale", "--scale -.5", kernels.Options{Scale: new(-.5)}, nil},
		{"softcap", "--softcap 1.5", kernels.Options{Softcap: 1.5}, nil},
		{"causal from the top left", "--causal", kernels.Options{Causal: true}, nil},
		{"causal from the bottom right", "--causal --causal-align bottom-right", kernels.Options{Causal: true, Align: kernels.LowerRight}, nil},
		{"offset", "--causal --offset=1", kernels.Options{Causal: true, Offset: []int{1}}, nil},
		{"offsets of batches", "--causal --offset -1,2", kernels.Options{Causal: true, Offset: []int{-1, 2}}, nil},
		{"prefixes", "--causal --prefix=3,0", kernels.Options{Causal: true, Prefix: []int{3, 0}}, nil},
		{"window from the top left", "--window 2,1", kernels.Options{Window: &kernels.Window{Left: 2, Right: 1}}, nil},
		{"window from the bottom right", "--window 1,0 --causal-align bottom-right", kernels.Options{Window: &kernels.Window{Left: 1}, Align: kernels.LowerRight}, nil},
		{"window without a left side", "--window inf,1", kernels.Options{Window: &kernels.Window{Left: kernels.Unbounded, Right: 1}}, nil},
		{"key lengths, one of them 0", "--klen 0,3", kernels.Options{KLen: []int{0, 3}}, nil},
		{"documents", "--segments=1,1,2,2,9", kernels.Options{QSegments: [][]int32{{1, 1, 2, 2, 9}}, KSegments: [][]int32{{1, 1, 1, 2, 2, 2, 2}}},
			[]file{{"--kv-segments", "|i1", []float64{1, 1, 1, 2, 2, 2, 2, 1, 1, 1, 2, 2, 2, 2}, []int{2, 7}, nil}}},
		{"bool mask [Sq,Sk]", "", kernels.Options{}, []file{{"--mask", "|b1", thirds, []int{5, 7}, mask}}},
		{"bool mask [B,1,1,Sk]", "", kernels.Options{}, []file{{"--mask", "|b1", thirds[:14], []int{2, 1, 1, 7}, mask}}},
		{"float mask [B,H,Sq,Sk]", "", kernels.Options{}, []file{{"--mask", "<f4", drawn, []int{2, 4, 5, 7}, bias}}},
		{"half precision mask [H,Sq,1] with causal", "--causal", kernels.Options{Causal: true}, []file{{"--mask", "<f2", drawn[:20], []int{4, 5, 1}, bias}}},
		{"a bool mask and a bias", "", kernels.Options{},
			[]file{{"--bias", "<f4", drawn[:4*5*7], []int{4, 5, 7}, bias}, {"--mask", "|b1", []float64{1, 0, 1, 0, 1, 0, 1}, []int{7}, mask}}},
		{"a mask of blocks with a window", "--block-size=3 --window=4,3", kernels.Options{BlockSize: 3, Window: &kernels.Window{Left: 4, Right: 3}},
			[]file{{"--block-mask", "|b1", []float64{1, 0, 1, 0, 1, 1}, []int{2, 3}, blocks}}},
		{"alibi as in the paper", "--alibi auto", kernels.Options{ALiBi: alibi[:4]}, nil},
		{"alibi by batch and head in a file, at the end", "--causal-align bottom-right", kernels.Options{ALiBi: alibi, Align: kernels.LowerRight},
			[]file{{"--alibi", "<f4", slopes, []int{2, 4}, nil}}},
		{"a bias by distance, causal", "--causal", kernels.Options{Causal: true}, []file{{"--relative-bias", "<f2", drawn[:4*11], []int{4, 11}, relative}}},
		{"sinks, one of them none", "--sinks 1,-2,-inf,.5", kernels.Options{Sinks: []float32{1, -2, float32(math.Inf(-1)), .5}}, nil},
		{"dropout", "--dropout=.25 --seed=12", kernels.Options{Dropout: kernels.Dropout{P: .25, Seed: 12}}, nil},
		{"everything", "--window=2,2 --offset=1 --klen=7,3 --softcap=3 --sinks=0,0,1,1 --alibi=0,.25,.5,.75",
			kernels.Options{Window: &kernels.Window{Left: 2, Right: 2}, Offset: []int{1}, KLen: []int{7, 3}, Softcap: 3, Sinks: []float32{0, 0, 1, 1}, ALiBi: []float32{0, .25, .5, .75}},
			[]file{{"--relative-bias", "<f4", drawn[:11], []int{11}, relative}}},
	} {
		for _, layout := range []string{"bhsd", "bshd"} {
			t.Run(tt.name+" "+layout, func(t *testing.T) {
				c, flags := newRunCase(t, layout), strings.Fields(tt.flags)
				c.opt = tt.opt
				for _, f := range tt.files {
					flags = append(flags, f.flag, clitest.Save(t, c.dir, f.flag[2:]+".npy", f.descr, f.data, f.shape...))
					if f.option != nil {
						shape := f.shape
						if f.flag == "--relative-bias" { // has no axis of rows
							shape = append(slices.Clone(shape[:len(shape)-1]), 1, 11)
						}
						*f.option(&c.opt) = tensor(t, f.descr, f.data, shape...)
					}
				}
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
	bias := clitest.Normal(8, 5*7)
	c.opt = kernels.Options{Causal: true, Softcap: 2, Bias: tensor(t, "<f4", bias, 5, 7)}
	flags := slices.Concat([]string{"run", "--backend=cpu", "--out", c.dir + "/o.npy", "--causal", "--softcap=2", "--mask", clitest.Save(t, c.dir, "m.npy", "<f4", bias, 5, 7)}, c.files)
	dev := clitest.Open(t, "cpu")
	q, k := tensor(t, "<f4", c.q, c.Batch, c.Heads, c.SeqQ, c.Dim), tensor(t, "<f4", c.k, c.Batch, c.KVHeads, c.SeqK, c.Dim)
	for point, name := range map[kernels.ScorePoint]string{kernels.Scaled: "scaled", kernels.Capped: "capped", kernels.Biased: "biased"} {
		mustRun(t, append(slices.Clone(flags), "--scores", c.dir+"/s.npy", "--scores-at", name)...)
		scores := must.Get(dev.Scores(t.Context(), q, k, point, c.opt))(t)
		wantArray(t, c.dir+"/s.npy", numbers(t, dev, scores), 1e-5, c.Batch, c.Heads, c.SeqQ, c.SeqK)
	}

	mustRun(t, append(slices.Clone(flags), "--lse", c.dir+"/l.npy", "--weights", c.dir+"/all.npy", "--scores", c.dir+"/s.npy", "--topk=3", "--topk-keys", c.dir+"/i.npy", "--topk-weights", c.dir+"/w.npy")...)
	top := must.Get(dev.TopWeights(t.Context(), q, k, 3, c.opt))(t)
	if keys := must.Get(binary.Append(nil, binary.LittleEndian, top.Keys))(t); !bytes.HasSuffix(clitest.ReadFile(t, c.dir+"/i.npy"), keys) {
		t.Errorf("--topk-keys differ from %v", top.Keys)
	}
	wantArray(t, c.dir+"/w.npy", widened(top.Weights), 1e-5, c.Batch, c.Heads, c.SeqQ, 3)

	mustRun(t, append(slices.Clone(flags), "--dropout=.5", "--seed=3", "--keep-mask", c.dir+"/keep.npy")...)
	raw := clitest.ReadFile(t, c.dir+"/keep.npy")
	drop := kernels.Dropout{P: .5, Seed: 3}
	for n, kept := range raw[len(raw)-c.Batch*c.Heads*c.SeqQ*c.SeqK:] {
		if (kept == 1) != drop.Keeps(n/c.SeqK/c.SeqQ/c.Heads, n/c.SeqK/c.SeqQ%c.Heads, n/c.SeqK%c.SeqQ, n%c.SeqK) {
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

// TestRunPacked packs two sequences, and one without keys between them, and compares each with a call of its own.
func TestRunPacked(t *testing.T) {
	const heads, kvHeads, d, dv = 4, 2, 8, 6
	lengths := [][2]int{{3, 5}, {2, 0}, {4, 4}} // rows and keys
	dir := t.TempDir()
	var q, k, v, wantO []float64
	wantLSE := make([][]float64, heads)
	for n, l := range lengths {
		p := problem{Dims: kernels.Dims{Batch: 1, Heads: heads, KVHeads: kvHeads, SeqQ: l[0], SeqK: l[1], Dim: d, ValueDim: dv},
			opt: kernels.Options{Causal: true, Align: kernels.LowerRight}}
		p.q, p.k, p.v = clitest.Normal(uint64(n), heads*l[0]*d), clitest.Normal(uint64(n+9), kvHeads*l[1]*d), clitest.Normal(uint64(n+19), kvHeads*l[1]*dv)
		o, lse, _ := p.solve(t)
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

// turnPairs is the definition of rotary embedding of half-split pairs, over [.., S, D] data whose row i has position i.
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
	c.q, c.k = turnPairs(c.q, c.SeqQ, c.Dim, base), turnPairs(c.k, c.SeqK, c.Dim, base)
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
