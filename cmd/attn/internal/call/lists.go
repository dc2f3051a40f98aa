package call

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strconv"

	"github.com/alecthomas/kong"

	"github.com/seed90331342/attn/cmd/attn/internal/array"
	"github.com/seed90331342/attn/cmd/internal/cli"
	"github.com/seed90331342/attn/kernels"
)

// IDs is a flag of rows of integers: N,N,... is one row, a file has one or two axes.
type IDs [][]int32

// Decode implements kong.MapperValue.
func (l *IDs) Decode(ctx *kong.DecodeContext) error {
	s, path, err := listOrFile(ctx)
	if err != nil || s == "" {
		return err
	}
	if path {
		*l, err = array.ReadInts("", s)
		return err
	}
	row, err := cli.ParseList(s, "a whole number of 32 bits", func(word string) (int32, error) {
		n, err := strconv.ParseInt(word, 10, 32)
		return int32(n), err
	})
	if err == nil {
		*l = IDs{row}
	}
	return err
}

// Starts is a flag of the first rows of packed sequences: N,N,... or a file of one axis.
type Starts []int

// Decode implements kong.MapperValue.
func (l *Starts) Decode(ctx *kong.DecodeContext) error {
	var rows IDs
	if err := rows.Decode(ctx); err != nil || rows == nil {
		return err
	}
	if len(rows) != 1 {
		return fmt.Errorf("the file has %d rows, it must have one axis", len(rows))
	}
	starts, err := kernels.Make[int](len(rows[0]))
	for i := range starts {
		starts[i] = int(rows[0][i])
	}
	*l = starts
	return err
}

// Logits is a flag of numbers, X,X,... or a file. Some may be -Inf, which is
// text in JSON. The empty list stands for automatic values.
type Logits []float32

// Decode implements kong.MapperValue.
func (l *Logits) Decode(ctx *kong.DecodeContext) error {
	s, path, err := listOrFile(ctx)
	switch {
	case err != nil || s == "":
		return err
	case path:
		f, err := array.Open("", s, false)
		if err == nil {
			*l, err = f.Float32s(context.Background(), func(string, ...any) {}) // a few numbers
		}
		return err
	case s == "auto" && ctx.Value.Name == "alibi":
		*l = Logits{}
		return nil
	}
	list, err := cli.ParseList(s, "a number", parseFloat32)
	if err == nil {
		*l = list
	}
	return err
}

func parseFloat32(s string) (float32, error) {
	x, err := strconv.ParseFloat(s, 32)
	return float32(x), err
}

func (l Logits) auto() bool { return l != nil && len(l) == 0 }

// listOrFile returns the value of a flag; path reports that it names a file.
func listOrFile(ctx *kong.DecodeContext) (s string, path bool, err error) {
	err = ctx.Scan.PopValueInto("list", &s)
	return s, array.Named(s), err
}

// MarshalJSON implements json.Marshaler.
func (l Logits) MarshalJSON() ([]byte, error) {
	out := []byte{'['}
	for i, x := range l {
		if i > 0 {
			out = append(out, ',')
		}
		if y := float64(x); math.IsInf(y, 0) || math.IsNaN(y) {
			out = strconv.AppendQuote(out, strconv.FormatFloat(y, 'g', -1, 32))
		} else {
			out = strconv.AppendFloat(out, y, 'g', -1, 32)
		}
	}
	return append(out, ']'), nil
}

// UnmarshalJSON implements json.Unmarshaler.
func (l *Logits) UnmarshalJSON(text []byte) error {
	var raw []json.RawMessage
	if err := json.Unmarshal(text, &raw); err != nil {
		return err
	}
	if raw != nil && len(raw) == 0 {
		return errors.New("a list of numbers is empty")
	}
	*l = nil
	for _, r := range raw {
		x, err := parseFloat32(string(bytes.Trim(r, `"`)))
		if err != nil {
			return fmt.Errorf("%s is not a number", r)
		}
		*l = append(*l, x)
	}
	return nil
}

// paperSlopes returns the slopes of Press et al. 2022: the geometric sequence that
// starts at 2^(-8/n) for n heads, a power of two. For other n it returns those of
// the next lower power, then every second one of the next higher.
func paperSlopes(n int) Logits {
	power := 1
	for power*2 <= n {
		power *= 2
	}
	var s Logits
	for i := range power {
		s = append(s, float32(math.Exp2(-8*float64(i+1)/float64(power))))
	}
	for i := 0; len(s) < n; i += 2 {
		s = append(s, float32(math.Exp2(-8*float64(i+1)/float64(2*power))))
	}
	return s
}
