package kvcache

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/internal/op"
	"github.com/seed90331342/attn/kernels/internal/region"
)

// StateConfig is the shape of a [States]. Fields left 0 mean: Batch 1, KVHeads 1, ValueDim as Dim.
type StateConfig struct {
	// Batch is the number of sequences.
	Batch int
	// KVHeads, Dim and ValueDim are Hv, K and V of the states.
	KVHeads, Dim, ValueDim int
	// Channels and Width are Ch and W of the convolution; both 0 mean none.
	Channels, Width int
	// Window is the number of tokens that Rewind can remove, and of states of a sequence besides its own. With 0 calls
	// update the only state in place.
	Window int
}

// States keeps the states of linear attention and of the convolution before it, in F32, for a fixed number of sequences:
//
//	err := states.CausalConv(ctx, kernels.CausalConv{..})          // of all sequences; the cache sets the states
//	err = states.LinearAttention(ctx, kernels.LinearAttention{..}) // of the same tokens
//	err = states.Rewind(0, states.Lens()[0]-2)                     // two tokens of sequence 0 were rejected
//
// Sequences have Window+1 states each. The states of the same age are adjacent, so that a call serves all sequences. A packed
// call (CuQ) can leave some out, which costs a copy of their states. After a Rewind, Fork or Load the next call copies the
// states that are of another age than that of sequence 0.
//
// A call of at most Window tokens that is not packed is computed token after token, and leaves the state after each. The bits of
// speculative decoding are then those of plain decoding. Keeping the inputs of a call instead, and computing the accepted
// tokens again, would take 57 kB a token in a layer of Qwen3-Next, where a state takes 2 MiB. But on the CPU the bits of
// tokens that are computed together depend on their number.
//
// Methods are safe for concurrent use and run one at a time. After an error the sequences are unchanged, but Rewind may remove
// fewer tokens. Without a Window their states may be changed in part: Rewind them to 0.
type States struct {
	config       StateConfig
	pool         *pool // without pages: the device, the lock, and whether it was released
	linear, conv ring
	zero         kernels.Tensor
}

// ring is states after the last tokens, each [B, Hv, K, V], or [B, 1, W-1, Ch] of a convolution.
type ring struct {
	states      []kernels.Tensor
	at, n, back []int // of each sequence: the index of its state, or -1 for zeros; its tokens; how many states before are there
}

// NewStates returns states of zeros, for the caller to Release. Errors as for [New].
func NewStates(ctx context.Context, dev *kernels.Device, c StateConfig) (x *States, err error) {
	defer op.Annotate(&err, "states")
	p := &pool{dev: dev}
	if err := p.configure(ctx, Config{KVHeads: c.KVHeads, Dim: c.Dim, ValueDim: c.ValueDim, Window: c.Window}); err != nil {
		return nil, err
	}
	c.Batch, c.KVHeads, c.ValueDim = cmp.Or(c.Batch, 1), p.config.KVHeads, p.config.ValueDim
	if conv := min(c.Channels, 1); c.Batch < 1 || c.Batch > op.MaxLength || conv < 0 || c.Channels > op.MaxLength || c.Width < 2*conv || c.Width > op.MaxConv*conv {
		return nil, fmt.Errorf("config: Batch is %d, Channels is %d and Width is %d: they must be at least 1, 1 and 2, the Width at most %d, and both 0 without a convolution: %w",
			c.Batch, c.Channels, c.Width, op.MaxConv, kernels.ErrOption)
	}
	if err := kernels.CheckMemory(48*int64(c.Batch) + 64*int64(c.Window)); err != nil {
		return nil, err
	}
	x = &States{config: c, pool: p}
	x.zero, err = dev.FromFloat32(ctx, kernels.F32, make([]float32, 1), kernels.Shape{1, 1, 1, 1})
	for i, r := range x.rings() {
		shape := [...]kernels.Shape{{c.Batch, c.KVHeads, c.Dim, c.ValueDim}, {c.Batch, 1, c.Width - 1, c.Channels}}[i]
		r.states, r.at, r.n, r.back = make([]kernels.Tensor, c.Window+1), slices.Repeat([]int{-1}, c.Batch), make([]int, c.Batch), make([]int, c.Batch)
		for j := 0; j <= c.Window && err == nil; j++ {
			r.states[j], err = dev.Alloc(ctx, kernels.F32, shape)
		}
	}
	if p.kv[0] = x.zero; err != nil {
		x.Release()
		return nil, err
	}
	return x, nil
}

