// Package measure runs what the page of attn-web asks for: it measures attention on a device
// with package bench and reports each step, each case and the report to download. It does not
// know the browser, so that its tests run without one.
package measure

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/seed90331342/attn/bench"
	"github.com/seed90331342/attn/bench/report"
	"github.com/seed90331342/attn/kernels"
)

// Request is a run that the page asks for. Every combination of its lists is measured.
type Request struct {
	// Device is the name of a device, or "" for the CPU's short cases in place of a GPU.
	Device string `json:"device"`
	// Seqs are the numbers of keys, Dims the head sizes.
	Seqs []int `json:"seqs"`
	Dims []int `json:"dims"`
	// Kinds are "full", "causal" or "decode", DTypes "f32", "f16" or "bf16".
	Kinds  []string `json:"kinds"`
	DTypes []string `json:"dtypes"`
	Heads  int      `json:"heads"`
	// LowPrecision is kernels.Options.LowPrecision.
	LowPrecision bool `json:"low_precision"`
	// Seconds limits the time of the run; 0 is no limit.
	Seconds float64 `json:"seconds"`
	// Rounds is the number of rounds of each case; 0 repeats them until the median is precise.
	Rounds int `json:"rounds"`
	// Browser names the browser and its processors in the report.
	Browser string `json:"browser"`
}

// Event is a message to the page. Type is one of "devices", "progress", "row" and "done".
type Event struct {
	Type string `json:"type"`
	// Devices are those of "devices", the one to prefer first.
	Devices []kernels.Info `json:"devices,omitempty"`
	// Text and Case are the case of "progress", Step what is done with it. In other events Text is a
	// sentence about what is missing or failed, and empty if all is well.
	Text string `json:"text,omitempty"`
	Step string `json:"step,omitempty"`
	Case *Case  `json:"case,omitempty"`
	// Row is the case of "row".
	Row *report.Measurement `json:"row,omitempty"`
	// Report is the JSON report so far, of "row" and "done".
	Report string `json:"report,omitempty"`
}

// Case is a case as the peers of bench/peers take it: Keys is 0 if there are as many as queries.
type Case struct {
	Device string `json:"device"`
	Heads  int    `json:"heads"`
	Seq    int    `json:"seq"`
	Keys   int    `json:"keys,omitempty"`
	Dim    int    `json:"dim"`
	Causal bool   `json:"causal"`
	DType  string `json:"dtype"`
}

// maxHeads keeps the operands of the longest case within the 4 GiB of a program in wasm.
const maxHeads = 32

// instead are the cases of the CPU where no GPU computes right results. A program in wasm has one
// thread and no SIMD: these take a quarter of a minute. With eight heads a call of one row is longer than the
// steps of a browser's clock, and six rounds cover the median with a probability of 95%.
var instead = Request{Device: "cpu", Seqs: []int{256, 1024}, Dims: []int{64}, Kinds: []string{"full", "causal", "decode"}, DTypes: []string{"f32"}, Heads: 8, Rounds: 6}

// Devices lists the devices, GPUs first. Without a GPU it has a sentence for visitors.
func Devices() Event {
	e := Event{Type: "devices"}
	for _, l := range kernels.Devices() {
		if l.Family == "cpu" {
			e.Devices = append(e.Devices, l.Infos...)
		} else {
			e.Devices = append(l.Infos, e.Devices...)
		}
	}
	if len(missing()) > 0 {
		e.Text = "The browser offers no GPU to this page: the figures are those of the CPU. " +
			"WebGPU needs a current browser, and a page that comes by https or from localhost."
	}
	return e
}

// missing returns a line for each kind of device that the browser does not offer.
func missing() (lines []string) {
	for _, l := range kernels.Devices() {
		if l.Err != nil {
			lines = append(lines, l.Family+" · none: "+l.Err.Error())
		}
	}
	return lines
}

// series returns the cases of a request, the options of a case in the order of the table.
func (r Request) series() (all []bench.Series, err error) {
	if r.Heads < 1 || r.Heads > maxHeads {
		return nil, fmt.Errorf("the number of heads is %d, it must be 1 to %d", r.Heads, maxHeads)
	}
	for _, kind := range r.Kinds {
		for _, dim := range r.Dims {
			for _, name := range r.DTypes {
				if _, ok := report.DTypes[name]; !ok {
					return nil, fmt.Errorf("the storage is %q, it must be f32, f16 or bf16", name)
				}
				s := bench.Series{Seqs: slices.Sorted(slices.Values(r.Seqs)),
					Case: report.Case{DType: name, Heads: r.Heads, Dim: dim, Causal: kind == "causal", LowPrecision: r.LowPrecision}}
				if kind == "decode" {
					s.SeqQ = 1
				}
				all = append(all, s)
			}
		}
	}
	if len(all) == 0 || len(r.Seqs) == 0 {
		return nil, errors.New("choose at least one length, head size, kind and storage")
	}
	return all, nil
}

// run is the state of a request.
type run struct {
	ctx  context.Context
	req  Request
	send func(Event)
	// before is the report of the devices that were measured before this one.
	before *report.Report
}

