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
	"github.com/seed90331342/attn/shaders"
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
		O: alloc(t, b, backend.F32, backend.Shape{batch, max(hq, hv), tokens, v}), PastState: input(t, b, states),
		PresentState: alloc(t, b, backend.F32, states), Scale: 0.3,
	}
}

// TestLinearCuts cuts linear attention: with both states, without a final state, with the state in place, and without either.
func TestLinearCuts(t *testing.T) {
	gathers := way{name: "bindings of 8 KiB gather rows", opt: Options{Limits: gputypes.Limits{MaxStorageBufferBindingSize: 8 << 10}}}
	sameOn(t, "linear attention", append(someLowered(1), gathers), func(b *Backend, w way) (all [][]float32) {
		c := gatedDelta(t, b, 2, 4, 1, 2, 150, 40, 33)
		e := must.Get(b.dev.Count(b.linear(c)))(t)
		if cuts := max(e.Chunks, e.Dispatches); w.name != "" && cuts < 2 && w.opt.MemoryBytes == 0 && w.opt.Limits.MaxBufferSize == 0 {
			t.Errorf("%s: one dispatch, nothing was cut", w.name)
		}
		past := c.PastState
		for _, states := range [][2]backend.Tensor{{past, c.PresentState}, {past, {}}, {past, past}, {}} {
			c.PastState, c.PresentState = states[0], states[1]
			check(t, b.LinearAttention(t.Context(), c))
			all = append(all, floats(t, b, c.O))
			if !c.PresentState.IsZero() {
				all = append(all, floats(t, b, c.PresentState))
			}
		}
		return all
	})
}

// TestLinearSizes compares calls with more query heads than a workgroup stages, and with the longest rows, with float64.
func TestLinearSizes(t *testing.T) {
	b := open(t, Options{})
	for _, s := range []struct{ heads, tokens, k int }{{30, 5, 100}, {3, 5, maxLinearDim}, {1, 5, maxLinearDim + 1}, {2, chunksFrom + 3, maxChunkDim}} {
		t.Run(fmt.Sprintf("%d heads, %d tokens, K=%d", s.heads, s.tokens, s.k), func(t *testing.T) {
			if testing.Short() && s.k == maxLinearDim {
				t.Skip("the software driver compiles its kernel for ten seconds")
			}
			c := gatedDelta(t, b, 1, s.heads, 1, 1, s.tokens, s.k, 19)
			err := b.LinearAttention(t.Context(), c)
			if s.k > maxLinearDim {
				must.Fail(t, "rows that are too long", err, backend.ErrUnsupported)
				return
			}
			check(t, err)
			worst := linearWorst(t, b, c)
			check(t, worst.Err())
		})
	}
}

// linearWorst compares the outputs of c, whose batch is 1, with float64.
func linearWorst(t testing.TB, b *Backend, c *backend.LinearAttention) (worst oracle.Worst) {
	t.Helper()
	heads, states, k, v := c.O.Shape()[1], c.V.Shape()[1], c.K.Shape()[3], c.V.Shape()[3]
	head := func(x backend.Tensor, h int) []float32 {
		if x.IsZero() {
			return nil
		}
		x = must.Get(x.Slice(backend.Heads, h, h+1))(t)
		return floats(t, b, copied(t, b, backend.F32, x))
	}
	for h := range heads {
		state := h * states / heads
		l := oracle.Linear{K: k, V: v, Q: head(c.Q, h*c.Q.Shape()[1]/heads), Key: head(c.K, state*c.K.Shape()[1]/states), Value: head(c.V, state), Decay: head(c.Decay, state),
			Beta: head(c.Beta, state), State: head(c.PastState, state), Scale: c.Scale, Chunk: linearTokens}
		want, _ := l.Attend()
		for i, got := range head(c.O, h) {
			worst.See(float64(got), want[i].Value, want[i].Bound(backend.F32), func() string { return fmt.Sprintf("head %d, token %d, element %d", h, i/v, i%v) })
		}
	}
	return worst
}

