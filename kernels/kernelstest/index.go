package kernelstest

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/backend/oracle"
	"github.com/seed90331342/attn/kernels"
)

// indexCase is a call of Device.Index.
type indexCase struct {
	name                        string
	batch, heads, seqQ, seqK, d int
	n                           int
	q, k, w                     backend.DType
	layout                      Layout
	opt                         kernels.Options
	fill                        func(i int, x float32) float32 // of weight i; nil draws them
	few                         int                            // unless 0, only so many keys differ
}

// indexCases have rows of less than a block of keys and of several, and see more and fewer keys than they choose.
func indexCases() []indexCase {
	f32, f16, bf16 := backend.F32, backend.F16, backend.BF16
	lower := kernels.Options{Causal: true, Align: kernels.LowerRight}
	ragged := lower
	ragged.KLen, ragged.Offset = []int{300, 0, 171}, []int{0, -300, -129}
	return []indexCase{
		{"one head", 1, 1, 3, 40, 16, 7, f32, f32, f32, Contiguous, kernels.Options{}, nil, 0},
		{"several blocks of keys, causal", 1, 4, 70, 700, 64, 100, f32, f32, f32, Contiguous, lower, nil, 0},
		{"as V3.2, causal", 1, 64, 9, 300, 128, 64, bf16, bf16, f32, BSHD, lower, nil, 0},
		{"ragged lengths, causal", 3, 3, 5, 300, 32, 50, f32, f32, f32, Padded, ragged, nil, 0},
		{"a window", 2, 2, 40, 500, 20, 30, f32, f32, f32, Swapped, kernels.Options{Window: &kernels.Window{Left: 90, Right: 10}, Align: kernels.LowerRight}, nil, 0},
		{"fewer keys than chosen", 2, 5, 11, 33, 24, 100, f16, f16, f16, Padded, lower, nil, 0},
		{"as many keys as chosen", 1, 2, 4, 33, 8, 33, f32, f32, f32, Contiguous, kernels.Options{}, nil, 0},
		{"one key of many", 1, 2, 6, 1300, 8, 1, f32, f32, f32, Contiguous, kernels.Options{}, nil, 0},
		{"one row", 2, 8, 1, 900, 64, 256, bf16, f16, bf16, Contiguous, kernels.Options{KLen: []int{900, 413}}, nil, 0},
		{"odd sizes of f16", 1, 3, 4, 261, 37, 19, f16, f16, bf16, Transposed, lower, nil, 0},
		{"negative weights", 1, 4, 6, 400, 16, 40, f32, f32, f32, Contiguous, lower, func(_ int, x float32) float32 { return -max(x, -x) }, 0},
		{"weights of 0: all scores are equal", 1, 4, 5, 400, 16, 40, f32, f32, f32, Contiguous, lower, func(int, float32) float32 { return 0 }, 0},
		{"equal keys", 1, 4, 5, 400, 16, 40, f32, f32, f32, Contiguous, kernels.Options{}, nil, 3},
		{"no keys", 2, 2, 3, 0, 8, 4, f32, f32, f32, Contiguous, kernels.Options{}, nil, 0},
		{"no rows", 2, 2, 0, 30, 8, 4, f32, f32, f32, Contiguous, kernels.Options{}, nil, 0},
	}
}

// drawnIndex is a case with its operands.
type drawnIndex struct {
	indexCase
	q, k, w operand
}

func (c indexCase) draw(seed uint64) drawnIndex {
	rng := rand.New(rand.NewPCG(seed, 0x696e646578))
	type shape = backend.Shape
	x := drawnIndex{c, drawn(rng, shape{c.batch, c.heads, c.seqQ, c.d}, c.q), drawn(rng, shape{c.batch, 1, c.seqK, c.d}, c.k), drawn(rng, shape{c.batch, 1, c.seqQ, c.heads}, c.w)}
	for i, y := range x.w.data {
		if c.fill != nil {
			x.w.data[i] = c.fill(i, y)
		}
	}
	for i := c.few * c.d; c.few > 0 && i < len(x.k.data); i++ {
		x.k.data[i] = x.k.data[i-c.few*c.d]
	}
	return x
}

