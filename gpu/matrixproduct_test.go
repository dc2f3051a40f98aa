package gpu

import (
	"context"
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/backend/oracle"
	"github.com/seed90331342/attn/gpu/internal/queue"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
	"github.com/seed90331342/attn/shaders"
)

// productCase is a product of two heads, with the bound of float32 sums.
type productCase struct {
	name    string
	m, x, n int
	a, w    backend.DType
	keys    bool // w lies in memory as the keys of QKᵀ do
	turned  bool // and a as the rows of a transposed matrix
	bias    bool
	skip    bool // zeros of a hide NaN and Inf of w
}

var f16Products = []productCase{
	{name: "scores in whole fours", m: 40, x: 264, n: 36, a: backend.F16, w: backend.F16, keys: true},
	{name: "a layer with nothing even", m: 37, x: 531, n: 45, a: backend.F16, w: backend.F16, bias: true},
	{name: "gradients of weights", m: 24, x: 272, n: 40, a: backend.F16, w: backend.F16, turned: true},
}

func (c productCase) left(row, x int) float32 {
	// Rows 8 to 15 of each 16 have no 0: a tile contains both kinds of rows.
	if c.skip && row%16 < 8 && (row*c.x+x)%3 == 0 {
		return 0
	}
	return c.a.Round(wave((7*row + 3*x*x) % 8191))
}

func (c productCase) right(x, n int) float32 {
	switch {
	case c.skip && x == 5 && n%9 == 0:
		return float32(math.NaN())
	case c.skip && x == 40 && n%9 == 1:
		return float32(math.Inf(-1))
	}
	return c.w.Round(wave((5*x*x + 11*n) % 8191))
}

func (c productCase) added(n int) (y float32) {
	if c.bias {
		y = wave(13 * n)
	}
	return y
}

// run returns the product on b, by rule if tile is nil.
func (c productCase) run(t *testing.T, b *Backend, tile *productTile) []float32 {
	t.Helper()
	of := func(dtype backend.DType, h, rows, cols int, turned bool, f func(row, col int) float32) backend.Tensor {
		shape, at := backend.Shape{1, h, rows, cols}, func(i int) float32 { return f(i/cols, i%cols) }
		if turned {
			shape, at = backend.Shape{1, h, cols, rows}, func(i int) float32 { return f(i/(rows*cols)*rows+i%rows, i/rows%cols) }
		}
		x := tensor(t, b, dtype, shape, at)
		if turned {
			x = must.Get(x.Swap(backend.Seq, backend.Dim))(t)
		}
		return x
	}
	m := product{names: [3]string{"y", "a", "w"}, tile: tile, skip: c.skip, a: of(c.a, 2, c.m, c.x, c.turned, c.left), w: of(c.w, 1, c.x, c.n, c.keys, c.right),
		y: alloc(t, b, backend.F32, backend.Shape{1, 2, c.m, c.n})}
	if c.bias {
		m.bias = upload(t, b, host(t, backend.Shape{1, 1, 1, c.n}, c.added))
	}
	check(t, b.run(context.Background(), "product", func() (*queue.Op, error) { return b.product(m), nil }))
	return floats(t, b, m.y)
}

// worst returns the largest error of y, as a share of the bound of float32 sums that package kernelstest has, or of most.
func (c productCase) worst(y []float32, most float64) (worst float64) {
	for i, got := range y {
		row, n := i/c.n, i%c.n
		sum, abs := float64(c.added(n)), math.Abs(float64(c.added(n)))
		for x := range c.x {
			if l := c.left(row, x); !c.skip || l != 0 {
				z := float64(l) * float64(c.right(x, n))
				sum, abs = sum+z, abs+math.Abs(z)
			}
		}
		worst = max(worst, oracle.Off(float64(got), sum, min(f16Bound(c.x, abs), most)))
	}
	return worst
}

func f16Bound(n int, abs float64) float64 {
	return 0x1p-24 * (oracle.Lambda*math.Sqrt(float64(n)) + 2) * abs
}

