package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/bench"
)

// benchOutputs are the flags that say where a report goes, not what is in it.
var benchOutputs = []string{"--json", "--csv", "--gobench", "--html", "--plot", "--resume"}

// measuring returns the words of a command line that say what is measured: all but
// benchOutputs and their values.
func measuring(args []string) []string {
	var words []string
	for i := 0; i < len(args); i++ {
		name, _, joined := strings.Cut(args[i], "=")
		if !slices.Contains(benchOutputs, name) {
			words = append(words, args[i])
			continue
		}
		if !joined {
			i++ // its value
		}
	}
	return words
}

// resume reads the report to go on from and takes the flags from it, but for those that
// say where the new one goes and how long it may take.
func (c *benchCmd) resume(out *streams) (*bench.Report, error) {
	report, err := bench.ReadFile(c.Resume)
	if err != nil {
		return nil, fmt.Errorf("--resume: %w", err)
	}
	if len(report.Environment.Args) == 0 {
		return nil, fmt.Errorf("--resume: %s does not say how it was measured: %w", c.Resume, backend.ErrOption)
	}
	for i, word := range measuring(out.args) {
		if i > 0 && word != "--budget" && !strings.HasPrefix(word, "--budget=") && strings.HasPrefix(word, "-") {
			return nil, fmt.Errorf("--resume takes the flags from %s (attn %s), leave out %s: %w", c.Resume, strings.Join(report.Environment.Args, " "), word, backend.ErrOption)
		}
	}
	var was commands
	parser, err := newParser(&was)
	if err != nil {
		return nil, err
	}
	if _, err := parser.Parse(report.Environment.Args); err != nil {
		return nil, fmt.Errorf("--resume: the flags of %s: %v: %w", c.Resume, err, backend.ErrOption)
	}
	now := *c
	*c = was.Bench
	c.Resume, c.JSON, c.CSV, c.GoBench, c.HTML, c.Plot = now.Resume, now.JSON, now.CSV, now.GoBench, now.HTML, now.Plot
	if now.Budget != 0 {
		c.Budget = now.Budget
	}
	if c.JSON == "" {
		c.JSON = c.Resume
	}
	out.args = report.Environment.Args
	return report, nil
}
