package gpu

import (
	"context"
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels/kernelstest"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// lowered are limits far below any adapter's. Each makes the tests' problems be cut in the way that its name describes.
// A tile of 32 keys of 256 channels takes 32 KiB; a binding must hold that and its alignment.
var lowered = []way{
	{name: "bindings of 36 KiB cut batches, heads, queries and keys", cuts: true, opt: Options{Limits: gputypes.Limits{MaxStorageBufferBindingSize: 36 << 10}}},
	{name: "three workgroups a dimension cut grids", cuts: true, opt: Options{Limits: gputypes.Limits{MaxComputeWorkgroupsPerDimension: 3}}},
	{name: "submissions of 100,000 operations cut keys and ranges", cuts: true, opt: Options{MaxWork: 1e5}},
	{name: "buffers of 64 KiB cut tensors", cuts: true, opt: Options{Limits: gputypes.Limits{MaxBufferSize: 64 << 10}}},
	{name: "a device without room for a tensor streams", cuts: true, opt: Options{MemoryBytes: 540 << 10}},
	{name: "an alignment of 1 KiB moves windows", cuts: true, opt: Options{Limits: gputypes.Limits{MinStorageBufferOffsetAlignment: 1 << 10, MaxStorageBufferBindingSize: 36 << 10}}},
	{name: "a budget that no chunk keeps cuts keys by tiles", cuts: true, opt: Options{Budget: time.Nanosecond}},
	all,
}

var all = way{name: "all of it, and nothing pooled", cuts: true, opt: Options{PoolBytes: -1, MaxWork: 1e6, Limits: gputypes.Limits{
	MinStorageBufferOffsetAlignment: 512, MaxStorageBufferBindingSize: 36 << 10, MaxComputeWorkgroupsPerDimension: 5, MaxBufferSize: 64 << 20}}}

// someLowered returns lowered: with -short every other one, beginning with the first or the second.
func someLowered(from int) (list []way) {
	for i, l := range lowered {
		if !testing.Short() || i%2 == from {
			list = append(list, l)
		}
	}
	return list
}

// sameOn runs on a device of each way. The results have the bits of those on a device without limits.
func sameOn(t *testing.T, what string, ways []way, run func(b *Backend, w way) [][]float32) {
	t.Helper()
	var want [][]float32
	for _, w := range append([]way{{}}, ways...) {
		b := open(t, w.opt)
		got := run(b, w)
		check(t, b.Close()) // before the next one is opened
		if want == nil {
			want = got
		}
		for i := range want {
			sameRow(t, fmt.Sprintf("%s, %s: result %d", what, w.name, i), got[i], want[i])
		}
	}
}

// TestConformanceOfCuts runs the suite with limits that cut everything.
func TestConformanceOfCuts(t *testing.T) {
	conform(t, "TestSameBits compares calls that are cut with whole ones", all.opt, nil, kernelstest.Harness{
		Extent: kernelstest.Extent{LargeHeads: backend.ErrUnsupported, PairsFrom: 2}})
}

func host(t testing.TB, shape backend.Shape, f func(i int) float32) backend.Tensor {
	t.Helper()
	data := make([]float32, shape.Elements())
	for i := range data {
		data[i] = f(i)
	}
	return must.Get(backend.Host(data, backend.F32, shape))(t)
}

func upload(t testing.TB, b *Backend, h backend.Tensor) backend.Tensor {
	t.Helper()
	d := must.Get(b.Upload(context.Background(), h))(t)
	t.Cleanup(d.Release)
	return d
}

func alloc(t testing.TB, b *Backend, dtype backend.DType, shape backend.Shape) backend.Tensor {
	t.Helper()
	d := must.Get(b.Alloc(context.Background(), dtype, shape))(t)
	t.Cleanup(d.Release)
	return d
}

// floats returns the elements of a contiguous tensor as float32.
func floats(t testing.TB, b *Backend, d backend.Tensor) []float32 {
	t.Helper()
	if d.DType() != backend.F32 {
		d = copied(t, b, backend.F32, d)
	}
	data := make([]float32, d.Shape().Elements())
	h := must.Get(backend.Host(data, backend.F32, d.Shape()))(t)
	check(t, b.Download(context.Background(), h, d))
	return data
}

// tensor uploads the numbers of f as a type.
func tensor(t testing.TB, b *Backend, dtype backend.DType, shape backend.Shape, f func(i int) float32) backend.Tensor {
	t.Helper()
	x := upload(t, b, host(t, shape, f))
	if dtype == backend.F32 {
		return x
	}
	return copied(t, b, dtype, x)
}

// copied returns x converted to another type on the device.
func copied(t testing.TB, b *Backend, dtype backend.DType, x backend.Tensor) backend.Tensor {
	t.Helper()
	y := alloc(t, b, dtype, x.Shape())
	check(t, b.Copy(context.Background(), []backend.Tensor{y}, []backend.Tensor{x}))
	return y
}

func bools(t testing.TB, b *Backend, shape backend.Shape, f func(i int) bool) backend.Tensor {
	t.Helper()
	data := make([]bool, shape.Elements())
	for i := range data {
		data[i] = f(i)
	}
	h := must.Get(backend.Host(data, backend.Bool, shape))(t)
	return upload(t, b, h)
}

// wave is data without a pattern that could hide a cut.
func wave(i int) float32 { return float32(math.Sin(float64(i)*1.7) + math.Cos(float64(i)*0.31)) }

// problem returns a call with every option.
func problem(t testing.TB, b *Backend) *backend.Call {
	m := must.Get(bools(t, b, backend.Shape{1, 1, 70, 90}, func(i int) bool { return i%5 != 0 }).Broadcast(backend.Shape{2, 4, 70, 90}))(t)
	bias := must.Get(input(t, b, backend.Shape{1, 4, 70, 90}).Broadcast(backend.Shape{2, 4, 70, 90}))(t)
	c := callOf(t, b, input(t, b, backend.Shape{2, 4, 70, 40}), input(t, b, backend.Shape{2, 2, 90, 40}), input(t, b, backend.Shape{2, 2, 90, 33}))
	c.Problem = backend.Problem{Scale: 0.2, Softcap: 5, Mask: m, Bias: bias,
		Visible: backend.Visibility{Offset: 20, Left: 60, Right: 7, KLen: []int{90, 77}},
		Slopes:  []float32{0.1, 0.2, 0, -0.3, 0.4, 0.5, 0.6, 0.7}, Sinks: []float32{1, -2, 3, 0},
		Dropout: backend.Dropout{P: 0.3, Seed: 9, First: [4]int{1, 2, 3, 4}}}
	return c
}

// distant returns problem with a block mask and a relative bias instead of mask and bias.
func distant(t testing.TB, b *Backend) *backend.Call {
	c := problem(t, b)
	c.Mask, c.Bias = backend.Tensor{}, backend.Tensor{}
	c.Blocks, c.BlockQ, c.BlockK = blocksOf(t, b, 10, 8), 7, 12
	c.Relative = input(t, b, backend.Shape{1, 4, 1, 70 + 90 - 1})
	return c
}

// TestManyKeys exceeds what one loop of a software driver may count, and has more pages than a
// table holds that can be bound: with q = 0 and v = 1 each row is 1 and its log-sum-exp is log Sk.
func TestManyKeys(t *testing.T) {
	const d = 8
	one := func(int) float32 { return 1 }
	for _, x := range []struct {
		opt          Options
		keys, stored int // in pages of one key, if fewer are stored
	}{
		{Options{}, 400_000, 400_000},
		{Options{Limits: gputypes.Limits{MaxStorageBufferBindingSize: 36 << 10}}, 10_000, 1},
	} {
		b := open(t, x.opt)
		k := upload(t, b, host(t, backend.Shape{1, 1, x.stored, d}, one))
		c := callOf(t, b, upload(t, b, host(t, backend.Shape{1, 1, 1, d}, func(int) float32 { return 0 })), k, k)
		if x.stored < x.keys {
			c.Pages = &backend.Pages{Table: [][]int32{make([]int32, x.keys)}, Keys: x.keys}
		}
		check(t, b.Attention(context.Background(), c))
		want := math.Log(float64(x.keys))
		if lse := floats(t, b, c.LSE)[0]; !(math.Abs(float64(lse)-want) <= 1e-5) {
			t.Errorf("lse is %v, should be log %d = %v", lse, x.keys, want)
		}
		for i, o := range floats(t, b, c.O) {
			if !(math.Abs(float64(o)-1) <= 1e-5) {
				t.Errorf("o[%d] of %d keys is %v, should be 1", i, x.keys, o)
			}
		}
	}
}
