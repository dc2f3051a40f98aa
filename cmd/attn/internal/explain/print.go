package explain

import (
	"bytes"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/seed90331342/attn/cmd/internal/matrix"
)

// variant is the weights of the values, computed or rounded, and their output.
type variant struct {
	weights, output matrix.Matrix
	rounded         bool
	decimals        int
}

// explanation prints the steps into a buffer, which cannot fail.
type explanation struct {
	*bytes.Buffer
	wt      *walkthrough
	st      *steps
	shown   variant
	grads   *gradients // nil when they are not requested
	backend string
}

func (e explanation) print() {
	if e.wt.Title != "" {
		fmt.Fprintf(e, "%s\n", strings.Join(strings.Fields(e.wt.Title), " "))
	}
	fmt.Fprintf(e, "backend %s\n", e.backend)
	for _, p := range e.wt.projections {
		if p.w != nil {
			m := matrix.Matrix{Rows: p.w.shape[0], Cols: p.w.shape[1], Data: p.w.float32s()}
			fmt.Fprintf(e, "\nw_%s, the weights of the %s projection [%d, %d]\n", p.name, p.name, m.Rows, m.Cols)
			e.matrix(m, nil, nil)
		}
		if p.b != nil {
			m := matrix.Matrix{Rows: 1, Cols: p.b.shape[0], Data: p.b.float32s()}
			fmt.Fprintf(e, "\nb_%s, its bias [%d]\n", p.name, m.Cols)
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
	step := func(s matrix.Matrix, columns []string, format string, args ...any) {
		e.step(b, s, columns, format, args...)
	}
	step(e.st.x, nil, "Input x")
	if query, key, value := e.wt.projections[0], e.wt.projections[1], e.wt.projections[2]; e.plain() {
		fmt.Fprintf(e, "\nQueries, keys and values are the input: there are no projections\n")
	} else {
		step(e.st.q, nil, "Queries = %s", query.formula())
		step(e.st.k, nil, "Keys = %s", key.formula())
		step(e.st.v, nil, "Values = %s", value.formula())
	}
	step(e.st.scores, tokens, "Scores = %v · Q·Kᵀ, a row for each query, a column for each key", float32(e.st.scale))
	if c := e.wt.Softcap; c > 0 {
		step(e.st.capped, tokens, "Capped scores = %v · tanh(scores/%v)", c, c)
	}
	step(e.st.weights, tokens, "Softmax of each row")
	if e.shown.rounded {
		step(e.shown.weights, tokens, "Softmax, rounded to %s so that each row still adds up to 1", decimalsText(e.shown.decimals))
	}
	e.weighted(b)
	step(e.shown.output, nil, "Output, for each query the sum of its weighted values")
	e.gradients(b)
}

// step prints batch b of a step, with a row for each token.
func (e explanation) step(b int, s matrix.Matrix, columns []string, format string, args ...any) {
	fmt.Fprintf(e, "\n%s [%d, %d]\n", fmt.Sprintf(format, args...), s.Rows, s.Cols)
	e.matrix(s.At(b), e.wt.labels(), columns)
}

// plain reports whether query = key = value = x.
func (e explanation) plain() bool {
	for _, p := range e.wt.projections {
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

// weighted prints, query by query, the contribution of each key to the output.
func (e explanation) weighted(b int) {
	tokens := e.wt.labels()
	w, v := e.shown.weights.At(b), e.st.v.At(b)
	all := weighted(w, v)
	format := formatOf(all)
	fmt.Fprintf(e, "\nWeighted values = weight · value of each key [%d, %d] for each of %d queries\n", v.Rows, v.Cols, w.Rows)
	for query := range w.Rows {
		fmt.Fprintf(e, "  query %s\n", tokens[query])
		part := make([]float32, 0, v.Rows*v.Cols)
		for key := range v.Rows {
			at := (key*w.Rows + query) * v.Cols
			part = append(part, all[at:at+v.Cols]...)
		}
		e.formatted(matrix.Matrix{Rows: v.Rows, Cols: v.Cols, Data: part}, tokens, nil, "    ", format)
	}
}

// matrix prints m in a format of its own.
func (e explanation) matrix(m matrix.Matrix, rows, columns []string) {
	e.formatted(m, rows, columns, "  ", formatOf(m.Data))
}

// printFindings prints the fields that were checked.
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
	buf.WriteString("The tolerance is half a unit of the last printed digit (the 7th significant one if the file sets no digits),\n" +
		"plus the uncertainty of printed inputs and of the last bits of float32. Whole numbers must agree exactly.\n")
	_, err := w.Write(buf.Bytes())
	return err
}

func decimalsText(n int) string {
	if n == 1 {
		return "1 decimal"
	}
	return fmt.Sprintf("%d decimals", n)
}

// formatted prints m in columns aligned to the right, with optional names of the
// rows and columns.
func (e explanation) formatted(m matrix.Matrix, rows, columns []string, indent string, format func(float32) string) {
	cells := make([][]string, m.Rows)
	width := make([]int, m.Cols)
	for i := range cells {
		cells[i] = make([]string, m.Cols)
		for j, x := range m.Row(i) {
			cells[i][j] = format(x)
			width[j] = max(width[j], len(cells[i][j]))
		}
	}
	for j, name := range columns {
		width[j] = max(width[j], utf8.RuneCountInString(name))
	}
	names := 0
	for _, name := range rows {
		names = max(names, utf8.RuneCountInString(name)+2)
	}
	var line strings.Builder
	put := func(name string, row []string) {
		fmt.Fprintf(&line, "%s%-*s", indent, names, name)
		for j, text := range row {
			fmt.Fprintf(&line, "%*s  ", width[j], text)
		}
		fmt.Fprintln(e, strings.TrimRight(line.String(), " "))
		line.Reset()
	}
	if columns != nil {
		put("", columns)
	}
	for i, row := range cells {
		name := ""
		if rows != nil {
			name = rows[i]
		}
		put(name, row)
	}
}

// formatOf returns one format for all numbers of a matrix: the fewest decimals, up
// to 4, that show them exactly, else 4, else powers of ten when 4 decimals would
// lose most digits of a number.
func formatOf(data []float32) func(float32) string {
	const most = 4
	for decimals := range most + 1 {
		exact := true
		for _, x := range data {
			// float32 has decimal fractions to within a few u.
			near := math.Round(float64(x)*math.Pow10(decimals)) / math.Pow10(decimals)
			exact = exact && math.Abs(float64(x)-near) <= 4*u*math.Abs(float64(x))
		}
		if exact {
			return fixed(decimals)
		}
	}
	for _, x := range data {
		if a := math.Abs(float64(x)); a != 0 && a < 1e-3 || a >= 1e7 {
			return func(x float32) string { return strconv.FormatFloat(float64(x), 'e', most, 32) }
		}
	}
	return fixed(most)
}

func fixed(decimals int) func(float32) string {
	return func(x float32) string {
		if x == 0 {
			x = 0 // no minus sign
		}
		return strconv.FormatFloat(float64(x), 'f', decimals, 32)
	}
}
