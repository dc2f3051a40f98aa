package nn

import (
	"cmp"
	"fmt"
	"math"
	"math/rand/v2"

	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/internal/op"
)

// Distribution is the distribution of new weights. fanIn is the number of rows of a
// weight, which one output sums over, and fanOut the number of its columns:
//
//	XavierUniform   U(-a, a), a = Gain·√(6/(fanIn+fanOut))     Glorot & Bengio 2010
//	XavierNormal    N(0, s²), s = Gain·√(2/(fanIn+fanOut))
//	KaimingUniform  U(-a, a), a = Gain·√(3/fanIn)              He et al. 2015
//	KaimingNormal   N(0, s²), s = Gain/√fanIn
//	Gaussian        N(0, s²), s = Gain
type Distribution int

// The distributions.
const (
	XavierUniform Distribution = iota
	XavierNormal
	KaimingUniform
	KaimingNormal
	Gaussian
)

// Initialiser describes how new weights are drawn. The zero value is Xavier's uniform
// distribution, from which Vaswani et al. 2017 trained, with seed 0.
type Initialiser struct {
	Distribution Distribution
	// Gain is the factor in [Distribution]; 0 means 1 for Xavier, √2 for Kaiming (for
	// rectified units) and 0.02 for Gaussian (Radford et al. 2019, GPT-2).
	Gain float64
	// Seed selects the numbers, which are the same on every machine.
	Seed uint64
}

// Initialise draws new weights for a layer, in host memory. Biases and sinks are 0, factors
// of a norm are 1. Each weight has its own stream of random numbers (PCG), so it does not
// depend on the shapes of the others. It returns ErrOption for a config or a Gain out of range.
func (c MultiHeadConfig) Initialise(in Initialiser) (w MultiHeadWeights, err error) {
	defer op.Annotate(&err, "initialise")
	if c, err = c.withDefaults(); err != nil {
		return w, err
	}
	for i, p := range w.list(c) {
		if p.Shape.Elements() < 0 {
			return w, fmt.Errorf("%s would have shape %v, which is too large: %w", p.Name, p.Shape, kernels.ErrOption)
		}
		if !p.Has() {
			continue
		}
		if *p.T, err = kernels.AllocHost(kernels.F32, p.Shape); err != nil {
			return w, fmt.Errorf("%s of shape %v: %w", p.Name, p.Shape, err)
		}
		data, _ := p.T.Float32s() // F32
		switch {
		case !p.Vector:
			if err := in.fill(data, p.In(), p.Out(), uint64(i)); err != nil {
				return w, err
			}
		case (p.Name == "qnorm" || p.Name == "knorm") && !c.Norm.PlusOne:
			for j := range data {
				data[j] = 1
			}
		}
	}
	return w, nil
}

// fill draws a weight of fanIn rows and fanOut columns from one of the seed's streams.
func (in Initialiser) fill(w []float32, fanIn, fanOut int, stream uint64) error {
	xavier, kaiming := 2/(float64(fanIn)+float64(fanOut)), 1/float64(fanIn)
	rules := []struct {
		gain, variance float64
		uniform        bool
	}{XavierUniform: {1, xavier, true}, XavierNormal: {1, xavier, false}, KaimingUniform: {math.Sqrt2, kaiming, true}, KaimingNormal: {math.Sqrt2, kaiming, false}, Gaussian: {0.02, 1, false}}
	if in.Distribution < 0 || int(in.Distribution) >= len(rules) {
		return fmt.Errorf("distribution is %d, it must be one of XavierUniform to Gaussian: %w", in.Distribution, kernels.ErrOption)
	}
	rule := rules[in.Distribution]
	gain := cmp.Or(in.Gain, rule.gain)
	if !(gain > 0) || !finite(float64(float32(gain))) {
		return fmt.Errorf("gain is %v, it must be a positive float32 (0 means the distribution's default): %w", in.Gain, kernels.ErrOption)
	}
	rng := rand.New(rand.NewPCG(in.Seed, stream))
	draw := rng.NormFloat64
	if rule.uniform { // U(-1, 1) has the variance 1/3
		draw = func() float64 { return math.Sqrt(3) * (2*rng.Float64() - 1) }
	}
	for i := range w {
		w[i] = float32(gain * math.Sqrt(rule.variance) * draw())
	}
	return nil
}
