package bench

import (
	"bytes"
	"fmt"
	"strings"
)

// WriteGoBenchFile writes the rounds in the format of Go benchmarks (proposal 14313),
// which benchstat reads: a line a round of a case, with the median of its calls, and what
// it was measured on as configuration lines before them:
//
//	goos: linux
//	cpu: AMD EPYC
//	pkg: github.com/seed90331342/attn/bench
//	BenchmarkAttention/backend=cpu/variant=fused/f32/b1h8s1024d64-2  5  10530221 ns/op  203 GFLOP/s  86.8 %ceiling
//
// Cases that are wrong or were not measured have no line. The file appears complete
// or not at all.
func (r *Report) WriteGoBenchFile(path string) error {
	var b bytes.Buffer
	e := &r.Environment
	config := func(key, value string) {
		if value = strings.Join(strings.Fields(value), " "); value != "" {
			fmt.Fprintf(&b, "%s: %s\n", key, value)
		}
	}
	config("goos", e.OS)
	config("goarch", e.Arch)
	config("cpu", e.CPU)
	config("pkg", modulePath+"/bench")
	config("go-version", e.GoVersion)
	config("attn-version", e.Version)
	config("attn-commit", e.Commit)
	config("attn-args", strings.Join(e.Args, " "))
	for _, info := range e.Backends {
		fmt.Fprintln(&b)
		config("device", info.Device)
		config("provider", info.Provider)
		config("driver", info.Driver)
		config("limits", limitsText(info.Limits))
		for i := range r.Cases {
			if m := &r.Cases[i]; m.on(info) && m.Status == OK {
				m.goBench(&b)
			}
		}
		// A key holds until it is set again, and the next device may have no driver.
		fmt.Fprint(&b, "driver:\nlimits:\n")
	}
	return writeFile(path, b.Bytes())
}

// goBench writes the lines of a case.
func (m *Measurement) goBench(b *bytes.Buffer) {
	name := fmt.Sprintf("BenchmarkAttention/backend=%s/variant=%s/%s", m.Backend, m.Variant, m.Name)
	if m.Contender != "" {
		name = fmt.Sprintf("BenchmarkAttention/backend=%s/contender=%s/variant=%s/%s", m.Backend, strings.ReplaceAll(m.Contender, " ", ""), m.Variant, m.Name)
	}
	if m.Threads > 0 {
		name += fmt.Sprintf("-%d", m.Threads)
	}
	for _, r := range m.Rounds {
		seconds := median(r.TimesS)
		fmt.Fprintf(b, "%s %d %.1f ns/op", name, len(r.TimesS), seconds*1e9)
		if m.FLOPs > 0 {
			fmt.Fprintf(b, " %.6g GFLOP/s", float64(m.FLOPs)/seconds/1e9)
		}
		fmt.Fprintf(b, " %.6g GB/s", float64(m.Bytes)/seconds/1e9)
		if percent := m.percentIn(&r, seconds); percent > 0 {
			fmt.Fprintf(b, " %.6g %%ceiling", percent)
		}
		if m.Allocs != nil {
			fmt.Fprintf(b, " %d allocs/op", *m.Allocs)
		}
		b.WriteByte('\n')
	}
}

// percentIn returns how near a call of so many seconds came to the ceiling that binds
// the case, as that was in a round; 0 when it was not measured.
func (m *Measurement) percentIn(r *Round, seconds float64) float64 {
	switch {
	case m.Bound == BoundFMA && r.CeilingGFLOPS != nil:
		return 100 * float64(m.FLOPs) / seconds / 1e9 / *r.CeilingGFLOPS
	case m.Bound == BoundRead && r.CeilingGBS != nil:
		return 100 * float64(m.Bytes) / seconds / 1e9 / *r.CeilingGBS
	case m.Bound == BoundLaunch && r.LaunchS != nil:
		return 100 * *r.LaunchS / seconds
	}
	return 0
}