// rings returns the rings that there are.
func (c *States) rings() []*ring { return []*ring{&c.linear, &c.conv}[:1+min(c.config.Channels, 1)] }

// Release frees the memory. Later calls return ErrReleased.
func (c *States) Release() {
	c.pool.orNone().release()
	for _, t := range slices.Concat(c.linear.states, c.conv.states) {
		t.Release()
	}
}

// Lens returns the number of tokens of each sequence.
func (c *States) Lens() []int {
	p := c.pool.orNone()
	p.mu.RLock()
	defer p.mu.RUnlock()
	return slices.Clone(c.linear.n)
}

// CausalConv is [kernels.Device.CausalConv] of the next tokens of each sequence, before LinearAttention of these tokens.
// Errors as there, ErrOption for a call with states of its own and for a cache without a convolution, and ErrReleased.
func (c *States) CausalConv(ctx context.Context, call kernels.CausalConv) error {
	return c.run(ctx, &c.conv, call.PastState, call.PresentState, call.CuQ, []*kernels.Tensor{&call.X, &call.Y}, func(past, present kernels.Tensor) error {
		call.PastState, call.PresentState = past, present
		return c.pool.dev.CausalConv(ctx, call)
	})
}

// LinearAttention is [kernels.Device.LinearAttention] of the next tokens of each sequence. Errors as for CausalConv.
func (c *States) LinearAttention(ctx context.Context, call kernels.LinearAttention) error {
	operands := []*kernels.Tensor{&call.Q, &call.K, &call.V, &call.Decay, &call.Beta, &call.O}
	return c.run(ctx, &c.linear, call.PastState, call.PresentState, call.CuQ, operands, func(past, present kernels.Tensor) error {
		call.PastState, call.PresentState = past, present
		return c.pool.dev.LinearAttention(ctx, call)
	})
}

// run makes a call with the states of r, or one for each token.
func (c *States) run(ctx context.Context, r *ring, past, present kernels.Tensor, cuQ []int, operands []*kernels.Tensor, do func(past, present kernels.Tensor) error) (err error) {
	return c.change("states", 0, false, func() error {
		switch {
		case len(r.states) == 0:
			return fmt.Errorf("the cache has no convolution, set Channels and Width of its config: %w", kernels.ErrOption)
		case !past.IsZero() || !present.IsZero():
			return fmt.Errorf("past state or present state is set, but the cache sets them itself: %w", kernels.ErrOption)
		}
		whole, tokens, calls := make([]kernels.Tensor, len(operands)), operands[0].Shape()[kernels.Seq], 1
		single := cuQ == nil && tokens > 0 && tokens <= c.config.Window
		for i, t := range operands {
			whole[i], single = *t, single && (t.IsZero() || t.Shape()[kernels.Seq] == tokens) // or the device refuses the call
		}
		if single {
			calls = tokens
		}
		if err := c.align(ctx, r); err != nil {
			return err
		}
		at, size := r.at[0], len(r.states)
		for b, n := range r.back {
			r.back[b] = max(min(n, c.config.Window-calls), 0) // the calls overwrite the others
		}
		for i := range calls {
			for j, t := range operands {
				if single {
					*t = region.Slice(whole[j], kernels.Seq, i, i+1)
				}
			}
			if err := do(r.states[(at+i)%size], r.states[(at+i+1)%size]); err != nil {
				return err
			}
		}
		for b := range r.n {
			_, lo, hi := backend.Sequence(cuQ, b, tokens)
			r.n[b], r.at[b], r.back[b] = r.n[b]+hi-lo, (at+calls)%size, r.back[b]+calls
			if !single {
				r.back[b] = 0
			}
		}
		return nil
	})
}

