package report

import (
	"bytes"
	"fmt"
	"math"
	"reflect"
	"regexp"
	"slices"
	"strings"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/backend/budget"
	"github.com/seed90331342/attn/bench/plain"
)

// What a report may contain. Figures within these bounds, which no machine exceeds, cannot
// overflow in what is computed from them.
const (
	maxText    = 64 << 20 // of the file, in bytes
	maxWord    = 1000     // characters of a text, except those of prose
	maxProse   = 100_000
	maxRows    = 10_000  // of a list; a case takes 40 µs to check, and 3 bytes of the file
	maxLength  = 1 << 30 // of the dimensions of a call
	maxCount   = 1 << 60
	minSeconds = 1e-15
	maxSeconds = 1e12
	maxFigure  = 1e30
)

// prose matches the fields whose texts may be long.
var prose = regexp.MustCompile(`\.(note|why|cut)$|args|missing|variables`)

// times matches the fields whose figures may not be 0.
var times = regexp.MustCompile(`rounds.*\]\.|median_s$|predicted_s$`)

// checkSize returns ErrMemory for a text that would take more memory than there is: "{}" is a
// whole case.
func checkSize(text []byte) error {
	if len(text) > maxText {
		return refusal(fmt.Sprintf("the report is larger than %d MiB", maxText>>20))
	}
	objects := int64(bytes.Count(text, []byte("{")))
	return budget.Check(2 * (objects*int64(reflect.TypeFor[Measurement]().Size()) + 16*int64(len(text))))
}

// check derives figures again from those that were measured: it fills in those that are null or
// 0, and returns ErrOption for others, as for values that no run can have.
func (r *Report) check() error {
	if n := max(len(r.Cases), len(r.Ceilings), len(r.Growth)); n > maxRows {
		return r.refuse("the longest of cases, ceilings and growth", n, fmt.Sprintf("have at most %d rows", maxRows))
	}
	var wrong error
	leaves(reflect.ValueOf(r).Elem(), "", func(path string, leaf reflect.Value) {
		if must := bounds(path, leaf); must != "" && wrong == nil {
			wrong = r.refuse(path, leaf.Interface(), must)
		}
	})
	for i := range r.Cases {
		if m := &r.Cases[i]; wrong == nil {
			if field, value, must := m.check(&r.Environment); must != "" {
				wrong = r.refuse(fmt.Sprintf("cases[%d].%s", i, field), value, must)
			}
		}
	}
	if wrong != nil {
		return wrong
	}
	growth := r.Growth
	if r.FitGrowth(); len(growth) > 0 && len(growth) != len(r.Growth) {
		return r.refuse("growth", len(growth), fmt.Sprintf("have %d rows, as the cases follow", len(r.Growth)))
	}
	for i := range growth {
		if field, value, must := differing(&growth[i], &r.Growth[i]); must != "" {
			return r.refuse(fmt.Sprintf("growth[%d].%s", i, field), value, must)
		}
	}
	return nil
}

// refuse names a field by its path and, of a case, the case.
func (r *Report) refuse(path string, value any, must string) error {
	of, index := "", 0
	if n, _ := fmt.Sscanf(path, "cases[%d]", &index); n == 1 {
		of = fmt.Sprintf(" (%.40s %.100s)", r.Cases[index].who(), r.Cases[index].name())
	}
	return refusal(fmt.Sprintf("the report is damaged: %s%s is %s, it must %s", path, of, quote(value), must))
}

// quote writes a value of a field.
func quote(value any) string {
	v := reflect.Indirect(reflect.ValueOf(value))
	switch v.Kind() {
	case reflect.Invalid:
		return "null"
	case reflect.String:
		return fmt.Sprintf("%.60q", v.String())
	}
	return fmt.Sprint(v.Interface())
}

// bounds returns what a field must be; "" when it is.
func bounds(path string, leaf reflect.Value) string {
	if leaf = reflect.Indirect(leaf); !leaf.IsValid() {
		return ""
	}
	if leaf.Kind() == reflect.String {
		limit, breaks := maxWord, ""
		if prose.MatchString(path) {
			limit, breaks = maxProse, "\n\t"
		}
		switch text := leaf.String(); {
		case len(text) > limit:
			return fmt.Sprintf("have at most %d bytes", limit)
		case strings.ContainsFunc(text, func(c rune) bool { return !plain.Safe(c) && !strings.ContainsRune(breaks, c) }):
			return "have no control or formatting characters"
		}
		return ""
	}
	x, ok := of(leaf.Interface())
	least, most := 0.0, float64(maxFigure)
	switch {
	case !ok || strings.HasPrefix(path, "growth["): // derived again
		return ""
	case leaf.CanInt() && !strings.Contains(path, "limits["):
		most = maxCount
	case strings.HasSuffix(path, "_s") || strings.Contains(path, "_s["):
		most = maxSeconds
		if times.MatchString(path) {
			least = minSeconds
		}
	case times.MatchString(path):
		least = 1 / maxFigure
	}
	if x >= least && x <= most {
		return ""
	}
	return fmt.Sprintf("be %g to %g", least, most)
}

