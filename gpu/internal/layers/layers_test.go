// Package layers tests package nn on the CPU and on a GPU. go mod tidy downloads what tests of
// nn import to every program that imports nn. Tests that import package gpu are therefore here.
package layers_test

import (
	"context"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
	"github.com/seed90331342/attn/kernels/nn"
)

// counting counts uploads and downloads.
type counting struct {
	backend.Backend
	backend.Projector
	backend.Rotator
	backend.Normaliser
	backend.Gater
	ups, downs, elements atomic.Int64
}

func count(dev *kernels.Device) *counting {
	be := dev.Backend()
	return &counting{Backend: be, Projector: be.(backend.Projector), Rotator: be.(backend.Rotator), Normaliser: be.(backend.Normaliser), Gater: be.(backend.Gater)}
}

func (c *counting) Upload(ctx context.Context, host kernels.Tensor) (kernels.Tensor, error) {
	c.ups.Add(1)
	c.elements.Add(int64(host.Shape().Elements()))
	return c.Backend.Upload(ctx, host)
}

func (c *counting) Download(ctx context.Context, host, src kernels.Tensor) error {
	c.downs.Add(1)
	return c.Backend.Download(ctx, host, src)
}

// TestLayersStayOnTheDevice: a layer downloads nothing and uploads only the angles, unless they are given.
func TestLayersStayOnTheDevice(t *testing.T) {
	each(t, func(t *testing.T, dev *kernels.Device) {
		on := count(dev)
		rope := &nn.RoPE{}
		config := nn.MultiHeadConfig{Model: 32, Heads: 4, KVHeads: 2, Bias: true, RoPE: rope}
		w := must.Get(config.Initialise(nn.Initialiser{Seed: 3}))(t)
		l := must.Get(nn.NewMultiHeadAttention(t.Context(), kernels.NewDevice(on), config, w))(t)
		defer l.Release()
		x := random(t, dev, 1, 2, 1, 9, 32)
		z := random(t, dev, 2, 2, 1, 13, 32)
		angles := func(n int) kernels.Angles {
			positions := must.Get(nn.Positions(0, n))(t)
			a := must.Get(rope.Angles(t.Context(), dev, 8, positions))(t)
			t.Cleanup(a.Release)
			return a
		}
		q, k := angles(9), angles(13)
		var first, cross []float32
		for _, c := range []struct {
			name     string
			opt      nn.MultiHeadOptions
			ups      int64
			elements int64
			same     *[]float32 // results that must be equal
		}{
			{"self", nn.MultiHeadOptions{}, 2, 2 * 9 * 4, &first},
			{"self, angles given", nn.MultiHeadOptions{Angles: q}, 0, 0, &first},
			{"cross", nn.MultiHeadOptions{Memory: z}, 4, 2 * (9 + 13) * 4, &cross},
			{"cross, angles given", nn.MultiHeadOptions{Memory: z, Angles: q, MemoryAngles: k}, 0, 0, &cross},
			{"x as memory", nn.MultiHeadOptions{Memory: x, Angles: q, MemoryAngles: q}, 0, 0, &first},
		} {
			on.ups.Store(0)
			on.downs.Store(0)
			on.elements.Store(0)
			r := must.Get(l.Apply(t.Context(), x, c.opt))(must.In(t, "%s", c.name))
			if on.downs.Load() != 0 || on.ups.Load() != c.ups || on.elements.Load() != c.elements {
				t.Errorf("%s: %d downloads, %d uploads of %d elements, should be 0 and %d of %d", c.name, on.downs.Load(), on.ups.Load(), on.elements.Load(), c.ups, c.elements)
			}
			got, err := dev.ToFloat32(t.Context(), r.O)
			r.Release()
			must.Do(t, err)
			if *c.same == nil {
				*c.same = got
			} else if !slices.Equal(got, *c.same) {
				t.Errorf("%s: the result differs", c.name)
			}
		}
		if slices.Equal(first, cross) {
			t.Error("the memory has no effect")
		}
	})
}
