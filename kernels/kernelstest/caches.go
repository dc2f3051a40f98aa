package kernelstest

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kvcache"
	"github.com/seed90331342/attn/kernels/nn"
)

// cacheCases are problems whose keys and values are stored as in a cache: in another dtype than
// the queries, as Q8, Q4 or F8, in pages.
func cacheCases() []Case {
	f32, f16, bf16, q8, q4, f8 := backend.F32, backend.F16, backend.BF16, backend.Q8, backend.Q4, backend.F8
	decode := kernels.Dims{Batch: 2, Heads: 8, KVHeads: 2, SeqQ: 1, SeqK: 421, Dim: 64, ValueDim: 64}
	alone := kernels.Dims{Batch: 1, Heads: 1, KVHeads: 1, SeqQ: 1, SeqK: 3000, Dim: 32, ValueDim: 64}
	few := kernels.Dims{Batch: 2, Heads: 2, KVHeads: 1, SeqQ: 5, SeqK: 150, Dim: 32, ValueDim: 48}
	prefill := kernels.Dims{Batch: 2, Heads: 4, KVHeads: 2, SeqQ: 70, SeqK: 200, Dim: 64, ValueDim: 64}
	odd := kernels.Dims{Batch: 2, Heads: 2, KVHeads: 2, SeqQ: 33, SeqK: 77, Dim: 20, ValueDim: 12}
	lower := kernels.Options{Causal: true, Align: kernels.LowerRight}
	with := func(o kernels.Options, f func(o *kernels.Options)) kernels.Options {
		f(&o)
		return o
	}
	short := with(lower, func(o *kernels.Options) { o.KLen = []int{200, 101} })
	empty := kernels.Options{KLen: []int{0, 97}}
	window := with(lower, func(o *kernels.Options) { o.Window = &kernels.Window{Left: 37} })
	cases := []Case{
		{Name: "f16 keys, decode", Dims: decode, DType: f32, Keys: &f16},
		{Name: "bf16 keys, decode", Dims: decode, DType: f32, Keys: &bf16, Layout: BSHD},
		{Name: "f32 keys, decode", Dims: decode, DType: f16, Keys: &f32},
		{Name: "f16 keys, prefill", Dims: prefill, DType: f32, Keys: &f16, Options: lower},
		{Name: "bf16 keys of f16 queries", Dims: prefill, DType: f16, Keys: &bf16, Layout: Padded, Options: short},
		{Name: "f32 keys of bf16 queries", Dims: odd, DType: bf16, Keys: &f32, Layout: Transposed},
		{Name: "q8, decode", Dims: decode, DType: f32, Keys: &q8},
		{Name: "q8, one head", Dims: alone, DType: f32, Keys: &q8},
		{Name: "q8, f16 queries", Dims: decode, DType: f16, Keys: &q8, Layout: Padded, Options: with(window, func(o *kernels.Options) { o.KLen = []int{421, 400} })},
		{Name: "q8, prefill", Dims: prefill, DType: bf16, Keys: &q8, Layout: BSHD, Options: short},
		{Name: "q8, odd sizes", Dims: odd, DType: f32, Keys: &q8, Options: lower},
		{Name: "q8, a masked NaN row", Dims: few, DType: f32, Keys: &q8, Options: kernels.Options{KLen: []int{120, 149}},
			PoisonK: map[int]float32{149: float32(math.NaN())}, PoisonV: map[int]float32{149: float32(math.Inf(1))}},
	}
	for _, size := range []int{16, 64, 5} {
		name := func(s string) string { return fmt.Sprintf("pages of %d, %s", size, s) }
		cases = append(cases,
			Case{Name: name("decode"), Dims: decode, DType: f32, PageSize: size, Options: with(lower, func(o *kernels.Options) { o.KLen = []int{421, 130} })},
			Case{Name: name("one head"), Dims: alone, DType: f32, PageSize: size},
			Case{Name: name("window"), Dims: few, DType: f32, PageSize: size, Layout: Padded, Options: window},
			Case{Name: name("prefill"), Dims: prefill, DType: f32, PageSize: size, Options: short},
			Case{Name: name("f16, an empty sequence"), Dims: few, DType: f16, PageSize: size, Layout: BSHD, Options: empty},
			Case{Name: name("q8, decode"), Dims: decode, DType: f32, Keys: &q8, PageSize: size, Options: lower},
			Case{Name: name("bf16 keys, odd sizes"), Dims: odd, DType: f32, Keys: &bf16, PageSize: size, Options: lower},
		)
	}
	cases = append(cases, // seeds are those of the order
		Case{Name: "q4, decode", Dims: decode, DType: f32, Keys: &q4},
		Case{Name: "q4, one head", Dims: alone, DType: f32, Keys: &q4},
		Case{Name: "q4, f16 queries", Dims: decode, DType: f16, Keys: &q4, Layout: Padded, Options: with(window, func(o *kernels.Options) { o.KLen = []int{421, 400} })},
		Case{Name: "q4, prefill", Dims: prefill, DType: bf16, Keys: &q4, Layout: BSHD, Options: short},
		Case{Name: "q4, a masked NaN block", Dims: kernels.Dims{Batch: 2, Heads: 2, KVHeads: 1, SeqQ: 5, SeqK: 150, Dim: 32, ValueDim: 96}, DType: f32, Keys: &q4,
			Options: kernels.Options{KLen: []int{120, 149}}, PoisonK: map[int]float32{149: float32(math.NaN())}, PoisonV: map[int]float32{149: float32(math.Inf(1))}},
	)
	for _, size := range []int{16, 5} {
		cases = append(cases,
			Case{Name: fmt.Sprintf("pages of %d, q4, decode", size), Dims: decode, DType: f32, Keys: &q4, PageSize: size, Options: lower},
			Case{Name: fmt.Sprintf("pages of %d, q4, prefill", size), Dims: prefill, DType: f32, Keys: &q4, PageSize: size, Layout: Padded, Options: short},
		)
	}
	nan := map[int]float32{77: float32(math.NaN())}
	cases = append(cases,
		Case{Name: "f8, decode", Dims: decode, DType: f32, Keys: &f8},
		Case{Name: "f8, one head", Dims: alone, DType: f32, Keys: &f8},
		Case{Name: "f8, f16 queries", Dims: decode, DType: f16, Keys: &f8, Layout: Padded, Options: with(window, func(o *kernels.Options) { o.KLen = []int{421, 400} })},
		Case{Name: "f8, prefill", Dims: prefill, DType: bf16, Keys: &f8, Layout: BSHD, Options: short},
		Case{Name: "f8, odd sizes", Dims: odd, DType: f32, Keys: &f8, Options: lower},
		Case{Name: "f8, masked NaN", Dims: few, DType: f32, Keys: &f8, Options: kernels.Options{KLen: []int{120, 149}},
			PoisonK: map[int]float32{149: float32(math.NaN())}, PoisonV: map[int]float32{149: float32(math.Inf(1))}},
		Case{Name: "f8, NaN keys", Dims: decode, DType: f32, Keys: &f8, PoisonK: nan},
		Case{Name: "f8, NaN values", Dims: prefill, DType: f32, Keys: &f8, PoisonV: nan, Options: lower},
		Case{Name: "pages of 16, f8, decode", Dims: decode, DType: f32, Keys: &f8, PageSize: 16, Options: lower},
		Case{Name: "pages of 5, f8, prefill", Dims: prefill, DType: f32, Keys: &f8, PageSize: 5, Layout: Padded, Options: short},
	)
	for i := range cases {
		cases[i].Seed = uint64(1000 + i)
	}
	return cases
}

