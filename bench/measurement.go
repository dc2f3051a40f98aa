package bench

import "github.com/seed90331342/attn/backend"

// Measurement is one case and its figures. Times are in seconds, rates in 10^9
// operations a second, percentages 0 to 100; null is 'not measured'.
type Measurement struct {
	// Backend is the name that opens the device: "cpu", "gpu:0".
	Backend string `json:"backend"`
	// Contender names what was compared, see [Compare]; "" in other runs.
	Contender string `json:"contender"`
	// Provider is the library that reaches the device, with its version.
	Provider string `json:"provider"`
	// Series names the cases that this one is a length of: "Llama 3 8B"; "" where
	// there is one series only.
	Series string `json:"series"`
	// Name is the case in the form of a Go benchmark, without backend and variant:
	// "f32/b1h8s1024d64/causal".
	Name string `json:"name"`
	// Variant names what ran: "fused", "stages", "qk", "softmax", "pv".
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
	// Resumed says that the row comes from the report that the run went on from.
	Resumed bool `json:"resumed"`
	// Repetitions is how many calls the times are taken from, Rounds the calls
	// round by round with the ceilings beside them.
	Repetitions int     `json:"repetitions"`
	Rounds      []Round `json:"rounds"`
	// PredictedS is the time in seconds that the cases before predicted for a
	// call.
	PredictedS *float64 `json:"predicted_s"`

	// MedianS is the median over rounds of the median time of a call in a round,
	// in seconds, inputs and outputs in place; MinS the shortest time of all.
	MedianS *float64 `json:"median_s"`
	MinS    *float64 `json:"min_s"`
	// LowS and HighS bound the median with a chance of Confidence percent (95 where
	// there are at least six rounds), by order statistics of the rounds; Q1S and
	// Q3S are the quartiles of all calls. In seconds.
	LowS       *float64 `json:"low_s"`
	HighS      *float64 `json:"high_s"`
	Confidence *float64 `json:"confidence"`
	Q1S        *float64 `json:"q1_s"`
	Q3S        *float64 `json:"q3_s"`
	// OthersPercent is how much of the backend's threads other programs and the
	// machine's host took away while the case ran, in percent, as far as the
	// system tells.
	OthersPercent *float64 `json:"others_percent"`
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
	// Pairs counts the visible (query, key) pairs over batches and query heads.
	Pairs int64 `json:"pairs"`
	// FLOPs counts 2·(D+Dv) operations for each visible pair of a query and a
	// key (2·D for every pair of "qk", 2·Dv of "pv", which compute what is hidden
	// too; 0 for "softmax"); softmax is not counted. FLOPsFull counts them as if
	// every pair were visible.
	FLOPs     int64 `json:"flops"`
	FLOPsFull int64 `json:"flops_full"`
	// GFLOPS is FLOPs / MedianS / 10^9, and GFLOPSFull that of FLOPsFull: what other
	// programs call the speed of a causal call, and no speed of arithmetic.
	GFLOPS     *float64 `json:"gflops"`
	GFLOPSFull *float64 `json:"gflops_full"`
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
	// Intensity is FLOPs / Bytes; the roofline at that place is RoofGFLOPS, the
	// smaller of CeilingGFLOPS and Intensity · CeilingGBS.
	Intensity  float64  `json:"intensity"`
	RoofGFLOPS *float64 `json:"roof_gflops"`
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
	// Memory is what the case takes.
	Memory Memory `json:"memory"`
}

// Round is what was measured close together in time: the ceilings, then calls one
// after the other.
type Round struct {
	// TimesS are the times of the calls, in seconds.
	TimesS []float64 `json:"times_s"`
	// PaceS are the times, before each call or less than a millisecond earlier, of a piece
	// of plain arithmetic that as many threads took turns in: how fast the machine let
	// the program compute just then. Empty where the backend has no threads on the host.
	PaceS []float64 `json:"pace_s"`
	// CeilingGFLOPS, CeilingGBS and LaunchS are as in [Measurement].
	CeilingGFLOPS *float64 `json:"ceiling_gflops"`
	CeilingGBS    *float64 `json:"ceiling_gbs"`
	LaunchS       *float64 `json:"launch_s"`
}

// Memory is what a case takes, in bytes: by count, which is exact and grows as it says,
// and as the system measures it.
type Memory struct {
	// Operands counts Q, K, V and O, and Scratch what the backend plans to take
	// beside them: both grow with S.
	Operands int64 `json:"operands"`
	Scratch  int64 `json:"scratch"`
	// Square counts what grows with S²: a mask, and the scores and weights that
	// the stages keep.
	Square int64 `json:"square"`
	// HostPeak is by how much the process's resident memory grew from before the
	// inputs to the highest point of the first calls; null where the system does
	// not tell.
	HostPeak *int64 `json:"host_peak"`
	// Device is what of Operands, Scratch and Square lies in the memory of a device
	// of its own; 0 for a backend that computes in host memory.
	Device int64 `json:"device"`
	// DevicePeak is the most memory of such a device that tensors and the first calls
	// held at once; null where the backend does not tell.
	DevicePeak *int64 `json:"device_peak"`
}

// Counted returns all that is counted.
func (m Memory) Counted() int64 { return m.Operands + m.Scratch + m.Square }

// Growth says how a series grows with its length S: time and memory as S to the power
// of the exponents, fitted by least squares in logarithms.
type Growth struct {
	// Backend, Contender, Series, Variant and Threads are those of the cases.
	Backend   string `json:"backend"`
	Contender string `json:"contender"`
	Series    string `json:"series"`
	Variant   string `json:"variant"`
	Threads   int    `json:"threads"`
	// Lengths is how many lengths the fit is over, From the shortest and To the
	// longest of them: the longer half of those that were measured, three at
	// least, as a call's overhead bends the short ones.
	Lengths int `json:"lengths"`
	From    int `json:"from"`
	To      int `json:"to"`
	// Time and Memory are the exponents, of MedianS and of Memory.Counted.
	Time   float64 `json:"time"`
	Memory float64 `json:"memory"`
}

// unmeasured reports whether there is nothing but a note.
func (m *Measurement) unmeasured() bool {
	return m.Status == NotRun || m.Status == Failed || m.Status == Predicted
}
