package main

import (
	"context"
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

// idsFlag is the flag N,N,... or FILE.npy of whole numbers.
type idsFlag struct{ text string }

// Decode implements kong.MapperValue.
func (f *idsFlag) Decode(ctx *kong.DecodeContext) (err error) {
	f.text, err = popText(ctx, "N,N or FILE.npy")
	return err
}

// ids returns a list as one row, or the rows of a file with one or two axes.
func (f *idsFlag) ids(name string) ([][]int32, error) {
	switch {
	case f.text == "":
		return nil, nil
	case strings.HasSuffix(f.text, ".npy"):
		return readInts(name, f.text)
	}
	var row []int32
	for word := range strings.SplitSeq(f.text, ",") {
		n, err := strconv.ParseInt(strings.TrimSpace(word), 10, 32)
		if err != nil {
			return nil, fmt.Errorf("--%s: %q is not a whole number of 32 bits", name, word)
		}
		row = append(row, int32(n))
	}
	return [][]int32{row}, nil
}

// list returns the numbers of a list, or of a file with one axis.
func (f *idsFlag) list(name string) ([]int, error) {
	rows, err := f.ids(name)
	if err != nil || rows == nil {
		return nil, err
	}
	if len(rows) != 1 {
		return nil, fmt.Errorf("--%s %s has %d rows, it must have one axis", name, f.text, len(rows))
	}
	out := make([]int, len(rows[0]))
	for i, x := range rows[0] {
		out[i] = int(x)
	}
	return out, nil
}

// logitsFlag is the flag X,X,... or FILE.npy.
type logitsFlag struct{ text string }

// Decode implements kong.MapperValue.
func (f *logitsFlag) Decode(ctx *kong.DecodeContext) (err error) {
	f.text, err = popText(ctx, "X,X or FILE.npy")
	return err
}

// values returns the numbers, of a file of any shape row by row.
func (f *logitsFlag) values(name string) (logits, error) {
	switch {
	case f.text == "":
		return nil, nil
	case strings.HasSuffix(f.text, ".npy"):
		n, err := openNPY(name, f.text, false)
		if err != nil {
			return nil, err
		}
		data, _, err := n.float32s(context.Background()) // a few numbers
		return data, err
	}
	var l logits
	for word := range strings.SplitSeq(f.text, ",") {
		x, err := strconv.ParseFloat(strings.TrimSpace(word), 32)
		if err != nil {
			return nil, fmt.Errorf("--%s: %q is not a number", name, word)
		}
		l = append(l, float32(x))
	}
	return l, nil
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
