package backendtest

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
)

// testPacked packs sequences of many lengths; each has the bits of a call alone, with every
// option that packed sequences take.
func testPacked(t *testing.T, dev *kernels.Device) {
	const heads, kvHeads, dim, valueDim = 4, 2, 16, 24
	// One has no rows, one has no keys, some have one row.
	cuQ, cuK := []int{0, 1, 40, 40, 73, 74, 230}, []int{0, 33, 72, 80, 80, 81, 237}
	n := len(cuQ) - 1
	pack := func(o operand) backend.Tensor { // [1, total, H, D] in memory
		f := put(t, dev, o, BSHD)
		t.Cleanup(f.release)
		return f.view
	}
	sides := Case{Dims: dims(1, heads, kvHeads, 230, 237, dim, valueDim), Seed: 77}
	for _, dtype := range []backend.DType{backend.F32, backend.BF16} {
		sides.DType = dtype
		b := sides.build()
		q, k, v := pack(b.q), pack(b.k), pack(b.v)
		for _, c := range []struct {
			name string
			opt  kernels.Options
		}{
			{"plain", kernels.Options{}},
			{"causal, lower right, klen", kernels.Options{Causal: true, Align: kernels.LowerRight, KLen: []int{33, 20, 8, 0, 1, 100}}},
			{"window, offset, softcap", kernels.Options{Window: &kernels.Window{Left: 20, Right: 3}, Offset: []int{2}, Softcap: 5}},
			{"causal, offsets, klen", kernels.Options{Causal: true, Offset: []int{3, -4, 0, 50, 1, 9}, KLen: []int{33, 20, 8, 0, 1, 100}}},
			{"causal, prefix of each", kernels.Options{Causal: true, Prefix: []int{3, 20, 0, 0, 1, 90}}},
			{"causal, one prefix", kernels.Options{Causal: true, Prefix: []int{30}}},
			{"alibi of heads", kernels.Options{ALiBi: slopes(heads)}},
			{"alibi of sequences and heads, causal", kernels.Options{Causal: true, ALiBi: slopes(n * heads)}},
			{"sinks", kernels.Options{Sinks: []float32{1, -3, 20, float32(math.Inf(-1))}}},
			{"dropout", kernels.Options{Dropout: backend.Dropout{P: 0.4, Seed: 9, First: [4]int{2, 0, 0, 0}}}},
		} {
			if dtype != backend.F32 && c.opt.Prefix == nil {
				continue
			}
			t.Run(fmt.Sprintf("%v %s", dtype, c.name), func(t *testing.T) {
				needs(t, dev, Case{Options: c.opt})
				c.opt.LSE = true
				c.opt.CuQ, c.opt.CuK = cuQ, cuK
				call := prepare(t, dev, q, k, v, c.opt)
				r := must(call.Run(t.Context()))(t)
				defer r.Release()
				if st := r.O.Strides(); st[backend.Seq] != heads*valueDim || st[backend.Heads] != valueDim {
					t.Errorf("o has strides %v, it is not packed", st)
				}
				var pairs int64
				for s := range n {
					pairs += alone(t, dev, r, q, k, v, s, c.opt)
				}
				report, err := call.Check(t.Context(), r, kernels.CheckOptions{Rows: 60})
				if err != nil || !report.OK() || report.Rows != 60 {
					t.Errorf("check: %+v, %v", report, err)
				}
				wrong := c.opt
				wrong.Scale = new(0.9)
				if report, err := prepare(t, dev, q, k, v, wrong).Check(t.Context(), r, kernels.CheckOptions{Rows: 60}); err != nil || report.OK() {
					t.Errorf("check of another scale: %+v, %v", report, err)
				}
				if err := call.Warmup(t.Context()); err != nil {
					t.Errorf("warmup: %v", err)
				}
				p, err := call.Plan(t.Context())
				if err != nil || p.Pairs != pairs || p.FLOPs != pairs*2*(dim+valueDim) || p.Why == "" {
					t.Errorf("plan has %d pairs, %d are visible: %+v, %v", p.Pairs, pairs, p, err)
				}
			})
		}
	}
}

// alone compares sequence s of r with a call for it alone, and returns its visible pairs.
func alone(t *testing.T, dev *kernels.Device, r kernels.Result, q, k, v backend.Tensor, s int, opt kernels.Options) int64 {
	t.Helper()
	cuQ, cuK := opt.CuQ, opt.CuK
	opt.CuQ, opt.CuK = nil, nil
	part := func(x backend.Tensor, cu []int) backend.Tensor {
		y := must(x.Slice(backend.Seq, cu[s], cu[s+1]))(t)
		return y
	}
	rows, keys := cuQ[s+1]-cuQ[s], cuK[s+1]-cuK[s]
	if rows == 0 {
		return 0
	}
	o, lse := read(t, dev, part(r.O, cuQ)), read(t, dev, part(r.LSE, cuQ))
	if keys == 0 {
		for h := range lse {
			want := math.Inf(-1)
			if opt.Sinks != nil {
				want = float64(opt.Sinks[h/rows])
			}
			if float64(lse[h]) != want && !(math.Abs(float64(lse[h])-want) <= 1e-5) {
				t.Errorf("sequence %d has no keys, lse[%d] is %v, should be %v", s, h, lse[h], want)
			}
		}
		if slices.ContainsFunc(o, func(x float32) bool { return x != 0 }) {
			t.Errorf("sequence %d has no keys, o is %v", s, o)
		}
		return 0
	}
	heads := q.Shape()[backend.Heads]
	opt.Dropout.First[backend.Batch] += s
	if opt.KLen != nil {
		opt.KLen = []int{opt.KLen[s]}
	}
	if opt.Offset != nil {
		opt.Offset = []int{forBatch(opt.Offset, s)}
	}
	if opt.Prefix != nil {
		opt.Prefix = []int{min(forBatch(opt.Prefix, s), keys)}
	}
	if len(opt.ALiBi) > heads {
		opt.ALiBi = opt.ALiBi[s*heads : (s+1)*heads]
	}
	own := must(dev.Attention(t.Context(), part(q, cuQ), part(k, cuK), part(v, cuK), opt))(t)
	defer own.Release()
	sameBits(t, answer{o: read(t, dev, own.O), lse: read(t, dev, own.LSE)}, answer{o: o, lse: lse})
	p := must(plan(t.Context(), dev, part(q, cuQ), part(k, cuK), part(v, cuK), opt))(t)
	return p.Pairs
}
