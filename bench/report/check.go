package report

import (
	"fmt"
	"reflect"
	"regexp"
	"slices"
	"strings"

	"github.com/seed90331342/attn/bench/plain"
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

// measuredTime matches the times that are divided by.
var measuredTime = regexp.MustCompile(`(times_s|pace_s)\[|(predicted|rounds\[\d+\]\.stages)_s$`)

// check returns ErrFile for values with which a reader of the report would crash or be
// misled. Figures that follow from others are not among them: they are derived again.
func (r *Report) check() error {
	damaged := func(path string, must string) error {
		return refusal(fmt.Sprintf("the report is damaged: %s must %s", path, must))
	}
	if path, must := outside(reflect.ValueOf(r).Elem(), ""); must != "" {
		return damaged(path, must)
	}
	for i := range r.Cases {
		m := &r.Cases[i]
		if field, must := m.check(&r.Environment); must != "" {
			return damaged(fmt.Sprintf("cases[%d].%s (%.40s S=%d)", i, field, plain.Text(m.Backend), m.SeqK), must)
		}
	}
	return nil
}

// outside finds the first number of v that no run can have. It returns the path of that number in
// the JSON, such as "rounds[2].times_s[0]", and its valid values, or "" when all numbers are valid.
func outside(v reflect.Value, path string) (at, must string) {
	switch v = reflect.Indirect(v); v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			inner := path
			if f := v.Type().Field(i); !f.Anonymous {
				name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
				inner = strings.TrimPrefix(path+"."+name, ".")
			}
			if at, must := outside(v.Field(i), inner); must != "" {
				return at, must
			}
		}
	case reflect.Slice:
		for i := range v.Len() {
			if at, must := outside(v.Index(i), fmt.Sprintf("%s[%d]", path, i)); must != "" {
				return at, must
			}
		}
	case reflect.Int, reflect.Int64, reflect.Float64:
		x, _ := of(v.Interface())
		least, most := 0.0, maxFigure
		if measuredTime.MatchString(path) {
			least = minSeconds
		} else if v.CanInt() && !strings.Contains(path, "limits[") {
			most = maxCount
		}
		if x < least || x > most {
			return path, fmt.Sprintf("be %g to %g", least, most)
		}
	}
	return "", ""
}

// check returns the first field of m that breaks a rule, and the rule; "" for none.
func (m *Measurement) check(e *Environment) (field, must string) {
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
		{"dtype", m.DType == DTypes[m.DType].String(), "be f32, f16 or bf16"},
		{"cache", m.Cache == "" || Caches[m.Cache] != kernels.F32, "be q8, q4 or f8, or be left out"},
		{"backend", slices.ContainsFunc(e.Backends, func(b kernels.Info) bool { return m.on(&b) }), "be in environment.backends, with these threads"},
		{"status", slices.Contains([]Status{OK, Wrong, Failed, NotRun, Predicted}, m.Status), "be one of ok, wrong, failed, not run, predicted"},
		{"status", (m.Status == OK) == (len(m.Rounds) > 0), `be "ok" exactly if there are rounds`},
		{"plan", m.Status != OK || m.Plan != nil, "be a plan, as the case is ok"},
		{"rounds", !slices.ContainsFunc(m.Rounds, func(r Round) bool { return len(r.TimesS) == 0 || len(r.PaceS) > 0 && len(r.PaceS) != len(r.TimesS) }),
			"have times_s, and as many pace_s or none"},
	} {
		if !rule.holds {
			return rule.field, rule.must
		}
	}
	return "", ""
}
