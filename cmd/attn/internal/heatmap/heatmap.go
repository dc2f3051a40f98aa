// Package heatmap is the command attn heatmap.
package heatmap

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/seed90331342/attn/bench/plain"
	"github.com/seed90331342/attn/cmd/attn/internal/call"
	"github.com/seed90331342/attn/cmd/internal/cli"
	"github.com/seed90331342/attn/cmd/internal/files"
	"github.com/seed90331342/attn/cmd/internal/flags"
	"github.com/seed90331342/attn/cmd/internal/output"
	"github.com/seed90331342/attn/cmd/internal/picture"
	"github.com/seed90331342/attn/kernels"
)

// Command is attn heatmap: the weights of chosen heads, queries and keys as a picture. It computes only these, a chunk
// of rows at a time, and pools them as they come: memory stays O(S).
type Command struct {
	cli.Device `embed:""`

	Q string `name:"q" required:"" placeholder:"Q.npy" help:"Queries: [S,D], [B,S,D] or [B,H,S,D] of f2, f4 or f8 (rounded to f4), or FILE.safetensors#NAME, also of bf16."`
	K string `name:"k" required:"" placeholder:"K.npy" help:"Keys, of q's rank; their heads divide q's."`

	PNG  string `name:"png" placeholder:"H.png" help:"Draw into this file: queries down, keys across, darker for larger weights."`
	SVG  string `name:"svg" placeholder:"H.svg" help:"The same as SVG."`
	HTML string `name:"html" placeholder:"H.html" help:"The same as a web page that shows the weight under the pointer; it needs no network."`

	Batch       int    `name:"batch" default:"0" help:"Batch, from 0."`
	Head        []int  `name:"head" default:"0" placeholder:"N,N" help:"Query heads, from 0, a panel for each. Default: 0."`
	Queries     string `name:"queries" placeholder:"LO:HI" help:"Rows LO to HI-1, as in Python. Default: all."`
	Keys        string `name:"keys" placeholder:"LO:HI" help:"Keys LO to HI-1. Default: all. The softmax is always over all keys."`
	Labels      string `name:"labels" placeholder:"FILE" help:"Tokens of the keys, and of the queries if there are as many: one a line, or a JSON array of strings."`
	QueryLabels string `name:"query-labels" placeholder:"FILE" help:"Tokens of the queries."`
	Pool        string `name:"pool" enum:"max,mean" default:"max" help:"Value of a cell that joins several weights, where the range is longer than --size: their maximum (max) or mean."`
	Size        int    `name:"size" default:"1024" help:"Maximum number of cells along an axis, 1 to 2048."`
	Log         bool   `name:"log" help:"Logarithmic shades, down to a millionth of the largest weight."`
	Title       string `name:"title" placeholder:"TEXT" help:"Title of the picture. Default: the names of the files."`

	call.Options    `embed:""`
	flags.Overwrite `embed:""`
}

// maxSize keeps a panel below the limit of the picture's size.
const maxSize = 2048

// Run draws. It checks flags and headers before it reads data.
func (c *Command) Run(ctx context.Context, out *cli.Streams) error {
	if c.Size < 1 || c.Size > maxSize {
		return flags.Usagef("--size is %d, it must be 1 to %d cells", c.Size, maxSize)
	}
	outputs := []flags.File{{Flag: "--png", Path: c.PNG}, {Flag: "--svg", Path: c.SVG}, {Flag: "--html", Path: c.HTML}}
	if c.PNG == "" && c.SVG == "" && c.HTML == "" {
		return flags.Usagef("missing flags: --png, --svg or --html")
	}
	if err := picture.CheckNames(outputs); err != nil {
		return err
	}
	p := &call.Problem{Q: c.Q, K: c.K, Options: c.Options}
	in, err := p.Open()
	if err != nil {
		return err
	}
	rows, keys, err := c.ranges(in.Dims)
	if err != nil {
		return err
	}
	cells := func(s span) int { step := (s.len() + c.Size - 1) / c.Size; return (s.len() + step - 1) / step }
	if err := picture.CheckSize(cells(rows), cells(keys), len(c.Head)); err != nil {
		return flags.Usagef("--head names %d heads, --size is %d: %w: give fewer heads or a smaller --size", len(c.Head), c.Size, err)
	}
	heat := picture.HeatMap{Log: c.Log}
	if heat.Query, heat.Key, err = c.axes(ctx, in.Dims, rows, keys); err != nil {
		return err
	}
	labels := []flags.File{{Flag: "--labels", Path: c.Labels}, {Flag: "--query-labels", Path: c.QueryLabels}}
	if err := c.Overwrite.Check(append(in.Files(), labels...), outputs); err != nil {
		return err
	}
	var set output.Set
	defer set.Discard()
	for _, f := range outputs {
		if err := set.Add(f.Flag, f.Path); err != nil {
			return err
		}
	}
	dev, err := c.Open()
	if err != nil {
		return err
	}
	defer dev.Close()
	if _, err := in.Prepare(dev, false, false); err != nil {
		return err
	}
	if err := in.CheckMemory(); err != nil {
		return err
	}
	operands, err := in.Load(ctx, dev, out.Note)
	if err != nil {
		return err
	}
	defer operands.Release()
	if err := c.weigh(ctx, dev, operands, rows, keys, &heat, out.Err); err != nil {
		return err
	}
	heat.Title = plain.Text(c.title(&heat, in.Dims))
	page := func(w io.Writer) error { return heat.WritePage(w, c.facts(dev, in, rows, keys)) }
	for flag, write := range map[string]func(io.Writer) error{"png": heat.WritePNG, "svg": heat.WriteSVG, "html": page} {
		if err := set.Write(ctx, "--"+flag, write); err != nil {
			return err
		}
	}
	return set.Commit(ctx)
}

