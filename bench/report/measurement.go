package report

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/seed90331342/attn/bench/internal/stats"
	"github.com/seed90331342/attn/bench/plain"
	"github.com/seed90331342/attn/kernels"
)

// Measurement is one case with its figures. Times are in seconds, rates in 10^9 a second, percentages 0 to 100; null
// means not measured. [Measurement.Derive] computes Times, Rates and other figures from the rest.
type Measurement struct {
	// Backend is the name that opens the device: "cpu", "gpu:0".
	Backend string `json:"backend"`
	// Series names the series of lengths that the case belongs to: "Llama 3 8B"; "" in a report of one series.
	Series string `json:"series"`
	// Name is the case in the form of a Go benchmark, without backend and variant: "f32/b1h8s1024d64/causal".
	Name string `json:"name"`
	Case
	// Threads is the number of CPU threads that compute; 0 on other devices.
	Threads int `json:"threads"`

	// Status is the outcome; Note is the reason for it, or what is missing.
	Status Status `json:"status"`
	Note   string `json:"note"`
	// Plan is the backend's plan, null when there was none.
	Plan *kernels.Plan `json:"plan"`
	// Resumed marks a row that was copied from the report that the run resumed.
	Resumed bool `json:"resumed"`
	// Repetitions is the number of timed calls, in Rounds.
	Repetitions int     `json:"repetitions"`
	Rounds      []Round `json:"rounds"`
	// PredictedS is the time of a call that earlier cases predicted.
	PredictedS *float64 `json:"predicted_s"`
	Times
	// OthersPercent is the share of the backend's threads that other processes and the
	// hypervisor used while the case ran.
	OthersPercent *float64 `json:"others_percent"`
	// KernelS is the median computing time of a call by the device's own clock, taken in separate calls.
	KernelS *float64 `json:"kernel_s"`
	// CompileS is the time that compiling the case's Compiled kernels took, MoveS the time
	// that uploading MovedBytes of inputs took. Times of calls exclude both.
	CompileS   *float64 `json:"compile_s"`
	Compiled   int      `json:"compiled"`
	MoveS      *float64 `json:"move_s"`
	MovedBytes int64    `json:"moved_bytes"`
	Rates
	// StagesS is the median time of the same call as three stages with the weights in
	// memory. SpeedupVsStages is StagesS / MedianS.
	StagesS         *float64 `json:"stages_s"`
	SpeedupVsStages *float64 `json:"speedup_vs_stages"`
	// StagesPercent is half of the 95% interval of the median over rounds of the stages' time relative to the
	// call's, in percent of it; null for fewer than six rounds with both.
	StagesPercent *float64 `json:"stages_percent,omitempty"`
	// MaxError is |x - float64 result| of the sampled element x of the output or gradients
	// with the largest ratio of error to bound, ErrorBound the bound of that element. MaxError is null when it is
	// not finite.
	MaxError   *float64 `json:"max_error"`
	ErrorBound *float64 `json:"error_bound"`
	// Allocs is the number of heap allocations of a call on the host.
	Allocs *int64 `json:"allocs"`
	Memory Memory `json:"memory"`
}

// Times are the statistics of the rounds of a [Measurement].
type Times struct {
	// MedianS is the median over rounds of a round's median time of a call; MinS is the shortest time of all.
	MedianS *float64 `json:"median_s"`
	MinS    *float64 `json:"min_s"`
	// LowS to HighS covers the median with a probability of Confidence percent (at least
	// 95 from six rounds on), by order statistics of the rounds.
	LowS       *float64 `json:"low_s"`
	HighS      *float64 `json:"high_s"`
	Confidence *float64 `json:"confidence"`
}

// Rates are the counts of a [Measurement], which follow from its case and plan, and their rates next to
// the ceilings of its rounds.
type Rates struct {
	// Pairs counts the visible (query, key) pairs over batches and query heads.
	Pairs int64 `json:"pairs"`
	// FLOPs counts 2·(D+Dv) operations a visible pair, and "backward" 2·(3·D+2·Dv); softmax is not counted. "qk" and
	// "pv" compute hidden pairs too and count 2·D and 2·Dv for every pair.
	FLOPs int64 `json:"flops"`
	// GFLOPS is FLOPs / MedianS / 10^9.
	GFLOPS *float64 `json:"gflops"`
	// CeilingGFLOPS is the median of the device's peak rate of fused multiply-adds, or of matrix
	// units where the plan has them, measured between the repetitions.
	CeilingGFLOPS *float64 `json:"ceiling_gflops"`
	// Bytes is the least that a call moves: each operand and output once, except keys and
	// values that a window hides from all rows. GBS is Bytes / MedianS / 10^9.
	Bytes int64    `json:"bytes"`
	GBS   *float64 `json:"gbs"`
	// CeilingGBS is the median rate at which the device reads the operands of this case
	// repeatedly, from cache where they fit, measured between the repetitions.
	CeilingGBS *float64 `json:"ceiling_gbs"`
	// LaunchS is the median time of an empty call, measured between the repetitions.
	LaunchS *float64 `json:"launch_s"`
	// Bound is the ceiling that limits the call; "" when unknown. PercentOfBound is
	// GFLOPS or GBS in percent of that ceiling, or LaunchS in percent of MedianS.
	Bound          Bound    `json:"bound"`
	PercentOfBound *float64 `json:"percent_of_bound"`
}

