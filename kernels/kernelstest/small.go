package kernelstest

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kvcache"
	"github.com/seed90331342/attn/kernels/nn"
	"pgregory.net/rapid"
)

// Small random problems meet the ends of ranges, which larger ones seldom do: no keys and one key,
// batches without keys, pages that no key is in, packed sequences that are empty next to one that
// has everything, and rows, keys and pages of as many elements as a vector has lanes.

// drawing draws named numbers.
type drawing struct{ *rapid.T }

// n draws a number from lo to hi.
func (t drawing) n(name string, lo, hi int) int { return rapid.IntRange(lo, hi).Draw(t.T, name) }

// one draws one of a few values.
func one[E any](t drawing, name string, of ...E) E { return rapid.SampledFrom(of).Draw(t.T, name) }

// every is true in one of n draws.
func (t drawing) every(n int, name string) bool { return t.n(name, 1, n) == n }

// drawSmall draws a small problem. One that is not differentiated may have Q8, Q4 or F8 keys and pages.
func drawSmall(rt *rapid.T, differentiable bool) Case {
	t := drawing{rt}
	f32, f16, bf16 := backend.F32, backend.F16, backend.BF16
	kvh, group := t.n("kv heads", 1, 2), t.n("group", 1, 3)
	lengths := []int{1, 1, 1, 2, 3, 7, 8, 9, 16, 17}
	c := Case{Name: "small", Seed: uint64(t.n("seed", 0, 1<<20)), Dims: kernels.Dims{
		Batch: t.n("batch", 1, 3), Heads: kvh * group, KVHeads: kvh, SeqQ: one(t, "sq", lengths...), SeqK: one(t, "sk", append(lengths, 0, 33)...),
		Dim: one(t, "d", 1, 4, 8, 8, 16, 17),
	}}
	c.ValueDim = c.Dim
	if t.every(4, "dv differs") {
		c.ValueDim = one(t, "dv", 1, 4, 8, 16, 20)
	}
	c.DType, c.BiasDType = one(t, "dtype", f32, f32, f32, f16, bf16), one(t, "dtype of biases", f32, f32, f16, bf16)
	c.Layout = one(t, "layout", Contiguous, Contiguous, BSHD, Padded, Transposed, Swapped)
	if t.every(4, "keys differ") {
		c.Keys = new(one(t, "keys", f32, f16, bf16))
		if !differentiable && c.Dim%4 == 0 && c.ValueDim%4 == 0 && c.Layout != Transposed {
			if *c.Keys = one(t, "quantised keys", backend.Q8, backend.Q4, backend.F8); *c.Keys == backend.Q4 {
				c.Dim, c.ValueDim = 32, 32
			}
		}
	}
	kind := t.n("kind", 0, 3)
	switch {
	case kind == 0:
		c.pack(t)
	case kind == 1 && !differentiable && c.SeqK > 0:
		c.PageSize = one(t, "page", 1, 2, 5, 8, 16)
	}
	c.drawLengths(t)
	if c.SeqK > 0 && t.every(6, "poison") {
		nan := map[int]float32{t.n("poisoned key", 0, c.SeqK-1): float32(math.NaN())}
		c.PoisonK, c.PoisonV = one(t, "poisoned k", nan, nil), one(t, "poisoned v", nan, nil)
	}
	if t.every(2, "plain") {
		return c
	}
	c.drawOptions(t)
	return c
}

// pack turns the batch into packed sequences of any lengths. In every other draw one has all rows and keys.
func (c *Case) pack(t drawing) {
	c.Batch = 1
	n := t.n("sequences", 1, 4)
	all := -1
	if t.every(2, "one has everything") {
		all = t.n("which", 0, n-1)
	}
	cut := func(name string, length int) []int {
		cu := make([]int, n+1)
		cu[n] = length
		for i := 1; i < n; i++ {
			switch {
			case all < 0:
				cu[i] = t.n(name, 0, length)
			case i > all:
				cu[i] = length
			}
		}
		slices.Sort(cu)
		return cu
	}
	c.Options.CuQ, c.Options.CuK = cut("end of rows", c.SeqQ), cut("end of keys", c.SeqK)
}

