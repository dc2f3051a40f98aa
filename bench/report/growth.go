package report

import (
	"cmp"
	"math"
	"slices"

	"gonum.org/v1/gonum/stat"
)

// Growth is how time and memory of a series grow with its length S: as S to the power of
// Time and Memory, by least squares in logarithms.
type Growth struct {
	// Backend to Threads are those of the cases.
	Backend string `json:"backend"`
	Series  string `json:"series"`
	Variant string `json:"variant"`
	Threads int    `json:"threads"`
	// Lengths is the number of lengths fitted, From the shortest To the longest: the
	// longer half of those measured, at least three, because the overhead of a call
	// dominates short ones.
	Lengths int `json:"lengths"`
	From    int `json:"from"`
	To      int `json:"to"`
	// Time and Memory are the exponents, of MedianS and of Memory.Counted.
	Time   float64 `json:"time"`
	Memory float64 `json:"memory"`
}

// of reports whether m belongs to the series that g was fitted to.
func (g *Growth) of(m *Measurement) bool {
	return g.Backend == m.Backend && g.Series == m.Series && g.Variant == m.Variant && g.Threads == m.Threads
}

// minGrowth is the smallest number of lengths that show a power: any two fit a line.
const minGrowth = 3

// FitGrowth sets r.Growth.
func (r *Report) FitGrowth() {
	var keys []Growth
	rows := map[Growth][]*Measurement{}
	for i := range r.Cases {
		m := &r.Cases[i]
		if m.Status != OK {
			continue
		}
		key := Growth{Backend: m.Backend, Series: m.Series, Variant: m.Variant, Threads: m.Threads}
		if rows[key] == nil {
			keys = append(keys, key)
		}
		rows[key] = append(rows[key], m)
	}
	r.Growth = []Growth{}
	for _, key := range keys {
		if key.fit(rows[key]) {
			r.Growth = append(r.Growth, key)
		}
	}
}

// fit fits the longer half of rows. It reports false for too few rows, or for two of one
// length, which differ in something else.
func (g *Growth) fit(rows []*Measurement) bool {
	slices.SortStableFunc(rows, func(a, b *Measurement) int { return cmp.Compare(a.SeqK, b.SeqK) })
	rows = rows[min(len(rows)/2, max(len(rows)-minGrowth, 0)):]
	if len(rows) < minGrowth {
		return false
	}
	var lengths, times, memory []float64
	for i, m := range rows {
		if i > 0 && m.SeqK == rows[i-1].SeqK {
			return false
		}
		lengths = append(lengths, math.Log(float64(m.SeqK)))
		times = append(times, math.Log(*m.MedianS))
		memory = append(memory, math.Log(float64(m.Memory.Counted())))
	}
	g.Lengths, g.From, g.To = len(rows), rows[0].SeqK, rows[len(rows)-1].SeqK
	_, g.Time = stat.LinearRegression(lengths, times, nil, false)
	_, g.Memory = stat.LinearRegression(lengths, memory, nil, false)
	return true
}
