package peak

import (
	"context"
	"unsafe"
)

const (
	// turnBytes is what one turn of a read loop takes of each of its streams, as
	// in _generate; streams is how many there are.
	turnBytes = 256
	streams   = 4
	// callBytes is what one call takes in all: 16 microseconds at 4 GB/s, and a
	// core that has vectors reads faster.
	callBytes = 64 << 10
	// lineBytes is a cache line: loads that straddle two take twice as long.
	lineBytes = 64
	// readWindows is how many measurements of reading are taken.
	readWindows = 3
)

// read is one call of a read loop: turns of each stream, apart bytes from each
// other, the first at p.
type read struct {
	p            *byte
	apart, turns int
}

// bytes returns how many bytes r reads.
func (r read) bytes() int { return streams * turnBytes * r.turns }

// Bandwidth measures how many bytes a second threads goroutines read from spans
// with the loads of tier ("" for the widest), each its own part over and over: 24
// milliseconds in all, the best of three measurements. What fits a cache is read from there after the first time, as
// by a call that is repeated. It is 0 when the spans are shorter than one turn
// for each goroutine, 1 KiB. Errors are those of FLOPS.
func Bandwidth(ctx context.Context, tier string, spans [][]byte, threads int) (float64, error) {
	k, err := find(tier)
	if err != nil {
		return 0, err
	}
	parts := split(spans, threads)
	var rate float64
	for range readWindows {
		if err := ctx.Err(); err != nil {
			return 0, err
		}
		rate = max(rate, measure(threads, k.readWork(parts)))
	}
	return rate, nil
}

// split gives each of threads goroutines an equal part of every span, cut into
// calls. What is left at a span's end, less than a turn a goroutine, is left out.
func split(spans [][]byte, threads int) [][]read {
	parts := make([][]read, threads)
	for _, s := range spans {
		if len(s) == 0 {
			continue
		}
		if off := int(uintptr(unsafe.Pointer(unsafe.SliceData(s))) % lineBytes); off > 0 {
			s = s[min(lineBytes-off, len(s)):]
		}
		// In turns: of a stream, of which a goroutine has four.
		turns := len(s) / (threads * streams * turnBytes)
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
	// Which call comes next for a goroutine, each in a cache line of its own.
	type position struct {
		call int
		_    [lineBytes - unsafe.Sizeof(int(0))]byte
	}
	next := make([]position, len(parts))
	return func(thread int) float64 {
		part, at, bytes := parts[thread], &next[thread].call, 0
		// Enough between two looks at the clock that these cost nothing.
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
