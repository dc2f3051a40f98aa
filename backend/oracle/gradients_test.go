package oracle

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/seed90331342/attn/backend"
)

// small is a problem of two query heads that share a key head. Its numbers, and their gradients, are in the
// order of names; those of an option are nil without it.
type small struct {
	x            [7][]float32
	do, dlse     []float32
	softcap      float32
	causal, drop bool
}

var names = [7]string{"q", "k", "v", "bias", "relative", "slopes", "sinks"}

const heads, rows, keys, dim, valueDim = 2, 3, 5, 4, 2

// drawSmall draws elements that are multiples of 2^-8, so that small steps from them are exact.
func drawSmall(seed uint64) *small {
	rng := rand.New(rand.NewPCG(seed, 0))
	draw := func(n int) []float32 {
		x := make([]float32, n)
		for i := range x {
			x[i] = float32(math.Round(rng.NormFloat64()*256) / 256)
		}
		return x
	}
	return &small{
		x:  [7][]float32{draw(heads * rows * dim), draw(keys * dim), draw(keys * valueDim)},
		do: draw(heads * rows * valueDim), dlse: draw(heads * rows),
	}
}

// eachRow calls f with every row, and the gradients to which it adds.
func (s *small) eachRow(f func(n int, r Row, to RowGradients)) (g [7][]Sum) {
	for n, x := range s.x {
		g[n] = make([]Sum, len(x))
	}
	bias, relative, slopes, sinks := s.x[3], s.x[4], s.x[5], s.x[6]
	for n := range heads * rows {
		h, i := n/rows, n%rows
		r := Row{Q: s.x[0][n*dim:][:dim], K: s.x[1], V: s.x[2], Dv: valueDim, Scale: 0.75, Softcap: s.softcap}
		to := RowGradients{DQ: g[0][n*dim:][:dim], DK: g[1], DV: g[2]}
		r.Hidden = func(j int) bool { return s.causal && j > i || n == 4 } // row 4 sees nothing
		if bias != nil {                                                   // shared by the rows
			r.Bias = func(j int) float64 { return float64(bias[h*keys+j]) }
			to.DBias = func(j int) *Sum { return &g[3][h*keys+j] }
		}
		if relative != nil { // shared by the heads
			r.Relative = func(j int) float64 { return float64(relative[j-i+rows-1]) }
			to.DRelative = func(j int) *Sum { return &g[4][j-i+rows-1] }
		}
		if slopes != nil {
			r.Slope, r.Distance = float64(slopes[h]), func(j int) float64 { return math.Abs(float64(i - j)) }
			to.DSlope = &g[5][h]
		}
		if sinks != nil {
			r.Sink, to.DSink = &sinks[h], &g[6][h]
		}
		if s.drop {
			r.Keeps, r.KeepFactor = func(j int) bool { return (n+j)%3 > 0 }, 1.5
		}
		f(n, r, to)
	}
	return g
}

func (s *small) differentiate() [7][]Sum {
	return s.eachRow(func(n int, r Row, to RowGradients) {
		Differentiate(r, s.do[n*valueDim:][:valueDim], s.dlse[n], to)
	})
}

// loss returns Σ do·o + dlse·lse.
func (s *small) loss() (sum float64) {
	s.eachRow(func(n int, r Row, _ RowGradients) {
		a := Solve(r)
		for x, o := range a.O {
			sum += float64(s.do[n*valueDim+x]) * o
		}
		if !math.IsInf(a.LSE, -1) {
			sum += float64(s.dlse[n]) * a.LSE
		}
	})
	return sum
}

