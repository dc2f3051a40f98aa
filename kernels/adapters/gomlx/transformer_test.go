package gomlx_test

import (
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/dtypes"
	"github.com/gomlx/compute/gobackend"
	. "github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/core/tensors"
	"github.com/gomlx/gomlx/ml/layers/attention"
	"github.com/seed90331342/attn/backend"
	_ "github.com/seed90331342/attn/cpu"
	_ "github.com/seed90331342/attn/gpu"
	"github.com/seed90331342/attn/kernels"
	attngomlx "github.com/seed90331342/attn/kernels/adapters/gomlx"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// transformer is a causal language model: layers of grouped-query attention and of a ReLU network,
// each after a root-mean-square norm, with the embedding as the last layer.
type transformer struct {
	vocab, layers, heads, kvHeads, headDim, seq, batch int
}

func (m transformer) width() int { return m.heads * m.headDim }

// shapes returns those of the weights: the embedding, and of each layer q, k, v, o, up and down.
func (m transformer) shapes() [][]int {
	w, kv := m.width(), m.kvHeads*m.headDim
	shapes := [][]int{{m.vocab, w}}
	for range m.layers {
		shapes = append(shapes, []int{w, w}, []int{w, kv}, []int{w, kv}, []int{w, w}, []int{w, 4 * w}, []int{4 * w, w})
	}
	return shapes
}

// weights returns random ones of the type of T.
func weights[T float32 | float64](m transformer) (all []any) {
	rng := rand.New(rand.NewPCG(1, 2))
	for _, shape := range m.shapes() {
		x := make([]T, shape[0]*shape[1])
		for i := range x {
			x[i] = T(float32(rng.NormFloat64() / math.Sqrt(float64(shape[0]))))
		}
		all = append(all, tensors.FromFlatDataAndDimensions(x, shape...))
	}
	return all
}

// tokens returns a batch of sequences of seq+1 tokens.
func (m transformer) tokens() *tensors.Tensor {
	x := make([]int32, m.batch*(m.seq+1))
	for i := range x {
		x[i] = int32(i * i % m.vocab)
	}
	return tensors.FromFlatDataAndDimensions(x, m.batch, m.seq+1)
}

// loss returns the mean cross entropy of the next tokens.
func (m transformer) loss(tokens *Node, w []*Node) *Node {
	norm := func(x *Node) *Node {
		return Div(x, Sqrt(AddScalar(ReduceAndKeep(Square(x), ReduceMean, -1), 1e-5)))
	}
	dense := func(x, w *Node) *Node { return Einsum("bsm,mn->bsn", x, w) }
	ids := Slice(tokens, AxisRange(), AxisRange(0, m.seq))
	x := Gather(w[0], ExpandAxes(ids, -1))
	for layer := range m.layers {
		w := w[1+6*layer:]
		h := norm(x)
		q := Reshape(dense(h, w[0]), m.batch, m.seq, m.heads, m.headDim)
		k := Reshape(dense(h, w[1]), m.batch, m.seq, m.kvHeads, m.headDim)
		v := Reshape(dense(h, w[2]), m.batch, m.seq, m.kvHeads, m.headDim)
		o, _ := attention.Core(q, k, v, attention.LayoutBSHD, attention.CoreOptions{UseCausalMask: true})
		x = Add(x, dense(Reshape(o, m.batch, m.seq, m.width()), w[3]))
		x = Add(x, dense(Max(dense(norm(x), w[4]), ScalarZero(x.Graph(), x.DType())), w[5]))
	}
	logits := Einsum("bsm,nm->bsn", norm(x), w[0])
	next := OneHot(Slice(tokens, AxisRange(), AxisRange(1, m.seq+1)), m.vocab, x.DType())
	return Neg(ReduceAllMean(ReduceSum(Mul(LogSoftmax(logits), next), -1)))
}

// step returns an executable of one step of gradient descent: the loss and the new weights.
func (m transformer) step(b compute.Backend) *Exec {
	return MustNewExec(b, func(in []*Node) []*Node {
		loss := m.loss(in[0], in[1:])
		out := []*Node{loss}
		for i, g := range Gradient(loss, in[1:]...) {
			out = append(out, Sub(in[1+i], MulScalar(g, 0.1)))
		}
		return out
	})
}

// sequential runs one operation at a time. Otherwise gomlx's Go backend v0.1.5 may wait for ever:
// when each of its workers computes a large product, and each product waits for another worker.
const sequential = "ops_sequential"

// own returns gomlx's Go backend.
func own(t testing.TB) compute.Backend {
	return must.Get(gobackend.New(sequential))(t)
}

// counter counts the calls that reach a device.
type counter struct {
	backend.Backend
	backend.Differentiator
	forward, backward int
}

func (c *counter) Attention(ctx context.Context, calls ...*backend.Call) error {
	c.forward++
	return c.Backend.Attention(ctx, calls...)
}

func (c *counter) Backward(ctx context.Context, g *backend.Gradients) error {
	c.backward++
	return c.Differentiator.Backward(ctx, g)
}

func numbers(t *tensors.Tensor) (x []float64) {
	if t.DType() == dtypes.Float64 {
		return tensors.MustCopyFlatData[float64](t)
	}
	for _, y := range tensors.MustCopyFlatData[float32](t) {
		x = append(x, float64(y))
	}
	return x
}

// TestTrainingStep compares one step of training with attn and with gomlx's own decomposition, both in float32, with
// float64: each new weight may be off by 2^-20 of the largest of its matrix, the rounding of a weight and of its sums.
// attn computes all attention: a forward and a backward call of each layer.
func TestTrainingStep(t *testing.T) {
	m := transformer{vocab: 29, layers: 2, heads: 4, kvHeads: 2, headDim: 8, seq: 24, batch: 2}
	reference := m.step(own(t)).MustCall(append([]any{m.tokens()}, weights[float64](m)...)...)
	compared := func(t *testing.T, b compute.Backend) {
		got := m.step(b).MustCall(append([]any{m.tokens()}, weights[float32](m)...)...)
		before := weights[float32](m)
		for i := range reference {
			want, got := numbers(reference[i]), numbers(got[i])
			largest, most, moved := 0.0, 0.0, 0.0
			for j := range want {
				largest, most = max(largest, math.Abs(want[j])), max(most, math.Abs(want[j]-got[j]))
				if i > 0 {
					moved = max(moved, math.Abs(got[j]-numbers(before[i-1].(*tensors.Tensor))[j]))
				}
			}
			if !(most <= largest*0x1p-20) {
				t.Errorf("result %d is off by %g, its largest element is %g", i, most, largest)
			}
			if i > 0 && moved < 1000*most {
				t.Errorf("the step moves result %d by %g at most, too little to compare", i, moved)
			}
		}
	}
	t.Run("decomposed", func(t *testing.T) { compared(t, own(t)) })
	for _, name := range []string{"cpu", "gpu"} {
		t.Run(name, func(t *testing.T) {
			dev, err := kernels.Open(name)
			if name == "gpu" && errors.Is(err, kernels.ErrNoDevice) && os.Getenv("CI") != "true" {
				t.Skip(err)
			}
			must.Do(t, err)
			defer dev.Close()
			count := &counter{Backend: dev.Backend(), Differentiator: dev.Backend().(backend.Differentiator)}
			b := must.Get(attngomlx.New(kernels.NewDevice(count), sequential))(t)
			compared(t, b)
			if count.forward != m.layers || count.backward != m.layers {
				t.Errorf("attn ran %d forward and %d backward calls for %d layers", count.forward, count.backward, m.layers)
			}
		})
	}
}

// BenchmarkTurns times gomlx's Go backend and attn in turns, and reports the median of each in
// milliseconds: a step of training, the loss alone, and the attention layers from ONNX.
//
//	go test -run '^$' -bench Turns -benchtime 10x
func BenchmarkTurns(b *testing.B) {
	dev := must.Get(kernels.Open("cpu"))(b)
	defer dev.Close()
	m := transformer{vocab: 256, layers: 2, heads: 8, kvHeads: 2, headDim: 32, seq: 512, batch: 1}
	loss := func(b compute.Backend) *Exec {
		return MustNewExec(b, func(in []*Node) *Node { return m.loss(in[0], in[1:]) })
	}
	whole := func(build func(compute.Backend) *Exec) func(compute.Backend) func() []*tensors.Tensor {
		return func(on compute.Backend) func() []*tensors.Tensor {
			e, in := build(on), append([]any{m.tokens()}, weights[float32](m)...)
			return func() []*tensors.Tensor { return e.MustCall(in...) }
		}
	}
	layers := func(on compute.Backend) func() []*tensors.Tensor {
		e, x := imported[float32](b, on, m)
		return func() []*tensors.Tensor { return e.MustCall(x) }
	}
	for _, c := range []struct {
		name  string
		build func(compute.Backend) func() []*tensors.Tensor
	}{{"training", whole(m.step)}, {"loss", whole(loss)}, {"onnx", layers}} {
		b.Run(c.name, func(b *testing.B) {
			var calls [2]func() []*tensors.Tensor
			for i, on := range []compute.Backend{own(b), must.Get(attngomlx.New(dev, sequential))(b)} {
				calls[i] = c.build(on)
				calls[i]() // compiles
			}
			var times [2][]float64
			for b.Loop() {
				for i, call := range calls {
					start := time.Now()
					for _, t := range call() {
						t.MustFinalizeAll()
					}
					times[i] = append(times[i], float64(time.Since(start).Microseconds())/1000)
				}
			}
			for _, t := range times {
				slices.Sort(t)
			}
			gomlx, attn := times[0][len(times[0])/2], times[1][len(times[1])/2]
			b.ReportMetric(0, "ns/op")
			b.ReportMetric(gomlx, "gomlx-ms")
			b.ReportMetric(attn, "attn-ms")
			b.ReportMetric(gomlx/attn, "gomlx/attn")
		})
	}
}
