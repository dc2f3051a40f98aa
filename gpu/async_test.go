package gpu

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/port"
	"github.com/seed90331342/attn/gpu/internal/resource"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
	"github.com/seed90331342/attn/kernels/kvcache"
	"github.com/seed90331342/attn/kernels/nn"
)

// waiting waits for each call of caches and layers before the next one.
type waiting struct{ *Backend }

func (w waiting) after(ctx context.Context, err error) error {
	if err != nil {
		return err
	}
	return w.Wait(ctx)
}

func (w waiting) Attention(ctx context.Context, calls ...*backend.Call) error {
	return w.after(ctx, w.Backend.Attention(ctx, calls...))
}

func (w waiting) Project(ctx context.Context, y, x, m, bias backend.Tensor) error {
	return w.after(ctx, w.Backend.Project(ctx, y, x, m, bias))
}

func (w waiting) Rotate(ctx context.Context, y, x, cos, sin backend.Tensor, how backend.Rotation) error {
	return w.after(ctx, w.Backend.Rotate(ctx, y, x, cos, sin, how))
}

func (w waiting) Copy(ctx context.Context, dst, src []backend.Tensor) error {
	return w.after(ctx, w.Backend.Copy(ctx, dst, src))
}

// TestCallsDoNotWait times calls, reads and waits on a device whose submissions take a second.
func TestCallsDoNotWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, _ := simulate(t, Options{}, func() time.Duration { return time.Second })
		defer b.Close()
		c := plain(t, b, 8, 8, 8)
		listed := *plain(t, b, 1, 8, 8)
		listed.Lists = must.Get(b.Alloc(t.Context(), backend.I32, backend.Shape{1, 1, 1, 4}))(t)
		lists := func() error { return b.Attention(t.Context(), &listed) }
		out := host(t, backend.Shape{1, 1, 8, 8}, wave)
		attend := func() error { return b.Attention(t.Context(), c) }
		wait := func() error { return b.Wait(t.Context()) }
		for _, x := range []struct {
			name string
			run  func() error
			took time.Duration
		}{
			{"the first call, whose speed is not known", attend, time.Second},
			{"a call", attend, 0},
			{"another, behind it", attend, 0},
			{"an upload", func() error {
				u, err := b.Upload(t.Context(), out)
				u.Release()
				return err
			}, 0},
			{"a download", func() error { return b.Download(t.Context(), out, c.O) }, time.Second},
			{"a wait for nothing", wait, 0},
			{"a call", attend, 0},
			{"a wait", wait, time.Second},
			{"the first call with lists in device memory", lists, time.Second},
			{"another with lists", lists, 0},
			{"a wait for it", wait, time.Second},
			{"a traced call", func() error {
				return b.Attention(backend.WithTrace(t.Context(), &backend.Trace{Progress: func(_, _ float64) {}}), c)
			}, time.Second},
		} {
			began := time.Now()
			must.Pass(t, x.name, x.run())
			if took := time.Since(began); took != x.took { // waits look each millisecond
				t.Errorf("%s took %v, want %v", x.name, took, x.took)
			}
		}
	})
}

