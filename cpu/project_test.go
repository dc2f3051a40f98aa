package cpu

import (
	"fmt"
	"math"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// project returns x·w + bias from a new backend.
func project(t testing.TB, opt Options, x, w, bias backend.Tensor) backend.Tensor {
	t.Helper()
	be := open(t, opt)
	s := x.Shape()
	w = broadcast(t, w, backend.Shape{s[0], s[1], s[3], w.Shape()[backend.Dim]})
	y := alloc(t, backend.Shape{s[0], s[1], s[2], w.Shape()[backend.Dim]})
	must.Do(t, be.Project(t.Context(), y, x, w, bias))
	return y
}

// TestProjectInAnyCompany shows that the bits of a row do not depend on the numbers of
// rows, batches and threads, nor those of an element on the number of columns.
func TestProjectInAnyCompany(t *testing.T) {
	skipWithRace(t)
	eachTier(t, testProjectInAnyCompany)
}

func testProjectInAnyCompany(t *testing.T, tier string) {
	const batch, s, m, n = 2, 150, 300, 391
	for _, dtype := range []backend.DType{backend.F32, backend.F16} {
		x, w := typed(t, random(t, 1, backend.Shape{batch, 1, s, m}), dtype), typed(t, random(t, 2, backend.Shape{1, 1, m, n}), dtype)
		bias := random(t, 3, backend.Shape{1, 1, 1, n})
		all := project(t, Options{Tier: tier, Threads: 1}, x, w, bias)
		for _, part := range []struct{ threads, b0, b1, from, to, col0, col1 int }{
			{7, 0, 2, 0, s, 0, n}, {1, 1, 2, 0, s, 0, n}, {2, 0, 1, 17, 18, 0, n}, {1, 0, 2, 149, s, 0, n}, {3, 0, 2, 20, 41, 0, n}, {2, 1, 2, 40, 120, 0, n},
			{1, 0, 2, 0, s, 0, 1}, {2, 0, 2, 0, s, 100, 140}, {1, 0, 2, 0, s, 128, 256}, {2, 0, 2, 0, s, 7, n},
		} {
			of := func(x backend.Tensor) backend.Tensor {
				return cut(t, cut(t, x, backend.Batch, part.b0, part.b1), backend.Seq, part.from, part.to)
			}
			columns := func(x backend.Tensor) backend.Tensor { return cut(t, x, backend.Dim, part.col0, part.col1) }
			got := project(t, Options{Tier: tier, Threads: part.threads}, of(x), columns(w), columns(bias))
			want := alloc(t, got.Shape())
			must.Do(t, open(t, Options{}).Download(t.Context(), want, columns(of(all))))
			sameBits(t, fmt.Sprintf("%v, %+v", dtype, part), got, want)
		}
	}
}

// TestProjectHidesNothing: unlike PV, a linear layer has no weight that hides NaN.
func TestProjectHidesNothing(t *testing.T) {
	eachTier(t, func(t *testing.T, tier string) {
		for _, rows := range []int{1, 200} {
			const m, n = 140, 150
			x, w := alloc(t, backend.Shape{1, 1, rows, m}), random(t, 1, backend.Shape{1, 1, m, n})
			data := floats(t, w)
			data[130*n+3], data[7*n+149] = float32(math.NaN()), float32(math.Inf(1))
			y := must.Get(project(t, Options{Tier: tier}, x, w, backend.Tensor{}).Float32s())(t)
			for i, got := range y {
				if want := i%n == 3 || i%n == 149; (got != got) != want || !want && got != 0 {
					t.Fatalf("%d rows: element %d is %v, 0·NaN and 0·Inf are NaN, all else 0", rows, i, got)
				}
			}
		}
	})
}

// TestProjectByHeads shows that heads with separate weights, and operands whose elements
// are not adjacent, give the same bits as one head at a time.
func TestProjectByHeads(t *testing.T) {
	eachTier(t, func(t *testing.T, tier string) {
		const batch, heads, s, m, n = 2, 3, 70, 45, 200
		x, w := random(t, 1, backend.Shape{batch, heads, s, m}), random(t, 2, backend.Shape{batch, heads, m, n})
		turned := alloc(t, backend.Shape{batch, heads, n, m})
		wt := swap(t, turned, backend.Seq, backend.Dim)
		be := open(t, Options{Tier: tier})
		must.Do(t, be.Download(t.Context(), wt, w))
		all, apart := alloc(t, backend.Shape{batch, heads, s, n}), alloc(t, backend.Shape{batch, heads, s, n})
		must.Do(t, be.Project(t.Context(), all, x, w, backend.Tensor{}))
		must.Do(t, be.Project(t.Context(), apart, x, wt, backend.Tensor{}))
		sameBits(t, "weights transposed", apart, all)
		for b := range batch {
			for h := range heads {
				one := func(x backend.Tensor) backend.Tensor {
					return cut(t, cut(t, x, backend.Batch, b, b+1), backend.Heads, h, h+1)
				}
				sameBits(t, fmt.Sprintf("head %d of batch %d", h, b), project(t, Options{Tier: tier}, one(x), one(w), backend.Tensor{}), one(all))
			}
		}
	})
}
