package bench

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/seed90331342/attn/backend"
)

const (
	// sweepStart is the first length of a sweep: below it a call is mostly
	// overhead.
	sweepStart = 256
	// sweepCall is the longest call, in seconds, that a sweep goes on to:
	// about a second, so that the last length of a sweep lies between half a
	// second and two.
	sweepCall = 1.5
	// sweepBytes is the most memory that a sweep goes on to: with few queries a
	// call stays short for longer than drawing its inputs does.
	sweepBytes = 4 << 30
	// maxSeq keeps positions within the int32 that devices count in.
	maxSeq = 1 << 30
)

// ParseSeqs reads sequence lengths: a list "256,1k,4096", in which k and M mean
// 1024 and 1024², and in which "256..4k" stands for 256, 512, ... doubling up to
// 4096. It returns them sorted, each once. Errors name the part that is wrong.
func ParseSeqs(list string) ([]int, error) {
	var seqs []int
	for part := range strings.SplitSeq(list, ",") {
		part = strings.TrimSpace(part)
		first, last, isRange := strings.Cut(part, "..")
		lo, err := parseSeq(first)
		if err != nil {
			return nil, err
		}
		hi := lo
		if isRange {
			if hi, err = parseSeq(last); err != nil {
				return nil, err
			}
			if hi < lo {
				return nil, fmt.Errorf("sequence lengths %q run backwards, a range goes from the shorter to the longer: %w", part, backend.ErrOption)
			}
		}
		for s := lo; s <= hi; s *= 2 {
			seqs = append(seqs, s)
		}
	}
	slices.Sort(seqs)
	return slices.Compact(seqs), nil
}

func parseSeq(text string) (int, error) {
	digits, unit := text, 1
	switch {
	case strings.HasSuffix(text, "k"), strings.HasSuffix(text, "K"):
		digits, unit = text[:len(text)-1], 1<<10
	case strings.HasSuffix(text, "M"):
		digits, unit = text[:len(text)-1], 1<<20
	}
	n, err := strconv.Atoi(digits)
	switch {
	case err != nil:
		return 0, fmt.Errorf("sequence length %q is no number, write 256, 4k, 1M or a range as 256..4k: %w", text, backend.ErrOption)
	case n < 1 || n > maxSeq/unit:
		return 0, fmt.Errorf("sequence length %q must be 1 to %d: %w", text, maxSeq, backend.ErrOption)
	}
	return n * unit, nil
}

// cost predicts what a call takes from the last one of its series that was timed on
// the same backend: time grows with the weight, which is the FLOPs where a call has
// any. Larger calls waste less on overhead, so
// that a prediction for a longer sequence errs on the side of too long.
type cost struct {
	seconds float64 // of the last call
	weight  int64   // of the last call
}

// known reports whether anything was timed yet.
func (c cost) known() bool { return c.weight > 0 }

// predict returns the seconds of a call of that weight; 0 when unknown.
func (c cost) predict(weight int64) float64 {
	if !c.known() {
		return 0
	}
	return c.seconds * float64(weight) / float64(c.weight)
}

// admit says why a case whose call is predicted to take that many seconds does
// not run; "" when it runs. limit is the longest call in seconds (0: none), left
// the time left (negative: no budget).
func admit(seconds, limit float64, left time.Duration) string {
	switch {
	case limit > 0 && seconds > limit:
		return fmt.Sprintf("predicted %s each, a sweep ends at %s (give --seq for more)", duration(seconds), duration(limit))
	case left >= 0 && seconds*float64(1+min(leastRounds(seconds), minRounds)) > left.Seconds():
		return fmt.Sprintf("predicted %s each, %s of the budget is left", duration(seconds), duration(left.Seconds()))
	}
	return ""
}

// share is the part of the time left that a backend or a series gets when that many,
// itself included, have not run yet.
func share(left time.Duration, of int) time.Duration {
	return left / time.Duration(max(of, 1))
}
