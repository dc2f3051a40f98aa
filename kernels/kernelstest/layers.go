package kernelstest

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/backend/oracle"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kvcache"
	"github.com/seed90331342/attn/kernels/nn"
)

// testMultiHead compares layers with float64.
func testMultiHead(t *testing.T, dev *kernels.Device) {
	projects := implements[backend.Projector](dev)
	rotates := implements[backend.Rotator](dev)
	if !projects || !rotates {
		t.Logf("%s has no layers", dev.Info().Name)
		return
	}
	rope := &nn.RoPE{}
	for i, c := range []layer{
		{name: "plain", config: nn.MultiHeadConfig{Model: 12, Heads: 3}},
		{name: "causal, grouped, bias, rope", config: nn.MultiHeadConfig{Model: 30, Heads: 6, KVHeads: 2, HeadDim: 8, ValueDim: 5, Bias: true, RoPE: rope}, causal: true},
		{name: "cross", config: nn.MultiHeadConfig{Model: 16, Memory: 21, Heads: 4, KVHeads: 1, Bias: true}, seqK: 41},
		{name: "cross with rope, interleaved and partial", config: nn.MultiHeadConfig{Model: 14, Heads: 2, HeadDim: 9, RoPE: &nn.RoPE{Dim: 4, Interleaved: true}}, seqK: 19},
		{name: "positions of their own", config: nn.MultiHeadConfig{Model: 8, Heads: 2}, positions: [][]int{positionsOf(70, seqOfLayers)[0], positionsOf(1000, seqOfLayers)[0]}},
		{name: "f16", config: nn.MultiHeadConfig{Model: 20, Heads: 2, KVHeads: 1, Bias: true, RoPE: rope, DType: backend.F16}, dtype: backend.F16, causal: true},
		{name: "bf16 with f32 weights", config: nn.MultiHeadConfig{Model: 20, Heads: 5, RoPE: rope}, dtype: backend.BF16},
	} {
		t.Run(c.name, func(t *testing.T) { c.test(t, dev, uint64(i)) })
	}
}

// layer is one call of a layer.
type layer struct {
	name      string
	config    nn.MultiHeadConfig
	dtype     backend.DType
	causal    bool
	seqK      int     // of the memory; 0 means self-attention
	positions [][]int // positions of given angles; nil means none
}

const batchOfLayers, seqOfLayers = 2, 23

func (c layer) test(t *testing.T, dev *kernels.Device, seed uint64) {
	ctx := t.Context()
	w := must(c.config.Initialise(nn.Initialiser{Seed: seed, Gain: 1.5}))(t)
	rng := rand.New(rand.NewPCG(seed, 0x6c617965))
	for _, b := range []backend.Tensor{w.Bq, w.Bk, w.Bv, w.Bo} {
		if c.config.Bias {
			data := must(b.Float32s())(t)
			for i := range data {
				data[i] = float32(rng.NormFloat64())
			}
		}
	}
	l := must(nn.NewMultiHeadAttention(ctx, dev, c.config, w))(t)
	defer l.Release()
	tokens := func(seq, size int) (backend.Tensor, operand) {
		o := drawn(rng, backend.Shape{batchOfLayers, 1, seq, size}, c.dtype)
		f := put(t, dev, o, Padded)
		t.Cleanup(f.release)
		return f.view, o
	}
	x, hx := tokens(seqOfLayers, c.config.Model)
	hz := hx
	opt := nn.MultiHeadOptions{Options: kernels.Options{Causal: c.causal, LSE: true}}
	if c.seqK > 0 {
		size := c.config.Memory
		if size == 0 {
			size = c.config.Model
		}
		opt.Memory, hz = tokens(c.seqK, size)
	}
	if c.positions != nil {
		opt.Angles = must((&nn.RoPE{}).Angles(ctx, dev, c.config.Model/c.config.Heads, c.positions))(t)
		defer opt.Angles.Release()
	}
	r := must(l.Apply(ctx, x, opt))(t)
	defer r.Release()
	c.compare(t, w, hx, hz, read(t, dev, r.O), read(t, dev, r.LSE))
	if c.causal {
		o, lse := c.generate(t, dev, l, x)
		c.compare(t, w, hx, hz, o, lse)
	}
}

