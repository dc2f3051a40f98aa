package gpu

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// TestBlockingSubmit makes calls on a driver whose Submit blocks while a submission runs, as that
// of Mesa's software driver, and whose submissions take seconds. Each call returns at its deadline.
func TestBlockingSubmit(t *testing.T) {
	for _, measured := range []bool{false, true} { // whether the speed of the kernel is known
		t.Run(fmt.Sprintf("measured %v", measured), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				took := time.Duration(0)
				b, d := simulateOn(t, backend.CPU, Options{}, func() time.Duration { return took })
				defer b.Close()
				c := plain(t, b, 4096, 4096, 64)
				h := host(t, c.Q.Shape(), wave)
				if measured {
					check(t, b.Attention(t.Context(), c))
				}
				d.mu.Lock()
				took, d.blocks = 3*time.Second, true
				d.mu.Unlock()
				attention := func(ctx context.Context) error { return b.Attention(ctx, c) }
				for i, call := range []func(context.Context) error{
					attention, attention,
					func(ctx context.Context) error { _, err := b.Upload(ctx, h); return err },
					func(ctx context.Context) error { return b.Download(ctx, h, c.O) },
					b.Wait,
				} {
					if took, err := timed(t, 30*time.Millisecond, call); !errors.Is(err, context.DeadlineExceeded) || took > 31*time.Millisecond {
						t.Errorf("call %d returned after %v: %v", i, took, err)
					}
				}
			})
		})
	}
}

// due is a context with a deadline that does not end at it.
type due struct {
	context.Context
	at time.Time
}

func (c due) Deadline() (time.Time, bool) { return c.at, true }

// Submissions of a call are shorter near its deadline, with the same bits, and as long as ever
// where the deadline is far away.
func TestDeadlineShortensSubmissions(t *testing.T) {
	b, dev := faulty(t, Options{Budget: time.Minute})
	c := plain(t, b, 100, 1000, 64)
	w := alloc(t, b, backend.F32, backend.Shape{1, 1, 100, 1000})
	g := backwardOf(t, b, c)
	for _, x := range []struct {
		name string
		call func(ctx context.Context) error
		out  []backend.Tensor
	}{
		{"attention", func(ctx context.Context) error { return b.Attention(ctx, c) }, []backend.Tensor{c.O, c.LSE}},
		{"qk", func(ctx context.Context) error { return b.QK(ctx, w, c.Q, c.K) }, []backend.Tensor{w}},
		{"pv", func(ctx context.Context) error { return b.PV(ctx, c.O, w, c.V) }, []backend.Tensor{c.O}},
		{"backward", func(ctx context.Context) error { return b.Backward(ctx, g) }, []backend.Tensor{g.DQ, g.DK, g.DV}},
	} {
		run := func(ctx context.Context) (n int, out [][]float32) {
			n = submissions(dev, func() {
				must.Do(must.In(t, "%s", x.name), x.call(ctx))
			})
			for _, o := range x.out {
				out = append(out, floats(t, b, o))
			}
			return n, out
		}
		run(t.Context()) // a GPU also measures variants in the first call
		whole, want := run(t.Context())
		if n, _ := run(due{t.Context(), time.Now().Add(24 * time.Hour)}); n != whole {
			t.Errorf("%s: %d submissions with a deadline in a day, %d without", x.name, n, whole)
		}
		n, got := run(due{t.Context(), time.Now()})
		if n < 2*whole && b.info.Type == backend.CPU { // else one may take less than a millisecond
			t.Errorf("%s: %d submissions at the deadline, %d without", x.name, n, whole)
		}
		for i := range want {
			if !slices.Equal(got[i], want[i]) {
				t.Errorf("%s: other bits at the deadline", x.name)
			}
		}
	}
}
