package gpu

import (
	"context"
	"fmt"
	"math/bits"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/cut"
	"github.com/seed90331342/attn/gpu/internal/queue"
	"github.com/seed90331342/attn/shaders"
)

const (
	// linearColumns is the number of columns of a state that a workgroup of linear.wgsl has, linearRows that of its rows for
	// each of Rows, chunkRows likewise in chunks, and linearStage that of the vec4 that it stages, of up to linearTokens tokens,
	// those of a chunk.
	linearColumns, linearRows, chunkRows, linearStage, linearTokens = 16, 32, 16, 768, 16
	// maxLinearDim is the largest K. A thread then has 128 elements of a state.
	maxLinearDim = 1024
	// maxChunkDim is the largest K of chunks, whose workgroups then have up to 32 KiB of memory, and chunksFrom the fewest tokens of a
	// sequence that is computed in chunks.
	maxChunkDim, chunksFrom = 128, 2 * linearTokens
)

// Axes of [B, H, T, K], [B, H, T, V] and [N, H, K, V] of linear attention, in chunks of tokens.
var (
	tokenAxes = [4]int{cut.Batch, cut.Head, cut.Sum, cut.Whole}
	valueAxes = [4]int{cut.Batch, cut.Head, cut.Sum, cut.Col}
	stateAxes = [4]int{cut.Batch, cut.Head, cut.Whole, cut.Col}
)

// LinearAttention implements backend.LinearAttender, in chunks of 16 tokens or token after token, see linear. It returns
// backend.ErrUnsupported for K above 1,024.
func (b *Backend) LinearAttention(ctx context.Context, c *backend.LinearAttention) error {
	if k := c.K.Shape()[backend.Dim]; k > maxLinearDim {
		return fmt.Errorf("linear attention: rows of q and k have %d elements, GPUs take up to %d: use the CPU: %w", k, maxLinearDim, backend.ErrUnsupported)
	}
	out, in := c.Operands()
	return b.sequences(ctx, "linear attention", out, in[:], c.PastState, c.CuQ, func(n int) ([]*queue.Op, error) {
		x := *c
		err := sequence(c.CuQ, n, []*backend.Tensor{&x.O, &x.Q, &x.K, &x.V, &x.Decay, &x.Beta}, &x.PastState, &x.PresentState)
		if err != nil {
			return nil, err
		}
		return []*queue.Op{b.linear(&x)}, nil
	})
}

// sequences runs a call with states: the operations that build returns for each packed sequence, or for 0 if there are none.
func (b *Backend) sequences(ctx context.Context, name string, out [2]backend.Operand, in []backend.Operand, past backend.Tensor, cuQ []int, build func(n int) ([]*queue.Op, error)) error {
	o := operands{out: out[:], in: in}
	if out[1].Tensor == past {
		o.updated = out[1:]
	}
	return b.within(ctx, name, func() error {
		return b.do(ctx, queue.Work{Name: name}, 1, func(int) operands { return o }, backend.Sequences(cuQ, 1), build)
	})
}

// sequence replaces rows by those of packed sequence n, and states by its state.
func sequence(cuQ []int, n int, rows []*backend.Tensor, states ...*backend.Tensor) (err error) {
	for i, t := range append(rows, states...) {
		switch {
		case cuQ == nil || t.IsZero() || err != nil:
		case i < len(rows):
			*t, err = t.Slice(backend.Seq, cuQ[n], cuQ[n+1])
		default:
			*t, err = t.Slice(backend.Batch, n, n+1)
		}
	}
	return err
}

// some returns t, or the zero Tensor if it has no elements.
func some(t backend.Tensor) backend.Tensor {
	if t.Shape().Elements() == 0 {
		return backend.Tensor{}
	}
	return t
}

