package vec

import (
	"math"
	"math/rand/v2"
	"testing"
)

func (t twin) rankOne(o *float32, ldo int, x, p, alpha *float32, rows, vectors, _ int) {
	for r := range rows {
		for c, y := range floats(x, 0, 0, vectors*t.lanes) {
			to := &floats(o, ldo, r, vectors*t.lanes)[c]
			*to = fma(floats(alpha, 0, 0, rows)[r], *to, floats(p, 0, 0, rows)[r]*y)
		}
	}
}

func (t twin) productSum(o, x, y, z *float32, vectors int) {
	for i := range vectors * t.lanes {
		*floatAt(o, i) = fma(*floatAt(x, i), *floatAt(y, i), *floatAt(z, i))
	}
}

func (t twin) sumsFrom(x, minus *float32, ld, rows, ref int, at *float32, vectors int) {
	sum := func(c, row int) (s float64) {
		for i := range row + 1 {
			s += float64(floats(x, ld, i, c+1)[c])
		}
		return s
	}
	for c := range vectors * t.lanes {
		*floatAt(at, c) = float32(sum(c, ref) * math.Log2E)
		for i := range rows {
			*floatAt(minus, i*ld/4+c) = -float32((sum(c, i) - sum(c, ref)) * math.Log2E)
		}
		for i := range rows {
			*floatAt(x, i*ld/4+c) = -*floatAt(minus, i*ld/4+c)
		}
	}
}

func floatAt(p *float32, i int) *float32 { return &floats(p, 0, 0, i+1)[i] }

// TestLinearSteps compares the kernels of linear attention and of convolutions with their twins, and SiLU with float64.
func TestLinearSteps(t *testing.T) {
	eachTier(t, func(t *testing.T, x, twin *Kernels, rng *rand.Rand) {
		limit := func(size float32) float64 { // two roundings where products are not fused
			if x.OnlyKeyLanes {
				return 2 * 0x1p-24 * float64(size)
			}
			return 0
		}
		for _, vectors := range []int{1, 2, 3, 4, 5, 9} {
			const rows = 7
			d := vectors * x.Lanes
			o, v, p, alpha := random(rng, rows*(d+3)), random(rng, d), random(rng, rows), random(rng, rows)
			got, want := clone(o), clone(o)
			x.RankOne(got, d+3, v, p, alpha, rows, d, rng.IntN(9))
			twin.RankOne(want, d+3, v, p, alpha, rows, d, 0)
			near(t, "rank one", got, want, limit(32))
			a, b := random(rng, d), random(rng, d)
			sum, sum2 := random(rng, d+1), make([]float32, d)
			copy(sum2, sum)
			last := sum[d]
			x.ProductSum(sum[:d], a, b, sum)
			twin.ProductSum(sum2, a, b, sum2)
			near(t, "sums of products", sum[:d], sum2, limit(32))
			if sum[d] != last {
				t.Fatal("ProductSum writes behind its vectors")
			}
			sums, sums2, minus, minus2, at, at2 := clone(o), clone(o), clone(o), clone(o), clone(a), clone(a)
			ref := rng.IntN(rows)
			x.SumsFrom(sums[:rows*d], minus, rows, ref, at)
			twin.SumsFrom(sums2[:rows*d], minus2, rows, ref, at2)
			near(t, "sums", sums, sums2, 0)
			near(t, "their negatives", minus, minus2, 0)
			near(t, "sums before", at, at2, 0)
			for i := range a {
				a[i] *= 40
			}
			a[0], a[1], a[2], a[3] = 0, -90, float32(math.Inf(1)), float32(math.NaN())
			s := clone(a)
			x.SiLU(s)
			for i, y := range a {
				want := float64(y) / (1 + math.Exp(-float64(y)))
				// exp(-|y|) is within 2 ulp and the rounding of |y|·log2 e, other steps round thrice. Subnormal powers are 0.
				if d, size := math.Abs(float64(s[i])-want), math.Abs(want); y != float32(math.Inf(1)) && y == y && d > (8+math.Abs(float64(y)))*0x1p-24*size+0x1p-119 || (y != y) != (s[i] != s[i]) || y > math.MaxFloat32 && s[i] != y {
					t.Errorf("silu of %v is %v, should be %v", y, s[i], want)
				}
			}
		}
	})
}

// near fails unless all elements are within limit.
func near(t *testing.T, what string, got, want []float32, limit float64) {
	t.Helper()
	for i := range want {
		if d := math.Abs(float64(got[i]) - float64(want[i])); !(d <= limit) {
			t.Fatalf("%s: element %d is %v, its twin has %v", what, i, got[i], want[i])
		}
	}
}