// TestErrorsInFlight makes a submission of a call that has returned fail. The error names
// the call, and the first call that waits or uses the result returns it, but no other.
func TestErrorsInFlight(t *testing.T) {
	b, dev := faulty(t, Options{})
	ctx := t.Context()
	c, other := plain(t, b, 8, 8, 8), plain(t, b, 8, 8, 8)
	s := alloc(t, b, backend.F32, backend.Shape{1, 1, 8, 8})
	out := host(t, backend.Shape{1, 1, 8, 8}, wave)
	row := func(x backend.Tensor) backend.Tensor {
		return must.Get(x.Slice(backend.Seq, 0, 1))(t)
	}
	calls := map[string]func() error{
		"attention": func() error { return b.Attention(ctx, c) },
		"other":     func() error { return b.Attention(ctx, other) },
		"pv":        func() error { return b.PV(ctx, s, c.O, c.O) }, // reads what attention writes
		"o":         func() error { return b.Download(ctx, out, c.O) },
		"s":         func() error { return b.Download(ctx, out, s) },
		"other-o":   func() error { return b.Download(ctx, out, other.O) },
		"merge":     func() error { return b.Merge(ctx, c.O, c.LSE, other.O, other.LSE) }, // in place
		"row":       func() error { return b.Copy(ctx, []backend.Tensor{row(c.O)}, []backend.Tensor{row(other.O)}) },
		"wait":      func() error { return b.Wait(ctx) },
	}
	for _, name := range []string{"attention", "other", "pv", "merge", "row", "wait"} { // later calls return at once
		check(t, calls[name]())
	}
	// Calls with ! return the failure of the first call.
	for _, sequence := range []string{
		"attention wait! wait pv! attention pv s",
		"attention o! wait o! attention o wait",
		"attention pv s! wait attention pv s",
		"attention pv wait! pv! attention pv s",
		"attention other-o wait! attention o",
		"attention other-o pv! wait attention pv s",
		"attention other wait! other-o o! attention o",
		"attention other-o attention! attention o wait",
		"attention wait! merge! attention merge o",
		"attention merge o! attention o",
		"attention wait! row o! attention row o",
		"attention row wait! o! attention o",
	} {
		dev.of = "Wait"
		dev.Fail(0, port.ErrInvalid)
		for i, name := range strings.Fields(sequence) {
			name, fails := strings.CutSuffix(name, "!")
			err := calls[name]()
			if fails != (err != nil) {
				t.Errorf("%s: step %d, %s, returns %v", sequence, i, name, err)
			}
			if fails && (!errors.Is(err, port.ErrInvalid) || !errors.Is(err, backend.ErrUnsupported) || !strings.Contains(err.Error(), ": attention: ")) {
				t.Errorf("%s: step %d, %s, does not name the call: %v", sequence, i, name, err)
			}
		}
		dev.Fail(-1, nil)
		must.Pass(t, fmt.Sprintf("%s: an error is left", sequence), b.Wait(ctx))
	}
}

// TestLostInFlight loses the device after calls have returned: the next call of any kind
// names the call that was running.
func TestLostInFlight(t *testing.T) {
	for name, run := range map[string]func(b *Backend, c *backend.Call) error{
		"attention": func(b *Backend, c *backend.Call) error { return b.Attention(t.Context(), c) },
		"download": func(b *Backend, c *backend.Call) error {
			return b.Download(t.Context(), host(t, backend.Shape{1, 1, 8, 8}, wave), c.O)
		},
		"alloc": func(b *Backend, c *backend.Call) error {
			_, err := b.Alloc(t.Context(), backend.F32, backend.Shape{1, 1, 8, 8})
			return err
		},
		"wait": func(b *Backend, c *backend.Call) error { return b.Wait(t.Context()) },
	} {
		b, dev := faulty(t, Options{})
		c := plain(t, b, 8, 8, 8)
		s := alloc(t, b, backend.F32, backend.Shape{1, 1, 8, 8})
		for range 2 {
			check(t, b.QK(t.Context(), s, c.Q, c.K))
		}
		dev.Lose(0)
		_, _ = dev.CreateBuffer(16, resource.StorageUsage) // sees it
		for i, named := range []bool{true, false} {
			err := run(b, c)
			if !errors.Is(err, backend.ErrDeviceLost) || strings.Contains(err.Error(), name+": qk: ") != named {
				t.Errorf("%s, %d: %v", name, i, err)
			}
		}
	}
}

