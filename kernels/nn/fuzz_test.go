package nn

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"testing"

	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// FuzzSafetensors loads layers from arbitrary files: the result is an error, or weights of the
// config. It stands in the package itself, as the compiler of OSS-Fuzz wants it.
func FuzzSafetensors(f *testing.F) {
	c := MultiHeadConfig{Model: 2, Bias: true}
	file := func(header string, data int) []byte {
		return append(append(binary.LittleEndian.AppendUint64(nil, uint64(len(header))), header...), make([]byte, data)...)
	}
	f.Add(file(`{"in_proj_weight":{"dtype":"F16","shape":[6,2],"data_offsets":[0,24]},"out_proj.weight":{"dtype":"F16","shape":[2,2],"data_offsets":[24,32]},`+
		`"out_proj.bias":{"dtype":"BF16","shape":[2],"data_offsets":[32,36]}}`, 36))
	f.Add(file(`{"wq":{"dtype":"F16","shape":[2,2],"data_offsets":[0,8]},"wk":{"dtype":"F16","shape":[2,2],"data_offsets":[8,16]},`+
		`"wv":{"dtype":"F16","shape":[2,2],"data_offsets":[16,24]},"wo":{"dtype":"F16","shape":[2,2],"data_offsets":[24,32]},`+
		`"bq":{"dtype":"F64","shape":[2],"data_offsets":[32,48]}}`, 48))
	f.Fuzz(func(t *testing.T, content []byte) {
		w, err := c.LoadSafetensors(bytes.NewReader(content), int64(len(content)), "")
		if err != nil {
			return
		}
		var again bytes.Buffer
		must.Do(t, w.WriteSafetensors(&again))
		must.Get(c.LoadSafetensors(bytes.NewReader(again.Bytes()), int64(again.Len()), ""))(t)
		if w.Wq.Shape() != (kernels.Shape{1, 1, 2, 2}) || w.Bo.Shape() != (kernels.Shape{1, 1, 1, 2}) {
			t.Fatal(fmt.Sprint(w))
		}
	})
}
