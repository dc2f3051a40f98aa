package backendtest

import (
	"fmt"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
	"pgregory.net/rapid"
)

// Draw returns a random case, the same one for the same seed: one in three is small.
func Draw(seed int) Case {
	return rapid.Custom(func(t *rapid.T) Case {
		if seed%3 == 0 {
			return drawSmall(t, false)
		}
		return drawCase(t)
	}).Example(seed)
}

// Operands are the operands of a case on a device, for tests that compare calls with each other.
type Operands struct {
	Q, K, V backend.Tensor
	Options kernels.Options
	memory  [3]flat // of Q, K and V
}

// Put uploads the operands of c in its layout, with NaN in the gaps.
func (c Case) Put(tb testing.TB, dev *kernels.Device) Operands {
	o := c.build().on(tb, dev)
	return Operands{o.q.view, o.k.view, o.v.view, o.opt, [3]flat{o.q, o.k, o.v}}
}

// Unchanged returns an error if the F32 operands in host memory, or the gaps between their
// elements, have changed since Put.
func (o Operands) Unchanged() error {
	for i, m := range o.memory {
		if !m.all.OnHost() || m.all.DType() != backend.F32 {
			continue
		}
		now, err := m.all.Float32s()
		if err != nil {
			continue // released
		}
		for n, x := range now {
			if !sameNumber(x, m.before[n]) {
				return fmt.Errorf("element %d of the memory of %c was %v and is now %v", n, "qkv"[i], m.before[n], x)
			}
		}
	}
	return nil
}