// testCaches compares them with the oracle, and those in pages with the same keys in one
// tensor, to the bit. No digests of F8 are recorded: a digest holds on the
// machines on which it was written, the bits of the same numbers in F32 hold on every one.
func testCaches(t *testing.T, dev *kernels.Device, h Harness, bits *digests) {
	for n, c := range cacheCases() {
		if !h.take(!h.hurries() || n%2 == 0) {
			continue
		}
		t.Run(c.Name, func(t *testing.T) {
			needs(t, dev, c)
			widens := bits.file != "" && c.keyType() == backend.F8
			if c.PageSize == 0 && !widens {
				testCase(t, dev, c, bits)
				return
			}
			b := c.build()
			got := b.once(t, dev, fused)
			if err := b.compare(got); err != nil {
				t.Fatalf("%v: %v", c, err)
			}
			if b.PageSize = 0; widens {
				b.Keys, b.k.dtype, b.v.dtype = new(backend.F32), backend.F32, backend.F32
				if err := differ(b.once(t, dev, fused), got); err != nil {
					t.Fatalf("%v: in f32: %v", c, err)
				}
				return
			}
			bits.see(t, c, fused, got)
			if err := differ(b.once(t, dev, fused), got); err != nil {
				t.Fatalf("%v: in pages: %v", c, err)
			}
		})
	}
}

