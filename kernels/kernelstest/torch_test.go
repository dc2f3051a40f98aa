package kernelstest

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/backend/oracle"
	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/nn"
	"pgregory.net/rapid"
)

// toDouble is the ratio of the unit roundoffs of float64 and float32. Bounds of float32 are convex
// in the roundoff and 0 without it: times toDouble they hold for float64. Two results in float64,
// one of PyTorch and one of Go, differ by at most twice that.
const toDouble = 0x1p-29

// torch is a process that runs testdata/torch_peer.py.
type torch struct {
	version string
	in      io.Writer
	out     *bufio.Reader
	stderr  *bytes.Buffer
}

// startTorch skips the test if no Python of the machine has PyTorch.
func startTorch(t *testing.T) *torch {
	t.Helper()
	pythons := []string{must(filepath.Abs("../../.cache/torch/python"))(t), "python3", "/usr/bin/python3"}
	at := slices.IndexFunc(pythons, func(python string) bool { return exec.Command(python, "-c", "import torch, numpy").Run() == nil })
	if at < 0 {
		t.Skip("there is no PyTorch, results are not compared with it (on Debian: .ci/sid torch)")
	}
	cmd := exec.CommandContext(t.Context(), pythons[at], "testdata/torch_peer.py")
	p := &torch{stderr: new(bytes.Buffer)}
	cmd.Stderr = p.stderr
	in, errIn := cmd.StdinPipe()
	out, errOut := cmd.StdoutPipe()
	noError(t, errors.Join(errIn, errOut, cmd.Start()))
	t.Cleanup(func() {
		in.Close()
		_ = cmd.Wait() // ends at the end of its input
	})
	p.in, p.out = in, bufio.NewReader(out)
	version, err := p.out.ReadString('\n')
	if err != nil {
		t.Fatalf("%v: %s", err, p.stderr)
	}
	p.version = strings.TrimSpace(version)
	return p
}

// torchProblem is a problem for torch_peer.py: float64 arrays are bytes, little endian.
type torchProblem struct {
	Op            string    `json:"op"`
	Dims          []int     `json:"dims"` // as the operation reads them
	Q             []byte    `json:"q"`
	K             []byte    `json:"k"`
	V             []byte    `json:"v"`
	Scale         float64   `json:"scale"`
	IsCausal      bool      `json:"is_causal"` // nothing else hides keys
	Causal        bool      `json:"causal"`
	LowerRight    bool      `json:"lower_right"`
	Offsets       []int     `json:"offsets"`
	Window        []int     `json:"window"`
	Prefix        []int     `json:"prefix"`
	KLen          []int     `json:"klen"`
	QSegments     [][]int32 `json:"q_segments"`
	KSegments     [][]int32 `json:"k_segments"`
	Mask          []byte    `json:"mask"`
	MaskShape     []int     `json:"mask_shape"`
	Blocks        []byte    `json:"blocks"`
	BlocksShape   []int     `json:"blocks_shape"`
	BlockSize     int       `json:"block_size"`
	Bias          []byte    `json:"bias"`
	BiasShape     []int     `json:"bias_shape"`
	Relative      []byte    `json:"relative"`
	RelativeShape []int     `json:"relative_shape"`
	ALiBi         []byte    `json:"alibi"`
	Sinks         []byte    `json:"sinks"`

	// Of gradients.
	Softcap float64 `json:"softcap"`
	Keep    []byte  `json:"keep"` // 1 for each weight that dropout keeps
	// KeepFactor multiplies the weights that are kept.
	KeepFactor float64 `json:"keep_factor"`
	DO         []byte  `json:"do"`
	DLSE       []byte  `json:"dlse"`

	// Of nn.MultiheadAttention.
	Seed        uint64 `json:"seed"` // of its weights
	LayerBias   bool   `json:"layer_bias"`
	Zero        bool   `json:"zero"` // add_zero_attn
	Eval        bool   `json:"eval"`
	Padding     []byte `json:"padding"` // key_padding_mask
	FloatMask   bool   `json:"float_mask"`
	NeedWeights bool   `json:"need_weights"`
	Average     bool   `json:"average"`
}

