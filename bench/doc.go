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
// For each case ([Case]) it draws inputs by seed, uploads them once, warms up,
// and repeats the call into ready outputs. Between the repetitions it measures
// the device's own ceilings and the plain three-stage path, so that the drift of
// a busy machine meets all of them alike. Rows of the result are recomputed in
// float64: a case that is off by more than its bound is marked wrong and gets no
// figure.
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
// Without lengths of its own it doubles the sequence length for as long as the
// cost of the last case predicts that the next one is affordable. What does not
// run is listed with the reason; nothing is dropped silently.
//
// It does not choose or open backends, and it asserts nothing about speed.
package bench
