package peak

import (
	"context"
	"testing"
	"unsafe"

	"github.com/seed90331342/attn/cpu/internal/vec"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// TestSplitStaysInside shows that each byte read lies in a span, that no two calls read
// the same byte, and that goroutines have equal parts.
func TestSplitStaysInside(t *testing.T) {
	for _, threads := range []int{1, 2, 3, 7} {
		for _, length := range []int{0, 1, 63, 1023, 4096, 100_000, 1 << 20} {
			for _, off := range []int{0, 1, 60} {
				spans := [][]byte{make([]byte, length+off)[off:], nil, make([]byte, length)}
				first := uintptr(unsafe.Pointer(unsafe.SliceData(spans[0])))
				seen := map[uintptr]bool{}
				total, each := 0, -1
				for _, part := range split(spans, threads) {
					bytes := 0
					for _, r := range part {
						if r.bytes() > callBytes {
							t.Fatalf("a call of %d bytes", r.bytes())
						}
						bytes += r.bytes()
						for s := range streams {
							lo := uintptr(unsafe.Pointer(&r.from[0])) + uintptr(s*r.apart)
							for at := lo; at < lo+uintptr(r.turns*turnBytes); at += turnBytes {
								if seen[at] {
									t.Fatalf("%d threads, %d bytes: read twice", threads, length)
								}
								seen[at] = true
								inside := false
								for _, s := range spans {
									begin := uintptr(unsafe.Pointer(unsafe.SliceData(s)))
									inside = inside || begin <= at && at+turnBytes <= begin+uintptr(len(s))
								}
								if !inside {
									t.Fatalf("%d threads, %d bytes at %#x: read at %#x", threads, length, first, at)
								}
							}
						}
					}
					if each < 0 {
						each = bytes
					}
					if bytes != each {
						t.Errorf("%d threads, %d bytes: parts of %d and %d bytes", threads, length, each, bytes)
					}
					total += bytes
				}
				if lost := 2*length - total; lost > 2*(threads*streams*turnBytes+lineBytes) {
					t.Errorf("%d threads: %d of %d bytes are never read", threads, lost, 2*length)
				}
			}
		}
	}
}

// TestReadLoops shows that the loops of each tier count the bytes that they read.
func TestReadLoops(t *testing.T) {
	data := make([]byte, 4<<20)
	for _, k := range vec.Tiers() {
		do := reads(k, split([][]byte{data}, 1)[0])
		if got := do(); got != 2*callBytes {
			t.Errorf("%s counts %g bytes, want %d", k.Tier, got, 2*callBytes)
		}
		if rate, err := best(t.Context(), 1, []work{do}); err != nil || !(rate > 0) {
			t.Errorf("%s reads %g bytes a second, %v", k.Tier, rate, err)
		}
	}
}

func TestBandwidth(t *testing.T) {
	for _, bytes := range []int{256 << 10, 32 << 20} {
		data := make([]byte, bytes)
		for i := range data {
			data[i] = 1 // otherwise all pages are the same zero page
		}
		for threads := 1; threads <= 3; threads++ {
			rate, err := Bandwidth(t.Context(), vec.Tiers()[0], [][]byte{data[:bytes/2], data[bytes/2:]}, threads)
			if err != nil || !(rate > 0) {
				t.Errorf("%d bytes, %d threads: %g, %v", bytes, threads, rate, err)
			}
			t.Logf("%d KiB, %d threads: %.1f GB/s", bytes>>10, threads, rate/1e9)
		}
	}
	if rate, err := Bandwidth(t.Context(), vec.Tiers()[0], [][]byte{make([]byte, 100)}, 2); rate != 0 || err != nil {
		t.Errorf("100 bytes: %g, %v, too few for a measurement", rate, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	must.Fail(t, "cancelled", must.Err(Bandwidth(ctx, vec.Tiers()[0], nil, 1)), context.Canceled)
}