// torchAnswer is an answer in float64; weights are nil if the version or the call has none.
type torchAnswer struct {
	o, weights []float64
	file       []byte // of the layer
	failed     string // the error in evaluation, after which the answer is that of training

	gradients, single [7][]float64 // computed in float64 and in float32
}

// solve sends a problem.
func (p *torch) solve(problem torchProblem) (torchAnswer, error) {
	text, err := json.Marshal(problem)
	if err != nil {
		return torchAnswer{}, err
	}
	var line []byte
	if _, err = p.in.Write(append(text, '\n')); err == nil {
		line, err = p.out.ReadBytes('\n')
	}
	var a struct {
		O, Weights, File []byte
		Failed           string

		Gradients, Single [7][]byte
	}
	if err == nil {
		err = json.Unmarshal(line, &a)
	}
	if err != nil {
		return torchAnswer{}, fmt.Errorf("PyTorch: %w: %s", err, p.stderr)
	}
	answer := torchAnswer{o: doubles(a.O), weights: doubles(a.Weights), file: a.File, failed: a.Failed}
	for n := range a.Gradients {
		answer.gradients[n], answer.single[n] = doubles(a.Gradients[n]), doubles(a.Single[n])
	}
	return answer, nil
}

// raw returns numbers as float64. Booleans are 0 and 1.
func raw[T float32 | bool](data []T) (b []byte) {
	for _, x := range data {
		number := 0.0
		switch x := any(x).(type) {
		case float32:
			number = float64(x)
		case bool:
			if x {
				number = 1
			}
		}
		b = appendDouble(b, number)
	}
	return b
}

func appendDouble(b []byte, x float64) []byte {
	return binary.LittleEndian.AppendUint64(b, math.Float64bits(x))
}

// compared are the worst values of the backend and of the float64 reference against PyTorch.
type compared struct{ mine, exact oracle.Worst }

// see compares a result in float32 and the reference in float64 with PyTorch. bound is that of
// the result, float32Bound that of the same with an output in float32.
func (c *compared) see(got, ref, torch, bound, float32Bound float64, where func() string) {
	c.mine.See(got, torch, bound+toDouble*float32Bound, where)
	c.exact.See(ref, torch, 2*toDouble*float32Bound, where)
}

// add keeps the worst values of a problem that is right.
func (c *compared) add(problem compared) error {
	err := cmp.Or(problem.mine.Err(), problem.exact.Err())
	if err == nil {
		c.mine.Off, c.exact.Off = max(c.mine.Off, problem.mine.Off), max(c.exact.Off, problem.exact.Off)
	}
	return err
}

func (c compared) String() string {
	return fmt.Sprintf("float32 is off by at most %.2g of its bound, the float64 reference by %.2g", c.mine.Off, c.exact.Off)
}

