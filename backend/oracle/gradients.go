package oracle

import (
	"math"

	"github.com/seed90331342/attn/backend"
)

// u is the unit roundoff of float32, and flushed bounds the loss of a subnormal number that becomes 0.
const u, flushed = 0x1p-24, 0x1p-125

// Sum is an element of a gradient, the sum of what rows add to it. Its Value is NaN when the
// contract leaves it unspecified, because one of the rows sees a NaN or an Inf.
type Sum struct {
	Value    float64
	abs, err float64 // of the terms: sum of the magnitudes, of the error bounds
	terms    int
	// Each rounded x may be off by floor, besides its share. factors is the sum of the magnitudes of the y.
	floor, factors float64
}

// add adds x·y, where x has an error of at most err and y is exact.
func (s *Sum) add(x, err, y float64) {
	if s == nil {
		return
	}
	s.Value += x * y
	s.abs += math.Abs(x * y)
	s.err += times(err, math.Abs(y)) + flushed
	s.terms++
}

// addRounded is add where x is rounded in units that lose up to v of it, or f of the largest x of the sum.
func (s *Sum) addRounded(x, err, y, v, f float64) {
	if s == nil {
		return
	}
	most := math.Abs(x) + err
	s.add(x, err+times(v, most), y)
	s.floor = math.Max(s.floor, times(f, most))
	s.factors += math.Abs(y)
}

// times returns x·y. 0 times infinity is 0: a product with 0 has no error, however far the other factor is off.
func times(x, y float64) float64 {
	if x == 0 || y == 0 {
		return 0
	}
	return x * y
}

// Bound returns the error bound of the element when it is stored as out; 0 if no row adds to it.
func (s *Sum) Bound(out backend.DType) float64 {
	if s.terms == 0 {
		return 0
	}
	return Element{s.Value, s.err + times(s.floor, s.factors) + u*(lambda(s.terms)+2)*s.abs}.Bound(out)
}

// RowGradients are the gradients to which a row adds. Those that are nil are not computed.
type RowGradients struct {
	DQ, DK, DV       []Sum            // [D], [Sk, D], [Sk, Dv]
	DBias, DRelative func(j int) *Sum // of key j
	DSlope, DSink    *Sum
}

// Differentiate adds to g the gradients of do·o + dlse·lse, where (o, lse) is the result of r. r.Out is the dtype of o.
func Differentiate(r Row, do []float32, dlse float32, g RowGradients) {
	r.differentiate(Solve(r), do, dlse, g)
}

// DifferentiatePart is [Differentiate] for a row whose o and lse are results over more keys
// than those of r, as they are stored: it adds what the keys of r contribute.
func DifferentiatePart(r Row, o []float32, lse float32, do []float32, dlse float32, g RowGradients) {
	a := Solve(r)
	a.LSE, a.LSEBound, a.OBound = float64(lse), 0, make([]float64, len(o))
	for x, y := range o {
		a.O[x] = float64(y)
	}
	r.differentiate(a, do, dlse, g)
}