// linear returns the operation of c, which is not packed. It computes chunks, unless ChunkSize is 1, c has few tokens or a large K,
// the workgroups of the device have too little memory, or its bindings are too small for the rows of a chunk. Without decays of
// channels, matrix units compute them that divide a chunk. Cuts are between chunks and change no bit.
func (b *Backend) linear(c *backend.LinearAttention) *queue.Op {
	dim := c.K.Shape()[backend.Dim]
	var kernels []shaders.Variant
	if c.ChunkSize != 1 && c.O.Shape()[backend.Seq] >= chunksFrom && dim <= maxChunkDim {
		if x, whyNot := b.matrices.Largest(); whyNot == "" && c.Decay.Shape()[backend.Dim] <= 1 && linearTokens%x.M+linearTokens%x.N+linearTokens%x.K == 0 {
			low := c.Q.DType() == backend.F32 || c.K.DType() == backend.F32
			kernels = append(kernels, shaders.MatrixLinear{Rows: linearRowsOf(dim, linearRows), Low: low, M: x.M, N: x.N, K: x.K, Lanes: x.Lanes})
		}
		kernels = append(kernels, shaders.Linear{Rows: linearRowsOf(dim, chunkRows), Chunks: true})
	}
	for _, k := range kernels {
		if shaders.Describe(k).WorkgroupMemory <= int(b.dev.Limits.MaxComputeWorkgroupStorageSize) {
			if op := b.linearBy(k, c); op.Cutter.Fits(op.Space) == nil {
				return op
			}
		}
	}
	return b.linearBy(shaders.Linear{Rows: linearRowsOf(dim, linearRows)}, c)
}

// linearRowsOf returns the Rows, a power of 2, whose workgroups have dim rows of a state. Each of Rows has n of them.
func linearRowsOf(dim, n int) int { return 1 << bits.Len(uint((dim-1)/n)) }

