package gpu

import (
	"context"
	"fmt"
	"math"
	"testing"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/backend/oracle"
)

// gradientCase is a call with all of its gradients.
type gradientCase struct {
	name   string
	dims   backend.Dims
	in, do backend.DType // of q, k, v and their gradients, and of dO
	change func(t testing.TB, b *Backend, d backend.Dims, p *backend.Problem)
	bias   backend.Shape // of dBias; zero for none
	dlse   bool
	add    bool
}

var gradientDims = backend.Dims{Batch: 2, Heads: 4, KVHeads: 2, SeqQ: 37, SeqK: 75, Dim: 16, ValueDim: 24}

func gradientCases() []gradientCase {
	causal := func(_ testing.TB, _ *Backend, d backend.Dims, p *backend.Problem) {
		p.Visible = backend.Visibility{Offset: d.SeqK - d.SeqQ, Left: backend.Unbounded}
	}
	everything := func(t testing.TB, b *Backend, d backend.Dims, p *backend.Problem) {
		p.Visible = backend.Visibility{Offset: 9, Left: 50, Right: 12, KLen: []int{d.SeqK, d.SeqK / 2}}
		p.Softcap, p.Dropout = 2, backend.Dropout{P: 0.3, Seed: 1<<40 + 5, First: [4]int{1, 2, 3, 70}}
		p.Mask = bools(t, b, backend.Shape{d.Batch, 1, d.SeqQ, d.SeqK}, func(i int) bool { return i%7 != 0 && i/d.SeqK%11 != 3 })
		p.Bias = upload(t, b, host(t, backend.Shape{1, d.Heads, d.SeqQ, d.SeqK}, func(i int) float32 {
			if i%13 == 4 {
				return float32(math.Inf(-1))
			}
			return wave(i)
		}))
		p.Relative = upload(t, b, host(t, backend.Shape{d.Batch, 1, 1, d.SeqQ + d.SeqK - 1}, wave))
		p.Blocks, p.BlockQ, p.BlockK = bools(t, b, backend.Shape{1, d.Heads, (d.SeqQ + 6) / 7, (d.SeqK + 6) / 7}, func(i int) bool { return i%5 != 1 }), 7, 7
		for h := range d.Heads {
			p.Slopes, p.Sinks = append(p.Slopes, 0.1/float32(h+1)), append(p.Sinks, []float32{1.5, -2, 4, float32(math.Inf(-1))}[h%4])
		}
	}
	d, f32, f16, bf16 := gradientDims, backend.F32, backend.F16, backend.BF16
	long := backend.Dims{Batch: 1, Heads: 2, KVHeads: 1, SeqQ: 150, SeqK: 60, Dim: 160, ValueDim: 33}
	return []gradientCase{
		{name: "plain", dims: d, in: f32, do: f32, dlse: true},
		{name: "causal", dims: d, in: f32, do: f32, change: causal, bias: backend.Shape{1, 1, d.SeqQ, d.SeqK}},
		{name: "f16", dims: d, in: f16, do: bf16, change: causal, bias: backend.Shape{1, d.Heads, 1, d.SeqK}},
		{name: "bf16", dims: d, in: bf16, do: f16, bias: backend.Shape{d.Batch, 1, d.SeqQ, 1}, dlse: true},
		{name: "160 columns, one key head", dims: long, in: f32, do: f32, bias: backend.Shape{1, 1, 1, 1}, change: causal},
		{name: "every option", dims: d, in: f32, do: f32, change: everything, bias: backend.Shape{1, d.Heads, d.SeqQ, d.SeqK}, dlse: true},
		{name: "every option, added", dims: d, in: f32, do: f32, change: everything, bias: backend.Shape{d.Batch, d.Heads, 1, 1}, add: true},
	}
}

// made is a case on a device, with its operands as float32.
type made struct {
	gradientCase
	g                               *backend.Gradients
	q, k, v, do, dlse               []float32
	mask, bias, relative, blockMask []float32
	before                          float32 // value of the gradients before the call
}