// generate applies a layer with a cache to the tokens of x, a few at a time.
func (c layer) generate(t *testing.T, dev *kernels.Device, l *nn.MultiHeadAttention, x backend.Tensor) (o, lse []float32) {
	cfg := c.config
	cache := must(kvcache.New(t.Context(), dev, kvcache.Config{Batch: batchOfLayers, KVHeads: cfg.KVHeads, Dim: headOf(cfg), ValueDim: cfg.ValueDim, DType: c.dtype, Capacity: seqOfLayers}))(t)
	defer cache.Release()
	o, lse = make([]float32, batchOfLayers*seqOfLayers*cfg.Model), make([]float32, batchOfLayers*cfg.Heads*seqOfLayers)
	for at, step := 0, 6; at < seqOfLayers; step = 1 + at%3 {
		n := min(step, seqOfLayers-at)
		some := must(x.Slice(backend.Seq, at, at+n))(t)
		r := must(l.Apply(t.Context(), some, nn.MultiHeadOptions{Cache: cache, Options: kernels.Options{LSE: true}}))(t)
		for i, y := range read(t, dev, r.O) {
			b, s, m := i/cfg.Model/n, i/cfg.Model%n, i%cfg.Model
			o[(b*seqOfLayers+at+s)*cfg.Model+m] = y
		}
		for i, y := range read(t, dev, r.LSE) {
			lse[i/n*seqOfLayers+at+i%n] = y
		}
		r.Release()
		at += n
	}
	return o, lse
}

func headOf(c nn.MultiHeadConfig) int {
	if c.HeadDim > 0 {
		return c.HeadDim
	}
	return c.Model / c.Heads
}

// num is a number in float64 and a bound on the error of the same number computed in float32.
type num struct{ x, err float64 }

// stored adds the rounding of a store.
func (n num) stored(dtype backend.DType) num {
	if dtype != backend.F32 {
		n.err += dtype.UnitRoundoff()*(math.Abs(n.x)+n.err) + 0x1p-25
	}
	return n
}

// affine is x·w + b for one column of w. Its error is that of x times w, and that of the sum (sumBound).
func affine(x []num, w func(i int) float64, b float64, dtype backend.DType) num {
	y, abs := num{x: b}, math.Abs(b)
	for i, n := range x {
		y.x += n.x * w(i)
		y.err += n.err * math.Abs(w(i))
		abs += (math.Abs(n.x) + n.err) * math.Abs(w(i))
	}
	y.err += sumBound(len(x)+1, abs, backend.F32, y.x)
	return y.stored(dtype)
}

// turned is a row after a rotation; see rotation.compare for the error of that.
func turned(row []num, r nn.RoPE, at int, dtype backend.DType) []num {
	dim := r.Dim
	if dim == 0 {
		dim = len(row)
	}
	out := append([]num(nil), row...)
	for i := range dim / 2 {
		a, b := i, i+dim/2
		if r.Interleaved {
			a, b = 2*i, 2*i+1
		}
		sin, cos := math.Sincos(float64(at) * math.Pow(10000, -2*float64(i)/float64(dim)))
		x, y := row[a], row[b]
		turn := func(x, y num, c, s float64) num {
			err := x.err*math.Abs(c) + y.err*math.Abs(s)
			err += 3 * u * (math.Abs(x.x) + x.err + math.Abs(y.x) + y.err)
			return num{x.x*c + y.x*s, err}.stored(dtype)
		}
		out[a], out[b] = turn(x, y, cos, -sin), turn(y, x, cos, sin)
	}
	return out
}

