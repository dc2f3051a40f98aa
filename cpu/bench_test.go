package cpu

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"gonum.org/v1/gonum/blas"
	"gonum.org/v1/gonum/blas/blas32"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/peak"
	"github.com/seed90331342/attn/cpu/internal/pool"
	"github.com/seed90331342/attn/cpu/internal/strided"
	"github.com/seed90331342/attn/cpu/internal/tile"
	"github.com/seed90331342/attn/cpu/internal/vec"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// turns calls turn until b ends, and reports the median of each of its figures. What one turn measures is slowed alike by
// a busy machine.
func turns(b *testing.B, turn func() map[string]float64) {
	figures := map[string][]float64{}
	for b.Loop() {
		for unit, x := range turn() {
			figures[unit] = append(figures[unit], x)
		}
	}
	for unit, all := range figures {
		slices.Sort(all)
		b.ReportMetric(all[len(all)/2], unit)
	}
}

// seconds returns how long do takes.
func seconds(b *testing.B, do func() error) float64 {
	start := time.Now()
	must.Do(b, do())
	return time.Since(start).Seconds()
}

// attend returns a function that computes c.
func attend(b *testing.B, be *Backend, c *backend.Call) func() error {
	return func() error { return be.Attention(b.Context(), c) }
}

// onThreads runs f as sub-benchmarks on one and on two threads.
func onThreads(b *testing.B, name string, f func(b *testing.B, be *Backend)) {
	for threads := 1; threads <= 2; threads++ {
		b.Run(fmt.Sprintf("%s/threads%d", name, threads), func(b *testing.B) { f(b, open(b, Options{Threads: threads})) })
	}
}

// BenchmarkRatio reports the speed of attention on the gonum tier in percent of that of blas32.Gemm alone
// on the same tiles.
//
//	go test -run '^$' -bench Ratio ./cpu
func BenchmarkRatio(b *testing.B) {
	b.Setenv(tierEnv, tierGonum)
	for _, d := range []struct{ heads, seq, dim int }{{1, 2048, 64}, {8, 2048, 64}, {8, 2048, 128}} {
		onThreads(b, fmt.Sprintf("h%ds%dd%d", d.heads, d.seq, d.dim), func(b *testing.B, be *Backend) {
			c, j := plain(b, d.heads, d.seq, d.dim), newGemmJob(b, d.heads, d.seq, d.dim)
			turns(b, func() map[string]float64 {
				gemm := seconds(b, func() error {
					return sharedPool.Run(b.Context(), j, gemmRows*tile.BlockKeys+tile.BlockKeys*j.dim+gemmRows*j.dim, j.tasks, be.threads())
				})
				return map[string]float64{"%ofGemm": 100 * gemm / seconds(b, attend(b, be, c))}
			})
		})
	}
}

// BenchmarkUnequal reports the time of 32 causal sequences of unequal lengths, each at its own lower right, as a
// multiple of that of equal ones with the same rows and keys in all.
//
//	go test -run '^$' -bench Unequal -benchtime 9x ./cpu
func BenchmarkUnequal(b *testing.B) {
	const sequences, mean = 32, 1024
	for _, c := range []struct{ rows, window int }{{1, backend.Unbounded}, {1, 127}, {16, backend.Unbounded}, {256, backend.Unbounded}, {256, 127}} {
		b.Run(fmt.Sprintf("rows%d/window%d", c.rows, c.window), func(b *testing.B) {
			be := open(b, Options{})
			call := func(apart int) func() error { // 404 to 1,644 keys with 40 apart
				x := &backend.Call{Problem: backend.Problem{Scale: 0.125, Visible: backend.Visibility{Left: c.window}}}
				for i := range sequences {
					keys := mean + (2*i-sequences+1)*apart/2
					x.Visible.KLen, x.Visible.Offsets = append(x.Visible.KLen, keys), append(x.Visible.Offsets, keys-c.rows)
				}
				q, kv := backend.Shape{sequences, 8, c.rows, 64}, backend.Shape{sequences, 2, slices.Max(x.Visible.KLen), 64}
				x.Q, x.K, x.V, x.O = random(b, 1, q), random(b, 2, kv), random(b, 3, kv), alloc(b, q)
				return attend(b, be, x)
			}
			equal, unequal := call(0), call(40)
			turns(b, func() map[string]float64 {
				even := seconds(b, equal)
				return map[string]float64{"xEqual": seconds(b, unequal) / even}
			})
		})
	}
}

