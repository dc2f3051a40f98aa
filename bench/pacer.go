package bench

import (
	"math"
	"sync"
	"sync/atomic"
	"time"
)

// pacer measures how fast the machine lets the program compute at the moment: a loop of a fixed number of pieces of
// arithmetic, shared by as many goroutines as the backend has threads. It is scheduled like a call but uses no memory:
// load slows both down alike, and their ratio is unaffected.
type pacer struct {
	pieces int64 // of a run
	next   atomic.Int64
	begin  chan struct{}
	done   sync.WaitGroup
	others int // goroutines in addition to the caller's
	sink   atomic.Uint64
}

// Lengths of a run in seconds.
const (
	// paceLongest is the longest run. Longer calls average over the load of a machine.
	paceLongest = 0.01
	// paceShortest is the shortest run, about ten times as long as waking goroutines.
	paceShortest = 50e-6
	// paceApart is the longest time between two runs, except for a single longer call:
	// shorter than the time slices of the operating system.
	paceApart = 200e-6
	// paceTrial is the number of pieces of the run that calibrates the length.
	paceTrial = 50
	// pacePiece is less than the time of a piece: clocks of browsers advance by up to 1 ms.
	pacePiece = 1e-6
)

// newPacer returns a pacer with runs of about the length of a call. The caller closes it.
func newPacer(threads int, seconds float64) *pacer {
	p := &pacer{pieces: paceTrial, begin: make(chan struct{}), others: threads - 1}
	for range p.others {
		go func() {
			for range p.begin {
				p.work()
				p.done.Done()
			}
		}()
	}
	piece := math.Inf(1)
	for range 10 {
		piece = min(piece, p.run()/paceTrial)
	}
	piece = max(piece, pacePiece)
	p.pieces = pacePieces(threads, seconds, piece)
	return p
}

// pacePieces returns the number of pieces in a run, if a piece takes that many seconds.
func pacePieces(threads int, call, piece float64) int64 {
	return int64(max(min(max(call, paceShortest), paceLongest)/piece, float64(threads)))
}

// run runs once and returns the seconds.
func (p *pacer) run() float64 {
	begin := time.Now()
	p.next.Store(0)
	p.done.Add(p.others)
	for range p.others {
		p.begin <- struct{}{}
	}
	p.work()
	p.done.Wait()
	return time.Since(begin).Seconds()
}

// piece returns the seconds of one piece in a run.
func (p *pacer) piece() float64 { return p.run() / float64(p.pieces) }

// work computes pieces until all are done.
func (p *pacer) work() {
	sum := 0.0
	for p.next.Add(1) <= p.pieces {
		a, b, c, d := 1.0, 2.0, 3.0, 4.0
		for range 1500 { // several microseconds
			a, b, c, d = a*0.5+1, b*0.5+1, c*0.5+1, d*0.5+1
		}
		sum += a + b + c + d
	}
	p.sink.Store(math.Float64bits(sum)) // otherwise the compiler removes the loop
}

func (p *pacer) close() { close(p.begin) }
