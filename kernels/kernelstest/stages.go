package kernelstest

import (
	"cmp"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/backend/oracle"
	"github.com/seed90331342/attn/kernels"
)

const u = 0x1p-24

// sumBound returns the error bound of a float32 sum of n products whose magnitudes add up to
// abs, rounded to dtype (package oracle), with two more roundings for a bias and the store.
func sumBound(n int, abs float64, dtype backend.DType, ref float64) float64 {
	b := u*(oracle.Lambda*math.Sqrt(float64(n))+2)*abs + 0x1p-125*float64(n)
	if dtype != backend.F32 {
		b += dtype.UnitRoundoff()*math.Abs(ref) + 0x1p-25
	}
	return b
}

// testStages computes QK, Softmax and PV one by one.
func testStages(t *testing.T, dev *kernels.Device) {
	for _, dtype := range []backend.DType{backend.F32, backend.F16, backend.BF16} {
		for _, layout := range []Layout{Contiguous, BSHD, Padded, Transposed} {
			c := Case{Name: "stages", DType: dtype, Layout: layout, Seed: 8,
				Dims: kernels.Dims{Batch: 2, Heads: 4, KVHeads: 2, SeqQ: 37, SeqK: 71, Dim: 19, ValueDim: 23}}
			t.Run(fmt.Sprintf("%v %v", dtype, layout), func(t *testing.T) { testQKPV(t, dev, c) })
		}
	}
	t.Run("PV passes over NaN under weights of 0", func(t *testing.T) {
		w := []float32{0.5, 0, 0.5, 0, 0, 1}
		v := []float32{1, 2, float32(math.NaN()), float32(math.Inf(1)), 3, 4}
		tw := up(t, dev, w, backend.Shape{1, 1, 2, 3})
		tv := up(t, dev, v, backend.Shape{1, 1, 3, 2})
		o := must(dev.PV(t.Context(), tw, tv))(t)
		defer o.Release()
		if got, want := read(t, dev, o), []float32{2, 3, 3, 4}; !slices.Equal(got, want) {
			t.Errorf("o is %v, should be %v", got, want)
		}
	})
}

func up(t testing.TB, dev *kernels.Device, data []float32, s backend.Shape) backend.Tensor {
	t.Helper()
	x := must(dev.FromFloat32(t.Context(), backend.F32, data, s))(t)
	t.Cleanup(x.Release)
	return x
}

func testQKPV(t *testing.T, dev *kernels.Device, c Case) {
	b := c.build()
	on := b.on(t, dev)
	defer on.release()
	s := must(dev.QK(t.Context(), on.q.view, on.k.view))(t)
	defer s.Release()
	scores := read(t, dev, s)
	var worst oracle.Worst
	b.eachRow(func(n, batch, h, i int, _ oracle.Answer) {
		row := b.row(batch, h, i)
		for j := range b.SeqK {
			ref, abs := dot(row.Q, row.K[j*b.Dim:(j+1)*b.Dim])
			worst.See(float64(scores[n*b.SeqK+j]), ref, sumBound(b.Dim, abs, backend.F32, ref), func() string { return fmt.Sprintf("s[%d,%d,%d,%d]", batch, h, i, j) })
		}
	})
	if err := worst.Err(); err != nil {
		t.Errorf("qk: %v", err)
	}

	// Softmax in place, then PV, as a program chains them.
	lse := must(dev.Alloc(t.Context(), backend.F32, backend.Shape{b.Batch, b.Heads, b.SeqQ, 1}))(t)
	defer lse.Release()
	scale := 1 / math.Sqrt(float64(b.Dim))
	noError(t, dev.Softmax(t.Context(), s, lse, kernels.Options{Scale: &scale}))
	o := must(dev.PV(t.Context(), s, on.v.view))(t)
	defer o.Release()
	if err := b.compare(answer{o: read(t, dev, o), lse: read(t, dev, lse), weights: read(t, dev, s)}); err != nil {
		t.Errorf("softmax, pv: %v", err)
	}
}

func dot(a, b []float32) (sum, abs float64) {
	for i := range a {
		x := float64(a[i]) * float64(b[i])
		sum += x
		abs += math.Abs(x)
	}
	return sum, abs
}

// testProjections tests y = x·w + b for odd sizes and every dtype.
func testProjections(t *testing.T, dev *kernels.Device) {
	if !implements[backend.Projector](dev) {
		t.Logf("%s projects nothing", dev.Info().Name)
		return
	}
	for _, dtype := range []backend.DType{backend.F32, backend.F16, backend.BF16} {
		for _, bias := range []bool{false, true} {
			t.Run(fmt.Sprintf("%v bias %v", dtype, bias), func(t *testing.T) {
				testProject(t, dev, dtype, bias, 29)
				testProject(t, dev, dtype, bias, 531)
			})
		}
	}
}

