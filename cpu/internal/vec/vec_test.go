package vec

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/seed90331342/attn/backend"
)

// eachTier runs f for each tier that the machine has, and for its tables with narrower tiles, with their twins.
func eachTier(t *testing.T, f func(t *testing.T, x, twin *Kernels, rng *rand.Rand)) {
	each(t, withNarrow(Tiers()), f)
}

// eachAssembly is eachTier for the tiers that have kernels for both layouts, with and without those for Zen 5.
func eachAssembly(t *testing.T, f func(t *testing.T, x, twin *Kernels, rng *rand.Rand)) {
	tables := withNarrow(assembly)
	for _, x := range assembly {
		if x.ordered != nil {
			y := *x
			y.Tier, y.zen5 = fmt.Sprint(x.Tier, "/zen5=", !x.zen5), !x.zen5
			tables = append(tables, &y)
		}
	}
	each(t, tables, f)
}

func withNarrow(tiers []*Kernels) (tables []*Kernels) {
	for _, x := range tiers {
		tables = append(append(tables, x), x.narrow...)
	}
	return tables
}

// each runs f for each of tables, with its twin.
func each(t *testing.T, tables []*Kernels, f func(t *testing.T, x, twin *Kernels, rng *rand.Rand)) {
	if len(tables) == 0 {
		t.Skip("no assembly for this machine")
	}
	for _, x := range tables {
		t.Run(fmt.Sprintf("%s/%d", x.Tier, x.Width), func(t *testing.T) {
			f(t, x, newTwin(x.Lanes, x.Width), rand.New(rand.NewPCG(1, 2)))
		})
	}
}

func random(rng *rand.Rand, n int) []float32 {
	s := make([]float32, n)
	for i := range s {
		s[i] = float32(rng.NormFloat64())
	}
	return s
}

func filled(n int, x float32) []float32 {
	s := make([]float32, n)
	for i := range s {
		s[i] = x
	}
	return s
}

func clone[T any](s []T) []T { return append([]T(nil), s...) }

// ulps returns the number of float32 from a to b; NaN equals NaN.
func ulps(a, b float32) int64 {
	if a != a && b != b || a == b {
		return 0
	}
	if a != a || b != b {
		return math.MaxInt64
	}
	order := func(x float32) int64 {
		u := int64(math.Float32bits(x))
		if u >= 1<<31 {
			return 1<<31 - u
		}
		return u
	}
	d := order(a) - order(b)
	return max(d, -d)
}

// within fails when got is more than limit ulp from want somewhere.
func within(t *testing.T, what string, got, want []float32, limit int64) {
	t.Helper()
	for i := range want {
		if d := ulps(got[i], want[i]); d > limit {
			t.Fatalf("%s: element %d is %v, its twin has %v: %d ulp apart, %d allowed", what, i, got[i], want[i], d, limit)
		}
	}
}

// TestExp2 shows that powers are within 2 ulp, and those of the gonum tier within 0.56, and which are exact.
func TestExp2(t *testing.T) {
	for _, x := range append([]*Kernels{newTwin(4, 8)}, Tiers()...) {
		t.Run(x.Tier, func(t *testing.T) {
			worst, limit, to := 0.0, 2.0, float32(0)
			if x.OnlyKeyLanes {
				limit, to = 0.56, 126
			}
			const n = 1 << 16
			s := make([]float32, n)
			for block := range 64 {
				in := make([]float32, n)
				for i := range in {
					in[i] = to - (126+to)*float32(block*n+i)/(64*n)
				}
				copy(s, in)
				x.Exp2(s, 0)
				for i, y := range in {
					worst = max(worst, ulpsOff(s[i], math.Exp2(float64(y))))
				}
			}
			t.Logf("%.2f ulp", worst)
			if worst > limit {
				t.Errorf("2^y is off by %.2f ulp, %v are allowed", worst, limit)
			}
			inf := float32(math.Inf(1))
			nan := float32(math.NaN())
			in := []float32{0, -1, -126, -126.01, -127, -1000, -math.MaxFloat32, -inf, nan, -149, -1e-30, -13, -100, -125, -3, -2}
			want := []float32{1, 0.5, 0x1p-126, 0, 0, 0, 0, 0, nan, 0, 1, 0x1p-13, 0x1p-100, 0x1p-125, 0.125, 0.25}
			x.Exp2(in, 0)
			within(t, "exp2", in, want, 0)
		})
	}
}

