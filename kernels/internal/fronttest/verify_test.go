package fronttest

import (
	"context"
	"fmt"
	"math"
	"reflect"
	"strings"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
	"github.com/seed90331342/attn/kernels/kvcache"
	"github.com/seed90331342/attn/kernels/nn"
)

// flipping is a backend that flips a bit of what it reads back of results.
type flipping struct {
	backend.Backend
	at   kernels.Shape // of the tensors in which it flips
	bit  uint32
	seen int
}

func (f *flipping) Download(ctx context.Context, host, src kernels.Tensor) error {
	if err := f.Backend.Download(ctx, host, src); err != nil || host.Shape() != f.at || host.DType() != kernels.F32 {
		return err
	}
	f.seen++
	x, err := host.Float32s()
	x[1] = math.Float32frombits(math.Float32bits(x[1]) ^ f.bit)
	return err
}

// TestVerify: a flipped bit in a recomputed row is ErrVerify, with its place and values, in
// Attention, Run and RunInto; without the flip, or without Verify, there is no error.
func TestVerify(t *testing.T) {
	each(t, func(t *testing.T, dev *kernels.Device) {
		ctx := t.Context()
		const heads, seq, dim = 2, 70, 16
		tensor := func(seed uint64, cols int) kernels.Tensor {
			return upload(t, dev, normal(heads*seq*cols, seed), kernels.Shape{1, heads, seq, cols})
		}
		q, k, v := tensor(1, dim), tensor(2, dim), tensor(3, dim+1) // o has rows of their own length
		for _, c := range []struct {
			name string
			bit  uint32
			rows int
			opt  kernels.Options
			want error
		}{
			{"right", 0, 5, kernels.Options{}, nil},
			{"causal, lse and dropout", 0, 5, kernels.Options{Causal: true, LSE: true, Dropout: kernels.Dropout{P: 0.25, Seed: 3}}, nil},
			{"weights", 0, 5, kernels.Options{Weights: true}, nil},
			{"packed", 0, 20, kernels.Options{CuQ: []int{0, 10, 10, 70}}, nil},
			{"more rows than there are", 0, 1 << 40, kernels.Options{}, nil},
			{"exponent", 1 << 27, 1, kernels.Options{}, kernels.ErrVerify},
			{"sign", 1 << 31, 3, kernels.Options{Causal: true}, kernels.ErrVerify},
			{"mantissa", 1 << 16, 3, kernels.Options{Weights: true}, kernels.ErrVerify},
			{"packed sequences", 1 << 27, 3, kernels.Options{CuQ: []int{0, 10, 10, 70}}, kernels.ErrVerify},
			{"not asked for", 1 << 27, 0, kernels.Options{}, nil},
		} {
			bad := &flipping{Backend: dev.Backend(), at: kernels.Shape{1, 1, 1, dim + 1}, bit: c.bit}
			on := kernels.NewDevice(bad)
			on.SetVerify(c.rows)
			call := prepare(t, on, q, k, v, c.opt)
			r, err := call.Run(ctx)
			r.Release()
			_, again := on.Attention(ctx, q, k, v, c.opt)
			out, allocErr := call.Alloc(ctx)
			if allocErr != nil {
				t.Fatal(allocErr)
			}
			into := call.RunInto(ctx, out)
			out.Release()
			for _, err := range []error{err, again, into} {
				must.Fail(t, c.name, err, c.want)
				if c.want != nil && (err == nil || !strings.Contains(err.Error(), "verify: o[0,") || !strings.Contains(err.Error(), "bound")) {
					t.Errorf("%s: error is %v", c.name, err)
				}
			}
			if asked := c.rows > 0; asked != (bad.seen > 0) {
				t.Errorf("%s: %d rows are recomputed", c.name, bad.seen)
			}
		}
	})
}

