package backendtest

import (
	"cmp"
	"fmt"
	"math"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/backend/oracle"
	"github.com/seed90331342/attn/kernels"
)

// testMerge computes parts of the keys, merges them in different groupings, and compares the
// result with that of all keys.
func testMerge(t *testing.T, dev *kernels.Device) {
	if !implements[backend.Merger](dev) {
		t.Logf("%s merges nothing", dev.Info().Name)
		return
	}
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

// mergeParts computes each part and merges from the left, ((a+b)+c), or from the right,
// (a+(b+c)).
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