// TestTorch compares the CPU backend and the oracle with PyTorch's scaled_dot_product_attention
// in float64 on random problems, which have no softcap, score mod or dropout: it has neither of the
// first two, and different random bits. The CPU backend is within the oracle's bound of PyTorch's result, the oracle
// within the bound of float64. What PyTorch does differently is required, counted and printed.
func TestTorch(t *testing.T) {
	peer := startTorch(t)
	dev := kernels.NewDevice(cpu.New(cpu.Options{}))
	defer dev.Close()
	var problems, rows, blind, zeros, leaks, weights, causal int
	var all compared
	check(t, draws(500, 500), func(rt *rapid.T) {
		var here compared
		c := drawCase(rt)
		c.Options.Softcap, c.Options.ScoreMod, c.Options.Dropout = 0, nil, kernels.Dropout{}
		if rapid.IntRange(0, 7).Draw(rt, "is_causal") == 0 {
			c.Options, c.MaskShape, c.BiasShape, c.RelativeShape, c.BlockSize = kernels.Options{Causal: true}, backend.Shape{}, backend.Shape{}, backend.Shape{}, 0
		}
		b := c.build()
		on := b.on(t, dev)
		defer on.release()
		mine := must(on.run(t, weighed))(rt)
		problem := b.torchProblem()
		given := must(peer.solve(problem))(rt)
		// NaN in keys and values that no row sees reaches PyTorch's results. Without it they
		// are those of the rows that do not see it.
		clean := given
		if c.PoisonK != nil || c.PoisonV != nil {
			problem.K, problem.V = raw(withoutNaN(b.k.data)), raw(withoutNaN(b.v.data))
			clean = must(peer.solve(problem))(rt)
		}
		problems++
		if problem.IsCausal {
			causal++
		}
		b.eachRow(func(n, batch, h, i int, ref oracle.Answer) {
			rows++
			single := ref
			if c.DType != backend.F32 {
				wide := *b
				wide.DType = backend.F32
				single = oracle.Solve(wide.row(batch, h, i))
			}
			see := func(what string, at, x int, got float32, ref, bound, float32Bound float64, given, clean []float64) {
				name := func() string { return fmt.Sprintf("%s[%d,%d,%d,%d]", what, batch, h, i, x) }
				want := clean[at]
				switch {
				case math.IsNaN(ref):
					want = given[at]
				case math.IsNaN(given[at]) && !math.IsNaN(want):
					leaks++
				}
				here.see(float64(got), ref, want, bound, float32Bound, name)
			}
			if math.IsInf(ref.LSE, -1) { // a row that sees nothing
				blind++
				if clean.o[n*b.ValueDim] == 0 {
					zeros++
				} else if !math.IsNaN(clean.o[n*b.ValueDim]) {
					rt.Fatalf("%v: row [%d,%d,%d] sees nothing and is %v", c, batch, h, i, clean.o[n*b.ValueDim])
				}
				return
			}
			for x, want := range ref.O {
				at := n*b.ValueDim + x
				see("o", at, x, mine.o[at], want, ref.OBound[x], single.OBound[x], given.o, clean.o)
			}
			for j, want := range ref.Weights {
				if at := n*b.SeqK + j; clean.weights != nil {
					weights++
					bound := ref.WeightBounds[j]
					see("weight", at, j, mine.weights[at], want, bound, bound, given.weights, clean.weights)
				}
			}
		})
		if err := all.add(here); err != nil {
			rt.Fatalf("%v: %v", c, err)
		}
	})
	t.Logf("PyTorch %s: %d problems (%d by is_causal), %d rows, %d weights: %v", peer.version, problems, causal, rows, weights, all)
	t.Logf("PyTorch %s differs: %d of %d rows that see no key are NaN, they are 0 here", peer.version, blind-zeros, blind)
	t.Logf("PyTorch %s differs: %d elements are NaN because of NaN in hidden keys and values, which has no effect here", peer.version, leaks)
}

// torchProblem returns the problem of a case.
func (b *built) torchProblem() torchProblem {
	o, d := b.Options, b.Dims
	p := torchProblem{
		Op: "sdpa", Dims: []int{d.Batch, d.Heads, d.KVHeads, d.SeqQ, d.SeqK, d.Dim, d.ValueDim}, Q: raw(b.q.data), K: raw(b.k.data), V: raw(b.v.data),
		Scale: float64(b.row(0, 0, 0).Scale), Causal: o.Causal, LowerRight: o.Align == kernels.LowerRight, Offsets: o.Offset,
		Prefix: o.Prefix, KLen: o.KLen, QSegments: o.QSegments, KSegments: o.KSegments, ALiBi: raw(o.ALiBi), Sinks: raw(o.Sinks),
		Mask: raw(b.mask), MaskShape: b.MaskShape[:], Blocks: raw(b.blocks), BlocksShape: b.BlockShape[:], BlockSize: b.BlockSize,
		Bias: raw(b.bias.data), BiasShape: b.BiasShape[:], Relative: raw(b.relative.data), RelativeShape: b.RelativeShape[:],
	}
	if o.Window != nil {
		p.Window = []int{o.Window.Left, o.Window.Right}
	}
	plain := kernels.Options{Causal: true}
	p.IsCausal = fmt.Sprint(plain) == fmt.Sprint(o) && b.mask == nil && b.blocks == nil && b.bias.data == nil && b.relative.data == nil
	return p
}

