package explain

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"github.com/seed90331342/attn/bench/page"
	"github.com/seed90331342/attn/cmd/internal/files"
)

// walkthrough is a file of attn explain: an input of [S, M] or [B, S, M], the
// projections, the scale, and optional expected values. Missing axes have length 1.
type walkthrough struct {
	path   string
	Title  string   `json:"title"`
	Labels []string `json:"labels"` // one for each token
	Scale  *float64 `json:"scale"`  // nil: 1/sqrt(D)
	// Softcap c > 0 replaces scaled scores s by c·tanh(s/c).
	Softcap float64 `json:"softcap"`
	Digits  *int    `json:"digits"` // decimals of printed scores and softmax

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
	w    *numbers // [M, N]; nil: the identity
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
// has one for each key and column, the queries, or the identity for a missing projection. It
// is a float64, as the products may overflow.
func (wt *walkthrough) largest() float64 {
	rows, model := float64(wt.batch)*float64(wt.seq), float64(wt.model)
	n := rows * max(float64(wt.seq)*float64(wt.valueDim), float64(wt.dim))
	for _, p := range wt.projections {
		if p.w == nil {
			n = max(n, model*model)
		}
	}
	return n
}

// The fields with expected values, in the order of the steps.
var expectedFields = []string{
	"queries", "keys", "values", "scores", "softmax", "softmax_rounded",
	"weighted_values_rounded", "outputs_rounded", "outputs_exact",
}

// dOutputs is the field with the gradient of the outputs.
const dOutputs = "d_outputs"

// wordFields are text.
var wordFields = []string{
	"title", "note", "documents", "labels", "scale", "softcap", "digits", "module_shown", "weighted_values_layout",
}

// readWalkthrough reads and checks a file.
func readWalkthrough(ctx context.Context, path string) (*walkthrough, error) {
	text, err := files.Read(ctx, path, files.MaxText)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	wt := &walkthrough{path: path, expected: map[string]*numbers{}}
	if err := wt.parse(text); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return wt, nil
}

func (wt *walkthrough) parse(text []byte) error {
	var raw map[string]json.RawMessage
	if err := files.DecodeJSON(text, &raw, false); err != nil {
		return err
	}
	if err := files.DecodeJSON(text, wt, false); err != nil {
		return err
	}
	arrays := map[string]*numbers{}
	for _, field := range slices.Concat([]string{"x", "w_query", "w_key", "w_value", "b_query", "b_key", "b_value", dOutputs}, expectedFields) {
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
		if !slices.Contains(wordFields, field) {
			wt.unknown = append(wt.unknown, field)
		}
	}
	slices.Sort(wt.unknown)
	if err := wt.takeInput(arrays["x"]); err != nil {
		return err
	}
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
	for i, label := range wt.Labels {
		wt.Labels[i] = page.Label(label)
	}
	wt.Title = page.Text(wt.Title)
	if wt.Labels != nil && len(wt.Labels) != wt.seq {
		return fmt.Errorf("labels names %d tokens, x has %d", len(wt.Labels), wt.seq)
	}
	if wt.Digits != nil && (*wt.Digits < 0 || *wt.Digits > 15) {
		return fmt.Errorf("digits is %d, it must be 0 to 15", *wt.Digits)
	}
	for _, field := range append([]string{dOutputs}, expectedFields...) {
		if a := arrays[field]; a != nil {
			if want := wt.expectedShape(field); !slices.Equal(a.shape, want) {
				return fmt.Errorf("%s has shape %v, it must be %v", field, a.shape, want)
			}
			wt.expected[field] = a
		}
	}
	wt.dOutputs = wt.expected[dOutputs]
	delete(wt.expected, dOutputs)
	return nil
}

func (wt *walkthrough) takeInput(x *numbers) error {
	if x == nil {
		return errors.New("x is missing: the input, [S, dModel] or [B, S, dModel]")
	}
	wt.x = x
	switch s := x.shape; len(s) {
	case 2:
		wt.batch, wt.seq, wt.model = 1, s[0], s[1]
	case 3:
		wt.batched = true
		wt.batch, wt.seq, wt.model = s[0], s[1], s[2]
	default:
		return fmt.Errorf("x has shape %v, it must be [S, dModel] or [B, S, dModel]", s)
	}
	return nil
}

func (wt *walkthrough) checkProjection(p projection) error {
	if w := p.w; w != nil && (len(w.shape) != 2 || w.shape[0] != wt.model) {
		return fmt.Errorf("w_%s has shape %v, x has %d columns: it must be [%d, D]", p.name, w.shape, wt.model, wt.model)
	}
	if n := p.columns(wt.model); p.b != nil && !slices.Equal(p.b.shape, []int{n}) {
		return fmt.Errorf("b_%s has shape %v, it must be [%d], a number for each column of %s", p.name, p.b.shape, n, p.name)
	}
	return nil
}

// expectedShape returns the required shape of a field with expected values.
func (wt *walkthrough) expectedShape(field string) []int {
	var s []int
	switch field {
	case "queries", "keys":
		s = []int{wt.seq, wt.dim}
	case "scores", "softmax", "softmax_rounded":
		s = []int{wt.seq, wt.seq}
	case "weighted_values_rounded":
		s = []int{wt.seq, wt.seq, wt.valueDim} // [key][query][channel]
	default:
		s = []int{wt.seq, wt.valueDim}
	}
	if wt.batched {
		s = append([]int{wt.batch}, s...)
	}
	return s
}

// labels returns the names of the tokens.
func (wt *walkthrough) labels() []string {
	if wt.Labels != nil {
		return wt.Labels
	}
	names := make([]string, wt.seq)
	for i := range names {
		names[i] = fmt.Sprintf("x%d", i+1)
	}
	return names
}
