package report

import (
	"encoding/csv"
	"fmt"
	"io"
	"strconv"
	"strings"
)

// environment are the last columns of CSV by name: what a case was measured on.
func (r *Report) environment(m *Measurement) [][2]string {
	e, info := &r.Environment, r.Environment.backend(m)
	return [][2]string{
		{"date", e.Date}, {"cpu", e.CPU}, {"cpus", strconv.Itoa(e.CPUs)}, {"os", e.OS + "/" + e.Arch}, {"go_version", e.GoVersion},
		{"version", e.Version}, {"commit", e.Commit}, {"seed", strconv.FormatUint(e.Seed, 10)},
		{"device", info.Device}, {"provider", info.Provider}, {"driver", info.Driver}, {"limits", limits(&info)},
	}
}

// WriteCSV writes the cases as CSV (RFC 4180): a line of names, then a line a case. A
// figure that was not measured is empty.
func (r *Report) WriteCSV(w io.Writer) error {
	names, _ := new(Measurement).figures()
	lines := [][]string{names}
	for _, c := range r.environment(&Measurement{}) {
		lines[0] = append(lines[0], c[0])
	}
	for i := range r.Cases {
		_, figures := r.Cases[i].figures()
		var values []string
		for _, name := range names {
			values = append(values, exact(figures[name]))
		}
		for _, c := range r.environment(&r.Cases[i]) {
			values = append(values, c[1])
		}
		lines = append(lines, values)
	}
	return csv.NewWriter(w).WriteAll(lines)
}

// WriteGoBench writes the rounds in the format of Go benchmarks (proposal 14313), which
// benchstat reads: a line for each round of a case with the median of its calls, below
// configuration lines:
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
	config("go-version", e.GoVersion)
	config("attn-version", e.Version)
	config("attn-commit", e.Commit)
	config("attn-args", strings.Join(e.Args, " "))
	for i := range e.Backends {
		info := &e.Backends[i]
		fmt.Fprintln(&b)
		config("device", info.Device)
		config("provider", info.Provider)
		config("driver", info.Driver)
		config("limits", limits(info))
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
	name := "BenchmarkAttention/backend=" + m.Backend
	name += "/variant=" + m.Variant + "/" + m.Name
	if m.Threads > 0 {
		name += fmt.Sprintf("-%d", m.Threads)
	}
	for i := range m.Rounds {
		one := m.ofRound(i)
		fmt.Fprintf(b, "%s %d", name, one.Repetitions)
		for _, c := range columns {
			x, ok := of(c.value(one))
			switch {
			case c.line == "" || !ok:
			case c.unit == seconds:
				fmt.Fprintf(b, " %.1f %s", x*1e9, c.line)
			default:
				fmt.Fprintf(b, " %.6g %s", x, c.line)
			}
		}
		b.WriteByte('\n')
	}
}