// linearBy returns the operation of c by a kernel. Boxes have all output heads of a state. Chunks of tokens leave the state in
// scratch for the next one.
func (b *Backend) linearBy(kernel shaders.Variant, c *backend.LinearAttention) *queue.Op {
	constants := shaders.Describe(kernel).Constants
	all, dim, states := c.O.Shape(), c.K.Shape()[backend.Dim], c.V.Shape()[backend.Heads]
	tokens, group := all[backend.Seq], all[backend.Heads]/states
	granule, width := 1, 4*int(constants["QUADS"]) // of a staged row
	decayed := when(!c.Decay.IsZero(), 1) + when(c.Decay.Shape()[backend.Dim] > 1, 1)
	fit, others := 4*linearStage/width, 1+decayed/2 // staged rows, and those of a token that are no queries
	queries := min(group, fit-others)
	w := shaders.LinearParams{
		Group: group, QueryGroup: all[backend.Heads] / c.Q.Shape()[backend.Heads], KeyGroup: all[backend.Heads] / c.K.Shape()[backend.Heads], Dim: dim,
		Held: max(min(fit/(others+group), linearTokens), 1), Slots: others + queries, Queries: queries, Decayed: decayed, Delta: when(!c.Beta.IsZero(), 1), Scale: c.Scale,
		Leaves: when(!c.PresentState.IsZero(), 1), Starts: when(!c.PastState.IsZero(), 1), QueryType: int(c.Q.DType()), KeyType: int(c.K.DType()),
		ValueType: int(c.V.DType()), DecayType: int(c.Decay.DType()), BetaType: int(c.Beta.DType()), OutType: int(c.O.DType()),
	}
	loops := 4 + 2*group + (w.Slots+group)*width/(16*linearRows)              // of a thread for a token
	each := float64(width * (linearColumns*(5+2*group) + convertOps*w.Slots)) // of a token
	if constants["CHUNKS"] == 1 {
		granule = linearTokens
		w.Held, w.Slots, w.Queries = linearTokens, others+1, 1
		loops, each = 16+11*group, float64(width*(linearColumns*(6+5*group)+convertOps*(others+group)))
	}
	past, present := inOut("past state", c.PastState, "present state", c.PresentState)
	inPlace := past.T.IsZero() && !c.PastState.IsZero()
	ops := []*cut.Operand{
		cut.Reads("q", some(c.Q), tokenAxes, w.QueryGroup), cut.Reads("k", some(c.K), tokenAxes, w.KeyGroup), cut.Reads("v", some(c.V), valueAxes, group),
		cut.Reads("decay", some(c.Decay), tokenAxes, group), cut.Reads("beta", some(c.Beta), tokenAxes, group), past, cut.Writes("o", some(c.O), valueAxes), present,
	}
	ops[0].Heads, ops[6].Heads = group, group
	for _, o := range []*cut.Operand{past, present} {
		o.T, o.Axes, o.Group = some(o.T), stateAxes, group
	}
	cutter := b.dev.NewCutter(cut.Sum, granule, ops...)
	cutter.State = func(x cut.Box) uint64 {
		return uint64(4 * x.Len(cut.Batch) * x.Len(cut.Head) / group * dim * x.Len(cut.Col))
	}
	cutter.Most[cut.Sum] = cut.LongestChunk(granule, granule*loops, float64(granule)*each, b.dev.ChunkWork(kernel))
	return &queue.Op{
		Cutter: cutter, Space: cut.Space(all[backend.Batch], all[backend.Heads], 1, all[backend.Dim], max(tokens, 1)),
		Step: func(x queue.Chunk) queue.Step {
			v, windows, w := make([]cut.View, len(ops)), make([]cut.Window, len(ops)), w
			for i, o := range ops {
				v[i] = o.View(x.Box, cutter.Align)
			}
			w.Heads, w.Head0, w.VDim, w.Tokens = x.Len(cut.Head)/group, x.Lo[cut.Head], x.Len(cut.Col), min(x.Len(cut.Sum), tokens)
			w.Blocks = ceil(w.VDim, linearColumns)
			scratch := cut.View{Window: x.State, Strides: backend.Strides{w.Heads * dim * w.VDim, dim * w.VDim, w.VDim, 1}}
			switch { // the state before, and the one after
			case x.Of.State == 0:
				w.Starts += when(inPlace, 1)
			case x.First && inPlace:
				v[5], v[7] = v[7], scratch
			case x.First:
				v[7], w.Leaves = scratch, 1
			case x.Last:
				v[5], w.Starts = scratch, 1
			default:
				v[5], v[7], w.Starts, w.Leaves = cut.View{}, scratch, 2, 1
			}
			w.Query, w.Key, w.Value, w.Decay, w.Beta = strides(v[0]), strides(v[1]), strides(v[2]), strides(v[3]), strides(v[4])
			w.Past, w.O, w.Present = strides(v[5]), strides(v[6]), strides(v[7])
			for i := range v {
				windows[i] = v[i].Window
			}
			return queue.Step{Kernel: kernel, Params: &w, Windows: windows, Groups: x.Len(cut.Batch) * w.Heads * w.Blocks, OpsPerGroup: each * float64(w.Tokens+1)}
		},
	}
}

// Axes of [B, 1, S, Ch] in convolutions, and of those whose rows a workgroup needs together. Channels are cut as heads are.
var convAxes, convWhole = [4]int{cut.Batch, cut.Whole, cut.Row, cut.Head}, [4]int{cut.Batch, cut.Whole, cut.Whole, cut.Head}

// convUnits is the number of elements of a workgroup of conv.wgsl, and convOps the approximate
// cost of a product, with two memory accesses.
const convUnits, convOps = 64, 30