// check derives the figures of m. It returns the field that is not as it must be, for a
// reason; "" for none.
func (m *Measurement) check(e *Environment) (field string, value any, must string) {
	device := slices.IndexFunc(e.Backends, func(b backend.Info) bool { return m.on(&b) })
	dims := []int{m.Batch, m.Heads, m.KVHeads, m.SeqQ, m.SeqK, m.Dim}
	size := 32.0 // more than the operations, and than the bytes, of all pairs
	for _, n := range []int{m.Batch, m.Heads, m.SeqQ, m.SeqK, m.Dim} {
		size *= float64(n)
	}
	measured := m.Status == OK
	for _, rule := range []struct {
		field string
		value any
		ok    bool
		must  string
	}{
		{"batch, heads, kv_heads, seq_q, seq_k, dim", dims, slices.Min(dims) >= 1 && slices.Max(dims) <= maxLength, fmt.Sprintf("be 1 to %d", maxLength)},
		{"batch, heads, kv_heads, seq_q, seq_k, dim", dims, size <= maxCount, "have a product that can be counted"},
		{"kv_heads", m.KVHeads, m.KVHeads > 0 && m.Heads%m.KVHeads == 0, "divide heads"},
		{"variant", m.Variant, slices.Contains(Variants, m.Variant), "be one of " + strings.Join(Variants, ", ")},
		{"dtype", m.DType, elementSize[m.DType] > 0, "be f32, f16 or bf16"},
		{"mask", m.Mask, m.Mask == "" || m.Mask == backend.F32.String(), `be f32, or "" for none`},
		{"backend", m.Backend, device >= 0, "be in environment.backends, with these threads"},
		{"status", m.Status, slices.Contains([]Status{OK, Wrong, Failed, NotRun, Predicted}, m.Status), "be one of ok, wrong, failed, not run, predicted"},
		{"status", m.Status, measured == (len(m.Rounds) > 0), `be "ok" exactly if there are rounds`},
		{"predicted_s", m.PredictedS, m.Status != Predicted || m.PredictedS != nil, "be a figure, as the case is predicted"},
		{"max_error", m.MaxError, !measured || m.MaxError != nil && m.ErrorBound != nil && *m.MaxError <= *m.ErrorBound, "be a figure up to error_bound, as the case is ok"},
		{"plan", nil, !measured || m.Plan != nil, "be a plan, as the case is ok"},
		{"others_percent", m.OthersPercent, m.OthersPercent == nil || *m.OthersPercent <= 100, "be 0 to 100"},
	} {
		if !rule.ok {
			return rule.field, rule.value, rule.must
		}
	}
	for i, round := range m.Rounds {
		if n := len(round.TimesS); n == 0 || len(round.PaceS) != 0 && len(round.PaceS) != n {
			return fmt.Sprintf("rounds[%d].times_s", i), n, "have a figure at least, and as many as pace_s unless that is empty"
		}
	}
	read := *m
	m.Derive(e.Backends[device].Type)
	if p := m.Plan; p != nil { // as far as it does not depend on the backend
		was := *p
		m.Plan = new(was)
		m.Plan.Backend, m.Plan.Pairs, m.Plan.FLOPs = m.Backend, m.Pairs, 4*int64(m.Dim)*m.Pairs // the whole call's, of a stage too
		if m.Variant == Backward {
			m.Plan.FLOPs = m.FLOPs
		}
		if field, value, must = differing(p, m.Plan); must != "" {
			return "plan." + field, value, must
		}
	}
	want := *m
	read.Plan, read.Rounds, want.Plan, want.Rounds = nil, nil, nil, nil
	return differing(&read, &want)
}

// differing returns the first field of a struct that is neither as in want nor 0 or null.
func differing[T any](got, want *T) (field string, value any, must string) {
	values := map[string]any{}
	leaves(reflect.ValueOf(got).Elem(), "", func(path string, leaf reflect.Value) { values[path] = leaf.Interface() })
	leaves(reflect.ValueOf(want).Elem(), "", func(path string, leaf reflect.Value) {
		was := reflect.ValueOf(values[path])
		if must != "" || !was.IsValid() || was.IsZero() {
			return
		}
		x, ok := of(values[path])
		y, derived := of(leaf.Interface())
		same := ok && derived && math.Abs(x-y) <= 1e-9*math.Abs(y) // other processors round differently
		if !same && quote(values[path]) != quote(leaf.Interface()) {
			field, value, must = path, values[path], "be "+quote(leaf.Interface())+", which follows from other fields"
		}
	})
	return field, value, must
}
