package bench

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/seed90331342/attn/backend"
)

// Schema is the version of the JSON form of a [Report]. Later versions only add
// fields.
const Schema = 1

// Report is what a run measured. As JSON it is
//
//	{
//	  "schema": 1,
//	  "interrupted": false,
//	  "environment": { ... },
//	  "cases": [ { ... }, ... ],
//	  "ceilings": [ { ... }, ... ]
//	}
//
// with the fields of [Environment], [Measurement] and [Ceiling]. A figure that was not
// measured is null, never 0 and never absent.
type Report struct {
	// Schema is the version of this form, see [Schema].
	Schema int `json:"schema"`
	// Interrupted says that the run was stopped before its end; the cases
	// hold what was measured until then.
	Interrupted bool        `json:"interrupted"`
	Environment Environment `json:"environment"`
	// Cases has a row for every case, those that did not run included.
	Cases []Measurement `json:"cases"`
	// Ceilings are those that [Ceilings] measured; empty in other runs.
	Ceilings []Ceiling `json:"ceilings"`
}

// Status says what became of a case.
type Status string

// What becomes of a case.
const (
	// OK: measured, and the sampled rows lie within their bound.
	OK Status = "ok"
	// Wrong: a sampled row is off by more than its bound; there are no figures.
	Wrong Status = "wrong"
	// Failed: the backend returned an error, in the note.
	Failed Status = "failed"
	// NotRun: the case did not run to its first figure; the note says why.
	NotRun Status = "not run"
)

// Measurement is one case and its figures. Times are in seconds, rates in 10^9
// operations a second, percentages 0 to 100; null is 'not measured'.
type Measurement struct {
	// Backend is the name that opens the device: "cpu", "gpu:0".
	Backend string `json:"backend"`
	// Contender names what was compared, see [Compare]; "" in other runs.
	Contender string `json:"contender"`
	// Provider is the library that reaches the device, with its version.
	Provider string `json:"provider"`
	// Variant names what ran: "fused".
	Variant string `json:"variant"`
	// DType is the type of the operands: "f32", "f16", "bf16".
	DType string `json:"dtype"`
	// Batch, Heads, KVHeads, SeqQ, SeqK and Dim are the lengths of the call;
	// the head size of values is Dim too.
	Batch   int `json:"batch"`
	Heads   int `json:"heads"`
	KVHeads int `json:"kv_heads"`
	SeqQ    int `json:"seq_q"`
	SeqK    int `json:"seq_k"`
	Dim     int `json:"dim"`
	// Causal says that a row sees no later key; the last query stands on the
	// last key.
	Causal bool `json:"causal"`
	// WindowLeft and WindowRight are how many keys a row sees before and after
	// its own; null is no limit.
	WindowLeft  *int `json:"window_left"`
	WindowRight *int `json:"window_right"`
	// Softcap c replaces scores s by c·tanh(s/c); 0 is off.
	Softcap float64 `json:"softcap"`
	// Mask is the type of an additive mask [1, 1, SeqQ, SeqK]; "" is none.
	Mask string `json:"mask"`
	// Threads is how many threads the backend computes with; 0 when it does
	// not compute on a CPU's threads.
	Threads int `json:"threads"`

	// Status says what became of the case, Note in words why, or what is
	// missing.
	Status Status `json:"status"`
	Note   string `json:"note"`
	// Path is the code that ran, as the backend's plan names it, and Plan all of
	// that plan; null when there was none.
	Path string        `json:"path"`
	Plan *backend.Plan `json:"plan"`
	// Repetitions is how many calls the times are taken from.
	Repetitions int `json:"repetitions"`
	// PredictedS is the time in seconds that the cases before predicted for a
	// call.
	PredictedS *float64 `json:"predicted_s"`

	// MedianS and MinS are the median and the shortest time of a call, in
	// seconds, inputs and outputs in place.
	MedianS *float64 `json:"median_s"`
	MinS    *float64 `json:"min_s"`
	// KernelS is the median time in seconds that the device computes in a call, by
	// its own clock, in calls beside the repetitions; null where the device or its
	// library has none.
	KernelS *float64 `json:"kernel_s"`
	// CompileS is how long, in seconds, the Compiled kernels took to compile that
	// the case needed first. MoveS is how long MovedBytes of inputs took to the
	// device. Both are outside the times of calls.
	CompileS   *float64 `json:"compile_s"`
	Compiled   int      `json:"compiled"`
	MoveS      *float64 `json:"move_s"`
	MovedBytes int64    `json:"moved_bytes"`
	// FLOPs counts 2·(D+Dv) operations for each visible pair of a query and a
	// key; softmax is not counted.
	FLOPs int64 `json:"flops"`
	// GFLOPS is FLOPs / MedianS / 10^9.
	GFLOPS *float64 `json:"gflops"`
	// CeilingGFLOPS is the median of the device's peak rates of fused
	// multiply-adds, measured between the repetitions of this case.
	CeilingGFLOPS *float64 `json:"ceiling_gflops"`
	// Percent is GFLOPS in percent of CeilingGFLOPS.
	Percent *float64 `json:"percent"`
	// Bytes is what a call must move at least: each operand and output once,
	// less the keys and values that a window hides from all rows.
	Bytes int64 `json:"bytes"`
	// GBS is Bytes / MedianS / 10^9.
	GBS *float64 `json:"gbs"`
	// CeilingGBS is the median of the rates at which the device reads the
	// operands of this case over and over, from the cache that they fit or from
	// memory, in 10^9 bytes a second, measured between the repetitions.
	CeilingGBS *float64 `json:"ceiling_gbs"`
	// LaunchS is the median time in seconds of a call that does nothing, as the
	// backend measures it between the repetitions.
	LaunchS *float64 `json:"launch_s"`
	// Bound is the ceiling that the call meets first, which is what takes longest:
	// "fma" (FLOPs at CeilingGFLOPS), "read" (Bytes at CeilingGBS) or "launch"
	// (LaunchS); "" when it is not known. PercentOfBound is GFLOPS or GBS in
	// percent of that ceiling, or LaunchS in percent of MedianS.
	Bound          Bound    `json:"bound"`
	PercentOfBound *float64 `json:"percent_of_bound"`
	// StagesS is the median time in seconds of the same call as three stages
	// with the weights in memory; SpeedupVsStages is StagesS / MedianS.
	StagesS         *float64 `json:"stages_s"`
	SpeedupVsStages *float64 `json:"speedup_vs_stages"`
	// MaxError is |o - float64 result| of the sampled element that comes
	// closest to its bound, or is furthest out of it; ErrorBound is that
	// element's bound. Null beside status wrong: not a finite number.
	MaxError   *float64 `json:"max_error"`
	ErrorBound *float64 `json:"error_bound"`
	// Allocs is how many heap allocations of the host a call makes.
	Allocs *int64 `json:"allocs"`
}

