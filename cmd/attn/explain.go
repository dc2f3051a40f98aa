package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/seed90331342/attn/backend"
)

// explainCmd is attn explain: every step of self-attention on a small example,
// printed as published walk-throughs do.
type explainCmd struct {
	File    string `arg:"" name:"file" placeholder:"FILE.json" help:"The example: x, and optionally w_query, w_key, w_value, b_query, b_key, b_value, scale, labels and expected values, which are then checked."`
	Round   *int   `name:"round" placeholder:"N" help:"Round the weights to N decimals, each row still adding up to 1, before they weigh the values."`
	PNG     string `name:"png" placeholder:"H.png" help:"Draw the weights as a heat map: queries down, keys across."`
	Backend string `name:"backend" default:"auto" help:"auto, cpu, gpu, gpu:N or gpu:NAME."`
}

// Run prints the steps, checks what the file expects, and draws.
func (c *explainCmd) Run(ctx context.Context, out *streams) error {
	if c.Round != nil && (*c.Round < 0 || *c.Round > 15) {
		return fmt.Errorf("--round is %d, it must be 0 to 15 decimals", *c.Round)
	}
	wt, err := readWalkthrough(c.File)
	if err != nil {
		return err
	}
	var files outputs
	defer files.discard()
	if c.PNG != "" {
		if err := files.add("png", c.PNG); err != nil {
			return err
		}
	}
	be, err := backend.Open(c.Backend)
	if err != nil {
		return err
	}
	defer be.Close()
	st, err := computeSteps(ctx, be, wt)
	if err != nil {
		return fmt.Errorf("%s: %w", wt.path, err)
	}
	defer st.close()
	shown := variant{weights: st.weights, output: st.output}
	if c.Round != nil {
		shown.rounded, shown.decimals = true, *c.Round
		if shown.weights, shown.output, err = st.rounded(ctx, *c.Round); err != nil {
			return err
		}
	}
	var text bytes.Buffer
	explanation{&text, wt, st, shown, be.Info().Name}.print()
	if _, err := out.out.Write(text.Bytes()); err != nil {
		return err
	}
	if len(wt.unknown) > 0 {
		fmt.Fprintf(out.err, "attn: note: %s: fields that are not read: %s\n", wt.path, strings.Join(wt.unknown, ", "))
	}
	// The steps are printed first: they show what differs.
	found, err := checkExpected(ctx, wt, st)
	if err != nil {
		return err
	}
	if err := printFindings(out.out, found); err != nil {
		return err
	}
	if c.PNG == "" {
		return nil
	}
	title := wt.Title
	if shown.rounded {
		title = strings.TrimSpace(title + fmt.Sprintf(" (weights rounded to %s)", decimalsText(shown.decimals)))
	}
	tokens := axis{labels: wt.labels()}
	picture := heatMaps{title: title, query: tokens, key: tokens, weights: shown.weights}
	for b := range wt.batch {
		picture.names = append(picture.names, fmt.Sprintf("batch %d", b+1))
	}
	if err := files.write("png", picture.writePNG); err != nil {
		return err
	}
	return files.commit(ctx)
}

// variant are the weights that weigh the values, as computed or rounded.
type variant struct {
	weights, output stack
	rounded         bool
	decimals        int
}

// explanation prints the steps. It writes into a buffer, so that nothing can
// fail and no half of it is printed.
type explanation struct {
	*bytes.Buffer
	wt      *walkthrough
	st      *steps
	shown   variant
	backend string
}

func (e explanation) print() {
	if e.wt.Title != "" {
		fmt.Fprintf(e, "%s\n", strings.Join(strings.Fields(e.wt.Title), " "))
	}
	fmt.Fprintf(e, "backend %s\n", e.backend)
	for _, p := range e.wt.projections() {
		if p.w != nil {
			m := matrix{p.w.shape[0], p.w.shape[1], p.w.float32s()}
			fmt.Fprintf(e, "\nw_%s, the weights of the %s projection [%d, %d]\n", p.name, p.name, m.rows, m.cols)
			e.matrix(m, nil, nil)
		}
		if p.b != nil {
			m := matrix{1, p.b.shape[0], p.b.float32s()}
			fmt.Fprintf(e, "\nb_%s, its bias [%d]\n", p.name, m.cols)
			e.matrix(m, nil, nil)
		}
	}
	for b := range e.wt.batch {
		if e.wt.batched {
			fmt.Fprintf(e, "\n--- batch %d of %d ---\n", b+1, e.wt.batch)
		}
		e.batch(b)
	}
}

