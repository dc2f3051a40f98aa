package bench

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/alecthomas/kong"

	"github.com/seed90331342/attn/bench/report"
	"github.com/seed90331342/attn/cmd/internal/cli"
)

// caseArgs returns the arguments without the flags of output files and their
// values: those that determine the cases.
func caseArgs(args []string) []string {
	files := []string{"--json", "--gobench", "--markdown", "--html", "--resume"}
	var words []string
	for i := 0; i < len(args); i++ {
		name, _, joined := strings.Cut(args[i], "=")
		if !slices.Contains(files, name) {
			words = append(words, args[i])
		} else if !joined {
			i++ // the value
		}
	}
	return words
}

// resume reads the report of an interrupted run. It takes the flags from there,
// except those of output files and --budget.
func (c *Command) resume(ctx context.Context, out *cli.Streams) (*report.Report, error) {
	r, err := readReport(ctx, c.Resume)
	if err != nil {
		return nil, fmt.Errorf("--resume: %w", err)
	}
	args := r.Environment.Args
	if len(args) == 0 {
		return nil, fmt.Errorf("--resume: %s does not contain the arguments of its run", c.Resume)
	}
	for _, word := range caseArgs(out.Args)[1:] {
		if name, _, _ := strings.Cut(word, "="); name != "--budget" && strings.HasPrefix(word, "-") {
			return nil, fmt.Errorf("--resume takes the flags from %s (attn %s), leave out %s", c.Resume, strings.Join(args, " "), word)
		}
	}
	var earlier struct {
		Bench Command `cmd:""`
	}
	parser, err := kong.New(&earlier, Vars(), kong.NoDefaultHelp()) // a report with --help must not end the program
	if err != nil {
		return nil, err
	}
	if _, err := parser.Parse(args); err != nil {
		return nil, fmt.Errorf("--resume: the flags of %s: %v", c.Resume, err)
	}
	now := *c
	*c = earlier.Bench
	c.Resume, c.JSON, c.GoBench, c.Table, c.HTML = now.Resume, now.JSON, now.GoBench, now.Table, now.HTML
	if now.Budget != 0 {
		c.Budget = now.Budget
	}
	if c.JSON == "" {
		c.JSON = c.Resume
	}
	out.Args = args
	return r, nil
}
