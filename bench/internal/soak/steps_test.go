package soak

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"

	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest"
	"github.com/seed90331342/attn/kernels/kvcache"
	"github.com/seed90331342/attn/kernels/nn"
)

// failed is what must and ok panic with, and try recovers.
type failed struct{ error }

func ok(err error) {
	if err != nil {
		panic(failed{err})
	}
}

func must[T any](x T, err error) T {
	ok(err)
	return x
}

// try returns what f returns, or the error with which it ended.
func try(f func() [][]float32) (out [][]float32, err error) {
	defer func() {
		switch r := recover().(type) {
		case nil:
		case failed:
			err = r.error
		default:
			panic(r)
		}
	}()
	return f(), nil
}

// quick is a testing.TB outside of a test, for operands.
type quick struct{ testing.TB }

func (quick) Helper()                      {}
func (quick) Context() context.Context     { return context.Background() }
func (quick) Fatal(args ...any)            { ok(errors.New(fmt.Sprint(args...))) }
func (quick) Fatalf(f string, args ...any) { ok(fmt.Errorf(f, args...)) }

// set is the operands of a case on a device.
type set struct {
	life
	kernelstest.Operands
}

// newSet uploads operands. A variant has other queries, and another row of keys and values.
func newSet(dev *kernels.Device, c kernelstest.Case, variant int) *set {
	if variant > 0 {
		c.Gain, c.PoisonK, c.PoisonV = 2, map[int]float32{0: 0.5}, map[int]float32{0: -2}
	}
	return &set{Operands: c.Put(quick{}, dev)}
}

// drawCase draws a call that a device can plan: any with few rows, or a plain one that may have more.
func drawCase(rng *rand.Rand, onGPU bool) (c kernelstest.Case) {
	meter := kernels.NewDevice(cpu.New(cpu.Options{}))
	defer meter.Close()
	for {
		if c = kernelstest.Draw(rng.Int()); onGPU || rng.IntN(2) == 0 {
			length := func() int { return 1 + rng.IntN([]int{1, 4, 40, 130, 300}[rng.IntN(5)]) }
			heads, dim := 1+rng.IntN(2), []int{4, 20, 32, 64}[rng.IntN(4)]
			if onGPU { // each other kernel takes a second to compile
				dim = 32
			}
			c = kernelstest.Case{Name: "plain", Seed: rng.Uint64(), Dims: kernels.Dims{Batch: 1 + rng.IntN(3),
				Heads: heads * (1 + rng.IntN(3)), KVHeads: heads, SeqQ: length(), SeqK: length(), Dim: dim, ValueDim: dim}}
		}
		o, kind := &c.Options, rng.IntN(10)
		if o.LSE = rng.IntN(2) == 0; onGPU {
			return c
		}
		switch kind {
		case 0:
			c.Keys = new(kernels.Q8)
		case 1:
			c.PageSize, o.KLen = []int{4, 5, 16, 64}[rng.IntN(4)], nil
			for range c.Batch {
				o.KLen = append(o.KLen, rng.IntN(c.SeqK+1))
			}
		case 2:
			o.Weights = true
		case 3:
			o.CuQ, o.CuK = []int{0, c.SeqQ / 3, c.SeqQ}, []int{0, c.SeqK / 2, c.SeqK}
		}
		if _, err := try(func() [][]float32 {
			s := newSet(meter, c, 0)
			must(must(meter.Prepare(s.Q, s.K, s.V, s.Options)).Plan(context.Background()))
			return nil
		}); err == nil && c.SeqK > 0 { // without keys, operands are not looked at
			return c
		}
	}
}

// actor is a goroutine of a history, with what only it uses.
type actor struct {
	h      *history
	id, at int
	call   *kernels.Call // prepared on device of, for a variant of case n, with operands
	of     *opened
	n      int
	varied int
	with   *set
	chains []*chain
}

// shared returns operands that all goroutines use, new ones after a release.
func (a *actor) shared(d *opened, n, variant int) *set {
	d.mu.Lock()
	defer d.mu.Unlock()
	at := [2]int{n, variant}
	if s := d.sets[at]; s == nil || s.began.Load() {
		a.may(d, func() { d.sets[at] = newSet(d.dev, a.h.cases[n], variant) })
	}
	return d.sets[at]
}

