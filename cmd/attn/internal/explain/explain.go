// Package explain is the command attn explain.
package explain

import (
	"bytes"
	"context"
	"fmt"
	"strings"

	"github.com/seed90331342/attn/cmd/internal/cli"
	"github.com/seed90331342/attn/cmd/internal/flags"
	"github.com/seed90331342/attn/cmd/internal/output"
	"github.com/seed90331342/attn/cmd/internal/picture"
)

// Command is attn explain: every step of self-attention on a small example, printed as in published walk-throughs.
type Command struct {
	cli.Device      `embed:""`
	flags.Overwrite `embed:""`

	File  string `arg:"" name:"file" placeholder:"FILE.json" help:"The example, with the fields above."`
	Grads bool   `name:"gradients" help:"Also print each step of the backward pass, from the gradient of the outputs (d_outputs in the file, else 1) to those of queries, keys and values."`
	Round *int   `name:"round" placeholder:"N" help:"Also print the weights rounded to N decimals, so that each row still adds up to 1, and the steps that follow from them."`
	PNG   string `name:"png" placeholder:"H.png" help:"Draw the weights as a heat map: queries down, keys across."`
}

// Run prints the steps, checks the expected values, and draws.
func (c *Command) Run(ctx context.Context, out *cli.Streams) error {
	if c.Round != nil && (*c.Round < 0 || *c.Round > maxDigits) {
		return flags.Usagef("--round is %d, it must be 0 to %d decimals", *c.Round, maxDigits)
	}
	outputs := []flags.File{{Flag: "--png", Path: c.PNG}}
	if err := picture.CheckNames(outputs); err != nil {
		return err
	}
	if err := c.Overwrite.Check([]flags.File{{Flag: "FILE", Path: c.File}}, outputs); err != nil {
		return err
	}
	wt, err := readWalkthrough(ctx, c.File)
	if err != nil {
		return err
	}
	var set output.Set
	defer set.Discard()
	if err := set.Add("--png", c.PNG); err != nil {
		return err
	}
	dev, err := c.Open()
	if err != nil {
		return err
	}
	defer dev.Close()
	st, err := computeSteps(ctx, dev, wt)
	if err != nil {
		return flags.OfFile(fmt.Errorf("%s: %w", wt.path, err)) // all that it computes is in the file
	}
	defer st.close()
	if c.Round != nil {
		if err := st.round(ctx, *c.Round); err != nil {
			return fmt.Errorf("%s: %w", wt.path, err)
		}
	}
	var grads *gradients
	if c.Grads {
		if grads, err = st.differentiate(ctx, wt); err != nil {
			return fmt.Errorf("%s: %w", wt.path, err)
		}
	}
	var text bytes.Buffer
	explanation{&text, wt, st, grads, dev.Info().Name}.print()
	if _, err := out.Out.Write(text.Bytes()); err != nil {
		return err
	}
	if len(wt.unknown) > 0 {
		out.Note("%s: unknown fields: %s", wt.path, strings.Join(wt.unknown, ", "))
	}
	if n := wt.roundedDecimals(); c.Round != nil && n >= 0 && n != *c.Round {
		out.Note("%s: its rounded values have --round %d, they are not checked", wt.path, n)
	}
	// The steps are printed before the check, as they show the difference.
	found, err := wt.check(st)
	if err != nil {
		return err
	}
	if err := printFindings(out.Out, found); err != nil {
		return err
	}
	heat := picture.HeatMap{Title: wt.Title, Weights: st.weights}
	heat.Query.Labels, heat.Key.Labels = wt.Labels, wt.Labels
	for b := range wt.batch {
		heat.Names = append(heat.Names, fmt.Sprintf("batch %d", b+1))
	}
	if err := set.Write(ctx, "--png", heat.WritePNG); err != nil {
		return err
	}
	return set.Commit(ctx)
}