// ranges checks the selection and returns its rows and keys.
func (c *Command) ranges(d kernels.Dims) (rows, keys span, err error) {
	if d.Batch == 0 || d.Heads == 0 || d.SeqQ == 0 || d.SeqK == 0 {
		return rows, keys, fmt.Errorf("--q and --k have %d batches, %d heads, %d queries and %d keys: there is nothing to draw", d.Batch, d.Heads, d.SeqQ, d.SeqK)
	}
	if c.Batch < 0 || c.Batch >= d.Batch {
		return rows, keys, flags.Usagef("--batch is %d, it must be 0 to %d", c.Batch, d.Batch-1)
	}
	for _, h := range c.Head {
		if h < 0 || h >= d.Heads {
			return rows, keys, flags.Usagef("--head is %d, it must be 0 to %d", h, d.Heads-1)
		}
	}
	if rows, err = parseSpan("--queries", c.Queries, d.SeqQ); err == nil {
		keys, err = parseSpan("--keys", c.Keys, d.SeqK)
	}
	return rows, keys, err
}

// parseSpan parses LO:HI, either end of which may be missing, of the indices 0 to n-1; all for "".
func parseSpan(flag, text string, n int) (span, error) {
	s := span{0, n}
	lo, hi, ok := strings.Cut(text, ":")
	if !ok && text != "" {
		return s, flags.Usagef("%s: %q must be LO:HI, either of which may be missing", flag, text)
	}
	for _, end := range []struct {
		text string
		to   *int
	}{{lo, &s.lo}, {hi, &s.hi}} {
		var err error
		if end.text != "" {
			*end.to, err = strconv.Atoi(end.text)
		}
		if err != nil {
			return s, flags.Usagef("%s: %q is not a whole number", flag, end.text)
		}
	}
	if s.lo < 0 || s.hi > n || s.lo >= s.hi {
		return s, flags.Usagef("%s: %d:%d is not within 0:%d, or is empty", flag, s.lo, s.hi, n)
	}
	return s, nil
}

// axes reads the labels and returns the axes of the picture.
func (c *Command) axes(ctx context.Context, d kernels.Dims, rows, keys span) (query, key picture.Axis, err error) {
	keyLabels, err := readLabels(ctx, "labels", c.Labels, d.SeqK)
	if err != nil {
		return query, key, err
	}
	queryLabels, err := readLabels(ctx, "query-labels", c.QueryLabels, d.SeqQ)
	if queryLabels == nil && d.SeqQ == d.SeqK {
		queryLabels = keyLabels
	}
	return c.axis(queryLabels, rows), c.axis(keyLabels, keys), err
}

// axis names each cell after its first token.
func (c *Command) axis(labels []string, of span) picture.Axis {
	a := picture.Axis{First: of.lo, End: of.hi, Step: (of.len() + c.Size - 1) / c.Size}
	if labels != nil {
		for i := of.lo; i < of.hi; i += a.Step {
			a.Labels = append(a.Labels, labels[i])
		}
	}
	return a
}

// readLabels reads n tokens, a JSON array of strings or a line each; nil without a path.
func readLabels(ctx context.Context, flag, path string, n int) (labels []string, err error) {
	if path == "" {
		return nil, nil
	}
	text, err := files.Read(ctx, path, files.MaxText)
	if err != nil {
		return nil, fmt.Errorf("--%s %s: %w", flag, path, err)
	}
	labels = parseLabels(text)
	if len(labels) != n {
		return nil, fmt.Errorf("--%s %s: %d labels for %d tokens: give one for each", flag, path, len(labels), n)
	}
	return labels, nil
}

