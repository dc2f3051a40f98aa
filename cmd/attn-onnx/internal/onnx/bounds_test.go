package onnx

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/backend/oracle"
	"github.com/seed90331342/attn/cmd/attn-onnx/internal/onnxfile"
	"github.com/seed90331342/attn/cmd/internal/cli/clitest"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// u is the unit roundoff of float32.
const u = 0x1p-24

// A drawn call has an error bound for each element of its outputs. An [oracle.Element] is the number that the operator's
// document defines, in float64, and a bound of the error of float32 arithmetic. Copies have 0 there. Rounding to the type
// of the output is added by its method Bound.

// elementsOf returns the elements of a tensor. The device has those of f64 as f32.
func elementsOf(t *onnxfile.Tensor) []oracle.Element {
	list := make([]oracle.Element, t.Elements())
	for i := range list {
		list[i] = elementOf(t, i)
	}
	return list
}

func elementOf(t *onnxfile.Tensor, i int) oracle.Element {
	x := t.At(i)
	if math.IsInf(x, 0) {
		return oracle.Element{Value: x}
	}
	return oracle.Element{Value: x, Err: math.Abs(x - float64(float32(x)))}
}

// float32s returns the elements as f32.
func float32s(list []oracle.Element) []float32 {
	data := make([]float32, len(list))
	for i, e := range list {
		data[i] = float32(e.Value)
	}
	return data
}

// scaled returns x·f with one more rounding.
func scaled(x oracle.Element, f float64) oracle.Element {
	return oracle.Element{Value: x.Value * f, Err: math.Abs(f)*x.Err*(1+u) + u*math.Abs(x.Value*f)}
}

// expect adds an output.
func (c *onnxFiles) expect(d onnxfile.DataType, list []oracle.Element, shape ...int) {
	t := int8s(list, shape...)
	if d != onnxfile.Int8 {
		t = (&array{Dims: shape, Data: list}).tensor(d)
	}
	c.want, c.elements = append(c.want, t), append(c.elements, list)
}

// attendedRow is a query row of an attention call.
type attendedRow struct {
	q, k, v              []oracle.Element // [D], [n, D], [n, Dv]
	bias                 []oracle.Element // [n], added to the scores after the softcap; -Inf hides a key
	scale, softcap, sink float64          // a softcap of 0 and a sink of -Inf are none
}

