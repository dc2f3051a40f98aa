package gpu

import (
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
)

// TestBatchSharesSubmissions checks that 40 short documents take a few submissions, and that
// their progress adds up to the operations of all.
func TestBatchSharesSubmissions(t *testing.T) {
	b := open(t, Options{})
	defer b.Close()
	const documents, each, dim = 40, 20, 32
	s := backend.Shape{1, 1, documents * each, dim}
	data, ids := make([]float32, s.Elements()), make([]int32, documents*each)
	for i := range data {
		data[i] = float32(i%23) / 23
	}
	for i := range ids {
		ids[i] = int32(i / each)
	}
	x, err := kernels.NewDevice(b).FromFloat32(t.Context(), backend.F32, data, s)
	if err != nil {
		t.Fatal(err)
	}
	defer x.Release()
	opt := kernels.Options{QSegments: [][]int32{ids}}
	if err := prepare(t, b, x, x, x, opt).Warmup(t.Context()); err != nil {
		t.Fatal(err)
	}
	plan, err := prepare(t, b, x, x, x, opt).Plan(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	told, done, total := 0, 0.0, 0.0
	ctx := backend.WithTrace(t.Context(), &backend.Trace{Progress: func(d, of float64) { told, done, total = told+1, d, of }})
	r, err := kernels.NewDevice(b).Attention(ctx, x, x, x, opt)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Release()
	if told == 0 || told > documents/8 {
		t.Errorf("%d documents took %d submissions", documents, told)
	}
	if want := float64(plan.FLOPs); done != total || total < want*0.999 || total > want*1.001 {
		t.Errorf("%v of %v operations are done in the end, the plan has %v", done, total, want)
	}
}
