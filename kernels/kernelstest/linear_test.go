package kernelstest

import (
	"math"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/backend/oracle"
)

// slip is a mistake in linear attention.
type slip int

const (
	none slip = iota
	decayBefore
	decayAfter
	oldState
	betaForgotten
	deltaOfOld
	stateOfGroup
)

// recur computes a head in float64 with a mistake.
func recur(l oracle.Linear, slip slip) (o, state []float64) {
	state = make([]float64, l.K*l.V)
	for i, x := range l.State {
		state[i] = float64(x)
	}
	decay := func(t, i int) float64 {
		if slip == decayBefore {
			t = max(0, t-1)
		}
		switch len(l.Decay) {
		case 0:
			return 1
		case len(l.Beta):
			return math.Exp(float64(l.Decay[t]))
		}
		return math.Exp(float64(l.Decay[t*l.K+i]))
	}
	for t := range l.Beta {
		for c := range l.V {
			column, before := make([]float64, l.K), make([]float64, l.K)
			beta, d, sum := float64(l.Beta[t]), float64(l.Value[t*l.V+c]), 0.0
			for i := range column {
				before[i] = state[i*l.V+c]
				if column[i] = before[i]; slip != decayAfter {
					column[i] *= decay(t, i)
				}
				read := column[i]
				if slip == deltaOfOld {
					read = before[i]
				}
				d -= read * float64(l.Key[t*l.K+i])
			}
			if slip == betaForgotten {
				beta = 1
			}
			for i := range column {
				if column[i] += float64(l.Key[t*l.K+i]) * beta * d; slip == decayAfter {
					column[i] *= decay(t, i)
				}
				read := column[i]
				if slip == oldState {
					read = before[i]
				}
				sum += read * float64(l.Q[t*l.K+i])
				state[i*l.V+c] = column[i]
			}
			o = append(o, sum*float64(l.Scale))
		}
	}
	return o, state
}

// TestLinearMutants shows that each case finds each mistake, and that a second recurrence without one is within the bound.
func TestLinearMutants(t *testing.T) {
	for i, c := range linearCases() {
		if c.beta == 0 || c.decay == 0 || c.t < 2 || c.g != nil || c.length != 0 || c.dtype != backend.F32 {
			continue
		}
		p := c.draw(uint64(i))
		for slip := none; slip <= stateOfGroup; slip++ {
			outs := max(c.hq, c.hv)
			o, state := make([]float32, c.batch*outs*c.t*c.v), make([]float32, p.sequences*c.hv*c.k*c.v)
			for n := range p.sequences {
				for h := range outs {
					l, b, lo, _ := p.head(n, h)
					if slip == stateOfGroup {
						l, b, lo, _ = p.head(n, 0)
					}
					out, s := recur(l, slip)
					for i, x := range out {
						o[((b*outs+h)*c.t+lo)*c.v+i] = float32(x)
					}
					for i, x := range s {
						state[(n*c.hv+h*c.hv/outs)*c.k*c.v+i] = float32(x)
					}
				}
			}
			worst := p.worst("a mutant", o, state)
			if err := worst.Err(); (err == nil) != (slip == none) {
				t.Errorf("%s: mistake %d: %v", c.name, slip, err)
			}
			t.Logf("%s: mistake %d: %.3g", c.name, slip, worst.Off)
		}
	}
}
