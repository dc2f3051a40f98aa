package oracle

import (
	"math"
	"testing"
)

// TestLinearByHand is a gated delta rule with K = 2 and V = 1: S goes from (2, 0) over (0.52, 1.36)... computed by hand.
//
//	t=0  S = (1, 0)·1·2                        = (2, 0)         o = 2
//	t=1  S = (1, 0), d = 0.5·(4 - 0.6) = 1.7   = (2.02, 1.36)   o = 1.36
//	t=2  S = (0.505, 0.34), d = 1 - 0.34       = (0.505, 1)     o = 1.505
func TestLinearByHand(t *testing.T) {
	p := Linear{K: 2, V: 1, Scale: 1, Chunk: 64, Q: []float32{1, 0, 0, 1, 1, 1}, Key: []float32{1, 0, 0.6, 0.8, 0, 1}, Value: []float32{2, 4, 1},
		Decay: []float32{0, float32(math.Log(0.5)), float32(math.Log(0.25))}, Beta: []float32{1, 0.5, 1}}
	o, s := p.Attend()
	for i, want := range []float64{2, 1.36, 1.505, 0.505, 1} {
		if got := append(o, s...)[i]; math.Abs(got.Value-want) > 1e-6 || got.Err <= 0 || got.Err > 1e-4 {
			t.Errorf("number %d is %v, should be %v", i, got, want)
		}
	}
	// Decays of channels, all the same, are that of the head, with a larger bound.
	p.Decay = []float32{p.Decay[0], p.Decay[0], p.Decay[1], p.Decay[1], p.Decay[2], p.Decay[2]}
	again, _ := p.Attend()
	for i := range o {
		if again[i].Value != o[i].Value || again[i].Err <= o[i].Err {
			t.Errorf("output %d is %v with decays of channels, else %v", i, again[i], o[i])
		}
	}
}

// TestConvByHand: 2·3 - 1·4 + 0.5 = 2.5, and SiLU 2.5/(1 + e^-2.5) = 2.310354.
func TestConvByHand(t *testing.T) {
	for _, c := range []struct {
		silu bool
		want float64
	}{{false, 2.5}, {true, 2.310354}} {
		if got := CausalConv([]float32{3, 4}, []float32{2, -1}, 0.5, c.silu); math.Abs(got.Value-c.want) > 1e-6 || got.Err > 2e-5 {
			t.Errorf("silu %v: %v, should be %v", c.silu, got, c.want)
		}
	}
}