// may runs f, which may fail if the device is closed or memory is refused.
func (a *actor) may(d *opened, f func()) {
	if _, err := try(func() [][]float32 { f(); return nil }); err != nil && !d.began.Load() && !a.h.refuses {
		a.h.fault("goroutine %d, step %d on %s: %v", a.id, a.at, d.name, err)
	}
}

// work is a step that computes. It takes the operands s, and a call c of them, unless the step prepares its own.
type work func(h *history, ctx context.Context, dev *kernels.Device, s *set, c *kernels.Call) [][]float32

// compute runs w, of case n, on shared operands or with the prepared call.
func (a *actor) compute(rng *rand.Rand, what string, d *opened, s *set, c *kernels.Call, n, variant int, w work) {
	h := a.h
	a.do(rng, fmt.Sprintf("%s of variant %d of %v", what, variant, h.cases[n]), d, []*life{&s.life}, false,
		func(ctx context.Context) [][]float32 { return w(h, ctx, d.dev, s, c) },
		func(dev *kernels.Device, _ [][]float32) [][]float32 {
			s := newSet(dev, h.cases[n], variant)
			return w(h, context.Background(), dev, s, must(dev.Prepare(s.Q, s.K, s.V, s.Options)))
		})
}

// step runs step i, which depends on the seed alone.
func (a *actor) step(i int) {
	a.at = i
	rng := rand.New(rand.NewPCG(a.h.seed, uint64(1000*(a.id+1)+i)))
	slot, n, variant, kind := rng.IntN(len(a.h.slots)), rng.IntN(len(a.h.cases)), rng.IntN(2), rng.IntN(40)
	d := a.h.slots[slot].Load()
	switch {
	case d.began.Load() && rng.IntN(3) == 0:
		a.h.open(slot)
		return
	case kind == 0:
		for range 1 + rng.IntN(2) {
			d.end(func() { ok(d.dev.Close()) })
		}
		return
	case kind < 17:
		a.chainStep(rng, d, kind)
		return
	}
	s := a.shared(d, n, variant)
	if s == nil {
		return
	}
	c := &a.h.cases[n]
	staged := func(c *kernelstest.Case) bool { return c.Keys == nil && c.PageSize == 0 }
	prepared := func(what string, w work) { a.compute(rng, what, a.of, a.with, a.call, a.n, a.varied, w) }
	switch {
	case kind < 20:
		a.compute(rng, "attention", d, s, nil, n, variant, attention)
	case kind == 20 && rng.IntN(2) == 0:
		s.end(func() { s.Q.Release(); s.K.Release(); s.V.Release() })
	case kind == 21 && staged(c) && c.Options.CuQ == nil:
		a.compute(rng, "stages", d, s, nil, n, variant, stages)
	case kind == 22 && staged(c) && c.Options.CuQ == nil && c.Name == "plain" && c.SeqK > 1:
		a.compute(rng, "merge", d, s, nil, n, variant, merge)
	case kind == 23 && c.Dim > 1:
		a.compute(rng, "operations", d, s, nil, n, variant, operations)
	case kind == 24:
		a.wrong(rng, d, s)
	case kind < 29 || a.call == nil:
		if a.call != nil && a.of == d && rng.IntN(2) == 0 {
			ok(a.call.Reset(s.Q, s.K, s.V, s.Options))
		} else {
			a.call = must(d.dev.Prepare(s.Q, s.K, s.V, s.Options))
		}
		a.of, a.n, a.varied, a.with = d, n, variant, s
	case kind == 29:
		if other := a.shared(a.of, a.n, 1-a.varied); other != nil {
			ok(a.call.Reset(other.Q, other.K, other.V, other.Options))
			a.varied, a.with = 1-a.varied, other
		}
	case kind == 30:
		runtime.GOMAXPROCS(1 + rng.IntN(8))
		a.may(a.of, func() {
			must(a.call.Plan(context.Background()))
			ok(a.call.Warmup(context.Background()))
		})
	case kind < 33:
		prepared("run", run)
	case kind < 36:
		prepared("into", runInto)
	case kind == 36:
		prepared("check", check)
	case staged(&a.h.cases[a.n]):
		prepared("backward", backward)
	}
}

