package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/alecthomas/kong"

	"github.com/seed90331342/attn/backend"
)

// heatmapCmd is attn heatmap: the weights of chosen heads and of a range of
// queries and keys as a picture. Only that range is computed and it is pooled as
// it comes, a chunk of rows at a time, so that memory stays O(S).
type heatmapCmd struct {
	Q string `name:"q" required:"" placeholder:"Q.npy" help:"Queries: [S,D], [B,S,D] or [B,H,S,D] of f2, f4 or f8 (rounded to f4)."`
	K string `name:"k" required:"" placeholder:"K.npy" help:"Keys, of q's rank; their heads divide q's."`

	PNG  string `name:"png" placeholder:"H.png" help:"Draw into this file: queries down, keys across, darker the larger."`
	SVG  string `name:"svg" placeholder:"H.svg" help:"The same as SVG."`
	HTML string `name:"html" placeholder:"H.html" help:"The same as a page that needs no network and shows the number under the pointer."`

	Batch       int       `name:"batch" default:"0" help:"Which batch, from 0."`
	Head        lengths   `name:"head" default:"0" placeholder:"N,N" help:"Which query heads, from 0, a panel each. Default: 0."`
	Queries     tokenSpan `name:"queries" placeholder:"LO:HI" help:"Rows LO to HI-1, as in Python. Default: all."`
	Keys        tokenSpan `name:"keys" placeholder:"LO:HI" help:"Keys LO to HI-1. Default: all. Weights are of the softmax over all keys, whatever is drawn."`
	Labels      string    `name:"labels" placeholder:"FILE" help:"The keys' tokens, and the queries' where there are as many: one a line, or a JSON array of strings."`
	QueryLabels string    `name:"query-labels" placeholder:"FILE" help:"The queries' tokens."`
	Pool        string    `name:"pool" enum:"max,mean" default:"max" help:"What a cell of the picture shows of the weights that it joins where the range is longer than --size: the largest (max) or the mean."`
	Size        int       `name:"size" default:"1024" help:"Cells a side at most, 1 to 2048."`
	Log         bool      `name:"log" help:"Shades follow the logarithm, down to a millionth of the largest weight."`
	Title       string    `name:"title" placeholder:"TEXT" help:"Heading of the picture. Default: the files' names."`

	callFlags `embed:""`
}

// maxSize keeps a panel within what is drawn.
const maxSize = 2048

// Run draws. What can be wrong with flags and headers is said before data is
// read.
func (c *heatmapCmd) Run(ctx context.Context, out *streams) error {
	if c.Size < 1 || c.Size > maxSize {
		return fmt.Errorf("--size is %d, it must be 1 to %d cells", c.Size, maxSize)
	}
	p := c.problem()
	p.Q, p.K = c.Q, c.K
	in, err := p.inputs()
	if err != nil {
		return err
	}
	meta, err := in.meta()
	if err != nil {
		return err
	}
	q, k := meta[0].Shape(), meta[1].Shape()
	rows, keys, err := c.ranges(q, k)
	if err != nil {
		return err
	}
	picture := heatMaps{log: c.Log}
	if picture.query, picture.key, err = c.axes(q, k, rows, keys); err != nil {
		return err
	}
	var files outputs
	defer files.discard()
	wanted := 0
	for _, f := range []namedPath{{"png", c.PNG}, {"svg", c.SVG}, {"html", c.HTML}} {
		if f.path == "" {
			continue
		}
		if err := files.add(f.name, f.path); err != nil {
			return err
		}
		wanted++
	}
	if wanted == 0 {
		return errors.New("--png, --svg or --html is missing: where to draw")
	}
	be, err := backend.Open(c.Backend)
	if err != nil {
		return err
	}
	defer be.Close()
	if _, err := in.plan(be, p.options()); err != nil {
		return err
	}
	if err := in.fitMemory(); err != nil {
		return err
	}
	calc := calculation{be: be, in: in, note: out.err}
	defer calc.release()
	if err := calc.load(ctx, p.options()); err != nil {
		return err
	}
	some := someWeights{be: be, q: calc.q, k: calc.k, opt: calc.opt, batch: c.Batch, rows: rows, keys: keys}
	if err := c.weigh(ctx, &some, &picture, out.err); err != nil {
		return err
	}
	picture.title = c.heading(&picture, &some)
	for _, f := range []struct {
		flag, path string
		write      func(io.Writer) error
	}{{"png", c.PNG, picture.writePNG}, {"svg", c.SVG, picture.writeSVG}, {"html", c.HTML, func(w io.Writer) error {
		return picture.writePage(w, c.facts(be, in, &some))
	}}} {
		if f.path == "" {
			continue
		}
		if err := files.write(f.flag, f.write); err != nil {
			return err
		}
	}
	return files.commit(ctx)
}

