package nn_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/nn"
)

func TestProjectionsRefuse(t *testing.T) {
	dev := onCPU(t)
	plain := kernels.NewDevice(plainBackend{dev.Backend()})
	tensor := func(s ...int) kernels.Tensor {
		return random(t, dev, 1, s...)
	}
	x, w := tensor(2, 1, 5, 6), tensor(1, 1, 6, 8)
	good := nn.Projections{Wq: w, Wk: w, Wv: w, Heads: 2}
	with := func(f func(p *nn.Projections)) nn.Projections {
		p := good
		f(&p)
		return p
	}
	for _, c := range []struct {
		name string
		dev  *kernels.Device
		p    nn.Projections
		x    kernels.Tensor
		want error
		text string
	}{
		{"no projector", plain, good, x, kernels.ErrUnsupported, "cpu"},
		{"negative heads", dev, with(func(p *nn.Projections) { p.Heads = -1 }), x, kernels.ErrOption, "heads is -1"},
		{"no weight", dev, with(func(p *nn.Projections) { p.Wk = kernels.Tensor{} }), x, kernels.ErrShape, "wk is missing"},
		{"rows of a weight", dev, with(func(p *nn.Projections) { p.Wv = tensor(1, 1, 5, 8) }), x, kernels.ErrShape, "wv has shape [1 1 5 8], it must be [1 1 6 8]"},
		{"columns of a weight", dev, with(func(p *nn.Projections) { p.Heads = 3 }), x, kernels.ErrShape, "wq has 8 columns, 3 heads must divide them"},
		{"a bias", dev, with(func(p *nn.Projections) { p.Bk = tensor(1, 1, 1, 6) }), x, kernels.ErrShape, "k: project: bias has shape [1 1 1 6]"},
		{"heads of x", dev, good, tensor(2, 2, 5, 6), kernels.ErrShape, "x has shape [2 2 5 6], it must be [B, 1, S, 6]"},
		{"no x", dev, good, kernels.Tensor{}, kernels.ErrShape, "x is missing"},
	} {
		if _, _, _, err := c.p.Apply(t.Context(), c.dev, c.x); !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: error is %v, should be %v and contain %q", c.name, err, c.want, c.text)
		}
	}
}
