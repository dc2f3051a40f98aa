package kernelstest

import (
	"math"
	"slices"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/backend/oracle"
)

// gradientMistakes are errors in the backward pass that the cases must find, in addition to
// the mistakes in what a row sees and in its scores.
var gradientMistakes = []string{
	"scale of dx forgotten", "derivative of the softcap forgotten", "dO·O added", "dO·O forgotten", "dlse forgotten", "dlse subtracted",
	"factor of dropout forgotten in dP", "dropout forgotten in dP", "dropout forgotten in dV", "P of the next row's lse",
	"dK of the last head of a group only", "dV of the last head of a group only", "dK of rows that see another key", "dBias of the last element only",
	"dRelative the wrong way round", "dRelative of the last element only", "dSlopes of the wrong sign", "dSlopes without the distance",
	"dSinks of the wrong sign", "dSinks without dlse", "sink forgotten in P", "O of the next row",
}

// backward computes gradients row by row in float32 from the results of the forward pass, with
// a mistake in the rows, one of gradientMistakes, or none.
func (b *built) backward(a answer, do, dlse operand, rowMistake mistake, mistake string) (g gradients) {
	wrong := func(name string) bool { return name == mistake }
	for n, s := range b.gradientShapes() {
		if s != (backend.Shape{}) {
			g[n] = make([]float32, s.Elements())
		}
	}
	d, dv, group := b.Dim, b.ValueDim, b.Heads/b.KVHeads
	for n := range b.Batch * b.Heads * b.SeqQ {
		batch, h, i := n/b.SeqQ/b.Heads, n/b.SeqQ%b.Heads, n%b.SeqQ
		r := b.row(batch, h, i)
		if rowMistake != nil {
			rowMistake(b, batch, h, i, &r)
		}
		lse, o, do := a.lse[n], a.o[n*dv:][:dv], do.data[n*dv:][:dv]
		if math.IsInf(float64(lse), -1) {
			continue
		}
		next := min(n+1, len(a.lse)-1)
		if wrong("P of the next row's lse") {
			lse = a.lse[next]
		}
		if wrong("O of the next row") {
			o = a.o[next*dv:][:dv]
		}
		exp := func(s float32) float32 { return float32(math.Exp(float64(s - lse))) }
		rest := -dot32(do, o)
		if wrong("dO·O added") {
			rest = -rest
		}
		if wrong("dO·O forgotten") {
			rest = 0
		}
		if r.Sink != nil {
			term := rest
			if dlse.data != nil && !wrong("dSinks without dlse") {
				term += dlse.data[n]
			}
			if wrong("dSinks of the wrong sign") {
				term = -term
			}
			g[6][h] += exp(backend.Bound(*r.Sink, backend.MaxBias)) * term
			if wrong("sink forgotten in P") {
				lse += float32(math.Log1p(-float64(exp(*r.Sink))))
			}
		}
		switch {
		case dlse.data == nil || wrong("dlse forgotten"):
		case wrong("dlse subtracted"):
			rest -= dlse.data[n]
		default:
			rest += dlse.data[n]
		}
		base := (batch*b.KVHeads + h/group) * b.SeqK
		lastHead := h%group == group-1
		for j := range b.SeqK {
			added, distance := float32(0), 0.0
			if r.Bias != nil {
				added += backend.Bound(float32(r.Bias(j)), backend.MaxBias)
			}
			if r.Relative != nil {
				added += backend.Bound(float32(r.Relative(j)), backend.MaxRelative)
			}
			if r.Distance != nil {
				distance = r.Distance(j)
				added -= float32(r.Slope) * float32(distance)
			}
			if r.Hidden != nil && r.Hidden(j) || math.IsInf(float64(added), -1) {
				continue
			}
			k, v := r.K[j*d:][:d], r.V[j*dv:][:dv]
			s, c := r.Scale*dot32(r.Q, k), float32(1)
			if r.Softcap > 0 {
				t := float32(math.Tanh(float64(s / r.Softcap)))
				s = r.Softcap * t
				if !wrong("derivative of the softcap forgotten") {
					c = 1 - t*t
				}
			}
			p := exp(s + added)
			factor := float32(1)
			if r.Keeps != nil {
				factor = float32(r.KeepFactor)
				if !r.Keeps(j) {
					factor = 0
				}
			}
			weight, dp := p*factor, factor*dot32(do, v)
			switch {
			case wrong("dropout forgotten in dV"):
				weight = p
			case wrong("dropout forgotten in dP"), wrong("factor of dropout forgotten in dP") && factor > 0:
				dp = dot32(do, v)
			}
			ds := p * (dp + rest)
			dx := r.Scale * ds * c
			if wrong("scale of dx forgotten") {
				dx = ds * c
			}
			at := base + j
			if wrong("dK of rows that see another key") {
				at = base + max(j-1, 0)
			}
			for x := range d {
				g[0][n*d+x] += dx * k[x]
				if lastHead || !wrong("dK of the last head of a group only") {
					g[1][at*d+x] += dx * r.Q[x]
				}
			}
			for x := range dv {
				if lastHead || !wrong("dV of the last head of a group only") {
					g[2][(base+j)*dv+x] += weight * do[x]
				}
			}
			if g[3] != nil && !lacks(b.BiasShape, j) { // a mistake may see such a key
				add32(&g[3][broadcastIndex(b.BiasShape, batch, h, i, j)], ds, wrong("dBias of the last element only"))
			}
			if g[4] != nil {
				y := j - i + b.SeqQ - 1
				if wrong("dRelative the wrong way round") {
					y = b.SeqQ + b.SeqK - 2 - y
				}
				add32(&g[4][broadcastIndex(b.RelativeShape, batch, h, 0, y)], ds, wrong("dRelative of the last element only"))
			}
			if g[5] != nil {
				switch {
				case wrong("dSlopes of the wrong sign"):
					distance = -distance
				case wrong("dSlopes without the distance"):
					distance = 1
				}
				g[5][(batch*b.Heads+h)%len(g[5])] -= ds * float32(distance)
			}
		}
	}
	for n := range g {
		for i, x := range g[n] {
			g[n][i] = b.gradientType(n).Round(x)
		}
	}
	return g
}