// Round has the calls of one round and the ceilings measured next to them.
type Round struct {
	TimesS []float64 `json:"times_s"`
	// PaceS has, for each call, the time of one piece of plain arithmetic that as many threads computed less than a
	// millisecond before: the pace of the machine at that moment. Empty when the backend has no threads on the host.
	PaceS []float64 `json:"pace_s"`
	// CeilingGFLOPS, CeilingGBS and LaunchS are as in [Rates].
	CeilingGFLOPS *float64 `json:"ceiling_gflops"`
	CeilingGBS    *float64 `json:"ceiling_gbs"`
	LaunchS       *float64 `json:"launch_s"`
	// StagesS is the time of the three stages after the calls; null where they are left out.
	StagesS *float64 `json:"stages_s,omitempty"`
}

// Memory is the memory of a case in bytes, counted exactly and measured.
type Memory struct {
	// Operands counts Q, K, V and O, and of Backward also the LSE and the gradients of all
	// these; Scratch the backend's planned working memory. Both grow with S.
	Operands int64 `json:"operands"`
	Scratch  int64 `json:"scratch"`
	// Square counts what grows with S²: a mask, and the weights that the stages store.
	Square int64 `json:"square"`
	// HostPeak is the growth of the process's resident memory from before the inputs to
	// its maximum during the first calls.
	HostPeak *int64 `json:"host_peak"`
	// DevicePeak is the maximum that tensors and the first calls held on a device with its own memory.
	DevicePeak *int64 `json:"device_peak"`
}

// Counted returns the sum of what is counted.
func (m Memory) Counted() int64 { return m.Operands + m.Scratch + m.Square }

// Status is the outcome of a case.
type Status string

const (
	// OK: measured, and the sampled rows are within their bound.
	OK Status = "ok"
	// Wrong: a sampled row exceeds its bound; there are no figures.
	Wrong Status = "wrong"
	// Failed: the backend returned an error, which is the note.
	Failed Status = "failed"
	// NotRun: the case was not measured, for the reason in the note.
	NotRun Status = "not run"
	// Predicted: the case would exceed the time or memory available; PredictedS is the predicted time of a call.
	Predicted Status = "predicted"
)

// Bound names the ceiling that limits a call.
type Bound string

const (
	// BoundFMA is the rate of fused multiply-adds in registers.
	BoundFMA Bound = "fma"
	// BoundMatrix is the rate of products of matrices in registers.
	BoundMatrix Bound = "matrix"
	// BoundRead is the rate at which the operands can be read.
	BoundRead Bound = "read"
	// BoundLaunch is the time of an empty call.
	BoundLaunch Bound = "launch"
)

// Weight is the amount of work that the time of a call is assumed to be proportional to:
// operations, or bytes where there are none.
func (m *Measurement) Weight() int64 { return max(m.FLOPs, m.Bytes/8) }

// Figure returns x, or null for a NaN or an infinity, which JSON cannot represent.
func Figure(x float64) *float64 {
	if math.IsNaN(x) || math.IsInf(x, 0) {
		return nil
	}
	return &x
}

// Positive returns x as a Figure, or null unless it is positive.
func Positive(x float64) *float64 {
	if !(x > 0) {
		return nil
	}
	return Figure(x)
}

// noisyPercent is the share of the threads that other processes may use before figures are doubtful.
const noisyPercent = 5

func (m *Measurement) noisy() bool {
	return m.OthersPercent != nil && *m.OthersPercent >= noisyPercent
}

// unmeasured reports whether the row has a note and no figures.
func (m *Measurement) unmeasured() bool {
	return m.Status == NotRun || m.Status == Failed || m.Status == Predicted
}

// outcome describes the status in words.
func (m *Measurement) outcome() string {
	if m.Status != OK {
		return plain.Line(m.Note)
	}
	words := []string{"ok"}
	if m.noisy() {
		words = append(words, fmt.Sprintf("noisy: other processes used %.0f%% of the CPU time", *m.OthersPercent))
	}
	words = append(words, nonEmpty(plain.Line(m.Note))...)
	if m.Confidence != nil && *m.Confidence < 100*stats.Confidence { // fewer than six rounds
		words = append(words, fmt.Sprintf("± with %.0f%% confidence", *m.Confidence))
	}
	return strings.Join(words, ", ")
}

// on reports whether the case ran on a backend.
func (m *Measurement) on(info *kernels.Info) bool {
	return m.Backend == info.Name && m.Threads == info.Threads
}

// nonEmpty returns the texts that are not empty.
func nonEmpty(texts ...string) []string {
	return slices.DeleteFunc(texts, func(t string) bool { return t == "" })
}