// sequences returns the number of batches or of packed sequences, and the keys of one.
func (c *Case) sequences() (n int, keys func(n int) int) {
	if cu := c.Options.CuK; cu != nil {
		return len(cu) - 1, func(n int) int { return cu[n+1] - cu[n] }
	}
	return c.Batch, func(int) int { return c.SeqK }
}

// drawLengths draws what is visible: a rule, and numbers of keys, with 0 and all as often as others.
func (c *Case) drawLengths(t drawing) {
	o := &c.Options
	n, keys := c.sequences()
	if t.every(2, "klen?") {
		for i := range n {
			o.KLen = append(o.KLen, one(t, "klen", 0, keys(i), t.n("any klen", 0, keys(i))))
		}
	}
	o.Causal = t.every(2, "causal")
	if o.Causal && t.every(2, "lower right") {
		o.Align = kernels.LowerRight
	}
	if t.every(5, "window") {
		o.Window = &kernels.Window{Left: t.n("left", 0, 9), Right: t.n("right", 0, 9)}
	}
	if t.every(5, "offset?") {
		o.Offset = []int{t.n("offset", -20, 20)}
	}
	if t.every(5, "offsets?") {
		var all []int
		for range n {
			all = append(all, t.n("offsets", -20, 20))
		}
		if o.Offset != nil {
			all = moved(all, o.Offset[0])
		}
		o.Offset = all
	}
}

// drawOptions draws the other options: those that packed sequences take, or all.
func (c *Case) drawOptions(t drawing) {
	o := &c.Options
	n, keys := c.sequences()
	if t.every(4, "scale?") {
		o.Scale = new(one(t, "scale", 0, 1, -0.25))
	}
	if t.every(4, "softcap?") {
		o.Softcap = one(t, "softcap", 0.5, 30)
	}
	if t.every(3, "alibi?") {
		o.ALiBi = slopes(c.Heads * one(t, "slopes of", 1, n))
	}
	if t.every(3, "sinks?") {
		for range c.Heads {
			o.Sinks = append(o.Sinks, float32(t.n("sink", -5, 9)))
		}
	}
	if t.every(4, "dropout?") {
		o.Dropout = kernels.Dropout{P: 0.4, Seed: c.Seed, First: [4]int{0, 0, t.n("first row", 0, 5), t.n("first key", 0, 5)}}
	}
	if t.every(4, "prefix?") {
		for i := range one(t, "prefixes", 1, n) {
			o.Prefix = append(o.Prefix, t.n("prefix", 0, keys(i)))
		}
	}
	if o.CuQ != nil || c.SeqK == 0 {
		return
	}
	scores := func(name string) backend.Shape {
		s := backend.Shape{c.Batch, c.Heads, c.SeqQ, c.SeqK}
		for axis := range s {
			if t.every(3, name) {
				s[axis] = 1
			}
		}
		return s
	}
	if t.every(4, "mask?") {
		c.MaskShape, c.HideRows = scores("mask"), t.every(2, "mask hides rows")
	}
	if t.every(4, "bias?") {
		c.BiasShape, c.BiasHides = scores("bias"), t.every(2, "bias hides")
	}
	if t.every(5, "relative?") {
		c.RelativeShape = backend.Shape{one(t, "relative batches", 1, c.Batch), one(t, "relative heads", 1, c.Heads), 1, c.SeqQ + c.SeqK - 1}
	}
	if t.every(5, "blocks?") {
		size := one(t, "block", 1, 4, 8)
		c.BlockSize = size
		c.BlockShape = backend.Shape{1, c.Heads, (c.SeqQ + size - 1) / size, (c.SeqK + size - 1) / size}
	}
}

// testSmall compares n small random problems with the oracle, with the LSE and without, and those
// that may have weights with weights: the outputs have the same bits.
func testSmall(t *testing.T, dev *kernels.Device, n int) {
	problems, elements := 0, 0
	check(t, n, func(rt *rapid.T) {
		problems++
		c := supported(dev, drawSmall(rt, false))
		b := c.build()
		on := b.on(t, dev)
		defer on.release()
		ways := []how{fused, bare}
		if c.Options.CuQ == nil && c.PageSize == 0 && !c.keyType().Quantised() {
			ways = append(ways, weighed)
		}
		var first answer
		for i, how := range ways {
			a, err := on.run(t, how)
			if err == nil {
				err = b.compare(a)
			}
			if i == 0 {
				first = a
			} else if err == nil {
				err = differIn("o", first.o, a.o)
			}
			if err != nil {
				rt.Fatalf("%v: %v: %v", how, c, err)
			}
		}
		elements += len(first.o) + len(first.lse)
	})
	t.Logf("%d small problems, %d elements", problems, elements)
}