func (c gradientCase) make(t testing.TB, b *Backend) *made {
	t.Helper()
	d := c.dims
	m := &made{gradientCase: c}
	g := &backend.Gradients{Add: c.add}
	m.g = g
	qs, ks, vs, os := backend.Shape{d.Batch, d.Heads, d.SeqQ, d.Dim}, backend.Shape{d.Batch, d.KVHeads, d.SeqK, d.Dim},
		backend.Shape{d.Batch, d.KVHeads, d.SeqK, d.ValueDim}, backend.Shape{d.Batch, d.Heads, d.SeqQ, d.ValueDim}
	g.Q, g.K = tensor(t, b, c.in, qs, wave), tensor(t, b, c.in, ks, func(i int) float32 { return wave(i + 1000) })
	g.V, g.DO = tensor(t, b, c.in, vs, func(i int) float32 { return wave(3*i + 7) }), tensor(t, b, c.do, os, func(i int) float32 { return wave(5*i + 1) })
	g.O, g.LSE = alloc(t, b, backend.F32, os), alloc(t, b, backend.F32, backend.Shape{d.Batch, d.Heads, d.SeqQ, 1})
	g.Problem = backend.Problem{Scale: float32(1 / math.Sqrt(float64(d.Dim))), Visible: backend.Everything()}
	if c.change != nil {
		c.change(t, b, d, &g.Problem)
	}
	check(t, b.Attention(context.Background(), &g.Call))
	if c.dlse {
		g.DLSE = upload(t, b, host(t, backend.Shape{d.Batch, d.Heads, d.SeqQ, 1}, wave))
		m.dlse = floats(t, b, g.DLSE)
	}
	m.q, m.k, m.v, m.do = floats(t, b, g.Q), floats(t, b, g.K), floats(t, b, g.V), floats(t, b, g.DO)
	m.mask, m.blockMask = wholeBools(t, b, g.Mask), wholeBools(t, b, g.Blocks)
	if !g.Bias.IsZero() {
		m.bias = floats(t, b, g.Bias)
	}
	if !g.Relative.IsZero() {
		m.relative = floats(t, b, g.Relative)
	}
	if c.add {
		m.before = 0.5
	}
	gradient := func(dtype backend.DType, shape backend.Shape) backend.Tensor {
		return tensor(t, b, dtype, shape, func(int) float32 {
			if c.add {
				return m.before
			}
			return float32(math.NaN()) // that no element keeps
		})
	}
	g.DQ, g.DK, g.DV = gradient(c.in, qs), gradient(c.in, ks), gradient(c.in, vs)
	if c.bias != (backend.Shape{}) {
		g.DBias = gradient(backend.F32, c.bias)
	}
	if !g.Relative.IsZero() {
		g.DRelative = gradient(backend.F32, g.Relative.Shape())
	}
	if g.Slopes != nil {
		g.DSlopes = gradient(backend.F32, backend.Shape{1, d.Heads, 1, 1})
	}
	if g.Sinks != nil {
		g.DSinks = gradient(backend.F32, backend.Shape{1, d.Heads, 1, 1})
	}
	return m
}

// wholeBools returns the elements of a mask as numbers, nil without one.
func wholeBools(t testing.TB, b *Backend, x backend.Tensor) []float32 {
	t.Helper()
	if x.IsZero() {
		return nil
	}
	h, err := backend.AllocHost(backend.Bool, x.Shape())
	check(t, err)
	check(t, b.Download(context.Background(), h, x))
	data, err := h.Bools()
	check(t, err)
	list := make([]float32, len(data))
	for i, x := range data {
		if x {
			list[i] = 1
		}
	}
	return list
}

// index returns the index of an element of a contiguous tensor that is broadcast.
func index(s backend.Shape, b, h, i, j int) int {
	at := [4]int{b, h, i, j}
	n := 0
	for a, l := range s {
		n = n*l + at[a]%max(l, 1)*map[bool]int{true: 0, false: 1}[l == 1]
	}
	return n
}

// sums holds the references of all gradients.
type sums struct{ q, k, v, bias, relative, slopes, sinks []oracle.Sum }

