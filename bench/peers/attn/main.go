// Command attn serves a backend of attn to bench/peers/run.mjs, which measures it
// and its peers in turns:
//
//	go run ./bench/peers/attn -threads 2
//	go run ./bench/peers/attn -backend gpu
//
// It reads a request a line and answers each with a line, in the protocol that
// bench/peers/serve.mjs describes. ATTN_CPU_TIER chooses the instructions, as
// everywhere.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu"
	_ "github.com/seed90331342/attn/gpu"
	"github.com/seed90331342/attn/kernels"
)

func main() {
	threads := flag.Int("threads", 0, "threads of a call on the CPU; 0 for GOMAXPROCS")
	name := flag.String("backend", "cpu", "cpu, gpu, gpu:N or gpu:NAME")
	flag.Parse()
	if err := run(*name, *threads); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(name string, threads int) error {
	be, err := open(name, threads)
	if err != nil {
		return err
	}
	defer be.Close()
	return serve(context.Background(), be, os.Stdin, os.Stdout)
}

func open(name string, threads int) (measured, error) {
	if name == "cpu" {
		return cpu.New(cpu.Options{Threads: threads}), nil
	}
	be, err := backend.Open(name)
	if err != nil {
		return nil, err
	}
	m, ok := be.(measured)
	if !ok {
		be.Close()
		return nil, fmt.Errorf("backend %s does not measure its own peak: %w", name, backend.ErrUnsupported)
	}
	return m, nil
}

// problem is the case that is measured: one batch.
type problem struct {
	Heads  int  `json:"heads"`
	Seq    int  `json:"seq"`
	Dim    int  `json:"dim"`
	Causal bool `json:"causal"`
	// DType is the type of all tensors in memory; "" is f32.
	DType string `json:"dtype"`
}

// dtype reads a type's name.
func (c problem) dtype() (backend.DType, error) {
	for _, d := range []backend.DType{backend.F32, backend.F16, backend.BF16} {
		if c.DType == d.String() || c.DType == "" {
			return d, nil
		}
	}
	return 0, fmt.Errorf("dtype is %q, it must be f32, f16 or bf16", c.DType)
}

// request is a line of input.
type request struct {
	Do    string  `json:"do"`
	Case  problem `json:"case"`
	Calls int     `json:"calls"`
}

// answer is a line of output; what a request does not ask for is left out.
type answer struct {
	// Extra is how many bytes the first call took beside its operands; null when
	// the system does not tell.
	Extra   *int64    `json:"extra,omitempty"`
	Sample  []float32 `json:"sample,omitempty"`
	Path    string    `json:"path,omitempty"`
	Seconds []float64 `json:"seconds,omitempty"`
	// FLOPS is the peak, in operations a second.
	FLOPS float64 `json:"flops,omitempty"`
	// Device describes what computes.
	Device *backend.Info `json:"device,omitempty"`
	Error  string        `json:"error,omitempty"`
}

// measured is what a peer must be able to do.
type measured interface {
	backend.Backend
	backend.PeakMeter
}

// serve answers requests until in ends.
func serve(ctx context.Context, be measured, in io.Reader, out io.Writer) error {
	s := server{be: be}
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

// server is what is loaded.
type server struct {
	be      measured
	q, k, v backend.Tensor
	out     kernels.Result
	opt     kernels.Options
}

func (s *server) do(ctx context.Context, r request) (answer, error) {
	switch r.Do {
	case "load":
		return s.load(ctx, r.Case)
	case "run":
		return s.run(ctx, r.Calls)
	case "peak":
		flops, err := s.be.PeakFLOPS(ctx)
		return answer{FLOPS: flops}, err
	case "device":
		info := s.be.Info()
		return answer{Device: &info}, nil
	}
	return answer{}, fmt.Errorf("request is %q, it must be load, run, peak or device", r.Do)
}

// load makes the operands of c and runs the first call.
func (s *server) load(ctx context.Context, c problem) (answer, error) {
	if min(c.Heads, c.Seq, c.Dim) < 1 {
		return answer{}, fmt.Errorf("case is %+v, its lengths must be at least 1", c)
	}
	dtype, err := c.dtype()
	if err != nil {
		return answer{}, err
	}
	shape := backend.Shape{1, c.Heads, c.Seq, c.Dim}
	// The output is written before, so that a call does not pay for its pages.
	for stream, t := range []*backend.Tensor{&s.q, &s.k, &s.v, &s.out.O} {
		data := make([]float32, shape.Elements())
		for i := range data {
			data[i] = element(uint32(i), uint32(stream))
		}
		t.Release()
		if *t, err = kernels.FromFloat32(ctx, s.be, dtype, data, shape); err != nil {
			return answer{}, err
		}
	}
	s.opt = kernels.Options{Causal: c.Causal}
	plan, err := kernels.Plan(s.be, s.q, s.k, s.v, s.opt)
	if err != nil {
		return answer{}, err
	}
	a := answer{Path: plan.Path}
	if a.Extra, err = extraMemory(func() error { return s.call(ctx) }); err != nil {
		return answer{}, err
	}
	o, err := kernels.Float32s(ctx, s.be, s.out.O)
	if err != nil {
		return answer{}, err
	}
	for j := range samples {
		h, row, d := place(c, j)
		a.Sample = append(a.Sample, o[(h*c.Seq+row)*c.Dim+d])
	}
	return a, nil
}

func (s *server) call(ctx context.Context) error {
	return kernels.AttentionInto(ctx, s.be, s.out, s.q, s.k, s.v, s.opt)
}

// run times calls.
func (s *server) run(ctx context.Context, calls int) (answer, error) {
	var a answer
	for range calls {
		begin := time.Now()
		if err := s.call(ctx); err != nil {
			return a, err
		}
		a.Seconds = append(a.Seconds, time.Since(begin).Seconds())
	}
	return a, nil
}

// samples is how many elements of an output are compared.
const samples = 64

// place returns the head, row and column of sample j, as inputs.mjs does.
func place(c problem, j int) (h, s, d int) {
	return j % c.Heads, (c.Seq - 1 + j*7919) % c.Seq, j * 31 % c.Dim
}

// element returns input number i of a stream, as inputs.mjs does: in [-2, 2).
func element(i, stream uint32) float32 {
	x := i*2654435769 + (stream+1)*1663821211
	x = (x ^ x>>15) * 739982445
	x ^= x >> 13
	return float32(x>>8)/(1<<22) - 2
}

// extraMemory runs call and returns by how many bytes the resident memory of the
// process rose above what it was; nil when the system does not tell.
func extraMemory(call func() error) (*int64, error) {
	// The peak begins anew (proc(5)).
	told := os.WriteFile("/proc/self/clear_refs", []byte("5"), 0) == nil
	before, ok := residentBytes("VmRSS")
	if err := call(); err != nil || !told || !ok {
		return nil, err
	}
	after, ok := residentBytes("VmHWM")
	if !ok {
		return nil, nil
	}
	extra := max(0, after-before)
	return &extra, nil
}

// residentBytes reads a line of /proc/self/status that counts KiB.
func residentBytes(key string) (int64, bool) {
	f, err := os.Open("/proc/self/status")
	if err != nil {
		return 0, false
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		var name string
		var kib int64
		if n, _ := fmt.Sscanf(lines.Text(), "%s %d kB", &name, &kib); n == 2 && name == key+":" {
			return kib << 10, true
		}
	}
	return 0, false
}
