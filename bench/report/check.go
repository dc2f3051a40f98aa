package report

import (
	"bytes"
	"fmt"
	"reflect"
	"regexp"
	"slices"
	"strings"

	"github.com/seed90331342/attn/bench/page"
	"github.com/seed90331342/attn/kernels"
)

// Limits of what a report contains. No machine exceeds them, and within them nothing that is
// computed from a report overflows.
const (
	maxText    = 64 << 20 // of the file, in bytes
	maxObjects = 500_000  // "{" in the file, each at most a case
	maxCount   = 1 << 60
	minSeconds = 1e-15 // of what was measured
	maxFigure  = 1e30
)

// prose matches the fields whose texts may have several lines.
var prose = regexp.MustCompile(`\.(note|why|cut)$|args|missing|variables`)

// measuredTime matches the times that are divided by.
var measuredTime = regexp.MustCompile(`(times_s|pace_s)\[|predicted_s$`)

// checkSize refuses a text that could stand for more than fits into memory.
func checkSize(text []byte) error {
	if len(text) > maxText || bytes.Count(text, []byte("{")) > maxObjects {
		return refusal(fmt.Sprintf("the report is larger than %d MiB, or than %d objects", maxText>>20, maxObjects))
	}
	return nil
}

// check returns ErrOption for values with which a reader of the report would crash or be
// misled. Figures that follow from others are not among them: they are derived again.
func (r *Report) check() (wrong error) {
	refuse := func(path string, must string) {
		if wrong == nil {
			wrong = refusal(fmt.Sprintf("the report is damaged: %s must %s", path, must))
		}
	}
	leaves(reflect.ValueOf(r).Elem(), "", func(path string, leaf reflect.Value) {
		if must := bounds(path, reflect.Indirect(leaf)); must != "" {
			refuse(path, must)
		}
	})
	for i := range r.Cases {
		m := &r.Cases[i]
		if field, must := m.check(&r.Environment); must != "" {
			refuse(fmt.Sprintf("cases[%d].%s (%.40s S=%d)", i, field, m.Backend, m.SeqK), must)
		}
	}
	return wrong
}

// bounds returns what a field must be; "" when it is.
func bounds(path string, leaf reflect.Value) string {
	if !leaf.IsValid() { // null
		return ""
	}
	if leaf.Kind() == reflect.String {
		allowed := ""
		if prose.MatchString(path) {
			allowed = "\n\t"
		}
		if strings.ContainsFunc(leaf.String(), func(c rune) bool { return !page.Safe(c) && !strings.ContainsRune(allowed, c) }) {
			return "have no control or formatting characters"
		}
		return ""
	}
	x, number := of(leaf.Interface())
	least, most := 0.0, maxFigure
	switch {
	case !number:
		return ""
	case measuredTime.MatchString(path):
		least = minSeconds
	case leaf.CanInt() && !strings.Contains(path, "limits["):
		most = maxCount
	}
	if x < least || x > most {
		return fmt.Sprintf("be %g to %g", least, most)
	}
	return ""
}

// check returns the first field of m that breaks a rule, and the rule; "" for none.
func (m *Measurement) check(e *Environment) (field, must string) {
	ok := m.Status == OK
	size := 32.0 // more than the operations, and than the bytes, of all pairs
	for _, n := range []int{m.Batch, m.Heads, m.SeqQ, m.SeqK, m.Dim} {
		size *= float64(n)
	}
	for _, rule := range []struct {
		field string
		holds bool
		must  string
	}{
		{"batch, heads, kv_heads, seq_q, seq_k, dim", min(m.Batch, m.Heads, m.KVHeads, m.SeqQ, m.SeqK, m.Dim) >= 1 && m.KVHeads <= m.Heads,
			"be at least 1, and kv_heads at most heads"},
		{"batch, heads, seq_q, seq_k, dim", size <= maxCount, "have a product that can be counted"},
		{"variant", slices.Contains(Variants, m.Variant), "be one of " + strings.Join(Variants, ", ")},
		{"dtype", elementSize[m.DType] > 0, "be f32, f16 or bf16"},
		{"backend", slices.ContainsFunc(e.Backends, func(b kernels.Info) bool { return m.on(&b) }), "be in environment.backends, with these threads"},
		{"status", slices.Contains([]Status{OK, Wrong, Failed, NotRun, Predicted}, m.Status), "be one of ok, wrong, failed, not run, predicted"},
		{"status", ok == (len(m.Rounds) > 0), `be "ok" exactly if there are rounds`},
		{"predicted_s", m.Status != Predicted || m.PredictedS != nil, "be a figure, as the case is predicted"},
		{"plan", !ok || m.Plan != nil, "be a plan, as the case is ok"},
		{"max_error", !ok || m.MaxError != nil && m.ErrorBound != nil && *m.MaxError <= *m.ErrorBound, "be a figure up to error_bound, as the case is ok"},
		{"rounds", !slices.ContainsFunc(m.Rounds, func(r Round) bool { return len(r.TimesS) == 0 || len(r.PaceS) > 0 && len(r.PaceS) != len(r.TimesS) }),
			"have times_s, and as many pace_s or none"},
	} {
		if !rule.holds {
			return rule.field, rule.must
		}
	}
	return "", ""
}