// TestMatrixProducts: products of f16 run on matrix units, within the bound of float32 sums, with the same bits for all tiles,
// loads and chunks. Those of mistakes are not within the bound.
func TestMatrixProducts(t *testing.T) {
	b, small := openMatrices(t, Options{}), open(t, Options{MaxWork: 1e5}) // which leaves chunks of FOLD
	for _, c := range f16Products {
		tiles := b.tilesOf(&product{a: alloc(t, b, backend.F16, backend.Shape{1, 1, 1, 1}), w: alloc(t, b, backend.F16, backend.Shape{1, 1, 1, 1})})
		if len(tiles) < 2 || tiles[0].matrix.Depth == 0 {
			t.Fatalf("tiles are %+v", tiles)
		}
		want := c.run(t, b, nil)
		if worst := c.worst(want, math.Inf(1)); worst > 1 {
			t.Errorf("%s: %.3g of the bound", c.name, worst)
		} else {
			t.Logf("%s: %.3g of the bound", c.name, worst)
		}
		large := tiles[0]
		large.matrix.RM, large.matrix.CN, large.matrix.Depth = 2, 2, 2*large.matrix.K
		others := []productTile{tiles[0], tiles[1], large}
		if testing.Short() && c.turned { // compiling takes seconds
			others = others[:1]
		}
		for i, tile := range others {
			tile.scalar = i == 0
			sameRow(t, fmt.Sprintf("%s, %+v", c.name, tile), c.run(t, b, &tile), want)
		}
		sameRow(t, c.name+", in chunks", c.run(t, small, nil), want)
	}
	for _, m := range []struct{ name, old, new string }{
		{"the last stage is dropped", "x0 < min(x1 + FOLD, p.depth)", "x0 + DEPTH < min(x1 + FOLD, p.depth)"},
		{"the last terms are dropped", "x1 < p.depth", "x1 + FOLD < p.depth"},
		{"sums of a stage begin again", "subgroupMatrixMultiplyAccumulate(x[0u], y, s[0u])", "subgroupMatrixMultiplyAccumulate(x[0u], y, Result())"},
		{"sums of lanes begin again", "sums[0u] = sums[0u] + ", "sums[0u] = "},
	} {
		port := &mutated{Device: b.dev.Port, kernel: "matrixproduct ", edit: strings.NewReplacer(m.old, m.new).Replace}
		worst := f16Products[1].worst(f16Products[1].run(t, must.Get(newBackend(port, b.info, Options{}))(t), nil), math.Inf(1))
		if !port.edited || worst <= 1 {
			t.Errorf("%s: edited %v, %.3g of the bound", m.name, port.edited, worst)
		}
	}
}

// truncated returns x without the bits below the last of digits that a number of this exponent has.
func truncated(x float64, exponent, digits int) float64 {
	return math.Ldexp(math.Trunc(math.Ldexp(x, digits-exponent)), exponent-digits)
}

// TestFoldsOfTruncatedSums: the bound of float32 sums holds on units that add eight products to a sum without rounding: they
// align all to the largest, keep 25 digits of each, and 24 of the result. Units of NVIDIA truncate (Fasi, Higham, Mikaitis and
// Pranesh 2021, Numerical behavior of NVIDIA tensor cores). Sums of all terms exceed the bound there.
func TestFoldsOfTruncatedSums(t *testing.T) {
	of := func(n, fold int) float64 {
		sum, part, lane, block := 0.0, 0.0, float32(0), make([]float64, 0, 9)
		for i := range n {
			z := float64(backend.F16.Round(1+float32(i*7919%8191)/8192)) * float64(backend.F16.Round(1+float32(i*104729%8191)/8192))
			sum += z
			if block = append(block, z); len(block) == 8 {
				top := 0
				for _, y := range append(block, part) {
					_, exponent := math.Frexp(y)
					top = max(top, exponent)
				}
				next := 0.0
				for _, y := range append(block, part) {
					next += truncated(y, top, 25)
				}
				_, exponent := math.Frexp(next)
				part, block = truncated(next, exponent, 24), block[:0]
			}
			if (i+1)%fold == 0 || i+1 == n {
				lane, part = lane+float32(part), 0
			}
		}
		return math.Abs(float64(lane)-sum) / f16Bound(n, sum)
	}
	fold := int(shaders.Describe(shaders.MatrixProduct{M: 16, N: 16, K: 16, Lanes: 32, SY: 2, SX: 2, RM: 2, CN: 2, Depth: 32}).Constants["FOLD"])
	for _, n := range []int{8, 64, 128, 256, 512, 1024, 4096, 16384} {
		folded, whole := of(n, fold), of(n, n)
		t.Logf("%d terms: %.3g of the bound, %.3g without folds", n, folded, whole)
		if folded > 1 {
			t.Errorf("%d terms: %.3g of the bound", n, folded)
		}
		if n >= 4096 && whole <= 1 {
			t.Errorf("%d terms without folds: %.3g of the bound", n, whole)
		}
	}
}