// ranges checks what is chosen of the inputs.
func (c *heatmapCmd) ranges(q, k backend.Shape) (rows, keys span, err error) {
	if c.Batch < 0 || c.Batch >= q[backend.Batch] {
		return rows, keys, fmt.Errorf("--batch is %d, it must be 0 to %d", c.Batch, q[backend.Batch]-1)
	}
	for _, h := range c.Head {
		if h < 0 || h >= q[backend.Heads] {
			return rows, keys, fmt.Errorf("--head is %d, it must be 0 to %d", h, q[backend.Heads]-1)
		}
	}
	if rows, err = c.Queries.of(q[backend.Seq]); err != nil {
		return rows, keys, fmt.Errorf("--queries: %w", err)
	}
	if keys, err = c.Keys.of(k[backend.Seq]); err != nil {
		return rows, keys, fmt.Errorf("--keys: %w", err)
	}
	return rows, keys, nil
}

// axes reads the labels and joins them as the weights are.
func (c *heatmapCmd) axes(q, k backend.Shape, rows, keys span) (query, key axis, err error) {
	read := func(flag, path string, want int) ([]string, error) {
		labels, err := readLabels(path)
		if err == nil && len(labels) != want {
			err = fmt.Errorf("%d labels for %d tokens", len(labels), want)
		}
		if err != nil {
			return nil, fmt.Errorf("--%s %s: %w", flag, path, reason(err))
		}
		return labels, nil
	}
	var ofKeys, ofQueries []string
	if c.Labels != "" {
		if ofKeys, err = read("labels", c.Labels, k[backend.Seq]); err != nil {
			return query, key, err
		}
		if q[backend.Seq] == k[backend.Seq] {
			ofQueries = ofKeys
		}
	}
	if c.QueryLabels != "" {
		if ofQueries, err = read("query-labels", c.QueryLabels, q[backend.Seq]); err != nil {
			return query, key, err
		}
	}
	return c.axis(ofQueries, rows), c.axis(ofKeys, keys), nil
}

// axis names the cells of some tokens, each after its first token.
func (c *heatmapCmd) axis(labels []string, of span) axis {
	a := axis{first: of.lo, end: of.hi, step: (of.len() + c.Size - 1) / c.Size}
	if labels != nil {
		for i := of.lo; i < of.hi; i += a.step {
			a.labels = append(a.labels, labels[i])
		}
	}
	return a
}

// readLabels reads tokens: a JSON array of strings, or a line each.
func readLabels(path string) ([]string, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var labels []string
	if trimmed := bytes.TrimSpace(text); len(trimmed) > 0 && trimmed[0] == '[' {
		// A list of tokens may itself begin with a line "[": only what is JSON
		// is read as such.
		if json.Unmarshal(trimmed, &labels) == nil {
			return labels, nil
		}
	}
	lines := strings.ReplaceAll(strings.TrimSuffix(string(text), "\n"), "\r\n", "\n")
	return strings.Split(lines, "\n"), nil
}

// weigh computes the cells of each head.
func (c *heatmapCmd) weigh(ctx context.Context, some *someWeights, picture *heatMaps, stderr io.Writer) error {
	progress := newNote(stderr)
	defer progress.clear()
	for i, head := range c.Head {
		cells := newPooled(some.rows, some.keys, c.Size, c.Pool == "mean")
		err := some.each(ctx, head, func(row, first int, weights []float32) {
			if done := row - some.rows.lo; done%chunkRows == 0 {
				progress.show(fmt.Sprintf("head %d, %d of %d: row %d of %d", head, i+1, len(c.Head), done, some.rows.len()))
			}
			cells.add(row, first, weights)
		})
		if err != nil {
			return fmt.Errorf("head %d: %w", head, err)
		}
		m := cells.matrix()
		picture.weights.rows, picture.weights.cols = m.rows, m.cols
		picture.weights.batch++
		picture.weights.data = append(picture.weights.data, m.data...)
		picture.names = append(picture.names, fmt.Sprintf("head %d", head))
	}
	return nil
}