// ErrInterrupted reports a run that was stopped before its end; what it measured
// until then is in the report.
var ErrInterrupted = errors.New("interrupted")

// Err returns nil when every case that was asked for gave a figure or could not
// have been expected to: an error when one is wrong or failed, when the run was
// interrupted (ErrInterrupted), or when nothing was measured.
func (r *Report) Err() error {
	n := map[Status]int{}
	var first Measurement // of those that explain the error
	for _, c := range r.Cases {
		n[c.Status]++
		if first.Status == "" && (c.Status == Wrong || c.Status == Failed) {
			first = c
		}
	}
	all := len(r.Cases)
	name := func() string { return fmt.Sprintf("%s at S = %d", first.who(), first.SeqK) }
	switch {
	case r.Interrupted && n[Wrong] > 0:
		return fmt.Errorf("%w with %d of %d cases measured and %d wrong", ErrInterrupted, n[OK], all, n[Wrong])
	case r.Interrupted:
		return fmt.Errorf("%w with %d of %d cases measured", ErrInterrupted, n[OK], all)
	case n[Wrong] > 0:
		return fmt.Errorf("%d of %d cases give a wrong result, the first is %s", n[Wrong], all, name())
	case n[Failed] > 0:
		return fmt.Errorf("%d of %d cases failed, the first is %s: %s", n[Failed], all, name(), first.Note)
	case n[OK] == 0 && all > 0:
		return fmt.Errorf("no case was measured, %s at S = %d: %s", r.Cases[0].who(), r.Cases[0].SeqK, r.Cases[0].Note)
	case n[OK] == 0 && len(r.Ceilings) == 0:
		return errors.New("no case was measured: there is no backend")
	}
	return nil
}

// who names what ran: the contender of a comparison, else the backend.
func (m *Measurement) who() string {
	if m.Contender != "" {
		return m.Contender
	}
	return m.Backend
}

// WriteFile writes the report as JSON. The file appears complete or not at all:
// it is written beside and renamed.
func (r *Report) WriteFile(path string) error {
	text, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return fmt.Errorf("report: %w", err)
	}
	f, err := beside(path)
	if err != nil {
		return err
	}
	_, err = f.Write(append(text, '\n'))
	if err == nil {
		err = f.Chmod(0o644) // CreateTemp makes it for its owner alone
	}
	err = errors.Join(err, f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		os.Remove(f.Name())
		return fmt.Errorf("report: %w", err)
	}
	return nil
}

// CheckFile reports what would keep WriteFile from writing to path, so that it
// is known before minutes of measuring. It leaves an existing file as it is.
func CheckFile(path string) error {
	if info, err := os.Stat(path); err == nil && info.IsDir() {
		return fmt.Errorf("report: %s is a folder, a file is wanted", path)
	}
	f, err := beside(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Close(), os.Remove(f.Name()))
}

// beside opens a new file in path's folder.
func beside(path string) (*os.File, error) {
	dir := filepath.Dir(path)
	f, err := os.CreateTemp(dir, "."+filepath.Base(path)+".*")
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("report: the folder %s does not exist: %w", dir, os.ErrNotExist)
	}
	if err != nil {
		return nil, fmt.Errorf("report: %w", err)
	}
	return f, nil
}
