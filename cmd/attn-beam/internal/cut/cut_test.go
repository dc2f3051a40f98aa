package cut

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// drawn is a drawn call with all options that a cut carries.
func drawn(t *rapid.T, most int) (d kernels.Dims, o kernels.Options) {
	d = kernels.Dims{Batch: rapid.IntRange(1, 2).Draw(t, "batch"), KVHeads: rapid.IntRange(1, 2).Draw(t, "kv heads"), Dim: 8, ValueDim: 4,
		SeqQ: rapid.IntRange(1, most).Draw(t, "rows"), SeqK: rapid.IntRange(1, most).Draw(t, "keys")}
	d.Heads = d.KVHeads * rapid.IntRange(1, 2).Draw(t, "group")
	maybe := func(what string) bool { return rapid.Bool().Draw(t, what) }
	o = kernels.Options{Causal: maybe("causal"), Offset: []int{rapid.IntRange(-most/2, most/2).Draw(t, "offset")},
		Align: rapid.SampledFrom([]kernels.Align{kernels.UpperLeft, kernels.LowerRight}).Draw(t, "align")}
	lengths := func(name string, lo, hi int) (n []int) {
		if maybe("with " + name) {
			n = rapid.SliceOfN(rapid.IntRange(lo, hi), d.Batch, d.Batch).Draw(t, name)
		}
		return n
	}
	o.KLen, o.Prefix = lengths("klen", 0, d.SeqK), lengths("prefix", 0, d.SeqK)
	if each := lengths("offsets", -3-most/2, 3+most/2); each != nil {
		o.Offset = each
	}
	if maybe("windowed") {
		side := rapid.SampledFrom([]int{0, 1, most / 4, kernels.Unbounded})
		o.Window = &kernels.Window{Left: side.Draw(t, "left"), Right: side.Draw(t, "right")}
	}
	if maybe("segmented") {
		for range d.Batch {
			at := rapid.IntRange(0, d.SeqK).Draw(t, "second segment")
			keys, rows := make([]int32, d.SeqK), make([]int32, d.SeqQ)
			for j := range keys {
				keys[j] = int32(min(1, (j+1)/(at+1)))
			}
			for i := range rows {
				rows[i] = int32(3 * i / d.SeqQ) // the rows of segment 2 see nothing
			}
			o.QSegments, o.KSegments = append(o.QSegments, rows), append(o.KSegments, keys)
		}
	}
	numbers := func(name string, n int) (x []float32) {
		if maybe("with " + name) {
			x = rapid.SliceOfN(rapid.Float32Range(-1, 1), n, n).Draw(t, name)
		}
		return x
	}
	o.ALiBi, o.Sinks = numbers("alibi", d.Heads*rapid.SampledFrom([]int{1, d.Batch}).Draw(t, "slopes")), numbers("sinks", d.Heads)
	if maybe("capped") {
		o.Softcap = 2
	}
	return d, o
}

// rule returns the keys that row i of batch b sees, by the parts of the whole call.
func rule(parts []kernels.Part, b, i int) (lo, hi int) {
	for _, p := range parts {
		if b >= p.Lo[0] && b < p.Hi[0] && i >= p.Lo[1] && i < p.Hi[1] {
			lo, hi = p.Visible.Range(b-p.Lo[0], i-p.Lo[1], p.Hi[2]-p.Lo[2])
			return lo + p.Lo[2], hi + p.Lo[2]
		}
	}
	return 0, 0
}