// wrong makes a call that must be refused.
func (a *actor) wrong(rng *rand.Rand, d *opened, s *set) {
	kind := rng.IntN(7)
	a.do(rng, fmt.Sprintf("wrong call %d", kind), d, []*life{&s.life}, true, func(ctx context.Context) [][]float32 {
		opt := s.Options
		switch kind {
		case 0:
			var none context.Context
			must(d.dev.Attention(none, s.Q, s.K, s.V, opt))
		case 1:
			must(new(kernels.Call).Run(ctx))
		case 2:
			must(d.dev.Alloc(ctx, kernels.F32, kernels.Shape{1, -1, 1, 1}))
		case 3:
			ok(must(d.dev.Prepare(s.Q, s.K, s.V, opt)).RunInto(ctx, kernels.Result{O: s.Q, LSE: s.Q}))
		case 4:
			must(d.dev.Attention(ctx, must(kernels.Meta(s.Q.DType(), s.Q.Shape())), s.K, s.V, opt))
		case 5:
			ok(d.dev.Softmax(ctx, s.Q, kernels.Tensor{}, kernels.Options{}))
		case 6:
			opt.Softcap = math.NaN()
			must(d.dev.Attention(ctx, s.Q, s.K, s.V, opt))
		}
		return nil
	}, nil)
}

// all downloads tensors.
func all(ctx context.Context, dev *kernels.Device, tensors ...kernels.Tensor) (out [][]float32) {
	for _, t := range tensors {
		if !t.IsZero() {
			out = append(out, must(dev.ToFloat32(ctx, t)))
		}
	}
	return out
}

func attention(_ *history, ctx context.Context, dev *kernels.Device, s *set, _ *kernels.Call) [][]float32 {
	r := must(dev.Attention(ctx, s.Q, s.K, s.V, s.Options))
	defer r.Release()
	return all(ctx, dev, r.O, r.LSE, r.Weights)
}

func run(_ *history, ctx context.Context, dev *kernels.Device, _ *set, c *kernels.Call) [][]float32 {
	r := must(c.Run(ctx))
	defer r.Release()
	return all(ctx, dev, r.O, r.LSE, r.Weights)
}

func check(_ *history, ctx context.Context, _ *kernels.Device, _ *set, c *kernels.Call) [][]float32 {
	r := must(c.Run(ctx))
	defer r.Release()
	if report := must(c.Check(ctx, r, kernels.CheckOptions{Rows: 4})); !report.OK() {
		ok(fmt.Errorf("%w: %s", errDamage, report.Worst))
	}
	return nil
}

// outputs returns the shapes of O and LSE.
func outputs(c *kernels.Call) []kernels.Shape {
	d := c.Dims()
	return []kernels.Shape{{d.Batch, d.Heads, d.SeqQ, d.ValueDim}, {d.Batch, d.Heads, d.SeqQ, 1}}
}

// runInto runs c into frames. A call that ends early and can be resumed is resumed.
func runInto(h *history, ctx context.Context, dev *kernels.Device, s *set, c *kernels.Call) [][]float32 {
	return h.into(ctx, dev, outputs(c), func(t []kernels.Tensor) (more [][]float32) {
		err := c.RunInto(ctx, kernels.Result{O: t[0], LSE: t[1]})
		if left, resumes := errors.AsType[*kernels.Interrupted](err); resumes {
			err = must(dev.Prepare(s.Q, s.K, s.V, s.Options)).Resume(context.Background(), kernels.Result{O: t[0], LSE: t[1]}, left.Partial)
		}
		ok(err)
		return nil
	})
}

func backward(h *history, ctx context.Context, dev *kernels.Device, s *set, c *kernels.Call) [][]float32 {
	shapes := append(outputs(c), s.Q.Shape(), s.K.Shape(), s.V.Shape())
	do := must(dev.FromFloat32(ctx, kernels.F32, numbers(7, shapes[0].Elements()), shapes[0]))
	defer do.Release()
	return h.into(ctx, dev, shapes, func(t []kernels.Tensor) [][]float32 {
		r := kernels.Result{O: t[0], LSE: t[1]}
		ok(c.RunInto(ctx, r))
		want := c.Gradients()
		want.Q, want.K, want.V = kernels.Tensor{}, kernels.Tensor{}, kernels.Tensor{}
		g := must(c.AllocGradients(ctx, want))
		defer g.Release()
		g.Q, g.K, g.V = t[2], t[3], t[4]
		ok(c.Backward(ctx, g, kernels.Result{O: do}, r))
		return all(ctx, dev, g.Bias, g.RelativeBias, g.ALiBi, g.Sinks)
	})
}