func dot32(x, y []float32) (sum float32) {
	for i := range x {
		sum += x[i] * y[i]
	}
	return sum
}

// add32 adds y to x, or replaces x.
func add32(x *float32, y float32, replace bool) {
	if replace {
		*x = 0
	}
	*x += y
}

// TestGradientsFindMistakes: the gradients of float32 arithmetic pass every case, and each mistake fails at least one.
func TestGradientsFindMistakes(t *testing.T) {
	found := map[string]string{}
	var worst [7]oracle.Worst // with outputs in float32
	all := len(mistakes) + len(gradientMistakes)
	for n, c := range slices.Concat(spanCases()[:2], keyGradientCases()[:2], Pairs(), Cases()) {
		if len(found) == all && testing.Short() && n%8 > 0 {
			continue // the suite runs all cases on each backend
		}
		b := c.build()
		a := solve(b, nil)
		do, dlse := b.loss(a.lse)
		sums := b.differentiate(do, dlse)
		of, err := b.compareGradients(b.backward(a, do, dlse, nil, ""), sums)
		if err != nil {
			t.Errorf("the right gradients are refused: %v: %v", c, err)
		}
		for n := range of {
			if c.DType == backend.F32 {
				worst[n].Off = max(worst[n].Off, of[n].Off)
			}
		}
		see := func(name string, wrong mistake, in string) {
			if found[name] == "" {
				if _, err := b.compareGradients(b.backward(a, do, dlse, wrong, in), sums); err != nil {
					found[name] = c.Name
				}
			}
		}
		for name, wrong := range mistakes {
			see(name, wrong, "")
		}
		for _, name := range gradientMistakes {
			see(name, nil, name)
		}
	}
	for name := range mistakes {
		if found[name] == "" {
			t.Errorf("no case finds: %s", name)
		}
	}
	for _, name := range gradientMistakes {
		if found[name] == "" {
			t.Errorf("no case finds: %s", name)
		}
	}
	for n, w := range worst {
		t.Logf("%s: at most %.2g of the bound", gradientNames[n], w.Off)
		if w.Off > 0.1 {
			t.Errorf("%s is off by %.2g of the bound, which is too tight for float32", gradientNames[n], w.Off)
		}
	}
}
