package onnx

import (
	"fmt"
	"math"
	"slices"

	"github.com/seed90331342/attn/cmd/attn-onnx/internal/onnxfile"
	"github.com/seed90331342/attn/cmd/internal/matrix"
	"github.com/seed90331342/attn/kernels"
)

// tolerance is the allowed error of a result: f32, and f64, which is computed in float32,
// absolute + 1e-5·|want|, f16 and bf16 one unit in the last place or half, whichever is
// more, and integers and bools none.
type tolerance struct{ absolute, half float64 }

const relative = 1e-5

var (
	// exactly is for tensors with the bits of the expected results.
	exactly = tolerance{absolute: 1e-6}
	// printed is for tensors printed with six decimals, or four for the half types: five
	// units of the last one for f32, as the inputs were rounded, too.
	printed = tolerance{absolute: 5e-6, half: 1e-4}
)

// compare compares a result with the expected one and returns the largest error as a share of the tolerance, 0 to 1.
// Infinities must be equal, and NaN must stand where NaN is expected. For other results it returns an error that names
// the first element that differs.
func (tol tolerance) compare(name string, got, want *onnxfile.Tensor) (float64, error) {
	if got.Type != want.Type {
		return 0, fmt.Errorf("%s is %v, should be %v: %w", name, got.Type, want.Type, kernels.ErrDType)
	}
	if !slices.Equal(got.Shape, want.Shape) {
		return 0, fmt.Errorf("%s has shape %v, should have %v: %w", name, got.Shape, want.Shape, kernels.ErrShape)
	}
	worst, wrong, first := 0.0, 0, -1
	for i := range got.Elements() {
		off := tol.differs(got, want, i)
		worst = max(worst, off)
		if off > 1 {
			wrong++
			if first < 0 {
				first = i
			}
		}
	}
	if wrong == 0 {
		return worst, nil
	}
	return worst, fmt.Errorf("%s%s is %v, should be %v, %.3g times the tolerance; %d of %d elements differ, by up to %.3g times",
		name, matrix.Index(want.Shape, first), got.At(first), want.At(first), tol.differs(got, want, first), wrong, got.Elements(), worst)
}

// differs returns the error of element i as a multiple of the tolerance.
func (tol tolerance) differs(got, want *onnxfile.Tensor, i int) float64 {
	g, w := got.At(i), want.At(i)
	switch {
	case !got.Type.Float():
		if got.Int(i) != want.Int(i) {
			return math.Inf(1)
		}
		return 0
	case g == w || g != g && w != w:
		return 0
	case g != g || w != w || math.IsInf(g, 0) || math.IsInf(w, 0):
		return math.Inf(1)
	case got.Type == onnxfile.Float16 || got.Type == onnxfile.BFloat16:
		units := math.Abs(float64(place(got.Bits(i)) - place(want.Bits(i))))
		if tol.half > 0 {
			return min(units, math.Abs(g-w)/tol.half)
		}
		return units
	}
	return math.Abs(g-w) / (tol.absolute + relative*math.Abs(w))
}

// place numbers the values of a half type in ascending order: neighbours differ by 1, and both zeros are 0.
func place(bits uint16) int {
	if bits&0x8000 != 0 {
		return -int(bits & 0x7fff)
	}
	return int(bits)
}
