package kernelstest

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
)

// testCopy copies between all pairs of dtypes and layouts.
func testCopy(t *testing.T, dev *kernels.Device) {
	if !implements[backend.Copier](dev) {
		t.Errorf("%s is no backend.Copier, which caches need", dev.Info().Name)
		return
	}
	c := dev.Backend().(backend.Copier)
	copyOne := func(dst, src backend.Tensor) error {
		return c.Copy(t.Context(), []backend.Tensor{dst}, []backend.Tensor{src})
	}
	rng := rand.New(rand.NewPCG(9, 9))
	shape := backend.Shape{2, 3, 5, 32}
	types := []backend.DType{backend.F32, backend.F16, backend.BF16, backend.Q8}
	if !lacking(dev, "q4") {
		types = append(types, backend.Q4)
	}
	if !lacking(dev, "f8") {
		types = append(types, backend.F8)
	}
	n := 0
	for _, from := range types {
		for _, to := range types {
			n++
			layouts := []Layout{Contiguous, BSHD, Padded, Transposed}
			src := operand{shape, from, make([]float32, shape.Elements())}
			for i := range src.data {
				src.data[i] = from.Round(float32(rng.NormFloat64() * math.Exp2(float64(rng.IntN(12)-6))))
			}
			if from.Quantised() {
				src.quantise()
			}
			t.Run(fmt.Sprintf("%v to %v", from, to), func(t *testing.T) {
				x := put(t, dev, src, layouts[n%4])
				defer x.release()
				y := put(t, dev, filled(0, shape, to), layouts[n/4%4])
				defer y.release()
				noError(t, copyOne(y.view, x.view))
				if to.Quantised() {
					compareQuantised(t, src, read(t, dev, y.view), from, to)
					y.gapsOfQuantised(t, dev)
					return
				}
				for i, got := range y.get(t, dev, "dst") {
					if want := to.Round(src.data[i]); got != want {
						t.Fatalf("element %d is %v, should be %v", i, got, want)
					}
				}
			})
		}
	}
	t.Run("broadcast", func(t *testing.T) {
		row := operand{backend.Shape{1, 1, 5, 32}, backend.F32, make([]float32, 160)}
		for i := range row.data {
			row.data[i] = float32(i)
		}
		x := put(t, dev, row, Contiguous)
		defer x.release()
		wide := must(x.view.Broadcast(shape))(t)
		y := put(t, dev, filled(0, shape, backend.F16), Padded)
		defer y.release()
		noError(t, copyOne(y.view, wide))
		for i, got := range y.get(t, dev, "dst") {
			if got != float32(i%160) {
				t.Fatalf("element %d is %v, should be %v", i, got, i%160)
			}
		}
	})
	t.Run("within a memory", func(t *testing.T) {
		for _, dtype := range types {
			src := operand{backend.Shape{4, 3, 5, 32}, dtype, make([]float32, 4*480)}
			for i := range src.data {
				src.data[i] = float32(i%13 - 6)
			}
			if dtype.Quantised() {
				src.quantise()
			}
			x := put(t, dev, src, Contiguous)
			part := func(lo int) backend.Tensor {
				y, err := x.view.Slice(backend.Batch, lo, lo+1)
				if err == nil {
					y, err = y.Slice(backend.Seq, 1, 4)
				}
				if err != nil {
					t.Fatal(err)
				}
				return y
			}
			if err := copyOne(part(3), part(1)); err != nil {
				t.Fatalf("%v: %v", dtype, err)
			}
			got := read(t, dev, x.view)
			for i, want := range src.data {
				if b, s := i/480, i/32%5; b == 3 && s >= 1 && s < 4 {
					want = src.data[i-2*480]
				}
				if got[i] != want {
					t.Fatalf("%v: element %d is %v, should be %v", dtype, i, got[i], want)
				}
			}
			x.release()
		}
	})
	t.Run("in order", func(t *testing.T) { testCopyInOrder(t, dev, c) })
	t.Run("refused", func(t *testing.T) {
		x := put(t, dev, filled(0, shape, backend.F32), Contiguous)
		y := put(t, dev, filled(0, backend.Shape{2, 3, 5, 8}, backend.F32), Contiguous)
		wantError(t, "another shape", backend.ErrShape, dev.Copy(t.Context(), []backend.Tensor{x.view}, []backend.Tensor{y.view}))
		wantError(t, "onto itself", backend.ErrOverlap, copyOne(x.view, x.view))
		y.release()
		x.release()
		if err := copyOne(x.view, x.view); !errors.Is(err, backend.ErrOverlap) && !errors.Is(err, backend.ErrReleased) {
			t.Errorf("released: %v", err)
		}
	})
}

