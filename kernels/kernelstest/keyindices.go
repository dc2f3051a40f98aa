package kernelstest

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
)

// chosen returns c with random lists of up to topK keys, in random order, for each head or for all, and for each block
// of so many rows. One list in eight is empty.
func chosen(c Case, perHead bool, rows, topK int) Case {
	rng, heads := rand.New(rand.NewPCG(c.Seed, 0x6b657973)), 1
	if perHead {
		heads = c.KVHeads
	}
	x := &kernels.KeyIndices{TopK: topK, Rows: rows}
	for range c.Batch * heads * ((c.SeqQ + rows - 1) / rows) {
		list := slices.Repeat([]int32{-1}, topK)
		if rng.IntN(8) > 0 {
			for n, key := range rng.Perm(c.SeqK)[:rng.IntN(min(topK, c.SeqK)+1)] {
				list[n] = int32(key)
			}
		}
		x.Indices = append(x.Indices, list...)
	}
	c.Options.KeyIndices = x
	return c
}

// listOf returns the list of a row.
func (b *built) listOf(batch, h, i int) []int32 {
	x := b.Options.KeyIndices
	rows := max(x.Rows, 1)
	blocks := (b.SeqQ + rows - 1) / rows
	heads := len(x.Indices) / (b.Batch * blocks * x.TopK)
	n := (batch*heads+h*heads/b.Heads)*blocks + i/rows
	list := x.Indices[n*x.TopK:][:x.TopK]
	if end := slices.Index(list, -1); end >= 0 {
		list = list[:end]
	}
	return list
}

// keyCases are cases with lists, for one row and for blocks of rows.
func keyCases() (cases []Case) {
	f16, q8, q4 := backend.F16, backend.Q8, backend.Q4
	plain, wide := dims(2, 4, 2, 21, 150, 16, 16), dims(1, 4, 2, 50, 400, 32, 64)
	lower := kernels.Options{Causal: true, Align: kernels.LowerRight}
	nan := float32(math.NaN())
	for n, c := range []Case{
		{Name: "plain", Dims: plain}, {Name: "wide", Dims: wide},
		{Name: "decode", Dims: dims(2, 8, 2, 1, 700, 64, 64)},
		{Name: "decode, 17 columns", Dims: dims(1, 2, 1, 1, 300, 17, 33)},
		{Name: "one key", Dims: dims(2, 2, 2, 3, 1, 8, 8)},
		{Name: "more than a shard", Dims: dims(1, 1, 1, 1, 40000, 4, 4)},
		{Name: "bshd", Dims: plain, Layout: BSHD}, {Name: "padded", Dims: plain, Layout: Padded}, {Name: "transposed", Dims: plain, Layout: Transposed},
		{Name: "f16", Dims: wide, DType: backend.F16}, {Name: "bf16", Dims: wide, DType: backend.BF16}, {Name: "f16 keys", Dims: plain, Keys: &f16},
		{Name: "q8", Dims: wide, Keys: &q8}, {Name: "q4", Dims: wide, Keys: &q4},
		{Name: "bf16, low precision", Dims: wide, DType: backend.BF16, Options: kernels.Options{LowPrecision: true}},
		{Name: "q8, low precision", Dims: wide, Keys: &q8, Options: kernels.Options{LowPrecision: true}},
		{Name: "pages of 16", Dims: plain, PageSize: 16}, {Name: "pages of 5, bshd", Dims: plain, PageSize: 5, Layout: BSHD},
		{Name: "pages of q8, causal", Dims: wide, Keys: &q8, PageSize: 16, Options: lower},
		{Name: "causal", Dims: plain, Options: lower},
		{Name: "window", Dims: wide, Options: kernels.Options{Window: &kernels.Window{Left: 90, Right: 40}, Offset: []int{120}}},
		{Name: "key lengths", Dims: plain, Options: kernels.Options{KLen: []int{70, 0}}},
		{Name: "prefix", Dims: plain, Options: kernels.Options{Causal: true, Prefix: []int{60, 7}}},
		{Name: "segments", Dims: plain, Options: kernels.Options{QSegments: ids(21, 12, 1, 21, 2), KSegments: ids(150, 90, 1, 150, 2)}},
		{Name: "mask", Dims: plain, MaskShape: backend.Shape{2, 4, 21, 150}}, {Name: "short mask", Dims: plain, MaskShape: backend.Shape{1, 1, 1, 99}},
		{Name: "bias", Dims: plain, BiasShape: backend.Shape{2, 1, 21, 150}, BiasHides: true},
		{Name: "bias by distance, wide", Dims: wide, RelativeShape: backend.Shape{1, 4, 1, 449}},
		{Name: "blocks", Dims: plain, BlockSize: 8, BlockShape: backend.Shape{1, 4, 3, 19}},
		{Name: "alibi, causal", Dims: wide, Options: kernels.Options{ALiBi: slopes(4), Causal: true, Offset: []int{350}}},
		{Name: "sinks, softcap", Dims: plain, Options: kernels.Options{Sinks: []float32{1, -2, 3, 0}, Softcap: 3}},
		{Name: "score mod", Dims: plain, Options: kernels.Options{ScoreMod: placeMod()}},
		{Name: "dropout", Dims: wide, Options: kernels.Options{Dropout: kernels.Dropout{P: 0.4, Seed: 7, First: [4]int{1, 2, 3, 5}}}},
		{Name: "dropout, decode", Dims: dims(1, 4, 2, 1, 300, 16, 16), Options: kernels.Options{Dropout: kernels.Dropout{P: 0.4, Seed: 7}}},
		{Name: "f8", Dims: wide, Keys: new(backend.F8)},
		{Name: "hidden NaN", Dims: plain, PoisonK: map[int]float32{3: nan, 70: nan}, PoisonV: map[int]float32{5: nan, 81: nan}, Options: lower},
		{Name: "latent", Dims: dims(2, 40, 1, 3, 200, 24, 16)},
	} {
		c.Seed = uint64(n + 1)
		for _, rows := range []int{1, 8} {
			one := chosen(c, n%2 == 0, rows, []int{40, 100, 300}[n%3])
			one.Name += fmt.Sprintf(", %d rows a list", rows)
			if cases = append(cases, one); c.SeqQ == 1 {
				break
			}
		}
	}
	return cases
}