// testCacheOptions computes calls with each way of each option through caches, from one row and from three, and compares
// them with the reference of the call without a cache. A shared prefix may refuse options by name, other caches KLen alone.
// Backends with the default of Extent.Small, which take long, compute the last way of each option, from one row over pages.
func testCacheOptions(t *testing.T, dev *kernels.Device, h Harness) {
	all := options()
	all = append(all[3:len(all)-1], // without lengths, type, layout and poison
		option{"score mod", []func(*Case){func(c *Case) { c.Options.ScoreMod = placeMod() }, func(c *Case) { c.Options.ScoreMod = linearMod(slopes(c.Heads)) }}},
		option{"spans", []func(*Case){func(c *Case) { c.Options.Spans = [][][2]int{{{3, 30}, {34, 36}}} }, func(c *Case) { c.Options.Spans = [][][2]int{{{35, 36}}, {{34, 36}}} }}},
		option{"low precision", []func(*Case){func(c *Case) { c.DType, c.Options.LowPrecision = backend.BF16, true }}},
		option{"key indices", []func(*Case){func(c *Case) { *c = chosen(*c, true, 1, 12) }}})
	for _, kind := range []struct {
		name         string
		paged, share bool
	}{{"cache", false, false}, {"pages", true, false}, {"shared prefix", true, true}} {
		if h.Extent.Small == 0 && !kind.paged {
			continue
		}
		for _, o := range all {
			t.Run(kind.name+"/"+o.name, func(t *testing.T) {
				lengths := []int{1, 3}
				if h.Extent.Small == 0 {
					lengths, o.ways = lengths[:1], o.ways[len(o.ways)-1:]
				}
				for n, way := range o.ways {
					for _, rows := range lengths {
						c := Case{Name: fmt.Sprintf("%s %d", o.name, n), Dims: dims(2, 4, 2, rows, 37, 16, 8), Seed: uint64(n)}
						if kind.paged {
							c.PageSize = cachePage // segments begin with a page
						}
						way(&c)
						c.PageSize = 0
						c.Options.Causal, c.Options.Align = true, kernels.LowerRight // as caches have it
						if unsupported(dev, c) != "" || kind.paged && lacking(dev, "pages") {
							continue
						}
						err := c.throughCache(t, dev, kind.paged, kind.share)
						refused := (kind.share || o.name == "klen") && errors.Is(err, backend.ErrOption) && strings.Contains(err.Error(), "is set, but ")
						if err != nil && !refused {
							t.Errorf("%v: %v", c, err)
						}
					}
				}
			})
		}
	}
}

// cachePage is the page size of throughCache.
const cachePage = 8

// throughCache computes c by a cache that holds its keys and values, and compares the result with the reference. Pages
// hold a common prefix once.
func (c Case) throughCache(t *testing.T, dev *kernels.Device, paged, share bool) error {
	first, b := 0, c.build()
	if paged {
		first = 2*cachePage + 3
		for _, x := range []operand{b.k, b.v} {
			for h := range c.KVHeads {
				for j := range first {
					copy(x.rowOf(1, h, j), x.rowOf(0, h, j))
				}
			}
		}
	}
	on := b.on(t, dev)
	defer on.release()
	part := func(x backend.Tensor, axis, lo, hi int) backend.Tensor { return must(x.Slice(axis, lo, hi))(t) }
	add := func(cache nn.KVCache, batches, lo, hi int) {
		k, v := part(on.k.view, backend.Seq, lo, hi), part(on.v.view, backend.Seq, lo, hi)
		noError(t, cache.Append(t.Context(), part(k, backend.Batch, 0, batches), part(v, backend.Batch, 0, batches), nil))
	}
	var cache nn.KVCache
	if paged {
		p := must(kvcache.NewPaged(t.Context(), dev, kvcache.PagedConfig{KVHeads: c.KVHeads, Dim: c.Dim, ValueDim: c.ValueDim, DType: c.keyType(), PageSize: cachePage, Pages: 16}))(t)
		defer p.Release()
		x := sequence(t, p)
		add(p.Batch(x), 1, 0, first)
		cache = p.Batch(x, must(x.Fork())(t))
	} else {
		p := must(kvcache.New(t.Context(), dev, kvcache.Config{Batch: c.Batch, KVHeads: c.KVHeads, Dim: c.Dim, ValueDim: c.ValueDim, DType: c.keyType(), Capacity: c.SeqK + 3}))(t)
		defer p.Release()
		cache = p
	}
	add(cache, c.Batch, first, c.SeqK)
	out, lse := on.outputs(t)
	defer out.release()
	defer lse.release()
	opt := on.opt
	opt.Causal, opt.Align = false, kernels.UpperLeft
	err := cache.AttentionInto(t.Context(), kernels.Result{O: out.view, LSE: lse.view}, on.q.view, kvcache.CallOptions{Options: opt, SharePrefix: share})
	if err != nil {
		return err
	}
	a := answer{o: out.get(t, dev, "o"), lse: lse.get(t, dev, "lse")}
	if share {
		return b.compareMerged(a, 1)
	}
	return b.compare(a)
}

