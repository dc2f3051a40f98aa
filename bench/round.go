package bench

import (
	"fmt"
	"math"
	"runtime"
)

const (
	// precision is how near the ends of the median's interval must come to it,
	// half of their distance in parts of the median, for the repetitions to end.
	precision = 0.02
	// roundSeconds is what the calls of a round add up to: about as long as its
	// ceilings take, long enough for caches to be the case's own.
	roundSeconds = 0.05
	// maxEach is how many calls that are at most.
	maxEach = 50
	// minRounds are the rounds of a call of some seconds at least, settleRounds those
	// of short calls: six would hold the median between them with a chance of 95%, and
	// a rank test of six and six can just tell two reports apart.
	minRounds    = 3
	settleRounds = 10
	// longCall is how many seconds a call takes of which longRounds are enough: a warm-up
	// and three of them would take as long as the next length.
	longCall   = 5.0
	longRounds = 2
	// maxRounds ends the repetitions of a case that will not be precise.
	maxRounds = 40
	// morePatience is how many times as long as it takes at least a case may take to
	// become precise.
	morePatience = 5
	// caseSeconds is what the rounds of a case take at most where no budget says
	// otherwise, but for minRounds.
	caseSeconds = 3.0
	// ceilingSeconds is what the ceilings of one round take.
	ceilingSeconds = 0.07
)

// round is what was measured close together in time; rates in operations and bytes a
// second, times in seconds, 0 for what was not measured.
type round struct {
	peak, read, launch float64
	calls              []float64
	// paces are the seconds of a piece of the pacer's last run before each call; none
	// where the backend has no threads on the host.
	paces []float64
}

// perRound returns how many calls of so many seconds a round has.
func perRound(seconds float64) int {
	if seconds <= 0 {
		return maxEach
	}
	return int(min(max(math.Ceil(roundSeconds/seconds), 1), maxEach))
}

// leastRounds returns how many rounds a case has at least whose calls take that many
// seconds.
func leastRounds(seconds float64) int {
	if seconds >= longCall {
		return longRounds
	}
	one := roundTakes(seconds)
	return int(min(max(caseSeconds/one, minRounds), settleRounds))
}

// leastSeconds returns the time that a case takes at least whose calls take that many
// seconds: a warm-up and the rounds.
func leastSeconds(seconds float64) float64 {
	return seconds + float64(leastRounds(seconds))*roundTakes(seconds)
}

// roundTakes returns the seconds of a round whose calls take that many.
func roundTakes(seconds float64) float64 {
	return ceilingSeconds + float64(perRound(seconds))*(seconds+min(max(seconds, paceShortest), paceLongest))
}

// enough reports whether the rounds of a case may end that have taken so many seconds:
// when the median is known precisely enough, or when that would take too long.
func (t *timing) enough(took, limit float64) bool {
	n := len(t.rounds)
	limit = min(limit, max(morePatience*leastSeconds(t.warm), caseSeconds))
	switch {
	case n < leastRounds(t.warm):
		return false
	case n >= maxRounds || took+took/float64(n) > limit:
		return true
	}
	low, high, sure := medianInterval(t.medians())
	return sure >= sureness && (high-low)/2 <= precision*median(t.medians())
}

// medians returns the median time of a call in each round.
func (t *timing) medians() []float64 {
	of := make([]float64, len(t.rounds))
	for i, r := range t.rounds {
		of[i] = median(r.calls)
	}
	return of
}

// calls returns the times of all calls.
func (t *timing) calls() []float64 {
	var all []float64
	for _, r := range t.rounds {
		all = append(all, r.calls...)
	}
	return all
}

// measured returns a figure of each round that is not 0.
func (t *timing) measured(of func(r *round) float64) []float64 {
	var all []float64
	for i := range t.rounds {
		if x := of(&t.rounds[i]); x > 0 {
			all = append(all, x)
		}
	}
	return all
}

// round measures once around: the ceilings, the calls with their allocations, a call
// by the device's clock, the three stages. What is compared lies close together in time.
func (b *bencher) round(t *timing, each int) error {
	r, err := b.ceilings()
	if err != nil {
		return fmt.Errorf("ceiling: %w", err)
	}
	var before, after runtime.MemStats
	r.calls = make([]float64, 0, each) // not grown while counting
	r.paces = make([]float64, 0, each)
	runtime.ReadMemStats(&before)
	every := max(int(paceApart/t.warm), 1)
	for i := range each {
		switch {
		case b.pace == nil:
		case i%every == 0:
			r.paces = append(r.paces, b.pace.piece())
		default: // hardly any time has passed
			r.paces = append(r.paces, r.paces[i-1])
		}
		seconds, err := b.time()
		if err != nil {
			return err
		}
		r.calls = append(r.calls, seconds)
		if b.stop() != "" {
			break
		}
	}
	runtime.ReadMemStats(&after)
	t.rounds = append(t.rounds, r)
	// Another goroutine's allocations can only add: the least is the call's.
	t.allocs = min(t.allocs, int64(after.Mallocs-before.Mallocs)/int64(len(r.calls)))
	if b.stop() != "" {
		return nil
	}
	if err := b.kernel(t); err != nil {
		return err
	}
	if b.staged.Weights.IsZero() || b.stop() != "" || sum(t.stages) > stagesSeconds {
		return nil // a comparison needs fewer digits than the figure
	}
	seconds, err := b.timeStages()
	if err != nil {
		return fmt.Errorf("three stages: %w", err)
	}
	t.stages = append(t.stages, seconds)
	return nil
}
