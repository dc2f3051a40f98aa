package nn_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
	"github.com/seed90331342/attn/kernels/nn"
)

// small is a layer whose weights all have different shapes.
var small = nn.MultiHeadConfig{Model: 6, Memory: 4, Heads: 2, ValueDim: 5, Bias: true}

// fresh returns new weights with biases that are not 0.
func fresh(t *testing.T, seed uint64) nn.MultiHeadWeights {
	t.Helper()
	w := must.Get(small.Initialise(nn.Initialiser{Seed: seed}))(t)
	for i, b := range numbers(t, w)[4:] {
		for j := range b {
			b[j] = float32(100*i + j)
		}
	}
	return w
}

// numbers returns the elements of the weights, nil for those that are absent.
func numbers(t *testing.T, w nn.MultiHeadWeights) (all [][]float32) {
	t.Helper()
	for _, x := range []kernels.Tensor{w.Wq, w.Wk, w.Wv, w.Wo, w.Bq, w.Bk, w.Bv, w.Bo, w.QNorm, w.KNorm, w.Sinks, w.Wg, w.Bg} {
		var data []float32
		if !x.IsZero() {
			data = must.Get(x.Float32s())(t)
		}
		all = append(all, data)
	}
	return all
}

func same(a, b [][]float32) bool {
	return slices.EqualFunc(a, b, func(x, y []float32) bool { return slices.Equal(x, y) })
}

// written returns the file of w.
func written(t *testing.T, w nn.MultiHeadWeights) []byte {
	t.Helper()
	var b bytes.Buffer
	must.Do(t, w.WriteSafetensors(&b))
	return b.Bytes()
}

// TestWeightsRoundTrip writes weights and loads them.
func TestWeightsRoundTrip(t *testing.T) {
	w := fresh(t, 1)
	file := written(t, w)
	got, err := small.LoadSafetensors(bytes.NewReader(file), int64(len(file)), "")
	if err != nil || !same(numbers(t, got), numbers(t, w)) || got.Wv.Shape() != (kernels.Shape{1, 1, 4, 10}) || got.Bv.Shape() != (kernels.Shape{1, 1, 1, 10}) {
		t.Errorf("loaded %v, %v", got, err)
	}
	if n := binary.LittleEndian.Uint64(file); n%8 != 0 {
		t.Errorf("the data starts at byte %d, not at a multiple of 8", 8+n)
	}
	plain := small
	plain.Bias = false
	must.Fail(t, "biases too many", must.Err(plain.LoadSafetensors(bytes.NewReader(file), int64(len(file)), "")), kernels.ErrFile, `loading would ignore ["bk" "bo" "bq" "bv"]: set the field of the config`)
}

// full is a file that has room for n bytes.
type full struct{ n int }

func (f *full) Write(p []byte) (int, error) {
	if f.n -= len(p); f.n < 0 {
		return 0, io.ErrShortWrite
	}
	return len(p), nil
}

// TestWriteRefuses: wrong weights are found before anything is written, and errors of the
// writer are returned.
func TestWriteRefuses(t *testing.T) {
	released, turned, half := fresh(t, 2), fresh(t, 3), fresh(t, 4)
	released.Wo.Release()
	turned.Wv = must.Get(turned.Wv.Swap(kernels.Seq, kernels.Dim))(t)
	half.Bq = must.Get(kernels.AllocHost(kernels.F16, half.Bq.Shape()))(t)
	for _, c := range []struct {
		name string
		w    nn.MultiHeadWeights
		want error
		text string
	}{
		{"released", released, kernels.ErrReleased, "wo"},
		{"strides", turned, kernels.ErrShape, "wv has strides"},
		{"type", half, kernels.ErrDType, "bq: tensor is f16"},
	} {
		var b bytes.Buffer
		if err := c.w.WriteSafetensors(&b); !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.text) || b.Len() > 0 {
			t.Errorf("%s: error is %v after %d bytes, should be %v and contain %q", c.name, err, b.Len(), c.want, c.text)
		}
	}
	w := fresh(t, 1)
	size := len(written(t, w))
	for _, n := range []int{0, 1, size / 2, size - 1} {
		must.Fail(t, fmt.Sprintf("room for %d of %d bytes", n, size), w.WriteSafetensors(&full{n}), io.ErrShortWrite)
	}
	must.Pass(t, fmt.Sprintf("room for all %d bytes", size), w.WriteSafetensors(&full{size}))
}
