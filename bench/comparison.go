package bench

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// compared reports whether the report is that of [Compare].
func (r *Report) compared() bool {
	return slices.ContainsFunc(r.Cases, func(m Measurement) bool { return m.Contender != "" })
}

// comparison writes the table of a comparison: for each length a row for each
// contender, with the time beside that of the first one.
func (r *Report) comparison(b *strings.Builder) {
	name := len("contender")
	for _, m := range r.Cases {
		name = max(name, utf8.RuneCountInString(m.Contender))
	}
	info := r.Environment.Backends[0]
	fmt.Fprintf(b, "\n%s · %s", info.Name, info.Device)
	if info.Threads > 0 {
		fmt.Fprintf(b, " · %s", count(info.Threads, "thread"))
	}
	b.WriteByte('\n')
	table := slices.Insert(slices.Clone(columns), 1, column{"contender", name})
	vs := slices.IndexFunc(table, func(c column) bool { return c.head == "vs stages" })
	table[vs].head = "vs first"
	heads(b, table)
	var first Measurement
	for i, m := range r.Cases {
		seq := ""
		if i == 0 || m.SeqK != first.SeqK {
			first, seq = m, strconv.Itoa(m.SeqK)
			if i > 0 {
				b.WriteByte('\n')
			}
		}
		if m.unmeasured() {
			fmt.Fprintf(b, "%*s %*s   %s\n", table[0].width, seq, name, m.Contender, m.Note)
			continue
		}
		ratio := "-"
		if m.MedianS != nil && first.MedianS != nil {
			ratio = number3(*m.MedianS / *first.MedianS) + "x"
		}
		cells := append([]string{seq, m.Contender}, m.speed()...)
		line(b, table, append(append(cells, ratio), m.cost()...), m.status())
	}
}