// TestMatrixLinearChunks checks which calls are computed in chunks, and with decays of heads on matrix units where there are some.
func TestMatrixLinearChunks(t *testing.T) {
	for _, s := range []struct {
		what             string
		tokens, k, size  int
		memory           uint32
		chunks, matrices bool
	}{
		{"a long call", chunksFrom, maxChunkDim, 0, 0, true, true},
		{"few tokens", chunksFrom - 1, maxChunkDim, 0, 0, false, false},
		{"a hint", chunksFrom, maxChunkDim, 1, 0, false, false},
		{"a large K", chunksFrom, maxChunkDim + 1, 0, 0, false, false},
		{"16 KiB of workgroup memory", chunksFrom, maxChunkDim, 0, 16 << 10, false, false},
		{"16 KiB of workgroup memory, a small K", chunksFrom, 32, 0, 16 << 10, true, false},
	} {
		b := open(t, Options{Limits: gputypes.Limits{MaxComputeWorkgroupStorageSize: s.memory}})
		c := gatedDelta(t, b, 1, 1, 1, 1, s.tokens, s.k, 4)
		c.ChunkSize = s.size
		for _, heads := range []bool{false, true} {
			want := map[bool]string{false: "linear ROWS=", true: "CHUNKS=1"}[s.chunks]
			if heads {
				c.Decay = must.Get(c.Decay.Slice(backend.Dim, 0, 1))(t)
				if _, whyNot := b.matrices.Largest(); s.matrices && whyNot == "" {
					want = "matrixlinear "
				}
			}
			check(t, b.dev.Dispatches(b.linear(c), func(x queue.Dispatch) error {
				if key := shaders.Key(x.Kernel); !strings.Contains(key, want) || strings.Contains(key, "CHUNKS=1") != (want == "CHUNKS=1") {
					t.Errorf("%s: kernel %s", s.what, key)
				}
				return nil
			}))
		}
		b.Close()
	}
}

// TestConvCuts cuts convolutions of sequences that are longer and shorter than the state, with states in place and not.
func TestConvCuts(t *testing.T) {
	const batch, channels, width = 2, 35, 6
	for _, tokens := range []int{90, 3} {
		ways := someLowered(tokens % 2)
		for i := range ways {
			l := &ways[i].opt.Limits
			l.MaxStorageBufferBindingSize = min(l.MaxStorageBufferBindingSize, 2<<10)
		}
		sameOn(t, fmt.Sprint(tokens, " tokens"), ways, func(b *Backend, _ way) (all [][]float32) {
			up := func(dtype backend.DType, batch, rows int) backend.Tensor {
				return tensor(t, b, dtype, backend.Shape{batch, 1, rows, channels}, wave)
			}
			c := &backend.CausalConv{X: up(backend.BF16, batch, tokens), W: up(backend.F16, 1, width), Bias: up(backend.F32, 1, 1), SiLU: true,
				Y: alloc(t, b, backend.F16, backend.Shape{batch, 1, tokens, channels}), PastState: up(backend.F16, batch, width-1),
				PresentState: alloc(t, b, backend.F32, backend.Shape{batch, 1, width - 1, channels})}
			for range 2 {
				check(t, b.CausalConv(t.Context(), c))
				all = append(all, floats(t, b, c.Y), floats(t, b, c.PresentState))
				c.PresentState = c.PastState
			}
			return all
		})
	}
}

