package gpu

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/backend/oracle"
	"github.com/seed90331342/attn/gpu/internal/cut"
)

// plainName is the plain kernel among trials: what the others are compared with.
const plainName = "plain"

const (
	// Rows and keys of the call that is timed: of one head, and keys enough that
	// what comes once a row (loading it, storing it) is a few percent. A software
	// driver has no width to fill and takes 100 times as long.
	longRows    = 1024
	longKeys    = 512
	longKeysCPU = 256
	// edgeRows and edgeExtra make the call that is only compared end amid a tile, of
	// rows and of keys, for any variant.
	edgeRows  = 150
	edgeExtra = 9
	// workgroupRows is how many rows a workgroup has at most. Four of them for each
	// lane (see firstSpeed) are a grid as good as without bound.
	workgroupRows = 128
)

// exercise is a pair of calls of a class on synthetic operands: long, of the
// class's size, which is compared and timed, and edge, with hidden keys, more than
// one split and nothing even, which is compared.
type exercise struct {
	b          *Backend
	long, edge backend.Call
	held       []backend.Tensor
	// How far two right results may be apart.
	offO, offLSE float64
	// The results of the plain kernel and of the first variant that was right.
	plain, first []results
}

// results are a call's.
type results struct{ o, lse []float32 }

// newExercise uploads the operands for shape s. They are those of one head, seen
// through strides of 0 as as many as there are.
func (b *Backend) newExercise(ctx context.Context, s flashShape) (x *exercise, err error) {
	x = &exercise{b: b}
	defer func() {
		if err != nil {
			x.release()
		}
	}()
	k := s.tuneClass()
	rows := 4 * workgroupRows * b.lanes
	if k.rows > 0 {
		rows = min(k.rows, rows)
	}
	perHead := min(rows, longRows)
	if k.short {
		perHead = shortRows
	}
	heads := max(rows/perHead, 1)
	keys, most := longKeys, s.class.split+s.class.keys+edgeExtra
	if s.software {
		keys = longKeysCPU
	}
	x.long.Scale = float32(1 / math.Sqrt(float64(k.dim)))
	x.long.Visible = backend.Everything()
	out := backend.F32
	if k.half {
		if out = k.in; k.in == backend.F32 {
			out = backend.F16
		}
	}
	rng := rand.New(rand.NewPCG(1, 2))
	for _, t := range []struct {
		to    *backend.Tensor
		dtype backend.DType
		shape backend.Shape
		heads int
	}{
		{&x.long.Q, k.in, backend.Shape{1, 1, perHead, k.dim}, heads},
		{&x.long.K, k.kv, backend.Shape{1, 1, most, k.dim}, heads},
		{&x.long.V, k.kv, backend.Shape{1, 1, most, k.valueDim}, heads},
		{&x.long.O, out, backend.Shape{1, heads, perHead, k.valueDim}, 0},
		{&x.long.LSE, backend.F32, backend.Shape{1, heads, perHead, 1}, 0},
	} {
		if t.heads == 0 {
			if *t.to, err = b.alloc(t.dtype, t.shape); err != nil {
				return x, err
			}
			x.held = append(x.held, *t.to)
			continue
		}
		if *t.to, err = x.draw(ctx, rng, t.dtype, t.shape, k.wide); err != nil {
			return x, err
		}
		view := t.shape
		view[backend.Heads] = t.heads
		if *t.to, err = t.to.Broadcast(view); err != nil {
			return x, err
		}
	}
	x.edge = x.long
	x.edge.Visible = backend.Visibility{Offset: most - min(perHead, edgeRows), Left: backend.Unbounded}
	if k.paired {
		if x.edge.Bias, err = x.draw(ctx, rng, backend.F32, backend.Shape{1, 1, perHead, most}, true); err != nil {
			return x, err
		}
		if x.edge.Mask, err = x.draw(ctx, rng, backend.Bool, backend.Shape{1, 1, perHead, most}, true); err != nil {
			return x, err
		}
		x.edge.Softcap = 20
		x.long.Bias = x.edge.Bias
	}
	for _, cut := range []struct {
		t    *backend.Tensor
		axis int
		n    int
	}{
		{&x.long.K, backend.Seq, keys}, {&x.long.V, backend.Seq, keys}, {&x.long.Bias, backend.Dim, keys},
		{&x.edge.Q, backend.Seq, edgeRows}, {&x.edge.O, backend.Seq, edgeRows}, {&x.edge.LSE, backend.Seq, edgeRows},
		{&x.edge.Bias, backend.Seq, edgeRows}, {&x.edge.Mask, backend.Seq, edgeRows},
		{&x.edge.Q, backend.Heads, 2}, {&x.edge.K, backend.Heads, 2}, {&x.edge.V, backend.Heads, 2},
		{&x.edge.O, backend.Heads, 2}, {&x.edge.LSE, backend.Heads, 2},
	} {
		if cut.t.IsZero() || cut.n >= cut.t.Shape()[cut.axis] {
			continue
		}
		if *cut.t, err = cut.t.Slice(cut.axis, 0, cut.n); err != nil {
			return x, err
		}
	}
	x.bounds(k, most, out)
	return x, nil
}

