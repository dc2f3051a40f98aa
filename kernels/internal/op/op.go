// Package op has what the operations of package kernels and the packages below it have in common:
// their names in errors, the options that they refuse, and the abilities of a backend that they need.
package op

import (
	"fmt"
	"strings"

	"github.com/seed90331342/attn/backend"
)

// Annotate puts the name of an operation before *err unless that is nil or names the operation
// already, as the errors of backends do ("attention: ..", "cpu: attention: .."). A deferred
// Annotate covers every return of a function.
func Annotate(err *error, operation string) {
	if *err == nil {
		return
	}
	text := (*err).Error()
	_, rest, _ := strings.Cut(text, ": ")
	if !strings.HasPrefix(text, operation+": ") && !strings.HasPrefix(rest, operation+": ") {
		*err = fmt.Errorf("%s: %w", operation, *err)
	}
}

// As wraps err in a sentinel that its text does not repeat, as where it describes a file. It returns
// nil for nil.
func As(sentinel, err error) error {
	if err == nil {
		return nil
	}
	return as{err, sentinel}
}

type as struct {
	error
	sentinel error
}

func (a as) Unwrap() []error { return []error{a.error, a.sentinel} }

// Need returns be with an optional ability, such as a backend.Copier, ErrUnsupported with the
// ability's name, or ErrNoBackend for nil.
func Need[T any](be backend.Backend, ability string) (T, error) {
	able, ok := be.(T)
	switch {
	case be == nil:
		return able, fmt.Errorf("the Device has no backend, make it with Open: %w", backend.ErrNoBackend)
	case !ok:
		return able, fmt.Errorf("%s has no %s: %w", be.Info().Name, ability, backend.ErrUnsupported)
	}
	return able, nil
}

// Lacks returns the error of Need if an ability is wanted.
func Lacks[T any](be backend.Backend, wanted bool, ability string) error {
	if !wanted {
		return nil
	}
	_, err := Need[T](be, ability)
	return err
}

// MaxLength keeps positions within int32 on every device.
const MaxLength = 1 << 30

// The limits of numbers that package backend promises to drivers.
const (
	// MinFactor and MaxFactor bound the magnitudes of Scale and Softcap, unless they are 0. Kernels multiply queries by
	// Scale/Softcap, which stays a normal number between these limits; scores over a larger Softcap would be subnormal,
	// and become 0 on many devices.
	MinFactor, MaxFactor = 0x1p-60, 0x1p60
	// MaxSlope is the largest magnitude of a slope: its product with any distance is below 2^125.
	MaxSlope = 0x1p94
	// MinEpsilon and MaxEpsilon bound the ε of a norm. Squares below 2^-126, which a device may replace by 0, are less than
	// 2^-26 of MinEpsilon. Next to the mean square of a row with elements of 2^48, MaxEpsilon counts for nothing.
	MinEpsilon, MaxEpsilon = 0x1p-100, 1
	// MaxConv is the largest width of a causal convolution.
	MaxConv = 64
)

// CheckLength returns ErrOption for a length of a config that is not least to MaxLength.
func CheckLength(name string, n, least int) error {
	if n < least || n > MaxLength {
		return fmt.Errorf("config: %s is %d, it must be %d to %d: %w", name, n, least, MaxLength, backend.ErrOption)
	}
	return nil
}

// Positions returns, for each of from, the positions of n rows from there on.
func Positions(from []int, n int) (positions [][]int, err error) {
	positions = make([][]int, len(from))
	for b, first := range from {
		if positions[b], err = backend.Make[int](n); err != nil {
			return nil, err
		}
		for i := range positions[b] {
			positions[b][i] = first + i
		}
	}
	return positions, nil
}

// CheckPositions returns an error unless positions is nil or has n for each of batch sequences,
// or n for all.
func CheckPositions(positions [][]int, batch, n int, of string) error {
	if l := len(positions); positions != nil && l != 1 && l != batch {
		return fmt.Errorf("positions has %d lists, it must have 1 or one for each of %d sequences: %w", l, batch, backend.ErrShape)
	}
	for b, list := range positions {
		if len(list) != n {
			return fmt.Errorf("positions[%d] has %d numbers, it must have one for each of the %d rows of %s: %w", b, len(list), n, of, backend.ErrShape)
		}
	}
	return nil
}

// Counts returns count, or n for each of batch sequences when it is nil, in memory.
func Counts(memory, count []int, batch, n int, of string) ([]int, error) {
	memory = memory[:0]
	if count == nil {
		for range batch {
			memory = append(memory, n)
		}
		return memory, nil
	}
	if len(count) != batch {
		return nil, fmt.Errorf("count has %d numbers, it must have one for each of %d sequences: %w", len(count), batch, backend.ErrShape)
	}
	for b, m := range count {
		if m < 0 || m > n {
			return nil, fmt.Errorf("count[%d] is %d, %s has %d rows: it must be 0 to %d: %w", b, m, of, n, n, backend.ErrOption)
		}
	}
	return append(memory, count...), nil
}