func TestWeights(t *testing.T) {
	eachAssembly(t, func(t *testing.T, x, twin *Kernels, rng *rand.Rand) {
		w := x.Width
		inf := float32(math.Inf(-1))
		for _, fours := range []int{1, 2, 32} {
			s := random(rng, 4*fours*w)
			for i := range s {
				s[i] *= 20
				if rng.IntN(5) == 0 {
					s[i] = inf
				}
			}
			s[3] = float32(math.NaN())
			for r := range 4 * fours { // a lane that sees nothing
				s[r*w+5] = inf
			}
			m := filled(w, -math.MaxFloat32)
			m[0] = 100
			mx, l := clone(m), random(rng, w)
			x.ColumnMax(s, 4*fours, mx)
			mx[3] = 1
			s2, m2, l2, alpha, alpha2 := clone(s), clone(m), clone(l), make([]float32, w), make([]float32, w)
			x.Weights(s, fours, m, mx, l, alpha)
			twin.Weights(s2, fours, m2, mx, l2, alpha2)
			// 1 ulp for a tie in each power; the sum's error is that of its parts.
			within(t, "weights", s, s2, 2)
			within(t, "alpha", alpha, alpha2, 2)
			within(t, "maximum", m, m2, 0)
			for lane := range l {
				if diff := math.Abs(float64(l[lane] - l2[lane])); diff > 1e-6*float64(4*fours) || (l[lane] != l[lane]) != (l2[lane] != l2[lane]) {
					t.Errorf("lane %d: sum %v, twin %v", lane, l[lane], l2[lane])
				}
			}
			if alpha[5] != 1 || s[5] != 0 {
				t.Errorf("a lane that sees nothing has alpha %v and weight %v", alpha[5], s[5])
			}
		}
	})
}

// TestRowWeights compares RowWeights with the kernels that do the same in parts, to the bit.
func TestRowWeights(t *testing.T) {
	eachTier(t, func(t *testing.T, x, _ *Kernels, rng *rand.Rand) {
		nan, inf := float32(math.NaN()), float32(math.Inf(1))
		for _, n := range []int{x.Lanes, 2 * x.Lanes, 4 * x.Lanes, 7 * x.Lanes} {
			const rows = 6
			lds := n + 3
			s, m, l, alpha := random(rng, rows*lds), random(rng, rows), random(rng, rows), make([]float32, rows+1)
			for i := range s {
				if s[i] *= 20; rng.IntN(5) == 0 {
					s[i] = -inf
				}
			}
			alpha[rows] = 7
			m[0] = 100
			s[lds+n-1] = nan
			s[2*lds+1], l[2] = inf, 3
			for i := range n { // rows that see nothing, and no numbers
				s[3*lds+i], s[4*lds+i] = -inf, nan
			}
			m[3], m[4] = -math.MaxFloat32, -math.MaxFloat32
			want, wantM, wantL := clone(s), clone(m), clone(l)
			wantAlpha := filled(rows+1, 7)
			room := make([]float32, x.Lanes)
			for r := range rows {
				row := want[r*lds : r*lds+n]
				wantM[r] = max(m[r], x.ScaleMax(row, 1, room))
				x.Exp2(row, wantM[r])
				room[0] = m[r] - wantM[r]
				x.Exp2(room, 0)
				wantAlpha[r] = room[0]
				sum := float32(0)
				for ; len(row) > 0; row = row[4:] {
					sum += (row[0] + row[1]) + (row[2] + row[3])
				}
				wantL[r] = float32(wantAlpha[r]*l[r]) + sum
			}
			x.RowWeights(s, lds, n, rows, m, l, alpha)
			for _, got := range []struct {
				name    string
				x, want []float32
			}{{"weights", s, want}, {"maxima", m, wantM}, {"sums", l, wantL}, {"factors", alpha, wantAlpha}} {
				within(t, got.name, got.x, got.want, 0)
			}
		}
	})
}