// attend is one row of attention. Scores that are off by δ make each weight, after normalising, off by expm1(2δ) of
// itself. To that comes package oracle's bound of the arithmetic, for magnitudes as large as the errors may make them.
func attend(q []num, k, v [][]num, dtype backend.DType) (o []num, lse num, weights []num) {
	scale := 1 / math.Sqrt(float64(len(q)))
	s, top, delta, reach := make([]float64, len(k)), math.Inf(-1), 0.0, 0.0
	for j := range k {
		off, abs := 0.0, 0.0
		for d, a := range q {
			b := k[j][d]
			s[j] += scale * a.x * b.x
			off += scale * (a.err*math.Abs(b.x) + math.Abs(a.x)*b.err + a.err*b.err)
			abs += scale * (math.Abs(a.x) + a.err) * (math.Abs(b.x) + b.err)
		}
		top, delta, reach = max(top, s[j]), max(delta, off), max(reach, abs)
	}
	sum := 0.0
	for j := range s {
		s[j] = math.Exp(s[j] - top)
		sum += s[j]
	}
	eps := math.Expm1(u*reach*(oracle.Lambda*math.Sqrt(float64(len(q)))+20)) + 8*u
	drift := u * oracle.Lambda * math.Sqrt(float64(len(k))) * 17 / 8
	lse = num{top + math.Log(sum), 0}
	lse.err = delta + eps + drift + u*(4+2*(math.Abs(lse.x)+reach))
	o, weights = make([]num, len(v[0])), make([]num, len(k))
	for j := range s {
		p := s[j] / sum
		weights[j] = num{p, (math.Expm1(2*delta)+math.Exp(2*delta)*(2*eps+drift+6*u))*p + 0x1p-125}
	}
	for d := range o {
		abs := 0.0
		for j := range s {
			p := weights[j].x
			o[d].x += p * v[j][d].x
			abs += p * (math.Abs(v[j][d].x) + v[j][d].err)
			o[d].err += p * v[j][d].err
		}
		o[d].err += (math.Expm1(2*delta) + math.Exp(2*delta)*(2*eps+2*drift+4*u)) * abs
		o[d] = o[d].stored(dtype)
	}
	return o, lse, weights
}

// compare compares a layer's output with float64.
func (c layer) compare(t *testing.T, w nn.MultiHeadWeights, hx, hz operand, got, gotLSE []float32) {
	t.Helper()
	weight := func(x backend.Tensor) []float32 {
		if x.IsZero() {
			return make([]float32, 1<<10) // no bias
		}
		data := must(x.Float32s())(t)
		for i := range data {
			data[i] = c.config.DType.Round(data[i])
		}
		return data
	}
	wq, wk, wv, wo := weight(w.Wq), weight(w.Wk), weight(w.Wv), weight(w.Wo)
	bq, bk, bv, bo := weight(w.Bq), weight(w.Bk), weight(w.Bv), weight(w.Bo)
	heads := max(c.config.Heads, 1)
	dim := w.Wq.Shape()[backend.Dim] / heads
	kvHeads := w.Wk.Shape()[backend.Dim] / dim
	vdim := w.Wv.Shape()[backend.Dim] / kvHeads
	// heads of rows: [head][row][element]
	project := func(o operand, batch, heads, dim int, w, b []float32) [][][]num {
		out := make([][][]num, heads)
		seq, size := o.shape[backend.Seq], o.shape[backend.Dim]
		for h := range out {
			out[h] = make([][]num, seq)
			for i := range seq {
				in := make([]num, size)
				for m := range in {
					in[m].x = float64(o.data[(batch*seq+i)*size+m])
				}
				for d := range dim {
					col := h*dim + d
					out[h][i] = append(out[h][i], affine(in, func(m int) float64 { return float64(w[m*heads*dim+col]) }, float64(b[col]), c.dtype))
				}
			}
		}
		return out
	}
	turn := func(heads [][][]num, batch int) {
		rope := c.config.RoPE
		if c.positions != nil {
			rope = &nn.RoPE{}
		}
		if rope == nil {
			return
		}
		for _, rows := range heads {
			for i := range rows {
				at := i
				if c.positions != nil {
					at = c.positions[batch][i]
				}
				rows[i] = turned(rows[i], *rope, at, c.dtype)
			}
		}
	}
	var worst, worstLSE oracle.Worst
	for batch := range batchOfLayers {
		q, k, v := project(hx, batch, heads, dim, wq, bq), project(hz, batch, kvHeads, dim, wk, bk), project(hz, batch, kvHeads, vdim, wv, bv)
		turn(q, batch)
		turn(k, batch)
		for i := range seqOfLayers {
			var joined []num
			for h := range heads {
				kv, n := h/(heads/kvHeads), len(k[0])
				if c.causal {
					n = min(n, i+1)
				}
				o, lse, _ := attend(q[h][i], k[kv][:n], v[kv][:n], c.dtype)
				joined = append(joined, o...)
				worstLSE.See(float64(gotLSE[(batch*heads+h)*seqOfLayers+i]), lse.x, lse.err, func() string { return fmt.Sprintf("lse[%d,%d,%d]", batch, h, i) })
			}
			for m := range c.config.Model {
				y := affine(joined, func(x int) float64 { return float64(wo[x*c.config.Model+m]) }, float64(bo[m]), c.dtype)
				worst.See(float64(got[(batch*seqOfLayers+i)*c.config.Model+m]), y.x, y.err, func() string { return fmt.Sprintf("y[%d,%d,%d]", batch, i, m) })
			}
		}
	}
	for _, err := range []error{worst.Err(), worstLSE.Err()} {
		if err != nil {
			t.Error(err)
		}
	}
	t.Logf("worst: %.2g of the bound, lse %.2g", worst.Off, worstLSE.Off)
}

