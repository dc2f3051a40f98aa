package kernelstest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
)

// testRefused calls attention with operands that a backend must refuse.
func testRefused(t *testing.T, dev *kernels.Device) {
	shape := backend.Shape{1, 2, 8, 4}
	fresh := func(t *testing.T, s backend.Shape) backend.Tensor {
		return up(t, dev, make([]float32, s.Elements()), s)
	}
	elsewhere := must(backend.NewTensor(backend.NewMemory(new(int), "another device", 1<<20, nil, nil), backend.F32, shape))(t)
	meta := must(backend.Meta(backend.F32, shape))(t)
	for _, c := range []struct {
		name  string
		want  error
		spoil func(t *testing.T, q, k, v, o, lse *backend.Tensor)
	}{
		{"q released", backend.ErrReleased, func(_ *testing.T, q, _, _, _, _ *backend.Tensor) { q.Release() }},
		{"a view of v released", backend.ErrReleased, func(t *testing.T, _, _, v, _, _ *backend.Tensor) {
			must(v.Slice(backend.Seq, 0, 1))(t).Release()
		}},
		{"o released", backend.ErrReleased, func(_ *testing.T, _, _, _, o, _ *backend.Tensor) { o.Release() }},
		{"k on another backend", backend.ErrDevice, func(_ *testing.T, _, k, _, _, _ *backend.Tensor) { *k = elsewhere }},
		{"o on another backend", backend.ErrDevice, func(_ *testing.T, _, _, _, o, _ *backend.Tensor) { *o = elsewhere }},
		{"q without memory", backend.ErrDevice, func(_ *testing.T, q, _, _, _, _ *backend.Tensor) { *q = meta }},
		{"o is q", backend.ErrOverlap, func(_ *testing.T, q, _, _, o, _ *backend.Tensor) { *o = *q }},
		{"o overlaps v", backend.ErrOverlap, func(t *testing.T, _, _, v, o, _ *backend.Tensor) {
			all := fresh(t, backend.Shape{1, 1, 1, 2 * shape.Elements()})
			*v = must(all.View(shape, shape.Contiguous(), 0))(t)
			*o = must(all.View(shape, shape.Contiguous(), shape.Elements()-1))(t)
		}},
		{"lse overlaps o", backend.ErrOverlap, func(t *testing.T, _, _, _, o, lse *backend.Tensor) {
			*lse = must(o.View(backend.Shape{1, 2, 8, 1}, backend.Strides{16, 8, 1, 1}, 3))(t)
		}},
		{"o repeats itself", backend.ErrOverlap, func(t *testing.T, _, _, _, o, _ *backend.Tensor) {
			*o = must(o.View(shape, backend.Strides{0, 0, 4, 1}, 0))(t)
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			q, k, v, o := fresh(t, shape), fresh(t, shape), fresh(t, shape), fresh(t, shape)
			lse := fresh(t, backend.Shape{1, 2, 8, 1})
			c.spoil(t, &q, &k, &v, &o, &lse)
			err := runInto(t.Context(), dev, kernels.Result{O: o, LSE: lse}, q, k, v, kernels.Options{})
			if !errors.Is(err, c.want) {
				t.Errorf("error is %v, should be %v", err, c.want)
			}
		})
	}
	t.Run("v next to o in one memory is fine", func(t *testing.T) {
		all := fresh(t, backend.Shape{1, 1, 1, 2 * shape.Elements()})
		v := must(all.View(shape, shape.Contiguous(), 0))(t)
		o := must(all.View(shape, shape.Contiguous(), shape.Elements()))(t)
		q := fresh(t, shape)
		if err := runInto(t.Context(), dev, kernels.Result{O: o}, q, q, v, kernels.Options{}); err != nil {
			t.Error(err)
		}
	})
	t.Run("stages", func(t *testing.T) {
		q := fresh(t, shape)
		q.Release()
		wantError(t, "qk", backend.ErrReleased, errorOf(dev.QK(t.Context(), q, q)))
		wantError(t, "softmax", backend.ErrDevice, dev.Softmax(t.Context(), elsewhere, backend.Tensor{}, kernels.Options{Scale: new(1.0)}))
		wantError(t, "pv", backend.ErrDevice, errorOf(dev.PV(t.Context(), elsewhere, fresh(t, backend.Shape{1, 2, 4, 4}))))
	})
}