// TestSoftcap shows that c·tanh is within 4 ulp, or 2 on the gonum tier, and half of one for the product, which may lie in
// the next binade.
func TestSoftcap(t *testing.T) {
	eachTier(t, func(t *testing.T, x, _ *Kernels, rng *rand.Rand) {
		const n = 1 << 16
		for _, c := range []float32{1, 3} {
			s, limit, worst := make([]float32, n), 4.5, 0.0
			if x.OnlyKeyLanes && c == 1 {
				limit = 2
			}
			for i := range s {
				s[i] = float32(math.Ldexp(rng.Float64()*2-1, rng.IntN(40)-30))
			}
			copy(s, []float32{0, float32(math.Inf(1)), NegInf, float32(math.NaN())})
			in := clone(s)
			x.Softcap(s, c)
			for i, y := range in {
				if (s[i] != s[i]) != (y != y) {
					t.Errorf("%v gives %v", y, s[i])
				} else if y == y {
					worst = max(worst, ulpsOff(s[i], float64(c)*math.Tanh(float64(y))))
				}
			}
			t.Logf("%v: %.2f ulp", c, worst)
			if worst > limit {
				t.Errorf("%v·tanh is off by %.2f ulp", c, worst)
			}
		}
	})
}

// ulpsOff returns |got-want| in units of the last place of want as a float32.
func ulpsOff(got float32, want float64) float64 {
	if float64(got) == want {
		return 0
	}
	_, e := math.Frexp(want)
	return math.Abs(float64(got)-want) / math.Ldexp(1, max(e-24, -149))
}

// same fails unless x and twin leave the same in copies of s and mx, of which mx may be nil.
func same(t *testing.T, what string, x, twin *Kernels, s, mx []float32, do func(k *Kernels, s, mx []float32)) {
	t.Helper()
	got, want, gotMX, wantMX := clone(s), clone(s), clone(mx), clone(mx)
	do(x, got, gotMX)
	do(twin, want, wantMX)
	within(t, what, got, want, 0)
	within(t, what+", maxima", gotMX, wantMX, 0)
}

// TestTileSteps compares the kernels between the two products with their twins.
func TestTileSteps(t *testing.T) {
	eachAssembly(t, func(t *testing.T, x, twin *Kernels, rng *rand.Rand) {
		w, n := x.Width, x.Lanes
		inf, nan := float32(math.Inf(1)), float32(math.NaN())
		const rows, squares = 7, 3
		s, b, mx := random(rng, rows*w), random(rng, rows*w), random(rng, w)
		for i := range b {
			switch rng.IntN(6) {
			case 0:
				b[i] = []float32{-inf, inf, nan, math.MaxFloat32, -math.MaxFloat32, 0x1p127}[rng.IntN(6)]
			case 1:
				s[i] = []float32{nan, inf, -inf}[rng.IntN(3)]
			}
		}
		square := random(rng, 2*n*w)
		square[0], square[w] = nan, -inf
		ld := (rows*w - 2*n) / (n - 1) // rows of b that lap over
		for _, limit := range []float32{0x1p127, 3} {
			same(t, "bias squares", x, twin, square, mx[:n], func(k *Kernels, s, mx []float32) { k.BiasSquares(s, b, ld, 2, limit, mx) })
		}
		same(t, "diagonal", x, twin, s, mx, func(k *Kernels, s, mx []float32) { k.Diagonal(s, b[:rows+w-1], rows, mx) })

		d, factors := random(rng, w), random(rng, w)
		for i := range d {
			d[i] = float32(rng.IntN(1<<20) - 1<<19)
		}
		d[0], factors[1] = -5, 0
		same(t, "slopes", x, twin, random(rng, 12*w), mx, func(k *Kernels, s, mx []float32) { k.Slopes(s, d, factors, 3, mx) })

		apart := squares*n + 5
		mask := make([]bool, n*apart)
		for i := range mask {
			mask[i] = rng.IntN(3) > 0
		}
		veiled := random(rng, squares*n*w)
		veiled[1] = nan
		same(t, "hide", x, twin, veiled, nil, func(k *Kernels, s, _ []float32) { k.Hide(s, mask, apart, squares) })

		lo, hi := make([]int32, w), make([]int32, w)
		for i := range lo {
			lo[i], hi[i] = int32(rng.IntN(rows+6)-3+100), int32(rng.IntN(rows+6)-3+100)
		}
		same(t, "edge", x, twin, s, nil, func(k *Kernels, s, _ []float32) { k.Edge(s, rows, 100, lo, hi) })

		u, a := random(rng, rows*w), random(rng, w)
		same(t, "fold", x, twin, random(rng, rows*w), nil, func(k *Kernels, s, _ []float32) { k.Fold(s, u, rows, a, b[:w]) })
		if x.RowOutputs { // against Fold of each row
			o, d, zeros := random(rng, w*w), w, make([]float32, w*w)
			a[0], o[0] = -1e-30, 1e-30 // the product is no -0
			got, folded, apart := clone(o), clone(o), make([]float32, w*(d+3))
			y := random(rng, w*w)
			x.FoldRows(got, d, got, y, w, d, a, b)
			x.FoldRows(apart, d+3, o, nil, w, d, a, nil)
			for r := range w {
				fa, fb, row := filled(w, a[r]), filled(w, b[r]), o[r*d:][:d]
				x.Fold(folded[r*d:], y[r*d:], 1, fa, fb)
				x.Fold(row, zeros, 1, fa, zeros)
				within(t, "a row of outputs times a factor", apart[r*(d+3):][:d], row, 0)
			}
			within(t, "folded rows of outputs", got, folded, 0)
		}
	})
}

