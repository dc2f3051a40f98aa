// Package bench measures attention on the devices that a program opened, and checks the results that it measures:
//
//	report, err := bench.Run(ctx, []*kernels.Device{dev}, bench.Config{})
//	...
//	report.WriteTable(os.Stdout)
//
// Package report has the report and its forms: text, JSON, Markdown, Go benchmark lines and a page with charts.
//
// A [report.Case] is a call of certain lengths and options, a [Series] is a case at several lengths, [Presets] are
// named sets of series. For each case, Run draws the inputs by seed, uploads them once and calls until the times
// settle. Then it repeats prepared calls with preallocated outputs, round after round, until the median is known within
// 2% or the budget is spent. A sample of rows is recomputed in float64: a case that exceeds its error bound is marked
// wrong and has no figures.
//
// Other processes disturb a measurement. Each round therefore measures next to its calls what they are compared with:
// the device's own ceilings, the three-stage path, and on the CPU a piece of plain arithmetic. The report marks cases
// during which other processes used the processors.
//
// There are three ceilings: the peak rate of multiply-adds (backend.Meter), or of matrix units
// where they multiply (backend.MatrixMeter), the rate at which the device reads this case's
// operands (backend.Meter), and the time of an empty call (backend.QueueMeter). The report has
// a figure in percent of the ceiling that limits it:
// usually the first in prefill, the second in decoding, the third in short calls.
//
// [Plans] returns how cases would run.
//
// A series without lengths doubles the length for as long as the cost of the previous case predicts an affordable call.
// Cases that exceed the budget or the memory are reported as predictions, other cases that do not run with the reason.
// Config.Resume continues a run that ended early.
//
// The package does not open devices and makes no claims about speed.
package bench
