package backendtest

import (
	_ "embed"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/backend/oracle"
	"github.com/seed90331342/attn/kernels"
)

// torchRecord has the gradients of a case that PyTorch's autograd computed in float64.
// TestTorchGradients writes the file with -update-torch.
type torchRecord struct {
	Case      string    // as printed, so that no other case is compared
	Gradients [7][]byte // float64, little endian
}

//go:embed testdata/torch-gradients.json
var torchFile []byte

// torchCases returns the recorded cases: small shapes, each with other options.
func torchCases() (cases []Case) {
	const causal, lower, mask, bias, softcap, klen, window, more = 1, 2, 4, 8, 16, 32, 64, 128
	for n, c := range []struct {
		dims    kernels.Dims
		options int
	}{
		{dims(1, 1, 1, 5, 7, 4, 4), 0},
		{dims(2, 2, 2, 6, 6, 8, 8), causal},
		{dims(1, 2, 1, 4, 9, 8, 8), causal | lower},
		{dims(1, 4, 2, 9, 5, 3, 5), causal | lower},
		{dims(1, 2, 2, 1, 17, 8, 8), 0},
		{dims(2, 2, 1, 1, 12, 6, 4), klen},
		{dims(1, 2, 2, 8, 8, 4, 4), mask},
		{dims(2, 4, 2, 5, 6, 4, 4), mask},
		{dims(1, 2, 2, 7, 9, 5, 5), bias},
		{dims(2, 4, 2, 6, 7, 4, 4), bias},
		{dims(1, 3, 1, 6, 8, 4, 6), bias | causal},
		{dims(2, 2, 2, 5, 8, 4, 4), bias | mask},
		{dims(1, 2, 1, 7, 7, 8, 8), softcap},
		{dims(1, 4, 2, 5, 6, 4, 4), softcap | causal | bias},
		{dims(2, 2, 1, 6, 9, 4, 4), softcap | mask | klen},
		{dims(1, 2, 2, 12, 12, 4, 4), window},
		{dims(1, 2, 1, 10, 14, 4, 4), window | lower | bias},
		{dims(2, 4, 1, 5, 7, 4, 4), klen | causal | mask},
		{dims(1, 2, 2, 6, 8, 4, 4), more},
		{dims(1, 4, 2, 7, 7, 4, 4), more | causal},
		{dims(2, 4, 2, 5, 6, 4, 4), more | bias | mask},
		{dims(1, 2, 1, 9, 11, 5, 3), more | softcap | bias | causal | lower},
		{dims(1, 1, 1, 20, 33, 4, 4), causal},
		{dims(1, 1, 1, 3, 70, 4, 4), softcap | bias},
	} {
		has := func(option int) bool { return c.options&option > 0 }
		x := Case{Name: fmt.Sprintf("PyTorch %d", n), Dims: c.dims, Seed: uint64(3000 + 2*n)}
		o := &x.Options
		o.Causal = has(causal)
		if has(lower) {
			o.Align = kernels.LowerRight
		}
		if has(mask) {
			x.MaskShape, x.HideRows = backend.Shape{x.Batch, 1, x.SeqQ, x.SeqK}, true
		}
		if has(bias) {
			// Alternately shared by the batches, and by the rows too.
			x.BiasShape = backend.Shape{1, x.Heads, 1 + n%2*(x.SeqQ-1), x.SeqK}
		}
		if has(softcap) {
			o.Softcap = 1.5
		}
		if has(klen) {
			for b := range x.Batch {
				o.KLen = append(o.KLen, x.SeqK-3*b)
			}
		}
		if has(window) {
			o.Window = &kernels.Window{Left: 3, Right: 1}
		}
		if has(more) {
			o.ALiBi, o.Sinks = slopes(x.Heads), []float32{0.5, -1, 2, 0}[:x.Heads]
			o.Dropout = backend.Dropout{P: 0.25, Seed: 9}
			x.RelativeShape = backend.Shape{1, x.Heads, 1, x.SeqQ + x.SeqK - 1}
		}
		cases = append(cases, x)
	}
	return cases
}

// testTorchGradients compares gradients with those that PyTorch's autograd computed.
func testTorchGradients(t *testing.T, dev *kernels.Device) {
	var records []torchRecord
	noError(t, json.Unmarshal(torchFile, &records))
	for n, c := range torchCases() {
		if n >= len(records) || records[n].Case != c.String() {
			t.Fatalf("%v is not recorded: run TestTorchGradients with -update-torch", c)
		}
		var torch [7][]float64
		for n, raw := range records[n].Gradients {
			torch[n] = doubles(raw)
		}
		if unsupported(dev, c) != "" {
			continue
		}
		on := c.build().on(t, dev)
		x := on.forward(t)
		sums := x.differentiate(x.do, x.dlse)
		worst := nearby(x.mustBackward(t), torch, sums, func(n int, s *oracle.Sum) float64 { return s.Bound(backend.F32) })
		if err := worst.Err(); err != nil {
			t.Errorf("%v: %v", c, err)
		}
		on.release()
	}
}

// nearby compares gradients with others, except where they are unspecified.
func nearby[T float32 | float64](got [7][]T, want [7][]float64, sums [7][]oracle.Sum, bound func(n int, s *oracle.Sum) float64) (worst oracle.Worst) {
	for n := range sums {
		if len(got[n]) != len(sums[n]) || len(want[n]) != len(sums[n]) {
			worst.See(float64(len(got[n])), float64(len(want[n])), 0, func() string { return "the number of elements of " + gradientNames[n] })
			continue
		}
		for i := range sums[n] {
			if s := &sums[n][i]; !math.IsNaN(s.Value) {
				worst.See(float64(got[n][i]), want[n][i], bound(n, s), func() string { return fmt.Sprintf("%s, element %d", gradientNames[n], i) })
			}
		}
	}
	return worst
}

// doubles decodes float64, little endian.
func doubles(raw []byte) (x []float64) {
	for at := range slices.Chunk(raw, 8) {
		x = append(x, math.Float64frombits(binary.LittleEndian.Uint64(at)))
	}
	return x
}