// TestEveryPairInOneUnit compares drawn cuts with the rule, pair by pair: a visible pair is
// in one unit, whose options show it to the call of the unit, and a hidden pair in none.
func TestEveryPairInOneUnit(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		d, o := drawn(t, 30)
		c := Config{Rows: rapid.IntRange(1, 12).Draw(t, "rows of a block"), Split: rapid.IntRange(1, 12).Draw(t, "keys of a split")}
		x := must.Get(New(d, o, c))(t)
		parts := must.Get(o.Parts(d))(t)
		type place struct{ b, h, i, j int }
		owners := map[place]int{}
		rows := map[[3]int]int{}
		var pairs int64
		for _, b := range x.Blocks {
			for i := b.Rows.Lo; i < b.Rows.Hi; i++ {
				for h := b.Heads.Lo; h < b.Heads.Hi; h++ {
					rows[[3]int{b.Batch, h, i}]++
				}
			}
			var sum int64
			for n, u := range b.Units() {
				if n > 0 && u.Split <= b.Units()[n-1].Split {
					t.Fatalf("unit %d of block %+v is %+v", n, b, u)
				}
				if u.Keys.Len() > c.Split || u.Keys.Lo < 0 || u.Keys.Hi > d.SeqK {
					t.Fatalf("unit %+v has more keys than a split of %d", u, c.Split)
				}
				own := u.Options(o, d.Heads)
				subs, err := own.Parts(kernels.Dims{Batch: 1, Heads: b.Heads.Len(), KVHeads: 1, SeqQ: b.Rows.Len(), SeqK: u.Keys.Len(), Dim: d.Dim, ValueDim: d.ValueDim})
				if err != nil || len(subs) != 1 {
					t.Fatalf("unit %+v, options %+v: %d parts, %v", u, own, len(subs), err)
				}
				var visible int64
				for i := range b.Rows.Len() {
					lo, hi := rule(subs, 0, i)
					for j := lo; j < hi; j++ {
						for h := b.Heads.Lo; h < b.Heads.Hi; h++ {
							owners[place{b.Batch, h, b.Rows.Lo + i, u.Keys.Lo + j}]++
							visible++
						}
					}
				}
				if u.Pairs != visible || visible == 0 {
					t.Fatalf("unit %+v counts %d pairs, its call sees %d", u, u.Pairs, visible)
				}
				sum += u.Pairs
			}
			if sum != b.Pairs {
				t.Fatalf("block %+v has units of %d pairs", b, sum)
			}
			pairs += b.Pairs
		}
		want := 0
		for b := range d.Batch {
			for i := range d.SeqQ {
				lo, hi := rule(parts, b, i)
				for h := range d.Heads {
					if rows[[3]int{b, h, i}] != 1 {
						t.Fatalf("row %d of head %d of batch %d is in %d blocks", i, h, b, rows[[3]int{b, h, i}])
					}
					for j := lo; j < hi; j++ {
						if want++; owners[place{b, h, i, j}] != 1 {
							t.Fatalf("row %d and key %d of head %d of batch %d are in %d units", i, j, h, b, owners[place{b, h, i, j}])
						}
					}
				}
			}
		}
		if len(owners) != want || x.Pairs != int64(want) || pairs != x.Pairs {
			t.Fatalf("%d pairs are in units, %d are visible; the cut counts %d, its blocks %d", len(owners), want, x.Pairs, pairs)
		}
	})
}

// tester are the methods that *testing.T and *rapid.T share.
type tester interface {
	Helper()
	Fatal(...any)
	Fatalf(string, ...any)
}

// operands returns q, k and v of lengths d with numbers from -2 to 2.
func operands(t tester, dev *kernels.Device, d kernels.Dims) (q, k, v kernels.Tensor) {
	tensor := func(seed float64, shape kernels.Shape) kernels.Tensor {
		data := make([]float32, shape[0]*shape[1]*shape[2]*shape[3])
		for i := range data {
			data[i] = float32(2 * math.Sin(seed*float64(i+1)))
		}
		return must.Get(dev.FromFloat32(context.Background(), kernels.F32, data, shape))(t)
	}
	return tensor(1.1, kernels.Shape{d.Batch, d.Heads, d.SeqQ, d.Dim}),
		tensor(1.7, kernels.Shape{d.Batch, d.KVHeads, d.SeqK, d.Dim}), tensor(1.9, kernels.Shape{d.Batch, d.KVHeads, d.SeqK, d.ValueDim})
}