// BenchmarkPacked reports the time of 32 packed causal sequences of unequal lengths, each at its own lower right, as a
// multiple of that of a batch of equal ones with the same rows and keys in all, for each visible pair.
//
//	go test -run '^$' -bench Packed -benchtime 61x ./cpu
func BenchmarkPacked(b *testing.B) {
	const sequences, heads, dim = 32, 8, 64
	for _, c := range []struct {
		decode                bool
		least, most, keyHeads int
	}{{false, 40, 600, heads}, {false, 10, 60, heads}, {true, 40, 600, heads}, {true, 40, 600, 2}, {true, 400, 1600, heads}, {true, 400, 1600, 2}, {true, 8, 64, heads}} {
		onThreads(b, fmt.Sprintf("decode=%v/keys%d-%d/on%d", c.decode, c.least, c.most, c.keyHeads), func(b *testing.B, be *Backend) {
			dev := kernels.NewDevice(be)
			opt := kernels.Options{Causal: true, Align: kernels.LowerRight}
			packed := opt
			packed.CuQ, packed.CuK = []int{0}, []int{0}
			mean, pairs := (c.least+c.most)/2, [2]float64{} // of equal sequences, of packed ones
			add := func(n, keys int) (rows int) {
				if rows = keys; c.decode {
					rows = 1
				}
				pairs[n] += float64(rows*keys - rows*(rows-1)/2)
				return rows
			}
			rows := 0
			for n := range sequences { // short and long ones in turns
				keys := c.least + (c.most-c.least)*(n*13%sequences)/(sequences-1)
				packed.CuQ, packed.CuK = append(packed.CuQ, packed.CuQ[n]+add(1, keys)), append(packed.CuK, packed.CuK[n]+keys)
				rows = add(0, mean)
			}
			call := func(opt kernels.Options, batch, rows, keys int) func() error {
				tensor := func(heads, n int) kernels.Tensor {
					return swap(b, random(b, uint64(n), backend.Shape{batch, n, heads, dim}), backend.Heads, backend.Seq)
				}
				x := must.Get(dev.Prepare(tensor(heads, rows), tensor(c.keyHeads, keys), tensor(c.keyHeads, keys), opt))(b)
				out := must.Get(x.Alloc(b.Context()))(b)
				return func() error { return x.RunInto(b.Context(), out) }
			}
			equal, unequal := call(opt, sequences, rows, mean), call(packed, 1, packed.CuQ[sequences], packed.CuK[sequences])
			turns(b, func() map[string]float64 {
				even := seconds(b, equal)
				return map[string]float64{"xEqual": seconds(b, unequal) / even / pairs[1] * pairs[0]}
			})
		})
	}
}

// BenchmarkLowPrecision reports the speed of calls of LowPrecision as a multiple of calls in float32
// and of plain calls with the same types, and in percent of a ceiling: that of the machine's unit for
// products of bf16, or for int8 keys the rate at which a loop reads them and the values.
//
//	go test -run '^$' -bench LowPrecision -benchtime 9x ./cpu
func BenchmarkLowPrecision(b *testing.B) {
	for _, d := range []struct {
		rows, keys, dim, share int
		causal                 bool
		dtype                  backend.DType
	}{
		{256, 256, 64, 1, false, backend.BF16}, {1024, 1024, 64, 1, false, backend.BF16}, {4096, 4096, 64, 1, false, backend.BF16},
		{4096, 4096, 64, 1, true, backend.BF16}, {4096, 4096, 128, 1, false, backend.BF16}, {16, 4096, 128, 1, false, backend.BF16},
		{1, 32768, 64, 1, false, backend.Q8}, {1, 32768, 128, 1, false, backend.Q8}, {1, 131072, 128, 8, false, backend.Q8},
	} {
		onThreads(b, fmt.Sprintf("%v/q%dk%dd%d/share%d/causal=%v", d.dtype, d.rows, d.keys, d.dim, d.share, d.causal), func(b *testing.B, be *Backend) {
			if d.dtype == backend.BF16 && be.kernels.PairUnit() == "" || d.dtype == backend.Q8 && !be.kernels.HasFixed() {
				b.Skip("this machine has no unit for these products")
			}
			call := func(dtype backend.DType, low bool) *backend.Call {
				c := plain(b, 8, d.keys, d.dim)
				c.LowPrecision = low
				if d.causal {
					c.Visible.Right = 0
				}
				for i, t := range []*backend.Tensor{&c.Q, &c.K, &c.V, &c.O} {
					shape, dtype := t.Shape(), dtype
					if i%3 > 0 {
						shape[backend.Heads] /= d.share
					} else if shape[backend.Seq] = d.rows; dtype == backend.Q8 {
						dtype = backend.F32
					}
					*t = typed(b, random(b, uint64(i), shape), dtype)
				}
				return c
			}
			f32, same, low := call(backend.F32, false), call(d.dtype, false), call(d.dtype, true)
			operations := float64(backend.NewPlan(low).FLOPs)
			took := func(c *backend.Call) float64 { return often(b, 1+int(1e10/operations), attend(b, be, c)) }
			turns(b, func() map[string]float64 {
				most := took(low)
				figures := map[string]float64{"x_float32": took(f32) / most, "x_plain": took(same) / most}
				if d.dtype == backend.BF16 {
					figures["%"] = 100 * operations / most / must.Get(peak.FLOPS(b.Context(), vec.PairLoops{Kernels: be.kernels}, be.threads()))(b)
				} else {
					figures["%"] = 100 * float64(low.K.Bytes()+low.V.Bytes()) / must.Get(be.ReadBandwidth(b.Context(), low.K, low.V))(b) / most
				}
				return figures
			})
		})
	}
}