// visible returns the rule by which rows see keys. The cases have lower right alignment or no diagonal.
func (c indexCase) visible(b, i int) (lo, hi int) {
	lo, hi = 0, c.seqK
	if c.opt.KLen != nil {
		hi = c.opt.KLen[b]
	}
	at := i + c.seqK - c.seqQ
	if c.opt.Offset != nil {
		at += c.opt.Offset[b]
	}
	if c.opt.Causal {
		hi = min(hi, at+1)
	}
	if w := c.opt.Window; w != nil {
		lo, hi = max(lo, at-w.Left), min(hi, at+w.Right+1)
	}
	return lo, max(lo, hi)
}

// row returns the operands of a row.
func (x *drawnIndex) row(b, i int) (q, k, w []float32) {
	for h := range x.heads {
		q = append(q, x.q.data[((b*x.heads+h)*x.seqQ+i)*x.d:][:x.d]...)
	}
	return q, x.k.data[b*x.seqK*x.d:][:x.seqK*x.d], x.w.data[(b*x.seqQ+i)*x.heads:][:x.heads]
}

// check compares lists with the scores in float64, see oracle.IndexScores.
func (x *drawnIndex) check(lists *kernels.KeyIndices) error {
	most := min(x.n, x.seqK)
	if lists.TopK != most || lists.Rows > 1 || len(lists.Indices) != x.batch*x.seqQ*most {
		return fmt.Errorf("%d indices, TopK %d, Rows %d", len(lists.Indices), lists.TopK, lists.Rows)
	}
	for n := range x.batch * x.seqQ {
		b, i := n/x.seqQ, n%x.seqQ
		lo, hi := x.visible(b, i)
		list := lists.Indices[n*most:][:most]
		chosen := min(most, hi-lo)
		for at, key := range list {
			switch {
			case at >= chosen && key != -1:
				return fmt.Errorf("row %d of batch %d sees %d keys, number %d of its list is %d", i, b, hi-lo, at, key)
			case at < chosen && (int(key) < lo || int(key) >= hi || at > 0 && key <= list[at-1]):
				return fmt.Errorf("row %d of batch %d sees keys %d to %d, its list is %d", i, b, lo, hi, list)
			}
		}
		if chosen == 0 {
			continue
		}
		scores := oracle.IndexScores(x.row(b, i))
		values, bound := make([]float64, 0, hi-lo), 0.0
		for _, e := range scores[lo:hi] {
			values, bound = append(values, e.Value), max(bound, e.Err)
		}
		slices.Sort(values)
		least := values[len(values)-chosen]
		for _, key := range list[:chosen] {
			if e := scores[key]; e.Value < least-e.Err-bound {
				return fmt.Errorf("row %d of batch %d: key %d with score %v is chosen, number %d is %v, the bound %.3g", i, b, key, e.Value, chosen, least, e.Err+bound)
			}
		}
	}
	return nil
}

// testIndex compares index scores with float64.
func testIndex(t *testing.T, dev *kernels.Device) {
	if !implements[backend.Indexer](dev) {
		t.Logf("%s has no index scores", dev.Info().Name)
		return
	}
	for i, c := range indexCases() {
		t.Run(c.name, func(t *testing.T) {
			x := c.draw(uint64(i))
			var in [3]flat
			for n, o := range []operand{x.q, x.k, x.w} {
				in[n] = put(t, dev, o, c.layout)
				defer in[n].release()
			}
			call := func() *kernels.KeyIndices {
				return onHost(t, dev, must(dev.Index(t.Context(), in[0].view, in[1].view, in[2].view, c.n, c.opt))(t))
			}
			lists := call()
			if err := x.check(lists); err != nil {
				t.Error(err)
			}
			if again := call(); !slices.Equal(again.Indices, lists.Indices) {
				t.Error("a second call chooses other keys")
			}
		})
	}
	t.Run("NaN", func(t *testing.T) { testIndexNaN(t, dev) })
	t.Run("attention", func(t *testing.T) { testIndexAttention(t, dev) })
	t.Run("cancelled", func(t *testing.T) {
		x := indexCases()[1].draw(1)
		q, k, w := put(t, dev, x.q, Contiguous), put(t, dev, x.k, Contiguous), put(t, dev, x.w, Contiguous)
		defer q.release()
		defer k.release()
		defer w.release()
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if lists, err := dev.Index(ctx, q.view, k.view, w.view, 5, kernels.Options{}); !errors.Is(err, context.Canceled) || lists != nil {
			t.Errorf("%v, error %v", lists, err)
		}
	})
}

