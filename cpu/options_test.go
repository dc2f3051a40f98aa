package cpu

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/seed90331342/attn/backend"
)

// TestOptionEdges compares each tier with the reference for options alone and together,
// at lengths at and next to the edges of vectors, tiles and key blocks.
func TestOptionEdges(t *testing.T) {
	skipWithRace(t)
	rng := rand.New(rand.NewPCG(1, 9))
	rounds := 300
	if testing.Short() {
		rounds = 100
	}
	for n := range rounds {
		say, c := drawOptions(t, rng, n)
		compareTiers(t, say, 1+n%3, c)
	}
}

// drawOptions returns the nth of some calls of two heads, with a quarter of the options
// each, and a description of it.
func drawOptions(t *testing.T, rng *rand.Rand, n int) (say string, c backend.Call) {
	one := func(n ...int) int { return n[rng.IntN(len(n))] }
	const heads = 2
	sq, sk := one(1, 5, 23, 24, 25, 40, 63, 64, 65, 130), one(1, 15, 64, 127, 128, 129, 203, 1030)
	c = backend.Call{Q: random(t, uint64(n), backend.Shape{1, heads, sq, 9}), K: random(t, 2, backend.Shape{1, 1, sk, 9}), V: random(t, 3, backend.Shape{1, 1, sk, 7}),
		Problem: backend.Problem{Scale: 0.7, Visible: backend.Everything()}}
	broadcast := func(x backend.Tensor, shape backend.Shape) backend.Tensor {
		y, err := x.Broadcast(shape)
		if err != nil {
			t.Fatal(err)
		}
		return y
	}
	say = fmt.Sprintf("%d x %d", sq, sk)
	for _, o := range []struct {
		say string
		do  func()
	}{
		{"window", func() { c.Visible = backend.Visibility{Offset: sk - sq, Left: 100, Right: n % 7} }},
		{"softcap", func() { c.Softcap = 2 }},
		{"mask", func() {
			c.Mask = broadcast(flags(t, uint64(n), backend.Shape{1, 1, sq, sk}), backend.Shape{1, heads, sq, sk})
		}},
		{"mask of rows", func() {
			c.Mask = broadcast(flags(t, uint64(n), backend.Shape{1, heads, sq, 1}), backend.Shape{1, heads, sq, sk})
		}},
		{"bias", func() {
			x := random(t, uint64(n), backend.Shape{1, heads, sq, sk})
			c.Bias = typed(t, x, []backend.DType{backend.F32, backend.F16, backend.BF16}[n%3])
		}},
		{"slopes", func() { c.Slopes = []float32{0.3, 0.01} }},
		{"relative", func() {
			x := random(t, uint64(n), backend.Shape{1, heads, 1, sq + sk - 1})
			data, err := x.Float32s()
			if err != nil {
				t.Fatal(err)
			}
			data[rng.IntN(len(data))] = negInf
			c.Relative = typed(t, x, []backend.DType{backend.F32, backend.F16, backend.BF16}[n%3])
		}},
		{"blocks", func() {
			c.BlockQ, c.BlockK = one(1, 7, 16, 64, 100), one(1, 7, 16, 64, 100)
			c.Blocks = flags(t, uint64(n), backend.Shape{1, heads, ceilDiv(sq, c.BlockQ), ceilDiv(sk, c.BlockK)})
			seen, err := c.Blocks.Bools()
			if err != nil {
				t.Fatal(err)
			}
			for i := range seen { // three in four, or one
				seen[i] = seen[i] == (n%2 == 0)
			}
		}},
		{"sinks", func() { c.Sinks = []float32{1, -2} }},
		{"dropout", func() { c.Dropout = backend.Dropout{P: 0.4, Seed: 5, First: [4]int{1, 2, one(0, 3, 4), 7}} }},
	} {
		if rng.IntN(4) == 0 {
			say += ", " + o.say
			o.do()
		}
	}
	return say, c
}

// optionCase is one option of BenchmarkOptions.
type optionCase struct {
	say   string
	least float64 // percent of plain that it is to reach
	do    func(b *testing.B, c *backend.Call)
}

