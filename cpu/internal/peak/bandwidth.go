package peak

import (
	"context"
	"unsafe"
)

const (
	// turnBytes is the number of bytes that one turn of a read loop loads from each
	// stream, and streams the number of streams, see Loops.
	turnBytes = 256
	streams   = 4
	// callBytes is the most that one call reads: 16 microseconds at 4 GB/s, which every core with vectors exceeds.
	callBytes = 64 << 10
	// lineBytes is the size of a cache line. Loads that straddle two take twice as long.
	lineBytes = 64
)

// read is one call of a read loop: turns of each stream. The first stream begins at from[0],
// the others follow apart bytes from each other.
type read struct {
	from         []byte
	apart, turns int
}

// bytes returns the number of bytes that r reads.
func (r read) bytes() int { return streams * turnBytes * r.turns }

// Bandwidth returns the bytes a second that threads goroutines read from spans, with the loads of k. Each goroutine
// reads its own part over and over: spans that fit a cache are read from there, as by a call that is repeated. It takes
// 24 milliseconds. The rate is 0 for spans shorter than 1 KiB (one turn) a goroutine. The error is that of the context.
func Bandwidth(ctx context.Context, k Loops, spans [][]byte, threads int) (float64, error) {
	var works []work
	for _, part := range split(spans, threads) {
		works = append(works, reads(k, part))
	}
	return best(ctx, readWindows, works)
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
				parts[i] = append(parts[i], read{mine[at*turnBytes:], apart, n})
				at += n
			}
		}
	}
	return parts
}

// reads returns the work that Bandwidth measures: it reads some of part, which it begins again
// at its end, and returns the bytes.
func reads(k Loops, part []read) work {
	next := 0
	return func() (bytes float64) {
		// Two calls take so long that reading the clock between them costs nothing.
		for len(part) > 0 && bytes < 2*callBytes {
			r := part[next]
			k.Read(r.from, r.apart, r.turns)
			bytes += float64(r.bytes())
			next = (next + 1) % len(part)
		}
		return bytes
	}
}