// keyGradientCases are the keyCases that have gradients, without the longest.
func keyGradientCases() []Case {
	return slices.DeleteFunc(keyCases(), func(c Case) bool {
		return c.PageSize > 0 || c.keyType().Quantised() || c.Options.LowPrecision || c.SeqK > 1000
	})
}

// testKeyIndices tests calls with lists of keys.
func testKeyIndices(t *testing.T, dev *kernels.Device, h Harness) {
	needsAll(t, dev, "key indices")
	for n, c := range keyCases() {
		if h.takes(n) {
			t.Run(c.Name, func(t *testing.T) {
				needs(t, dev, c)
				b := c.build()
				if err := b.compare(b.once(t, dev, fused)); err != nil {
					t.Errorf("%v: %v", c, err)
				}
			})
		}
	}
	t.Run("in a tensor", func(t *testing.T) { testListTensors(t, dev, h) })
	t.Run("as gathered", func(t *testing.T) { testGathered(t, dev) })
	t.Run("drawn", func(t *testing.T) {
		check(t, min(draws(h.Extent.Draws, 100), h.small(1)), func(rt *rapid.T) {
			b := drawKeys(rt, dev).build()
			if err := b.compare(b.once(t, dev, fused)); err != nil {
				rt.Fatalf("%v: %v", b.Case, err)
			}
		})
	})
	t.Run("gradients", func(t *testing.T) { testKeyGradients(t, dev, h) })
}

