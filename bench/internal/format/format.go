// Package format writes figures for people.
package format

import (
	"fmt"
	"math"
	"strconv"
)

// Count writes a number of things: "1 thread", "2 threads".
func Count(n int, thing string) string {
	if n != 1 {
		thing += "s"
	}
	return fmt.Sprintf("%d %s", n, thing)
}

// Duration writes seconds with three digits: "1.23 ms".
func Duration(seconds float64) string {
	switch {
	case seconds < 999.5e-9:
		return fmt.Sprintf("%.0f ns", seconds*1e9)
	case seconds < 999.5e-6:
		return Number(seconds*1e6) + " µs"
	case seconds < 999.5e-3:
		return Number(seconds*1e3) + " ms"
	default:
		return Number(seconds) + " s"
	}
}

// Size writes bytes in binary units: "4.0 GiB".
func Size(bytes float64) string {
	units := [...]string{"B", "KiB", "MiB", "GiB", "TiB", "PiB"}
	i := 0
	for bytes >= 1024 && i < len(units)-1 {
		bytes /= 1024
		i++
	}
	return fmt.Sprintf("%.1f %s", bytes, units[i])
}

// Number writes x with three digits, or more if its integer part is longer.
func Number(x float64) string {
	decimals := 0
	switch a := math.Abs(x); {
	case a < 9.995:
		decimals = 2
	case a < 99.95:
		decimals = 1
	}
	return strconv.FormatFloat(x, 'f', decimals, 64)
}

// Plain writes x with up to seven digits and no trailing zeros.
func Plain(x float64) string { return strconv.FormatFloat(x, 'g', 7, 64) }

// Length writes a sequence length as the command line accepts it: "4k", "1M".
func Length(n int) string {
	switch {
	case n >= 1<<20 && n%(1<<20) == 0:
		return strconv.Itoa(n>>20) + "M"
	case n >= 1<<10 && n%(1<<10) == 0:
		return strconv.Itoa(n>>10) + "k"
	}
	return strconv.Itoa(n)
}