// TestNothingPanics calls every exported method of Device, Call, caches and layers with zero values, on devices without
// a backend, closed and open ones, on zero values of these types, with and without a context.
func TestNothingPanics(t *testing.T) {
	closed := kernels.NewDevice(cpu.New(cpu.Options{}))
	closed.Close()
	open := onCPU(t)
	x := upload(t, open, []float32{1}, kernels.Shape{1, 1, 1, 1})
	prepared := prepare(t, open, x, x, x, kernels.Options{})
	orphan := prepare(t, nil, x, x, x, kernels.Options{})
	cache := must.Get(kvcache.New(t.Context(), open, kvcache.Config{Dim: 2, Capacity: 4, RoPE: &nn.RoPE{}}))(t)
	paged := must.Get(kvcache.NewPaged(t.Context(), open, kvcache.PagedConfig{Dim: 2, Pages: 2, PageSize: 2}))(t)
	sequence := must.Get(paged.NewSequence())(t)
	states := must.Get(kvcache.NewStates(t.Context(), open, kvcache.StateConfig{Dim: 2, Channels: 2, Width: 2}))(t)
	config := nn.MultiHeadConfig{Model: 2, RoPE: &nn.RoPE{}}
	weights := must.Get(config.Initialise(nn.Initialiser{}))(t)
	layer := must.Get(nn.NewMultiHeadAttention(t.Context(), open, config, weights))(t)
	for name, target := range map[string]any{
		"a zero Cache": new(kvcache.Cache), "a zero Paged": new(kvcache.Paged), "a zero Sequence": new(kvcache.Sequence), "a zero Batch": new(kvcache.Batch), "a zero States": new(kvcache.States), "a States": states,
		"a Batch of a zero Paged": new(kvcache.Paged).Batch(new(kvcache.Sequence)), "a Batch of a zero Sequence": paged.Batch(new(kvcache.Sequence)),
		"a Cache": cache, "a Paged": paged, "a Sequence": sequence, "a Batch": paged.Batch(sequence),
		"a zero layer": new(nn.MultiHeadAttention), "a layer": layer, "a zero linear layer": new(nn.Linear), "a zero RoPE": new(nn.RoPE), "a nil RoPE": (*nn.RoPE)(nil),
		"a zero layer's config": nn.MultiHeadConfig{}, "a layer's config": config, "zero weights": nn.MultiHeadWeights{}, "weights": weights,
		"the package's functions": functions{},
		"a nil Device":            (*kernels.Device)(nil), "a zero Device": new(kernels.Device), "a Device of nil": kernels.NewDevice(nil),
		"a Device of a nil pointer": kernels.NewDevice((*cpu.Backend)(nil)),
		"a closed Device":           closed, "an open Device": open,
		"a nil Call": (*kernels.Call)(nil), "a zero Call": new(kernels.Call), "a Call": prepared, "a Call of a nil Device": orphan,
	} {
		of := reflect.ValueOf(target)
		for i := range of.NumMethod() {
			method, signature := of.Type().Method(i).Name, of.Method(i).Type()
			if target == any(open) && method == "Close" {
				continue
			}
			for _, ctx := range []context.Context{nil, context.Background()} {
				args := make([]reflect.Value, signature.NumIn())
				for i := range args {
					args[i] = reflect.Zero(signature.In(i))
					if signature.In(i) == reflect.TypeFor[context.Context]() && ctx != nil {
						args[i] = reflect.ValueOf(ctx)
					}
				}
				func() {
					defer func() {
						if p := recover(); p != nil {
							t.Errorf("%s: %s (context %v) panics: %v", name, method, ctx, p)
						}
					}()
					call := of.Method(i).Call
					if signature.IsVariadic() {
						call = of.Method(i).CallSlice
					}
					call(args)
				}()
			}
		}
	}
}

// functions has the functions of kvcache and nn as methods.
type functions struct{}

func (functions) New(ctx context.Context, dev *kernels.Device, c kvcache.Config) error {
	_, err := kvcache.New(ctx, dev, c)
	return err
}

func (functions) NewPaged(ctx context.Context, dev *kernels.Device, c kvcache.PagedConfig) error {
	_, err := kvcache.NewPaged(ctx, dev, c)
	return err
}

func (functions) NewStates(ctx context.Context, dev *kernels.Device, c kvcache.StateConfig) error {
	_, err := kvcache.NewStates(ctx, dev, c)
	return err
}

func (functions) NewMultiHeadAttention(ctx context.Context, dev *kernels.Device, c nn.MultiHeadConfig, w nn.MultiHeadWeights) error {
	_, err := nn.NewMultiHeadAttention(ctx, dev, c, w)
	return err
}