// TestDifferentiate: the gradients are the central differences of Solve, with every combination of the options.
func TestDifferentiate(t *testing.T) {
	const set = 1 << 7
	for options := range set {
		s := drawSmall(uint64(options))
		extra := drawSmall(set).x[0]
		s.causal, s.drop = options&1 > 0, options&2 > 0
		if options&4 > 0 {
			s.softcap = 1.5
		}
		for n, x := range [][]float32{extra[:heads*keys], extra[heads*keys:][:rows+keys-1], {0.5, -0.25}, {0.75, -1.5}} {
			if options>>(3+n)&1 > 0 {
				s.x[3+n] = x
			}
		}
		for n, sums := range s.differentiate() {
			for i, at := range s.x[n] {
				// The error of this difference is of fourth order in h.
				const h = 0x1p-10
				loss := func(steps float32) float64 {
					s.x[n][i] = at + steps*h
					return s.loss()
				}
				want := (8*(loss(1)-loss(-1)) - (loss(2) - loss(-2))) / (12 * h)
				s.x[n][i] = at
				if got := sums[i].Value; !(math.Abs(got-want) <= 1e-9) {
					t.Errorf("options %07b: d%s[%d] is %v, the difference of the loss %v", options, names[n], i, got, want)
				}
				// Where no row adds, the gradient is exactly 0.
				bound, none := sums[i].Bound(backend.F32), sums[i] == Sum{}
				if none != (bound == 0) || !(bound >= 0 && bound < 1e-3) {
					t.Errorf("options %07b: the bound of d%s[%d] is %v: not what a float32 check can use", options, names[n], i, bound)
				}
			}
		}
	}
}

// TestDifferentiateEdges: hidden numbers have no effect, a row that sees nothing adds 0 to all
// gradients but the sink's, and a NaN that a row sees makes those unspecified that it adds to.
func TestDifferentiateEdges(t *testing.T) {
	nan := float32(math.NaN())
	for _, c := range []struct {
		name   string
		spoil  func(s *small)
		dq, dk bool // whether the first elements are unspecified
	}{
		{"NaN in a row that sees nothing", func(s *small) {
			for i := range dim {
				s.x[0][4*dim+i] = nan
			}
			s.do[4*valueDim], s.dlse[4] = nan, nan
		}, false, false},
		{"NaN in the last key, which only rows 2 and 5 see", func(s *small) { s.x[1][2*dim] = nan }, false, true},
		{"NaN in the last value", func(s *small) { s.x[2][2*valueDim] = nan }, false, true},
		{"NaN in a key that no row sees", func(s *small) { s.x[1][4*dim], s.x[2][4*valueDim] = nan, nan }, false, false},
		{"Inf in do of row 0", func(s *small) { s.do[0] = float32(math.Inf(1)) }, true, true},
		{"NaN in dlse of row 0", func(s *small) { s.dlse[0] = nan }, true, true},
	} {
		s := drawSmall(1)
		s.causal = true
		clean := s.differentiate()
		c.spoil(s)
		got := s.differentiate()
		same := func(name string, got, want Sum, unspecified bool) {
			if unspecified != math.IsNaN(got.Value) || !unspecified && got != want {
				t.Errorf("%s: %s is %v, %v without it", c.name, name, got, want)
			}
		}
		same("dq", got[0][0], clean[0][0], c.dq)
		same("dk", got[1][0], clean[1][0], c.dk)
		if x := got[1][4*dim]; x != (Sum{}) {
			t.Errorf("%s: dk of a key that no row sees is %v", c.name, x)
		}
	}
	blind := Row{Q: []float32{1}, K: []float32{1}, V: []float32{nan}, Dv: 1, Scale: 1, Hidden: func(int) bool { return true }, Sink: new(float32(3))}
	var dsink Sum
	dk := make([]Sum, 1)
	Differentiate(blind, []float32{2}, 5, RowGradients{DK: dk, DSink: &dsink})
	if dsink.Value != 5 || dk[0] != (Sum{}) {
		t.Errorf("a row that sees only the sink: dsink %v, dk %v, should be 5 and 0", dsink, dk)
	}
}

// TestBoundOfGradients: mistakes are further off than the bound allows.
func TestBoundOfGradients(t *testing.T) {
	s := drawSmall(3)
	right := s.differentiate()
	for name, wrong := range map[string]func(s *small){
		"dlse forgotten":  func(s *small) { s.dlse = make([]float32, len(s.dlse)) },
		"a softcap of 40": func(s *small) { s.softcap = 40 },
		"keys hidden":     func(s *small) { s.causal = true },
	} {
		c := *s
		wrong(&c)
		var worst Worst
		for i, x := range c.differentiate()[0] {
			worst.See(x.Value, right[0][i].Value, right[0][i].Bound(backend.F32), func() string { return name })
		}
		if worst.Err() == nil {
			t.Errorf("%s is off by %v of the bound", name, worst.Off)
		}
	}
	for _, out := range []backend.DType{backend.F16, backend.BF16} {
		if x := right[1][0]; x.Bound(out) <= x.Bound(backend.F32) {
			t.Errorf("the bound of %v is no larger than that of f32", out)
		}
	}
}
