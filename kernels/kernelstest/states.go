package kernelstest

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kvcache"
)

// stateHistory is a state cache and, for each sequence and number of tokens, the states that plain calls give.
type stateHistory struct {
	dev    *kernels.Device
	rng    *rand.Rand
	cache  *kvcache.States
	config kvcache.StateConfig
	dtype  backend.DType
	decay  int
	w      backend.Tensor // of the convolution
	of     []statesOf
}

type statesOf struct {
	after map[int][2][]float32 // state and rows after so many tokens, where they are known
	n     int
	reach int // that many tokens can be removed for certain
}

const statesQueries, statesKeys = 4, 1

// testStates compares state caches, after random calls, rewinds, forks and files, with plain calls for each sequence alone,
// bit for bit.
func testStates(t *testing.T, dev *kernels.Device, histories int) {
	if !implements[backend.LinearAttender](dev) || !implements[backend.Convolver](dev) {
		t.Logf("%s has no linear attention or no convolutions", dev.Info().Name)
		return
	}
	for seed := range histories {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(uint64(seed), 0x737461))
			h := &stateHistory{dev: dev, rng: rng, dtype: []backend.DType{backend.F32, backend.F32, backend.BF16}[rng.IntN(3)],
				config: kvcache.StateConfig{Batch: 1 + rng.IntN(3), KVHeads: 2, Dim: 8, ValueDim: 12, Channels: 20, Width: 2 + rng.IntN(3), Window: rng.IntN(5)}}
			h.decay = []int{1, h.config.Dim}[rng.IntN(2)]
			h.w = h.draw(t, backend.Shape{1, 1, h.config.Width, h.config.Channels})
			h.cache = must(kvcache.NewStates(t.Context(), dev, h.config))(t)
			defer h.cache.Release()
			zeros := [2][]float32{make([]float32, 2*8*12), make([]float32, (h.config.Width-1)*20)}
			for range h.config.Batch {
				h.of = append(h.of, statesOf{after: map[int][2][]float32{0: zeros}})
			}
			for range 12 {
				story := h.step(t)
				for b := range h.of {
					h.check(t, b, story)
				}
				if t.Failed() {
					return
				}
			}
		})
	}
}

// draw returns a tensor of random numbers, which the test releases.
func (h *stateHistory) draw(t *testing.T, shape backend.Shape) backend.Tensor {
	f := put(t, h.dev, drawn(h.rng, shape, h.dtype), Contiguous)
	t.Cleanup(f.release)
	return f.view
}

// step makes one random change, and says which.
func (h *stateHistory) step(t *testing.T) string {
	b, window := h.rng.IntN(len(h.of)), max(h.config.Window, 1)
	s := &h.of[b]
	counts := slices.Repeat([]int{1 + h.rng.IntN(window)}, len(h.of))
	switch h.rng.IntN(8) {
	case 0:
		counts = slices.Repeat([]int{window + 1 + h.rng.IntN(5)}, len(h.of))
		fallthrough
	case 1, 2, 3:
		h.call(t, counts, false)
		return fmt.Sprintf("a call of %d tokens", counts[0])
	case 4:
		for b := range counts {
			counts[b] = h.rng.IntN(4)
		}
		h.call(t, counts, true)
		return fmt.Sprintf("a packed call of %v tokens", counts)
	case 5:
		to := (b + 1) % len(h.of)
		if err := h.cache.Fork(t.Context(), b, to); to == b {
			wantError(t, "fork to itself", kernels.ErrOption, err)
			return "no fork"
		} else {
			noError(t, err)
		}
		h.of[to] = statesOf{after: map[int][2][]float32{s.n: s.after[s.n], 0: s.after[0]}, n: s.n}
		return fmt.Sprintf("fork %d to %d", b, to)
	case 6:
		var file bytes.Buffer
		noError(t, h.cache.Save(t.Context(), b, &file))
		to := h.rng.IntN(len(h.of))
		noError(t, h.cache.Load(t.Context(), to, bytes.NewReader(file.Bytes()), int64(file.Len())))
		h.of[to] = statesOf{after: map[int][2][]float32{s.n: s.after[s.n], 0: s.after[0]}, n: s.n}
		return fmt.Sprintf("save %d, load %d", b, to)
	}
	n := max(s.n-h.rng.IntN(window+1), 0)
	if h.rng.IntN(6) == 0 {
		n = 0
	}
	err := h.cache.Rewind(b, n)
	if _, known := s.after[n]; n != 0 && (!known || s.n-n > s.reach) && errors.Is(err, kernels.ErrOption) {
		return "no rewind"
	}
	noError(t, err)
	if _, known := s.after[n]; !known {
		t.Fatalf("sequence %d of %d tokens was rewound to %d, after which there was no state", b, s.n, n)
	}
	s.reach, s.n = max(s.reach-(s.n-n), 0), n
	return fmt.Sprintf("rewind %d to %d", b, n)
}

