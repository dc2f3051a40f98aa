package tune

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/backend/oracle"
)

// Runner runs calls on a device.
type Runner interface {
	// Alloc returns a contiguous tensor of the device.
	Alloc(ctx context.Context, dtype backend.DType, shape backend.Shape) (backend.Tensor, error)
	// Upload copies a host tensor to a tensor of the device, Download the reverse.
	Upload(ctx context.Context, dst, host backend.Tensor) error
	Download(ctx context.Context, host, src backend.Tensor) error
	// Run runs c some rounds with v and returns their time by the device's clock, or by
	// the host's where the device has none.
	Run(ctx context.Context, c *backend.Call, v Variant, rounds int) (time.Duration, error)
	// Peak returns the multiply-adds a second of the device, in operations.
	Peak(ctx context.Context) (float64, error)
	// Lanes returns how many workgroups the device runs at the same time.
	Lanes() int
}

const (
	// The call that is timed has longRows rows a head and so many keys that loading and storing a row is a few percent.
	// Software drivers are 100 times slower and have no width to fill.
	longRows    = 1024
	longKeys    = 512
	longKeysCPU = 256
	// The call that is only compared ends inside a tile, of rows and of keys, for every variant.
	edgeRows  = 150
	edgeExtra = 9
	// slope makes biases of up to 1 of the distances in both calls.
	slope = 1.0 / 2048
	// workgroupRows is the most rows of a workgroup. Four workgroups for each that runs
	// at a time are as good as an unbounded grid.
	workgroupRows = 128
)

// exercise is a pair of calls of a class on synthetic operands. long has the size of the class; it is compared and
// timed. edge has hidden keys, several splits and no even sizes; it is compared.
type exercise struct {
	r          Runner
	long, edge backend.Call
	held       []backend.Tensor
	offO       float64 // the largest difference of two right results
	offLSE     float64
	// The results of the plain kernel and of the first variant that was right.
	plain, first *results
}

// results are o and lse of the call long, then of edge.
type results [4][]float32

var resultNames = [4]string{"o", "lse", "o with hidden keys", "lse with hidden keys"}