// optionCases are the options of a call of 8 heads, sq rows and sk keys.
func optionCases(sq, sk int) []optionCase {
	const heads = 8
	all := backend.Shape{1, heads, sq, sk}
	bias := func(heads int, dtype backend.DType) func(b *testing.B, c *backend.Call) {
		return func(b *testing.B, c *backend.Call) {
			x := typed(b, random(b, 7, backend.Shape{1, heads, sq, sk}), dtype)
			var err error
			if c.Bias, err = x.Broadcast(all); err != nil {
				b.Fatal(err)
			}
		}
	}
	mask := func(heads int) func(b *testing.B, c *backend.Call) {
		return func(b *testing.B, c *backend.Call) {
			var err error
			if c.Mask, err = flags(b, 8, backend.Shape{1, heads, sq, sk}).Broadcast(all); err != nil {
				b.Fatal(err)
			}
		}
	}
	slopes := func(b *testing.B, c *backend.Call) {
		for h := range heads {
			c.Slopes = append(c.Slopes, 1/float32(int(2)<<h))
		}
	}
	of := func(dtype backend.DType) func(b *testing.B, c *backend.Call) {
		return func(b *testing.B, c *backend.Call) {
			c.Q, c.K, c.V, c.O = typed(b, c.Q, dtype), typed(b, c.K, dtype), typed(b, c.V, dtype), typed(b, c.O, dtype)
		}
	}
	visible := func(v backend.Visibility) func(b *testing.B, c *backend.Call) {
		return func(_ *testing.B, c *backend.Call) { c.Visible = v }
	}
	return []optionCase{
		{"causal", 60, visible(backend.Visibility{Left: backend.Unbounded})},
		{"window256", 60, visible(backend.Visibility{Left: 256})},
		{"klen75%", 60, visible(backend.Visibility{Left: backend.Unbounded, Right: backend.Unbounded, KLen: []int{sk * 3 / 4}})},
		{"softcap", 60, func(_ *testing.B, c *backend.Call) { c.Softcap = 20 }},
		{"mask/SqSk", 60, mask(1)},
		{"mask/BHSqSk", 60, mask(heads)},
		{"bias/f32/SqSk", 60, bias(1, backend.F32)},
		{"bias/f32/BHSqSk", 60, bias(heads, backend.F32)},
		{"bias/f16/SqSk", 60, bias(1, backend.F16)},
		{"bias/f16/BHSqSk", 60, bias(heads, backend.F16)},
		{"alibi", 60, slopes},
		{"alibi+mask", 60, func(b *testing.B, c *backend.Call) { slopes(b, c); mask(1)(b, c) }},
		{"relative", 60, func(b *testing.B, c *backend.Call) {
			c.Relative = random(b, 9, backend.Shape{1, heads, 1, sq + sk - 1})
		}},
		{"relative+bias", 60, func(b *testing.B, c *backend.Call) {
			c.Relative = random(b, 9, backend.Shape{1, heads, 1, sq + sk - 1})
			bias(1, backend.F32)(b, c)
		}},
		{"sinks", 60, func(_ *testing.B, c *backend.Call) { c.Sinks = make([]float32, heads) }},
		{"blocks64", 60, func(b *testing.B, c *backend.Call) {
			c.BlockQ, c.BlockK, c.Blocks = 64, 64, flags(b, 8, backend.Shape{1, heads, ceilDiv(sq, 64), sk / 64})
		}},
		{"dropout", 40, func(_ *testing.B, c *backend.Call) { c.Dropout = backend.Dropout{P: 0.1, Seed: 1} }},
		{"dropout/row1", 40, func(_ *testing.B, c *backend.Call) {
			c.Dropout = backend.Dropout{P: 0.1, Seed: 1, First: [4]int{0, 0, 1}}
		}},
		{"f16", 60, of(backend.F16)},
		{"bf16", 60, of(backend.BF16)},
	}
}

// BenchmarkOptions measures what each option costs, in percent of the speed of the
// plain call per computed pair of row and key. The two take turns; it reports the median
// of their ratios and the target.
//
//	go test -run '^$' -bench Options -benchtime 15x ./cpu
func BenchmarkOptions(b *testing.B) {
	for _, tier := range Tiers() {
		for _, o := range optionCases(2048, 2048) {
			b.Run(tier+"/"+o.say, func(b *testing.B) {
				be := open(b, Options{Tier: tier, Threads: 1})
				base, c := plain(b, 8, 2048, 64), plain(b, 8, 2048, 64)
				o.do(b, c)
				benchAgainst(b, attends(b, be, base), attends(b, be, c), seenPairs(b, base), seenPairs(b, c))
				b.ReportMetric(o.least, "%wanted")
			})
		}
	}
}

// seenPairs counts the pairs of row and key that the visibility rule and blocks leave.
func seenPairs(tb testing.TB, c *backend.Call) float64 {
	d := c.Dims()
	if c.Blocks.IsZero() {
		return float64(c.Visible.Pairs(d.Batch, d.SeqQ, d.SeqK) * int64(d.Heads))
	}
	data, err := c.Blocks.Bools()
	if err != nil {
		tb.Fatal(err)
	}
	n := 0
	for _, sees := range data[:c.Blocks.Shape().Elements()] {
		if sees {
			n += c.BlockQ * c.BlockK
		}
	}
	return float64(n)
}

// attends returns a function that computes c.
func attends(b *testing.B, be *Backend, c *backend.Call) func() error {
	return func() error { return be.Attention(b.Context(), c) }
}

// benchAgainst reports how fast run is for each of its pairs, in percent of base, and how
// many times as fast the whole call is. A turn is one call of each.
func benchAgainst(b *testing.B, base, run func() error, basePairs, pairs float64) {
	seconds := func(run func() error) float64 {
		start := time.Now()
		if err := run(); err != nil {
			b.Fatal(err)
		}
		return time.Since(start).Seconds()
	}
	seconds(run)
	var times []float64
	for b.Loop() {
		times = append(times, seconds(base)/seconds(run))
	}
	slices.Sort(times)
	ratio := times[len(times)/2]
	b.ReportMetric(100*ratio*pairs/basePairs, "%ofPlain")
	b.ReportMetric(ratio, "xPlain")
	b.ReportMetric(0, "ns/op")
}

// BenchmarkBlocks measures masks of blocks by their density, 8,192 rows and keys:
// xPlain is how many times as fast the call is as the one without a mask.
func BenchmarkBlocks(b *testing.B) {
	const s = 8192
	for _, size := range []int{16, 32, 64, 128} {
		for _, percent := range []int{5, 10, 25, 50, 100} {
			b.Run(fmt.Sprintf("block%d/density%d%%", size, percent), func(b *testing.B) {
				base, c := plain(b, 1, s, 64), plain(b, 1, s, 64)
				rng := rand.New(rand.NewPCG(1, 2))
				seen := make([]bool, s/size*s/size)
				for i := range seen {
					seen[i] = rng.IntN(100) < percent
				}
				var err error
				if c.Blocks, err = backend.HostBool(seen, backend.Shape{1, 1, s / size, s / size}); err != nil {
					b.Fatal(err)
				}
				c.BlockQ, c.BlockK = size, size
				be := open(b, Options{Threads: 1})
				benchAgainst(b, attends(b, be, base), attends(b, be, c), seenPairs(b, base), seenPairs(b, c))
			})
		}
	}
}
