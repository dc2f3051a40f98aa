package bench

import (
	"math"
	"sync"
	"sync/atomic"
	"time"
)

// pacer measures how fast the machine lets a program compute at the moment: a loop of a
// fixed number of pieces, which as many goroutines take one after the other as the
// backend has threads. It has the shape of a call and none of its memory: what a busy
// machine does to a call it does to the loop beside it, and their quotient stays.
type pacer struct {
	pieces int64 // of a run
	next   atomic.Int64
	begin  chan struct{}
	done   sync.WaitGroup
	others int // goroutines beside the caller's
	sink   atomic.Uint64
}

const (
	// paceLongest is how long a run takes at most: longer calls meet what is typical of a
	// busy machine themselves.
	paceLongest = 0.01
	// paceShortest is how long a run takes at least, some ten times what it takes to
	// wake goroutines.
	paceShortest = 50e-6
	// paceApart is how much time, in seconds, calls take at most between two runs, but
	// for one that is longer: less than a system lets a program compute at a stretch.
	paceApart = 200e-6
	// paceTrial is how many pieces the length of a run is found with.
	paceTrial = 50
)

// newPacer returns a pacer whose runs take about as long as a call of that many
// seconds. The caller closes it.
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
	p.pieces = int64(max(min(max(seconds, paceShortest), paceLongest)/piece, float64(threads)))
	return p
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

// work takes pieces until there are none.
func (p *pacer) work() {
	sum := 0.0
	for p.next.Add(1) <= p.pieces {
		a, b, c, d := 1.0, 2.0, 3.0, 4.0
		for range 1500 { // some microseconds
			a, b, c, d = a*0.5+1, b*0.5+1, c*0.5+1, d*0.5+1
		}
		sum += a + b + c + d
	}
	p.sink.Store(math.Float64bits(sum)) // so that it is computed
}

func (p *pacer) close() { close(p.begin) }