// call makes the two calls of a step, and the same ones for each sequence alone.
func (h *stateHistory) call(t *testing.T, counts []int, packed bool) {
	c, batch, tokens := h.config, len(h.of), counts[0]
	var cuQ []int
	if packed {
		cuQ = []int{0}
		for _, n := range counts {
			cuQ = append(cuQ, cuQ[len(cuQ)-1]+n)
		}
		batch, tokens = 1, cuQ[len(cuQ)-1]
	}
	type shape = backend.Shape
	alloc := func(s shape) backend.Tensor {
		x := must(h.dev.Alloc(t.Context(), backend.F32, s))(t)
		t.Cleanup(x.Release)
		return x
	}
	conv := kernels.CausalConv{X: h.draw(t, shape{batch, 1, tokens, c.Channels}), Y: alloc(shape{batch, 1, tokens, c.Channels}), W: h.w, SiLU: true, CuQ: cuQ}
	linear := kernels.LinearAttention{Q: h.draw(t, shape{batch, statesQueries, tokens, c.Dim}), K: h.draw(t, shape{batch, statesKeys, tokens, c.Dim}),
		V: h.draw(t, shape{batch, c.KVHeads, tokens, c.ValueDim}), O: alloc(shape{batch, statesQueries, tokens, c.ValueDim}), CuQ: cuQ}
	g, beta := drawn(h.rng, shape{batch, c.KVHeads, tokens, h.decay}, h.dtype), drawn(h.rng, shape{batch, 1, tokens, 1}, h.dtype)
	for i, x := range g.data {
		g.data[i] = h.dtype.Round(-0.3 * x * x)
	}
	for i, x := range beta.data {
		beta.data[i] = h.dtype.Round(0.05 * x)
	}
	for to, o := range map[*backend.Tensor]operand{&linear.Decay: g, &linear.Beta: beta} {
		f := put(t, h.dev, o, Contiguous)
		t.Cleanup(f.release)
		*to = f.view
	}
	giveUp := h.rng.IntN(4) == 0
	whole := packed || tokens > c.Window
	for b := 0; !whole && b < len(h.of) && giveUp; b++ { // the step is given up after its convolution
		if b == 0 {
			noError(t, h.cache.CausalConv(t.Context(), conv))
		}
		noError(t, h.cache.Rewind(b, h.of[b].n))
		h.of[b].reach = min(h.of[b].reach, c.Window-tokens)
	}
	noError(t, h.cache.CausalConv(t.Context(), conv))
	noError(t, h.cache.LinearAttention(t.Context(), linear))
	h.plain(t, counts, conv, linear, whole)
}

// plain makes the calls of a step for each sequence alone, whole or for each token, and compares their outputs.
func (h *stateHistory) plain(t *testing.T, counts []int, conv kernels.CausalConv, linear kernels.LinearAttention, whole bool) {
	ctx, c := t.Context(), h.config
	var wants, gots [][]float32
	for b, n := range counts {
		s := &h.of[b]
		step := 1
		if whole {
			step = max(n, 1)
		}
		for i := 0; i < n; i += step {
			ownConv, own := conv, linear
			at, lo, _ := backend.Sequence(linear.CuQ, b, n)
			lo += i
			for _, x := range []*backend.Tensor{&ownConv.X, &ownConv.Y, &own.O, &own.Q, &own.K, &own.V, &own.Decay, &own.Beta} {
				*x = must(must(x.Slice(backend.Batch, at, at+1))(t).Slice(backend.Seq, lo, lo+step))(t)
			}
			gots = append(gots, read(t, h.dev, ownConv.Y), read(t, h.dev, own.O))
			now := s.after[s.n]
			var past [2]backend.Tensor
			for j, shape := range []backend.Shape{{1, c.KVHeads, c.Dim, c.ValueDim}, {1, 1, c.Width - 1, c.Channels}} {
				past[j] = must(h.dev.FromFloat32(ctx, backend.F32, slices.Clone(now[j]), shape))(t)
				defer past[j].Release()
			}
			ownConv.CuQ, own.CuQ = nil, nil
			ownConv.PastState, ownConv.PresentState, own.PastState, own.PresentState = past[1], past[1], past[0], past[0]
			noError(t, h.dev.CausalConv(ctx, ownConv))
			noError(t, h.dev.LinearAttention(ctx, own))
			wants = append(wants, read(t, h.dev, ownConv.Y), read(t, h.dev, own.O))
			s.n += step
			s.after[s.n] = [2][]float32{read(t, h.dev, past[0]), read(t, h.dev, past[1])}
			for n := range s.after {
				if n > s.n || whole && n > s.n-step && n < s.n {
					delete(s.after, n)
				}
			}
		}
		s.reach = min(n, c.Window)
		if whole {
			s.reach = 0
		}
	}
	for i, want := range wants {
		if !slices.EqualFunc(gots[i], want, sameNumber) {
			t.Errorf("output %d of %v tokens differs from that of plain calls", i, counts)
		}
	}
}

// check compares the states of sequence b with those of plain calls.
func (h *stateHistory) check(t *testing.T, b int, story string) {
	t.Helper()
	s := h.of[b]
	if n := h.cache.Lens()[b]; n != s.n {
		t.Errorf("after %s: sequence %d has %d tokens, should have %d", story, b, n, s.n)
	}
	var file bytes.Buffer
	noError(t, h.cache.Save(t.Context(), b, &file))
	want := slices.Concat(s.after[s.n][0], s.after[s.n][1])
	got := make([]float32, len(want))
	noError(t, binary.Read(bytes.NewReader(file.Bytes()[file.Len()-4*len(got):]), binary.LittleEndian, got))
	if !slices.EqualFunc(got, want, sameNumber) {
		t.Errorf("after %s: sequence %d of %d tokens has other states than plain calls give", story, b, s.n)
	}
}