// TestMatrixLinear: chunks on matrix units are within the bound of float32, and those of mistakes are not. Chunks that are
// not precise there, or not finite, are computed token after token.
func TestMatrixLinear(t *testing.T) {
	const tokens, k, v = 45, 24, 19
	type edit = func(name string, token, i int, x float32) float32
	on := func(old, new string) (*Backend, *mutated) {
		b := openMatrices(t, Options{})
		port := &mutated{Device: b.dev.Port, kernel: "matrixlinear ", edit: strings.NewReplacer(old, new).Replace}
		return must.Get(newBackend(port, b.info, Options{}))(t), port
	}
	call := func(b *Backend, dtype backend.DType, delta bool, f edit) *backend.LinearAttention {
		c := gatedDelta(t, b, 1, 4, 1, 2, tokens, k, v)
		c.Decay = must.Get(c.Decay.Slice(backend.Dim, 3, 4))(t)
		for name, x := range map[string]*backend.Tensor{"q": &c.Q, "k": &c.K, "v": &c.V, "decay": &c.Decay, "beta": &c.Beta} {
			old, d := floats(t, b, copied(t, b, backend.F32, *x)), x.Shape()[backend.Dim]
			*x = upload(t, b, host(t, x.Shape(), func(i int) float32 { return f(name, i/d%tokens, i%d, old[i]) }))
		}
		if dtype != backend.F32 {
			c.Q, c.K = copied(t, b, dtype, c.Q), copied(t, b, dtype, c.K)
		}
		if !delta {
			c.Beta = backend.Tensor{}
		}
		return c
	}
	run := func(b *Backend, dtype backend.DType, delta bool, f edit) oracle.Worst {
		c := call(b, dtype, delta, f)
		check(t, b.LinearAttention(t.Context(), c))
		return linearWorst(t, b, c)
	}
	same := func(_ string, _, _ int, x float32) float32 { return x }
	for _, m := range []struct {
		name, old, new string
		right          bool
	}{
		{"steps are wrong, and no chunk takes them", "d = f.y * (d - column_sum", "d = f.y * (d + column_sum", true},
		{"low parts of keys, queries and P are left out", "i / DEPTH * QUADS", "0u", false},
		{"low parts of keys, states and d are left out", "(i / 4u + QUADS) % (2u * QUADS)", "i / 4u % QUADS", false},
		{"low parts of d are left out", "(i / 4u + 4u) % (2u * 4u)", "i / 4u % 4u", false},
		{"sums begin again", "c + i / 4u, STRIDE), product)", "c + i / 4u, STRIDE), Result())", false},
	} {
		b, port := on(m.old, m.new)
		worst := run(b, backend.F32, true, same)
		t.Logf("%s: %.3g of the bound, %s", m.name, worst.Off, worst.Where)
		if port.edited != (m.old != "") || (worst.Off <= 1) != m.right {
			t.Errorf("%s: %.3g of the bound, %s", m.name, worst.Off, worst.Where)
		}
	}
	b, _ := on("", "")
	alone, _ := on("wrong = workgroupUniformLoad(&odd)", "wrong = workgroupUniformLoad(&odd) * 0u")
	for _, dtype := range []backend.DType{backend.F32, backend.F16, backend.BF16} {
		worst := run(b, dtype, true, same)
		t.Logf("%v: %.3g of the bound, %s", dtype, worst.Off, worst.Where)
		check(t, worst.Err())
	}
	small := open(t, Options{MaxWork: 1e5})
	var whole [2][]float32
	for i, b := range []*Backend{b, small} {
		c := call(b, backend.F32, true, same)
		if n := must.Get(b.dev.Count(b.linear(c)))(t); (n.Chunks > 1) != (i == 1) {
			t.Errorf("%d chunks on device %d", n.Chunks, i)
		}
		check(t, b.LinearAttention(t.Context(), c))
		for j, x := range [][]float32{floats(t, b, c.O), floats(t, b, c.PresentState)} {
			if i == 1 {
				sameRow(t, fmt.Sprintf("result %d in chunks", j), x, whole[j])
			}
			whole[j] = x
		}
	}
	of := func(name string, f func(token, i int, x float32) float32) edit {
		return func(n string, token, i int, x float32) float32 {
			if n != name {
				return x
			}
			return f(token, i, x)
		}
	}
	pow := func(n int) float32 { return float32(math.Ldexp(1, n)) }
	at := func(n int, y float32) func(token, i int, x float32) float32 {
		return func(token, i int, x float32) float32 {
			if token == n && i < 7 {
				return y
			}
			return x
		}
	}
	for _, c := range []struct {
		name  string
		delta bool
		steps bool // results of matrices alone are wrong
		f     edit
	}{
		{"values that jump in a chunk", true, true, of("v", func(token, _ int, x float32) float32 { return x * pow(50*(token/10%2)-20) })},
		{"columns of different sizes", true, false, of("v", func(_, i int, x float32) float32 { return x * pow(10*(i%7)-30) })},
		{"keys of different lengths", true, false, of("k", func(token, _ int, x float32) float32 { return x * pow(-4*(token%11)) })},
		{"keys of 0 with large values", true, false, func(name string, token, _ int, x float32) float32 {
			switch {
			case name == "k" && token%5 == 2:
				return 0
			case name == "v" && token%5 == 2:
				return x * pow(50)
			}
			return x
		}},
		{"most values are 0, and decays large", false, true, func(name string, token, _ int, x float32) float32 {
			switch {
			case name == "decay":
				return -9
			case name == "v" && token%8 != 0:
				return 0
			}
			return x
		}},
		{"decays that grow, after values of 0", true, true, func(name string, token, _ int, x float32) float32 {
			switch {
			case name == "decay" && token < 16:
				return 2
			case name == "v" && token < 15:
				return 0
			}
			return x
		}},
		{"queries of 2^100", true, true, of("q", at(20, pow(100)))},
		{"keys of 2^70", false, true, of("k", at(20, pow(70)))},
		{"infinite values", true, true, of("v", at(20, float32(math.Inf(1))))},
		{"a decay of NaN", true, true, of("decay", at(40, float32(math.NaN())))},
		{"beta of NaN", true, true, of("beta", at(40, float32(math.NaN())))},
	} {
		worst, rest := run(b, backend.F32, c.delta, c.f), run(alone, backend.F32, c.delta, c.f)
		t.Logf("%s: %.3g of the bound, %s; by matrices alone %.3g, %s", c.name, worst.Off, worst.Where, rest.Off, rest.Where)
		if check(t, worst.Err()); (rest.Off > 1) != c.steps {
			t.Errorf("%s: %.3g of the bound by matrices alone", c.name, rest.Off)
		}
	}
}