func withoutNaN(data []float32) []float32 {
	data = slices.Clone(data)
	for i, x := range data {
		if x != x {
			data[i] = 0
		}
	}
	return data
}

var updateTorch = flag.Bool("update-torch", false, "write the gradients that PyTorch computes instead of comparing them")

// gradients sends the problem of the gradients of a case, whose hidden NaN become 0.
func (p *torch) gradients(b *built, do, dlse operand) (torchAnswer, error) {
	problem := b.torchProblem()
	problem.Op, problem.Softcap = "gradients", b.Options.Softcap
	problem.K, problem.V = raw(withoutNaN(b.k.data)), raw(withoutNaN(b.v.data))
	problem.DO, problem.DLSE = raw(withoutNaN(do.data)), raw(withoutNaN(dlse.data))
	if drop := b.Options.Dropout; drop.P > 0 {
		var keep []float32
		for n := range b.Batch * b.Heads * b.SeqQ * b.SeqK {
			row := n / b.SeqK
			factor := float32(0)
			if drop.Keeps(row/b.SeqQ/b.Heads, row/b.SeqQ%b.Heads, row%b.SeqQ, n%b.SeqK) {
				factor = 1
			}
			keep = append(keep, factor)
		}
		problem.Keep, problem.KeepFactor = raw(keep), 1/(1-float64(drop.P))
	}
	return p.solve(problem)
}

// exactly returns the values of sums.
func exactly(sums [7][]oracle.Sum) (x [7][]float64) {
	for n := range sums {
		for _, s := range sums[n] {
			x[n] = append(x[n], s.Value)
		}
	}
	return x
}

