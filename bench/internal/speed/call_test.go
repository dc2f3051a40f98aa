package speed

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"path"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
)

// row is a row of a table: a call and its target.
type row struct {
	name         string // without the shape, which label adds
	batch        int    // 0 is 1
	heads, kv    int    // query heads, 0 is 8; key and value heads, 0 is as many
	sq, sk, dim  int    // rows; keys, 0 is as many; elements of a head
	latent       int    // unless 0, the values are so many elements of the keys
	dtype        kernels.DType
	pages        int // keys of a page; 0: keys are in one tensor
	option       option
	backward     bool                       // measure gradients of q, k and v
	gradients    func(g *backend.Gradients) // requests others
	againstPlain bool                       // take turns with plain
	one          bool                       // measure it on one thread only
	want         [2]float64                 // percent on one thread and on two; 0: no target
}

// option changes a call of float32 operands.
type option func(c *backend.Call)

// label returns the name with the shape last, so that no row's label begins another's.
func (r row) label() string {
	shape := fmt.Sprintf("q%dk%dd%d", r.sq, r.sk, r.dim)
	switch {
	case r.sk == 0:
		shape = fmt.Sprintf("s%dd%d", r.sq, r.dim)
	case r.sq == 1:
		shape = fmt.Sprintf("k%dd%d", r.sk, r.dim)
	}
	if r.heads > 0 || r.kv > 0 {
		heads := cmp.Or(r.heads, 8)
		shape += fmt.Sprintf("h%don%d", heads, cmp.Or(r.kv, heads))
	}
	return path.Join(r.name, shape)
}

// plain returns the row's call with float32 keys in one tensor and without options.
func (r row) plain() row {
	r.dtype, r.pages, r.option, r.gradients = kernels.F32, 0, nil, nil
	return r
}

// bench measures r on that many threads, against plain where r has it so.
func (r row) bench(b *testing.B, threads int) {
	be := must(cpu.Open(cpu.Options{Threads: threads}))
	defer be.Close()
	var base *job
	if r.againstPlain {
		j := r.plain().job(b, be)
		base = &j
	}
	measure(b, be, r.job(b, be), base, r.want[threads-1])
}

// job returns the row's call on be.
func (r row) job(b *testing.B, be *cpu.Backend) job {
	c, ctx := r.call(b, be), b.Context()
	plan, run := must(be.Plan(ctx, c)), func() error { return be.Attention(ctx, c) }
	if r.backward {
		d := c.Dims()
		c.LSE = random(4, kernels.Shape{d.Batch, d.Heads, d.SeqQ, 1})
		check(run())
		g := &backend.Gradients{Call: *c, DO: random(5, c.O.Shape()), DLSE: random(6, c.LSE.Shape()),
			DQ: random(7, c.Q.Shape()), DK: random(8, c.K.Shape()), DV: random(9, c.V.Shape())}
		if r.gradients != nil {
			r.gradients(g)
		}
		plan, run = must(be.PlanBackward(ctx, g)), func() error { return be.Backward(ctx, g) }
	}
	j := job{run: run, pairs: float64(plan.Pairs), flops: float64(plan.FLOPs), reads: []kernels.Tensor{c.K, c.V}}
	if r.latent > 0 {
		j.reads = j.reads[:1]
	}
	if !c.Blocks.IsZero() { // plans count what the visibility rule leaves
		seen := 0
		for _, sees := range must(c.Blocks.Bools())[:c.Blocks.Shape().Elements()] {
			if sees {
				seen += min(c.BlockQ, c.Dims().SeqQ) * c.BlockK
			}
		}
		j.flops *= float64(seen) / j.pairs
		j.pairs = float64(seen)
	}
	return j
}

// call returns the row's call over random operands.
func (r row) call(b *testing.B, be *cpu.Backend) *backend.Call {
	batch, heads, sk := cmp.Or(r.batch, 1), cmp.Or(r.heads, 8), cmp.Or(r.sk, r.sq)
	q, k := kernels.Shape{batch, heads, r.sq, r.dim}, kernels.Shape{batch, cmp.Or(r.kv, heads), sk, r.dim}
	c := &backend.Call{Q: random(1, q), K: random(2, k), V: random(3, k), O: random(4, q),
		Problem: backend.Problem{Scale: 0.125, Visible: backend.Everything()}}
	if r.option != nil {
		r.option(c)
	}
	dev := kernels.NewDevice(be)
	for _, x := range []*kernels.Tensor{&c.K, &c.V, &c.Q, &c.O} {
		dtype := r.dtype
		if (dtype == kernels.Q8 || dtype == kernels.F8) && (x == &c.Q || x == &c.O) {
			dtype = kernels.F32
		}
		*x = must(dev.FromFloat32(b.Context(), dtype, must(x.Float32s()), x.Shape()))
	}
	if r.latent > 0 {
		c.V, c.O = must(c.K.Slice(kernels.Dim, 0, r.latent)), must(c.O.Slice(kernels.Dim, 0, r.latent))
	}
	if r.pages > 0 {
		c.Pages = &backend.Pages{Table: [][]int32{nil}, Keys: sk}
		order := rand.New(rand.NewPCG(7, 7)).Perm((sk + r.pages - 1) / r.pages)
		for _, p := range order {
			c.Pages.Table[0] = append(c.Pages.Table[0], int32(p))
		}
		c.K, c.V = inPages(b, be, c.K, r.pages, order), inPages(b, be, c.V, r.pages, order)
	}
	return c
}

// inPages returns x, of one batch, in pages: page i of each head at order[i]. A head's pages
// are adjacent, as in kvcache.Paged.
func inPages(b *testing.B, be *cpu.Backend, x kernels.Tensor, size int, order []int) kernels.Tensor {
	s := x.Shape()
	pool := must(must(kernels.AllocHost(x.DType(), kernels.Shape{s[kernels.Heads], len(order), size, s[kernels.Dim]})).Swap(kernels.Batch, kernels.Heads))
	for i, p := range order {
		lo, hi := i*size, min((i+1)*size, s[kernels.Seq])
		page := must(must(pool.Slice(kernels.Batch, p, p+1)).Slice(kernels.Seq, 0, hi-lo))
		check(be.Copy(b.Context(), []kernels.Tensor{page}, []kernels.Tensor{must(x.Slice(kernels.Seq, lo, hi))}))
	}
	return pool
}

// random returns a contiguous tensor of numbers in [-1, 1).
func random(seed uint64, shape kernels.Shape) kernels.Tensor {
	rng := rand.New(rand.NewPCG(seed, 3))
	t := must(kernels.AllocHost(kernels.F32, shape))
	data := must(t.Float32s())
	for i := range data {
		data[i] = rng.Float32()*2 - 1
	}
	return t
}

// flags returns flags of which percent are true.
func flags(percent int, shape kernels.Shape) kernels.Tensor {
	rng := rand.New(rand.NewPCG(8, 4))
	data := make([]bool, shape.Elements())
	for i := range data {
		data[i] = rng.IntN(100) < percent
	}
	return must(kernels.HostBool(data, shape))
}