func stages(_ *history, ctx context.Context, dev *kernels.Device, s *set, _ *kernels.Call) [][]float32 {
	opt := s.Options
	opt.LSE, opt.Weights, opt.Scale = false, false, new(0.2)
	scores := must(dev.QK(ctx, s.Q, s.K))
	defer scores.Release()
	ok(dev.Softmax(ctx, scores, kernels.Tensor{}, opt))
	o := must(dev.PV(ctx, scores, s.V))
	defer o.Release()
	biased := must(dev.Scores(ctx, s.Q, s.K, kernels.Biased, opt))
	defer biased.Release()
	return append(all(ctx, dev, scores, o, biased), must(dev.TopWeights(ctx, s.Q, s.K, 2, opt)).Weights)
}

// merge computes the two halves of the keys, and merges them.
func merge(h *history, ctx context.Context, dev *kernels.Device, s *set, _ *kernels.Call) [][]float32 {
	opt := s.Options
	opt.Weights = false
	shapes, n := outputs(must(dev.Prepare(s.Q, s.K, s.V, opt))), s.K.Shape()[kernels.Seq]
	return h.into(ctx, dev, append(shapes, shapes...), func(t []kernels.Tensor) [][]float32 {
		for i, at := range [2][2]int{{0, n / 2}, {n / 2, n}} {
			k, v := must(s.K.Slice(kernels.Seq, at[0], at[1])), must(s.V.Slice(kernels.Seq, at[0], at[1]))
			ok(must(dev.Prepare(s.Q, k, v, opt)).RunInto(ctx, kernels.Result{O: t[2*i], LSE: t[2*i+1]}))
		}
		ok(dev.Merge(ctx, kernels.Result{O: t[0], LSE: t[1]}, kernels.Result{O: t[2], LSE: t[3]}))
		return nil
	})
}

// operations copies, projects and rotates the queries.
func operations(h *history, ctx context.Context, dev *kernels.Device, s *set, _ *kernels.Call) [][]float32 {
	const n = 24
	x := s.Q.Shape()
	var in [3]kernels.Tensor
	for i, shape := range []kernels.Shape{{1, 1, x[3], n}, {1, 1, x[2], x[3] / 2}, {1, 1, x[2], x[3] / 2}} {
		in[i] = must(dev.FromFloat32(ctx, kernels.F32, numbers(uint64(i), shape.Elements()), shape))
		defer in[i].Release()
	}
	return h.into(ctx, dev, []kernels.Shape{x, {x[0], x[1], x[2], n}, x}, func(t []kernels.Tensor) [][]float32 {
		ok(dev.Copy(ctx, t[:1], []kernels.Tensor{s.Q}))
		ok(dev.Project(ctx, t[1], s.Q, in[0], kernels.Tensor{}))
		ok(dev.Rotate(ctx, t[2], s.Q, kernels.Angles{Cos: in[1], Sin: in[2]}))
		return nil
	})
}

// cached is a paged cache that all goroutines of a history share.
type cached struct {
	life
	c   *kvcache.Paged
	cfg kvcache.PagedConfig
}

// chain is a sequence of a shared cache, or of a cache of its own, and its tokens.
type chain struct {
	life
	on     *opened
	in     *cached // nil for own
	s      *kvcache.Sequence
	own    *kvcache.Cache
	cfg    kvcache.PagedConfig
	tokens []uint64
}

// rows returns the keys (0) or values (1) of tokens, [1, Hkv, n, D].
func (c *chain) rows(tokens []uint64, kind uint64) []float32 {
	heads, dim := c.cfg.KVHeads, c.cfg.Dim
	data := make([]float32, heads*len(tokens)*dim)
	for i, token := range tokens {
		row := numbers(2*token+kind, heads*dim)
		for h := range heads {
			copy(data[(h*len(tokens)+i)*dim:], row[h*dim:][:dim])
		}
	}
	return data
}

