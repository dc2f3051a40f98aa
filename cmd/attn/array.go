package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
)

// array is a rectangular nested JSON array of numbers, stored row by row.
type array struct {
	shape    []int
	data     []float64
	decimals []int // how many decimals each number was written with
}

// parseArray reads raw, which field of the file holds; the file is the caller's
// to name in errors.
func parseArray(field string, raw json.RawMessage) (*array, error) {
	a := &array{}
	shape, err := a.parse(field, raw)
	if err != nil {
		return nil, err
	}
	if len(shape) == 0 {
		return nil, fmt.Errorf("%s is a number, it must be an array", field)
	}
	a.shape = shape
	return a, nil
}

// parse appends the numbers in raw to a and returns raw's shape.
func (a *array) parse(at string, raw json.RawMessage) ([]int, error) {
	raw = bytes.TrimSpace(raw)
	if len(raw) == 0 || raw[0] != '[' {
		return nil, a.number(at, string(raw))
	}
	var rows []json.RawMessage
	if err := json.Unmarshal(raw, &rows); err != nil {
		return nil, fmt.Errorf("%s: %w", at, err)
	}
	if len(rows) == 0 {
		return nil, fmt.Errorf("%s is empty, every length must be at least 1", at)
	}
	var first []int
	for i, row := range rows {
		shape, err := a.parse(fmt.Sprintf("%s[%d]", at, i), row)
		if err != nil {
			return nil, err
		}
		if i == 0 {
			first = shape
		}
		if !slices.Equal(shape, first) {
			return nil, fmt.Errorf("%s[%d] has shape %v, %s[0] has %v: the rows must be alike", at, i, shape, at, first)
		}
	}
	return append([]int{len(rows)}, first...), nil
}

func (a *array) number(at, text string) error {
	// A JSON number starts with a digit or a minus sign; ParseFloat alone
	// would take more.
	if text == "" || !strings.ContainsRune("-0123456789", rune(text[0])) {
		return fmt.Errorf("%s is %s, it must be a number", at, text)
	}
	x, err := strconv.ParseFloat(text, 64)
	if err != nil || math.Abs(x) > math.MaxFloat32 {
		return fmt.Errorf("%s is %s, beyond the range of float32", at, text)
	}
	a.data = append(a.data, x)
	a.decimals = append(a.decimals, decimalsOf(text))
	return nil
}

// decimalsOf counts the decimals that a number is written with: 2 for 0.50, 3
// for 1.5e-2, 0 for 15.
func decimalsOf(text string) int {
	mantissa, exponent, _ := strings.Cut(strings.ToLower(text), "e")
	_, frac, _ := strings.Cut(mantissa, ".")
	exp, err := strconv.Atoi(exponent)
	if err != nil {
		exp = 0
	}
	return max(0, len(frac)-exp)
}

// maxDecimals returns the most decimals that a number of a is written with,
// zeros at the end not counted.
func (a *array) maxDecimals() int {
	most := 0
	for i, d := range a.decimals {
		text := strconv.FormatFloat(a.data[i], 'f', -1, 64)
		most = max(most, min(d, decimalsOf(text)))
	}
	return most
}

// float32s returns the numbers in a rounded to float32.
func (a *array) float32s() []float32 {
	out := make([]float32, len(a.data))
	for i, x := range a.data {
		out[i] = float32(x)
	}
	return out
}

// index names element i as the file nests it: [1][0][2].
func (a *array) index(i int) string {
	text := ""
	for axis := len(a.shape) - 1; axis >= 0; axis-- {
		text = fmt.Sprintf("[%d]%s", i%a.shape[axis], text)
		i /= a.shape[axis]
	}
	return text
}