// TestRowSteps is TestTileSteps for rows with keys as lanes.
func TestRowSteps(t *testing.T) {
	eachTier(t, func(t *testing.T, x, twin *Kernels, rng *rand.Rand) {
		nan, inf := float32(math.NaN()), float32(math.Inf(-1))
		for _, vectors := range []int{1, 2, 9} {
			s := random(rng, vectors*x.Lanes)
			s[0], s[1] = nan, inf
			same(t, "scaled", x, twin, s, []float32{0}, func(k *Kernels, s, mx []float32) {
				if mx[0] = k.ScaleMax(s, 3, make([]float32, k.Lanes)); mx[0] != mx[0] {
					t.Errorf("%s, %d vectors: NaN counts as a maximum", k.Tier, vectors)
				}
			})
			x.ScaleMax(s, 3, make([]float32, x.Lanes))
			sum, s2 := random(rng, x.Lanes), clone(s)
			sum2 := clone(sum)
			x.Exp2Sum(s, 9, sum)
			twin.Exp2Sum(s2, 9, sum2)
			within(t, "powers", s, s2, 2)
			for i := range sum {
				if d := sum[i] - sum2[i]; d > 1e-6 || d < -1e-6 || (sum[i] != sum[i]) != (sum2[i] != sum2[i]) {
					t.Errorf("%d vectors: sum %d is %v, its twin has %v", vectors, i, sum[i], sum2[i])
				}
			}
		}
		// Biases, with special values among both operands.
		special := []float32{inf, -inf, nan, math.MaxFloat32, -math.MaxFloat32, 0x1p127, 0x1p126, -0x1p127}
		s, b := random(rng, 90*x.Lanes), random(rng, 90*x.Lanes)
		for i := range b {
			switch rng.IntN(6) {
			case 0:
				b[i] = special[rng.IntN(len(special))]
			case 1:
				s[i] = special[rng.IntN(3)]
			}
		}
		by, mask := random(rng, len(b)), make([]bool, len(s))
		for i := range by {
			if rng.IntN(4) == 0 {
				by[i] = []float32{-inf, inf, nan, 0x1p126, -0x1p127}[rng.IntN(5)]
			}
			mask[i] = rng.IntN(2) == 0
		}
		same(t, "bias", x, twin, s, nil, func(k *Kernels, s, _ []float32) { k.Bias(s, b) })
		same(t, "join", x, twin, b, nil, func(k *Kernels, s, _ []float32) { k.Join(s, by) })
		for _, n := range []int{x.Lanes, len(b)} {
			same(t, "bounded", x, twin, b, nil, func(k *Kernels, s, _ []float32) { k.Bound(s[:n], 0x1p126) })
			same(t, "hidden", x, twin, s, nil, func(k *Kernels, s, _ []float32) { k.HideRow(s[:n], mask) })
		}
		all := filled(3*x.Lanes, inf)
		if m := x.ScaleMax(all, 1, make([]float32, x.Lanes)); m != inf {
			t.Errorf("the largest of -Inf is %v", m)
		}
	})
}