// draw uploads numbers with magnitudes from 1/2 to 1, or bits of which one in four
// is 0. Rows that are not wide have a gap of one element, so that they lie on no
// multiple of 4.
func (x *exercise) draw(ctx context.Context, rng *rand.Rand, dtype backend.DType, shape backend.Shape, wide bool) (backend.Tensor, error) {
	stored := shape
	if !wide && dtype != backend.Q8 {
		stored[backend.Dim]++
	}
	host, err := backend.AllocHost(dtype, stored)
	if err != nil {
		return host, err
	}
	number := func() float32 {
		f := 0.5 + rng.Float32()/2
		if rng.IntN(2) == 0 {
			return -f
		}
		return f
	}
	switch dtype {
	case backend.F32:
		data, err := host.Float32s()
		if err != nil {
			return host, err
		}
		for i := range data {
			data[i] = number()
		}
	case backend.Bool:
		data, err := host.Bools()
		if err != nil {
			return host, err
		}
		for i := range data {
			data[i] = rng.IntN(4) > 0
		}
	case backend.Q8:
		rows, err := host.Q8Rows()
		if err != nil {
			return host, err
		}
		row := make([]float32, shape[backend.Dim])
		for apart := host.Strides()[backend.Seq]; len(rows) > 0; rows = rows[apart:] {
			for i := range row {
				row[i] = number()
			}
			backend.QuantiseQ8(rows, row)
		}
	default:
		data, err := host.Bits()
		if err != nil {
			return host, err
		}
		for i := range data {
			data[i] = dtype.Encode(number())
		}
	}
	t, err := x.b.alloc(dtype, stored)
	if err != nil {
		return t, err
	}
	x.held = append(x.held, t)
	if err := x.b.upload(ctx, t, host); err != nil {
		return t, err
	}
	return t.View(shape, t.Strides(), 0)
}

// bounds sets how far two right results may be apart: twice package oracle's bound
// for a row in which every magnitude is the largest that draw makes, as it grows with
// each of them and with the number of keys.
func (x *exercise) bounds(k tuneClass, keys int, out backend.DType) {
	ones := make([]float32, keys*k.dim)
	for i := range ones {
		ones[i] = 1
	}
	row := oracle.Row{Q: ones[:k.dim], K: ones, V: ones[:keys], Dv: 1, Scale: x.long.Scale, Out: out}
	if k.paired {
		row.Bias = func(int) float64 { return 1 }
	}
	a := oracle.Solve(row)
	x.offO, x.offLSE = 2*a.OBound[0], 2*a.LSEBound
}

// release gives the operands back.
func (x *exercise) release() {
	for _, t := range x.held {
		t.Release()
	}
}

// all returns the candidates: the plain kernel first, then list.
func (x *exercise) all(list []flashVariant) []candidate {
	plain := func(flashShape) (flashVariant, string) { return flashVariant{}, "asked for" }
	all := []candidate{{
		name: plainName, reference: true,
		try: func(ctx context.Context) (err error) {
			x.plain, err = x.results(ctx, plain, false)
			return err
		},
		time: func(ctx context.Context, rounds int) (time.Duration, error) {
			return x.run(ctx, &x.long, plain, false, rounds)
		},
	}}
	for _, v := range list {
		this := func(flashShape) (flashVariant, string) { return v, "asked for" }
		all = append(all, candidate{
			name: v.label(),
			try: func(ctx context.Context) error {
				got, err := x.results(ctx, this, true)
				if err != nil {
					return err
				}
				return x.compare(got)
			},
			time: func(ctx context.Context, rounds int) (time.Duration, error) {
				return x.run(ctx, &x.long, this, true, rounds)
			},
		})
	}
	return all
}

