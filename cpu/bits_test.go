package cpu

import (
	"fmt"
	"math"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/tile"
	"github.com/seed90331342/attn/cpu/internal/vec"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// TestThreads shows that every operation yields the same bits on any number of
// threads, and for any division into tasks.
func TestThreads(t *testing.T) {
	const b, h, sq, sk, dv = 2, 4, 333, 300, 21
	eachTier(t, func(t *testing.T, tier string) {
		var want []stage
		for _, threads := range []int{1, 2, 3, 7} {
			be := open(t, Options{Threads: threads, Tier: tier})
			all := stages(t, be)
			for _, s := range all {
				must.Do(t, s.do(t.Context()))
			}
			p := everyOption(t, b, h, sq, sk, backend.Visibility{Offset: -20, Left: 200, Right: 7, KLen: []int{sk, 150}})
			c := backend.Call{Q: random(t, 1, backend.Shape{b, h, sq, 24}), K: random(t, 2, backend.Shape{b, 2, sk, 24}), V: random(t, 3, backend.Shape{b, 2, sk, dv}), Problem: p}
			weights, lse := alloc(t, backend.Shape{b, h, sq, sk}), alloc(t, backend.Shape{b, h, sq, 1})
			must.Do(t, be.QK(t.Context(), weights, c.Q, c.K))
			must.Do(t, be.Softmax(t.Context(), weights, lse, &p))
			all = append(all, stage{name: "every option", out: []backend.Tensor{attended(t, be, c), weights, lse}})
			if want == nil {
				want = all
			}
			for n, s := range all {
				for i, out := range s.out {
					sameBits(t, fmt.Sprintf("output %d of %s on %d threads", i, s.name, threads), out, want[n].out[i])
				}
			}
		}
	})
}

// TestRowsAlone shows that rows of a window have the bits of each row alone. Those of a causal prefill also have the bits
// of decoding, with the later keys absent, hidden by length, or hidden by the window. Hidden keys are NaN.
func TestRowsAlone(t *testing.T) { eachTier(t, testRowsAlone) }

func testRowsAlone(t *testing.T, tier string) {
	const s, d = 300, 22
	shape, be := backend.Shape{1, 1, s, d}, open(t, Options{Tier: tier})
	q, k, v := random(t, 1, shape), random(t, 2, shape), random(t, 3, shape)
	type alone struct {
		say     string
		k, v    backend.Tensor
		visible backend.Visibility
	}
	compare := func(visible backend.Visibility, ways func(i int) []alone) {
		want := attended(t, be, backend.Call{Q: q, K: k, V: v, Problem: backend.Problem{Scale: 1, Visible: visible}})
		for i := range s {
			moved := visible
			moved.Offset += i
			for _, x := range append(ways(i), alone{"alone", k, v, moved}) {
				got := attended(t, be, backend.Call{Q: cut(t, q, backend.Seq, i, i+1), K: x.k, V: x.v, Problem: backend.Problem{Scale: 1, Visible: x.visible}})
				sameBits(t, fmt.Sprintf("%+v, row %d, %s", visible, i, x.say), got, cut(t, want, backend.Seq, i, i+1))
			}
		}
	}
	for _, visible := range []backend.Visibility{{Left: 70, Right: 9}, {Left: 10, Right: 2}, {Left: 150, Offset: -37}, {Left: backend.Unbounded, Right: 5, Offset: 31}, {Right: backend.Unbounded}} {
		compare(visible, func(int) []alone { return nil })
	}
	kNaN, vNaN := alloc(t, shape), alloc(t, shape)
	tile.Fill(floats(t, kNaN), float32(math.NaN()))
	tile.Fill(floats(t, vNaN), float32(math.NaN()))
	compare(backend.Visibility{Left: backend.Unbounded}, func(i int) []alone {
		copy(floats(t, kNaN)[i*d:][:d], floats(t, k)[i*d:])
		copy(floats(t, vNaN)[i*d:][:d], floats(t, v)[i*d:])
		everything, length := backend.Everything(), backend.Everything()
		length.KLen = []int{i + 1}
		return []alone{
			{"keys absent", cut(t, k, backend.Seq, 0, i+1), cut(t, v, backend.Seq, 0, i+1), everything},
			{"keys beyond the length", kNaN, vNaN, length},
			{"keys beyond the window", kNaN, vNaN, backend.Visibility{Offset: i, Left: backend.Unbounded}},
		}
	})
}

// TestAnyCompany shows that the bits of a row depend on nothing but the row: not on the numbers of rows, heads and
// threads, its lane in a tile, the layout of the tile, nor the goroutines that share its keys.
func TestAnyCompany(t *testing.T) {
	skipWithRace(t)
	eachTier(t, testAnyCompany)
}

func testAnyCompany(t *testing.T, tier string) {
	const sq, sk, dim, dv, share = 150, 2053, 40, 37, 3 // a last chunk of 5 keys
	causal := backend.Visibility{Offset: 900, Left: backend.Unbounded}
	options := []backend.Problem{
		{Scale: 1, Visible: backend.Everything()},
		{Scale: 1, Softcap: 3, Visible: backend.Visibility{Offset: 2300, Left: 1500}, Sinks: []float32{3, -5, vec.NegInf}},
		{Scale: 1, Visible: causal, Bias: random(t, 4, backend.Shape{1, 1, 1, sk})},
		{Scale: 1, Visible: backend.Everything(), Bias: random(t, 4, backend.Shape{1, 1, 1, sk})},
		{Scale: 1, Visible: causal, Slopes: []float32{0.1, 0.01, 0.5}},
		{Scale: 1, Visible: causal, Slopes: []float32{0.1, 0.01, 0.5}, Relative: random(t, 5, backend.Shape{1, share, 1, sq + sk - 1})},
		{Scale: 1, Visible: causal, Bias: random(t, 4, backend.Shape{1, 1, sq, sk}), Relative: random(t, 5, backend.Shape{1, share, 1, sq + sk - 1})},
		{Scale: 1, Visible: backend.Everything(), Mask: flags(t, 6, backend.Shape{1, share, sq, sk}), Dropout: backend.Dropout{P: 0.4, Seed: 7}},
		{Scale: 1, Visible: causal, Blocks: flags(t, 6, backend.Shape{1, share, sq, tile.CeilDiv(sk, 50)}), BlockQ: 1, BlockK: 50, Dropout: backend.Dropout{P: 0.4, Seed: 7, First: [4]int{0, 0, 4}}},
		// Gaps in key blocks, which tiles of one head pass over.
		{Scale: 1, Visible: causal, Blocks: flags(t, 6, backend.Shape{1, share, 1, tile.CeilDiv(sk, 20)}), BlockQ: 1, BlockK: 20, Slopes: []float32{0.1, 0.01, 0.5}, Dropout: backend.Dropout{P: 0.4, Seed: 7}},
		{Scale: 1, Visible: causal, Blocks: flags(t, 7, backend.Shape{1, share, 1, tile.CeilDiv(sk, 10)}), BlockQ: 1, BlockK: 10, Bias: random(t, 4, backend.Shape{1, 1, sq, sk}), Mask: flags(t, 6, backend.Shape{1, share, sq, sk})},
	}
	for _, dtype := range []backend.DType{backend.F32, backend.BF16} {
		q := typed(t, random(t, 1, backend.Shape{1, share, sq, dim}), dtype)
		k, v := typed(t, random(t, 2, backend.Shape{1, 1, sk, dim}), dtype), typed(t, random(t, 3, backend.Shape{1, 1, sk, dv}), dtype)
		for n, p := range options {
			if n > 2 && dtype != backend.F32 {
				continue // the type of the keys does not matter to these
			}
			attend := func(threads, from, to int) (o, lse backend.Tensor) {
				rows := cut(t, q, backend.Seq, from, to)
				c := backend.Call{Q: rows, K: k, V: v, O: alloc(t, backend.Shape{1, share, to - from, dv}), LSE: alloc(t, backend.Shape{1, share, to - from, 1}), Problem: p}
				c.Visible.Offset += from
				c.Dropout.First[backend.Seq] += from
				// narrow cuts a tensor that is there along an axis and broadcasts it.
				narrow := func(x *backend.Tensor, axis, from, to int) {
					if x.IsZero() {
						return
					}
					if x.Shape()[axis] > 1 {
						*x = cut(t, *x, axis, from, to)
					}
					shape := backend.Shape{1, share, c.Q.Shape()[backend.Seq], x.Shape()[backend.Dim]}
					if axis == backend.Dim {
						shape[backend.Seq] = 1
					}
					*x = broadcast(t, *x, shape)
				}
				narrow(&c.Bias, backend.Seq, from, to)
				narrow(&c.Mask, backend.Seq, from, to)
				narrow(&c.Blocks, backend.Seq, from, to)
				narrow(&c.Relative, backend.Dim, sq-to, sq-from+sk-1)
				be := open(t, Options{Tier: tier, Threads: threads})
				must.Do(t, be.Attention(t.Context(), &c))
				return c.O, c.LSE
			}
			wantO, wantLSE := attend(1, 0, 150)
			for _, part := range []struct{ threads, from, to int }{
				{2, 0, 150}, {7, 0, 150}, {1, 0, 1}, {7, 17, 18}, {2, 3, 9}, {1, 4, 6}, {3, 20, 41}, {1, 20, 41}, {7, 40, 104}, {1, 63, 130}, {3, 149, 150},
			} {
				o, lse := attend(part.threads, part.from, part.to)
				for _, x := range [][2]backend.Tensor{{o, wantO}, {lse, wantLSE}} {
					for h := range share {
						got, want := rowsOfHead(t, x[0], h, 0, part.to-part.from), rowsOfHead(t, x[1], h, part.from, part.to)
						for i := range want {
							if math.Float32bits(got[i]) != math.Float32bits(want[i]) {
								t.Fatalf("%v, %+v, rows %d to %d on %d threads: element %d of head %d is %v, among all rows it is %v",
									dtype, p.Visible, part.from, part.to, part.threads, i, h, got[i], want[i])
							}
						}
					}
				}
			}
		}
	}
}

// TestShards shows that a call over many keys has the bits of calls over its shards, or over its first two and the
// last, whose results are merged in order.
func TestShards(t *testing.T) { eachTier(t, testShards) }

func testShards(t *testing.T, tier string) {
	const h, hkv, keys, d, dv = 4, 2, 2*ShardKeys + 1500, 8, 5
	k, v := random(t, 2, backend.Shape{1, hkv, keys, d}), random(t, 3, backend.Shape{1, hkv, keys, dv})
	causal := func(rows, left int) backend.Visibility {
		return backend.Visibility{Offset: keys - rows, Left: left, Right: 0}
	}
	straddling := causal(90, backend.Unbounded)
	straddling.Offset = 2*ShardKeys - 45 // some rows see the last shard, some do not
	all := backend.Everything()
	all.KLen = []int{keys - 7}
	slopes, sinks := []float32{0.1, 0.002, 0, 0.4}, []float32{1, vec.NegInf, 0, 3}
	for i, c := range []struct {
		name string
		rows int
		backend.Problem
	}{
		{"decode", 1, backend.Problem{Visible: all}},
		{"decode, sinks", 3, backend.Problem{Visible: all, Sinks: sinks}},
		{"prefill, causal", 90, backend.Problem{Visible: straddling, Sinks: sinks, Slopes: slopes}},
		{"prefill, softcap", 20, backend.Problem{Visible: causal(20, backend.Unbounded), Softcap: 3, Slopes: slopes}},
		{"window in the second shard", 70, backend.Problem{Visible: causal(70, ShardKeys), Sinks: sinks}},
		{"window in the last shard", 70, backend.Problem{Visible: causal(70, 300), Sinks: sinks}},
		{"large scores", 5, backend.Problem{Visible: all, Slopes: []float32{30, -30, 1, 0.01}}},
		{"low precision", 35, backend.Problem{Visible: all, LowPrecision: true}},
	} {
		if testing.Short() && i%3 > 0 && tier == tierGonum { // whose loops are slow
			continue
		}
		c.Scale = 0.3
		q, k, v := random(t, 1, backend.Shape{1, h, c.rows, d}), k, v
		if c.LowPrecision {
			q, k, v = typed(t, q, backend.BF16), typed(t, k, backend.BF16), typed(t, v, backend.BF16)
		}
		o, lse := backend.Shape{1, h, c.rows, dv}, backend.Shape{1, h, c.rows, 1}
		one := open(t, Options{Threads: 1, Tier: tier})
		merged := func(cuts ...int) (wantO, wantLSE backend.Tensor) {
			wantO, wantLSE = alloc(t, o), alloc(t, lse)
			for n, lo := range cuts[:len(cuts)-1] {
				hi := cuts[n+1]
				part := backend.Call{Q: q, K: cut(t, k, backend.Seq, lo, hi), V: cut(t, v, backend.Seq, lo, hi), O: alloc(t, o), LSE: alloc(t, lse), Problem: c.Problem}
				part.Visible.Offset -= lo
				if part.Visible.KLen != nil {
					part.Visible.KLen = []int{max(0, min(c.Visible.KLen[0]-lo, hi-lo))}
				}
				if lo == 0 {
					part.O, part.LSE = wantO, wantLSE
				} else {
					part.Sinks = nil
				}
				must.Do(t, one.Attention(t.Context(), &part))
				if lo > 0 {
					must.Do(t, one.Merge(t.Context(), wantO, wantLSE, part.O, part.LSE))
				}
			}
			return wantO, wantLSE
		}
		wantO, wantLSE := merged(0, ShardKeys, 2*ShardKeys, keys)
		twoO, twoLSE := merged(0, 2*ShardKeys, keys)
		sameBits(t, c.name+", two shards in the first part: o", twoO, wantO)
		sameBits(t, c.name+", two shards in the first part: lse", twoLSE, wantLSE)
		for _, threads := range []int{1, 7} {
			whole := backend.Call{Q: q, K: k, V: v, O: alloc(t, o), LSE: alloc(t, lse), Problem: c.Problem}
			must.Do(t, open(t, Options{Threads: threads, Tier: tier}).Attention(t.Context(), &whole))
			sameBits(t, fmt.Sprintf("%s, %d threads: o", c.name, threads), whole.O, wantO)
			sameBits(t, fmt.Sprintf("%s, %d threads: lse", c.name, threads), whole.LSE, wantLSE)
		}
	}
}