// parseLabels returns the tokens in the text of a file.
func parseLabels(text []byte) (labels []string) {
	// The first of the tokens may be "[": a file that is not JSON is lines.
	if trimmed := bytes.TrimSpace(text); len(trimmed) == 0 || trimmed[0] != '[' || json.Unmarshal(trimmed, &labels) != nil {
		lines := strings.ReplaceAll(strings.TrimSuffix(string(text), "\n"), "\r\n", "\n")
		labels = strings.Split(lines, "\n")
	}
	for i, label := range labels {
		labels[i] = plain.Label(label)
	}
	return labels
}

// weigh computes the cells of each head.
func (c *Command) weigh(ctx context.Context, dev *kernels.Device, in *call.Operands, rows, keys span, heat *picture.HeatMap, stderr io.Writer) error {
	status := cli.NewStatus(stderr)
	defer status.Clear()
	for i, head := range c.Head {
		cells := newPooled(rows, keys, c.Size, c.Pool == "mean")
		part := kernels.WeightRange{Batch: c.Batch, Head: head, Rows: [2]int{rows.lo, rows.hi}, Keys: [2]int{keys.lo, keys.hi}}
		err := dev.EachWeightRow(ctx, in.Q, in.K, part, in.Options, func(row, first int, weights []float32) {
			if done := row - rows.lo; done%256 == 0 {
				status.Show(fmt.Sprintf("head %d, %d of %d: row %d of %d", head, i+1, len(c.Head), done, rows.len()))
			}
			cells.add(row, first, weights)
		})
		if err != nil {
			return fmt.Errorf("head %d: %w", head, err)
		}
		m := cells.matrix()
		heat.Weights.Rows, heat.Weights.Cols = m.Rows, m.Cols
		heat.Weights.Batch++
		heat.Weights.Data = append(heat.Weights.Data, m.Data...)
		heat.Names = append(heat.Names, fmt.Sprintf("head %d", head))
	}
	return nil
}

// title returns the title of the picture.
func (c *Command) title(heat *picture.HeatMap, d kernels.Dims) string {
	parts := []string{c.Title}
	if c.Title == "" {
		parts[0] = fmt.Sprintf("%s, %s", filepath.Base(c.Q), filepath.Base(c.K))
		if d.Batch > 1 {
			parts = append(parts, fmt.Sprintf("batch %d", c.Batch))
		}
		if len(c.Head) == 1 && d.Heads > 1 {
			parts = append(parts, heat.Names[0])
		}
	}
	if r, k := heat.Query.Step, heat.Key.Step; r > 1 || k > 1 {
		pool := map[string]string{"max": "maximum", "mean": "mean"}[c.Pool]
		parts = append(parts, fmt.Sprintf("each cell is the %s of %d x %d weights", pool, r, k))
	}
	return strings.Join(parts, " · ")
}

// facts returns names and values of the call, for the page.
func (c *Command) facts(dev *kernels.Device, in *call.Inputs, rows, keys span) [][2]string {
	var facts [][2]string
	add := func(name, format string, args ...any) {
		facts = append(facts, [2]string{name, fmt.Sprintf(format, args...)})
	}
	info := dev.Info()
	add("backend", "%s, %s", info.Name, info.Device)
	for _, f := range in.QKV {
		add(f.Flag, "%s, %v %s", f.Path, f.Shape, f.TypeName())
	}
	add("batch", "%d", c.Batch)
	add("queries", "%d to %d of %d", rows.lo, rows.hi-1, in.Dims.SeqQ)
	add("keys", "%d to %d of %d", keys.lo, keys.hi-1, in.Dims.SeqK)
	if c.Scale != nil {
		add("scale", "%v", *c.Scale)
	} else {
		add("scale", "1/√%d", in.Dims.Dim)
	}
	if c.Softcap > 0 {
		add("softcap", "%v", c.Softcap)
	}
	if c.Causal {
		add("causal", "%s", c.Align)
	}
	if c.Window != nil {
		add("window", "%v", c.Window)
	}
	if c.Offset != nil {
		add("offset", "%d", c.Offset)
	}
	if c.KLen != nil {
		add("existing keys", "%d", c.KLen[c.Batch])
	}
	if c.Mask != "" {
		add("mask", "%s", c.Mask)
	}
	return facts
}