// often returns the mean time of do over some times.
func often(b *testing.B, times int, do func() error) float64 {
	return seconds(b, func() error {
		for range times {
			if err := do(); err != nil {
				return err
			}
		}
		return nil
	}) / float64(times)
}

// BenchmarkScoreMod reports the time of calls with score + slope·(j - i) as a score mod, as a multiple
// of calls without: as a loop, and by gonum on a table of distances.
//
//	go test -run '^$' -bench ScoreMod -benchtime 9x ./cpu
func BenchmarkScoreMod(b *testing.B) {
	away := make([]float32, 2*4096) // from -4,096 on
	for i := range away {
		away[i] = float32(i - 4096)
	}
	mods := map[string]func(scores []float32, at backend.Position){
		"loop": func(scores []float32, at backend.Position) {
			slope := at.Values[at.Head]
			first := slope * float32(at.Key-at.Row)
			for n := range scores {
				scores[n] += first + slope*float32(n)
			}
		},
		"axpy": func(scores []float32, at backend.Position) {
			x := blas32.Vector{N: len(scores), Inc: 1, Data: away[at.Key-at.Row+4096:]}
			blas32.Axpy(at.Values[at.Head], x, blas32.Vector{N: len(scores), Inc: 1, Data: scores})
		},
	}
	for _, rows := range []int{1, 4, 4096} {
		for _, name := range []string{"loop", "axpy"} {
			onThreads(b, fmt.Sprintf("q%dk4096d64/%s", rows, name), func(b *testing.B, be *Backend) {
				c := plain(b, 2, 4096, 64)
				c.Q, c.O = cut(b, c.Q, backend.Seq, 0, rows), cut(b, c.O, backend.Seq, 0, rows)
				with := *c
				with.ScoreMod = &backend.ScoreMod{Values: []float32{0.01, 0.02}, Go: mods[name]}
				turns(b, func() map[string]float64 {
					most := often(b, 4096/rows, attend(b, be, &with))
					return map[string]float64{"x_plain": most / often(b, 4096/rows, attend(b, be, c))}
				})
			})
		}
	}
}

// gemmRows is the number of query rows in a tile of the gonum kernels.
const gemmRows = 64

// gemm computes c = a·bᵀ, with a [m, k] and b [n, k].
func gemm(m, n, k int, a []float32, lda int, b []float32, ldb int, c []float32, ldc int) {
	blas32.Gemm(blas.NoTrans, blas.Trans, 1,
		blas32.General{Rows: m, Cols: k, Stride: lda, Data: a},
		blas32.General{Rows: n, Cols: k, Stride: ldb, Data: b},
		0, blas32.General{Rows: m, Cols: n, Stride: ldc, Data: c})
}

// gemmJob is the two products of attention without the softmax between them.
type gemmJob struct {
	q, k     strided.Tensor
	seq, dim int
	tasks    int
}

func newGemmJob(b testing.TB, heads, seq, dim int) *gemmJob {
	shape := backend.Shape{1, heads, seq, dim}
	q, k := random(b, 1, shape), random(b, 2, shape)
	return &gemmJob{q: strided.Of(&q), k: strided.Of(&k), seq: seq, dim: dim, tasks: heads * tile.CeilDiv(seq, gemmRows)}
}

func (j *gemmJob) Task(_ *pool.Turn, w *pool.Scratch, t int) error {
	s, vt, acc := w.Floats(gemmRows*tile.BlockKeys), w.Floats(tile.BlockKeys*j.dim), w.Floats(gemmRows*j.dim)
	blocks := tile.CeilDiv(j.seq, gemmRows)
	q, ldq := j.q.F32[j.q.Index(0, t/blocks, t%blocks*gemmRows):], j.q.Stride[backend.Seq]
	clear(s) // scratch may hold NaN
	clear(vt)
	for j0 := 0; j0 < j.seq; j0 += tile.BlockKeys {
		k, ldk := j.k.F32[j.k.Index(0, t/blocks, j0):], j.k.Stride[backend.Seq]
		gemm(gemmRows, tile.BlockKeys, j.dim, q, ldq, k, ldk, s, tile.BlockKeys)
		gemm(gemmRows, j.dim, tile.BlockKeys, s, tile.BlockKeys, vt, tile.BlockKeys, acc, j.dim)
	}
	return nil
}