// TestZeroValuesOfCaches: zero values and a nil context are errors that name the way out.
func TestZeroValuesOfCaches(t *testing.T) {
	dev := onCPU(t)
	ctx := t.Context()
	x := upload(t, dev, []float32{1, 2}, kernels.Shape{1, 1, 1, 2})
	out := kernels.Result{O: upload(t, dev, []float32{1, 2}, x.Shape())}
	config := kvcache.Config{Dim: 2, Capacity: 4, RoPE: &nn.RoPE{}}
	cache := must.Get(kvcache.New(ctx, dev, config))(t)
	defer cache.Release()
	must.Do(t, cache.Append(ctx, x, x, nil))
	moved := must.Get(kvcache.New(ctx, dev, config))(t)
	defer moved.Release()
	must.Do(t, moved.Append(ctx, x, x, nil))
	must.Do(t, moved.Append(ctx, x, x, nil))
	var missing context.Context
	zero, batch, states := new(kvcache.Cache), new(kvcache.Paged).Batch(new(kvcache.Sequence)), new(kvcache.States)
	for name, err := range map[string]error{
		"Append": zero.Append(ctx, x, x, nil), "Attention": must.Err(zero.Attention(ctx, x, kvcache.CallOptions{})), "AttentionInto": zero.AttentionInto(ctx, out, x, kvcache.CallOptions{}),
		"Rewind": zero.Rewind(0, 0), "Keep": zero.Keep(ctx, 0, 0, nil), "AppendAt": zero.AppendAt(ctx, x, x, nil, [][]int{{0}}), "Reset": zero.Reset(), "NewSequence": must.Err(new(kvcache.Paged).NewSequence()), "Fork": must.Err(new(kvcache.Sequence).Fork()),
		"States.LinearAttention": states.LinearAttention(ctx, kernels.LinearAttention{Q: x, K: x, V: x, O: x}), "States.CausalConv": states.CausalConv(ctx, kernels.CausalConv{X: x, Y: x, W: x}),
		"States.Rewind": states.Rewind(0, 0), "States.Fork": states.Fork(ctx, 0, 0), "States.Save": states.Save(ctx, 0, nil), "States.Load": states.Load(ctx, 0, nil, 0),
		"Sequence.Rewind": new(kvcache.Sequence).Rewind(0), "Sequence.Keep": new(kvcache.Sequence).Keep(ctx, 0, nil),
		"Batch.Append": batch.Append(ctx, x, x, nil), "Batch.AppendAt": batch.AppendAt(ctx, x, x, nil, [][]int{{0}}), "Batch.Attention": must.Err(batch.Attention(ctx, x, kvcache.CallOptions{})),
	} {
		must.Fail(t, fmt.Sprintf("%s of a zero value", name), err, kernels.ErrOption, "make it with New, NewPaged or NewStates")
	}
	for name, err := range map[string]error{
		"New": must.Err(kvcache.New(missing, dev, config)), "NewStates": must.Err(kvcache.NewStates(missing, dev, kvcache.StateConfig{Dim: 2})), "Append": cache.Append(missing, x, x, nil), "AppendAt": cache.AppendAt(missing, x, x, nil, [][]int{{0}}),
		"Keep": moved.Keep(missing, 0, 0, []int{1}), "Attention": must.Err(cache.Attention(missing, x, kvcache.CallOptions{})),
		"AttentionInto": cache.AttentionInto(missing, out, x, kvcache.CallOptions{}), "Angles": must.Err((&nn.RoPE{}).Angles(missing, dev, 2, [][]int{{0}})),
	} {
		must.Fail(t, fmt.Sprintf("%s without a context", name), err, kernels.ErrOption, "the context is nil")
	}
}