// solve computes the references.
func (m *made) solve() *sums {
	d, g := m.dims, m.g
	s := &sums{
		q: make([]oracle.Sum, len(m.q)), k: make([]oracle.Sum, len(m.k)), v: make([]oracle.Sum, len(m.v)), bias: make([]oracle.Sum, m.gradientCase.bias.Elements()),
		relative: make([]oracle.Sum, len(m.relative)), slopes: make([]oracle.Sum, d.Heads), sinks: make([]oracle.Sum, d.Heads),
	}
	for b := range d.Batch {
		for h := range d.Heads {
			kv := (b*d.KVHeads + h/(d.Heads/d.KVHeads)) * d.SeqK
			for i := range d.SeqQ {
				row := (b*d.Heads+h)*d.SeqQ + i
				r := oracle.Row{
					Q: m.q[row*d.Dim:][:d.Dim], K: m.k[kv*d.Dim:][:d.SeqK*d.Dim], V: m.v[kv*d.ValueDim:][:d.SeqK*d.ValueDim], Dv: d.ValueDim,
					Scale: g.Scale, Softcap: g.Softcap, Out: backend.F32, Distance: func(j int) float64 { return math.Abs(float64(i + g.Visible.Offset - j)) },
					Hidden: func(j int) bool {
						lo, hi := g.Visible.Range(b, i, d.SeqK)
						return j < lo || j >= hi || m.mask != nil && m.mask[index(g.Mask.Shape(), b, h, i, j)] == 0 ||
							m.blockMask != nil && m.blockMask[index(g.Blocks.Shape(), b, h, i/g.BlockQ, j/g.BlockK)] == 0
					},
					Slope: float64(g.Slope(b, h, d.Heads)),
				}
				if m.bias != nil {
					r.Bias = func(j int) float64 { return float64(m.bias[index(g.Bias.Shape(), b, h, i, j)]) }
				}
				if m.relative != nil {
					r.Relative = func(j int) float64 { return float64(m.relative[index(g.Relative.Shape(), b, h, 0, j-i+d.SeqQ-1)]) }
				}
				if g.Sinks != nil {
					r.Sink = &g.Sinks[h]
				}
				if g.Dropout.P > 0 {
					r.Keeps, r.KeepFactor = func(j int) bool { return g.Dropout.Keeps(b, h, i, j) }, float64(g.Dropout.Factor())
				}
				to := oracle.RowGradients{DQ: s.q[row*d.Dim:][:d.Dim], DK: s.k[kv*d.Dim:][:d.SeqK*d.Dim], DV: s.v[kv*d.ValueDim:][:d.SeqK*d.ValueDim]}
				if !g.DBias.IsZero() {
					to.DBias = func(j int) *oracle.Sum { return &s.bias[index(m.gradientCase.bias, b, h, i, j)] }
				}
				if m.relative != nil {
					to.DRelative = func(j int) *oracle.Sum { return &s.relative[index(g.Relative.Shape(), b, h, 0, j-i+d.SeqQ-1)] }
				}
				if g.Slopes != nil {
					to.DSlope = &s.slopes[h]
				}
				if g.Sinks != nil {
					to.DSink = &s.sinks[h]
				}
				dlse := float32(0)
				if m.dlse != nil {
					dlse = m.dlse[row]
				}
				oracle.Differentiate(r, m.do[row*d.ValueDim:][:d.ValueDim], dlse, to)
			}
		}
	}
	return s
}

// results returns the gradients that the device computed, with their references.
func (m *made) results(s *sums) []struct {
	name string
	got  backend.Tensor
	want []oracle.Sum
} {
	g := m.g
	return []struct {
		name string
		got  backend.Tensor
		want []oracle.Sum
	}{{"dq", g.DQ, s.q}, {"dk", g.DK, s.k}, {"dv", g.DV, s.v}, {"dbias", g.DBias, s.bias}, {"drelative", g.DRelative, s.relative},
		{"dslopes", g.DSlopes, s.slopes}, {"dsinks", g.DSinks, s.sinks}}
}

// TestGradients compares every element of all gradients with the reference. With -short it runs
// those with every option alone: the suite has such as the others.
func TestGradients(t *testing.T) {
	b := open(t, Options{})
	t.Cleanup(func() { _ = b.Close() })
	cases := gradientCases()
	if testing.Short() {
		cases = cases[5:]
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) { testGradientCase(t, b, c) })
	}
}

