package nn

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
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

// FuzzParseConfig reads arbitrary texts: the result is an error, or layers of sizes that belong together.
func FuzzParseConfig(f *testing.F) {
	for _, name := range must.Get(filepath.Glob("testdata/configs/*.json"))(f) { // none on OSS-Fuzz, which has them as a corpus
		f.Add(must.Get(os.ReadFile(name))(f))
	}
	f.Add([]byte(`{"model_type": "gemma4", "text_config": {"hidden_size": 8, "num_hidden_layers": 2, "attention_k_eq_v": true, "text_config": {"model_type": "llama"}}}`))
	f.Add([]byte(`{"model_type": "smollm3", "hidden_size": 64, "num_hidden_layers": 2, "no_rope_layers": [0, 1], "no_rope_layer_interval": -3}`))
	f.Add([]byte(`{"model_type": "kimi_linear", "hidden_size": 64, "num_hidden_layers": 2, "mla_use_nope": true, "linear_attn_config": {"kda_layers": [1], "full_attn_layers": [2], "gate_lower_bound": -5}}`))
	f.Fuzz(func(t *testing.T, content []byte) {
		m, err := ParseConfig(content)
		if err == nil && len(m.Layers) == 0 {
			t.Fatal("there are no layers and no error")
		}
		for i, l := range m.Layers {
			c := l.MultiHead
			if l.Prefix == "" || (l.Linear != nil || l.Latent != nil) != (c.Model == 0) || c.Model > 0 && (c.Heads < 1 || c.KVHeads < 1 || c.Heads%c.KVHeads != 0 || c.HeadDim < 1) {
				t.Fatalf("layer %d is %+v", i, l)
			}
			if c.RoPE != nil && i < 8 {
				must.Do(t, checkConfig(c.DType, c.RoPE, c.HeadDim, 0))
			}
		}
	})
}