// testProject tests layers of m features.
func testProject(t *testing.T, dev *kernels.Device, dtype backend.DType, bias bool, m int) {
	const batch, s = 2, 37
	rng := rand.New(rand.NewPCG(7, 7))
	tensor := func(shape backend.Shape) (backend.Tensor, operand) {
		o := drawn(rng, shape, dtype)
		f := put(t, dev, o, Padded)
		t.Cleanup(f.release)
		return f.view, o
	}
	x, hx := tensor(backend.Shape{batch, 1, s, m})
	var worst oracle.Worst
	for _, cols := range []int{20, 10, 6} {
		w, hw := tensor(backend.Shape{1, 1, m, cols})
		var b backend.Tensor
		var hb operand
		if bias {
			b, hb = tensor(backend.Shape{1, 1, 1, cols})
		}
		y := must(dev.Alloc(t.Context(), dtype, backend.Shape{batch, 1, s, cols}))(t)
		defer y.Release()
		noError(t, dev.Project(t.Context(), y, x, w, b))
		for n, g := range read(t, dev, y) {
			row, col := n/cols, n%cols
			ref, abs := 0.0, 0.0
			if bias {
				ref = float64(hb.data[col])
				abs = math.Abs(ref)
			}
			for c := range m {
				z := float64(hx.data[row*m+c]) * float64(hw.data[c*cols+col])
				ref += z
				abs += math.Abs(z)
			}
			worst.See(float64(g), ref, sumBound(m, abs, dtype, ref), func() string { return fmt.Sprintf("row %d, column %d of %d", row, col, cols) })
		}
	}
	if err := worst.Err(); err != nil {
		t.Error(err)
	}
}

// testScores compares scores at every point with the oracle, for the named cases and for some with many options.
func testScores(t *testing.T, dev *kernels.Device) {
	if !implements[backend.Scorer](dev) {
		t.Skipf("%s has no scores", dev.Info().Name)
	}
	var cases []Case
	for n, c := range append(Cases(), Pairs()...) {
		if n%3 == 0 && !(testing.Short() && n%9 > 0) {
			cases = append(cases, c)
		}
	}
	for _, c := range cases {
		t.Run(c.Name, func(t *testing.T) {
			needs(t, dev, c)
			b := c.build()
			on := b.on(t, dev)
			defer on.release()
			for _, at := range []backend.ScorePoint{backend.Scaled, backend.Capped, backend.Biased} {
				s, err := dev.Scores(t.Context(), on.q.view, on.k.view, at, on.opt)
				if err != nil {
					t.Fatalf("%v: point %d: %v", c, at, err)
				}
				if err := b.compareScores(read(t, dev, s), at); err != nil {
					t.Errorf("%v: point %d: %v", c, at, err)
				}
				s.Release()
			}
		})
	}
}

// compareScores compares scores at a point with the oracle. Its error bound has the terms of package oracle: λ√D for
// the dot product, 3 for the scale, 8 for the softcap and 5 for the biases, each times u and the magnitudes in it.
func (b *built) compareScores(got []float32, at backend.ScorePoint) error {
	var worst oracle.Worst
	var leak error
	b.rows(func(n, batch, h, i int) {
		r := b.row(batch, h, i)
		r.V, r.Dv, r.Sink, r.Keeps = nil, 0, nil, nil
		if at < backend.Biased {
			r.Hidden, r.Bias, r.Relative, r.Slope = nil, nil, nil, 0
		}
		if at < backend.Capped {
			r.Softcap = 0
		}
		for j, want := range oracle.Solve(r).Scores {
			x := float64(got[n*b.SeqK+j])
			where := func() string { return fmt.Sprintf("s[%d,%d,%d,%d]", batch, h, i, j) }
			_, size := dot(r.Q, r.K[j*b.Dim:(j+1)*b.Dim])
			size *= math.Abs(float64(r.Scale))
			hidden := r.Hidden != nil && r.Hidden(j)
			for _, added := range []func(j int) float64{r.Bias, r.Relative} {
				if added != nil {
					hidden = hidden || math.IsInf(added(j), -1)
					size += math.Abs(added(j))
				}
			}
			if hidden {
				if !math.IsInf(x, -1) && leak == nil {
					leak = fmt.Errorf("%s is %v, the key is hidden: it must be -Inf", where(), x)
				}
				continue
			}
			if r.Slope != 0 {
				size += math.Abs(r.Slope * r.Distance(j))
			}
			worst.See(x, want, u*(oracle.Lambda*math.Sqrt(float64(b.Dim))+16)*size+0x1p-125, where)
		}
	})
	return cmp.Or(leak, worst.Err())
}

// testTopWeights compares TopWeights with the largest of all weights, to the bit.
func testTopWeights(t *testing.T, dev *kernels.Device) {
	for n, c := range Pairs() {
		if n%8 > 0 || testing.Short() && n%32 > 0 {
			continue
		}
		t.Run(c.Name, func(t *testing.T) {
			needs(t, dev, c)
			on := c.build().on(t, dev)
			defer on.release()
			all := must(on.run(t, weighed))(t)
			const most = 5
			top := must(dev.TopWeights(t.Context(), on.q.view, on.k.view, most, on.opt))(t)
			rank := func(w float32) float64 { // NaN first
				if w != w {
					return math.Inf(1)
				}
				return float64(w)
			}
			for r := range len(all.weights) / c.SeqK {
				row := all.weights[r*c.SeqK : (r+1)*c.SeqK]
				order := make([]int, c.SeqK)
				for j := range order {
					order[j] = j
				}
				slices.SortStableFunc(order, func(x, y int) int { return cmp.Compare(rank(row[y]), rank(row[x])) })
				for i, j := range order[:most] {
					key, w := int(top.Keys[r*most+i]), top.Weights[r*most+i]
					if row[j] == 0 {
						j = -1
					}
					if key != j || !sameNumber(w, row[max(j, 0)]) && j >= 0 || j < 0 && w != 0 {
						t.Fatalf("%v: row %d: number %d is key %d with %v, should be %d of %v", c, r, i, key, w, j, row)
					}
				}
			}
		})
	}
}