// chainStep makes, extends, forks, truncates, frees or attends to sequences.
func (a *actor) chainStep(rng *rand.Rand, d *opened, kind int) {
	gone := func(c *chain) bool { return c.began.Load() || c.on.began.Load() || c.in != nil && c.in.began.Load() }
	if rng.IntN(8) > 0 { // seldom use those that ended
		a.chains = slices.DeleteFunc(a.chains, gone)
	}
	if kind < 3 || len(a.chains) == 0 {
		a.may(d, func() { a.newChain(rng, d) })
		return
	}
	c := a.chains[rng.IntN(len(a.chains))]
	own := []*chain{c}
	for _, other := range a.chains {
		if other != c && c.in != nil && other.in == c.in && len(own) < 3 && rng.IntN(4) > 0 {
			own = append(own, other)
		}
	}
	switch {
	case kind < 8:
		a.append(rng, own)
	case kind < 14:
		a.attend(rng, own)
	case kind == 14:
		_, err := try(func() [][]float32 {
			if c.own == nil {
				a.chains = append(a.chains, &chain{on: c.on, in: c.in, s: must(c.s.Fork()), cfg: c.cfg, tokens: slices.Clone(c.tokens)})
				return nil
			}
			n := rng.IntN(len(c.tokens) + 1)
			ok(c.own.Rewind(0, n))
			c.tokens = c.tokens[:n]
			return nil
		})
		if err != nil && !(errors.Is(err, kernels.ErrReleased) && gone(c)) {
			a.h.fault("goroutine %d, step %d: fork or truncate: %v", a.id, a.at, err)
		}
	case kind == 15 && c.own != nil:
		c.end(c.own.Release)
	case kind == 15:
		c.end(c.s.Free)
	case c.in != nil && rng.IntN(4) == 0:
		c.in.end(c.in.c.Release)
	}
}

func (a *actor) newChain(rng *rand.Rand, d *opened) {
	ctx := context.Background()
	cfg := kvcache.PagedConfig{KVHeads: 2, Dim: 32, PageSize: []int{1, 4, 5, 16}[rng.IntN(4)], Pages: 16 + rng.IntN(100)}
	if !a.h.gpu {
		cfg.DType = []kernels.DType{kernels.F32, kernels.F16, kernels.BF16, kernels.Q8}[rng.IntN(4)]
		if rng.IntN(4) == 0 {
			cfg.RoPE = &nn.RoPE{}
		}
	}
	c := &chain{on: d, cfg: cfg}
	if rng.IntN(4) == 0 {
		c.own = must(kvcache.New(ctx, d.dev, kvcache.Config{KVHeads: 2, Dim: cfg.Dim, DType: cfg.DType, RoPE: cfg.RoPE, Capacity: 64}))
	} else {
		d.mu.Lock()
		defer d.mu.Unlock()
		if d.cache == nil || d.cache.began.Load() {
			if rng.IntN(4) == 0 {
				cfg.Window, cfg.RoPE = 1+rng.IntN(20), nil
			}
			d.cache = &cached{c: must(kvcache.NewPaged(ctx, d.dev, cfg)), cfg: cfg}
		}
		c.in, c.cfg = d.cache, d.cache.cfg
		var err error
		if c.s, err = c.in.c.NewSequence(); err != nil && c.in.began.Load() {
			return
		}
		ok(err)
	}
	a.chains = append(a.chains, c)
}

// lives returns the objects that sequences are of.
func lives(chains []*chain) (all []*life) {
	for _, c := range chains {
		if all = append(all, &c.life); c.in != nil {
			all = append(all, &c.in.life)
		}
	}
	return all
}

// batchOf returns sequences as a batch.
func batchOf(chains []*chain) nn.KVCache {
	if chains[0].own != nil {
		return chains[0].own
	}
	var seqs []*kvcache.Sequence
	for _, c := range chains {
		seqs = append(seqs, c.s)
	}
	return chains[0].in.c.Batch(seqs...)
}

func (a *actor) append(rng *rand.Rand, own []*chain) {
	d, n, first := own[0].on, 1+rng.IntN(12), rng.Uint64()>>2
	var data [2][]float32
	tokens := make([][]uint64, len(own))
	for i := range own {
		for j := range n {
			tokens[i] = append(tokens[i], first+uint64(100*i+j))
		}
		for kind := range data {
			data[kind] = append(data[kind], own[i].rows(tokens[i], uint64(kind))...)
		}
	}
	if a.do(rng, fmt.Sprintf("append %d tokens to %d sequences", n, len(own)), d, lives(own), false, func(ctx context.Context) [][]float32 {
		var x [2]kernels.Tensor
		for i := range x {
			x[i] = must(d.dev.FromFloat32(ctx, kernels.F32, data[i], kernels.Shape{len(own), own[0].cfg.KVHeads, n, own[0].cfg.Dim}))
			defer x[i].Release()
		}
		ok(batchOf(own).Append(ctx, x[0], x[1], nil))
		return nil
	}, nil) {
		for i, c := range own {
			c.tokens = append(c.tokens, tokens[i]...)
		}
	}
}

