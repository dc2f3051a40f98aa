package bench

import (
	"fmt"
	"strconv"
	"strings"
)

// pageTable is a table that sorts.
type pageTable struct {
	Title, About string
	Heads        []pageHead
	Rows         [][]pageCell
}

// pageHead is the head of a column, of words or of figures.
type pageHead struct {
	Name string
	Text bool
}

// pageCell is what a cell shows, and what it sorts by where that is another thing.
type pageCell struct{ Text, Key, Class string }

// pageColumn is a column of measurements.
type pageColumn struct {
	pageHead
	cell func(name string, m *Measurement) pageCell
}

// figureColumn is one of figures.
func figureColumn(head string, of func(m *Measurement) *float64, format func(float64) string) pageColumn {
	return pageColumn{pageHead{Name: head}, func(_ string, m *Measurement) pageCell {
		x := of(m)
		return pageCell{Text: shown(x, format), Key: sortKey(x)}
	}}
}

// pageColumns are the columns of the page's table; those that no case fills are
// left out.
var pageColumns = []pageColumn{
	{pageHead{"what", true}, func(name string, _ *Measurement) pageCell { return pageCell{Text: name, Class: "text"} }},
	{pageHead{Name: "S"}, func(_ string, m *Measurement) pageCell {
		return pageCell{Text: lengthText(float64(m.SeqK)), Key: strconv.Itoa(m.SeqK)}
	}},
	figureColumn("time", func(m *Measurement) *float64 { return m.MedianS }, duration),
	figureColumn("±", (*Measurement).spread, func(x float64) string { return fmt.Sprintf("%.1f%%", x) }),
	figureColumn("kernel", func(m *Measurement) *float64 { return m.KernelS }, duration),
	figureColumn("GFLOP/s", func(m *Measurement) *float64 { return m.GFLOPS }, number3),
	figureColumn("as if full", (*Measurement).asIfFull, number3),
	figureColumn("GB/s", func(m *Measurement) *float64 { return m.GBS }, number3),
	figureColumn("FLOP/byte", func(m *Measurement) *float64 { return positive(m.Intensity) }, number3),
	{pageHead{"bound by", true}, func(_ string, m *Measurement) pageCell { return pageCell{Text: string(m.Bound), Class: "text"} }},
	figureColumn("% of the ceiling", func(m *Measurement) *float64 { return m.PercentOfBound }, func(x float64) string { return fmt.Sprintf("%.1f", x) }),
	figureColumn("vs stages", func(m *Measurement) *float64 { return m.SpeedupVsStages }, func(x float64) string { return number3(x) + "x" }),
	figureColumn("memory", func(m *Measurement) *float64 { return positive(float64(m.Memory.Counted())) }, size),
	figureColumn("of it S²", func(m *Measurement) *float64 { return positive(float64(m.Memory.Square)) }, size),
	figureColumn("host peak", func(m *Measurement) *float64 { return whole(m.Memory.HostPeak) }, size),
	figureColumn("device peak", func(m *Measurement) *float64 { return whole(m.Memory.DevicePeak) }, size),
	figureColumn("compile", func(m *Measurement) *float64 { return m.CompileS }, duration),
	figureColumn("move in", func(m *Measurement) *float64 { return m.MoveS }, duration),
	figureColumn("calls", func(m *Measurement) *float64 { return positive(float64(m.Repetitions)) }, func(x float64) string { return strconv.Itoa(int(x)) }),
	figureColumn("allocs", func(m *Measurement) *float64 { return whole(m.Allocs) }, func(x float64) string { return strconv.Itoa(int(x)) }),
	figureColumn("error", func(m *Measurement) *float64 { return m.MaxError }, func(x float64) string { return scientific(&x) }),
	figureColumn("its bound", func(m *Measurement) *float64 { return m.ErrorBound }, func(x float64) string { return scientific(&x) }),
	{pageHead{"status", true}, func(_ string, m *Measurement) pageCell {
		class := "note"
		if m.Status == Wrong || m.Status == Failed {
			class = "note bad"
		}
		if m.unmeasured() {
			return pageCell{Text: m.Note, Class: class}
		}
		return pageCell{Text: m.status(), Class: class}
	}},
}

// spread is half the interval of the median, in percent of it.
func (m *Measurement) spread() *float64 {
	if m.MedianS == nil || m.LowS == nil || m.HighS == nil {
		return nil
	}
	return figure(50 * (*m.HighS - *m.LowS) / *m.MedianS)
}

// asIfFull is GFLOPSFull where it is another figure than GFLOPS.
func (m *Measurement) asIfFull() *float64 {
	if m.FLOPsFull == m.FLOPs {
		return nil
	}
	return m.GFLOPSFull
}

func whole(n *int64) *float64 {
	if n == nil {
		return nil
	}
	return figure(float64(*n))
}