// A thousand calls on a device that is slow, or ends nothing, hold a bounded number of submissions and bytes.
func TestManyCallsInFlight(t *testing.T) {
	const calls, most = 1000, 512
	for _, hangs := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			warm := true
			b, d := simulate(t, Options{}, func() time.Duration {
				if hangs && !warm {
					return -1
				}
				return time.Millisecond
			})
			dev := kernels.NewDevice(b)
			x := input(t, b, backend.Shape{1, 1, 64, 64})
			run := func(ctx context.Context) error {
				r, err := dev.Attention(ctx, x, x, x, kernels.Options{})
				r.Release()
				return err
			}
			for range 2 {
				check(t, run(t.Context()))
			}
			check(t, b.Wait(t.Context()))
			warm = false
			before, began := d.Live(), time.Now()
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			made, highest := 0, 0
			var err error
			for made < calls && err == nil {
				if err = run(ctx); err == nil {
					made++
				}
				highest = max(highest, d.running())
				if l := d.Live(); l.Buffers > before.Buffers+2 || l.Bytes > before.Bytes+1<<20 {
					t.Fatalf("after %d calls: %+v, before %+v", made, l, before)
				}
			}
			if hangs {
				if made != most || highest != most || !errors.Is(err, context.DeadlineExceeded) || time.Since(began) > time.Minute+time.Second {
					t.Errorf("%d calls and %d submissions in %v, then %v", made, highest, time.Since(began), err)
				}
				must.Fail(t, "close", b.Close(), backend.ErrDeviceLost)
				return
			}
			if err != nil || highest > most {
				t.Errorf("%d calls, up to %d submissions: %v", made, highest, err)
			}
			check(t, b.Wait(t.Context()))
			if err := b.Close(); err != nil {
				t.Error(err)
			}
		})
	}
}

// Outputs that are larger than the pool are released while submissions use them: what a
// device holds of them is bounded.
func TestReleasedInFlight(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, d := simulate(t, Options{PoolBytes: -1}, func() time.Duration { return 10 * time.Millisecond })
		defer b.Close()
		src := input(t, b, backend.Shape{1, 1, 1, 64})
		shape := backend.Shape{1, 1, 1 << 16, 64} // 16 MiB
		src = must.Get(src.Broadcast(shape))(t)
		retired := int64(0)
		for range 50 {
			dst := alloc(t, b, backend.F32, shape)
			if d.running() == 0 {
				retired = 0
			}
			check(t, b.Copy(t.Context(), []backend.Tensor{dst}, []backend.Tensor{src}))
			dst.Release()
			if retired += dst.Bytes(); retired > 64<<20+dst.Bytes() {
				t.Fatalf("%d bytes are released and in use", retired)
			}
		}
	})
}

// TestChainOfLayers decodes with 32 layers: the host waits once, for the result, and the
// bits are those of a chain that waits after each call.
func TestChainOfLayers(t *testing.T) {
	const layers, width, heads, steps = 32, 32, 2, 3
	b, dev := faulty(t, Options{})
	chain := func(be backend.Backend) (bits []float32, waits int) {
		device := kernels.NewDevice(be)
		config := nn.MultiHeadConfig{Model: width, Heads: heads, RoPE: &nn.RoPE{}}
		var list []*nn.MultiHeadAttention
		var caches []*kvcache.Cache
		for i := range layers {
			w := must.Get(config.Initialise(nn.Initialiser{Seed: uint64(i)}))(t)
			l := must.Get(nn.NewMultiHeadAttention(t.Context(), device, config, w))(t)
			defer l.Release()
			cache := must.Get(kvcache.New(t.Context(), device, kvcache.Config{Batch: 1, KVHeads: heads, Dim: width / heads, ValueDim: width / heads, Capacity: 64}))(t)
			defer cache.Release()
			list, caches = append(list, l), append(caches, cache)
		}
		for range steps { // the first one compiles
			waits = 0
			dev.Watch(func(call string) {
				if call == "Wait" {
					waits++
				}
			})
			x := must.Get(device.FromFloat32(t.Context(), backend.F32, slices.Repeat([]float32{0.5, -0.25}, width/2), backend.Shape{1, 1, 1, width}))(t)
			for i, l := range list {
				r := must.Get(l.Apply(t.Context(), x, nn.MultiHeadOptions{Cache: caches[i]}))(t)
				x.Release()
				x = r.O
			}
			bits = must.Get(device.ToFloat32(t.Context(), x))(t)
			x.Release()
			dev.Watch(nil)
		}
		return bits, waits
	}
	got, waits := chain(b)
	if waits > 2 {
		t.Errorf("%d waits", waits)
	}
	want, each := chain(waiting{b})
	if each < layers {
		t.Errorf("%d waits of a chain that waits after each call", each)
	}
	if !slices.Equal(got, want) {
		t.Error("another result than that of calls that are waited for")
	}
}
