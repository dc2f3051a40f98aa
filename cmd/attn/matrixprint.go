package main

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"unicode/utf8"
)

// formatted prints m, aligned to the right in columns of one width, with names
// of the rows and of the columns where they are given.
func (e explanation) formatted(m matrix, rows, columns []string, indent string, format func(float32) string) {
	cells := make([][]string, m.rows)
	width := make([]int, m.cols)
	for i := range cells {
		cells[i] = make([]string, m.cols)
		for j, x := range m.row(i) {
			cells[i][j] = format(x)
			width[j] = max(width[j], len(cells[i][j]))
		}
	}
	for j, name := range columns {
		width[j] = max(width[j], utf8.RuneCountInString(name))
	}
	names := 0
	for _, name := range rows {
		names = max(names, utf8.RuneCountInString(name)+2)
	}
	var line strings.Builder
	put := func(text string, width int) {
		line.WriteString(strings.Repeat(" ", max(0, width-utf8.RuneCountInString(text))))
		line.WriteString(text)
	}
	end := func() {
		fmt.Fprintln(e, strings.TrimRight(line.String(), " "))
		line.Reset()
	}
	if columns != nil {
		line.WriteString(indent + strings.Repeat(" ", names))
		for j, name := range columns {
			put(name, width[j])
			line.WriteString("  ")
		}
		end()
	}
	for i, row := range cells {
		line.WriteString(indent)
		if rows != nil {
			line.WriteString(rows[i] + strings.Repeat(" ", names-utf8.RuneCountInString(rows[i])))
		}
		for j, text := range row {
			put(text, width[j])
			line.WriteString("  ")
		}
		end()
	}
}

// formatOf chooses one format for all numbers of a matrix: as few decimals, up
// to 4, as show them exactly; 4 where none does; powers of ten when a number
// would then lose most of its digits.
func formatOf(data []float32) func(float32) string {
	const most = 4
	for decimals := range most + 1 {
		exact := true
		for _, x := range data {
			// A decimal fraction in float32 is within a few u of itself.
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
		if x == 0 {
			x = 0 // no minus sign
		}
		return strconv.FormatFloat(float64(x), 'f', decimals, 32)
	}
}