// testHostOperands calls each operation with its operands in host memory, as HostF32 and AllocHost return them. Every
// backend takes them, and the results are those of the operands that Upload returns, bit for bit.
func testHostOperands(t *testing.T, dev *kernels.Device) {
	type tensors = []backend.Tensor
	ctx, f32, rows := t.Context(), backend.F32, backend.Shape{1, 2, 8, 8}
	lse, relative, angles := backend.Shape{1, 2, 8, 1}, backend.Shape{1, 2, 1, 15}, backend.Shape{1, 2, 8, 4}
	backward := func(x tensors) error {
		c, err := dev.Prepare(x[0], x[1], x[2], kernels.Options{Bias: x[3], LSE: true})
		if err != nil {
			return err
		}
		return c.Backward(ctx, kernels.Gradients{Q: x[4], K: x[5], V: x[6], Bias: x[7]}, kernels.Result{O: x[8], LSE: x[9]}, kernels.Result{O: x[10], LSE: x[11]})
	}
	for _, c := range []struct {
		name   string
		shapes []backend.Shape
		flags  []int // operands that are masks
		call   func(x tensors) error
	}{
		{"attention: o, lse, weights, q, k, v, mask, bias", []backend.Shape{rows, lse, rows, rows, rows, rows, rows, rows}, []int{6}, func(x tensors) error {
			return runInto(ctx, dev, kernels.Result{O: x[0], LSE: x[1], Weights: x[2]}, x[3], x[4], x[5], kernels.Options{Mask: x[6], Bias: x[7]})
		}},
		{"attention: o, q, k, v, blocks, relative", []backend.Shape{rows, rows, rows, rows, rows, relative}, []int{4}, func(x tensors) error {
			return runInto(ctx, dev, kernels.Result{O: x[0]}, x[1], x[2], x[3], kernels.Options{BlockMask: x[4], BlockSize: 1, RelativeBias: x[5]})
		}},
		{"qk: q, k", []backend.Shape{rows, rows}, nil, func(x tensors) error { return errorOf(dev.QK(ctx, x[0], x[1])) }},
		{"softmax: s, lse, mask, bias", []backend.Shape{rows, lse, rows, rows}, []int{2}, func(x tensors) error {
			return dev.Softmax(ctx, x[0], x[1], kernels.Options{Scale: new(1.0), Mask: x[2], Bias: x[3]})
		}},
		{"pv: w, v", []backend.Shape{rows, rows}, nil, func(x tensors) error { return errorOf(dev.PV(ctx, x[0], x[1])) }},
		{"scores: q, k, mask", []backend.Shape{rows, rows, rows}, []int{2}, func(x tensors) error {
			return errorOf(dev.Scores(ctx, x[0], x[1], kernels.Biased, kernels.Options{Mask: x[2]}))
		}},
		{"top weights: q, k, mask", []backend.Shape{rows, rows, rows}, []int{2}, func(x tensors) error {
			return errorOf(dev.TopWeights(ctx, x[0], x[1], 3, kernels.Options{Mask: x[2]}))
		}},
		{"copy: dst, src", []backend.Shape{rows, rows}, nil, func(x tensors) error { return dev.Copy(ctx, x[:1], x[1:]) }},
		{"project: y, x, w, bias", []backend.Shape{rows, rows, rows, {1, 1, 1, 8}}, nil, func(x tensors) error { return dev.Project(ctx, x[0], x[1], x[2], x[3]) }},
		{"rotate: y, x, cos, sin", []backend.Shape{rows, rows, angles, angles}, nil, func(x tensors) error {
			return dev.Rotate(ctx, x[0], x[1], kernels.Angles{Cos: x[2], Sin: x[3]})
		}},
		{"normalise: y, x, w", []backend.Shape{rows, rows, {1, 1, 1, 8}}, nil, func(x tensors) error {
			return dev.Normalise(ctx, x[0], x[1], x[2], kernels.Norm{})
		}},
		{"normalise backward: dx, dw, dy, x, w", []backend.Shape{rows, rows, rows, rows, {1, 2, 1, 8}}, nil, func(x tensors) error {
			return dev.NormaliseBackward(ctx, x[0], x[1], x[2], x[3], x[4], kernels.Norm{})
		}},
		{"gate: y, x, gate", []backend.Shape{rows, rows, lse}, nil, func(x tensors) error { return dev.Gate(ctx, x[0], x[1], x[2], kernels.Sigmoid) }},
		{"gate backward: dx, dgate, dy, x, gate", []backend.Shape{rows, rows, rows, rows, rows}, nil, func(x tensors) error {
			return dev.GateBackward(ctx, x[0], x[1], x[2], x[3], x[4], kernels.Sigmoid)
		}},
		{"merge: o, lse, the part's o and lse", []backend.Shape{rows, lse, rows, lse}, nil, func(x tensors) error {
			return dev.Merge(ctx, kernels.Result{O: x[0], LSE: x[1]}, kernels.Result{O: x[2], LSE: x[3]})
		}},
		{"backward: q, k, v, bias, their gradients, do, dlse, o, lse", []backend.Shape{rows, rows, rows, rows, rows, rows, rows, rows, rows, lse, rows, lse}, nil, backward},
		{"to float32", []backend.Shape{rows}, nil, func(x tensors) error { return errorOf(dev.ToFloat32(ctx, x[0])) }},
	} {
		run := func(hosts func(i int) bool) ([][]float32, error) {
			rng, x := rand.New(rand.NewPCG(1, 2)), tensors(nil)
			for i, s := range c.shapes {
				dtype := f32
				if slices.Contains(c.flags, i) {
					dtype = backend.Bool
				}
				host := must(backend.AllocHost(dtype, s))(t)
				if dtype == f32 {
					for n, all := 0, must(host.Float32s())(t); n < len(all); n++ {
						all[n] = float32(rng.NormFloat64())
					}
				} else {
					for n, all := 0, must(host.Bools())(t); n < len(all); n++ {
						all[n] = n%3 > 0
					}
				}
				if hosts(i) {
					x = append(x, host)
				} else {
					x = append(x, must(dev.Upload(ctx, host))(t))
				}
				defer x[i].Release()
			}
			err := c.call(x)
			var got [][]float32
			for i := range x {
				if err == nil && !slices.Contains(c.flags, i) {
					got = append(got, read(t, dev, x[i]))
				}
			}
			return got, err
		}
		want, err := run(func(int) bool { return false })
		if errors.Is(err, backend.ErrUnsupported) {
			continue
		}
		noError(t, err)
		for only := -1; only < len(c.shapes); only++ {
			got, err := run(func(i int) bool { return only < 0 || i == only })
			if err != nil || !slices.EqualFunc(got, want, slices.Equal[[]float32]) {
				t.Errorf("%s: operand %d in host memory (-1: all): error %v, or other results", c.name, only, err)
			}
		}
	}
}