// testCopyInOrder moves rows of a tensor one by one to the next row, and tests that an invalid copy is refused.
func testCopyInOrder(t *testing.T, dev *kernels.Device, c backend.Copier) {
	shape := backend.Shape{1, 2, 9, 7}
	x := operand{shape, backend.F16, make([]float32, shape.Elements())}
	for i := range x.data {
		x.data[i] = float32(i)
	}
	y := put(t, dev, x, Contiguous)
	defer y.release()
	row := func(i int) backend.Tensor {
		v, err := y.view.Slice(backend.Heads, 0, 1)
		if err == nil {
			v, err = v.Slice(backend.Seq, i, i+1)
		}
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
	var dst, src []backend.Tensor
	for i := range 8 {
		dst, src = append(dst, row(i+1)), append(src, row(i)) // so that all become the first
	}
	noError(t, c.Copy(t.Context(), dst, src))
	for i, got := range y.get(t, dev, "dst") {
		want := x.data[i]
		if i < 9*7 {
			want = x.data[i%7]
		}
		if got != want {
			t.Fatalf("element %d is %v, should be %v", i, got, want)
		}
	}
	wantError(t, "a copy of another shape", backend.ErrShape, dev.Copy(t.Context(), append(dst, y.view), append(src, row(0))))
}

// compareQuantised compares quantised rows with their source: within half a step, and exactly if the
// source had their type. Steps of Q4 are an eighth of a block's maximum, whose negation is off by a whole one; a
// scale that is rounded to 2^-11 of it adds eight times that. Elements of F8 have one right code each.
func compareQuantised(t *testing.T, src operand, got []float32, from, to backend.DType) {
	n, steps := src.shape[3], 254.
	switch to {
	case backend.Q4:
		n, steps = 32, 8/(1+0x1p-8)
	case backend.F8:
		src = operand{src.shape, to, slices.Clone(src.data)}
		src.quantise()
		from = to
	}
	for r := 0; r < len(got); r += n {
		var most float64
		for _, x := range src.data[r : r+n] {
			most = max(most, math.Abs(float64(x)))
		}
		for i, x := range got[r : r+n] {
			off, bound := math.Abs(float64(x)-float64(src.data[r+i])), most/steps*(1+1e-5)
			if from == to {
				bound = 0
			}
			if !(off <= bound) {
				t.Fatalf("element %d is %v, it was %v: off by %v, bound %v", r+i, x, src.data[r+i], off, bound)
			}
		}
	}
}

// gapsOfQuantised fails when bytes outside of the rows have changed.
func (f flat) gapsOfQuantised(t *testing.T, dev *kernels.Device) {
	t.Helper()
	dtype, wide := f.view.DType(), f.view.Shape()
	host := must(backend.AllocHost(dtype, f.all.Shape()))(t)
	noError(t, dev.Download(t.Context(), host, f.all))
	mem := must(host.QuantisedRows())(t)
	wide[3] = dtype.Row(wide[3])
	mine := make([]bool, len(mem))
	for i := range wide.Elements() {
		mine[f.view.Offset()-dtype.Lead()+index(i, wide, f.view.Strides())] = true
	}
	for at, x := range mem {
		if !mine[at] && x != 0xff {
			t.Fatalf("byte %d of the memory is slack, and is now %#x", at, x)
		}
	}
}