// batch prints the steps of one batch.
func (e explanation) batch(b int) {
	tokens := e.wt.labels()
	step := func(s stack, columns []string, format string, args ...any) {
		fmt.Fprintf(e, "\n%s [%d, %d]\n", fmt.Sprintf(format, args...), s.rows, s.cols)
		e.matrix(s.at(b), tokens, columns)
	}
	step(e.st.x, nil, "Input x")
	if e.plain() {
		fmt.Fprintf(e, "\nQueries, keys and values are the input: there are no projections\n")
	} else {
		step(e.st.q, nil, "Queries = %s", e.wt.query.formula())
		step(e.st.k, nil, "Keys = %s", e.wt.key.formula())
		step(e.st.v, nil, "Values = %s", e.wt.value.formula())
	}
	step(e.st.scores, tokens, "Scores = %v · Q·Kᵀ, a row for each query, a column for each key", float32(e.st.scale))
	step(e.st.weights, tokens, "Softmax of each row")
	if e.shown.rounded {
		step(e.shown.weights, tokens, "Softmax, rounded to %s so that each row still adds up to 1", decimalsText(e.shown.decimals))
	}
	e.weighted(b)
	step(e.shown.output, nil, "Output, for each query the sum of its weighted values")
}

// plain reports whether query = key = value = x.
func (e explanation) plain() bool {
	for _, p := range e.wt.projections() {
		if p.w != nil || p.b != nil {
			return false
		}
	}
	return true
}

func (p projection) formula() string {
	s := "x"
	if p.w != nil {
		s += " · w_" + p.name
	}
	if p.b != nil {
		s += " + b_" + p.name
	}
	return s
}

// weighted prints, query by query, what each key's value adds to the output.
func (e explanation) weighted(b int) {
	tokens := e.wt.labels()
	w, v := e.shown.weights.at(b), e.st.v.at(b)
	all := weighted(w, v)
	format := formatOf(all)
	fmt.Fprintf(e, "\nWeighted values = weight · value of each key [%d, %d] for each of %d queries\n", v.rows, v.cols, w.rows)
	for query := range w.rows {
		fmt.Fprintf(e, "  query %s\n", tokens[query])
		part := make([]float32, 0, v.rows*v.cols)
		for key := range v.rows {
			at := (key*w.rows + query) * v.cols
			part = append(part, all[at:at+v.cols]...)
		}
		e.formatted(matrix{v.rows, v.cols, part}, tokens, nil, "    ", format)
	}
}

// matrix prints m in a format of its own.
func (e explanation) matrix(m matrix, rows, columns []string) {
	e.formatted(m, rows, columns, "  ", formatOf(m.data))
}

// printFindings says what was checked.
func printFindings(w io.Writer, found []finding) error {
	if len(found) == 0 {
		return nil
	}
	var buf bytes.Buffer
	buf.WriteString("\nChecked against the file\n")
	for _, f := range found {
		how := "exactly"
		if f.allowed > 0 {
			how = fmt.Sprintf("within %.1e", f.allowed)
		}
		fmt.Fprintf(&buf, "  %s: %d numbers agree %s\n", f.field, f.count, how)
	}
	buf.WriteString("Allowed is half a unit of the last digit printed (the 7th significant one where the file has no digits),\n" +
		"what printed inputs leave open, and the rounding of float32; whole numbers must be exact.\n")
	_, err := w.Write(buf.Bytes())
	return err
}

func decimalsText(n int) string {
	if n == 1 {
		return "1 decimal"
	}
	return fmt.Sprintf("%d decimals", n)
}