// newExercise uploads the operands for shape s: one head each, broadcast to all heads.
func newExercise(ctx context.Context, r Runner, s Shape) (_ *exercise, err error) {
	x := &exercise{r: r}
	defer func() {
		if err != nil {
			x.release()
		}
	}()
	k := s.class()
	rows := 4 * workgroupRows * r.Lanes()
	if k.Rows > 0 {
		rows = min(k.Rows, rows)
	}
	perHead := min(rows, longRows)
	if k.Short {
		perHead = shortRows
	}
	heads := max(rows/perHead, 1)
	keys := longKeys
	if s.Software {
		keys = longKeysCPU
	}
	most := keys + s.Tiling.Split + s.Tiling.Keys + edgeExtra
	out := backend.F32
	if k.Half {
		out = backend.F16
	}
	dim, valueDim := k.Dim, k.ValueDim
	if k.Partial {
		less := map[bool]int{false: 4, true: 32}[s.KV == backend.Q4] // rows of q4 are whole blocks
		dim, valueDim = dim-less, valueDim-less
	}
	x.long.Scale = float32(1 / math.Sqrt(float64(k.Dim)))
	x.long.Visible = backend.Everything()
	if k.Pairs.Slopes {
		x.long.Slopes = slices.Repeat([]float32{slope}, heads)
	}
	if k.Pairs.Softcap {
		x.long.Softcap = 20
	}
	if k.Pairs.Dropout {
		x.long.Dropout = backend.Dropout{P: 0.25, Seed: 1}
	}
	rng := rand.New(rand.NewPCG(1, 2))
	for _, t := range []struct {
		to    *backend.Tensor
		dtype backend.DType
		shape backend.Shape
		wide  bool
		skip  bool
	}{
		{&x.long.Q, s.In, backend.Shape{1, 1, perHead, dim}, s.Wide, false},
		{&x.long.K, s.KV, backend.Shape{1, 1, most, dim}, s.Wide, false},
		{&x.long.V, s.KV, backend.Shape{1, 1, most, valueDim}, s.Wide, false},
		{&x.long.Bias, backend.F32, backend.Shape{1, 1, perHead, most}, true, !k.Pairs.Bias},
		{&x.long.Mask, backend.Bool, backend.Shape{1, 1, perHead, most}, true, !k.Pairs.Mask},
	} {
		if t.skip {
			continue
		}
		if *t.to, err = x.upload(ctx, rng, t.dtype, t.shape, t.wide); err != nil {
			return nil, err
		}
		t.shape[backend.Heads] = heads
		if *t.to, err = t.to.Broadcast(t.shape); err != nil {
			return nil, err
		}
	}
	if x.long.O, err = x.alloc(ctx, out, backend.Shape{1, heads, perHead, valueDim}); err != nil {
		return nil, err
	}
	if x.long.LSE, err = x.alloc(ctx, backend.F32, backend.Shape{1, heads, perHead, 1}); err != nil {
		return nil, err
	}
	x.edge = x.long
	x.edge.Visible = backend.Visibility{Offset: most - min(perHead, edgeRows), Left: backend.Unbounded}
	x.edge.Slopes = x.edge.Slopes[:min(2, len(x.edge.Slopes))]
	for _, cut := range []struct {
		axis, n int
		of      []*backend.Tensor
	}{
		{backend.Seq, keys, []*backend.Tensor{&x.long.K, &x.long.V}},
		{backend.Dim, keys, []*backend.Tensor{&x.long.Bias, &x.long.Mask}},
		{backend.Seq, edgeRows, []*backend.Tensor{&x.edge.Q, &x.edge.O, &x.edge.LSE, &x.edge.Bias, &x.edge.Mask}},
		{backend.Heads, 2, []*backend.Tensor{&x.edge.Q, &x.edge.K, &x.edge.V, &x.edge.O, &x.edge.LSE, &x.edge.Bias, &x.edge.Mask}},
	} {
		for _, t := range cut.of {
			if t.IsZero() || cut.n >= t.Shape()[cut.axis] {
				continue
			}
			if *t, err = t.Slice(cut.axis, 0, cut.n); err != nil {
				return nil, err
			}
		}
	}
	x.bounds(k, most, out)
	return x, nil
}

// upload uploads random numbers with magnitudes from 1/2 to 1, or bits of which a quarter is 0.
// Rows that are not wide have a padding of one element and begin at no multiple of 4.
func (x *exercise) upload(ctx context.Context, rng *rand.Rand, dtype backend.DType, shape backend.Shape, wide bool) (backend.Tensor, error) {
	stored := shape
	if !wide && !dtype.Quantised() {
		stored[backend.Dim]++
	}
	number := func() float32 {
		f := 0.5 + rng.Float32()/2
		if rng.IntN(2) == 0 {
			return -f
		}
		return f
	}
	var host backend.Tensor
	var err error
	switch dtype {
	case backend.F32:
		host, err = backend.Host(draw(stored, number), backend.F32, stored)
	case backend.Bool:
		host, err = backend.Host(draw(stored, func() bool { return rng.IntN(4) > 0 }), backend.Bool, stored)
	case backend.Q8, backend.Q4, backend.F8:
		if host, err = backend.AllocHost(dtype, stored); err != nil {
			return host, err
		}
		var rows []byte
		rows, err = host.QuantisedRows()
		for row := range slices.Chunk(draw(stored, number), stored[backend.Dim]) {
			dtype.Quantise(rows, row)
			rows = rows[dtype.Row(len(row)):]
		}
	default:
		host, err = backend.Host(draw(stored, func() uint16 { return dtype.Encode(number()) }), dtype, stored)
	}
	if err != nil {
		return host, err
	}
	t, err := x.alloc(ctx, dtype, stored)
	if err != nil {
		return t, err
	}
	if err := x.r.Upload(ctx, t, host); err != nil {
		return t, err
	}
	return t.View(shape, t.Strides(), 0)
}

// draw returns the elements of a shape, each as next returns it.
func draw[T any](shape backend.Shape, next func() T) []T {
	data := make([]T, shape.Elements())
	for i := range data {
		data[i] = next()
	}
	return data
}