// differentiate is Differentiate with the result a of the row.
func (r *Row) differentiate(a Answer, do []float32, dlse float32, g RowGradients) {
	if math.IsInf(a.LSE, 0) {
		return
	}
	d := len(r.Q)
	e := u*(a.reach*(lambda(d)+17)+3*math.Abs(a.LSE)) + a.shift + a.LSEBound
	// weight returns the weight of a score and its bound.
	weight := func(score float64) (p, alpha float64) {
		x := math.Min(score-a.LSE, 0) // the LSE that DifferentiatePart has is rounded
		p = math.Exp(x)
		return p, weightError(x, e) + 8*u*p
	}

	v, fp, fx := 0.0, 0.0, 0.0 // of products on matrix units
	if r.Rounded == backend.F16 || r.Rounded == backend.BF16 {
		v, fp, fx = 0x1p-11, 0x1p-40, 0x1p-32
	}
	// nan is NaN if the row sees a number that is not finite, otherwise 0.
	nan := 0 * (a.LSE + float64(dlse) + total(r.Q) + total(do))
	for _, j := range a.visible {
		nan += 0 * (total(r.K[j*d:(j+1)*d]) + total(r.V[j*r.Dv:(j+1)*r.Dv]))
	}
	rest := float64(dlse) + nan // t without its first term
	absO, errO := 0.0, 0.0
	for x, do := range do {
		do := float64(do)
		rest -= do * a.O[x]
		absO += math.Abs(do) * (math.Abs(a.O[x]) + a.OBound[x])
		errO += math.Abs(do) * a.OBound[x]
	}
	// score returns the gradient of a score and its bound.
	score := func(p, alpha, dp, absDP float64) (ds, bound, t float64) {
		t = dp + rest
		tau := u*((lambda(r.Dv)+5)*(absDP+absO)+2*math.Abs(float64(dlse))) + errO + 2*float64(r.Dv)*flushed
		return p * t, (alpha+2*u*(p+alpha))*math.Abs(t) + (1+2*u)*(p+alpha)*tau + flushed*(1+math.Abs(t)+tau), t
	}

	if r.Sink != nil {
		p, alpha := weight(r.sink())
		ds, bound, _ := score(p, alpha, 0, 0)
		g.DSink.add(ds, bound, 1)
	}
	for _, j := range a.visible {
		p, alpha := weight(a.Scores[j])
		p += nan
		factor := 1.0
		if r.Keeps != nil {
			factor = r.KeepFactor
			if !r.Keeps(j) {
				factor = 0
			}
		}
		lost := math.Min(v*(p+alpha)+fp, p+alpha) // to f16
		dp, absDP := 0.0, 0.0
		for x, do := range do {
			y := factor * float64(do) * float64(r.V[j*r.Dv+x])
			dp += y
			absDP += math.Abs(y)
			if g.DV != nil {
				g.DV[j*r.Dv+x].add(p*factor, factor*((1+4*u)*alpha+4*u*p+flushed+lost), float64(do))
			}
		}
		ds, sigma, t := score(p, alpha, dp, absDP)
		if g.DBias != nil {
			g.DBias(j).add(ds, sigma, 1)
		}
		if g.DRelative != nil {
			g.DRelative(j).add(ds, sigma, 1)
		}
		if g.DSlope != nil {
			g.DSlope.add(ds, sigma, -r.Distance(j))
		}
		c, gamma := r.chain(j)
		scale := float64(r.Scale)
		dx := scale * c * ds
		xi := times(math.Abs(scale), times(sigma, math.Abs(c)+gamma)+times(p*math.Abs(t), gamma+3*u)+flushed) + flushed
		for i := range d {
			if g.DQ != nil {
				g.DQ[i].addRounded(dx, xi, float64(r.K[j*d+i]), v, fx)
			}
			if g.DK != nil {
				g.DK[j*d+i].addRounded(dx, xi, float64(r.Q[i]), v, fx)
			}
		}
	}
}

// chain returns c_j and γ_j of the package comment, or c' and γ' with a score mod.
func (r *Row) chain(j int) (c, gamma float64) {
	c = 1
	if r.Softcap > 0 {
		// sech is exact where 1 - tanh² cancels.
		sech2 := func(x float64) float64 { return 1 / (math.Cosh(x) * math.Cosh(x)) }
		s, abs, shift := r.score(j)
		x, xi := math.Abs(s)/float64(r.Softcap), (u*(lambda(len(r.Q))+3)*abs+shift)/float64(r.Softcap)
		c, gamma = sech2(x), math.Min(2*(times(sech2(math.Max(0, x-xi)), xi)+12*u), 1)+3*u
	}
	if r.Mod != nil {
		f, shift := r.around(r.ModDerivative, j)
		c, gamma = f*c, math.Abs(f)*gamma+times(shift, c+gamma)+u*math.Abs(f*c)
	}
	return c, gamma
}

// total returns the sum of x, which is not finite if an element is not.
func total(x []float32) (sum float64) {
	for _, y := range x {
		sum += float64(y)
	}
	return sum
}