// testIndexNaN shows that keys with NaN are chosen last, and those with Inf by the sign of their weight, and that hidden
// ones do not matter. With one element and one head the score of a key is w·max(0, key).
func testIndexNaN(t *testing.T, dev *kernels.Device) {
	nan, inf := float32(math.NaN()), float32(math.Inf(1))
	keys := []float32{nan, 3, inf, -inf, 1, -nan, 2, nan}
	for _, c := range []struct {
		w    float32
		n    int
		want []int32
	}{
		{1, 1, []int32{2}},
		{1, 4, []int32{1, 2, 4, 6}},
		{1, 5, []int32{1, 2, 3, 4, 6}},
		{-1, 4, []int32{1, 3, 4, 6}}, // -0 of key 3, then -1, -2 and -3; key 2 has -Inf
		{nan, 3, []int32{0, 1, 2}},
		{1, 7, []int32{0, 1, 2, 3, 4, 5, 6}},
	} {
		q := upload1(t, dev, 1)
		k, w := upload1(t, dev, keys...), upload1(t, dev, c.w)
		lists := onHost(t, dev, must(dev.Index(t.Context(), q, must(k.Swap(backend.Seq, backend.Dim))(t), w, c.n, kernels.Options{KLen: []int{7}}))(t))
		if !slices.Equal(lists.Indices, c.want) {
			t.Errorf("w %v: keys %d, want %d", c.w, lists.Indices, c.want)
		}
		for _, x := range []backend.Tensor{q, k, w} {
			x.Release()
		}
	}
}

// onHost returns lists of Index with Indices, and releases the tensor.
func onHost(t *testing.T, dev *kernels.Device, lists *kernels.KeyIndices) *kernels.KeyIndices {
	t.Helper()
	defer lists.Tensor.Release()
	return &kernels.KeyIndices{Indices: must(dev.ToInt32(t.Context(), lists.Tensor))(t), TopK: lists.TopK}
}

// upload1 returns a tensor [1, 1, 1, n].
func upload1(t *testing.T, dev *kernels.Device, x ...float32) backend.Tensor {
	t.Helper()
	return must(dev.FromFloat32(t.Context(), backend.F32, x, backend.Shape{1, 1, 1, len(x)}))(t)
}

// testIndexAttention shows that attention to as many keys as there are is causal attention.
func testIndexAttention(t *testing.T, dev *kernels.Device) {
	if lacking(dev, "key indices") {
		t.Skip("no key indices")
	}
	x := indexCase{batch: 2, heads: 3, seqQ: 9, seqK: 60, d: 16}.draw(5)
	q, k, w := put(t, dev, x.q, Contiguous), put(t, dev, x.k, Contiguous), put(t, dev, x.w, Contiguous)
	defer q.release()
	defer k.release()
	defer w.release()
	c := Case{Name: "index", Dims: dims(2, 4, 2, 9, 60, 32, 32), Seed: 3, Options: kernels.Options{Causal: true, Align: kernels.LowerRight}}
	lists := must(dev.Index(t.Context(), q.view, k.view, w.view, 60, c.Options))(t)
	plain := c.build()
	on := plain.on(t, dev)
	defer on.release()
	on.opt.KeyIndices = lists
	got := on.mustRun(t, fused)
	c.Options.KeyIndices = onHost(t, dev, lists)
	b := c.build()
	if err := b.compare(got); err != nil { // with the reference of the lists
		t.Error(err)
	}
	if err := plain.compare(got); err != nil { // with that of causal attention
		t.Error(err)
	}
}