// testPlan plans the named cases without memory and compares the numbers of pairs with a count pair by pair.
func testPlan(t *testing.T, dev *kernels.Device) {
	incomplete := map[string]int{}
	for _, c := range Cases() {
		if unsupported(dev, c) != "" {
			continue
		}
		var ts [3]backend.Tensor
		for i, s := range []backend.Shape{{c.Batch, c.Heads, c.SeqQ, c.Dim}, {c.Batch, c.KVHeads, c.SeqK, c.Dim}, {c.Batch, c.KVHeads, c.SeqK, c.ValueDim}} {
			ts[i] = must(backend.Meta(c.DType, s))(t)
		}
		p, err := plan(t.Context(), dev, ts[0], ts[1], ts[2], c.Options)
		if err != nil {
			t.Errorf("%v: %v", c, err)
			continue
		}
		var pairs int64
		vis := (&built{Case: c}).visibility()
		for b := range c.Batch {
			for i := range c.SeqQ {
				for j := range c.SeqK {
					if vis(b, i, j) {
						pairs += int64(c.Heads)
					}
				}
			}
		}
		if want := pairs * 2 * int64(c.Dim+c.ValueDim); p.Pairs != pairs || p.FLOPs != want {
			t.Errorf("%v: plan has %d pairs and %d FLOPs, counted %d and %d", c, p.Pairs, p.FLOPs, pairs, want)
		}
		if what := lacksInPlan(p, dev.Info().Name); what != "" {
			incomplete[what]++
		}
	}
	for what, plans := range incomplete {
		t.Errorf("%d plans are incomplete: %s", plans, what)
	}
}

// lacksInPlan returns what a plan of the backend of that name lacks, or "".
func lacksInPlan(p kernels.Plan, name string) string {
	switch {
	case p.Backend != name:
		return fmt.Sprintf("Backend is %q, Info().Name is %q", p.Backend, name)
	case p.Path == "":
		return "Path is empty"
	case p.Why == "":
		return "Why is empty"
	case p.Cut == "":
		return "Cut is empty"
	case p.Bytes <= 0:
		return fmt.Sprintf("Bytes is %d", p.Bytes)
	}
	return ""
}

