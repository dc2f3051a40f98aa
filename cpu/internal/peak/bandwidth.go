package peak

import (
	"context"
	"unsafe"
)

const (
	// turnBytes is the number of bytes that one turn of a read loop loads from each
	// stream, and streams the number of streams, both as in _generate.
	turnBytes = 256
	streams   = 4
	// callBytes is the most that one call reads: 16 microseconds at 4 GB/s, which every
	// core with vectors exceeds.
	callBytes = 64 << 10
	// lineBytes is the size of a cache line. Loads that straddle two take twice as long.
	lineBytes = 64
)

// read is one call of a read loop: turns of each stream. The first stream begins at p,
// the others follow apart bytes from each other.
type read struct {
	p            *byte
	apart, turns int
}

// bytes returns the number of bytes that r reads.
func (r read) bytes() int { return streams * turnBytes * r.turns }

// Bandwidth returns the bytes a second that threads goroutines read from spans, with the
// loads of tier ("" for the widest). Each goroutine reads its own part over and over, so
// spans that fit a cache are read from there, as by a call that is repeated. It takes 24
// milliseconds. The rate is 0 for spans shorter than 1 KiB (one turn) a goroutine. Errors
// as for FLOPS.
func Bandwidth(ctx context.Context, tier string, spans [][]byte, threads int) (float64, error) {
	k, err := find(tier)
	if err != nil {
		return 0, err
	}
	return best(ctx, readWindows, threads, k.readWork(split(spans, threads)))
}

// split divides every span into equal parts, one for each of threads goroutines, and
// cuts the parts into calls. It omits the rest of a span, less than a turn a goroutine.
func split(spans [][]byte, threads int) [][]read {
	parts := make([][]read, threads)
	for _, s := range spans {
		if len(s) == 0 {
			continue
		}
		if off := int(uintptr(unsafe.Pointer(unsafe.SliceData(s))) % lineBytes); off > 0 {
			s = s[min(lineBytes-off, len(s)):]
		}
		turns := len(s) / (threads * streams * turnBytes) // of each stream of a goroutine
		apart := turns * turnBytes
		for i := range parts {
			mine := s[i*streams*apart:]
			for at := 0; at < turns; {
				n := min(turns-at, callBytes/(streams*turnBytes))
				parts[i] = append(parts[i], read{&mine[at*turnBytes], apart, n})
				at += n
			}
		}
	}
	return parts
}

// readWork returns the work that Bandwidth measures, in bytes.
func (k kernel) readWork(parts [][]read) func(thread int) float64 {
	// position is the index of a goroutine's next call, on a cache line of its own.
	type position struct {
		call int
		_    [lineBytes - unsafe.Sizeof(int(0))]byte
	}
	next := make([]position, len(parts))
	return func(thread int) float64 {
		part, at, bytes := parts[thread], &next[thread].call, 0
		// Two calls take so long that reading the clock between them costs nothing.
		for len(part) > 0 && bytes < 2*callBytes {
			r := part[*at]
			k.read(r.p, r.apart, r.turns)
			bytes += r.bytes()
			if *at++; *at == len(part) {
				*at = 0
			}
		}
		return float64(bytes)
	}
}
