package measure

import (
	"bytes"
	"context"
	"slices"
	"strings"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/bench/report"
	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// device is a GPU that computes on the CPU, and fails or computes wrong results on demand.
type device struct {
	backend.Backend
	fail error
	idle bool
	stop context.CancelFunc // called in the first call
}

func (d device) Info() backend.Info {
	return backend.Info{Name: "fake", Device: "a test", Type: backend.CPU}
}

func (d device) Attention(ctx context.Context, calls ...*backend.Call) error {
	switch {
	case d.stop != nil:
		d.stop()
	case d.fail != nil:
		return d.fail
	case d.idle:
		return nil
	}
	return d.Backend.Attention(ctx, calls...)
}

// fake is a driver of a device, or of none.
type fake struct{ be backend.Backend }

func (f fake) Devices() ([]backend.Info, error) {
	if f.be == nil {
		return nil, kernels.ErrNoDevice
	}
	return []backend.Info{f.be.Info()}, nil
}

func (f fake) Open(string) (backend.Backend, error) {
	if f.be == nil {
		return nil, kernels.ErrNoDevice
	}
	return f.be, nil
}

var short = Request{Device: "fake", Seqs: []int{64, 32}, Dims: []int{16}, Kinds: []string{"causal", "decode"}, DTypes: []string{"f32"}, Heads: 2, Browser: "a browser"}

// events runs a request on a device and returns the events and the report of the last one.
func events(t *testing.T, req Request, d *device) (rows []Event, done Event, r *report.Report) {
	t.Helper()
	was := instead
	instead.Seqs, instead.Kinds = []int{64}, []string{"decode"}
	defer func() { instead = was }()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	f := fake{}
	if d != nil {
		d.Backend = cpu.New(cpu.Options{Threads: 1})
		if d.stop != nil {
			d.stop = cancel
		}
		f.be = *d
	}
	backend.Register("fake", f)
	Run(ctx, req, func(e Event) {
		switch e.Type {
		case "row":
			rows = append(rows, e)
		case "done":
			done = e
		}
	})
	r, err := report.Read(strings.NewReader(done.Report))
	if err != nil {
		t.Fatalf("%v: %+v", err, done)
	}
	return rows, done, r
}

func TestRun(t *testing.T) {
	req := short
	req.DTypes, req.LowPrecision = []string{"f32", "f16"}, true
	rows, done, r := events(t, req, &device{})
	if len(rows) != 8 || len(r.Cases) != 8 || done.Text != "" || r.Err() != nil || r.Environment.CPU != "a browser" {
		t.Fatalf("%d rows, %d cases, %q, %v", len(rows), len(r.Cases), done.Text, r.Err())
	}
	for i, e := range rows {
		if e.Row.Name != r.Cases[i].Name || e.Row.SeqK != []int{32, 64}[i%2] || e.Row.StagesS != nil || !e.Row.LowPrecision {
			t.Errorf("row %d is %+v", i, e.Row)
		}
		if so, err := report.Read(strings.NewReader(e.Report)); err != nil || len(so.Cases) != i+1 {
			t.Errorf("the report after row %d: %v", i, err)
		}
	}
}

// TestTrouble: the CPU's figures follow a sentence about a GPU that is missing, wrong or failing.
func TestTrouble(t *testing.T) {
	for _, tc := range []struct {
		why, want string
		device    *device
		status    report.Status
		cases     int // of the GPU
	}{
		{"a wrong GPU", "fake (a test) computes wrong results in 4 of 4 cases, which have no figures. The CPU's figures follow.", &device{idle: true}, report.Wrong, 4},
		{"a failing GPU", "fake (a test) failed in 4 of 4 cases: ", &device{fail: kernels.ErrMemory}, report.Failed, 4},
		{"no GPU", "fake does not open: ", nil, "", 0},
	} {
		_, done, r := events(t, short, tc.device)
		if !strings.HasPrefix(done.Text, tc.want) || !strings.HasSuffix(done.Text, "The CPU's figures follow.") || len(r.Cases) != tc.cases+1 {
			t.Errorf("%s: %q, %d cases", tc.why, done.Text, len(r.Cases))
		}
		for i, c := range r.Cases {
			if i < tc.cases && (c.Status != tc.status || c.GFLOPS != nil) || i >= tc.cases && (c.Backend != "cpu" || c.GFLOPS == nil) {
				t.Errorf("%s: case %d: %+v", tc.why, i, c)
			}
		}
	}
}

// TestStopped: a run that is stopped ends there, without the CPU.
func TestStopped(t *testing.T) {
	_, done, r := events(t, short, &device{stop: func() {}})
	if !r.Interrupted || slices.ContainsFunc(r.Cases, func(c report.Measurement) bool { return c.Backend == "cpu" }) {
		t.Errorf("%q, %+v", done.Text, r)
	}
}

func TestRequestsWithoutCases(t *testing.T) {
	for want, change := range map[string]func(r *Request){
		"choose at least one length":    func(r *Request) { r.Seqs = nil },
		"choose at least":               func(r *Request) { r.DTypes = nil },
		"heads is 0, it must be 1 to":   func(r *Request) { r.Heads = 0 },
		"storage is \"f8\"":             func(r *Request) { r.DTypes = []string{"f8"} },
		"sequence length is 2000000000": func(r *Request) { r.Seqs = []int{2_000_000_000} },
	} {
		req, done := short, Event{}
		change(&req)
		Run(t.Context(), req, func(e Event) { done = e })
		if done.Type != "done" || !strings.HasPrefix(done.Text, "Nothing was measured: ") || !strings.Contains(done.Text, want) || done.Report != "" {
			t.Errorf("%+v, want %q", done, want)
		}
	}
}

// TestClock: a case whose calls take no time by the clock has no figures.
func TestClock(t *testing.T) {
	_, _, r := events(t, short, &device{})
	r.Cases[0].Rounds[0].TimesS[0] = 0
	withClock(&r.Cases[0])
	var text bytes.Buffer
	must.Do(t, r.WriteJSON(&text))
	if r, err := report.Read(&text); err != nil || r.Cases[0].Status != report.NotRun || r.Cases[0].GFLOPS != nil || r.Cases[1].Status != report.OK {
		t.Errorf("%v: %+v", err, r)
	}
}

func TestDevices(t *testing.T) {
	backend.Register("fake", fake{device{Backend: cpu.New(cpu.Options{Threads: 1})}})
	if e := Devices(); len(e.Devices) != 2 || e.Devices[0].Name != "fake" || e.Devices[1].Name != "cpu" || e.Text != "" {
		t.Errorf("%+v", e)
	}
	backend.Register("fake", fake{})
	if e := Devices(); len(e.Devices) != 1 || !strings.HasPrefix(e.Text, "The browser offers no GPU to this page: ") {
		t.Errorf("%+v", e)
	}
}

// TestCases: the page gives the case of each step to a peer.
func TestCases(t *testing.T) {
	backend.Register("fake", fake{device{Backend: cpu.New(cpu.Options{Threads: 1})}})
	seen := map[Case]bool{}
	Run(t.Context(), short, func(e Event) {
		if e.Type == "progress" {
			seen[*e.Case] = true
		}
	})
	want := Case{Device: "fake", Heads: 2, Seq: 64, Dim: 16, Causal: true, DType: "f32"}
	decode := Case{Device: "fake", Heads: 2, Seq: 1, Keys: 32, Dim: 16, DType: "f32"}
	if len(seen) != 4 || !seen[want] || !seen[decode] {
		t.Errorf("%+v", seen)
	}
}