// testRotate compares rotated rows with float64: in both conventions, every type and
// layout, whole and partial, in place and not.
func testRotate(t *testing.T, dev *kernels.Device) {
	if !implements[backend.Rotator](dev) {
		t.Logf("%s has no rotary embedding", dev.Info().Name)
		return
	}
	f32, f16, bf16 := backend.F32, backend.F16, backend.BF16
	far := [][]int{{1_000_000, -3, 0, 77, 1 << 29}, {5, 6, 7, 999_999, 12}}
	for i, c := range []rotation{
		{"halves", nn.RoPE{}, f32, f32, Contiguous, 8, positionsOf(0, 5)},
		{"interleaved", nn.RoPE{Interleaved: true}, f32, f32, Contiguous, 8, positionsOf(0, 5)},
		{"smallest", nn.RoPE{}, f32, f32, Padded, 2, positionsOf(3, 5)},
		{"partial, odd head size", nn.RoPE{Dim: 6, Base: 500}, f32, f32, BSHD, 11, positionsOf(40, 5)},
		{"partial interleaved", nn.RoPE{Dim: 10, Interleaved: true}, f32, f32, Transposed, 16, far},
		{"positions of their own, f16", nn.RoPE{}, f16, f16, Padded, 18, far},
		{"bf16", nn.RoPE{Dim: 4, Interleaved: true}, bf16, bf16, Padded, 7, far},
		{"bf16 transposed", nn.RoPE{}, bf16, bf16, Transposed, 6, far},
		{"f16 to f32", nn.RoPE{Dim: 12}, f16, f32, BSHD, 20, far},
		{"f32 to bf16", nn.RoPE{Base: 1e6}, f32, bf16, Padded, 80, far},
		{"several workgroups", nn.RoPE{Dim: 64}, f32, f32, Contiguous, 128, positionsOf(1<<20, 97)},
	} {
		t.Run(c.name, func(t *testing.T) { c.test(t, dev, uint64(i)) })
	}
}

// rotation is one call of Rotate.
type rotation struct {
	name      string
	rope      nn.RoPE
	in, out   backend.DType
	layout    Layout
	dim       int
	positions [][]int
}