// TestTorchGradients compares PyTorch's autograd in float64 with the oracle, the CPU backend
// and PyTorch in float32, and with the recorded gradients, which -update-torch writes.
func TestTorchGradients(t *testing.T) {
	peer := startTorch(t)
	ofDoubles := func(_ int, s *oracle.Sum) float64 { return 2 * toDouble * s.Bound(backend.F32) }
	ofFloats := func(_ int, s *oracle.Sum) float64 { return s.Bound(backend.F32) }
	var records, recorded []torchRecord
	noError(t, json.Unmarshal(torchFile, &recorded))
	for n, c := range torchCases() {
		b := c.build()
		do, dlse := b.loss(solve(b, nil).lse)
		a := must(peer.gradients(b, do, dlse))(t)
		sums := b.differentiate(do, dlse)
		r := torchRecord{Case: c.String()}
		var was [7][]float64
		for i, x := range a.gradients {
			for _, y := range x {
				r.Gradients[i] = appendDouble(r.Gradients[i], y)
			}
			if n < len(recorded) {
				was[i] = doubles(recorded[n].Gradients[i])
			}
		}
		records = append(records, r)
		if worst := nearby(was, a.gradients, sums, ofDoubles); worst.Err() != nil && !*updateTorch {
			t.Errorf("recorded: %v: %v", c, worst.Err())
		}
	}
	if *updateTorch {
		text, err := json.MarshalIndent(records, "", " ")
		if err == nil {
			err = os.WriteFile("testdata/torch-gradients.json", append(text, '\n'), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}

	dev := kernels.NewDevice(cpu.New(cpu.Options{}))
	defer dev.Close()
	problems, elements := 0, 0
	var mine, exact, single float64
	check(t, draws(500, 500), func(rt *rapid.T) {
		c := drawCase(rt)
		c.Options.ScoreMod = nil // a function in Go
		on := c.build().on(t, dev)
		defer on.release()
		x := on.forward(t)
		got := must(x.backward(t))(rt)
		a := must(peer.gradients(on.built, x.do, x.dlse))(rt)
		sums := x.differentiate(x.do, x.dlse)
		for _, of := range []struct {
			name  string
			worst oracle.Worst
			most  *float64
		}{
			{"CPU", nearby(got, a.gradients, sums, func(n int, s *oracle.Sum) float64 { return s.Bound(x.gradientType(n)) }), &mine},
			{"oracle", nearby(exactly(sums), a.gradients, sums, ofDoubles), &exact},
			{"PyTorch in float32", nearby(a.single, exactly(sums), sums, ofFloats), &single},
		} {
			if err := of.worst.Err(); err != nil {
				rt.Fatalf("%s: %v: %v", of.name, c, err)
			}
			*of.most = max(*of.most, of.worst.Off)
			elements = elements + of.worst.Considered
		}
		problems++
	})
	t.Logf("PyTorch %s: gradients of %d problems, %d elements: off by at most %.2g of the bound in float32 on the CPU, %.2g of float64's in the reference, %.2g in PyTorch's float32",
		peer.version, problems, elements/3, mine, exact, single)
}

// TestTorchMultiheadAttention compares layers of the CPU backend with PyTorch's nn.MultiheadAttention in float64, with
// weights from a file of its state_dict: self and cross attention, key_padding_mask, attn_mask, need_weights,
// add_zero_attn, in training and in evaluation, for which PyTorch has another code path.
func TestTorchMultiheadAttention(t *testing.T) {
	peer := startTorch(t)
	dev := kernels.NewDevice(cpu.New(cpu.Options{}))
	defer dev.Close()
	var problems, rows, blind, numbers, weights int
	var all compared
	failed := map[string]int{}
	check(t, draws(500, 500), func(rt *rapid.T) {
		var here compared
		l := drawTorchLayer(rt)
		given := must(peer.solve(l.problem()))(rt)
		w := must(l.config.LoadSafetensors(bytes.NewReader(given.file), int64(len(given.file)), ""))(rt)
		y, mine, err := l.run(t, dev, w)
		if err != nil {
			rt.Fatal(err)
		}
		problems++
		if given.failed != "" {
			failed[given.failed]++
		}
		for batch := range l.batch {
			for i := range l.rows {
				want, p, ok := l.row(w, batch, i)
				rows++
				at := (batch*l.rows + i) * l.config.Model
				if !ok { // a head sees nothing
					blind++
					if x := given.o[at]; !math.IsNaN(x) {
						numbers++
					}
					continue
				}
				for m, ref := range want {
					name := func() string { return fmt.Sprintf("y[%d,%d,%d]", batch, i, m) }
					here.see(float64(y[at+m]), ref.x, given.o[at+m], ref.err, ref.err, name)
				}
				for h := range p {
					for j, ref := range p[h] {
						got := float64(mine[((batch*l.config.Heads+h)*l.rows+i)*l.keys+j])
						name := func() string { return fmt.Sprintf("weight[%d,%d,%d,%d]", batch, h, i, j) }
						switch {
						case given.weights == nil:
							here.mine.See(got, ref.x, ref.err, name)
						case !l.average:
							weights++
							theirs := given.weights[((batch*l.config.Heads+h)*l.rows+i)*l.keys+j]
							here.see(got, ref.x, theirs, ref.err, ref.err, name)
						case h == 0: // the mean of the heads
							weights++
							mean, exact, bound := 0.0, 0.0, 0.0
							for h := range p {
								mean += float64(mine[((batch*l.config.Heads+h)*l.rows+i)*l.keys+j]) / float64(l.config.Heads)
								exact += p[h][j].x / float64(l.config.Heads)
								bound += p[h][j].err / float64(l.config.Heads)
							}
							here.see(mean, exact, given.weights[(batch*l.rows+i)*l.keys+j], bound, bound, name)
						}
					}
				}
			}
		}
		if err := all.add(here); err != nil {
			rt.Fatalf("%+v: %v", l, err)
		}
	})
	t.Logf("PyTorch %s: %d layers, %d rows, %d weights: %v", peer.version, problems, rows, weights, all)
	t.Logf("PyTorch %s differs: %d of %d rows with a head that sees no key are NaN, here the head adds 0", peer.version, blind-numbers, blind)
	for text, n := range failed {
		t.Logf("PyTorch %s differs: %d layers fail in evaluation, and are compared in training: %s", peer.version, n, text)
	}
}

// torchLayer is a call of nn.MultiheadAttention.
type torchLayer struct {
	config                        nn.MultiHeadConfig
	batch, rows, keys             int
	cross, zero, eval, float      bool
	needWeights, average, perHead bool
	seed                          uint64
	x, z                          []float32
	padding, mask                 []bool // true hides: [B, Sk], and [Sq, Sk] or [B, H, Sq, Sk]
}

func drawTorchLayer(t *rapid.T) *torchLayer {
	n := func(name string, lo, hi int) int { return rapid.IntRange(lo, hi).Draw(t, name) }
	yes := func(name string) bool { return rapid.Bool().Draw(t, name) }
	l := &torchLayer{batch: n("batch", 1, 3), rows: n("rows", 1, 20), cross: yes("cross"), eval: yes("eval"), needWeights: yes("need_weights"), average: yes("average"), seed: uint64(n("seed", 0, 1<<20))}
	l.config = nn.MultiHeadConfig{Heads: n("heads", 1, 4), Bias: yes("bias")}
	l.config.Model = l.config.Heads * n("head size", 1, 16)
	l.config.Memory, l.keys = l.config.Model, l.rows
	if l.cross {
		l.keys = n("keys", 1, 30)
		if yes("kdim") {
			l.config.Memory = n("memory", 1, 40)
		}
	}
	l.zero = n("add_zero_attn", 0, 3) == 0
	rng := rand.New(rand.NewPCG(l.seed, 0x6d6861))
	normal := func(n int) []float32 {
		data := make([]float32, n)
		for i := range data {
			data[i] = float32(rng.NormFloat64())
		}
		return data
	}
	l.x = normal(l.batch * l.rows * l.config.Model)
	if l.z = l.x; l.cross {
		l.z = normal(l.batch * l.keys * l.config.Memory)
	}
	if yes("padding") {
		l.padding = make([]bool, l.batch*l.keys)
		for b := range l.batch {
			for j := n("length", 0, l.keys); j < l.keys; j++ {
				l.padding[b*l.keys+j] = true
			}
		}
	}
	switch n("mask", 0, 3) {
	case 0: // causal
		l.float = yes("float mask")
		l.mask = make([]bool, l.rows*l.keys)
		for i := range l.mask {
			l.mask[i] = i%l.keys > i/l.keys
		}
	case 1:
		l.float, l.perHead = yes("float mask"), true
		l.mask = make([]bool, l.batch*l.config.Heads*l.rows*l.keys)
		for i := range l.mask {
			l.mask[i] = rng.IntN(4) == 0
		}
	}
	return l
}

// problem returns the call for PyTorch.
func (l *torchLayer) problem() torchProblem {
	p := torchProblem{
		Op: "mha", Dims: []int{l.batch, l.config.Heads, l.rows, l.keys, l.config.Model, l.config.Memory}, Q: raw(l.x), Seed: l.seed, LayerBias: l.config.Bias, Zero: l.zero,
		Eval: l.eval, Padding: raw(l.padding), Mask: raw(l.mask), MaskShape: []int{l.rows, l.keys}, FloatMask: l.float, NeedWeights: l.needWeights, Average: l.average,
	}
	if l.cross {
		p.K = raw(l.z)
	}
	if l.perHead {
		p.MaskShape = []int{l.batch * l.config.Heads, l.rows, l.keys}
	}
	return p
}

// hides reports whether a head of a row does not see a key.
func (l *torchLayer) hides(batch, h, i, j int) bool {
	at := i*l.keys + j
	if l.perHead {
		at += (batch*l.config.Heads + h) * l.rows * l.keys
	}
	return l.padding != nil && l.padding[batch*l.keys+j] || l.mask != nil && l.mask[at]
}

// run applies the layer on a device and returns its output and weights.
func (l *torchLayer) run(t *testing.T, dev *kernels.Device, w nn.MultiHeadWeights) (y, weights []float32, err error) {
	ctx := t.Context()
	layer, err := nn.NewMultiHeadAttention(ctx, dev, l.config, w)
	if err != nil {
		return nil, nil, err
	}
	defer layer.Release()
	opt := nn.MultiHeadOptions{Options: kernels.Options{Weights: true}}
	if l.zero {
		opt.Sinks = make([]float32, l.config.Heads)
	}
	x, err := dev.FromFloat32(ctx, backend.F32, l.x, backend.Shape{l.batch, 1, l.rows, l.config.Model})
	if err != nil {
		return nil, nil, err
	}
	defer x.Release()
	if l.cross {
		if opt.Memory, err = dev.FromFloat32(ctx, backend.F32, l.z, backend.Shape{l.batch, 1, l.keys, l.config.Memory}); err != nil {
			return nil, nil, err
		}
		defer opt.Memory.Release()
	}
	shape := backend.Shape{l.batch, l.config.Heads, l.rows, l.keys}
	seen := make([]bool, shape.Elements())
	for i := range seen {
		seen[i] = !l.hides(i/l.keys/l.rows/l.config.Heads, i/l.keys/l.rows%l.config.Heads, i/l.keys%l.rows, i%l.keys)
	}
	mask, err := backend.Host(seen, backend.Bool, shape)
	if err == nil {
		opt.Mask, err = dev.Upload(ctx, mask)
	}
	if err != nil {
		return nil, nil, err
	}
	defer opt.Mask.Release()
	r, err := layer.Apply(ctx, x, opt)
	if err != nil {
		return nil, nil, err
	}
	defer r.Release()
	return read(t, dev, r.O), read(t, dev, r.Weights), nil
}

// row returns a row of the output with the weights of each head, in float64 with the bounds of
// float32. It reports false if a head sees no key.
func (l *torchLayer) row(w nn.MultiHeadWeights, batch, i int) (y []num, weights [][]num, ok bool) {
	columns := func(data []float32, row, size int) (out []num) {
		for _, x := range data[(row)*size : (row+1)*size] {
			out = append(out, num{x: float64(x)})
		}
		return out
	}
	apply := func(x []num, w, b backend.Tensor, from, n int) (out []num) {
		weight, _ := w.Float32s()
		bias := make([]float32, w.Shape()[backend.Dim])
		if l.config.Bias {
			bias, _ = b.Float32s()
		}
		for c := from; c < from+n; c++ {
			out = append(out, affine(x, func(m int) float64 { return float64(weight[m*len(bias)+c]) }, float64(bias[c]), backend.F32))
		}
		return out
	}
	d := l.config.Model / l.config.Heads
	var joined []num
	for h := range l.config.Heads {
		q := apply(columns(l.x, batch*l.rows+i, l.config.Model), w.Wq, w.Bq, h*d, d)
		var keys []int
		var k, v [][]num
		for j := range l.keys {
			if !l.hides(batch, h, i, j) {
				z := columns(l.z, batch*l.keys+j, l.config.Memory)
				keys, k, v = append(keys, j), append(k, apply(z, w.Wk, w.Bk, h*d, d)), append(v, apply(z, w.Wv, w.Bv, h*d, d))
			}
		}
		if l.zero { // a key of zeros
			k, v = append(k, make([]num, d)), append(v, make([]num, d))
		}
		if len(k) == 0 {
			return nil, nil, false
		}
		o, _, p := attend(q, k, v, backend.F32)
		all := make([]num, l.keys)
		for n, j := range keys {
			all[j] = p[n]
		}
		joined, weights = append(joined, o...), append(weights, all)
	}
	return apply(joined, w.Wo, w.Bo, 0, l.config.Model), weights, true
}
