package call

import (
	"encoding/json"
	"reflect"
	"testing"

	"github.com/seed90331342/attn/cmd/internal/cli/clitest"
	"github.com/seed90331342/attn/kernels"
)

// FuzzProblem reads arbitrary problems. What was read and written is read again. With files
// that exist the call is prepared.
func FuzzProblem(f *testing.F) {
	for _, text := range []string{
		`{"q":"q.npy","k":"k.npy","v":"v.npy","layout":"bhsd","dtype":"f32","scale":0.5,"visible":{"left":null,"right":0,"offset":0}}`,
		`{"q":"q","k":"k","v":"v","layout":"bshd","dtype":"bf16","softcap":3,"visible":{"left":2,"right":1,"offset":-1,"klen":[1,2]},
			"alibi":[1,"-Inf"],"sinks":[0.5,"NaN"],"prefix":[1],"segments":[[1,1,2,2]],"kv_segments":[[1,2]],"dropout":{"p":0.5,"seed":7}}`,
		`{"q":"q","k":"k","v":"v","past_k":"pk","past_v":"pv","cu_q":[0,2,4],"cu_k":[0,1,4],"mask":"m","bias":"b","relative_bias":"r","block_mask":"bm","block_size":2,
			"rope":{"base":10000,"dim":4,"interleaved":true},"visible":{"align":"bottom-right"},
			"dims":{"batch":1,"heads":2,"kv_heads":2,"seq_q":4,"seq_k":4,"dim":4,"value_dim":4}}`,
	} {
		f.Add([]byte(text))
	}
	x := clitest.WriteFile(f, f.TempDir(), "x.npy", clitest.RawNPY(clitest.Dict("<f4", false, 1, 2, 4, 4), make([]byte, 128)))
	dev, err := kernels.Open("cpu")
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { dev.Close() })
	f.Fuzz(func(t *testing.T, text []byte) {
		var p, again Problem
		if p.decode(text) != nil {
			return
		}
		written, err := json.Marshal(p)
		if err != nil {
			t.Fatal(err)
		}
		if err := again.decode(written); err != nil {
			t.Fatalf("%s is written as %s: %v", text, written, err)
		}
		if rewritten, err := json.Marshal(again); err != nil || !reflect.DeepEqual(written, rewritten) {
			t.Errorf("%s is written as %s and then as %s, %v", text, written, rewritten, err)
		}
		for _, path := range []*string{&p.Q, &p.K, &p.V, &p.PastK, &p.PastV, &p.Mask, &p.Bias, &p.RelativeBias, &p.BlockMask} {
			if *path != "" {
				*path = x
			}
		}
		in, err := p.Open()
		if err != nil {
			return
		}
		if prepared, err := in.Prepare(dev, true, false); err == nil {
			if _, err := prepared.Plan(t.Context()); err != nil {
				t.Errorf("%s: %v", text, err)
			}
		}
	})
}
