package call

import (
	"context"
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/seed90331342/attn/cmd/attn/internal/array"
	"github.com/seed90331342/attn/cmd/internal/flags"
	"github.com/seed90331342/attn/kernels"
)

// Ints is a flag of rows of integers: N,N,... is one row, a file has one or two axes.
type Ints struct {
	File string // if they were read from one
	Rows [][]int32
}

// UnmarshalText implements encoding.TextUnmarshaler.
func (l *Ints) UnmarshalText(text []byte) (err error) {
	if *l = (Ints{}); array.Named(string(text)) {
		l.File = string(text)
		l.Rows, err = array.ReadInts("", l.File)
		return flags.OfFile(err)
	}
	row, err := parseList(string(text), "a whole number of 32 bits", func(word string) (int32, error) {
		n, err := strconv.ParseInt(word, 10, 32)
		return int32(n), err
	})
	if row != nil {
		l.Rows = [][]int32{row}
	}
	return err
}

// starts returns the only row: the first rows of packed sequences.
func (l *Ints) starts(flag string) ([]int, error) {
	if l.Rows == nil {
		return nil, nil
	}
	if len(l.Rows) != 1 {
		return nil, fmt.Errorf("--%s: the file has %d rows, it must have one axis", flag, len(l.Rows))
	}
	starts, err := kernels.Make[int](len(l.Rows[0]))
	for i := range starts {
		starts[i] = int(l.Rows[0][i])
	}
	return starts, err
}

// Floats is a flag of numbers, X,X,... or a file. Some may be -Inf.
type Floats struct {
	File   string // if they were read from one
	Auto   bool   // the word auto, without values
	Values []float32
}

// UnmarshalText implements encoding.TextUnmarshaler.
func (l *Floats) UnmarshalText(text []byte) error {
	s := string(text)
	*l = Floats{Auto: s == "auto"}
	if array.Named(s) {
		l.File = s
		f, err := array.Open("", s, false)
		if err == nil {
			l.Values, err = f.Float32s(context.Background(), func(string, ...any) {}) // a few numbers
		}
		return flags.OfFile(err)
	}
	if l.Auto {
		return nil
	}
	var err error
	l.Values, err = parseList(s, "a number", func(word string) (float32, error) {
		x, err := strconv.ParseFloat(word, 32)
		return float32(x), err
	})
	return err
}

// parseList parses words between commas; none in the empty text. want describes a word in errors.
func parseList[T any](s, want string, parse func(word string) (T, error)) (list []T, err error) {
	if s == "" {
		return nil, nil
	}
	for word := range strings.SplitSeq(s, ",") {
		x, err := parse(strings.TrimSpace(word))
		if err != nil {
			return nil, fmt.Errorf("%q is not %s", word, want)
		}
		list = append(list, x)
	}
	return list, nil
}

// paperSlopes returns the slopes of Press et al. 2022: the geometric sequence that starts at 2^(-8/n) for n heads, a
// power of two. For other n it returns those of the next lower power, then every second one of the next higher.
func paperSlopes(n int) (s []float32) {
	power := 1
	for power*2 <= n {
		power *= 2
	}
	for i := range power {
		s = append(s, float32(math.Exp2(-8*float64(i+1)/float64(power))))
	}
	for i := 0; len(s) < n; i += 2 {
		s = append(s, float32(math.Exp2(-8*float64(i+1)/float64(2*power))))
	}
	return s
}