// compare computes the units of a cut as calls, merges them in order and compares each block with the whole call.
func compare(t tester, d kernels.Dims, o kernels.Options, c Config, equal func(x, y float32) bool) {
	t.Helper()
	ctx := context.Background()
	dev := kernels.NewDevice(cpu.New(cpu.Options{}))
	defer dev.Close()
	q, k, v := operands(t, dev, d)
	x := must.Get(New(d, o, c))(t)
	o.LSE = true
	whole := must.Get(dev.Attention(ctx, q, k, v, o))(t)
	part := func(x kernels.Tensor, b int, heads, seq Span) kernels.Tensor {
		for axis, r := range []Span{{b, b + 1}, heads, seq} {
			x = must.Get(x.Slice(axis, r.Lo, r.Hi))(t)
		}
		return x
	}
	numbers := func(r kernels.Result) []float32 {
		out := must.Get(dev.ToFloat32(ctx, r.O))(t)
		lse := must.Get(dev.ToFloat32(ctx, r.LSE))(t)
		return append(out, lse...)
	}
	for _, b := range x.Blocks {
		var start []float32
		for _, lse := range b.NoKeys(o) {
			start = append(start, slices.Repeat([]float32{lse}, b.Rows.Len())...)
		}
		var sum kernels.Result
		sum.O = must.Get(dev.FromFloat32(ctx, kernels.F32, make([]float32, len(start)*d.ValueDim), kernels.Shape{1, b.Heads.Len(), b.Rows.Len(), d.ValueDim}))(t)
		sum.LSE = must.Get(dev.FromFloat32(ctx, kernels.F32, start, kernels.Shape{1, b.Heads.Len(), b.Rows.Len(), 1}))(t)
		kv := Span{b.KVHead, b.KVHead + 1}
		for _, u := range b.Units() {
			r := must.Get(dev.Attention(ctx, part(q, b.Batch, b.Heads, b.Rows), part(k, b.Batch, kv, u.Keys), part(v, b.Batch, kv, u.Keys), u.Options(o, d.Heads)))(t)
			if u.Split == 0 {
				sum = r
			} else {
				must.Do(t, dev.Merge(ctx, sum, r))
			}
		}
		want := numbers(kernels.Result{O: part(whole.O, b.Batch, b.Heads, b.Rows), LSE: part(whole.LSE, b.Batch, b.Heads, b.Rows)})
		for i, got := range numbers(sum) {
			if !equal(got, want[i]) {
				t.Fatalf("element %d of block %+v is %v, want %v (options %+v)", i, b, got, want[i], o)
			}
		}
	}
}

// TestMergedUnits: the merged units of drawn cuts are the whole call.
func TestMergedUnits(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		d, o := drawn(t, 20)
		c := Config{Rows: rapid.IntRange(1, 9).Draw(t, "rows of a block"), Split: rapid.IntRange(1, 9).Draw(t, "keys of a split")}
		compare(t, d, o, c, func(x, y float32) bool { return x == y || math.Abs(float64(x-y)) < 1e-5 })
	})
}

// TestBitsOfOneCall: with the usual splits, the merged units have the bits of one call.
func TestBitsOfOneCall(t *testing.T) {
	const rows, keys = 200, 2*cpu.ShardKeys + 1500
	sinks := []float32{0.5, -1, 2, float32(math.Inf(-1))}
	documents := make([]int32, keys)
	ofRows := make([]int32, rows)
	for j := range documents {
		documents[j] = int32(min(1, (j+1)/1000)) // the second one begins at key 999
	}
	for i := range ofRows {
		ofRows[i] = int32(i / 70)
	}
	for _, c := range []struct {
		what string
		o    kernels.Options
	}{
		{"all keys", kernels.Options{}},
		{"sinks and a cap", kernels.Options{Sinks: sinks, Softcap: 3}},
		{"some rows see the last shard, some do not", kernels.Options{Causal: true, Offset: []int{2*cpu.ShardKeys - 45}, ALiBi: []float32{0.001, 0.002, 0.003, 0.004}}},
		{"a window in the second shard, with sinks", kernels.Options{Window: &kernels.Window{Left: 3000, Right: 10}, Offset: []int{cpu.ShardKeys + 5000}, Sinks: sinks}},
		{"a window over the border of two shards", kernels.Options{Window: &kernels.Window{Left: 3000, Right: 10}, Offset: []int{cpu.ShardKeys + 1000}, Sinks: sinks}},
		{"segments that begin inside a shard", kernels.Options{QSegments: [][]int32{ofRows}, KSegments: [][]int32{documents}, Sinks: sinks}},
		{"padding and offsets", kernels.Options{Causal: true, KLen: []int{cpu.ShardKeys + 7}, Offset: []int{cpu.ShardKeys - 100}}},
		{"a prefix", kernels.Options{Causal: true, Prefix: []int{cpu.ShardKeys + 100}, Offset: []int{cpu.ShardKeys}}},
	} {
		t.Run(c.what, func(t *testing.T) {
			d := kernels.Dims{Batch: 1, Heads: 4, KVHeads: 2, SeqQ: rows, SeqK: keys, Dim: 8, ValueDim: 5}
			compare(t, d, c.o, Config{Rows: 64}, func(x, y float32) bool { return math.Float32bits(x) == math.Float32bits(y) })
		})
	}
}