// TestMissingBackendAndContext: valid calls without a backend, without a context and on a closed
// device return errors that say so.
func TestMissingBackendAndContext(t *testing.T) {
	open := onCPU(t)
	closed := kernels.NewDevice(cpu.New(cpu.Options{}))
	closed.Close()
	x := upload(t, open, []float32{1, 2}, kernels.Shape{1, 1, 1, 2})
	s := upload(t, open, []float32{1}, kernels.Shape{1, 1, 1, 1})
	for _, on := range []struct {
		name string
		dev  *kernels.Device
		ctx  context.Context
		want error
		text string
	}{
		{"no Device", nil, t.Context(), kernels.ErrNoBackend, "the Device has no backend"},
		{"no backend", kernels.NewDevice(nil), t.Context(), kernels.ErrNoBackend, "the Device has no backend"},
		{"no context", open, nil, kernels.ErrOption, "the context is nil"},
		{"closed", closed, t.Context(), kernels.ErrClosed, ""},
	} {
		dev, ctx := on.dev, on.ctx
		call := prepare(t, dev, x, x, x, kernels.Options{})
		empty := must.Get(x.Slice(kernels.Seq, 0, 0))(t)
		out := kernels.Result{O: upload(t, open, make([]float32, 2), x.Shape())}
		errs := map[string]error{
			"Alloc": must.Err(dev.Alloc(ctx, kernels.F32, x.Shape())), "Upload": must.Err(dev.Upload(ctx, x)), "Download": dev.Download(ctx, x, x),
			"Copy": dev.Copy(ctx, []kernels.Tensor{s}, []kernels.Tensor{s}), "Project": dev.Project(ctx, s, s, s, kernels.Tensor{}),
			"Rotate": dev.Rotate(ctx, x, x, kernels.Angles{Cos: s, Sin: s}), "Merge": dev.Merge(ctx, kernels.Result{O: x, LSE: s}, kernels.Result{O: x, LSE: s}),
			"Normalise": dev.Normalise(ctx, x, x, kernels.Tensor{}, kernels.Norm{}), "Gate": dev.Gate(ctx, x, x, s, kernels.Sigmoid),
			"LinearAttention": dev.LinearAttention(ctx, kernels.LinearAttention{O: x, Q: x, K: x, V: x}), "CausalConv": dev.CausalConv(ctx, kernels.CausalConv{Y: x, X: x, W: x}),
			"Index": must.Err(dev.Index(ctx, x, x, s, 1, kernels.Options{})),
			"QK":    must.Err(dev.QK(ctx, x, x)), "Softmax": dev.Softmax(ctx, s, kernels.Tensor{}, kernels.Options{Scale: new(1.0)}), "PV": must.Err(dev.PV(ctx, s, x)),
			"Scores": must.Err(dev.Scores(ctx, x, x, kernels.Biased, kernels.Options{})), "TopWeights": must.Err(dev.TopWeights(ctx, x, x, 1, kernels.Options{})),
			"EachWeightRow": dev.EachWeightRow(ctx, x, x, kernels.WeightRange{Rows: [2]int{0, 1}, Keys: [2]int{0, 1}}, kernels.Options{}, func(int, int, []float32) {}),
			"Attention":     must.Err(dev.Attention(ctx, x, x, x, kernels.Options{})), "no rows": must.Err(dev.Attention(ctx, empty, x, x, kernels.Options{})),
			"no keys":          must.Err(dev.Attention(ctx, x, empty, empty, kernels.Options{})),
			"AttentionFloat32": must.Err(dev.AttentionFloat32(ctx, kernels.Dims{SeqQ: 1, Dim: 1}, kernels.BHSD, []float32{1}, []float32{1}, []float32{1}, kernels.Options{})),
			"FromFloat32":      must.Err(dev.FromFloat32(ctx, kernels.F32, []float32{1}, kernels.Shape{1, 1, 1, 1})), "ToFloat32": must.Err(dev.ToFloat32(ctx, x)),
			"Run": must.Err(call.Run(ctx)), "RunInto": call.RunInto(ctx, out), "Plan": must.Err(call.Plan(ctx)), "Check": must.Err(call.Check(ctx, out, kernels.CheckOptions{})),
			"Call.Alloc": must.Err(call.Alloc(ctx)), "PlanBackward": must.Err(call.PlanBackward(ctx, call.Gradients())),
		}
		if on.dev != closed { // the CPU compiles nothing, also when it is closed
			errs["Warmup"], errs["WarmupBackward"] = call.Warmup(ctx), call.WarmupBackward(ctx, call.Gradients())
		}
		for name, err := range errs {
			must.Fail(t, fmt.Sprintf("%s: %s", on.name, name), err, on.want, on.text)
		}
	}
}