// testSmallGradients compares the gradients of n small random problems with the oracle.
func testSmallGradients(t *testing.T, dev *kernels.Device, n int) {
	if !implements[backend.Differentiator](dev) {
		t.Skipf("%s has no gradients", dev.Info().Name)
	}
	problems, elements := 0, [7]int{}
	check(t, n, func(rt *rapid.T) {
		problems++
		of := must(checkGradients(t, dev, supported(dev, drawSmall(rt, true))))(rt)
		for i := range of {
			elements[i] += of[i].Considered
		}
	})
	t.Logf("%d small problems, %d elements of %s", problems, elements, gradientNames)
}

// testHistories appends to caches and attends to them, n times in a random order and with random
// lengths, and compares each result with the oracle.
func testHistories(t *testing.T, dev *kernels.Device, n int) {
	if !implements[backend.Copier](dev) {
		t.Skipf("%s is no backend.Copier, which caches need", dev.Info().Name)
	}
	histories, results := 0, 0
	check(t, n, func(rt *rapid.T) {
		histories++
		results += drawHistory(t, dev, drawing{rt})
	})
	t.Logf("%d histories of caches, %d results", histories, results)
}

// drawHistory runs one history and returns the number of results.
func drawHistory(t *testing.T, dev *kernels.Device, d drawing) (attended int) {
	sequences := d.n("sequences", 1, 3)
	q, kv := one(d, "queries", backend.F32, backend.F32, backend.F16), one(d, "keys", backend.F32, backend.F32, backend.F16, backend.Q8, backend.Q4, backend.F8)
	var rope kvcache.Rotary
	if !kv.Quantised() && d.every(4, "rope") && implements[backend.Rotator](dev) {
		rope = &nn.RoPE{}
	}
	s := newHistory(t, dev, sequences, q, kv, rope)
	defer s.release()
	s.rng = rand.New(rand.NewPCG(uint64(d.n("seed", 0, 1<<20)), 0x6b76))
	s.dims.KVHeads = d.n("kv heads", 1, 2)
	s.dims.Heads = s.dims.KVHeads * d.n("group", 1, 3)
	s.dims.Dim, s.dims.ValueDim = one(d, "d", 4, 8, 16), one(d, "dv", 4, 8)
	const capacity = 24
	page := one(d, "page", 0, 1, 4, 8, 16)
	if lacking(dev, "pages") {
		page = 0
	}
	if kv == backend.Q4 {
		s.dims.Dim, s.dims.ValueDim = 32, 32
	}
	if kv.Quantised() && lacking(dev, kv.String()) {
		s.kv = backend.F32
	}
	var cache nn.KVCache
	var all []int
	var paged *kvcache.Paged
	var of []*kvcache.Sequence
	var contiguous *kvcache.Cache
	var err error
	for i := range sequences {
		all = append(all, i)
	}
	if page == 0 {
		contiguous, err = kvcache.New(t.Context(), dev, kvcache.Config{Batch: sequences, KVHeads: s.dims.KVHeads, Dim: s.dims.Dim, ValueDim: s.dims.ValueDim,
			DType: s.kv, Capacity: capacity, RoPE: rope})
		if err != nil {
			t.Fatal(err)
		}
		defer contiguous.Release()
		cache = contiguous
	} else {
		paged, err = kvcache.NewPaged(t.Context(), dev, kvcache.PagedConfig{KVHeads: s.dims.KVHeads, Dim: s.dims.Dim, ValueDim: s.dims.ValueDim,
			DType: s.kv, PageSize: page, Pages: 2 * sequences * (capacity + page) / page, RoPE: rope})
		if err != nil {
			t.Fatal(err)
		}
		defer paged.Release()
		for range sequences {
			of = append(of, sequence(t, paged))
		}
		cache = paged.Batch(of...)
	}
	story := fmt.Sprintf("%v queries, %v keys, %v, pages of %d, rope %v", q, s.kv, s.dims, page, rope != nil)
	defer func() {
		if t.Failed() {
			t.Log(story)
		}
	}()
	for range d.n("steps", 2, 6) {
		n := one(d, "tokens", 1, 1, 2, 5)
		count := make([]int, sequences)
		for i := range count {
			count[i] = min(one(d, "count", 0, n, d.n("any count", 0, n)), capacity-s.len(i))
		}
		story += fmt.Sprintf(", append %v of %d", count, n)
		k, v, remember := s.next(t, all, n)
		noError(t, cache.Append(t.Context(), k, v, count))
		remember(count)
		if x := d.n("cut", 0, 3*sequences); x < sequences && s.len(x) > 0 {
			y := d.n("other", 0, sequences-1)
			if paged != nil && x != y && d.every(2, "fork") {
				story += fmt.Sprintf(", fork %d to %d", x, y)
				of[y].Free()
				of[y] = must(of[x].Fork())(t)
				s.k[y], s.v[y] = slices.Clone(s.k[x]), slices.Clone(s.v[x])
				count[y] = min(count[y], s.len(y))
				cache = paged.Batch(of...)
			} else {
				story += ", " + s.cut(t, d, x, contiguous, of)
				count[x] = min(count[x], s.len(x))
			}
		}
		if !slices.ContainsFunc(all, func(i int) bool { return s.len(i) > 0 }) {
			continue // a cache without tokens refuses
		}
		s.bare = d.every(2, "without lse")
		opt := kvcache.CallOptions{Count: count, Bidirectional: d.every(4, "bidirectional")}
		if d.every(4, "sinks") && !lacking(dev, "sinks") {
			opt.Sinks = make([]float32, s.dims.Heads)
		}
		merges := 0.0
		switch {
		case d.every(4, "share prefix") && paged != nil:
			opt.SharePrefix, merges = true, float64(max(1, sequences-1))
		case d.every(4, "alibi") && !lacking(dev, "alibi"):
			opt.ALiBi = slopes(s.dims.Heads)
		}
		least := slices.Min(cache.Lens())
		if x := slices.Max(append(count, 1)); !lacking(dev, "mask") && d.every(3, "mask last") && opt.ALiBi == nil && least >= x {
			last := d.n("last", x, least)
			mask := make([]bool, n*last)
			for i := range mask {
				mask[i] = d.every(2, "see")
			}
			opt.MaskLast, opt.Mask = true, must(dev.Upload(t.Context(), must(backend.Host(mask, backend.Bool, backend.Shape{1, 1, n, last}))(t)))(t)
			s.held = append(s.held, opt.Mask)
			merges++
			s.visible = func(b, i, j int) bool { j -= s.len(b) - last; return j < 0 || mask[i*last+j] }
		}
		story += fmt.Sprintf(", attend %+v, without lse %v", opt, s.bare)
		s.attend(t, all, n, cache, opt, merges)
		s.visible = nil
		attended++
	}
	return attended
}