// alloc allocates a tensor until release.
func (x *exercise) alloc(ctx context.Context, dtype backend.DType, shape backend.Shape) (backend.Tensor, error) {
	t, err := x.r.Alloc(ctx, dtype, shape)
	if err == nil {
		x.held = append(x.held, t)
	}
	return t, err
}

// bounds sets the largest difference of two right results: twice package oracle's bound for a row in which every
// magnitude is the largest of upload. The bound grows with each magnitude and with the number of keys.
func (x *exercise) bounds(k Class, keys int, out backend.DType) {
	ones := slices.Repeat([]float32{1}, keys*k.Dim)
	row := oracle.Row{Q: ones[:k.Dim], K: ones, V: ones[:keys], Dv: 1, Scale: x.long.Scale, Softcap: x.long.Softcap, Out: out}
	if k.Pairs.Bias {
		row.Bias = func(int) float64 { return 1 }
	}
	if k.Pairs.Slopes {
		row.Slope, row.Distance = slope, func(int) float64 { return float64(keys) }
	}
	if k.Pairs.Dropout {
		row.Keeps, row.KeepFactor = func(int) bool { return true }, 1/(1-float64(x.long.Dropout.P))
	}
	a := oracle.Solve(row)
	x.offO, x.offLSE = 2*a.OBound[0], 2*a.LSEBound
}

// release releases the operands.
func (x *exercise) release() {
	for _, t := range x.held {
		t.Release()
	}
}

// candidates returns the plain kernel and then the variants of list.
func (x *exercise) candidates(list []Variant) (all []candidate) {
	for _, v := range append([]Variant{{}}, list...) {
		all = append(all, candidate{
			name: v.Label(),
			try: func(ctx context.Context) error {
				got, err := x.results(ctx, v)
				switch {
				case err != nil:
					return err
				case v.Name == "":
					x.plain = got
					return nil
				}
				return x.compare(got)
			},
			time: func(ctx context.Context, rounds int) (time.Duration, error) { return x.r.Run(ctx, &x.long, v, rounds) },
		})
	}
	return all
}

// results runs both calls and returns their results.
func (x *exercise) results(ctx context.Context, v Variant) (*results, error) {
	var all results
	for i, c := range []*backend.Call{&x.long, &x.edge} {
		if _, err := x.r.Run(ctx, c, v, 1); err != nil {
			return nil, err
		}
		for j, t := range []backend.Tensor{c.O, c.LSE} {
			var err error
			if all[2*i+j], err = x.floats(ctx, t); err != nil {
				return nil, err
			}
		}
	}
	return &all, nil
}

// floats downloads t.
func (x *exercise) floats(ctx context.Context, t backend.Tensor) ([]float32, error) {
	host, err := backend.AllocHost(t.DType(), t.Shape())
	if err == nil {
		err = x.r.Download(ctx, host, t)
	}
	if err != nil {
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

// errWrong is the failure of a variant whose results differ.
var errWrong = errors.New("wrong result")

// compare returns an error when got differs from the plain kernel's results by more than
// two right results can, or in a bit from those of the first variant that was right.
func (x *exercise) compare(got *results) error {
	if x.plain == nil {
		return errors.New("there is nothing to compare with, because the plain kernel failed")
	}
	for i, name := range resultNames {
		off := []float64{x.offO, x.offLSE}[i%2]
		for n, g := range got[i] {
			if w := x.plain[i][n]; !(math.Abs(float64(g)-float64(w)) <= off) && g != w {
				return fmt.Errorf("%w: element %d of %s is %v, the plain kernel has %v; they may differ by %.3g", errWrong, n, name, g, w, off)
			}
			if x.first == nil {
				continue
			}
			if w := x.first[i][n]; math.Float32bits(g) != math.Float32bits(w) {
				return fmt.Errorf("%w: element %d of %s is %v, other variants have %v", errWrong, n, name, g, w)
			}
		}
	}
	if x.first == nil {
		x.first = got
	}
	return nil
}