// solve returns the output, and the scores at each point of [fused].scores.
//
// Package oracle bounds the error of a call whose operands are float32 numbers. Those of the device are other ones: e is
// the most by which that changes a score, with δ the errors of operands. The slope of the softcap is at most 1.
//
//	e = max_j |scale|·Σ_d (δq_d·|k_jd| + |q_d|·δk_jd + δq_d·δk_jd) + |δscale|·Σ_d |q_d·k_jd| + δbias_j
//
// A weight changes by a factor of exp(±2e): in a quotient of exponentials, each errs by e. With the bounds B of package oracle,
//
//	|w_j - ref| <= 1.001·B + (exp(2e) - 1)·w_j
//	|o - ref|   <= 1.001·B + Σ_j w_j·((exp(2e) - 1)·|v_j| + exp(2e)·δv_j)
//
// The terms of second order change B by less than 1/1000, for e up to 2^-12. There is no bound for more. A score
// has the terms of package oracle, of A_j = |scale|·Σ_d |q_d·k_jd|: u·(λ√D + 3)·(A_j + e), 8u·A_j with a softcap, and
// u·(A_j + |bias_j|) for the sum with a bias.
func (r *attendedRow) solve() (o []oracle.Element, points [4][]oracle.Element) {
	d, n := len(r.q), len(r.bias)
	size, scale := len(r.v)/n, math.Abs(r.scale)
	row := oracle.Row{
		Q: float32s(r.q), K: float32s(r.k), V: float32s(r.v), Dv: size, Scale: float32(r.scale), Softcap: float32(r.softcap),
		Bias: func(j int) float64 { return r.bias[j].Value },
	}
	if !math.IsInf(r.sink, -1) {
		row.Sink = new(float32(r.sink))
	}
	e := 0.0
	for j, bias := range r.bias {
		s, terms, off := 0.0, 0.0, 0.0
		for i, x := range r.q {
			y := r.k[j*d+i]
			s += x.Value * y.Value
			terms += math.Abs(x.Value * y.Value)
			off += x.Err*math.Abs(y.Value) + (math.Abs(x.Value)+x.Err)*y.Err
		}
		off = scale*off + math.Abs(r.scale-float64(float32(r.scale)))*terms
		terms *= scale
		p := oracle.Element{Value: s * r.scale, Err: off + u*(oracle.Lambda*math.Sqrt(float64(d))+3)*(terms+off)}
		points[scoresRaw] = append(points[scoresRaw], p)
		if r.softcap > 0 {
			p = oracle.Element{Value: r.softcap * math.Tanh(p.Value/r.softcap), Err: p.Err + 8*u*terms}
		}
		points[scoresCapped] = append(points[scoresCapped], p)
		if p.Value += bias.Value; math.IsInf(p.Value, -1) {
			p.Err = 0
		} else {
			p.Err += bias.Err + u*(terms+math.Abs(bias.Value))
			row.Listed++ // hidden keys add zeros, which is exact
			e = max(e, off+bias.Err)
		}
		points[scoresBiased] = append(points[scoresBiased], p)
	}
	if row.Listed = max(row.Listed, 1); e > 0x1p-12 {
		e = math.NaN() // a bound that no number is within
	}
	a, moved := oracle.Solve(row), math.Expm1(2*e)
	o = make([]oracle.Element, size)
	for i := range o {
		o[i].Err = 1.001 * a.OBound[i]
	}
	for j, w := range softmax(points[scoresBiased], r.sink) {
		points[scoresSoftmax] = append(points[scoresSoftmax], oracle.Element{Value: w, Err: 1.001*a.WeightBounds[j] + moved*w})
		for i := range o {
			v := r.v[j*size+i]
			o[i].Value += w * v.Value
			o[i].Err += w * (moved*math.Abs(v.Value) + (1+moved)*v.Err)
		}
	}
	return o, points
}

// softmax returns the weights of a row of scores and a sink, a logit without a value. A row
// without visible keys has zeros.
func softmax(scores []oracle.Element, sink float64) []float64 {
	top := sink
	for _, x := range scores {
		top = max(top, x.Value)
	}
	weights := make([]float64, len(scores))
	if math.IsInf(top, -1) {
		return weights
	}
	sum := math.Exp(sink - top)
	for j, x := range scores {
		weights[j] = math.Exp(x.Value - top)
		sum += weights[j]
	}
	for j := range weights {
		weights[j] /= sum
	}
	return weights
}

// norm replaces heads, which have no errors, by their root-mean-square norms.
func norm(heads []oracle.Element, weights *onnxfile.Tensor, epsilon float64) {
	w := float32s(elementsOf(weights))
	for at := 0; at < len(heads); at += len(w) {
		copy(heads[at:], oracle.Normalise(float32s(heads[at:at+len(w)]), w, backend.Norm{Epsilon: epsilon}))
	}
}

// rotate rotates two elements. Their products with c and s and the sum have a rounding each, errors of the elements grow with them.
func rotate(a, b *oracle.Element, c, s float64) {
	turn := func(x, y oracle.Element, c, s float64) oracle.Element {
		p, q := scaled(x, c), scaled(y, s)
		return oracle.Element{Value: p.Value + q.Value, Err: (1+u)*(p.Err+q.Err) + u*(math.Abs(p.Value+q.Value))}
	}
	*a, *b = turn(*a, *b, c, -s), turn(*a, *b, s, c)
}