// attend attends from the last tokens of sequences. Alone, the tokens of each are in a new cache.
func (a *actor) attend(rng *rand.Rand, own []*chain) {
	h, d, cfg, n, seed := a.h, own[0].on, own[0].cfg, 1+rng.IntN(3), rng.Uint64()>>1
	if cfg.Window > 0 {
		n = 1 // a window keeps the tokens that rows after the last append see
	}
	var count []int
	var tokens [][]uint64
	for _, c := range own {
		count, tokens = append(count, min(n, len(c.tokens))), append(tokens, slices.Clone(c.tokens))
	}
	if slices.Max(count) == 0 {
		return // a call from an empty cache is refused
	}
	heads := 2 * cfg.KVHeads
	size := heads * n * cfg.Dim
	q := numbers(seed, len(own)*size)
	attend := func(ctx context.Context, dev *kernels.Device, c nn.KVCache, batch, n int, q []float32, opt kvcache.CallOptions) []float32 {
		shape := kernels.Shape{batch, heads, n, cfg.Dim}
		x := must(dev.FromFloat32(ctx, kernels.F32, q, shape))
		defer x.Release()
		return h.into(ctx, dev, []kernels.Shape{shape}, func(t []kernels.Tensor) [][]float32 {
			ok(c.AttentionInto(ctx, kernels.Result{O: t[0]}, x, opt))
			return nil
		})[0]
	}
	// A window and a shared prefix have the sums in another order than alone: they are within the bound of float64.
	opt := kvcache.CallOptions{Count: count, SharePrefix: cfg.Window == 0 && cfg.RoPE == nil && rng.IntN(3) == 0}
	alone := func(dev *kernels.Device, i int, q, got []float32) []float32 {
		ctx, n, tokens := context.Background(), count[i], tokens[i]
		put := func(dtype kernels.DType, data []float32, heads, n int) kernels.Tensor {
			return must(dev.FromFloat32(ctx, dtype, data, kernels.Shape{1, heads, n, cfg.Dim}))
		}
		k, v := own[i].rows(tokens, 0), own[i].rows(tokens, 1)
		if !opt.SharePrefix && cfg.Window == 0 {
			c := must(kvcache.New(ctx, dev, kvcache.Config{KVHeads: cfg.KVHeads, Dim: cfg.Dim, DType: cfg.DType, RoPE: cfg.RoPE, Capacity: len(tokens)}))
			defer c.Release()
			ok(c.Append(ctx, put(kernels.F32, k, cfg.KVHeads, len(tokens)), put(kernels.F32, v, cfg.KVHeads, len(tokens)), nil))
			return attend(ctx, dev, c, 1, n, q, kvcache.CallOptions{})
		}
		plain := kernels.Options{Causal: true, Align: kernels.LowerRight}
		if cfg.Window > 0 {
			plain.Window = &kernels.Window{Left: cfg.Window - 1}
		}
		call := must(dev.Prepare(put(kernels.F32, q, heads, n), put(cfg.DType, k, cfg.KVHeads, len(tokens)), put(cfg.DType, v, cfg.KVHeads, len(tokens)), plain))
		if report := must(call.Check(ctx, kernels.Result{O: put(kernels.F32, got, heads, n)}, kernels.CheckOptions{Rows: heads * n})); !report.OK() {
			ok(errors.New(report.Worst))
		}
		return got
	}
	a.do(rng, fmt.Sprintf("attend from %d tokens of %d sequences, %v, shared prefix %t", count, len(own), cfg, opt.SharePrefix), d, lives(own), false,
		func(ctx context.Context) [][]float32 {
			return [][]float32{firstRows(attend(ctx, d.dev, batchOf(own), len(own), n, q, opt), n, cfg.Dim, heads, count)}
		},
		func(dev *kernels.Device, got [][]float32) [][]float32 {
			var out []float32
			for i, n := range count {
				if n > 0 {
					q := firstRows(q[i*size:][:size], size/heads/cfg.Dim, cfg.Dim, heads, count[i:i+1])
					out = append(out, alone(dev, i, q, got[0][len(out):][:len(q)])...)
				}
			}
			return [][]float32{out}
		})
}

// firstRows returns the first count[b] of n rows of each head of each sequence b of [B, H, n, D].
func firstRows(data []float32, n, dim, heads int, count []int) (rows []float32) {
	for i := range heads * len(count) {
		rows = append(rows, data[i*n*dim:][:count[i/heads]*dim]...)
	}
	return rows
}