// Run measures a request and calls send with its events, the last of type "done". Without a GPU,
// or if the GPU fails or computes wrong results, it measures some short cases on the CPU. When
// ctx is cancelled the running repetition may end.
func Run(ctx context.Context, req Request, send func(Event)) {
	r := &run{ctx: ctx, req: req, send: send}
	var trouble string
	if req.Device != "" {
		trouble = r.device(req)
	}
	if req.Device == "" || trouble != "" && req.Device != "cpu" && r.before != nil && ctx.Err() == nil {
		if trouble != "" {
			trouble += " The CPU's figures follow."
		}
		if cpu := r.device(instead); cpu != "" {
			trouble = strings.TrimSpace(trouble + " " + cpu)
		}
	}
	send(Event{Type: "done", Text: trouble, Report: r.text(r.before)})
}

// device measures a request on its device, after what was measured before, and returns a sentence about what failed.
func (r *run) device(req Request) (trouble string) {
	series, err := req.series()
	if err != nil {
		return "Nothing was measured: " + err.Error() + "."
	}
	cfg := bench.Config{
		Series: series, Budget: time.Duration(req.Seconds * float64(time.Second)), Rounds: req.Rounds, Seed: 1, NoStages: true, Missing: missing(),
		Progress: func(p bench.Progress) {
			c := Case{Device: p.Backend, Heads: p.Case.Heads, Seq: p.Case.SeqQ, Dim: p.Case.Dim, Causal: p.Case.Causal, DType: p.Case.DType}
			if c.Seq != p.Case.SeqK {
				c.Keys = p.Case.SeqK
			}
			r.send(Event{Type: "progress", Text: fmt.Sprintf("%s, case %d of %d: %v", p.Backend, p.Cases+1, p.Of, p.Case.Name()), Step: p.Step, Case: &c})
			// The messages of the page, such as stop, arrive while every goroutine sleeps.
			time.Sleep(time.Millisecond)
		},
		Measured: func(now *report.Report) {
			row := &now.Cases[len(now.Cases)-1]
			withClock(row)
			r.send(Event{Type: "row", Row: row, Report: r.text(r.after(now))})
		},
	}
	dev, err := kernels.Open(req.Device)
	if err != nil {
		// The report has no row of a device that does not open.
		none := report.Report{Schema: report.Schema, Environment: report.ThisMachine(time.Now()), Cases: []report.Measurement{}}
		none.Environment.Missing = []string{req.Device + " · does not open: " + err.Error()}
		r.before = r.after(&none)
		return fmt.Sprintf("%s does not open: %v.", req.Device, err)
	}
	defer dev.Close()
	now, err := bench.Run(r.ctx, []*kernels.Device{dev}, cfg)
	if err != nil {
		return "Nothing was measured: " + err.Error() + "."
	}
	trouble = sentence(now, dev.Info())
	r.before = r.after(now)
	return trouble
}

// withClock removes the figures of a case whose calls are shorter than the steps of the clock,
// up to 1 ms in some browsers.
func withClock(row *report.Measurement) {
	if slices.ContainsFunc(row.Rounds, func(r report.Round) bool { return slices.Min(r.TimesS) <= 0 }) {
		row.Status, row.Note, row.Rounds = report.NotRun, "not run: a call is shorter than the steps of this browser's clock", []report.Round{}
		row.Derive()
	}
}

// sentence describes what failed; "" if nothing did.
func sentence(r *report.Report, info kernels.Info) string {
	n := map[report.Status]int{}
	note := map[report.Status]string{}
	for _, c := range r.Cases {
		if n[c.Status]++; n[c.Status] == 1 {
			note[c.Status] = c.Note
		}
	}
	switch name := info.Name + " (" + info.Device + ")"; {
	case n[report.Wrong] > 0:
		return fmt.Sprintf("%s computes wrong results in %d of %d cases, which have no figures.", name, n[report.Wrong], len(r.Cases))
	case n[report.Failed] > 0:
		return fmt.Sprintf("%s failed in %d of %d cases: %s.", name, n[report.Failed], len(r.Cases), strings.TrimPrefix(note[report.Failed], "failed: "))
	}
	return ""
}

// after returns the report of everything that was measured before, followed by now.
func (r *run) after(now *report.Report) *report.Report {
	all := *now
	all.Environment.CPU = r.req.Browser
	if all.Environment.CPU == "" {
		all.Environment.CPU = now.Environment.CPU
	}
	if b := r.before; b != nil {
		all.Environment.Backends = slices.Concat(b.Environment.Backends, now.Environment.Backends)
		all.Environment.Missing = slices.Concat(b.Environment.Missing, now.Environment.Missing)
		all.Cases = slices.Concat(b.Cases, now.Cases)
	}
	return &all
}

// text returns a report as JSON; "" for none.
func (r *run) text(of *report.Report) string {
	var s strings.Builder
	if of == nil || of.WriteJSON(&s) != nil { // its figures are finite
		return ""
	}
	return s.String()
}
