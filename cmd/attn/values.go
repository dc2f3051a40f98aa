package main

import (
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/alecthomas/kong"

	"github.com/seed90331342/attn/kernels"
)

// The types here are flags whose value may start with a minus sign ("--scale
// -0.5"), which kong would take for another flag.

// number is a floating point flag that may be left out, NaN and Inf included:
// whether they are allowed is not for the parser to say.
type number struct {
	set   bool
	value float64
}

// Decode implements kong.MapperValue.
func (n *number) Decode(ctx *kong.DecodeContext) error {
	s, err := popText(ctx, "number")
	if err != nil {
		return err
	}
	x, err := strconv.ParseFloat(s, 64)
	if err != nil {
		return fmt.Errorf("%q is not a number", s)
	}
	*n = number{set: true, value: x}
	return nil
}

// window is the flag L,R, which may be left out.
type window struct {
	set bool
	kernels.Window
}

// Decode implements kong.MapperValue.
func (w *window) Decode(ctx *kong.DecodeContext) error {
	s, err := popText(ctx, "L,R")
	if err != nil {
		return err
	}
	left, right, ok := strings.Cut(s, ",")
	if !ok || strings.Contains(right, ",") {
		return fmt.Errorf("%q is not two sides, it must be L,R: the keys seen before and after a row's own position", s)
	}
	if w.Left, err = side(left); err == nil {
		w.Right, err = side(right)
	}
	w.set = true
	return err
}

func side(s string) (int, error) {
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

// lengths is the flag N,N,...: a number of keys for each batch.
type lengths []int

// Decode implements kong.MapperValue.
func (l *lengths) Decode(ctx *kong.DecodeContext) error {
	s, err := popText(ctx, "N,N")
	if err != nil {
		return err
	}
	*l = nil
	for word := range strings.SplitSeq(s, ",") {
		n, err := strconv.Atoi(strings.TrimSpace(word))
		if err != nil {
			return fmt.Errorf("%q is not a whole number of keys", word)
		}
		*l = append(*l, n)
	}
	return nil
}

// byteCount is a flag of a number of bytes: 1000000, 512k, 256M, 2G.
type byteCount int64

// Decode implements kong.MapperValue.
func (n *byteCount) Decode(ctx *kong.DecodeContext) error {
	s, err := popText(ctx, "SIZE")
	if err != nil {
		return err
	}
	digits, shift := s, 0
	for i, unit := range []string{"k", "M", "G"} {
		if d, ok := strings.CutSuffix(s, unit); ok {
			digits, shift = d, 10*(i+1)
		}
	}
	x, err := strconv.ParseInt(digits, 10, 64)
	if err != nil || x < 1 || x > math.MaxInt64>>shift {
		return fmt.Errorf("%q is no size, write a number of bytes of at least 1, or 512k, 256M, 2G", s)
	}
	*n = byteCount(x << shift)
	return nil
}

// popText takes the next word of the command line as a value, whatever it
// starts with, unless it is plainly another flag.
func popText(ctx *kong.DecodeContext, what string) (string, error) {
	t := ctx.Scan.Pop()
	if t.IsEOL() {
		return "", fmt.Errorf("missing value, expected %s", what)
	}
	s := t.String()
	if strings.HasPrefix(s, "--") {
		return "", fmt.Errorf("missing value before %s, expected %s", s, what)
	}
	return s, nil
}
