package gpu

import (
	"context"
	"fmt"
	"math"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/cut"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// attend returns the output and log-sum-exp of q over what c has.
func attend(t testing.TB, b *Backend, c backend.Call) (o, lse []float32) {
	t.Helper()
	d := c.Dims()
	c.O = alloc(t, b, backend.F32, backend.Shape{d.Batch, d.Heads, d.SeqQ, d.ValueDim})
	c.LSE = alloc(t, b, backend.F32, backend.Shape{d.Batch, d.Heads, d.SeqQ, 1})
	check(t, b.Attention(context.Background(), &c))
	return floats(t, b, c.O), floats(t, b, c.LSE)
}

// numbers returns the elements of x as float32, decoded on the host: the device's conversion is under test.
func numbers(t testing.TB, b *Backend, x backend.Tensor) []float32 {
	t.Helper()
	return must.Get(kernels.NewDevice(b).ToFloat32(context.Background(), x))(t)
}

// TestCopy copies between every two types, from tensors with different layouts and broadcasts to parts of a larger
// tensor whose other elements must not change. The results are those of rounding on the host.
func TestCopy(t *testing.T) {
	types := []backend.DType{backend.F32, backend.F16, backend.BF16, backend.Q8, backend.Q4, backend.F8}
	for _, opt := range []Options{{}, all.opt, {MemoryBytes: 64 << 10}} {
		b := open(t, opt)
		for _, from := range types {
			for _, to := range types {
				for _, x := range []struct {
					name         string
					lo, n, dim   int // rows of 7 that are written, and their length
					swap, spread bool
				}{
					{"rows of odd length", 1, 3, 5, false, false},
					{"of one number, BSHD to BHSD", 3, 4, 1, true, false},
					{"of whole words, BSHD to BHSD", 1, 5, 24, true, false},
					{"a broadcast head", 2, 2, 68, false, true},
					{"of an odd number of blocks", 1, 3, 96, false, false},
					{"of an even number of blocks, BSHD to BHSD", 2, 3, 64, true, false},
				} {
					if x.dim%4 != 0 && (from.Quantised() || to.Quantised()) || x.dim%32 != 0 && (from == backend.Q4 || to == backend.Q4) {
						continue
					}
					name := fmt.Sprintf("%v to %v, %s", from, to, x.name)
					const batch, heads, rows = 2, 3, 7
					shape := backend.Shape{batch, heads, x.n, x.dim}
					stored := shape
					if x.swap {
						stored = backend.Shape{batch, x.n, heads, x.dim}
					}
					if x.spread {
						stored[backend.Heads] = 1
					}
					data := make([]float32, stored.Elements())
					for i := range data {
						data[i] = wave(i) * float32(1+i%5)
					}
					src := filled(t, b, from, data, stored)
					var err error
					if x.swap {
						src, err = src.Swap(backend.Heads, backend.Seq)
					} else if x.spread {
						src, err = src.Broadcast(shape)
					}
					check(t, err)
					before := make([]float32, batch*heads*rows*x.dim)
					for i := range before {
						before[i] = float32(i%7) - 3
					}
					whole := filled(t, b, to, before, backend.Shape{batch, heads, rows, x.dim})
					want := numbers(t, b, whole)
					dst := must.Get(whole.Slice(backend.Seq, x.lo, x.lo+x.n))(t)
					// Rounded on the host.
					in := numbers(t, b, src)
					host := numbers(t, b, filled(t, b, to, in, shape))
					if from == to {
						host = in
					}
					for r := range batch * heads {
						copy(want[(r*rows+x.lo)*x.dim:], host[r*x.n*x.dim:(r+1)*x.n*x.dim])
					}
					must.Do(must.In(t, "%s", name), b.Copy(context.Background(), []backend.Tensor{dst}, []backend.Tensor{src}))
					sameRow(t, name, numbers(t, b, whole), want)
				}
			}
		}
	}
}

// TestCopyOfOddNumbers quantises rows with NaN, Inf, zeros and the smallest numbers.
func TestCopyOfOddNumbers(t *testing.T) {
	b := open(t, Options{})
	nan, inf := float32(math.NaN()), float32(math.Inf(1))
	rows := []float32{
		1, nan, 2, 3,
		1, 2, -inf, 3,
		0, 0, 0, 0,
		0x1p-119, -0x1p-120, 0, 0,
		math.MaxFloat32, -math.MaxFloat32, 1, 0,
		-254, 1, 3, 5, // halves go to the even side
		0x1p-22, 0x1p-23, 0, 0, // the scale of q4 is -2^-25, half of the smallest f16
		0x1.8p-22, 0x1p-23, 0, 0, // above that
		524032, -1, 0, 0, // its scale of q4 is -65504, the largest f16
		-524160, -1, 0, 0, // rounds to infinity
		4, -4, 2, 1, // the first of equals
	}
	for _, x := range []struct {
		dtype backend.DType
		dim   int
	}{{backend.Q8, 4}, {backend.Q4, 32}} {
		var data []float32
		for row := range slices.Chunk(rows, 4) {
			data = append(append(data, row...), make([]float32, x.dim-4)...)
		}
		shape := backend.Shape{1, 1, len(rows) / 4, x.dim}
		got := numbers(t, b, copied(t, b, x.dtype, filled(t, b, backend.F32, data, shape)))
		for i, want := range numbers(t, b, filled(t, b, x.dtype, data, shape)) {
			if g := got[i]; g != want && (g == g || want == want) {
				t.Errorf("%v: row %v: element %d is %v, the host has %v", x.dtype, data[i/x.dim*x.dim:][:4], i%x.dim, g, want)
			}
		}
	}
}

// TestCopyRefuses checks the errors of copies that package kernels or the backend refuse.
func TestCopyRefuses(t *testing.T) {
	b := open(t, Options{})
	dev := kernels.NewDevice(b)
	x := alloc(t, b, backend.F32, backend.Shape{1, 1, 3, 4})
	for _, c := range []struct {
		name string
		dst  backend.Tensor
		want error
	}{
		{"dst has shape [1 1 3 8], src has [1 1 3 4]", alloc(t, b, backend.F16, backend.Shape{1, 1, 3, 8}), backend.ErrShape},
		{"dst is bool", alloc(t, b, backend.Bool, backend.Shape{1, 1, 3, 4}), backend.ErrDType},
		{"dst is written while src is read", x, backend.ErrOverlap},
	} {
		must.Fail(t, c.name, dev.Copy(t.Context(), []backend.Tensor{c.dst}, []backend.Tensor{x}), c.want, c.name)
	}
	must.Fail(t, "a copy without a source", dev.Copy(t.Context(), []backend.Tensor{x}, nil), backend.ErrShape)
}

// filled uploads data as a type.
func filled(t testing.TB, b *Backend, dtype backend.DType, data []float32, shape backend.Shape) backend.Tensor {
	t.Helper()
	x, err := kernels.NewDevice(b).FromFloat32(context.Background(), dtype, data, shape)
	check(t, err)
	t.Cleanup(x.Release)
	return x
}

// TestKeysOfAnotherType compares keys and values of other types, bit for bit, with the same numbers in float32.
func TestKeysOfAnotherType(t *testing.T) {
	for _, p := range []struct {
		name   string
		opt    Options
		choose chooser
	}{
		{"plain", Options{decodeRows: -1}, plainOnly},
		{"flash", Options{decodeRows: -1}, nil},
		{"decode", Options{decodeRows: everyRow}, nil},
	} {
		if testing.Short() && p.name != "decode" {
			continue // the suite runs on the others too
		}
		t.Run(p.name, func(t *testing.T) {
			b := open(t, p.opt)
			if p.choose != nil {
				b.choose = p.choose
			}
			for _, x := range []struct {
				kv                   backend.DType
				heads, sq, sk, d, dv int
				all                  bool // on each kernel of fused attention
			}{
				{backend.F16, 4, 5, 70, 64, 64, true},
				{backend.BF16, 4, 5, 70, 31, 18, true}, // no row begins at a word of its own
				{backend.Q8, 4, 5, 1100, 64, 64, false},
				{backend.Q8, 2, 1, 90, 20, 96, true},
				{backend.Q8, 4, 2, 70, 128, 116, false},
				{backend.F8, 4, 5, 1100, 64, 64, false},
				{backend.F8, 2, 1, 90, 20, 96, true},
				{backend.Q4, 4, 5, 1100, 64, 64, false},
				{backend.Q4, 2, 1, 90, 32, 96, true},
				{backend.Q4, 4, 2, 70, 160, 224, false},
			} {
				if (p.name != "decode" || testing.Short()) && !x.all {
					continue
				}
				q := tensor(t, b, backend.F32, backend.Shape{2, x.heads, x.sq, x.d}, wave)
				k := copied(t, b, x.kv, tensor(t, b, backend.F32, backend.Shape{2, 2, x.sk, x.d}, func(i int) float32 { return wave(i + 5) }))
				v := copied(t, b, x.kv, tensor(t, b, backend.F32, backend.Shape{2, 2, x.sk, x.dv}, func(i int) float32 { return wave(i + 9) }))
				c := backend.Call{Q: q, K: k, V: v, Problem: backend.Problem{Scale: 0.3, Visible: backend.Visibility{Offset: x.sk - x.sq, Left: backend.Unbounded, KLen: []int{x.sk, 33}}}}
				o, lse := attend(t, b, c)
				c.K, c.V = copied(t, b, backend.F32, k), copied(t, b, backend.F32, v)
				wantO, wantLSE := attend(t, b, c)
				sameRow(t, fmt.Sprintf("%+v: o", x), o, wantO)
				sameRow(t, fmt.Sprintf("%+v: lse", x), lse, wantLSE)
			}
		})
	}
}

// TestTuneTypesOfKeys checks that trials have the types of the calls that they are for.
func TestTuneTypesOfKeys(t *testing.T) {
	b := open(t, Options{TuneFile: filepath.Join(t.TempDir(), "tuning.json")})
	for _, kv := range []backend.DType{backend.F16, backend.Q8} {
		c := plain(t, b, 40, 70, 32)
		c.K, c.V = copied(t, b, kv, c.K), copied(t, b, kv, c.V)
		e, err := b.Tune(t.Context(), c, TuneOptions{Budget: 1, All: true})
		if err != nil || e.Class.KV != kv.String() || e.Best == "" || len(e.Failed()) > 0 || e.Peak <= 0 || e.FLOPs <= 0 {
			t.Errorf("keys of %v: %+v, %v", kv, e, err)
		}
	}
}

// TestPagesWithinEightBuffers compares, bit for bit, a device with only the 8 storage buffers that every device has, on
// which decoding looks pages and listed keys up and prefill has them collected, with one that has more.
func TestPagesWithinEightBuffers(t *testing.T) {
	few := open(t, Options{Limits: gputypes.Limits{MaxStorageBuffersPerShaderStage: 8}})
	b := open(t, Options{})
	for _, x := range []struct {
		rows           int
		dtype          backend.DType
		size, dim      int
		turned, listed bool // depths lie further apart than keys; keys are listed
	}{
		{1, backend.F16, 16, 32, false, false},
		{decodeRows + 1, backend.F16, 16, 32, false, false},
		{decodeRows + 2, backend.F16, 16, 32, true, false},
		{decodeRows + 1, backend.F16, 5, 31, false, false}, // from here on pages, heads or rows begin inside a word
		{decodeRows + 1, backend.F16, 3, 31, true, false},
		{decodeRows + 1, backend.F16, 4, 31, false, true},
		{decodeRows + 1, backend.Q4, 5, 32, false, false},
	} {
		call := func(b *Backend) backend.Call {
			shape := backend.Shape{6, 2, x.size, x.dim}
			if x.turned {
				shape[backend.Seq], shape[backend.Dim] = x.dim, x.size
			}
			pool, err := tensor(t, b, x.dtype, shape, wave).Slice(backend.Batch, 1, 6)
			check(t, err)
			if x.turned {
				pool, err = pool.Swap(backend.Seq, backend.Dim)
				check(t, err)
			}
			c := backend.Call{Q: tensor(t, b, backend.F32, backend.Shape{2, 2, x.rows, x.dim}, wave), K: pool, V: pool,
				Pages: &backend.Pages{Table: [][]int32{{4, 0, 2}, {1, 4}}, Keys: x.size * 5 / 2}, Problem: backend.Problem{Scale: 0.3, Visible: backend.Everything()}}
			if c.Visible.KLen = []int{x.size * 5 / 2, 2*x.size - 2}; x.listed {
				c.Listed, c.Visible.KLen = [][]int32{{9, 0, 3, 6}, {1, 2}}, []int{4, 2}
			}
			return c
		}
		o, lse := attend(t, few, call(few))
		wantO, wantLSE := attend(t, b, call(b))
		sameRow(t, fmt.Sprintf("%+v: o", x), o, wantO)
		sameRow(t, fmt.Sprintf("%+v: lse", x), lse, wantLSE)
		for want, b := range map[string]*Backend{"looked up": b, "collected": few} {
			if x.rows == 1 {
				want = "looked up"
			}
			c := call(b)
			c.O = alloc(t, b, backend.F32, c.Q.Shape())
			if p, err := b.Plan(t.Context(), &c); err != nil || !strings.Contains(p.Why, want) {
				t.Errorf("%+v: %s, %v, should say %q", x, p.Why, err, want)
			}
		}
	}
}

// TestCachesInHostMemory streams keys in host memory, in q8, q4, f8 and pages too.
func TestCachesInHostMemory(t *testing.T) {
	b := open(t, Options{MemoryBytes: 600 << 10})
	all := open(t, Options{})
	const sq, sk, d, size = 3, 4000, 32, 16
	row := func(i int) []float32 {
		return must.Get(host(t, backend.Shape{1, 1, sk, d}, func(j int) float32 { return wave(i + j) }).Float32s())(t)
	}
	table := make([]int32, sk/size)
	for i := range table {
		table[i] = int32((i*7 + 3) % len(table))
	}
	for _, x := range []struct {
		name  string
		dtype backend.DType
		pages *backend.Pages
	}{
		{"q8", backend.Q8, nil},
		{"q4", backend.Q4, nil},
		{"f8", backend.F8, nil},
		{"q4 in pages", backend.Q4, &backend.Pages{Table: [][]int32{table[:3]}, Keys: 3*size - 5}},
		{"f16 in pages", backend.F16, &backend.Pages{Table: [][]int32{table[:3]}, Keys: 3*size - 5}},
	} {
		shape := backend.Shape{1, 1, sk, d}
		if x.pages != nil {
			shape = backend.Shape{sk / size, 1, size, d}
		}
		call := func(b *Backend) backend.Call {
			if b.dev.Memory().Bound > 0 { // leaves no room for what comes
				alloc(t, b, backend.F32, backend.Shape{1, 1, 360, 256})
			}
			return backend.Call{Q: filled(t, b, backend.F32, row(1)[:sq*d], backend.Shape{1, 1, sq, d}),
				K: filled(t, b, x.dtype, row(2), shape), V: filled(t, b, x.dtype, row(3), shape), Pages: x.pages,
				Problem: backend.Problem{Scale: 0.3, Visible: backend.Everything()}}
		}
		c := call(b)
		if cut.StoreOf(c.K).Host == nil {
			t.Errorf("%s: keys are on the device", x.name)
		}
		o, lse := attend(t, b, c)
		wantO, wantLSE := attend(t, all, call(all))
		sameRow(t, x.name+": o", o, wantO)
		sameRow(t, x.name+": lse", lse, wantLSE)
	}
}