// inTensor returns the lists of b as Indices of a tensor, or false for options that do not go with one. Next to the keys
// there are numbers that are none, and lists end anywhere. Rows of the tensor are not adjacent.
func (b *built) inTensor(t *testing.T, dev *kernels.Device) (lists *kernels.KeyIndices, ok bool) {
	o, x := b.Options, b.Options.KeyIndices
	none := backend.Shape{}
	if x.Rows > 1 || o.Prefix != nil || o.QSegments != nil || o.ScoreMod != nil || o.Dropout.P > 0 ||
		b.MaskShape != none || b.BiasShape != none || b.RelativeShape != none || b.BlockSize > 0 {
		return nil, false
	}
	junk := []int32{-1, int32(b.SeqK), math.MinInt32, math.MaxInt32}
	shape := backend.Shape{b.Batch, len(x.Indices) / x.TopK / b.Batch / b.SeqQ, b.SeqQ, x.TopK + 3}
	var data []int32
	for list := range slices.Chunk(x.Indices, x.TopK) {
		row := append([]int32{junk[len(data)%4], -1}, list...)
		data = append(append(data, row...), junk[len(data)/3%4], junk[len(data)/5%4], 0)
	}
	wide := shape
	wide[backend.Dim] += 2
	host := must(kernels.Host(data, kernels.I32, wide))(t)
	all := must(dev.Upload(t.Context(), host))(t)
	t.Cleanup(all.Release)
	return &kernels.KeyIndices{Tensor: must(all.Slice(backend.Dim, 0, shape[backend.Dim]))(t)}, true
}

// testListTensors compares calls with lists in device memory with the oracle.
func testListTensors(t *testing.T, dev *kernels.Device, h Harness) {
	for n, c := range keyCases() {
		b := c.build()
		lists, ok := b.inTensor(t, dev)
		if !ok || !h.takes(n) {
			continue
		}
		t.Run(c.Name, func(t *testing.T) {
			needs(t, dev, c)
			on := b.on(t, dev)
			defer on.release()
			on.opt.KeyIndices = lists
			if err := b.compare(on.mustRun(t, fused)); err != nil {
				t.Errorf("%v: %v", c, err)
			}
		})
	}
}

// drawKeys draws a case with lists, one in four in pages.
func drawKeys(rt *rapid.T, dev *kernels.Device) Case {
	n := func(name string, lo, hi int) int { return rapid.IntRange(lo, hi).Draw(rt, name) }
	c := drawCase(rt)
	if n("pages?", 0, 3) == 0 && c.Options.KSegments == nil {
		c.PageSize = n("page", 1, 40)
	}
	return supported(dev, chosen(c, n("per head", 0, 1) == 0, n("rows", 1, 20), n("top k", 1, 160)))
}

// testGathered compares calls with lists with plain calls over the listed keys, in order.
func testGathered(t *testing.T, dev *kernels.Device) {
	for n, rows := range []int{1, 20, 20} {
		c := Case{Name: "gathered", Dims: dims(1, 4, 2, rows, 500, 32, 32), Seed: uint64(n)}
		if n == 2 {
			c.Layout = Transposed
		}
		c = chosen(c, false, rows, 300)
		list := c.Options.KeyIndices.Indices
		for i := range list { // all distinct
			list[i] = int32(i * 7 % 500)
		}
		got, b := c.build().once(t, dev, fused), c.build()
		slices.Sort(list)
		b.Options.KeyIndices, b.SeqK = nil, len(list)
		for _, o := range []*operand{&b.k, &b.v} {
			from, cols := *o, o.shape[backend.Dim]
			o.data, o.shape[backend.Seq] = nil, len(list)
			for head := range slices.Chunk(from.data, 500*cols) {
				for _, key := range list {
					o.data = append(o.data, head[int(key)*cols:][:cols]...)
				}
			}
		}
		if err := differ(b.once(t, dev, fused), got); err != nil {
			t.Errorf("%d rows: %v", rows, err)
		}
	}
}

// testKeyGradients compares gradients of calls with lists with the oracle.
func testKeyGradients(t *testing.T, dev *kernels.Device, h Harness) {
	if !implements[backend.Differentiator](dev) {
		t.Skipf("%s has no gradients", dev.Info().Name)
	}
	if _, err := checkGradients(t, dev, chosen(Case{Dims: dims(1, 2, 1, 3, 9, 8, 8)}, false, 1, 4)); errors.Is(err, backend.ErrUnsupported) {
		t.Skip(err)
	}
	for n, c := range keyGradientCases() {
		if h.takes(n) {
			needs(t, dev, c)
			if _, err := checkGradients(t, dev, c); err != nil {
				t.Errorf("%s: %v", c.Name, err)
			}
		}
	}
	check(t, min(draws(h.Extent.Draws, 100), h.small(1)), func(rt *rapid.T) {
		c := drawKeys(rt, dev)
		c.PageSize = 0
		if _, err := checkGradients(t, dev, c); err != nil {
			rt.Fatalf("%v: %v", c, err)
		}
	})
}