func (c rotation) test(t *testing.T, dev *kernels.Device, seed uint64) {
	const batch, heads = 2, 3
	seq := len(c.positions[0])
	rng := rand.New(rand.NewPCG(seed, 0x726f7065))
	x := drawn(rng, backend.Shape{batch, heads, seq, c.dim}, c.in)
	empty := filled(float32(math.NaN()), x.shape, c.out)
	angles := must(c.rope.Angles(t.Context(), dev, c.dim, c.positions))(t)
	defer angles.Release()
	from, to := put(t, dev, x, c.layout), put(t, dev, empty, c.layout)
	defer from.release()
	defer to.release()
	noError(t, dev.Rotate(t.Context(), to.view, from.view, angles))
	got := to.get(t, dev, "y")
	if err := c.compare(x, got); err != nil {
		t.Error(err)
	}
	c.testInverse(t, dev, to, from.view, got)
	if c.in != c.out {
		return
	}
	noError(t, dev.Rotate(t.Context(), from.view, from.view, angles))
	for i, p := range from.get(t, dev, "x in place") {
		if p != got[i] {
			t.Fatalf("in place element %d is %v, from x to y %v", i, p, got[i])
		}
	}
}

// testInverse compares the inverse rotation by the angles of the negated positions, whose
// cosines and negated sines are the same numbers, with the rotation y.
func (c rotation) testInverse(t *testing.T, dev *kernels.Device, to flat, x backend.Tensor, y []float32) {
	back := make([][]int, len(c.positions))
	for b, positions := range c.positions {
		for _, at := range positions {
			back[b] = append(back[b], -at)
		}
	}
	angles := must(c.rope.Angles(t.Context(), dev, c.dim, back))(t)
	defer angles.Release()
	angles.Inverse = true
	noError(t, dev.Rotate(t.Context(), to.view, x, angles))
	for i, p := range to.get(t, dev, "y of the inverse") {
		if p != y[i] {
			t.Fatalf("element %d is %v by the inverse of the negated angles, %v by the angles", i, p, y[i])
		}
	}
}

// compare compares y with x rotated in float64. A cosine or sine has the error of its
// rounding and of the angle, whose relative error is 4·2^-53 at most (a power, a product
// and the reduction). Products and their sum have one rounding each:
//
//	|y - ref| <= (3u + |t·θ|·2^-51)·(|x_a| + |x_b|) + u_y·|ref| + tiny
//
// Elements that are not rotated are those of x, rounded to y's type.
func (c rotation) compare(x operand, y []float32) error {
	pairs := c.rope.Dim / 2
	if pairs == 0 {
		pairs = c.dim / 2
	}
	base := c.rope.Base
	if base == 0 {
		base = 10000
	}
	tiny := 0x1p-125
	if c.out != backend.F32 {
		tiny += 0x1p-25 // half a subnormal step of f16
	}
	var worst oracle.Worst
	for row := range len(y) / c.dim {
		in := x.data[row*c.dim : (row+1)*c.dim]
		batch, s := row/(x.shape[1]*x.shape[2]), row%x.shape[2]
		at := c.positions[batch%len(c.positions)][s]
		for d := range c.dim {
			got := float64(y[row*c.dim+d])
			name := func() string { return fmt.Sprintf("y[row %d, %d] at position %d", row, d, at) }
			if d >= 2*pairs {
				worst.See(got, float64(c.out.Round(in[d])), 0, name)
				continue
			}
			pair, second := d%pairs, d >= pairs
			a, b := in[pair], in[pair+pairs]
			if c.rope.Interleaved {
				pair, second = d/2, d%2 == 1
				a, b = in[2*pair], in[2*pair+1]
			}
			angle := float64(at) * math.Exp(-float64(pair)/float64(pairs)*math.Log(base))
			ref := float64(a)*math.Cos(angle) - float64(b)*math.Sin(angle)
			if second {
				ref = float64(a)*math.Sin(angle) + float64(b)*math.Cos(angle)
			}
			// The reference's own angle: its logarithm errs by an ulp, times at most 15.
			slack := math.Abs(angle) * (0x1p-51 + 16*0x1p-52)
			bound := (3*u + slack) * (math.Abs(float64(a)) + math.Abs(float64(b)))
			if c.out != backend.F32 {
				bound += c.out.UnitRoundoff() * math.Abs(ref)
			}
			worst.See(got, ref, bound+tiny, name)
		}
	}
	return worst.Err()
}

// positionsOf returns the positions of a few rows.
func positionsOf(from, n int) [][]int {
	positions, err := nn.Positions(from, n)
	if err != nil {
		panic(err) // the suite asks for few
	}
	return positions
}
