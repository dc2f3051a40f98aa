package onnx

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/seed90331342/attn/cmd/attn-onnx/internal/onnxfile"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// FuzzONNXCase runs arbitrary models and tensors: the result is outputs or an error
// that wraps a sentinel of package backend. The last input stands for missing ones.
func FuzzONNXCase(f *testing.F) {
	dirs, err := filepath.Glob(publishedONNX + "*/test_*") // and the generated ones
	if err != nil || len(dirs) == 0 {
		f.Fatal(len(dirs), err)
	}
	for _, dir := range dirs {
		files := make([][]byte, 5)
		for i, name := range []string{"model.onnx", "test_data_set_0/input_0.pb", "test_data_set_0/input_1.pb", "test_data_set_0/input_2.pb", "test_data_set_0/input_3.pb"} {
			if files[i], err = os.ReadFile(filepath.Join(dir, name)); err != nil && i < 3 {
				f.Fatal(err)
			}
		}
		f.Add(files[0], files[1], files[2], files[3], files[4])
	}
	dev := must.Get(kernels.Open("cpu"))(f)
	f.Cleanup(func() { dev.Close() })
	f.Fuzz(func(t *testing.T, model, a, b, c, d []byte) {
		m, err := onnxfile.DecodeModel(model)
		if err != nil {
			return
		}
		var list []*onnxfile.Tensor
		for _, data := range [][]byte{a, b, c, d} {
			if x, err := onnxfile.DecodeTensor(data); err == nil {
				list = append(list, x)
			}
		}
		n, err := newNode(m)
		if err == nil && len(list) > 0 {
			tensors := map[string]*onnxfile.Tensor{}
			for i, name := range m.Inputs {
				tensors[name] = list[min(i, len(list)-1)]
			}
			_, _, err = n.run(t.Context(), dev, tensors)
		}
		wantKnown(t, err)
	})
}

// wantKnown fails the test for an error that wraps none of the sentinels that a bad case has.
func wantKnown(t *testing.T, err error) {
	t.Helper()
	for _, known := range []error{nil, kernels.ErrShape, kernels.ErrDType, kernels.ErrOption, kernels.ErrUnsupported, kernels.ErrMemory, onnxfile.ErrMalformed, onnxfile.ErrUnsupported} {
		if errors.Is(err, known) {
			return
		}
	}
	t.Errorf("error %v wraps none that a bad case should", err)
}

// FuzzJSONC runs arbitrary files of operator tests: each case has outputs or an error that wraps a sentinel.
func FuzzJSONC(f *testing.F) {
	for _, file := range publishedJSONC(f) {
		text := must.Get(os.ReadFile(file))(f)
		f.Add(text)
	}
	f.Add([]byte(`[{"operator": "GroupQueryAttention", "cases": [{"inputs": [{"data": [1e400, "NaN", true], "dims": [-1], "type": "float16"}]},], /* */ }] //`))
	dev := must.Get(kernels.Open("cpu"))(f)
	f.Cleanup(func() { dev.Close() })
	f.Fuzz(func(t *testing.T, text []byte) {
		tests, err := jsoncTests(bytes.Clone(text)) // a fuzz target must not change its input
		wantKnown(t, err)
		for _, text := range tests {
			var test jsoncTest
			if err := decodeJSONC(text, &test); err != nil {
				wantKnown(t, err)
				continue
			}
			cases, err := elements(test.Cases)
			wantKnown(t, err)
			for _, text := range cases {
				var c jsoncCase
				err := decodeJSONC(text, &c)
				if err == nil {
					var n *node
					var in map[string]*onnxfile.Tensor
					if n, in, _, err = test.node(&c); err == nil {
						_, _, err = n.run(t.Context(), dev, in)
					}
				}
				wantKnown(t, err)
			}
		}
	})
}
