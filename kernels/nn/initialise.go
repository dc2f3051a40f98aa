package nn

import (
	"cmp"
	"fmt"
	"math"
	"math/rand/v2"

	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/internal/op"
)

// Initialiser describes how new weights are drawn. The distribution is Xavier's uniform one (Glorot & Bengio 2010), from
// which Vaswani et al. 2017 trained. fanIn is the number of rows of a weight, which one output sums over, and fanOut the
// number of its columns:
//
//	U(-a, a)    a = Gain·√(6/(fanIn+fanOut))
type Initialiser struct {
	// Gain is the factor above; 0 means 1.
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
	gain := cmp.Or(in.Gain, 1)
	if !(gain > 0) || !finite(float64(float32(gain))) {
		return w, fmt.Errorf("gain is %v, it must be a positive float32 (0 means 1): %w", in.Gain, kernels.ErrOption)
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
			rng, std := rand.New(rand.NewPCG(in.Seed, uint64(i))), math.Sqrt(2/(float64(p.In())+float64(p.Out())))
			for j := range data { // U(-1, 1) has the variance 1/3
				data[j] = float32(gain * std * (math.Sqrt(3) * (2*rng.Float64() - 1)))
			}
		case (p.Name == "qnorm" || p.Name == "knorm") && !c.Norm.PlusOne:
			for j := range data {
				data[j] = 1
			}
		}
	}
	return w, nil
}
