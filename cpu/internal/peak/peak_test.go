package peak

import (
	"bytes"
	"context"
	"errors"
	"testing"

	"github.com/seed90331342/attn/cpu/internal/vec"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// TestLoops shows that the loops of each tier count the operations that they do and the bytes that they read, and that
// rates are positive on any number of threads.
func TestLoops(t *testing.T) {
	turns := map[string]int{"avx512": 16 * 16 * 2, "avx2": 12 * 8 * 2, "neon": 16 * 4 * 2, "gonum": 8 * 2}
	data := bytes.Repeat([]byte{1}, 4<<20) // pages of zeros are one page
	for _, k := range vec.Tiers() {
		if got, want := operations(k)(), float64(8*fmaTurns*turns[k.Tier]); got != want {
			t.Errorf("%s counts %g operations, want %g", k.Tier, got, want)
		}
		if got := reads(k, split([][]byte{data}, 1)[0])(); got != 2*callBytes {
			t.Errorf("%s counts %g bytes, want %d", k.Tier, got, 2*callBytes)
		}
		for threads := 1; threads <= 3; threads += 2 {
			flops, err := FLOPS(t.Context(), k, threads)
			rate, err2 := Bandwidth(t.Context(), k, [][]byte{data[:1<<20], data[1<<20:]}, threads)
			if err = errors.Join(err, err2); err != nil || !(flops > 0 && rate > 0) {
				t.Errorf("%s, %d threads: %g FLOPS, %g bytes a second, %v", k.Tier, threads, flops, rate, err)
			}
		}
	}
	if rate, err := Bandwidth(t.Context(), vec.Tiers()[0], [][]byte{data[:100]}, 2); rate != 0 || err != nil {
		t.Errorf("100 bytes: %g, %v, too few for a measurement", rate, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	must.Fail(t, "cancelled", must.Err(FLOPS(ctx, vec.Tiers()[0], 1)), context.Canceled)
}

// TestSplit shows that each byte read lies in a span, that no two calls read the same byte, and that goroutines have
// equal parts.
func TestSplit(t *testing.T) {
	for _, threads := range []int{1, 2, 3, 7} {
		for _, length := range []int{0, 1, 63, 1023, 4096, 100_000, 1 << 20} {
			for _, off := range []int{0, 1, 60} {
				seen, parts := map[*byte]bool{}, split([][]byte{make([]byte, length+off)[off:], nil, make([]byte, length)}, threads)
				each := 0
				for n, part := range parts {
					bytes := 0
					for _, r := range part {
						if r.bytes() > callBytes {
							t.Fatalf("a call of %d bytes", r.bytes())
						}
						bytes += r.bytes()
						for at := range streams * r.turns {
							line := r.from[at/r.turns*r.apart+at%r.turns*turnBytes:] // of a span
							if seen[&line[0]] || len(line) < turnBytes {
								t.Fatalf("%d threads, %d bytes: read twice, or outside", threads, length)
							}
							seen[&line[0]] = true
						}
					}
					if n == 0 {
						each = bytes
					}
					if bytes != each {
						t.Errorf("%d threads, %d bytes: parts of %d and %d bytes", threads, length, each, bytes)
					}
				}
				if lost := 2*length - threads*each; lost > 2*(threads*streams*turnBytes+lineBytes) {
					t.Errorf("%d threads: %d of %d bytes are never read", threads, lost, 2*length)
				}
			}
		}
	}
}
