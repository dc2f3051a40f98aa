package cpu

import (
	"fmt"
	"slices"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/pool"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// scaleJob reads and writes states in place: the ceiling of a step of decoding.
type scaleJob struct {
	be    *Backend
	state []float32
	of    int // floats of a state
}

func (j *scaleJob) Task(_ *pool.Turn, w *pool.Scratch, t int) error {
	j.be.kernels.ScaleMax(j.state[t*j.of:][:j.of], 1, w.Floats(j.be.kernels.Lanes))
	return nil
}

// sevenths returns a contiguous tensor of fill·1/7 to fill.
func sevenths(b *testing.B, shape backend.Shape, fill float32) backend.Tensor {
	x := alloc(b, shape)
	for i, data := 0, floats(b, x); i < len(data); i++ {
		data[i] = fill * float32(i%7+1) / 7
	}
	return x
}

// gatedDelta returns a call of the gated delta rule with K = V = 128.
func gatedDelta(b *testing.B, heads, tokens, decays int) *backend.LinearAttention {
	tensor := func(rows, cols int, fill float32) backend.Tensor {
		return sevenths(b, backend.Shape{1, heads, rows, cols}, fill)
	}
	q, state := tensor(tokens, 128, 0.1), tensor(128, 128, 1)
	return &backend.LinearAttention{O: tensor(tokens, 128, 0), Q: q, K: q, V: tensor(tokens, 128, 1), Decay: tensor(tokens, decays, -0.1),
		Beta: tensor(tokens, 1, 0.5), PastState: state, PresentState: state, Scale: 0.1}
}

// BenchmarkLinearAttention measures gated delta rules with K = V = 128. Prompts of 8,192 tokens are compared with the peak, by
// C·(5K + 3V) + 6KV operations a token with C = 64, whatever the chunks are, and steps of decoding with a loop that reads
// and writes the states.
//
// Prompts reach 60 to 72% of the peak with AVX2 on a shared machine. On a loaded one, where the best of several hundred calls
// on one thread counts, those with decays of channels reach 65% (41% with their factors in Go), and a step in the cache takes
// 3.4 µs for a head (7.3 µs with a pass for the key and one for each query, and sums of one product for the update). Steps
// from memory reach 73 to 85% of the loop on one thread. They read a state once for the key and the query, and both passes
// prefetch all of the next one: on a Zen 5 that reached 78%, 71 without the prefetch of the next head's rows of q, k, v and o.
// In turns of a later run it had 82 and 83%, and 87% once Mix prefetched for up to 4 rows.
// Tried before: 32 columns at a time were slower (rows 512 bytes apart share few sets of the first level), and so was one tile
// of four rows for keys and queries. On the Zen 5 no prefetch had 64%, one pass alone 69 and 72%, half a state in each pass 70 to
// 75%, the state after the next one in the second pass 73%, and the second-level cache alone 77%.
//
//	go test -run '^$' -bench LinearAttention -benchtime 9x ./cpu
func BenchmarkLinearAttention(b *testing.B) {
	const k, v = 128, 128
	be := open(b, Options{})
	for _, c := range []struct {
		heads, tokens, decays int
	}{{8, 8192, 1}, {8, 8192, k}, {1024, 1, 1}, {1024, 1, k}} {
		b.Run(fmt.Sprintf("h%dt%dg%d", c.heads, c.tokens, c.decays), func(b *testing.B) {
			call := gatedDelta(b, c.heads, c.tokens, c.decays)
			scale := &scaleJob{be, floats(b, call.PastState), k * v}
			compute := func() error { return be.LinearAttention(b.Context(), call) }
			must.Do(b, compute())
			b.ReportAllocs()
			turns(b, func() map[string]float64 {
				rate, ceiling := float64(c.heads)/seconds(b, compute), 0.0
				if c.tokens > 1 {
					rate *= float64(c.tokens) * (64*(5*k+3*v) + 6*k*v)
					ceiling = must.Get(be.PeakFLOPS(b.Context()))(b)
				} else {
					rate *= 2 * 4 * k * v
					ceiling = float64(c.heads) * 2 * 4 * k * v / seconds(b, func() error { return sharedPool.Run(b.Context(), scale, 64, c.heads, be.threads()) })
				}
				return map[string]float64{"Gop-or-GB/s": rate / 1e9, "%ceiling": 100 * rate / ceiling}
			})
		})
	}
}

// BenchmarkLinearOrSoftmax compares prompts of the gated delta rule with causal softmax attention of the same heads.
//
//	go test -run '^$' -bench LinearOrSoftmax -benchtime 9x ./cpu
func BenchmarkLinearOrSoftmax(b *testing.B) {
	be := open(b, Options{})
	for _, tokens := range []int{512, 1024, 2048, 4096, 8192} {
		for _, decays := range []int{1, 128} {
			b.Run(fmt.Sprintf("t%dg%d", tokens, decays), func(b *testing.B) {
				linear := gatedDelta(b, 8, tokens, decays)
				softmax := &backend.Call{Q: linear.Q, K: linear.K, V: linear.V, O: linear.O, Problem: backend.Problem{Scale: 0.1, Visible: backend.Visibility{Left: backend.Unbounded}}}
				turns(b, func() map[string]float64 {
					took := seconds(b, func() error { return be.LinearAttention(b.Context(), linear) })
					return map[string]float64{"softmax/linear": seconds(b, attend(b, be, softmax)) / took}
				})
			})
		}
	}
}

// TestLinearAttentionOfEmptySequence shows that a step of several heads a task does not look for the rows of a sequence
// without tokens.
func TestLinearAttentionOfEmptySequence(t *testing.T) {
	const heads, dim = 64, 16
	be := open(t, Options{Threads: 1})
	rows := func() backend.Tensor {
		return swap(t, random(t, 1, backend.Shape{1, 2, heads, dim}), backend.Heads, backend.Seq)
	}
	state := random(t, 2, backend.Shape{2, heads, dim, dim})
	before := slices.Clone(floats(t, state)[heads*dim*dim:])
	must.Do(t, be.LinearAttention(t.Context(), &backend.LinearAttention{O: rows(), Q: rows(), K: rows(), V: rows(), PastState: state, PresentState: state,
		Scale: 1, CuQ: []int{0, 2, 2}}))
	if !slices.Equal(floats(t, state)[heads*dim*dim:], before) {
		t.Error("the state of the sequence without tokens has changed")
	}
}

// copyJob copies rows: the ceiling of a convolution.
type copyJob struct{ to, from []float32 }

func (j *copyJob) Task(_ *pool.Turn, _ *pool.Scratch, t int) error {
	const n = 1 << 14
	copy(j.to[t*n:(t+1)*n], j.from[t*n:])
	return nil
}

// BenchmarkCausalConv measures the convolution of Qwen3-Next, of 8,192 channels and 4 taps with SiLU, and compares it with a
// copy. turned has channels in rows, as ONNX has them. In the cache, on one thread of a loaded machine with AVX2, the
// best of a hundred calls reads and writes 7.8 GB/s, and 5.7 GB/s with channels in rows. Strips of 24 channels, SiLU in Go and
// channels as lanes in both cases had 2.0 and 1.0 GB/s.
//
//	go test -run '^$' -bench CausalConv -benchtime 9x ./cpu
func BenchmarkCausalConv(b *testing.B) {
	const channels, tokens, taps = 8192, 2048, 4
	be := open(b, Options{})
	for _, turned := range []bool{false, true} {
		b.Run(fmt.Sprintf("turned=%v", turned), func(b *testing.B) {
			tensor := func(rows int) backend.Tensor {
				if turned {
					return swap(b, sevenths(b, backend.Shape{1, 1, channels, rows}, 1), backend.Seq, backend.Dim)
				}
				return sevenths(b, backend.Shape{1, 1, rows, channels}, 1)
			}
			call := &backend.CausalConv{Y: tensor(tokens), X: tensor(tokens), W: tensor(taps), SiLU: true}
			move := &copyJob{make([]float32, channels*tokens), make([]float32, channels*tokens)}
			compute := func() error { return be.CausalConv(b.Context(), call) }
			copies := func() error { return sharedPool.Run(b.Context(), move, 0, channels*tokens>>14, be.threads()) }
			must.Do(b, compute())
			must.Do(b, copies())
			turns(b, func() map[string]float64 {
				took := seconds(b, compute)
				return map[string]float64{"GB/s": 8 * channels * tokens / took / 1e9, "%copy": 100 * seconds(b, copies) / took}
			})
		})
	}
}
