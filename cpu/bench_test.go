package cpu

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"gonum.org/v1/gonum/blas"
	"gonum.org/v1/gonum/blas/blas32"

	"github.com/seed90331342/attn/backend"
)

// random returns a contiguous tensor of numbers in [-1, 1).
func random(t testing.TB, seed uint64, shape backend.Shape) backend.Tensor {
	t.Helper()
	rng := rand.New(rand.NewPCG(seed, 3))
	data := make([]float32, shape.Elements())
	for i := range data {
		data[i] = rng.Float32()*2 - 1
	}
	x, err := backend.HostF32(data, shape)
	if err != nil {
		t.Fatal(err)
	}
	return x
}

// plain returns a call of plain attention over random operands.
func plain(t testing.TB, heads, seq, dim int) *backend.Call {
	shape := backend.Shape{1, heads, seq, dim}
	o, err := backend.AllocHost(backend.F32, shape)
	if err != nil {
		t.Fatal(err)
	}
	return &backend.Call{
		Q: random(t, 1, shape), K: random(t, 2, shape), V: random(t, 3, shape), O: o,
		Problem: backend.Problem{Scale: 0.125, Visible: backend.Everything()},
	}
}

// benchCases are the shapes of BenchmarkAttention, BenchmarkGemm and
// BenchmarkRatio, which are about the gonum path; BenchmarkVector is about the
// others.
var benchCases = []struct{ heads, seq, dim int }{{1, 2048, 64}, {8, 2048, 64}, {8, 2048, 128}}

func eachBenchCase(b *testing.B, f func(b *testing.B, heads, seq, dim, threads int)) {
	for _, c := range benchCases {
		for _, threads := range []int{1, 2} {
			b.Run(fmt.Sprintf("cpu/f32/b1h%ds%dd%d/threads%d", c.heads, c.seq, c.dim, threads), func(b *testing.B) {
				f(b, c.heads, c.seq, c.dim, threads)
			})
		}
	}
}

func BenchmarkAttention(b *testing.B) {
	eachBenchCase(b, func(b *testing.B, heads, seq, dim, threads int) {
		be, c := open(b, Options{Threads: threads, Tier: tierGonum}), plain(b, heads, seq, dim)
		b.ReportAllocs()
		for b.Loop() {
			if err := be.Attention(b.Context(), c); err != nil {
				b.Fatal(err)
			}
		}
		reportFLOPS(b, heads, seq, dim)
	})
}

// BenchmarkGemm does the matrix products of BenchmarkAttention and nothing else:
// the same tiles in the same memory, V transposed already.
func BenchmarkGemm(b *testing.B) {
	eachBenchCase(b, func(b *testing.B, heads, seq, dim, threads int) {
		be, j := open(b, Options{Tier: tierGonum}), newGemmJob(b, heads, seq, dim)
		for b.Loop() {
			if err := be.workers.run(b.Context(), j, j.tasks, threads); err != nil {
				b.Fatal(err)
			}
		}
		reportFLOPS(b, heads, seq, dim)
	})
}

// BenchmarkRatio reports the speed of attention in percent of that of blas32.Gemm alone
// on the same tiles. The two take turns, so that a busy machine slows both; the median of
// the turns counts.
func BenchmarkRatio(b *testing.B) {
	eachBenchCase(b, func(b *testing.B, heads, seq, dim, threads int) {
		be, c, j := open(b, Options{Threads: threads, Tier: tierGonum}), plain(b, heads, seq, dim), newGemmJob(b, heads, seq, dim)
		var ratios []float64
		for b.Loop() {
			start := time.Now()
			if err := be.workers.run(b.Context(), j, j.tasks, threads); err != nil {
				b.Fatal(err)
			}
			middle := time.Now()
			if err := be.Attention(b.Context(), c); err != nil {
				b.Fatal(err)
			}
			ratios = append(ratios, middle.Sub(start).Seconds()/time.Since(middle).Seconds())
		}
		slices.Sort(ratios)
		b.ReportMetric(100*ratios[len(ratios)/2], "%ofGemm")
	})
}

func reportFLOPS(b *testing.B, heads, seq, dim int) {
	flops := 4 * float64(heads) * float64(seq) * float64(seq) * float64(dim)
	b.ReportMetric(flops*float64(b.N)/b.Elapsed().Seconds()/1e9, "GFLOP/s")
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
	q, k     view
	seq, dim int
	tasks    int
}

func newGemmJob(b testing.TB, heads, seq, dim int) *gemmJob {
	shape := backend.Shape{1, heads, seq, dim}
	q, err := openView("q", random(b, 1, shape))
	if err != nil {
		b.Fatal(err)
	}
	k, err := openView("k", random(b, 2, shape))
	if err != nil {
		b.Fatal(err)
	}
	return &gemmJob{q: q, k: k, seq: seq, dim: dim, tasks: heads * ceilDiv(seq, gemmRows)}
}

func (j *gemmJob) size() (floats, rows int) {
	return gemmRows*keyBlock + keyBlock*j.dim + gemmRows*j.dim, 0
}

func (j *gemmJob) task(_ context.Context, w *scratch, t int) error {
	s, vt, acc := w.floats(gemmRows*keyBlock), w.floats(keyBlock*j.dim), w.floats(gemmRows*j.dim)
	blocks := ceilDiv(j.seq, gemmRows)
	q, ldq := j.q.rowsAt(0, t/blocks, t%blocks*gemmRows)
	clear(s) // scratch may hold NaN
	clear(vt)
	for j0 := 0; j0 < j.seq; j0 += keyBlock {
		k, ldk := j.k.rowsAt(0, t/blocks, j0)
		gemm(gemmRows, keyBlock, j.dim, q, ldq, k, ldk, s, keyBlock)
		gemm(gemmRows, j.dim, keyBlock, s, keyBlock, vt, keyBlock, acc, j.dim)
	}
	return nil
}
