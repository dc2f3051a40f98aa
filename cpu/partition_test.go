package cpu

import (
	"math"
	"strings"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/vec"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// TestPartition shows which partitions the shapes lead to, that a partition covers a
// call once, and that a plan describes the one that is executed.
func TestPartition(t *testing.T) {
	wide, gonum := &vec.Kernels{Tier: "wide", Lanes: 16, Width: 64}, vec.Tiers()[len(vec.Tiers())-1]
	for _, c := range []struct {
		say                  string
		k                    *vec.Kernels
		h, hkv, sq, sk, d    int
		threads              int
		tasks, tiles, chunks int
		keyLanes             bool
	}{
		{"a long head", wide, 1, 1, 65536, 65536, 64, 2, 128, 8, 1, false},
		{"a short head still fills the threads", wide, 1, 1, 256, 256, 64, 2, 4, 1, 1, false},
		{"wide heads leave room for K and V", wide, 1, 1, 4096, 4096, 512, 1, 64, 1, 1, false},
		{"few rows and many keys", wide, 1, 1, 64, 65536, 64, 2, 8, 1, 8, false},
		{"decoding", wide, 8, 8, 1, 32768, 128, 2, 32, 1, 4, true},
		{"decoding with one kv head", wide, 8, 1, 1, 32768, 128, 2, 32, 1, 32, true},
		{"rows of several heads in a tile", wide, 8, 1, 20, 100, 64, 1, 3, 1, 1, false},
		{"a long head, gonum", gonum, 1, 1, 65536, 65536, 64, 2, 128, 8, 1, true},
		{"decoding, gonum", gonum, 8, 2, 1, 1000, 64, 2, 2, 1, 1, true},
		{"decoding many keys, gonum", gonum, 8, 2, 1, 32768, 64, 2, 32, 1, 16, true},
		{"one row of one head, gonum", gonum, 1, 1, 1, 1000, 64, 4, 1, 1, 1, true},
		{"a wide head, gonum", gonum, 1, 1, 4096, 4096, 2048, 1, 64, 1, 1, true},
	} {
		meta := func(heads, seq int) backend.Tensor {
			return must.Get(backend.Meta(backend.F32, backend.Shape{1, heads, seq, c.d}))(t)
		}
		call := &backend.Call{Q: meta(c.h, c.sq), K: meta(c.hkv, c.sk), V: meta(c.hkv, c.sk), O: meta(c.h, c.sq), Problem: backend.Problem{Visible: backend.Everything()}}
		x := newPartition(c.k, call, c.threads)
		if x.tasks != c.tasks || x.chunkTiles != c.tiles || x.tileChunks != c.chunks || x.layout.KeyLanes != c.keyLanes || x.threads != min(c.threads, c.tasks) {
			t.Errorf("%s: %d tasks of %d tiles, %d chunks of keys, keys as lanes %v, %d threads; want %d, %d, %d, %v, %d",
				c.say, x.tasks, x.chunkTiles, x.tileChunks, x.layout.KeyLanes, x.threads, c.tasks, c.tiles, c.chunks, c.keyLanes, min(c.threads, c.tasks))
		}
		covered := 0
		for i := range x.tasks {
			p := x.chunk(i)
			covered += (p.End - p.First) * (p.Keys.Hi - p.Keys.Lo)
		}
		if covered != c.hkv*x.layout.Tiles*c.sk {
			t.Errorf("%s: tasks cover %d of %d tiles times keys", c.say, covered, c.hkv*x.layout.Tiles*c.sk)
		}
		for _, tier := range Tiers() {
			be := open(t, Options{Threads: c.threads, Tier: tier})
			p := must.Get(be.Plan(t.Context(), call))(t)
			x := newPartition(be.kernels, call, c.threads)
			if p.Chunks != x.tasks || p.Cut != x.String() || p.Scratch != x.scratchBytes() || p.Pairs != int64(c.h)*int64(c.sq)*int64(c.sk) || !strings.Contains(p.Path, tier) {
				t.Errorf("%s: plan %+v is not of %v", c.say, p, &x)
			}
			if c.d <= 512 && p.Scratch > 8*mib*int64(c.threads) {
				t.Errorf("%s: %d bytes of scratch", c.say, p.Scratch)
			}
		}
	}
}

// TestRowLSE shows how a row is finished with a sink, however far apart the two are.
func TestRowLSE(t *testing.T) {
	const big = backend.MaxBias
	for _, c := range []struct {
		say          string
		m            float32
		l            float64
		sink         float32
		lse, inverse float64
	}{
		{"no sink", 2, 4, vec.NegInf, 4 * math.Ln2, 0.25},
		{"nothing seen, no sink", vec.NoScore, 0, vec.NegInf, math.Inf(-1), 0},
		{"nothing seen", vec.NoScore, 0, -7, -7, 0},
		{"a sink as large as the scores", 0, 3, 0, 2 * math.Ln2, 0.25},
		{"a sink above the scores", 0, 1, 10, 10 + math.Log1p(math.Exp(-10)), math.Exp(-10) / (1 + math.Exp(-10))},
		{"a sink below the scores", 10 * math.Log2E, 1, 0, 10 + math.Log1p(math.Exp(-10)), 1 / (1 + math.Exp(-10))},
		{"a sink far above", 0, 1, big, big, 0},
		{"a sink far below", 0, 2, -big, math.Ln2, 0.5},
		{"a score far above", big, 1, -big, big * math.Ln2, 1},
	} {
		lse, inv := vec.RowLSE(c.m, c.l, c.sink)
		near(t, c.say+", lse", []float32{lse}, []float32{float32(c.lse)})
		near(t, c.say+", inverse", []float32{inv}, []float32{float32(c.inverse)})
	}
}