// TestRowsOfABlock: the sizes that the rule chooses.
func TestRowsOfABlock(t *testing.T) {
	causal, window := kernels.Options{Causal: true}, kernels.Options{Causal: true, Window: &kernels.Window{Left: 4095, Right: kernels.Unbounded}}
	for _, c := range []struct {
		what          string
		keys, workers int
		o             kernels.Options
		rows, blocks  int
	}{
		{"much work: half of what a unit reads is rows", 1 << 20, 1, causal, 32768, 8 * 32},
		{"a unit is 1/32 of the work of a worker", 1 << 20, 1024, causal, 4096, 8 * 256},
		{"little work: reading keys must pay", 1 << 16, 4096, causal, 256, 8 * 256},
		{"a window: fewer keys, more rows", 1 << 20, 4, window, 32768, 8 * 32},
	} {
		d := kernels.Dims{Batch: 1, Heads: 8, KVHeads: 8, SeqQ: c.keys, SeqK: c.keys, Dim: 64, ValueDim: 64}
		x, err := New(d, c.o, Config{Workers: c.workers})
		if err != nil || x.Config.Rows != c.rows || len(x.Blocks) != c.blocks || x.Config.Split != cpu.ShardKeys {
			t.Errorf("%s: %+v with %d blocks, want %d rows and %d blocks (%v)", c.what, x.Config, len(x.Blocks), c.rows, c.blocks, err)
			continue
		}
		for n, b := range x.Blocks {
			if n > 0 && b.Pairs > x.Blocks[n-1].Pairs {
				t.Errorf("%s: block %d has %d pairs, the one before has %d", c.what, n, b.Pairs, x.Blocks[n-1].Pairs)
			}
		}
	}
}

// TestKeysOfAWindow: a unit reads the keys of its window, from a multiple of 1,024 on, and no others of its split.
func TestKeysOfAWindow(t *testing.T) {
	d := kernels.Dims{Batch: 1, Heads: 1, KVHeads: 1, SeqQ: 1 << 16, SeqK: 1 << 16, Dim: 64, ValueDim: 64}
	x := must.Get(New(d, kernels.Options{Window: &kernels.Window{Left: 1000, Right: 5}}, Config{Rows: 1024}))(t)
	var got []string
	for _, b := range x.Blocks {
		if b.Rows.Lo == 32768 || b.Rows.Lo == 31744 || b.Rows.Lo == 4096 {
			for _, u := range b.Units() {
				got = append(got, fmt.Sprint(b.Rows, u.Split, u.Keys))
			}
		}
	}
	slices.Sort(got)
	want := "{31744 32768} 0 {30720 32768}; {31744 32768} 1 {32768 32773}; {32768 33792} 0 {31744 32768}; {32768 33792} 1 {32768 33797}; {4096 5120} 0 {3072 5125}"
	if strings.Join(got, "; ") != want {
		t.Errorf("units\n%s, want\n%s", strings.Join(got, "; "), want)
	}
}