// heading says what the picture shows.
func (c *heatmapCmd) heading(picture *heatMaps, some *someWeights) string {
	parts := []string{c.Title}
	if c.Title == "" {
		parts[0] = fmt.Sprintf("%s, %s", filepath.Base(c.Q), filepath.Base(c.K))
		if some.q.Shape()[backend.Batch] > 1 {
			parts = append(parts, fmt.Sprintf("batch %d", c.Batch))
		}
		if len(c.Head) == 1 && some.q.Shape()[backend.Heads] > 1 {
			parts = append(parts, picture.names[0])
		}
	}
	return strings.Join(append(parts, c.pooling(picture)...), " · ")
}

// pooling says how weights were joined, when they were.
func (c *heatmapCmd) pooling(picture *heatMaps) []string {
	r, k := picture.query.step, picture.key.step
	if r == 1 && k == 1 {
		return nil
	}
	what := "the largest"
	if c.Pool == "mean" {
		what = "the mean"
	}
	return []string{fmt.Sprintf("each cell is %s of %d x %d weights", what, r, k)}
}

// facts are what the page says beside the picture: names and values.
func (c *heatmapCmd) facts(be backend.Backend, in *runInputs, some *someWeights) [][2]string {
	info := be.Info()
	facts := [][2]string{{"backend", fmt.Sprintf("%s, %s", info.Name, info.Device)}}
	for _, f := range in.qkv {
		facts = append(facts, [2]string{f.name, fmt.Sprintf("%s, %v %s", f.path, f.Shape, f.TypeName())})
	}
	add := func(name, format string, args ...any) {
		facts = append(facts, [2]string{name, fmt.Sprintf(format, args...)})
	}
	add("batch", "%d", c.Batch)
	add("queries", "%d to %d of %d", some.rows.lo, some.rows.hi-1, some.q.Shape()[backend.Seq])
	add("keys", "%d to %d of %d", some.keys.lo, some.keys.hi-1, some.k.Shape()[backend.Seq])
	if c.Scale.set {
		add("scale", "%v", c.Scale.value)
	} else {
		add("scale", "1/√%d", some.q.Shape()[backend.Dim])
	}
	if c.Softcap.value > 0 {
		add("softcap", "%v", c.Softcap.value)
	}
	if c.Causal {
		add("causal", "%s", c.CausalAlign)
	}
	if c.Window.set {
		add("window", "%s,%s", sideText(c.Window.Left), sideText(c.Window.Right))
	}
	if c.KLen != nil {
		add("keys that exist", "%d", c.KLen[c.Batch])
	}
	if c.Mask != "" {
		add("mask", "%s", c.Mask)
	}
	return facts
}

// sideText writes one side of a window as the flag takes it.
func sideText(n int) string {
	if n == backend.Unbounded {
		return "inf"
	}
	return strconv.Itoa(n)
}

// tokenSpan is the flag LO:HI, either of which may be left out.
type tokenSpan struct{ lo, hi *int }

// Decode implements kong.MapperValue.
func (s *tokenSpan) Decode(ctx *kong.DecodeContext) error {
	word, err := popText(ctx, "LO:HI")
	if err != nil {
		return err
	}
	lo, hi, ok := strings.Cut(word, ":")
	if !ok {
		return fmt.Errorf("%q is no range, it must be LO:HI, of which either may be left out", word)
	}
	for _, end := range []struct {
		text string
		to   **int
	}{{lo, &s.lo}, {hi, &s.hi}} {
		if end.text == "" {
			continue
		}
		n, err := strconv.Atoi(end.text)
		if err != nil {
			return fmt.Errorf("%q is not a whole number of tokens", end.text)
		}
		*end.to = &n
	}
	return nil
}

// of returns the range of n tokens.
func (s tokenSpan) of(n int) (span, error) {
	r := span{0, n}
	if s.lo != nil {
		r.lo = *s.lo
	}
	if s.hi != nil {
		r.hi = *s.hi
	}
	if r.lo < 0 || r.hi > n || r.lo >= r.hi {
		return r, fmt.Errorf("%d:%d is not within 0:%d, or is empty", r.lo, r.hi, n)
	}
	return r, nil
}
