// Package bench measures attention on whatever backends a program opened, and
// says of each figure whether the answer behind it was right:
//
//	report, err := bench.Run(ctx, []backend.Backend{be}, bench.Config{Heads: 8, Dim: 64})
//	...
//	report.WriteTable(os.Stdout)
//	err = report.WriteFile("report.json")
//	paths, err := report.WritePictures("pictures")
//	err = report.WritePageFile("report.html")
//
// What is measured are cases ([Case]) in series of lengths ([Series], [Presets]). For each
// it draws inputs by seed, uploads them once, warms up until calls have settled, and
// repeats the call into ready outputs, round after round, until the median is known
// within 2% or the time for it is over. In every round it measures the device's own
// ceilings and the plain three-stage path, and before each call on the CPU a piece of
// plain arithmetic, so that the drift of a busy machine meets all of them alike; a
// report says when others took processors away. Rows of the result are recomputed in
// float64: a case that is off by more than its bound is marked wrong and gets no figure.
//
// A report holds every sample, operations and bytes by count, memory by count and as
// measured, how time and memory grow with the length ([Growth]), and the environment.
// It is written as a table, JSON, CSV and Go benchmark lines. [Difference] compares two.
//
// There are three ceilings: how fast the device computes (backend.PeakMeter), how
// fast it reads this case's operands (backend.BandwidthMeter) and, behind a queue,
// how long a call takes that does nothing (backend.LaunchMeter). A figure stands
// beside the one that binds ([Bound]): prefill is bound by the first, decoding by
// the second, short calls by the third. [Ceilings] measures them alone, with what
// else a device tells of itself (backend.CeilingMeter), [Compare] several ways to
// compute the same call, in turns, and [Plans] says how cases would run.
//
// A device that has a clock of its own, and a backend that reads it, also say how
// much of a call is computing (backend.Trace). Compiling and moving inputs come
// once, before the repetitions, and are told apart.
//
// Without lengths of its own a series doubles the sequence length for as long as the
// cost of the last case predicts that the next one is affordable. What would take more
// time or memory than there is is listed as predicted, and what else does not run with
// the reason; nothing is dropped silently. A run that ended early can go on
// (Config.Resume).
//
// It does not choose or open backends, and it asserts nothing about speed.
package bench
