package explain

import (
	"bytes"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"
	"text/tabwriter"
	"unicode/utf8"

	"github.com/seed90331342/attn/cmd/internal/matrix"
)

// explanation prints the steps into a buffer, which cannot fail.
type explanation struct {
	*bytes.Buffer
	wt      *walkthrough
	st      *steps
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
			fmt.Fprintf(e, "\nw_%s, the weights of the %s projection %v\n", p.name, p.name, strings.ReplaceAll(fmt.Sprint(p.w.shape), " ", ", "))
			e.matrix(p.w.matrix(), nil, nil)
		}
		if p.b != nil {
			fmt.Fprintf(e, "\nb_%s, its bias %v\n", p.name, p.b.shape)
			e.matrix(p.b.matrix(), nil, nil)
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
	tokens := e.wt.Labels
	e.step(b, e.st.x, nil, "Input x")
	if p := e.wt.projections; p[0].w == nil && p[1].w == nil && p[2].w == nil {
		fmt.Fprintf(e, "\nQueries, keys and values are the input: there are no projections\n")
	} else {
		e.step(b, e.st.q, nil, "Queries = %s", p[0].formula())
		e.step(b, e.st.k, nil, "Keys = %s", p[1].formula())
		e.step(b, e.st.v, nil, "Values = %s", p[2].formula())
	}
	e.step(b, e.st.scores, tokens, "Scores = %v · Q·Kᵀ, a row for each query, a column for each key", float32(e.wt.scale()))
	if c := e.wt.Softcap; c > 0 {
		e.step(b, e.st.capped, tokens, "Capped scores = %v · tanh(scores/%v)", c, c)
	}
	e.step(b, e.st.weights, tokens, "Softmax of each row")
	e.result(b)
	if e.st.rounded != nil {
		r := e
		r.st = e.st.rounded
		r.step(b, r.st.weights, tokens, "Softmax, rounded by --round %d so that each row still adds up to 1", r.st.decimals)
		r.result(b)
	}
	if e.grads != nil {
		e.gradients(b)
	}
}

// result prints what follows from the weights of one batch.
func (e explanation) result(b int) {
	e.weighted(b)
	e.step(b, e.st.output, nil, "Output, for each query the sum of its weighted values")
}

// step prints batch b of a step, with a row for each token.
func (e explanation) step(b int, s matrix.Matrix, columns []string, format string, args ...any) {
	fmt.Fprintf(e, "\n%s [%d, %d]\n", fmt.Sprintf(format, args...), s.Rows, s.Cols)
	e.matrix(s.At(b), e.wt.Labels, columns)
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
	w, v := e.st.weights.At(b), e.st.v.At(b)
	all := matrix.Matrix{Rows: v.Rows, Cols: v.Cols} // a batch for each query
	for i, weight := range w.Data {
		for _, x := range v.Row(i % w.Cols) {
			all.Data = append(all.Data, weight*x)
		}
	}
	format := formatOf(all.Data)
	fmt.Fprintf(e, "\nWeighted values = weight · value of each key [%d, %d] for each of %d queries\n", v.Rows, v.Cols, w.Rows)
	for query, token := range e.wt.Labels {
		fmt.Fprintf(e, "  query %s\n", token)
		e.formatted(all.At(query), e.wt.Labels, nil, "  ", format)
	}
}

// matrix prints m in a format of its own.
func (e explanation) matrix(m matrix.Matrix, rows, columns []string) {
	e.formatted(m, rows, columns, "", formatOf(m.Data))
}

// formatted prints m in columns aligned to the right, with optional names of the rows and columns.
func (e explanation) formatted(m matrix.Matrix, rows, columns []string, indent string, format func(float32) string) {
	names := 0
	for _, name := range rows {
		names = max(names, utf8.RuneCountInString(name))
	}
	w := tabwriter.NewWriter(e, 0, 0, 2, ' ', tabwriter.AlignRight)
	if columns != nil {
		fmt.Fprintf(w, "\t%s\t\n", strings.Join(columns, "\t"))
	}
	for i := range m.Rows {
		if rows != nil {
			fmt.Fprintf(w, "%s%-*s\t", indent, names, rows[i])
		}
		for _, x := range m.Row(i) {
			fmt.Fprintf(w, "%s\t", format(x))
		}
		fmt.Fprintln(w)
	}
	w.Flush()
}

// formatOf returns one format for all numbers of a matrix: the fewest decimals, up to 4, that show them exactly, else
// 4, else powers of ten when 4 decimals would lose most digits of a number.
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
		return strconv.FormatFloat(float64(x+0), 'f', decimals, 32) // no minus sign for 0
	}
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