// results runs both calls and returns what they give.
func (x *exercise) results(ctx context.Context, choose chooser, tiled bool) ([]results, error) {
	var all []results
	for _, c := range []*backend.Call{&x.long, &x.edge} {
		if _, err := x.run(ctx, c, choose, tiled, 1); err != nil {
			return nil, err
		}
		var r results
		var err error
		if r.o, err = x.floats(ctx, c.O); err != nil {
			return nil, err
		}
		if r.lse, err = x.floats(ctx, c.LSE); err != nil {
			return nil, err
		}
		all = append(all, r)
	}
	return all, nil
}

// floats downloads t.
func (x *exercise) floats(ctx context.Context, t backend.Tensor) ([]float32, error) {
	host, err := backend.AllocHost(t.DType(), t.Shape())
	if err != nil {
		return nil, err
	}
	dst, err := cut.HostBytes(host)
	if err != nil {
		return nil, err
	}
	if err := x.b.download(ctx, dst, host.Strides(), t); err != nil {
		return nil, err
	}
	if t.DType() == backend.F32 {
		return host.Float32s()
	}
	bits, err := host.Bits()
	data := make([]float32, len(bits))
	for i, h := range bits {
		data[i] = t.DType().Decode(h)
	}
	return data, err
}

// errWrong is what a variant fails with whose results are not those of the others.
var errWrong = errors.New("wrong result")

// compare returns an error when got is further from the plain kernel's results than
// two right ones can be, or has other bits than the first variant that was right.
func (x *exercise) compare(got []results) error {
	if x.plain == nil {
		return errors.New("there is nothing to compare with, as the plain kernel failed")
	}
	for i, call := range []string{"in full", "with hidden keys"} {
		for _, part := range []struct {
			name      string
			got, want []float32
			off       float64
		}{{"o", got[i].o, x.plain[i].o, x.offO}, {"lse", got[i].lse, x.plain[i].lse, x.offLSE}} {
			for n, g := range part.got {
				w := part.want[n]
				if off := math.Abs(float64(g) - float64(w)); !(off <= part.off) && g != w {
					return fmt.Errorf("%w: %s[%d] %s is %v, the plain kernel has %v, %.3g may lie between",
						errWrong, part.name, n, call, g, w, part.off)
				}
			}
		}
	}
	if x.first == nil {
		x.first = got
		return nil
	}
	for i := range got {
		for n, g := range got[i].o {
			if w := x.first[i].o[n]; math.Float32bits(g) != math.Float32bits(w) {
				return fmt.Errorf("%w: o[%d] is %v, other variants have %v", errWrong, n, g, w)
			}
		}
		for n, g := range got[i].lse {
			if w := x.first[i].lse[n]; math.Float32bits(g) != math.Float32bits(w) {
				return fmt.Errorf("%w: lse[%d] is %v, other variants have %v", errWrong, n, g, w)
			}
		}
	}
	return nil
}

// run runs a call some times with the kernel that choose says, and returns how long
// that took by the device's clock, else by the clock on the wall.
func (x *exercise) run(ctx context.Context, c *backend.Call, choose chooser, tiled bool, rounds int) (took time.Duration, err error) {
	a, err := x.b.newAttentionBy(c, choose)
	if err != nil {
		return 0, err
	}
	if a.tiled != tiled {
		return 0, fmt.Errorf("another kernel would run: %s", a.why)
	}
	var kernel time.Duration
	r := x.b.newRunner(backend.WithTrace(ctx, &backend.Trace{
		Kernel:  func(took time.Duration) { kernel += took },
		Compile: backend.TraceOf(ctx).Compile,
	}))
	defer func() { r.finish(err) }()
	began := time.Now()
	for range rounds {
		if err := a.queue(r); err != nil {
			return 0, err
		}
	}
	if err := r.flush(); err != nil {
		return 0, err
	}
	if kernel > 0 {
		return kernel, nil
	}
	return time.Since(began), nil
}
