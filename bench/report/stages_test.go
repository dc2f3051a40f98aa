package report

import (
	"math"
	"testing"
)

// The interval of the comparison with the stages is that of the ratios in the rounds, from which load that
// slows both down cancels.
func TestStagesInterval(t *testing.T) {
	m := sample().Cases[0]
	m.Rounds = nil
	for i, ratio := range []float64{2, 2.1, 1.9, 2.2, 1.8, 2.05} {
		call := 1e-3 * float64(1+i) // ever slower
		m.Rounds = append(m.Rounds, Round{TimesS: []float64{call}, StagesS: Figure(call * ratio)})
	}
	m.Derive()
	want := 50 * (2.2 - 1.8) / 2.025 // six values cover the median between the smallest and the largest
	if m.StagesPercent == nil || math.Abs(*m.StagesPercent-want) > 1e-9 {
		t.Errorf("%v, want %v", m.StagesPercent, want)
	}
	m.Rounds = m.Rounds[1:]
	if m.Derive(); m.StagesPercent != nil {
		t.Errorf("five rounds: %v, want none", *m.StagesPercent)
	}
}
