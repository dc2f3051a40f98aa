// Command attn serves attention to bench/peers/run.mjs, which measures it and its peers
// in turns:
//
//	GOMAXPROCS=2 go run ./bench/peers/attn
//	go run ./bench/peers/attn -backend gpu
//
// It reads a request from each line and answers with a line, in the protocol of
// bench/peers/serve.mjs. ATTN_CPU_TIER chooses the instruction set, as in other programs.
package main

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/bench/internal/machine"
	_ "github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/gpu"
	"github.com/seed90331342/attn/kernels"
)

func main() {
	name := flag.String("backend", "cpu", "cpu, gpu, gpu:N or gpu:NAME")
	flag.Parse()
	dev, err := kernels.Open(*name)
	if err == nil {
		err = serve(context.Background(), dev, os.Stdin, os.Stdout)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// problem is the case to measure.
type problem struct {
	Batch int `json:"batch"` // 0 is 1
	Heads int `json:"heads"`
	// KVHeads is the number of heads of k and v; 0 is as many as Heads.
	KVHeads int  `json:"kvHeads"`
	Seq     int  `json:"seq"`
	Keys    int  `json:"keys"` // 0 is as many as Seq
	Dim     int  `json:"dim"`
	Causal  bool `json:"causal"`
	// Window is the number of keys that a row sees, its own the last; 0 is all.
	Window int `json:"window"`
	// Backward measures the gradients of q, k and v as well, after the forward call.
	Backward bool `json:"backward"`
	// DType is the type of all tensors in memory; "" is f32.
	DType string `json:"dtype"`
	// Low multiplies in that type, see kernels.Options.LowPrecision.
	Low bool `json:"low"`
}

// dtypes are the types by their names.
var dtypes = map[string]kernels.DType{"": kernels.F32, "f32": kernels.F32, "f16": kernels.F16, "bf16": kernels.BF16}

// request is a line of input.
type request struct {
	Do    string  `json:"do"`
	Case  problem `json:"case"`
	Calls int     `json:"calls"`
}

// answer is a line of output. Fields that the request does not ask for are left out.
type answer struct {
	// Extra is the memory in bytes that the first call took in addition to its operands;
	// null when unknown.
	Extra   *int64    `json:"extra,omitempty"`
	Sample  []float32 `json:"sample,omitempty"`
	Seconds []float64 `json:"seconds,omitempty"`
	// FLOPS is the peak rate in operations a second.
	FLOPS  float64       `json:"flops,omitempty"`
	Device *kernels.Info `json:"device,omitempty"`
	// Path is the code path of a loaded call, as in its plan.
	Path string `json:"path,omitempty"`
	// Trials maps the variants of a GPU's prefill kernel to their times or failures.
	Trials map[string]string `json:"trials,omitempty"`
	Error  string            `json:"error,omitempty"`
}

// serve answers requests until in ends.
func serve(ctx context.Context, dev *kernels.Device, in io.Reader, out io.Writer) error {
	s := server{dev: dev}
	enc := json.NewEncoder(out)
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		var r request
		var a answer
		err := json.Unmarshal(lines.Bytes(), &r)
		if err == nil {
			a, err = s.do(ctx, r)
		}
		if err != nil {
			a = answer{Error: err.Error()}
		}
		if err := enc.Encode(a); err != nil {
			return err
		}
	}
	return lines.Err()
}

// server holds the operands and the prepared call of the last load.
type server struct {
	dev         *kernels.Device
	q, k, v, dO kernels.Tensor
	out         kernels.Result
	grads       kernels.Gradients // empty unless they are measured
	call        *kernels.Call
}

// attend runs the call once, and its backward pass if that is measured.
func (s *server) attend(ctx context.Context) error {
	err := s.call.RunInto(ctx, s.out)
	if err == nil && !s.grads.Q.IsZero() {
		err = s.call.Backward(ctx, s.grads, kernels.Result{O: s.dO}, s.out)
	}
	return err
}

func (s *server) do(ctx context.Context, r request) (a answer, err error) {
	switch r.Do {
	case "load":
		return s.load(ctx, r.Case)
	case "run":
		if s.call == nil {
			return a, errors.New("there is nothing to run before the first load")
		}
		for range r.Calls {
			begin := time.Now()
			if err := errors.Join(s.attend(ctx), s.dev.Wait(ctx)); err != nil {
				return a, err
			}
			a.Seconds = append(a.Seconds, time.Since(begin).Seconds())
		}
		return a, nil
	case "output":
		a.Sample, err = s.dev.ToFloat32(ctx, s.out.O)
		return a, err
	case "tune":
		a.Trials, err = s.tune(ctx, r.Case)
		return a, err
	case "peak":
		meter, ok := s.dev.Backend().(backend.Meter)
		if !ok {
			return a, fmt.Errorf("%s cannot measure its peak rate: %w", s.dev.Info().Name, kernels.ErrUnsupported)
		}
		a.FLOPS, err = meter.PeakFLOPS(ctx)
		return a, err
	case "device":
		a.Device = new(s.dev.Info())
		return a, nil
	}
	return a, fmt.Errorf("request is %q, it must be load, run, output, tune, peak or device", r.Do)
}

// load draws the operands of c and runs the first call.
func (s *server) load(ctx context.Context, c problem) (a answer, err error) {
	if min(c.Heads, c.Seq, c.Dim) < 1 {
		return a, fmt.Errorf("case is %+v, its lengths must be at least 1", c)
	}
	dtype, ok := dtypes[c.DType]
	if !ok {
		return a, fmt.Errorf("dtype is %q, it must be f32, f16 or bf16", c.DType)
	}
	c.Batch = max(c.Batch, 1)
	s.out.Release()
	s.grads.Release()
	s.out, s.grads = kernels.Result{}, kernels.Gradients{}
	// The output has been written once, so that the timed calls do not touch new pages.
	for stream, t := range []*kernels.Tensor{&s.q, &s.k, &s.v, &s.dO, &s.out.O} {
		shape := kernels.Shape{c.Batch, c.Heads, c.Seq, c.Dim}
		if t == &s.k || t == &s.v {
			shape[kernels.Heads], shape[kernels.Seq] = cmp.Or(c.KVHeads, c.Heads), cmp.Or(c.Keys, c.Seq)
		}
		data := make([]float32, shape.Elements())
		for i := range data {
			data[i] = element(uint32(i), uint32(stream))
		}
		t.Release()
		if *t, err = s.dev.FromFloat32(ctx, dtype, data, shape); err != nil {
			return a, err
		}
	}
	opt := kernels.Options{Causal: c.Causal, LSE: c.Backward, LowPrecision: c.Low}
	if c.Window > 0 {
		opt.Window = &kernels.Window{Left: c.Window - 1}
	}
	if s.call, err = s.dev.Prepare(s.q, s.k, s.v, opt); err != nil {
		return a, err
	}
	sampled := []*kernels.Tensor{&s.out.O}
	if c.Backward {
		if s.out.LSE, err = s.dev.Alloc(ctx, kernels.F32, kernels.Shape{c.Batch, c.Heads, c.Seq, 1}); err != nil {
			return a, err
		}
		if s.grads, err = s.call.AllocGradients(ctx, s.call.Gradients().Operands()); err != nil {
			return a, err
		}
		sampled = []*kernels.Tensor{&s.grads.Q, &s.grads.K, &s.grads.V}
	}
	plan, err := s.call.Plan(ctx)
	if err != nil {
		return a, err
	}
	a.Path = plan.Path
	before, reset := machine.Resident(), machine.ResetPeak()
	if err := s.attend(ctx); err != nil {
		return a, err
	}
	if reset && before > 0 {
		a.Extra = new(max(0, machine.PeakResident()-before))
	}
	var data [][]float32
	for _, t := range sampled {
		x, err := s.dev.ToFloat32(ctx, *t)
		if err != nil {
			return a, err
		}
		data = append(data, x)
	}
	for j := range samples {
		b, h, row, d := place(c, j)
		a.Sample = append(a.Sample, data[j%len(data)][((b*c.Heads+h)*c.Seq+row)*c.Dim+d])
	}
	return a, nil
}

// tune measures the variants of the prefill kernel for calls like c, which later loads choose from.
func (s *server) tune(ctx context.Context, c problem) (map[string]string, error) {
	b, ok := s.dev.Backend().(*gpu.Backend)
	if !ok {
		return nil, fmt.Errorf("%s has no variants: %w", s.dev.Info().Name, kernels.ErrUnsupported)
	}
	x, err := kernels.Meta(kernels.F32, kernels.Shape{1, c.Heads, c.Seq, c.Dim})
	if err != nil {
		return nil, err
	}
	call := &backend.Call{Q: x, K: x, V: x, O: x, Problem: backend.Problem{Scale: 1, Visible: backend.Everything()}}
	e, err := b.Tune(ctx, call, gpu.TuneOptions{})
	times := map[string]string{}
	for _, t := range e.Trials {
		if times[t.Variant] = t.Failed; t.Failed == "" {
			times[t.Variant] = fmt.Sprintf("%.1f ms", 1e3*t.Seconds)
		}
	}
	return times, err
}

// samples is the number of elements of an output that are compared.
const samples = 64

// place returns the problem of the batch, the head, row and column of sample j, like inputs.mjs.
func place(c problem, j int) (b, h, s, d int) {
	return j * 1009 % c.Batch, j % c.Heads, (c.Seq - 1 + j*7919) % c.Seq, j * 31 % c.Dim
}

// element returns input number i of a stream, in [-2, 2), like inputs.mjs.
func element(i, stream uint32) float32 {
	x := i*2654435769 + (stream+1)*1663821211
	x = (x ^ x>>15) * 739982445
	x ^= x >> 13
	return float32(x>>8)/(1<<22) - 2
}
