package kernelstest

import (
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
)

// option is an aspect of a case with a few ways to set it. The first way changes nothing.
type option struct {
	name string
	ways []func(c *Case)
}

// options are all options of attention. Lengths come first, because shapes depend on them.
func options() []option {
	leave := func(*Case) {}
	dims := func(b, h, kvh, sq, sk, d, dv int) func(*Case) {
		return func(c *Case) {
			c.Dims = kernels.Dims{Batch: b, Heads: h, KVHeads: kvh, SeqQ: sq, SeqK: sk, Dim: d, ValueDim: dv}
		}
	}
	mask := func(b, h int) func(*Case) {
		return func(c *Case) {
			c.MaskShape = backend.Shape{min(b, c.Batch), min(h, c.Heads), c.SeqQ, c.SeqK}
			c.HideRows = b > 1
		}
	}
	bias := func(b, h int, dtype backend.DType, hides bool) func(*Case) {
		return func(c *Case) {
			c.BiasShape = backend.Shape{min(b, c.Batch), min(h, c.Heads), c.SeqQ, c.SeqK}
			c.BiasDType, c.BiasHides = dtype, hides
		}
	}
	// short removes keys from the shape that a way sets.
	short := func(way func(*Case)) func(*Case) {
		return func(c *Case) {
			way(c)
			for _, s := range []*backend.Shape{&c.MaskShape, &c.BiasShape} {
				if s[backend.Dim] == c.SeqK {
					s[backend.Dim] -= 9
				}
			}
		}
	}
	blocks := func(n, b, h int) func(*Case) {
		return func(c *Case) {
			c.BlockSize = n
			c.BlockShape = backend.Shape{min(b, c.Batch), min(h, c.Heads), (c.SeqQ + n - 1) / n, (c.SeqK + n - 1) / n}
		}
	}
	const all = 1 << 20
	return []option{
		{"lengths", []func(*Case){
			dims(2, 4, 2, 37, 75, 16, 16), dims(2, 4, 1, 3, 300, 32, 24), dims(1, 2, 2, 130, 140, 17, 33), dims(2, 4, 4, 1, 70, 64, 64),
		}},
		{"type", []func(*Case){leave, func(c *Case) { c.DType = backend.F16 }, func(c *Case) { c.DType = backend.BF16 }}},
		{"layout", []func(*Case){leave, func(c *Case) { c.Layout = BSHD }, func(c *Case) { c.Layout = Padded }, func(c *Case) { c.Layout = Transposed }}},
		{"visible", []func(*Case){
			leave,
			func(c *Case) { c.Options.Causal = true },
			func(c *Case) { c.Options.Causal, c.Options.Align = true, kernels.LowerRight },
			func(c *Case) {
				c.Options.Window, c.Options.Align = &kernels.Window{Left: 20, Right: 5}, kernels.LowerRight
			},
		}},
		{"offset", []func(*Case){leave, func(c *Case) { c.Options.Offset = []int{9} }, func(c *Case) { c.Options.Offset = []int{-4} },
			func(c *Case) {
				for b := range c.Batch {
					c.Options.Offset = append(c.Options.Offset, 11-20*b)
				}
			}}},
		{"klen", []func(*Case){leave, func(c *Case) {
			for b := range c.Batch {
				c.Options.KLen = append(c.Options.KLen, c.SeqK/(b+2))
			}
		}}},
		{"scale", []func(*Case){leave, func(c *Case) { c.Options.Scale = new(0.0) }, func(c *Case) { c.Options.Scale = new(-0.3) }}},
		{"softcap", []func(*Case){leave, func(c *Case) { c.Options.Softcap = 2 }}},
		{"mask", []func(*Case){leave, mask(1, 1), mask(all, 1), mask(1, all), mask(all, all), short(mask(1, 1))}},
		{"bias", []func(*Case){leave, bias(1, 1, backend.F32, false), bias(all, all, backend.F16, true), bias(1, all, backend.BF16, false), short(bias(all, 1, backend.F32, true))}},
		{"relative", []func(*Case){leave, func(c *Case) { c.RelativeShape = backend.Shape{1, c.Heads, 1, c.SeqQ + c.SeqK - 1} },
			func(c *Case) {
				c.RelativeShape = backend.Shape{c.Batch, 1, 1, c.SeqQ + c.SeqK - 1}
				c.BiasHides = true
			}}},
		{"blocks", []func(*Case){leave, blocks(16, 1, 1), blocks(7, all, all), blocks(64, 1, all)}},
		{"prefix", []func(*Case){leave, func(c *Case) { c.Options.Prefix = []int{c.SeqK / 3} }, func(c *Case) {
			for b := range c.Batch {
				c.Options.Prefix = append(c.Options.Prefix, []int{c.SeqK - 2, 0}[b%2])
			}
		}}},
		{"segments", []func(*Case){leave, func(c *Case) { c.segment(1) }, func(c *Case) { c.segment(c.Batch) }}},
		{"alibi", []func(*Case){leave, func(c *Case) { c.Options.ALiBi = slopes(c.Heads) }, func(c *Case) { c.Options.ALiBi = slopes(c.Batch * c.Heads) }}},
		{"sinks", []func(*Case){leave, func(c *Case) {
			for h := range c.Heads {
				c.Options.Sinks = append(c.Options.Sinks, []float32{1.5, -2, 40, float32(math.Inf(-1))}[h%4])
			}
		}}},
		{"dropout", []func(*Case){leave, func(c *Case) { c.Options.Dropout = kernels.Dropout{P: 0.3, Seed: 1<<40 + 5} },
			func(c *Case) { c.Options.Dropout = kernels.Dropout{P: 0.9, Seed: 3, First: [4]int{1, 2, 3, 70}} }}},
		{"poison", []func(*Case){leave, func(c *Case) {
			c.PoisonK = map[int]float32{c.SeqK - 1: float32(math.NaN())}
			c.PoisonV = map[int]float32{c.SeqK / 2: float32(math.NaN()), 3: float32(math.Inf(1))}
		}}},
	}
}

