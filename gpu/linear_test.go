package gpu

import (
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/backend/oracle"
	"github.com/seed90331342/attn/gpu/internal/queue"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// gatedDelta returns a call of linear attention with decays of channels.
func gatedDelta(t testing.TB, b *Backend, batch, hq, hk, hv, tokens, k, v int) *backend.LinearAttention {
	t.Helper()
	up := func(heads, dim int, f func(i int) float32) backend.Tensor {
		return upload(t, b, host(t, backend.Shape{batch, heads, tokens, dim}, f))
	}
	length := 1 / float32(math.Sqrt(float64(k)))
	states := backend.Shape{batch, hv, k, v}
	return &backend.LinearAttention{
		Q: up(hq, k, wave), K: up(hk, k, func(i int) float32 { return wave(i+1) * length }), V: up(hv, v, func(i int) float32 { return wave(i + 2) }),
		Decay: up(hv, k, func(i int) float32 { return -wave(i) * wave(i) }), Beta: up(hv, 1, func(i int) float32 { return wave(i)*0.4 + 0.9 }),
		O: alloc(t, b, backend.F32, backend.Shape{batch, max(hq, hv), tokens, v}), PastState: upload(t, b, host(t, states, wave)),
		PresentState: alloc(t, b, backend.F32, states), Scale: 0.3,
	}
}

// TestLinearCuts compares linear attention that is cut with whole calls bit for bit: with the state in place, without
// a final state, and without either.
func TestLinearCuts(t *testing.T) {
	results := func(opt Options) (all [][]float32, cuts int) {
		b := open(t, opt)
		defer b.Close() // before the next one is opened
		c := gatedDelta(t, b, 2, 4, 1, 2, 150, 40, 33)
		e := must.Get(b.dev.Count(b.linear(c)))(t)
		check(t, b.LinearAttention(t.Context(), c))
		all = append(all, floats(t, b, c.O), floats(t, b, c.PresentState))
		c.PresentState = backend.Tensor{}
		check(t, b.LinearAttention(t.Context(), c))
		all = append(all, floats(t, b, c.O))
		c.PresentState = c.PastState
		check(t, b.LinearAttention(t.Context(), c))
		all = append(all, floats(t, b, c.O), floats(t, b, c.PastState))
		c.PresentState, c.PastState = backend.Tensor{}, backend.Tensor{}
		check(t, b.LinearAttention(t.Context(), c))
		return append(all, floats(t, b, c.O)), max(e.Chunks, e.Dispatches)
	}
	names := []string{"o", "present state", "o without it", "o in place", "the state in place", "o without states"}
	want, _ := results(Options{})
	for _, l := range append(someLowered(1), way{name: "bindings of 8 KiB gather rows", opt: Options{Limits: gputypes.Limits{MaxStorageBufferBindingSize: 8 << 10}}}) {
		got, cuts := results(l.opt)
		if cuts < 2 && l.opt.MemoryBytes == 0 && l.opt.Limits.MaxBufferSize == 0 {
			t.Errorf("%s: one dispatch, nothing was cut", l.name)
		}
		for i := range got {
			sameRow(t, l.name+": "+names[i], got[i], want[i])
		}
	}
}

// TestLinearSizes compares calls with more query heads than a workgroup stages, and with the longest rows, with float64.
func TestLinearSizes(t *testing.T) {
	b := open(t, Options{})
	for _, s := range []struct{ heads, tokens, k int }{{30, 5, 100}, {3, 5, maxLinearDim}, {1, 5, maxLinearDim + 1}, {2, chunksFrom + 3, maxChunkDim}} {
		t.Run(fmt.Sprintf("%d heads, %d tokens, K=%d", s.heads, s.tokens, s.k), func(t *testing.T) {
			if testing.Short() && s.k == maxLinearDim {
				t.Skip("the software driver compiles its kernel for ten seconds")
			}
			const v = 19
			tokens := s.tokens
			c := gatedDelta(t, b, 1, s.heads, 1, 1, tokens, s.k, v)
			err := b.LinearAttention(t.Context(), c)
			if s.k > maxLinearDim {
				must.Fail(t, "rows that are too long", err, backend.ErrUnsupported)
				return
			}
			check(t, err)
			q, o := floats(t, b, c.Q), floats(t, b, c.O)
			l := oracle.Linear{K: s.k, V: v, Key: floats(t, b, c.K), Value: floats(t, b, c.V), Decay: floats(t, b, c.Decay), Beta: floats(t, b, c.Beta),
				State: floats(t, b, c.PastState), Scale: c.Scale, Chunk: linearTokens}
			var worst oracle.Worst
			for h := range s.heads {
				l.Q = q[h*tokens*s.k:][:tokens*s.k]
				want, _ := l.Attend()
				for i, e := range want {
					worst.See(float64(o[h*tokens*v+i]), e.Value, e.Bound(backend.F32), func() string { return fmt.Sprintf("head %d, token %d, element %d", h, i/v, i%v) })
				}
			}
			check(t, worst.Err())
		})
	}
}

// TestLinearChunks checks which calls are computed in chunks.
func TestLinearChunks(t *testing.T) {
	for _, s := range []struct {
		what            string
		tokens, k, size int
		memory          uint32
		chunks          bool
	}{
		{"a long call", chunksFrom, maxChunkDim, 0, 0, true},
		{"few tokens", chunksFrom - 1, maxChunkDim, 0, 0, false},
		{"a hint", chunksFrom, maxChunkDim, 1, 0, false},
		{"a large K", chunksFrom, maxChunkDim + 1, 0, 0, false},
		{"16 KiB of workgroup memory", chunksFrom, maxChunkDim, 0, 16 << 10, false},
		{"16 KiB of workgroup memory, a small K", chunksFrom, 32, 0, 16 << 10, true},
	} {
		b := open(t, Options{Limits: gputypes.Limits{MaxComputeWorkgroupStorageSize: s.memory}})
		c := gatedDelta(t, b, 1, 1, 1, 1, s.tokens, s.k, 4)
		c.ChunkSize = s.size
		check(t, b.dev.Dispatches(b.linear(c), func(x queue.Dispatch) error {
			if got := strings.Contains(fmt.Sprintf("%+v", x.Kernel), "Chunks:true"); got != s.chunks {
				t.Errorf("%s: kernel %+v", s.what, x.Kernel)
			}
			return nil
		}))
		b.Close()
	}
}

// TestConvCuts compares convolutions that are cut with whole ones bit for bit, and those with float64: of sequences that are
// longer and shorter than the state, with states in place and not.
func TestConvCuts(t *testing.T) {
	const batch, channels, width = 2, 35, 6
	type results struct {
		names  []string
		values [][]float32
	}
	run := func(opt Options, tokens int) (r results) {
		b := open(t, opt)
		defer b.Close() // before the next one is opened
		up := func(dtype backend.DType, batch, rows int) backend.Tensor {
			return tensor(t, b, dtype, backend.Shape{batch, 1, rows, channels}, wave)
		}
		c := &backend.CausalConv{X: up(backend.BF16, batch, tokens), W: up(backend.F16, 1, width), Bias: up(backend.F32, 1, 1), SiLU: true,
			Y: alloc(t, b, backend.F16, backend.Shape{batch, 1, tokens, channels}), PastState: up(backend.F16, batch, width-1),
			PresentState: alloc(t, b, backend.F32, backend.Shape{batch, 1, width - 1, channels})}
		see := func(name string, x backend.Tensor) {
			r.names, r.values = append(r.names, name), append(r.values, floats(t, b, x))
		}
		x, w, bias, past := floats(t, b, c.X), floats(t, b, c.W), floats(t, b, c.Bias), floats(t, b, c.PastState)
		check(t, b.CausalConv(t.Context(), c))
		see("y", c.Y)
		see("present state", c.PresentState)
		var worst oracle.Worst
		y, state := r.values[0], r.values[1]
		for i := range batch * channels {
			n, ch := i/channels, i%channels
			var all, weights []float32
			for j := range width {
				weights = append(weights, w[j*channels+ch])
			}
			for j := range width - 1 {
				all = append(all, past[(n*(width-1)+j)*channels+ch])
			}
			for s := range tokens {
				all = append(all, x[(n*tokens+s)*channels+ch])
				e := oracle.CausalConv(all[s:], weights, bias[ch], true)
				worst.See(float64(y[(n*tokens+s)*channels+ch]), e.Value, e.Bound(backend.F16), func() string { return fmt.Sprintf("token %d of %d, channel %d", s, tokens, ch) })
			}
			for j, want := range all[tokens:] {
				if got := state[(n*(width-1)+j)*channels+ch]; got != want {
					t.Errorf("row %d of the state after %d tokens is %v, want %v", j, tokens, got, want)
				}
			}
		}
		check(t, worst.Err())
		c.PresentState = c.PastState
		check(t, b.CausalConv(t.Context(), c))
		see("y in place", c.Y)
		see("the state in place", c.PastState)
		return r
	}
	for _, tokens := range []int{90, 3} {
		want := run(Options{}, tokens)
		for _, l := range someLowered(tokens % 2) {
			l.opt.Limits.MaxStorageBufferBindingSize = min(l.opt.Limits.MaxStorageBufferBindingSize, 2<<10)
			got := run(l.opt, tokens)
			for i := range got.values {
				sameRow(t, fmt.Sprintf("%s: %s of %d tokens", l.name, got.names[i], tokens), got.values[i], want.values[i])
			}
		}
	}
}