// pageTables returns the report's tables: cases, growth, ceilings.
func (r *Report) pageTables() []pageTable {
	var all []pageTable
	if len(r.Cases) > 0 {
		all = append(all, r.casesTable())
	}
	if len(r.Growth) > 0 {
		t := pageTable{Title: "Growth", About: "Time and memory as S to these powers, fitted in logarithms over the longer half of the lengths.",
			Heads: []pageHead{{"what", true}, {"from S", false}, {"to S", false}, {"lengths", false}, {"time ~ S^", false}, {"memory ~ S^", false}}}
		for _, g := range r.Growth {
			t.Rows = append(t.Rows, []pageCell{{Text: r.growthName(g), Class: "text"},
				{Text: lengthText(float64(g.From)), Key: strconv.Itoa(g.From)}, {Text: lengthText(float64(g.To)), Key: strconv.Itoa(g.To)},
				{Text: strconv.Itoa(g.Lengths)}, {Text: fmt.Sprintf("%.2f", g.Time)}, {Text: fmt.Sprintf("%.2f", g.Memory)}})
		}
		all = append(all, t)
	}
	if len(r.Ceilings) > 0 {
		t := pageTable{Title: "Ceilings", About: "What each reaches at most, whatever it computes: the best of a few measurements.",
			Heads: []pageHead{{"what", true}, {"threads", false}, {"FMA GFLOP/s", false}, {"memory GB/s", false}, {"cache GB/s", false}, {"launch", false}, {"others", true}}}
		for _, c := range r.Ceilings {
			others := ""
			for _, o := range c.Others {
				others = strings.Join(notEmpty(others, fmt.Sprintf("%s %s GB/s", o.Name, number3(o.GBS))), ", ")
			}
			t.Rows = append(t.Rows, []pageCell{{Text: c.Contender, Class: "text"}, {Text: strconv.Itoa(c.Threads)},
				{Text: shown(c.GFLOPS, number3), Key: sortKey(c.GFLOPS)}, {Text: shown(c.MemoryGBS, number3), Key: sortKey(c.MemoryGBS)},
				{Text: shown(c.CacheGBS, number3), Key: sortKey(c.CacheGBS)}, {Text: shown(c.LaunchS, duration), Key: sortKey(c.LaunchS)},
				{Text: others, Class: "text"}})
		}
		all = append(all, t)
	}
	return all
}

// growthName is the name of the line that the growth is of.
func (r *Report) growthName(g Growth) string {
	for _, l := range r.lines() {
		m := l.cases[0]
		if m.Backend == g.Backend && m.Contender == g.Contender && m.Series == g.Series && m.Variant == g.Variant && m.Threads == g.Threads {
			return l.name
		}
	}
	return strings.Join(notEmpty(g.Backend, g.Contender, g.Series, g.Variant), " · ")
}

// casesTable is the table of the cases, in the order of the report.
func (r *Report) casesTable() pageTable {
	names := map[*Measurement]string{}
	for _, l := range r.lines() {
		for _, m := range l.cases {
			names[m] = l.name
		}
	}
	t := pageTable{Title: "Figures"}
	for _, column := range pageColumns {
		var cells []pageCell
		filled := false
		for i := range r.Cases {
			c := column.cell(names[&r.Cases[i]], &r.Cases[i])
			filled = filled || c.Text != "" && c.Text != "-"
			cells = append(cells, c)
		}
		if !filled {
			continue
		}
		t.Heads = append(t.Heads, column.pageHead)
		for i, c := range cells {
			if i == len(t.Rows) {
				t.Rows = append(t.Rows, nil)
			}
			t.Rows[i] = append(t.Rows[i], c)
		}
	}
	return t
}

// figureLegend says what the columns are.
var figureLegend = [][2]string{
	{"time", "median of the repetitions of one call, inputs and outputs in the backend's memory; ± is half the interval that holds it with 95% chance"},
	{"kernel", "what the device computes of it, by its own clock, in calls beside the repetitions"},
	{"GFLOP/s", "2·(D+Dv) operations for each visible pair of query and key; softmax is not counted. As if full counts hidden pairs too, which no one computes"},
	{"GB/s", "each operand and output once, less the keys and values that no row sees"},
	{"ceiling", "that which binds, measured between the repetitions on all the backend's threads: fma, float32 fused multiply-adds in registers; read, these operands from the cache that they fit or from memory; launch, a call that does nothing"},
	{"vs stages", "how many times as long the same call takes as QKᵀ, softmax and PV with all weights in memory"},
	{"memory", "operands and scratch as counted, with the part that grows as S²; host peak is by how much the process grew, device peak the most that a device of its own held"},
	{"error", "of the checked rows against float64, at the element nearest to its bound; what is over it is WRONG and gets no figure"},
}
