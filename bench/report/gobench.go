package report

import (
	"fmt"
	"io"
	"strings"
)

// WriteGoBench writes the rounds in the format of Go benchmarks (proposal 14313), which benchstat reads: a line for
// each round of a case with the median of its calls, below configuration lines:
//
//	goos: linux
//	cpu: AMD EPYC
//	pkg: github.com/seed90331342/attn/bench
//	BenchmarkAttention/backend=cpu/variant=fused/f32/b1h8s1024d64-2  5  10530221 ns/op  203 GFLOP/s  86.8 %ceiling
//
// Cases that are wrong or were not measured have no line.
func (r *Report) WriteGoBench(w io.Writer) error {
	var b strings.Builder
	e := &r.Environment
	config := func(key, value string) { // also an empty value: one holds until the key is set again
		fmt.Fprintln(&b, strings.TrimSpace(key+": "+strings.Join(strings.Fields(value), " ")))
	}
	config("goos", e.OS)
	config("goarch", e.Arch)
	config("cpu", e.CPU)
	config("pkg", modulePath+"/bench")
	config("attn", strings.Join(nonEmpty(e.GoVersion, e.Version), " "))
	for i := range e.Backends {
		info := &e.Backends[i]
		fmt.Fprintln(&b)
		config("device", describe(info))
		for _, m := range r.on(info) {
			if m.Status == OK {
				m.goBench(&b)
			}
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// goBench writes the lines of a case.
func (m *Measurement) goBench(b *strings.Builder) {
	name := fmt.Sprintf("BenchmarkAttention/backend=%s/variant=%s/%s", m.Backend, m.Variant, m.Name)
	if m.Threads > 0 {
		name += fmt.Sprintf("-%d", m.Threads)
	}
	for i := range m.Rounds {
		one := *m // with the figures of one round
		one.Rounds = m.Rounds[i : i+1]
		one.summarize()
		one.findRates()
		fmt.Fprintf(b, "%s %d %.1f ns/op", name, one.Repetitions, *one.MedianS*1e9)
		for _, f := range []struct {
			figure any
			unit   string
		}{{one.GFLOPS, "GFLOP/s"}, {one.GBS, "GB/s"}, {one.PercentOfBound, "%ceiling"}, {one.Allocs, "allocs/op"}} {
			if x, ok := of(f.figure); ok {
				fmt.Fprintf(b, " %.6g %s", x, f.unit)
			}
		}
		b.WriteByte('\n')
	}
}