// compare runs the call from its files and returns the value that is closest to its bound or furthest beyond it.
func (c *onnxFiles) compare(t *testing.T, dev *kernels.Device, name string) (worst oracle.Worst) {
	t.Helper()
	dir := c.write(t, filepath.Join(t.TempDir(), name))
	model := must.Get(onnxfile.DecodeModel(must.Get(os.ReadFile(filepath.Join(dir, "model.onnx")))(t)))(t)
	n := must.Get(newNode(model))(t)
	tensors, _, err := readDataSet(t.Context(), model, filepath.Join(dir, "test_data_set_0"))
	must.Do(t, err)
	got, _, err := n.run(t.Context(), dev, tensors)
	must.Do(t, err)
	for i, want := range c.want {
		if want == nil {
			continue
		}
		output := n.schema.outputs[i]
		x := got[output]
		if x.Type != want.Type || !slices.Equal(x.Shape, want.Shape) {
			t.Fatalf("%s: %s is %v %v, should be %v %v", name, output, x.Type, x.Shape, want.Type, want.Shape)
		}
		for at, e := range c.elements[i] {
			value, bound := 0.0, 0.0
			if x.Type.Float() {
				value, bound = x.At(at), e.Bound(dtypeOf(x.Type))
			} else {
				value = float64(x.Int(at))
			}
			worst.See(value, e.Value, bound, func() string { return fmt.Sprintf("%s: element %d of %s", name, at, output) })
		}
	}
	return worst
}

// drawnCalls draw random calls of each operator. onGPU is the number of those that run on the GPU.
var drawnCalls = map[string]struct {
	onGPU int
	draw  func(seed uint64) *onnxFiles
}{
	"Attention":           {16, drawONNX},
	"GroupQueryAttention": {8, func(seed uint64) *onnxFiles { return drawGroupQuery(seed, false) }},
	"WindowCache":         {8, func(seed uint64) *onnxFiles { return drawWindowCache(seed, false) }},
	"MultiHeadAttention":  {8, drawMultiHead},
	"PagedAttention":      {8, drawPaged},
	"LinearAttention":     {8, func(seed uint64) *onnxFiles { return drawLinear(seed, seed%2 > 0) }},
	"CausalConv":          {8, func(seed uint64) *onnxFiles { return drawConv(seed, seed%2 > 0) }},
}

// TestDrawn compares random calls with the operators' documents in float64: on the CPU, on its gonum tier, and on the GPU,
// where -short leaves a quarter of them.
func TestDrawn(t *testing.T) {
	run := func(t *testing.T, device string, draws func(onGPU int) int) {
		dev := must.Get(kernels.Open(device))(t)
		defer dev.Close()
		for name, op := range drawnCalls {
			t.Run(name, func(t *testing.T) {
				least := 0.0
				for seed := range uint64(draws(op.onGPU)) {
					worst := op.draw(seed).compare(t, dev, fmt.Sprint("seed", seed))
					if least = max(least, worst.Off); worst.Err() != nil {
						t.Error(worst.Err())
					}
				}
				t.Logf("%.2g of the bound at worst", least)
			})
		}
	}
	t.Run("cpu", func(t *testing.T) { run(t, "cpu", func(int) int { return 300 }) })
	t.Run("gonum", func(t *testing.T) {
		t.Setenv("ATTN_CPU_TIER", "gonum")
		run(t, "cpu", func(int) int { return 60 })
	})
	t.Run("gpu", func(t *testing.T) {
		clitest.NeedBackend(t, "gpu")
		run(t, "gpu", func(onGPU int) int {
			if testing.Short() {
				onGPU /= 4
			}
			return onGPU
		})
	})
}

// TestBoundsOfDrawn: calls with a mistake are further off than the bounds allow, in each operator that has what is wrong.
func TestBoundsOfDrawn(t *testing.T) {
	dev := must.Get(kernels.Open("cpu"))(t)
	defer dev.Close()
	for mistake, c := range map[string]struct {
		attribute string
		factor    float32
	}{
		"a scale that is off by half a unit of f16": {"scale", 1 + 0x1p-12},
		"a softcap that is off by a unit of f16":    {"softcap", 1 + 0x1p-10},
		"no softcap":                                {"softcap", 0},
	} {
		for name, op := range drawnCalls {
			drawn, found := 0, 0
			for seed := range uint64(40) {
				call := op.draw(seed)
				if call.floats[c.attribute] == 0 {
					continue
				}
				call.floats[c.attribute] *= c.factor
				worst := call.compare(t, dev, fmt.Sprint(mistake, name, seed))
				if drawn++; worst.Err() != nil {
					found++
				}
			}
			if drawn > 0 && found == 0 {
				t.Errorf("%s: none of %d calls with %s is beyond its bounds", name, drawn, mistake)
			}
		}
	}
}
