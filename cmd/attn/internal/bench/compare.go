package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"

	"github.com/seed90331342/attn/bench/report"
	"github.com/seed90331342/attn/cmd/internal/cli"
	"github.com/seed90331342/attn/cmd/internal/files"
)

// Compare is attn compare.
type Compare struct {
	Old      string       `arg:"" name:"old" help:"Report of attn bench --json."`
	New      string       `arg:"" name:"new" help:"Later report of the same cases."`
	Percent  cli.Percent  `name:"percent" default:"4" placeholder:"P" help:"Smallest change to report, in percent of a call's time. Default: 4."`
	FailOver *cli.Percent `name:"fail-over" placeholder:"P" help:"Fail when a case became slower by more than P: 5%."`
}

// readReport reads a report from a file.
func readReport(ctx context.Context, path string) (*report.Report, error) {
	text, err := files.Read(ctx, path, files.MaxText)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	r, err := report.Read(bytes.NewReader(text))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return r, nil
}

// Run compares the reports. It always fails when a measured case has become wrong, and when a report is incomplete.
func (c *Compare) Run(ctx context.Context, out *cli.Streams) error {
	was, err := readReport(ctx, c.Old)
	if err != nil {
		return err
	}
	now, err := readReport(ctx, c.New)
	if err != nil {
		return err
	}
	err = c.compare(out, was, now)
	for _, r := range []struct {
		path string
		*report.Report
	}{{c.Old, was}, {c.New, now}} {
		if r.Interrupted {
			err = errors.Join(err, fmt.Errorf("%s is incomplete, its run was %w: continue it with attn bench --resume %s", r.path, report.ErrInterrupted, r.path))
		}
	}
	return err
}

func (c *Compare) compare(out *cli.Streams, was, now *report.Report) error {
	changes := report.Compare(was, now, float64(c.Percent))
	if err := report.WriteChanges(out.Out, was, now, changes, float64(c.Percent)); err != nil {
		return err
	}
	compared := 0
	for _, change := range changes {
		if change.Verdict != report.Missing {
			compared++
		}
	}
	if compared == 0 {
		return fmt.Errorf("%s and %s have no measured case in common", c.Old, c.New)
	}
	limit := 0.0
	if c.FailOver != nil {
		limit = float64(*c.FailOver)
	}
	worst := report.Worst(changes, limit)
	switch {
	case worst == nil || worst.Verdict != report.Broken && c.FailOver == nil:
		return nil
	case worst.Verdict == report.Broken:
		return fmt.Errorf("%s %s was measured before and is %s now: %s", worst.New.Backend, worst.New.Name, worst.New.Status, worst.New.Note)
	}
	return fmt.Errorf("%s %s became %.1f%% slower, which is over %g%%", worst.New.Backend, worst.New.Name, worst.Percent, limit)
}