// cacheOptions are these options and the ways in which a cache stores keys and values.
func cacheOptions() []option {
	leave := func(*Case) {}
	keys := func(dtype backend.DType) func(*Case) {
		return func(c *Case) {
			// Rows of Q8 are contiguous and multiples of 4 bytes.
			whole := c.Dim%4 == 0 && c.ValueDim%4 == 0 && c.Layout != Transposed
			if dtype != c.DType && (dtype != backend.Q8 || whole) {
				c.Keys = &dtype
			}
		}
	}
	pages := func(size int) func(*Case) { return func(c *Case) { c.PageSize = size } }
	// After lengths, dtype and layout, and before options that depend on the page size.
	return slices.Insert(options(), 3,
		option{"keys", []func(*Case){leave, keys(backend.F32), keys(backend.F16), keys(backend.Q8)}},
		option{"pages", []func(*Case){leave, pages(16), pages(5)}})
}

// segment adds n lists of segments to the case. The first has keys in another order than rows
// and a segment without keys; the second has one segment.
func (c *Case) segment(n int) {
	at := max(c.BlockSize, 1) * max(c.PageSize, 1) // where the keys of one may begin
	for b := range n {
		q, k := make([]int32, c.SeqQ), make([]int32, c.SeqK)
		for i := range q {
			q[i] = []int32{5, 9, 7, 5}[4*i/c.SeqQ] * int32(1-b%2)
		}
		for j := range k {
			switch j /= at; {
			case b%2 == 1:
			case j < c.SeqK/3/at:
				k[j*at] = 9
			case j < 3*c.SeqK/4/at:
				k[j*at] = 5
			default:
				k[j*at] = -1
			}
		}
		for j := range k {
			k[j] = k[j/at*at]
		}
		c.Options.QSegments, c.Options.KSegments = append(c.Options.QSegments, q), append(c.Options.KSegments, k)
	}
}

// slopes returns a geometric sequence, as in Press et al. 2022.
func slopes(n int) []float32 {
	s := make([]float32, n)
	for i := range s {
		s[i] = float32(math.Exp2(-8 * float64(i+1) / float64(n)))
	}
	return s
}

// Pairs returns cases in which every way of every option occurs with every way of every other
// option, as few as a greedy search finds.
func Pairs() []Case { return pairsOf("pairs", 1000, options()) }

// cachePairs returns such cases of cacheOptions.
func cachePairs() []Case { return pairsOf("cache pairs", 2000, cacheOptions()) }

// q4Pairs returns the cases of cachePairs with keys and values of Q4, whose rows are contiguous, of
// multiples of 32 elements.
func q4Pairs() []Case {
	cases := cachePairs()
	for i := range cases {
		c := &cases[i]
		c.Name, c.Keys = fmt.Sprintf("q4 pairs %d", i), new(backend.Q4)
		c.Dim, c.ValueDim, c.Layout = (c.Dim+31)&^31, (c.ValueDim+31)&^31, c.Layout%Transposed
	}
	return cases
}

func pairsOf(name string, seed int, opts []option) []Case {
	type pair [4]int // option, way, option, way
	open := map[pair]bool{}
	for i, a := range opts {
		for j := range i {
			for x := range a.ways {
				for y := range opts[j].ways {
					open[pair{i, x, j, y}] = true
				}
			}
		}
	}
	rng := rand.New(rand.NewPCG(1, 2))
	var cases []Case
	for len(open) > 0 {
		// Take the best of some random candidates, each filled in a random order.
		var best []int
		most := -1
		for range 30 {
			ways := make([]int, len(opts))
			done := make([]bool, len(opts))
			met := 0
			for _, i := range rng.Perm(len(opts)) {
				gain := -1
				first := rng.IntN(len(opts[i].ways))
				for n := range opts[i].ways {
					x, g := (first+n)%len(opts[i].ways), 0
					for j := range opts {
						if done[j] && (open[pair{i, x, j, ways[j]}] || open[pair{j, ways[j], i, x}]) {
							g++
						}
					}
					if g > gain {
						gain, ways[i] = g, x
					}
				}
				done[i] = true
				met += gain
			}
			if met > most {
				most, best = met, ways
			}
		}
		if most == 0 { // what is left lies where random orders do not look
			left := slices.SortedFunc(maps.Keys(open), func(a, b pair) int { return slices.Compare(a[:], b[:]) })
			p := left[0]
			best[p[0]], best[p[2]] = p[1], p[3]
		}
		c := Case{Name: fmt.Sprintf("%s %d", name, len(cases)), Seed: uint64(seed + len(cases))}
		for i, o := range opts {
			o.ways[best[i]](&c)
			for j := range i {
				delete(open, pair{i, best[i], j, best[j]})
			}
		}
		cases = append(cases, c)
	}
	return cases
}

// testPairs runs the cases of Pairs, fused and by stages, and those of cachePairs and q4Pairs.
func testPairs(t *testing.T, dev *kernels.Device, h Harness, bits *digests) {
	for n, c := range slices.Concat(Pairs(), cachePairs(), q4Pairs()) {
		if !h.takes(n) {
			continue
		}
		t.Run(c.Name, func(t *testing.T) {
			needs(t, dev, c)
			testCase(t, dev, c, bits)
		})
	}
}