// cut rewinds sequence b of a cache, or keeps drawn ones of its last tokens, and says which.
func (s *history) cut(t *testing.T, d drawing, b int, c *kvcache.Cache, of []*kvcache.Sequence) string {
	from := d.n("from", 0, s.len(b))
	var rows []int
	for i := range s.len(b) - from {
		if d.every(3, "keep") {
			rows = append(rows, i)
		}
	}
	switch {
	case c != nil && rows == nil:
		noError(t, c.Rewind(b, from))
	case c != nil:
		noError(t, c.Keep(t.Context(), b, from, rows))
	case rows == nil:
		noError(t, of[b].Rewind(from))
	default:
		noError(t, of[b].Keep(t.Context(), from, rows))
	}
	s.keep(b, from, rows)
	return fmt.Sprintf("keep %v of %d from %d on", rows, b, from)
}

// keep removes the tokens of sequence b from position from on, except those at from+rows[i].
func (s *history) keep(b, from int, rows []int) {
	for _, x := range []struct {
		all *[]float32
		n   int // elements of a token
	}{{&s.k[b], s.dims.KVHeads * s.dims.Dim}, {&s.v[b], s.dims.KVHeads * s.dims.ValueDim}} {
		left := slices.Clone((*x.all)[:from*x.n])
		for _, i := range rows {
			left = append(left, (*x.all)[(from+i)*x.n:][:x.n]...)
		}
		*x.all = left
	}
}
