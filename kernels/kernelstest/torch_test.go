package kernelstest

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/backend/oracle"
	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
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