func testGradientCase(t *testing.T, b *Backend, c gradientCase) {
	m := c.make(t, b)
	check(t, b.Backward(context.Background(), m.g))
	for _, r := range m.results(m.solve()) {
		if r.got.IsZero() {
			continue
		}
		var worst oracle.Worst
		for i, x := range floats(t, b, r.got) {
			want, bound := r.want[i].Value, r.want[i].Bound(r.got.DType())
			if m.add { // the sum with what was there is rounded as often as there are heads
				want += float64(m.before)
				bound += 8 * 0x1p-24 * (math.Abs(want) + float64(m.before))
			}
			worst.See(float64(x), want, bound, func() string { return fmt.Sprintf("%s[%d]", r.name, i) })
		}
		if err := worst.Err(); err != nil {
			t.Error(err)
		}
		t.Logf("%s: %d elements, the worst at %.3g of its bound", r.name, worst.Considered, worst.Off)
	}
}

// TestGradientsAsOnGPU computes gradients with the kernels of hardware GPUs, whose loops are unrolled
// and which load four elements at once.
func TestGradientsAsOnGPU(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: the kernels of software drivers differ in loads and unrolled loops alone")
	}
	b := open(t, Options{})
	t.Cleanup(func() { _ = b.Close() })
	b.info.Type = backend.Discrete
	d := backend.Dims{Batch: 1, Heads: 2, KVHeads: 1, SeqQ: 150, SeqK: 140, Dim: 64, ValueDim: 64}
	partial := d
	partial.Dim, partial.ValueDim = 24, 20
	causal := func(_ testing.TB, _ *Backend, _ backend.Dims, p *backend.Problem) { p.Visible.Right = 0 }
	for _, c := range []gradientCase{
		{name: "full rows", dims: d, in: backend.F32, do: backend.F32, dlse: true},
		{name: "partial rows, causal", dims: partial, in: backend.F32, do: backend.F32, change: causal},
		{name: "f16 and bf16", dims: d, in: backend.F16, do: backend.BF16},
	} {
		t.Run(c.name, func(t *testing.T) { testGradientCase(t, b, c) })
	}
}

// TestGradientsCut compares the bits of gradients with low limits with those without. Sums over
// the keys of a row, and sums of boxes that are added to a gradient, may depend on cuts.
func TestGradientsCut(t *testing.T) {
	cases := gradientCases()[4:]
	if testing.Short() {
		cases = cases[1:]
	}
	var want, o, lse [][]float32
	for _, limits := range []struct {
		name string
		opt  Options
	}{
		{"none", Options{}},
		{"bindings of 100 KiB", Options{Limits: gputypes.Limits{MaxStorageBufferBindingSize: 100 << 10}}},
		{"three workgroups a dimension, little work at once", Options{Limits: gputypes.Limits{MaxComputeWorkgroupsPerDimension: 3}, MaxWork: 1e6}},
		{"streamed", Options{MemoryBytes: 700 << 10}},
	} {
		b := open(t, limits.opt)
		n := 0
		for i, c := range cases {
			m := c.make(t, b)
			if i == len(o) {
				o, lse = append(o, floats(t, b, m.g.O)), append(lse, floats(t, b, m.g.LSE))
			} else { // limits may change the kernel of the forward pass, and with it the bits
				m.g.O = upload(t, b, host(t, m.g.O.Shape(), func(n int) float32 { return o[i][n] }))
				m.g.LSE = upload(t, b, host(t, m.g.LSE.Shape(), func(n int) float32 { return lse[i][n] }))
			}
			if err := b.Backward(context.Background(), m.g); err != nil {
				t.Fatalf("%s: %s: %v", limits.name, c.name, err)
			}
			for _, r := range m.results(&sums{}) {
				if r.got.IsZero() || r.name == "dbias" || r.name == "dslopes" || r.name == "drelative" && c.add {
					continue
				}
				got := floats(t, b, r.got)
				if n == len(want) {
					want = append(want, got)
				}
				for i, x := range got {
					if math.Float32bits(x) != math.Float32bits(want[n][i]) {
						t.Fatalf("%s: %s: %s[%d] is %v, without limits %v", limits.name, c.name, r.name, i, x, want[n][i])
					}
				}
				n++
			}
		}
		_ = b.Close()
	}
}
