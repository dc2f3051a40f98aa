package explain

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/seed90331342/attn/bench/plain"
	"github.com/seed90331342/attn/cmd/internal/files"
)

// walkthrough is a file of attn explain: an input of [S, M] or [B, S, M], the
// projections, the scale, and optional expected values. Missing axes have length 1.
type walkthrough struct {
	path   string
	Title  string   `json:"title"`
	Labels []string `json:"labels"` // of the tokens
	Scale  *float64 `json:"scale"`  // nil: 1/sqrt(D)
	// Softcap c > 0 replaces scaled scores s by c·tanh(s/c).
	Softcap float64 `json:"softcap"`
	Digits  *int    `json:"digits"` // decimals of expected values

	batched           bool // x and all expected values have a batch axis
	batch, seq, model int
	x                 *numbers
	dOutputs          *numbers      // the gradient of the outputs; nil: 1
	projections       [3]projection // query, key, value
	expected          map[string]*numbers
	dim, valueDim     int      // columns of queries and keys, and of values
	unknown           []string // unknown fields
}

// projection is one linear layer: y = x·w + b.
type projection struct {
	name string   // query, key, value
	w    *numbers // [M, N]; nil: y is x
	b    *numbers // [N]; nil: none
}

// columns is the number of outputs.
func (p projection) columns(model int) int {
	if p.w == nil {
		return model
	}
	return p.w.shape[1]
}

// maxNumbers bounds the numbers of a step, about 10 MB of text, and of a field.
const maxNumbers = 1 << 20

// largest returns the numbers of the largest step: the weighted values, of which each query
// has one for each key and column, or the queries. It is a float64, as the products may overflow.
func (wt *walkthrough) largest() float64 {
	rows := float64(wt.batch) * float64(wt.seq)
	return rows * max(float64(wt.seq)*float64(wt.valueDim), float64(wt.dim))
}

// scale returns the factor of the scores.
func (wt *walkthrough) scale() float64 {
	if wt.Scale != nil {
		return *wt.Scale
	}
	return 1 / math.Sqrt(float64(wt.dim))
}

// The fields with expected values, in the order of the steps.
var expectedFields = []string{"queries", "keys", "values", "scores", "softmax", "outputs_exact"}

// roundedFields have expected values of --round, in the order of the steps: weights, [query][key],
// weight times value, [key][query][column], and outputs.
var roundedFields = []string{"softmax_rounded", "weighted_values_rounded", "outputs_rounded"}

// maxDigits bounds the decimals of a number.
const maxDigits = 15

// roundedDecimals returns the decimals of the expected rounded weights, or -1 without any.
func (wt *walkthrough) roundedDecimals() int {
	if a := wt.expected[roundedFields[0]]; a != nil {
		return a.decimals
	}
	return -1
}

// otherFields are further fields of published examples.
var otherFields = []string{
	"title", "note", "documents", "labels", "scale", "softcap", "digits", "module_shown", "weighted_values_layout",
}

// readWalkthrough reads and checks a file.
func readWalkthrough(ctx context.Context, path string) (*walkthrough, error) {
	text, err := files.Read(ctx, path, files.MaxText)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	wt := &walkthrough{path: path}
	if err := wt.parse(text); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return wt, nil
}