// testConcurrent runs several problems in several goroutines at once; each must yield the bits of a run alone.
func testConcurrent(t *testing.T, dev *kernels.Device) {
	var cases []*onDevice
	var alone []answer
	for _, i := range []int{0, 2, 13, 21, 30, 44} {
		if unsupported(dev, Cases()[i]) != "" {
			continue
		}
		on := Cases()[i].build().on(t, dev)
		defer on.release()
		cases = append(cases, on)
		alone = append(alone, on.mustRun(t, fused))
	}
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			for n := range 2 * len(cases) {
				i := (n + g) % len(cases)
				got, err := cases[i].run(t, fused)
				if err != nil {
					t.Errorf("%v: %v", cases[i].Case, err)
					return
				}
				if !slices.EqualFunc(got.o, alone[i].o, sameNumber) || !slices.EqualFunc(got.lse, alone[i].lse, sameNumber) {
					t.Errorf("%v: differs from the run alone", cases[i].Case)
				}
			}
		})
	}
	wg.Wait()
}

// testCancel cancels calls before and during their run; later calls work.
func testCancel(t *testing.T, dev *kernels.Device) {
	small := Cases()[0].build().on(t, dev)
	defer small.release()

	dead, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := dev.Attention(dead, small.q.view, small.k.view, small.v.view, kernels.Options{})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("with a cancelled context: error is %v, should be %v", err, context.Canceled)
	}

	// Far more work than any machine does in that time: 2·2·8·32768²·64 operations, more than 10^12.
	big := backend.Shape{1, 8, 32768, 64}
	x := must(dev.Alloc(t.Context(), backend.F32, big))(t)
	defer x.Release()
	o := must(dev.Alloc(t.Context(), backend.F32, big))(t)
	defer o.Release()
	ctx, stop := context.WithTimeout(t.Context(), 30*time.Millisecond)
	defer stop()
	err = runInto(ctx, dev, kernels.Result{O: o}, x, x, x, kernels.Options{})
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("cancelled in the middle: error is %v, should be %v", err, context.DeadlineExceeded)
	}
	if err := small.compare(small.mustRun(t, fused)); err != nil {
		t.Errorf("after a cancelled call: %v", err)
	}
}

// testRelease releases operands while a call runs: the call succeeds and the next one is refused.
func testRelease(t *testing.T, dev *kernels.Device) {
	s := backend.Shape{1, 2, 512, 32}
	for range 5 {
		q, k, v, o := up(t, dev, make([]float32, s.Elements()), s), up(t, dev, make([]float32, s.Elements()), s), up(t, dev, make([]float32, s.Elements()), s), up(t, dev, make([]float32, s.Elements()), s)
		done := make(chan error)
		go func() {
			done <- runInto(t.Context(), dev, kernels.Result{O: o}, q, k, v, kernels.Options{})
		}()
		for _, x := range []backend.Tensor{q, k, v, o} {
			x.Release()
			x.Release() // twice is allowed
		}
		if err := <-done; err != nil && !errors.Is(err, backend.ErrReleased) {
			t.Errorf("released in the middle: %v", err)
		}
		wantError(t, "after the release", backend.ErrReleased, runInto(t.Context(), dev, kernels.Result{O: o}, q, k, v, kernels.Options{}))
	}
}

// testClose closes a new backend while a call runs on it.
func testClose(t *testing.T, h Harness) {
	dev := kernels.NewDevice(h.Open(t))
	s := backend.Shape{1, 1, 256, 16}
	x := must(dev.FromFloat32(t.Context(), backend.F32, make([]float32, s.Elements()), s))(t)
	done := make(chan error)
	go func() {
		_, err := dev.Attention(context.Background(), x, x, x, kernels.Options{})
		done <- err
	}()
	if err := dev.Close(); err != nil {
		t.Errorf("close: %v", err)
	}
	if err := <-done; err != nil && !errors.Is(err, backend.ErrClosed) {
		t.Errorf("a call while the backend closes: %v", err)
	}
	wantError(t, "alloc after close", backend.ErrClosed, errorOf(dev.Alloc(t.Context(), backend.F32, s)))
	wantError(t, "attention after close", backend.ErrClosed, errorOf(dev.Attention(t.Context(), x, x, x, kernels.Options{})))
	x.Release()
	if err := dev.Close(); err != nil {
		t.Errorf("second close: %v", err)
	}
}