// TestRefused: options that partial results do not carry, and bad numbers, are named.
func TestRefused(t *testing.T) {
	mask := must.Get(kernels.HostBool([]bool{true}, kernels.Shape{1, 1, 1, 1}))(t)
	for _, c := range []struct {
		o    kernels.Options
		c    Config
		is   error
		want string
	}{
		{kernels.Options{Mask: mask}, Config{}, kernels.ErrUnsupported, "mask cannot be divided over machines"},
		{kernels.Options{Bias: mask}, Config{}, kernels.ErrUnsupported, "bias cannot"},
		{kernels.Options{ScoreMod: &kernels.ScoreMod{WGSL: "return score;"}}, Config{}, kernels.ErrUnsupported, "a score mod, which is a function of this program, cannot"},
		{kernels.Options{KeyIndices: new(kernels.KeyIndices)}, Config{}, kernels.ErrUnsupported, "lists of keys (KeyIndices) cannot"},
		{kernels.Options{RelativeBias: mask}, Config{}, kernels.ErrUnsupported, "relative bias cannot"},
		{kernels.Options{BlockMask: mask}, Config{}, kernels.ErrUnsupported, "block mask cannot"},
		{kernels.Options{Dropout: kernels.Dropout{P: 0.5}}, Config{}, kernels.ErrUnsupported, "dropout cannot"},
		{kernels.Options{LowPrecision: true}, Config{}, kernels.ErrUnsupported, "low precision cannot"},
		{kernels.Options{Pages: &kernels.Pages{}}, Config{}, kernels.ErrUnsupported, "pages cannot"},
		{kernels.Options{CuQ: []int{0, 1}}, Config{}, kernels.ErrUnsupported, "packed sequences (cuQ, cuK) cannot"},
		{kernels.Options{Weights: true}, Config{}, kernels.ErrUnsupported, "weights cannot"},
		{kernels.Options{KLen: []int{9}}, Config{}, kernels.ErrOption, "klen[0] is 9, there are 4 keys"},
		{kernels.Options{}, Config{Rows: -1}, kernels.ErrOption, "rows of a block: -1 is negative"},
		{kernels.Options{}, Config{Split: -1}, kernels.ErrOption, "keys of a split: -1 is negative"},
		{kernels.Options{}, Config{Workers: -1}, kernels.ErrOption, "workers: -1 is negative"},
	} {
		_, err := New(kernels.Dims{Batch: 1, Heads: 1, KVHeads: 1, SeqQ: 4, SeqK: 4, Dim: 1, ValueDim: 1}, c.o, c.c)
		if !errors.Is(err, c.is) || !strings.Contains(fmt.Sprint(err), c.want) {
			t.Errorf("error %v, want %v with %q", err, c.is, c.want)
		}
	}
}

// TestTooManyBlocks: a cut that does not fit in memory is an error.
func TestTooManyBlocks(t *testing.T) {
	d := kernels.Dims{Batch: 1 << 20, Heads: 64, KVHeads: 64, SeqQ: 1 << 20, SeqK: 1 << 20, Dim: 64, ValueDim: 64}
	must.Fail(t, "no memory", must.Err(New(d, kernels.Options{Causal: true}, Config{Rows: 1})), kernels.ErrMemory, "blocks of 1 rows")
}

// TestEmpty: rows without keys are fully masked blocks; a call without rows has no blocks.
func TestEmpty(t *testing.T) {
	d := kernels.Dims{Batch: 1, Heads: 2, KVHeads: 2, SeqQ: 4, Dim: 1, ValueDim: 1}
	x, err := New(d, kernels.Options{Causal: true}, Config{})
	if err != nil || len(x.Blocks) != 2 || x.Pairs != 0 || len(x.Blocks[0].Units()) != 0 {
		t.Errorf("no keys: %+v, %v", x, err)
	}
	d.SeqQ, d.SeqK = 0, 4
	if x, err = New(d, kernels.Options{}, Config{}); err != nil || len(x.Blocks) != 0 {
		t.Errorf("no rows: %+v, %v", x, err)
	}
}