func (wt *walkthrough) parse(text []byte) error {
	var raw map[string]json.RawMessage
	if err := files.DecodeJSON(text, &raw); err != nil {
		return err
	}
	if err := files.DecodeJSON(text, wt); err != nil {
		return err
	}
	arrays := map[string]*numbers{}
	for _, field := range slices.Concat([]string{"x", "w_query", "w_key", "w_value", "b_query", "b_key", "b_value", "d_outputs"}, expectedFields, roundedFields) {
		if r, ok := raw[field]; ok {
			a, err := parseNumbers(field, r)
			if err != nil {
				return err
			}
			arrays[field] = a
			delete(raw, field)
		}
	}
	for field := range raw {
		if !slices.Contains(otherFields, field) {
			wt.unknown = append(wt.unknown, field)
		}
	}
	slices.Sort(wt.unknown)
	wt.x = arrays["x"]
	switch {
	case wt.x == nil:
		return errors.New("x is missing: the input, [S, dModel] or [B, S, dModel]")
	case len(wt.x.shape) != 2 && len(wt.x.shape) != 3:
		return fmt.Errorf("x has shape %v, it must be [S, dModel] or [B, S, dModel]", wt.x.shape)
	}
	m := wt.x.matrix()
	wt.batched, wt.batch, wt.seq, wt.model = len(wt.x.shape) == 3, m.Batch, m.Rows, m.Cols
	for i, name := range []string{"query", "key", "value"} {
		p := projection{name, arrays["w_"+name], arrays["b_"+name]}
		if err := wt.checkProjection(p); err != nil {
			return err
		}
		wt.projections[i] = p
	}
	wt.dim, wt.valueDim = wt.projections[0].columns(wt.model), wt.projections[2].columns(wt.model)
	if d := wt.projections[1].columns(wt.model); d != wt.dim {
		return fmt.Errorf("keys have %d columns, queries %d: they must be equal", d, wt.dim)
	}
	if n := wt.largest(); n > maxNumbers {
		return fmt.Errorf("x has %d tokens of %d columns in %d batches, queries have %d columns and values %d: a step would have %.3g numbers, at most %d are printed; give a smaller example, or use attn heatmap",
			wt.seq, wt.model, wt.batch, wt.dim, wt.valueDim, n, maxNumbers)
	}
	if wt.Digits != nil && (*wt.Digits < 0 || *wt.Digits > maxDigits) {
		return fmt.Errorf("digits is %d, it must be 0 to %d", *wt.Digits, maxDigits)
	}
	if err := wt.takeExpected(arrays); err != nil {
		return err
	}
	return wt.checkWords()
}

func (wt *walkthrough) checkProjection(p projection) error {
	switch w := p.w; {
	case w == nil && p.b != nil:
		return fmt.Errorf("b_%s is given without w_%s", p.name, p.name)
	case w == nil:
	case len(w.shape) != 2 || w.shape[0] != wt.model:
		return fmt.Errorf("w_%s has shape %v, x has %d columns: it must be [%d, D]", p.name, w.shape, wt.model, wt.model)
	case p.b != nil && !slices.Equal(p.b.shape, w.shape[1:]):
		return fmt.Errorf("b_%s has shape %v, it must be %v, a number for each column of %s", p.name, p.b.shape, w.shape[1:], p.name)
	}
	return nil
}

// takeExpected checks the shapes of the expected values and of the gradient of the outputs.
func (wt *walkthrough) takeExpected(arrays map[string]*numbers) error {
	wt.dOutputs, wt.expected = arrays["d_outputs"], map[string]*numbers{}
	columns := []int{wt.valueDim, wt.dim, wt.dim, wt.valueDim, wt.seq, wt.seq, wt.valueDim, wt.seq, wt.valueDim, wt.valueDim}
	for i, field := range slices.Concat([]string{"d_outputs"}, expectedFields, roundedFields) {
		a := arrays[field]
		if a == nil {
			continue
		}
		want := []int{wt.batch, wt.seq, columns[i]}
		if field == roundedFields[1] {
			want = slices.Insert(want, 1, wt.seq)
		}
		if !wt.batched {
			want = want[1:]
		}
		if !slices.Equal(a.shape, want) {
			return fmt.Errorf("%s has shape %v, it must be %v", field, a.shape, want)
		}
		wt.expected[field] = a
	}
	return nil
}

// checkWords makes the title and the labels safe to print. Tokens without labels are x1, x2, ...
func (wt *walkthrough) checkWords() error {
	wt.Title = plain.Text(wt.Title)
	if wt.Labels == nil {
		for i := range wt.seq {
			wt.Labels = append(wt.Labels, fmt.Sprintf("x%d", i+1))
		}
	}
	if len(wt.Labels) != wt.seq {
		return fmt.Errorf("labels names %d tokens, x has %d", len(wt.Labels), wt.seq)
	}
	for i, label := range wt.Labels {
		wt.Labels[i] = plain.Label(label)
	}
	return nil
}
