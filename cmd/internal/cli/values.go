package cli

import (
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/seed90331342/attn/cmd/internal/flags"
	"github.com/seed90331342/attn/kernels"
)

// Percent is a flag of a percentage: 5%, 2.5.
type Percent float64

// UnmarshalText implements encoding.TextUnmarshaler.
func (p *Percent) UnmarshalText(text []byte) error {
	x, err := strconv.ParseFloat(strings.TrimSuffix(string(text), "%"), 64)
	if err != nil || !(x >= 0 && x <= 1e6) {
		return fmt.Errorf("%q is not a percentage of at least 0, write 5%% or 2.5", text)
	}
	*p = Percent(x)
	return nil
}

// Size is a flag of a number of bytes: 1000000, 512k, 256M, 2G.
type Size int64

// UnmarshalText implements encoding.TextUnmarshaler.
func (n *Size) UnmarshalText(text []byte) error {
	digits, shift := string(text), 0
	for i, unit := range []string{"k", "M", "G"} {
		if d, ok := strings.CutSuffix(digits, unit); ok {
			digits, shift = d, 10*(i+1)
			break
		}
	}
	x, err := strconv.ParseInt(digits, 10, 64)
	if err != nil || x < 1 || x > math.MaxInt64>>shift {
		return fmt.Errorf("%q is not a size, write a number of bytes of at least 1, or 512k, 256M, 2G", text)
	}
	*n = Size(x << shift)
	return nil
}

// Span is a flag of a range LO:HI, either end of which may be missing.
type Span struct{ lo, hi *int }

// UnmarshalText implements encoding.TextUnmarshaler.
func (r *Span) UnmarshalText(text []byte) error {
	lo, hi, ok := strings.Cut(string(text), ":")
	if !ok {
		return fmt.Errorf("%q must be LO:HI, either of which may be missing", text)
	}
	*r = Span{}
	for _, end := range []struct {
		text string
		to   **int
	}{{lo, &r.lo}, {hi, &r.hi}} {
		if end.text == "" {
			continue
		}
		n, err := strconv.Atoi(end.text)
		if err != nil {
			return fmt.Errorf("%q is not a whole number", end.text)
		}
		*end.to = &n
	}
	return nil
}

// Within returns lo and hi, which must select at least one of the numbers 0 to n-1.
func (r Span) Within(n int) (lo, hi int, err error) {
	lo, hi = 0, n
	if r.lo != nil {
		lo = *r.lo
	}
	if r.hi != nil {
		hi = *r.hi
	}
	if lo < 0 || hi > n || lo >= hi {
		return lo, hi, fmt.Errorf("%d:%d is not within 0:%d, or is empty", lo, hi, n)
	}
	return lo, hi, nil
}

// ParseDType returns the type f32, f16 or bf16 of a flag.
func ParseDType(flag, name string) (kernels.DType, error) {
	for _, d := range []kernels.DType{kernels.F32, kernels.F16, kernels.BF16} {
		if d.String() == strings.TrimSpace(name) {
			return d, nil
		}
	}
	return 0, flags.Usagef("%s is %q, it must be f32, f16 or bf16", flag, name)
}
