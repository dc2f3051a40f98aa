package queue

import (
	"math/rand/v2"
	"testing"
	"time"
)

// Parameters of submissions that run never overlap, and there is room for any once all have ended.
func TestRing(t *testing.T) {
	for seed := range uint64(50) {
		rng := rand.New(rand.NewPCG(seed, 2))
		size := uint64(1+rng.IntN(64)) * ringStep
		s := sent{ring: ring{size: size, align: 16 << rng.IntN(6)}}
		for range 2000 {
			if len(s.list) > 0 && rng.IntN(3) == 0 {
				s.list = s.list[1+rng.IntN(len(s.list)):]
			}
			bytes := 1 + rng.Uint64N(size)
			if rng.IntN(4) > 0 {
				bytes = 1 + bytes/16
			}
			at, ok := s.ring.find(bytes, s.list)
			if !ok {
				if len(s.list) == 0 {
					t.Fatalf("seed %d: no room for %d bytes in an empty ring of %d", seed, bytes, size)
				}
				s.list = s.list[1:]
				continue
			}
			if at+bytes > size || at%uint64(s.ring.align) != 0 {
				t.Fatalf("seed %d: %d bytes at %d of %d, aligned to %d", seed, bytes, at, size, s.ring.align)
			}
			for _, f := range s.list {
				if at < f.hi && f.lo < at+bytes {
					t.Fatalf("seed %d: %d to %d overlaps %d to %d", seed, at, at+bytes, f.lo, f.hi)
				}
			}
			s.noteStart(&submission{lo: at, hi: at + bytes, call: new(inFlight), began: time.Now()})
		}
	}
}