// testTransfer uploads and downloads tensors of every dtype, size and stride, and compares their bits.
func testTransfer(t *testing.T, dev *kernels.Device) {
	rng := rand.New(rand.NewPCG(3, 3))
	for _, n := range []int{1, 2, 3, 5, 8, 255, 4097} {
		for _, dtype := range []backend.DType{backend.F32, backend.F16, backend.BF16, backend.Bool, backend.I32} {
			t.Run(fmt.Sprintf("%v %d", dtype, n), func(t *testing.T) {
				host := randomHost(t, rng, dtype, backend.Shape{1, 1, n, 3})
				uploaded := must(dev.Upload(t.Context(), host))(t)
				defer uploaded.Release()
				if uploaded.Shape() != host.Shape() || uploaded.DType() != dtype {
					t.Fatalf("uploaded %v %v, got %v %v", dtype, host.Shape(), uploaded.DType(), uploaded.Shape())
				}
				sameElements(t, dev, host, uploaded)
				// Views: every second row from row 1 on, the transpose, and one column.
				for _, v := range []struct {
					shape   backend.Shape
					strides backend.Strides
					offset  int
				}{
					{backend.Shape{1, 1, (n + 1) / 2, 2}, backend.Strides{0, 0, 2 * 3, 1}, 1},
					{backend.Shape{1, 3, 1, n}, backend.Strides{0, 1, 0, 3}, 0},
					{backend.Shape{2, 1, n, 1}, backend.Strides{0, 0, 3, 1}, 2},
				} {
					hv := must(host.View(v.shape, v.strides, v.offset))(t)
					dv := must(dev.Upload(t.Context(), hv))(t)
					sameElements(t, dev, hv, dv)
					dv.Release()
					if uploaded.IsContiguous() {
						dv = must(uploaded.View(v.shape, v.strides, v.offset))(t)
						sameElements(t, dev, hv, dv)
					}
				}
			})
		}
	}
	t.Run("into a strided host tensor", func(t *testing.T) {
		uploaded := must(dev.FromFloat32(t.Context(), backend.F32, []float32{1, 2, 3, 4, 5, 6}, backend.Shape{1, 1, 2, 3}))(t)
		defer uploaded.Release()
		mem := make([]float32, 8)
		host := must(backend.Host(mem, backend.F32, backend.Shape{1, 1, 1, 8}))(t)
		view := must(host.View(backend.Shape{1, 1, 2, 3}, backend.Strides{0, 0, 1, 2}, 1))(t)
		noError(t, dev.Download(t.Context(), view, uploaded))
		if want := []float32{0, 1, 4, 2, 5, 3, 6, 0}; !slices.Equal(mem, want) {
			t.Errorf("memory is %v, should be %v", mem, want)
		}
	})
}

// randomHost returns a tensor with random bits, without NaN.
func randomHost(t testing.TB, rng *rand.Rand, dtype backend.DType, s backend.Shape) backend.Tensor {
	t.Helper()
	host := must(backend.AllocHost(dtype, s))(t)
	switch dtype {
	case backend.F32:
		x, _ := host.Float32s()
		for i := range x {
			x[i] = float32(rng.NormFloat64())
		}
	case backend.I32:
		x, _ := host.Int32s()
		for i := range x {
			x[i] = rng.Int32N(1<<24) - 1<<23 // exact as float32, see walk
		}
	case backend.Bool:
		x, _ := host.Bools()
		for i := range x {
			x[i] = rng.IntN(2) == 0
		}
	default:
		x, _ := host.Bits()
		for i := range x {
			x[i] = uint16(rng.IntN(1 << 14))
		}
	}
	return host
}

// sameElements downloads uploaded and compares it with host, element by element.
func sameElements(t *testing.T, dev *kernels.Device, host, uploaded backend.Tensor) {
	t.Helper()
	back := must(backend.AllocHost(host.DType(), host.Shape()))(t)
	noError(t, dev.Download(t.Context(), back, uploaded))
	want, got := walk(t, host), walk(t, back)
	if !slices.Equal(want, got) {
		t.Errorf("%v %v strides %v: came back different", host.DType(), host.Shape(), host.Strides())
	}
}

// walk returns the elements of a host tensor of any dtype in row-major order.
func walk(t *testing.T, h backend.Tensor) []float32 {
	t.Helper()
	out := make([]float32, h.Shape().Elements())
	at := func(i int) int { return index(i, h.Shape(), h.Strides()) }
	switch h.DType() {
	case backend.F32:
		x := must(h.Float32s())(t)
		for i := range out {
			out[i] = x[at(i)]
		}
	case backend.I32:
		x := must(h.Int32s())(t)
		for i := range out {
			out[i] = float32(x[at(i)])
		}
	case backend.Bool:
		x := must(h.Bools())(t)
		for i := range out {
			if x[at(i)] {
				out[i] = 1
			}
		}
	default:
		x := must(h.Bits())(t)
		for i := range out {
			out[i] = float32(x[at(i)])
		}
	}
	return out
}