// quantise rounds rows to Q8, Q4 or F8 until they no longer change. Once is not enough: 127 times a scale, divided by
// 127, may differ from the scale in its last bit.
func (o *operand) quantise() {
	n := o.shape[3]
	row, before := make([]byte, o.dtype.Row(n)), make([]float32, n)
	for i := 0; i < len(o.data); i += n {
		for x := o.data[i : i+n]; !slices.Equal(before, x) && x[0] == x[0]; {
			copy(before, x)
			o.dtype.Quantise(row, x)
			o.dtype.Dequantise(x, row)
		}
	}
}

// spoil sets all elements that share a scale with a NaN or an Inf to NaN, as their scale is. F8 has
// no scales, and its largest number stands for Inf.
func (o *operand) spoil() {
	n := o.shape[3]
	switch o.dtype {
	case backend.Q4:
		n = 32
	case backend.F8:
		for i, x := range o.data {
			o.data[i] = max(-448, min(x, 448)) // NaN stays
		}
		return
	}
	for row := range slices.Chunk(o.data, n) {
		if slices.ContainsFunc(row, func(x float32) bool { return x-x != 0 }) {
			for i := range row {
				row[i] = float32(math.NaN())
			}
		}
	}
}

// putQuantised is put for Q8, Q4 and F8 operands. Gaps are bytes of 0xff, which are NaN in F8 and as scales.
func putQuantised(tb testing.TB, dev *kernels.Device, o operand, l Layout) flat {
	tb.Helper()
	n, wide, gap := o.shape[3], o.shape, 8
	if o.dtype == backend.Q4 {
		gap = 10 // as few bytes as may be
	}
	wide[3] = o.dtype.Row(n)
	st, offset, _ := Contiguous.place(wide)
	switch l {
	case BSHD:
		st, _, _ = BSHD.place(wide)
	case Padded:
		row := wide[3] + gap
		st, offset = backend.Strides{wide[1]*wide[2]*row + gap/2&^1, wide[2] * row, row, 1}, 4+gap
	}
	size := offset
	for i, n := range wide {
		size += (n - 1) * st[i]
	}
	size = (size + 1 + 8 + 35) / 36 * 36 // some slack after the last row
	mem := bytes.Repeat([]byte{0xff}, size)
	for i := 0; i < len(o.data); i += n {
		o.dtype.Quantise(mem[offset+index(i/n*wide[3], wide, st):], o.data[i:i+n])
	}
	one := size - o.dtype.Lead() // elements of a row of all bytes
	if o.dtype == backend.Q4 {
		one = size / 18 * 32
	}
	all := must(dev.Upload(tb.Context(), must(backend.Host(mem, o.dtype, backend.Shape{1, 1, 1, one}))(tb)))(tb)
	return flat{all: all, view: must(all.View(o.shape, st, offset))(tb)}
}

// paged puts k and v into pools: pages in random order, NaN in rows without a key and in unused
// pages, and numbers out of range, or nothing, in the table after the last page of a batch.
func (o *onDevice) paged(tb testing.TB) {
	tb.Helper()
	size, each := o.PageSize, (o.SeqK+o.PageSize-1)/o.PageSize
	rng := rand.New(rand.NewPCG(o.Seed, 0x70616765))
	const spare = 2
	order := rng.Perm(o.Batch*each + spare)
	p := &kernels.Pages{Keys: o.SeqK}
	for b := range o.Batch {
		n, row := o.SeqK, []int32{}
		if o.Options.KLen != nil {
			n = o.Options.KLen[b]
		}
		for i := range each {
			if i*size < n {
				row = append(row, int32(order[b*each+i]))
			}
		}
		p.Table = append(p.Table, append(row, [][]int32{{1 << 30, -1}, {-1}, nil}[o.Seed%3]...))
	}
	pool := func(from operand) operand {
		s := from.shape
		to := filled(float32(math.NaN()), backend.Shape{len(order), s[1], size, s[3]}, from.dtype)
		for i, x := range from.data {
			d, j := i%s[3], i/s[3]%s[2]
			h, b := i/s[3]/s[2]%s[1], i/s[3]/s[2]/s[1]
			if o.Options.KLen == nil || j < o.Options.KLen[b] {
				to.data[((order[b*each+j/size]*s[1]+h)*size+j%size)*s[3]+d] = x
			}
		}
		return to
	}
	o.k, o.v = put(tb, o.dev, pool(o.built.k), o.Layout), put(tb, o.dev, pool(o.built.v), o.Layout)
	o.opt.Pages = p
}
