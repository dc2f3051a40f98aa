package explain

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/seed90331342/attn/cmd/internal/matrix"
)

// numbers is a rectangular nested JSON array of numbers, row by row.
type numbers struct {
	shape    []int
	data     []float64
	decimals int // the most of a number in the file
}

// maxAxes bounds the axes of an array. The shape of one with four is refused by name.
const maxAxes = 4

// parseNumbers parses the array in a field of the file.
func parseNumbers(field string, raw json.RawMessage) (*numbers, error) {
	if bytes.Count(raw, []byte(",")) >= maxNumbers {
		return nil, fmt.Errorf("%s has more than %d numbers", field, maxNumbers)
	}
	d := json.NewDecoder(bytes.NewReader(raw))
	d.UseNumber()
	var value any
	if err := d.Decode(&value); err != nil {
		return nil, fmt.Errorf("%s: %w", field, err)
	}
	a := &numbers{}
	var err error
	if a.shape, err = a.append(field, value, maxAxes); err == nil && len(a.shape) == 0 {
		err = fmt.Errorf("%s is a number, it must be an array", field)
	}
	return a, err
}

// append appends the numbers of value, which has at most the given axes, and returns its
// shape. at is its place, for errors.
func (a *numbers) append(at string, value any, axes int) (shape []int, err error) {
	switch value := value.(type) {
	case json.Number:
		x, err := value.Float64()
		if err != nil || math.Abs(x) > math.MaxFloat32 {
			return nil, fmt.Errorf("%s is %.40s, beyond the range of float32", at, value)
		}
		a.data, a.decimals = append(a.data, x), max(a.decimals, decimalsOf(string(value)))
		return nil, nil
	case []any:
		if axes == 0 {
			return nil, fmt.Errorf("%s is an array, it must be a number: arrays have at most %d axes", at, maxAxes)
		}
		if len(value) == 0 {
			return nil, fmt.Errorf("%s is empty, every length must be at least 1", at)
		}
		for i, row := range value {
			s, err := a.append(fmt.Sprintf("%s[%d]", at, i), row, axes-1)
			if err != nil {
				return nil, err
			}
			if i == 0 {
				shape = s
			} else if !slices.Equal(s, shape) {
				return nil, fmt.Errorf("%s[%d] has shape %v, %s[0] has %v: they must be equal", at, i, s, at, shape)
			}
		}
		return append([]int{len(value)}, shape...), nil
	}
	text, _ := json.Marshal(value) // it was JSON
	return nil, fmt.Errorf("%s is %.40s, it must be a number", at, text)
}

// decimalsOf returns the decimals of a number as written: 2 for 0.50, 3 for
// 1.5e-2, 0 for 15.
func decimalsOf(text string) int {
	mantissa, exponent, _ := strings.Cut(strings.ToLower(text), "e")
	_, frac, _ := strings.Cut(mantissa, ".")
	exp, _ := strconv.Atoi(exponent) // 0 without one
	return len(frac) - exp
}

// matrix returns the numbers rounded to float32. A vector is one row.
func (a *numbers) matrix() matrix.Matrix {
	s := append([]int{1, 1}, a.shape...)[len(a.shape)-1:] // the last three axes
	m := matrix.Matrix{Batch: s[0], Rows: s[1], Cols: s[2]}
	for _, x := range a.data {
		m.Data = append(m.Data, float32(x))
	}
	return m
}