func TestMoves(t *testing.T) {
	eachTier(t, func(t *testing.T, x, twin *Kernels, rng *rand.Rand) {
		n := x.Lanes
		src, mul := random(rng, n*(n+3)), random(rng, n)
		src[0], mul[0] = 0, -1
		src[1], mul[1] = -1e-30, 1e-30 // underflows
		dst, dst2 := make([]float32, n*(n+1)), make([]float32, n*(n+1))
		x.Transpose(dst, n+1, 1, src, n+3, 1, n, mul)
		twin.Transpose(dst2, n+1, 1, src, n+3, 1, n, mul)
		within(t, "transpose", dst, dst2, 0)
		for _, y := range []float32{dst[0], dst[n+1]} {
			if math.Float32bits(y) != 0 {
				t.Errorf("%v is no positive zero", y)
			}
		}

		all := make([]uint16, 1<<16)
		for i := range all {
			all[i] = uint16(i)
		}
		got := make([]float32, 1<<16)
		same(t, "f16", x, twin, got, nil, func(k *Kernels, s, _ []float32) { Load(k, F16, s, 1<<12, all, 1<<12, 16, 1<<12) })
		same(t, "bf16", x, twin, got, nil, func(k *Kernels, s, _ []float32) { Load(k, BF16, s, 1<<12, all, 1<<12, 16, 1<<12) })
		in := random(rng, 1<<12)
		for i := range in {
			in[i] = float32(math.Ldexp(float64(in[i]), rng.IntN(300)-160)) // subnormal and infinite ones too
		}
		for i := range 1 << 10 { // ties, and their neighbours
			in[i] = math.Float32frombits(rng.Uint32()&^0xffff | 1<<15 + uint32(i%3) - 1)
		}
		copy(in, []float32{0, float32(math.Copysign(0, -1)), math.MaxFloat32, -math.MaxFloat32, math.Float32frombits(0x7f800001), math.Float32frombits(0xffffffff)})
		for _, e := range []backend.DType{F16, BF16} {
			Load(x, e, got, 1<<12, all, 1<<12, 16, 1<<12)
			back := make([]uint16, 1<<16)
			x.Store(e, back, got)
			for i, b := range back {
				if b != all[i] && got[i] == got[i] {
					t.Fatalf("%v %#04x came back as %#04x", e, i, b)
				}
			}
			r, r2 := make([]uint16, len(in)), make([]uint16, len(in))
			x.Store(e, r, in)
			twin.Store(e, r2, in)
			for i := range r {
				if r[i] != r2[i] && (e == BF16 || in[i] == in[i]) {
					t.Fatalf("%v (%#08x) became %v %#04x, its twin has %#04x", in[i], math.Float32bits(in[i]), e, r[i], r2[i])
				}
			}
		}

		for _, d := range []int{1, n, 2*n + 3} {
			for _, bad := range []float32{float32(math.NaN()), float32(math.Inf(1)), float32(math.Inf(-1))} {
				v := random(rng, 5*(d+2))
				v[d] = bad // between rows
				if x.NonFinite(v, d+2, 5, d) {
					t.Errorf("%v between rows of %d is found", bad, d)
				}
				for at := range d {
					v[3*(d+2)+at] = bad
					if !x.NonFinite(v, d+2, 5, d) {
						t.Errorf("%v at element %d of %d is not found", bad, at, d)
					}
					v[3*(d+2)+at] = math.MaxFloat32
				}
			}
		}
	})
}
