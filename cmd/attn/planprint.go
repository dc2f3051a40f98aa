package main

import (
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/seed90331342/attn/backend"
)

// printPlan prints how a call would run.
func printPlan(out io.Writer, be backend.Backend, in *runInputs, p backend.Plan) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	line := func(name, format string, args ...any) {
		fmt.Fprintf(w, "%s\t%s\n", name, fmt.Sprintf(format, args...))
	}
	line("backend", "%s (%s)", p.Backend, be.Info().Device)
	for _, f := range in.qkv {
		line(f.name, "%v %s, computed as %v", f.Shape, f.TypeName(), in.dtype)
	}
	for _, f := range in.past {
		if f != nil {
			line(f.name, "%v %s", f.Shape, f.TypeName())
		}
	}
	for _, f := range in.pairs {
		line(f.name, "%v %s, as %v", f.Shape, f.TypeName(), f.shape)
	}
	line("path", "%s", p.Path)
	line("why", "%s", p.Why)
	line("pairs", "%d visible (query, key) pairs", p.Pairs)
	line("work", "%s", si(float64(p.FLOPs), "FLOP"))
	line("moves", "%s at least", bytesText(p.Bytes))
	if p.Streamed > 0 {
		line("streams", "%s between host and device", bytesText(p.Streamed))
	}
	line("scratch", "%s beside the operands", bytesText(p.Scratch))
	line("chunks", "%d (%s)", p.Chunks, p.Cut)
	for _, l := range p.Limits {
		line("limit", "%s %s", l.Name, quantity(l))
	}
	return w.Flush()
}

// si prints a number with a decimal prefix: 1.5 GFLOP.
func si(x float64, unit string) string {
	prefixes := []string{"", "k", "M", "G", "T", "P", "E"}
	i := 0
	for x >= 1000 && i < len(prefixes)-1 {
		x /= 1000
		i++
	}
	return fmt.Sprintf("%.4g %s%s", x, prefixes[i], unit)
}
