package gpu

import (
	"context"
	"errors"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/cut"
	"github.com/seed90331342/attn/kernels/kernelstest"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// openFull opens a backend whose device memory is full of tensors: further tensors stay in
// host memory, and calls stream them through what is left.
func openFull(t testing.TB, opt Options) *Backend {
	t.Helper()
	b := open(t, opt)
	fill(b)
	return b
}

// fill makes a backend count as much memory as tensors may use.
func fill(b *Backend) {
	for n := b.dev.Memory().Bound; n > 0; n /= 2 {
		for b.dev.Reserve(n) == nil {
		}
	}
}

// TestConformanceStreamed runs the suite with every tensor in host memory.
func TestConformanceStreamed(t *testing.T) {
	if testing.Short() {
		t.Skip("the suite runs resident and cut")
	}
	kernelstest.Run(t, kernelstest.Harness{
		Open:   func(t testing.TB) backend.Backend { return openFull(t, Options{MemoryBytes: 3 << 20}) },
		Extent: kernelstest.Extent{PairsEvery: 12, PairsFrom: 6, Draws: 5, LargeHeads: backend.ErrMemory},
	})
}

// streamedCall returns a causal call with log-sum-exp, 3 query heads on one key head, whose
// tensors are where Alloc and Upload place them.
func streamedCall(t testing.TB, b *Backend, sq, sk, d int) *backend.Call {
	t.Helper()
	side := func(from int) backend.Tensor {
		return upload(t, b, host(t, backend.Shape{1, 1, sk, d}, func(i int) float32 { return wave(i + from) }))
	}
	c := callOf(t, b, input(t, b, backend.Shape{1, 3, sq, d}), side(1), side(2))
	c.Visible = backend.Visibility{Left: backend.Unbounded, Offset: sk - sq}
	return c
}

// result runs a call and returns its outputs as bits.
func result(t testing.TB, ctx context.Context, b *Backend, c *backend.Call) []uint32 {
	t.Helper()
	check(t, b.Attention(ctx, c))
	return outputs(t, b, c)
}

func outputs(t testing.TB, b *Backend, c *backend.Call) []uint32 {
	var bits []uint32
	for _, x := range []backend.Tensor{c.O, c.LSE} {
		for _, f := range floats(t, b, x) {
			bits = append(bits, math.Float32bits(f))
		}
	}
	return bits
}

// TestStreamedIsResident compares, bit for bit, calls that stream windows of many sizes with
// one that does not stream, and the bytes that move with the plan's.
func TestStreamedIsResident(t *testing.T) {
	const sq, sk, d = 200, 700, 24
	b := open(t, Options{})
	want := result(t, t.Context(), b, streamedCall(t, b, sq, sk, d))
	for _, memory := range []int64{160 << 10, 1 << 20} {
		for _, full := range []bool{true, false} {
			// No clock decides where work is cut.
			b := open(t, Options{MemoryBytes: memory, Budget: time.Hour, MaxWork: 1e8})
			if full {
				fill(b)
			}
			c := streamedCall(t, b, sq, sk, d)
			var moved int64
			ctx := backend.WithTrace(t.Context(), &backend.Trace{Move: func(n int64, _ time.Duration) { moved += n }})
			if !slices.Equal(result(t, ctx, b, c), want) {
				t.Errorf("%d bytes, full %t: other bits than the resident call's", memory, full)
			}
			p := must.Get(b.Plan(t.Context(), c))(t)
			if p.Streamed != moved || strings.HasPrefix(p.Path, "streamed") != (moved > 0) {
				t.Errorf("%d bytes, full %t: %q plans to move %d bytes, %d moved", memory, full, p.Path, p.Streamed, moved)
			}
			b.Close()
		}
	}
}

// TestStreamedStaysInMemory checks the device memory in use whenever a buffer is created.
func TestStreamedStaysInMemory(t *testing.T) {
	const memory = 1 << 20
	b, dev := faulty(t, Options{MemoryBytes: memory})
	fixed, most := dev.Live().Bytes, uint64(0)
	dev.Watch(func(string) { most = max(most, dev.Live().Bytes) })
	c := streamedCall(t, b, 512, 6000, 64) // 1.5 MiB of keys, as much of values
	check(t, b.Attention(t.Context(), c))
	outputs(t, b, c)
	t.Logf("%d bytes at most in addition to %d", most-fixed, fixed)
	if most-fixed > memory {
		t.Errorf("%d bytes on the device, Options allow %d", most-fixed, memory)
	}
}

// TestPlanOfAMillion plans calls that are too long to run here.
func TestPlanOfAMillion(t *testing.T) {
	const million, d = 1 << 20, 64
	x, lse := metaOf(t, backend.F32, backend.Shape{1, 1, million, d}), metaOf(t, backend.F32, backend.Shape{1, 1, million, 1})
	c := &backend.Call{Q: x, K: x, V: x, O: x, LSE: lse, Problem: backend.Problem{Scale: 1, Visible: backend.Everything()}}
	for _, l := range []struct {
		name     string
		opt      Options
		streamed bool
	}{
		{"resident", Options{Budget: time.Minute}, false},
		{"a tensor is two buffers", Options{Budget: time.Minute, Limits: gputypes.Limits{MaxBufferSize: 128 << 20}}, false},
		{"256 MiB for 1 GiB of operands", Options{Budget: time.Minute, MemoryBytes: 256 << 20}, true},
	} {
		b := open(t, l.opt)
		p, err := b.Plan(t.Context(), c)
		b.Close()
		if err != nil {
			t.Errorf("%s: %v", l.name, err)
			continue
		}
		t.Logf("%s: %s, %d chunks, %d MiB streamed, %d MiB scratch: %s; %s", l.name, p.Path, p.Chunks, p.Streamed>>20, p.Scratch>>20, p.Cut, p.Why)
		if p.Scratch > 256<<20 || p.Chunks < 2 || (p.Streamed > 0) != l.streamed {
			t.Errorf("%s: %d bytes of scratch, %d chunks, %d bytes streamed", l.name, p.Scratch, p.Chunks, p.Streamed)
		}
		// Operands in host memory move at least once, and not often.
		if l.streamed && (p.Streamed < p.Bytes*4/5 || p.Streamed > 20*p.Bytes) {
			t.Errorf("%s: %d bytes move, the operands have %d", l.name, p.Streamed, p.Bytes)
		}
	}
}

// TestResume loses the device at each submission of a call in turn and continues on another
// device from what the call finished.
func TestResume(t *testing.T) {
	const sq, sk, d = 64, 1500, 16
	for _, c := range []struct {
		name   string
		memory int64
		full   bool // then the outputs are in host memory too
	}{{"outputs on the device", 150 << 10, false}, {"outputs in host memory", 500 << 10, true}} {
		t.Run(c.name, func(t *testing.T) {
			// No clock decides where work is cut.
			opt := Options{MemoryBytes: c.memory, Budget: time.Hour, MaxWork: 1e6}
			b, dev := faulty(t, opt)
			other, _ := faulty(t, opt)
			if c.full {
				fill(b)
				fill(other)
			}
			first, second := streamedCall(t, b, sq, sk, d), streamedCall(t, other, sq, sk, d)
			if inHost := cut.StoreOf(first.O).Host != nil; inHost != c.full {
				t.Fatalf("outputs in host memory: %t", inHost)
			}
			result(t, t.Context(), b, first) // compiles
			var calls []string
			dev.Watch(func(call string) { calls = append(calls, call) })
			want := result(t, t.Context(), b, first)
			dev.Watch(nil)
			lost, rows, work := 0, 0, 0
			for n, call := range calls {
				if call != "Submit" {
					continue
				}
				if lost++; testing.Short() && lost%5 != 0 {
					continue
				}
				dev.Lose(n)
				err := b.Attention(t.Context(), first)
				failed := dev.Failed()
				dev.Fail(-1, nil)
				if failed == "" {
					break // of the download
				}
				var left *backend.Interrupted
				if !errors.Is(err, backend.ErrDeviceLost) || !errors.As(err, &left) {
					t.Fatalf("lost at call %d: %v", n, err)
				}
				second.Resume = left.Partial
				// Rows that are not computed again must come from the interrupted call.
				wipe(t, other, second.O)
				wipe(t, other, second.LSE)
				if !slices.Equal(result(t, t.Context(), other, second), want) {
					t.Fatalf("lost at call %d: the resumed result has other bits", n)
				}
				rows += len(left.Partial.Done)
				if left.Partial.Work != nil {
					work++
				}
			}
			t.Logf("%d submissions; %d blocks of rows were taken over in all, and %d times keys of one", lost, rows, work)
			if rows == 0 || work == 0 {
				t.Error("nothing was taken over")
			}
		})
	}
}

// wipe fills a tensor with a number that no result contains.
func wipe(t testing.TB, b *Backend, x backend.Tensor) {
	t.Helper()
	s := cut.StoreOf(x)
	junk := slices.Repeat([]byte{0x12, 0x34, 0x56, 0x78}, x.Shape().Elements())
	if s.Host != nil {
		copy(s.Host, junk)
	} else if err := b.dev.Write(t.Context(), s, 0, junk); err != nil {
		t.Fatal(err)
	}
}
