package cli

import (
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/alecthomas/kong"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
)

// The types below are flags whose value may start with a minus sign ("--scale
// -0.5"), which kong would parse as another flag.

// Text is a flag of any text.
type Text string

// Decode implements kong.MapperValue.
func (t *Text) Decode(ctx *kong.DecodeContext) error {
	return decode(ctx, t, func(s string) (Text, error) { return Text(s), nil })
}

// Number is a flag of a floating point number, including NaN and Inf.
type Number float64

// Decode implements kong.MapperValue.
func (n *Number) Decode(ctx *kong.DecodeContext) error {
	return decode(ctx, n, func(s string) (Number, error) {
		x, err := strconv.ParseFloat(s, 64)
		if err != nil {
			return 0, fmt.Errorf("%q is not a number", s)
		}
		return Number(x), nil
	})
}

// Percent is a flag of a percentage: 5%, 2.5.
type Percent float64

// Decode implements kong.MapperValue.
func (p *Percent) Decode(ctx *kong.DecodeContext) error {
	return decode(ctx, p, func(s string) (Percent, error) {
		x, err := strconv.ParseFloat(strings.TrimSuffix(s, "%"), 64)
		if err != nil || !(x >= 0 && x <= 1e6) {
			return 0, fmt.Errorf("%q is not a percentage of at least 0, write 5%% or 2.5", s)
		}
		return Percent(x), nil
	})
}

// Size is a flag of a number of bytes: 1000000, 512k, 256M, 2G.
type Size int64

// Decode implements kong.MapperValue.
func (n *Size) Decode(ctx *kong.DecodeContext) error {
	return decode(ctx, n, func(s string) (Size, error) {
		digits, shift := s, 0
		for i, unit := range []string{"k", "M", "G"} {
			if d, ok := strings.CutSuffix(s, unit); ok {
				digits, shift = d, 10*(i+1)
			}
		}
		x, err := strconv.ParseInt(digits, 10, 64)
		if err != nil || x < 1 || x > math.MaxInt64>>shift {
			return 0, fmt.Errorf("%q is not a size, write a number of bytes of at least 1, or 512k, 256M, 2G", s)
		}
		return Size(x << shift), nil
	})
}

// Ints is a flag of a list of whole numbers: N,N,...
type Ints []int

// Decode implements kong.MapperValue.
func (l *Ints) Decode(ctx *kong.DecodeContext) error {
	return decode(ctx, l, func(s string) (Ints, error) { return ParseList(s, "a whole number", strconv.Atoi) })
}

// ParseList parses words between commas. want describes a word in errors.
func ParseList[T any](s, want string, parse func(word string) (T, error)) (list []T, err error) {
	for word := range strings.SplitSeq(s, ",") {
		x, err := parse(strings.TrimSpace(word))
		if err != nil {
			return nil, fmt.Errorf("%q is not %s", word, want)
		}
		list = append(list, x)
	}
	return list, nil
}

// Window is a flag of a sliding window: L,R, where inf is no limit.
type Window kernels.Window

// Decode implements kong.MapperValue.
func (w *Window) Decode(ctx *kong.DecodeContext) error {
	return decode(ctx, w, func(s string) (w Window, err error) {
		left, right, ok := strings.Cut(s, ",")
		if !ok || strings.Contains(right, ",") {
			return w, fmt.Errorf("%q must be L,R: the keys visible before and after a row's own position", s)
		}
		if w.Left, err = windowSide(left); err == nil {
			w.Right, err = windowSide(right)
		}
		return w, err
	})
}

// String formats w as the flag.
func (w Window) String() string {
	side := func(n int) string {
		if n == kernels.Unbounded {
			return "inf"
		}
		return strconv.Itoa(n)
	}
	return side(w.Left) + "," + side(w.Right)
}

func windowSide(s string) (int, error) {
	s = strings.TrimSpace(s)
	if s == "inf" {
		return kernels.Unbounded, nil
	}
	n, err := strconv.ParseInt(s, 10, 32)
	if err != nil {
		return 0, fmt.Errorf("the side %q is neither a whole number of keys nor inf", s)
	}
	if n < 0 {
		return 0, fmt.Errorf("the side %d is negative, it must be at least 0, or inf for no limit", n)
	}
	return int(n), nil
}

// Span is a flag of a range LO:HI, either end of which may be missing.
type Span struct{ lo, hi *int }

// Decode implements kong.MapperValue.
func (r *Span) Decode(ctx *kong.DecodeContext) error {
	return decode(ctx, r, func(s string) (r Span, err error) {
		lo, hi, ok := strings.Cut(s, ":")
		if !ok {
			return r, fmt.Errorf("%q must be LO:HI, either of which may be missing", s)
		}
		if r.lo, err = spanEnd(lo); err == nil {
			r.hi, err = spanEnd(hi)
		}
		return r, err
	})
}

func spanEnd(s string) (*int, error) {
	if s == "" {
		return nil, nil
	}
	n, err := strconv.Atoi(s)
	if err != nil {
		return nil, fmt.Errorf("%q is not a whole number", s)
	}
	return &n, nil
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

// decode sets to from the next argument, which may start with a minus sign
// unless it is clearly another flag.
func decode[T any](ctx *kong.DecodeContext, to *T, parse func(s string) (T, error)) error {
	token := ctx.Scan.Pop()
	if token.IsEOL() {
		return fmt.Errorf("missing value")
	}
	s := token.String()
	if strings.HasPrefix(s, "--") {
		return fmt.Errorf("missing value before %s", s)
	}
	x, err := parse(s)
	if err == nil {
		*to = x
	}
	return err
}

// ParseDType returns the type f32, f16 or bf16 of a flag.
func ParseDType(flag, name string) (backend.DType, error) {
	for _, d := range []backend.DType{backend.F32, backend.F16, backend.BF16} {
		if d.String() == strings.TrimSpace(name) {
			return d, nil
		}
	}
	return 0, fmt.Errorf("%s is %q, it must be f32, f16 or bf16: %w", flag, name, backend.ErrOption)
}