// CausalConv implements backend.Convolver: the tokens that need the state, the others, and then the state after them.
func (b *Backend) CausalConv(ctx context.Context, c *backend.CausalConv) error {
	out, in := c.Operands()
	return b.sequences(ctx, "causal convolution", out, in[:], c.PastState, c.CuQ, func(n int) (ops []*queue.Op, err error) {
		c := *c
		if err := sequence(c.CuQ, n, []*backend.Tensor{&c.Y, &c.X}, &c.PastState, &c.PresentState); err != nil {
			return nil, err
		}
		tokens, before := c.X.Shape()[backend.Seq], c.W.Shape()[backend.Seq]-1
		tail := min(tokens, before)
		y, x, state := c, c, c
		for _, part := range []struct {
			t      *backend.Tensor
			lo, hi int
		}{{&y.Y, 0, tail}, {&y.X, 0, tail}, {&x.Y, tail, tokens}, {&state.X, tokens - tail, tokens}} {
			if *part.t, err = part.t.Slice(backend.Seq, part.lo, part.hi); err != nil {
				return nil, err
			}
		}
		if tail > 0 {
			ops = append(ops, b.conv(&y, before, 0, 0, tail))
		}
		if tokens > before { // x is [B, W, S-W+1, Ch]: element (i, s) is that of token s+i
			shape, strides := x.X.Shape(), x.X.Strides()
			shape[backend.Heads], strides[backend.Heads], shape[backend.Seq] = before+1, strides[backend.Seq], tokens-before
			if x.X, err = x.X.View(shape, strides, 0); err != nil {
				return nil, err
			}
			ops = append(ops, b.conv(&x, 0, 0, 0, tokens-before))
		}
		if before > 0 && !c.PresentState.IsZero() {
			state.Y, state.W, state.Bias = c.PresentState, backend.Tensor{}, backend.Tensor{}
			once := before // rows of a dispatch
			if c.PastState == c.PresentState {
				once = tail // in place it reads the rows after them
			}
			for lo := 0; lo < before && once > 0; lo += once {
				ops = append(ops, b.conv(&state, before, tail, lo, min(lo+once, before)))
			}
		}
		return ops, nil
	})
}

// conv returns the operation that computes Y of c, or rows lo to hi of a state if there is no W, from so many rows of PastState
// and those of X.
func (b *Backend) conv(c *backend.CausalConv, before, tail, lo, hi int) *queue.Op {
	sh, width := c.Y.Shape(), c.W.Shape()[backend.Seq]
	past, y := inOut("past state", some(c.PastState), "y", c.Y)
	x, w, bias := cut.Reads("x", some(c.X), convAxes, 1), cut.Reads("w", c.W, convWhole, 1), cut.Reads("bias", c.Bias, convWhole, 1)
	past.Axes, y.Axes, w.Axes[0], bias.Axes[0] = convWhole, convAxes, cut.Whole, cut.Whole
	if before > 0 {
		x.Axes = convWhole
	}
	space := backend.Shape{sh[backend.Batch], sh[backend.Dim], hi - lo, 1}
	if width == 0 {
		y.Name, y.Axes = "present state", convWhole
	}
	return b.rowOp(space, []*cut.Operand{x, w, bias, past, y}, func(box cut.Box, v []cut.View) queue.Step {
		p := &shaders.ConvParams{
			Rows: box.Len(cut.Row), Row0: when(before > 0, lo+box.Lo[cut.Row]), Channels: box.Len(cut.Head), All: rows(box), Width: width, Before: before, Tail: tail,
			Starts: when(!c.PastState.IsZero(), 1) + when(c.PastState == c.Y, 1), Shifted: when(!c.Bias.IsZero(), 1), Silu: when(c.SiLU, 1),
			XType: int(c.X.DType()), WType: int(c.W.DType()), ConstantType: int(c.Bias.DType()), PastType: int(c.PastState.DType()), OutType: int(c.Y.DType()),
			X: strides(v[0]), W: strides(v[1]), Constant: strides(v[2]), Past: strides(v[3]), O: strides(v[4]),
		}
		return queue.Step{Kernel: shaders.Conv, Params: p, Groups: ceil(p.All, convUnits), OpsPerGroup: float64(convUnits * convOps * (width + 1))}
	})
}
