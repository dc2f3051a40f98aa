package cpu

import (
	"math"
	"reflect"
	"testing"
	"unsafe"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/tile"
	"github.com/seed90331342/attn/cpu/internal/vec"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// pairTwins returns a copy of k, a table of vectors, whose kernels for pairs of bf16 are plain Go, for machines without
// a unit for them. Package vec states what each computes. The table takes head sizes from 24 on, and those of values
// that are multiples of 16.
func pairTwins(k *vec.Kernels) *vec.Kernels {
	twin, w, lanes := *k, k.Width, k.Lanes
	set := func(of reflect.Value, field string, f any) {
		v := of.FieldByName(field)
		reflect.NewAt(v.Type(), unsafe.Pointer(v.UnsafeAddr())).Elem().Set(reflect.ValueOf(f))
	}
	pair := func(lo, hi uint16) uint32 { return uint32(lo) | uint32(hi)<<16 }
	decode := func(p uint32, half int) float32 { return math.Float32frombits(p >> (16 * half) << 16) }
	round := func(dst *uint32, src *float32, pairs int) {
		d, s := unsafe.Slice(dst, pairs*w), unsafe.Slice(src, 2*pairs*w)
		for i := range d {
			at := i/w*2*w + i%w
			d[i] = pair(vec.BF16.Encode(s[at]), vec.BF16.Encode(s[at+w]))
		}
	}
	table := reflect.ValueOf(&twin).Elem()
	set(table, "pairUnit", "plain Go")
	set(table, "turn", func(dst *uint32, ldd int, src *uint16, lds, squares int) {
		for c := range 16 * squares {
			for r := range lanes {
				*at(dst, c*ldd/4+r) = *at((*uint32)(unsafe.Pointer(src)), r*lds/4+c)
			}
		}
	})
	set(table, "turnPairs", func(dst *uint32, ldd int, src *uint16, lds, squares int) {
		for c := range 16 * squares {
			for r := range vec.PairStep / 2 {
				*at(dst, c*ldd/4+r) = pair(*at(src, r*lds+c), *at(src, r*lds+lds/2+c))
			}
		}
	})
	set(table, "roundPairs", func(dst *uint32, src *float32, pairs, _ int) { round(dst, src, pairs) })
	of := table.FieldByName("tile")
	set(of, "pairScores", func(_ *byte, s *float32, k *uint16, ldk int, q *uint32, keys, _, steps int, scale float32, mx *float32) {
		for key := range keys {
			for lane := range w {
				sum := float32(0)
				for c := range vec.PairStep * steps {
					sum += float32(vec.BF16.Decode(*at(k, key*ldk/2+c)) * decode(*at(q, c/2*w+lane), c%2))
				}
				*at(s, key*w+lane) = scale * sum
				*at(mx, lane) = max(*at(mx, lane), scale*sum)
			}
		}
	})
	set(of, "pairValues", func(_ *byte, o *float32, v *uint16, ldv int, p *uint32, groups, steps int, alpha, _ *float32) {
		for c := range 16 * groups {
			for lane := range w {
				sum := float32(0)
				for key := range vec.PairStep * steps {
					sum += float32(vec.BF16.Decode(*at(v, c*ldv/2+key)) * decode(*at(p, key/2*w+lane), key%2))
				}
				*at(o, c*w+lane) = float32(*at(alpha, lane)**at(o, c*w+lane)) + sum
			}
		}
	})
	set(of, "pairWeights", func(s *float32, fours int, m, mx, l, alpha *float32, pairs *uint32) {
		k.Weights(unsafe.Slice(s, 4*fours*w), fours, unsafe.Slice(m, w), unsafe.Slice(mx, w), unsafe.Slice(l, w), unsafe.Slice(alpha, w))
		round(pairs, s, 2*fours)
	})
	return &twin
}

// at returns the element i after p.
func at[T any](p *T, i int) *T {
	return (*T)(unsafe.Add(unsafe.Pointer(p), i*int(unsafe.Sizeof(*p))))
}

// TestPairsInGo compares calls in low precision, whose products are those of pairs of bf16 in plain Go, with the same
// calls in float32. Weights are rounded to bf16, by at most u = 2^-8 of each, and finite values are at most 1. Scores of
// 40 products of at most 1, times 0.2, differ by less than 40·40·0.2·2^-24 = 2^-15. Values that some row does not see
// are NaN.
func TestPairsInGo(t *testing.T) {
	skipWithRace(t)
	k := vec.Tiers()[0]
	if k.OnlyKeyLanes || k.PairUnit() != "" {
		t.Skip("this machine has no vectors, or the unit itself")
	}
	be := open(t, Options{Threads: 2})
	twin := open(t, Options{Threads: 2})
	twin.kernels = pairTwins(k)
	const b, h, hkv, sq, sk, d, dv, hidden = 2, 4, 2, 70, 299, 40, 48, 170
	q, keys := random(t, 1, backend.Shape{b, h, sq, d}), random(t, 2, backend.Shape{b, hkv, sk, d})
	everything, causal := backend.Everything(), backend.Visibility{Left: backend.Unbounded, Offset: sk - sq}
	mask := flags(t, 3, backend.Shape{b, h, sq, sk})
	shown := must.Get(mask.Bools())(t)
	for i := range shown {
		shown[i] = shown[i] && i%sk != hidden
	}
	for _, c := range []struct {
		say string
		p   backend.Problem
		bad map[int]float32 // values of keys
	}{
		{"plain", backend.Problem{Visible: everything}, nil},
		{"an infinite value", backend.Problem{Visible: everything}, map[int]float32{sk - 3: float32(math.Inf(1))}},
		{"causal with the last key NaN", backend.Problem{Visible: causal}, map[int]float32{sk - 1: float32(math.NaN())}},
		{"a window", backend.Problem{Visible: backend.Visibility{Left: 50, Right: 3, Offset: 100}}, map[int]float32{150: float32(math.NaN())}},
		{"a mask", backend.Problem{Visible: everything, Mask: mask}, map[int]float32{hidden: float32(math.NaN())}},
		{"blocks", backend.Problem{Visible: everything, Blocks: flags(t, 4, backend.Shape{b, h, 2, 15}), BlockQ: 35, BlockK: 20}, nil},
		{"biases and softcap", backend.Problem{Visible: causal, Softcap: 3, Bias: random(t, 5, backend.Shape{b, h, sq, sk}), Slopes: []float32{0.1, 0, 0.2, 0.3}}, nil},
		{"dropout", backend.Problem{Visible: everything, Dropout: backend.Dropout{P: 0.3, Seed: 9}}, nil},
	} {
		c.p.Scale = 0.2
		values := random(t, 6, backend.Shape{b, hkv, sk, dv})
		data := floats(t, values)
		for i := range data {
			if y, bad := c.bad[i/dv%sk]; bad {
				data[i] = y
			}
		}
		run := func(be *Backend, low bool) backend.Tensor {
			call := backend.Call{Q: typed(t, q, backend.BF16), K: typed(t, keys, backend.BF16), V: typed(t, values, backend.BF16), Problem: c.p}
			call.LowPrecision = low
			if low != tile.Pairs(be.kernels, &call) {
				t.Fatalf("%s: in low precision %v, products of pairs %v", c.say, low, !low)
			}
			return attended(t, be, call)
		}
		got, want := floats(t, run(twin, true)), floats(t, run(be, false))
		bound := (0x1p-8 + 0x1p-14) * c.p.Dropout.Factor()
		for i, x := range want {
			y := got[i]
			if same := y == x || y != y && x != x; !same && !(max(y-x, x-y) <= bound) {
				t.Fatalf("%s: element %d is %v, in float32 %v", c.say, i, y, x)
			}
		}
	}
}
