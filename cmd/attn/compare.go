package main

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/alecthomas/kong"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/bench"
)

// compareCmd is attn compare.
type compareCmd struct {
	Old      string   `arg:"" name:"old" help:"Report of attn bench --json."`
	New      string   `arg:"" name:"new" help:"Report of the same cases, measured later."`
	Percent  percent  `name:"percent" default:"4" placeholder:"P" help:"The least change that is looked for, in percent of a call's time."`
	FailOver *percent `name:"fail-over" placeholder:"P" help:"Fail when a case became slower by more than that: 5%."`
}

// Run compares the reports. A case that is wrong now fails it in any case.
func (c *compareCmd) Run(_ context.Context, out *streams) error {
	was, err := bench.ReadFile(c.Old)
	if err != nil {
		return err
	}
	now, err := bench.ReadFile(c.New)
	if err != nil {
		return err
	}
	changes := bench.Difference(was, now, float64(c.Percent))
	if err := bench.WriteChanges(out.out, was, now, changes, float64(c.Percent)); err != nil {
		return err
	}
	compared := 0
	for _, change := range changes {
		if change.Verdict != bench.Missing {
			compared++
		}
	}
	if compared == 0 {
		return fmt.Errorf("%s and %s have no measured case in common: %w", c.Old, c.New, backend.ErrOption)
	}
	limit := 0.0
	if c.FailOver != nil {
		limit = float64(*c.FailOver)
	}
	worst := bench.Worst(changes, limit)
	switch {
	case worst == nil || worst.Verdict != bench.Broken && c.FailOver == nil:
		return nil
	case worst.Verdict == bench.Broken:
		return fmt.Errorf("%s %s was measured and is %s now: %s", worst.New.Backend, worst.New.Name, worst.New.Status, worst.New.Note)
	}
	return fmt.Errorf("%s %s became %.1f%% slower, which is over %g%%", worst.New.Backend, worst.New.Name, worst.Percent, limit)
}

// percent is a flag of a percentage: 5%, 2.5.
type percent float64

// Decode implements kong.MapperValue.
func (p *percent) Decode(ctx *kong.DecodeContext) error {
	s, err := popText(ctx, "P%")
	if err != nil {
		return err
	}
	x, err := strconv.ParseFloat(strings.TrimSuffix(s, "%"), 64)
	if err != nil || !(x >= 0 && x <= 1e6) {
		return fmt.Errorf("%q is no percentage of at least 0, write 5%% or 2.5", s)
	}
	*p = percent(x)
	return nil
}