// align copies the states of all sequences to one index, that of sequence 0 if it has one.
func (c *States) align(ctx context.Context, r *ring) error {
	var dst, src []kernels.Tensor
	to := max(r.at[0], 0)
	for b, at := range r.at {
		if at != to {
			r.back[b] = 0
			dst, src = append(dst, region.Slice(r.states[to], kernels.Batch, b, b+1)), append(src, c.of(r, b))
		}
	}
	if len(dst) == 0 {
		return nil
	}
	if err := c.pool.dev.Copy(ctx, dst, src); err != nil {
		return err
	}
	r.at = slices.Repeat([]int{to}, len(r.at))
	return nil
}

// of returns the state of sequence b.
func (c *States) of(r *ring, b int) kernels.Tensor {
	state := region.Slice(r.states[max(r.at[b], 0)], kernels.Batch, b, b+1)
	if r.at[b] < 0 {
		state, _ = c.zero.Broadcast(state.Shape()) // one number has every shape
	}
	return state
}

// change applies f to sequence b. With whole its convolution must have as many tokens as its state.
func (c *States) change(operation string, b int, whole bool, f func() error) error {
	return c.pool.orNone().change(operation, func() error {
		switch {
		case b < 0 || b >= c.config.Batch:
			return fmt.Errorf("sequence %d does not exist, the cache has %d: %w", b, c.config.Batch, kernels.ErrOption)
		case whole && c.config.Channels > 0 && c.linear.n[b] != c.conv.n[b]:
			return fmt.Errorf("sequence %d has %d tokens in its state and %d in its convolution: make both calls, or Rewind it: %w", b, c.linear.n[b], c.conv.n[b], kernels.ErrOption)
		}
		return f()
	})
}

// Rewind removes tokens from the end of sequence b and leaves length of them, as [Cache.Rewind] does: up to Window tokens, of
// calls that have no more and are not packed, or all, for another sequence to begin. It may follow CausalConv alone. It
// returns ErrOption for other lengths and for a sequence that does not exist, and ErrReleased.
func (c *States) Rewind(b, length int) error {
	return c.change("rewind", b, false, func() error {
		for _, r := range c.rings() {
			if least, most := r.n[b]-r.back[b], min(r.n[b], c.linear.n[b]); length != 0 && (length < least || length > most) {
				return fmt.Errorf("length is %d, it must be 0 or %d to %d, of which the cache has the states: %w", length, least, most, kernels.ErrOption)
			}
		}
		for _, r := range c.rings() {
			n := r.n[b] - length
			if r.n[b], r.back[b] = length, max(r.back[b]-n, 0); length == 0 {
				r.at[b] = -1
			} else {
				r.at[b] = (r.at[b] - n + len(r.states)) % len(r.states)
			}
		}
		return nil
	})
}

// Fork makes sequence to a copy of sequence b, which Rewind does not shorten. Errors: ErrOption for sequences that do not exist
// and between the two calls of a step, ErrReleased, and the backend's.
func (c *States) Fork(ctx context.Context, b, to int) error {
	return c.change("fork", b, true, func() error {
		if to < 0 || to >= c.config.Batch || to == b {
			return fmt.Errorf("sequence %d is no other one of %d: %w", to, c.config.Batch, kernels.ErrOption)
		}
		return c.set(ctx, to, c.linear.n[b], c.of(&c.linear, b), c.of(&c.conv, b))
	})
}

// set makes copies of a state and rows those of sequence b after n tokens. They take the places of the oldest ones.
func (c *States) set(ctx context.Context, b, n int, src ...kernels.Tensor) error {
	var dst []kernels.Tensor
	for _, r := range c.rings() {
		r.back[b] = 0
		dst = append(dst, region.Slice(r.states[(r.at[b]+1)%len(r.states)], kernels.Batch, b, b+1))
	}
	if err := c.pool.dev.Copy(ctx, dst, src[:len(dst)]); err != nil {
		return err
	}
	for _, r := range c.rings() {
		r.n[b], r.at[b] = n, (r.at[b]+1)%len(r.states)
	}
	return nil
}
