package kernelstest

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/backend/oracle"
	"github.com/seed90331342/attn/kernels"
)

// testPacked packs sequences of many lengths; each has the bits of a call alone, with every
// option that packed sequences take.
func testPacked(t *testing.T, dev *kernels.Device) {
	const heads, kvHeads, dim, valueDim = 4, 2, 16, 24
	// One has no rows, one has no keys, some have one row.
	cuQ, cuK := []int{0, 1, 40, 40, 73, 74, 230}, []int{0, 33, 72, 80, 80, 81, 237}
	n := len(cuQ) - 1
	t.Run("pages", func(t *testing.T) { testPackedPages(t, dev) })
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
			{"dropout", kernels.Options{Dropout: kernels.Dropout{P: 0.4, Seed: 9, First: [4]int{2, 0, 0, 0}}}},
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

// testPackedPages packs the rows of sequences whose keys are pages, each at its own lower right.
func testPackedPages(t *testing.T, dev *kernels.Device) {
	needsAll(t, dev, "pages")
	// One has no rows, and one no keys.
	cuQ, klen, table := []int{0, 1, 40, 40, 50, 90}, []int{33, 50, 7, 0, 160}, [][]int32{{4, 1, 11}, {2, 3, 4, 0}, {5}, {}, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9}}
	b := Case{Dims: dims(12, 4, 2, 90, 16, 16, 24), Seed: 78}.build()
	b.q = oneBatch(b.q, 0)
	q, k, v := put(t, dev, b.q, BSHD), put(t, dev, b.k, Contiguous), put(t, dev, b.v, Contiguous)
	for _, f := range []flat{q, k, v} {
		defer f.release()
	}
	opt := kernels.Options{Causal: true, Align: kernels.LowerRight, KLen: klen, LSE: true, CuQ: cuQ, Pages: &kernels.Pages{Table: table, Keys: 160}}
	r := must(dev.Attention(t.Context(), q.view, k.view, v.view, opt))(t)
	defer r.Release()
	for s, n := range klen {
		part := func(x backend.Tensor) backend.Tensor { return must(x.Slice(backend.Seq, cuQ[s], cuQ[s+1]))(t) }
		one := kernels.Options{Causal: true, Align: kernels.LowerRight, LSE: true, Pages: &kernels.Pages{Table: table[s : s+1], Keys: n}}
		own := must(dev.Attention(t.Context(), part(q.view), k.view, v.view, one))(t)
		sameBits(t, answer{o: read(t, dev, own.O), lse: read(t, dev, own.LSE)}, answer{o: read(t, dev, part(r.O)), lse: read(t, dev, part(r.LSE))})
		own.Release()
	}
	p := must(plan(t.Context(), dev, q.view, k.view, v.view, opt))(t)
	if pairs := int64(4 * (33 + 39*50 - 38*39/2 + 40*160 - 39*40/2)); p.Pairs != pairs {
		t.Errorf("plan has %d pairs, %d are visible", p.Pairs, pairs)
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

// testBatch runs calls of many shapes and options together; each has the bits of a call alone.
// Their outputs are interleaved rows of one tensor.
func testBatch(t *testing.T, dev *kernels.Device) {
	needsAll(t, dev, "softcap")
	b := dev.Backend()
	const heads, seq, dim = 4, 400, 16
	shape := backend.Shape{1, heads, seq, dim}
	base := Case{Dims: dims(1, heads, 2, seq, seq, dim, dim), Seed: 5}.build()
	on := base.on(t, dev)
	defer on.release()
	fresh := func() (o, lse backend.Tensor) {
		return up(t, dev, make([]float32, shape.Elements()), shape), up(t, dev, make([]float32, heads*seq), backend.Shape{1, heads, seq, 1})
	}
	alone, aloneLSE := fresh()
	together, togetherLSE := fresh()
	// Long and short, with few rows and many, with one key and none.
	calls := func(o, lse backend.Tensor) (calls []*backend.Call) {
		at := 0
		for n, rows := range []int{1, 130, 3, 70, 2, 64, 1, 33, 90, 6} {
			keys := [][2]int{{0, 400}, {0, 130}, {399, 400}, {30, 100}, {7, 350}, {0, 64}, {12, 13}, {100, 400}, {0, 400}, {50, 90}}[n]
			part := func(x backend.Tensor, lo, hi int) backend.Tensor {
				x = must(x.Slice(backend.Seq, lo, hi))(t)
				return x
			}
			c := &backend.Call{Q: part(on.q.view, at, at+rows), K: part(on.k.view, keys[0], keys[1]), V: part(on.v.view, keys[0], keys[1]),
				O: part(o, at, at+rows), LSE: part(lse, at, at+rows), Problem: backend.Problem{Scale: 0.25, Visible: backend.Everything()}}
			switch n {
			case 1:
				c.Visible.Right = 0
			case 3:
				c.Softcap = 5
			case 5:
				c.Visible.KLen = []int{0}
			case 8:
				c.Visible.Left, c.Visible.Offset = 40, 250
			}
			calls = append(calls, c)
			at += rows
		}
		return calls
	}
	for _, c := range calls(alone, aloneLSE) {
		noError(t, b.Attention(t.Context(), c))
	}
	all := calls(together, togetherLSE)
	for range 3 {
		noError(t, b.Attention(t.Context(), all...))
		sameBits(t, answer{o: read(t, dev, alone), lse: read(t, dev, aloneLSE)}, answer{o: read(t, dev, together), lse: read(t, dev, togetherLSE)})
	}
	if err := b.Attention(t.Context()); err != nil {
		t.Errorf("no calls: %v", err)
	}
	dead, cancel := context.WithCancel(t.Context())
	cancel()
	wantError(t, "cancelled", context.Canceled, b.Attention(dead, all...))
	gone := *all[3]
	gone.Q = up(t, dev, make([]float32, shape.Elements()), shape)
	gone.Q.Release()
	wantError(t, "one with a released operand", backend.ErrReleased, b.Attention(t.Context(), all[0], &gone, all[1]))
}

// testMerge computes parts of the keys, merges them in different groupings, and compares the
// result with that of all keys.
func testMerge(t *testing.T, dev *kernels.Device) {
	if !implements[backend.Merger](dev) {
		t.Logf("%s merges nothing", dev.Info().Name)
		return
	}
	t.Run("rows that see nothing, or a NaN", func(t *testing.T) { testMergeEdges(t, dev) })
	c := Case{Name: "merge", Dims: kernels.Dims{Batch: 2, Heads: 2, KVHeads: 1, SeqQ: 33, SeqK: 120, Dim: 16, ValueDim: 12},
		Options: kernels.Options{Causal: true, Offset: []int{40}}, Seed: 5}
	for _, cuts := range [][]int{{0, 120}, {0, 1, 120}, {0, 119, 120}, {0, 60, 120}, {0, 40, 80, 120}, {0, 90, 100, 120}} {
		for _, rightFirst := range []bool{false, true} {
			t.Run(fmt.Sprintf("cut %v, right first %v", cuts, rightFirst), func(t *testing.T) {
				b := c.build()
				on := b.on(t, dev)
				defer on.release()
				mergeParts(t, on, cuts, rightFirst)
			})
		}
	}
}

// testMergeEdges merges rows of which one side, or both, see no key or a NaN.
func testMergeEdges(t *testing.T, dev *kernels.Device) {
	inf, nan := float32(math.Inf(1)), float32(math.NaN())
	var results [4][]float32 // o, lse, the part's o and lse
	var want answer
	rows := [][4]float32{ // lse, the part's, merged o and lse of 1 and 2
		{-inf, -inf, 1, -inf}, {-inf, inf, 1, -inf}, {inf, -inf, 1, inf}, {inf, inf, 1, inf},
		{3, -inf, 1, 3}, {3, inf, 1, 3}, {-inf, 3, 2, 3}, {inf, 3, 2, 3},
		{nan, 3, nan, nan}, {3, nan, nan, nan}, {inf, nan, 2, nan}, {nan, inf, 1, nan},
		{3, -1e30, 1, 3}, {-1e30, 3, 2, 3},
	}
	for _, row := range rows {
		for n, x := range []float32{1, row[0], 2, row[1]} {
			results[n] = append(results[n], x)
		}
		want.o, want.lse = append(want.o, row[2]), append(want.lse, row[3])
	}
	tensor := func(n int) backend.Tensor { return up(t, dev, results[n], backend.Shape{1, 1, len(rows), 1}) }
	r := kernels.Result{O: tensor(0), LSE: tensor(1)}
	noError(t, dev.Merge(t.Context(), r, kernels.Result{O: tensor(2), LSE: tensor(3)}))
	sameBits(t, want, answer{o: read(t, dev, r.O), lse: read(t, dev, r.LSE)})
}

// mergeParts computes each part and merges from the left, ((a+b)+c), or from the right, (a+(b+c)).
func mergeParts(t *testing.T, on *onDevice, cuts []int, rightFirst bool) {
	t.Helper()
	b, dev := on.built, on.dev
	merges := float64(len(cuts) - 1)
	var parts []kernels.Result
	for i := range len(cuts) - 1 {
		k, v, opt := on.keys(t, cuts[i], cuts[i+1])
		r := must(dev.Attention(t.Context(), on.q.view, k, v, opt))(t)
		defer r.Release()
		parts = append(parts, r)
	}
	merge := func(into, part kernels.Result) {
		noError(t, dev.Merge(t.Context(), into, part))
	}
	total := parts[0]
	if rightFirst {
		for i := len(parts) - 1; i > 0; i-- {
			merge(parts[i-1], parts[i])
		}
	} else {
		for _, p := range parts[1:] {
			merge(total, p)
		}
	}
	o, lse := read(t, dev, total.O), read(t, dev, total.LSE)
	if err := b.compareMerged(answer{o: o, lse: lse}, merges); err != nil {
		t.Error(err)
	}
}

// keys returns the keys, the values and the options of a call over keys [lo, hi).
func (o *onDevice) keys(tb testing.TB, lo, hi int) (k, v backend.Tensor, opt kernels.Options) {
	tb.Helper()
	k, errK := o.k.view.Slice(backend.Seq, lo, hi)
	v, errV := o.v.view.Slice(backend.Seq, lo, hi)
	noError(tb, cmp.Or(errK, errV))
	opt = o.opt
	opt.Offset = moved(opt.Offset, -lo) // keys count from the part's first
	opt.Dropout.First[backend.Dim] += lo
	opt.LSE = true
	return k, v, opt
}

// compareMerged compares an answer with the oracle after a number of merges. The bound: the
// weight of a part, exp(lse_part - lse), has the relative error of the part's lse plus
// 16u + 4u·|lse| for its rounding, the subtraction and the exponential. Each merge adds that
// twice, for numerator and denominator, to the bound of the whole call.
func (b *built) compareMerged(a answer, merges float64) error {
	var worst oracle.Worst
	b.eachRow(func(n, batch, h, i int, ref oracle.Answer) {
		where := func() string { return fmt.Sprintf("row [%d,%d,%d]", batch, h, i) }
		weight := merges * (ref.LSEBound + u*(16+4*math.Abs(ref.LSE)))
		most := 0.0
		for _, x := range b.row(batch, h, i).V {
			most = max(most, math.Abs(float64(x)))
		}
		for d := range ref.O {
			worst.See(float64(a.o[n*b.ValueDim+d]), ref.O[d], ref.OBound[d]+2*weight*most, where)
		}
		if a.lse != nil {
			worst.See(float64(a.lse[n]), ref.LSE, ref.LSEBound+weight, where)
		}
	})
	return worst.Err()
}
