package bench

import (
	"math"
	"math/rand/v2"
	"slices"
)

// Verdict says how a case changed from one report to another.
type Verdict string

// The verdicts.
const (
	// Same: no change beyond noise, and less than what is looked for.
	Same Verdict = "same"
	// Slower and Faster: the times differ by more than chance and by at least what
	// is looked for.
	Slower Verdict = "slower"
	Faster Verdict = "faster"
	// Unclear: the times vary so much that a change as large as what is looked for
	// could hide in them.
	Unclear Verdict = "unclear"
	// Broken: the case was measured and is wrong now, or fails.
	Broken Verdict = "broken"
	// Fixed: the case was wrong, or failed, and is measured now.
	Fixed Verdict = "fixed"
	// Missing: only one of the reports has the case measured.
	Missing Verdict = "missing"
)

// Change is how one case changed.
type Change struct {
	// Old and New are the rows; nil where a report has none.
	Old, New *Measurement
	Verdict  Verdict
	// Percent is by how much the time of a call grew, and Low to High the interval that
	// holds that with 99%; 0 where there is nothing to compare.
	Percent, Low, High float64
	// Chance is how likely the rounds of the two would differ as they do without a
	// change, by their ranks.
	Chance float64
	// By says what was compared: [ByFloor] or [ByPace], the one that is more certain.
	By string
}

const (
	// ByFloor compares the fastest calls, which a busy machine disturbs least. That of
	// short calls on few threads is the same however busy it is.
	ByFloor = "fastest calls"
	// ByPace compares the quotients of calls and of the arithmetic beside them, which a
	// busy machine slows down alike.
	ByPace = "calls beside arithmetic"
)

const (
	// chanceLimit is the chance below which a difference is not noise: what six
	// rounds of each can show, and no fewer.
	chanceLimit = 0.005
	// floorAt is the part of the calls that are the fastest ones: few enough to be
	// undisturbed, enough not to be flukes.
	floorAt = 0.05
	// resamples is how often rounds are drawn anew to see how far an estimate
	// moves, and tail the part on either side outside of its interval.
	resamples = 400
	tail      = 0.005
)

// Difference compares the cases of two reports, in the order of the newer one. A change
// counts when it is at least so many percent and more than chance.
func Difference(was, now *Report, percent float64) []Change {
	var changes []Change
	paired := map[*Measurement]bool{}
	for i := range now.Cases {
		c := Change{New: &now.Cases[i]}
		for j := range was.Cases {
			if o := &was.Cases[j]; o.same(c.New) && !paired[o] {
				c.Old, paired[o] = o, true
				break
			}
		}
		c.judge(percent, was.Environment.GoVersion == now.Environment.GoVersion)
		changes = append(changes, c)
	}
	for j := range was.Cases {
		if o := &was.Cases[j]; !paired[o] {
			changes = append(changes, Change{Old: o, Verdict: Missing})
		}
	}
	return changes
}

// same reports whether two rows are of the same case.
func (m *Measurement) same(o *Measurement) bool {
	return m.Backend == o.Backend && m.Contender == o.Contender && m.Variant == o.Variant && m.Threads == o.Threads && m.Name == o.Name
}

// judge compares the rows. paced says that the arithmetic beside the calls is the same
// code in both.
func (c *Change) judge(percent float64, paced bool) {
	ok := func(m *Measurement) bool { return m != nil && m.Status == OK }
	bad := func(m *Measurement) bool { return m != nil && (m.Status == Wrong || m.Status == Failed) }
	switch {
	case ok(c.Old) && bad(c.New):
		c.Verdict = Broken
		return
	case bad(c.Old) && ok(c.New):
		c.Verdict = Fixed
		return
	case !ok(c.Old) || !ok(c.New):
		c.Verdict = Missing
		return
	}
	was, now := samplesOf(c.Old, paced), samplesOf(c.New, paced)
	views := []view{floorView}
	if was.paced() && now.paced() {
		views = []view{floorView, paceView}
	}
	best := math.Inf(1)
	for _, v := range views {
		low, high := v.interval(was, now)
		if width := high - low; width < best {
			best = width
			c.By, c.Low, c.High = v.name, 100*(low-1), 100*(high-1)
			c.Percent = 100 * (v.of(now)/v.of(was) - 1)
			c.Chance = rankTest(v.rounds(was), v.rounds(now))
		}
	}
	half := (c.High - c.Low) / 2
	if c.Old.Bound == BoundRead && c.New.Bound == BoundRead && math.Abs(c.Percent) >= percent {
		// Where the operands lie in memory differs from run to run, and with it how fast
		// they are read. A change that the reading of the same operands explains is none
		// of the call.
		beside := 100 * (readView(now)/readView(was) - 1)
		if explained := !(beside*c.Percent > 0 && math.Abs(beside) >= percent/2); explained { // or not known
			c.Verdict = Unclear
			return
		}
	}
	switch {
	case c.Chance < chanceLimit && math.Abs(c.Percent) >= percent && math.Abs(c.Percent) > half:
		c.Verdict = Slower
		if c.Percent < 0 {
			c.Verdict = Faster
		}
	case half > percent || math.Abs(c.Percent) >= percent:
		c.Verdict = Unclear
	default:
		c.Verdict = Same
	}
}

// samples are the rounds of a case: times and, as long, the pieces of arithmetic beside
// them, or none, and the rate at which the operands were read, 0 where it is not known.
type samples []struct {
	times, paces []float64
	read         float64
}

// samplesOf returns the rounds of m.
func samplesOf(m *Measurement, paced bool) samples {
	s := make(samples, len(m.Rounds))
	for i, r := range m.Rounds {
		s[i].times = r.TimesS
		if paced && len(r.PaceS) == len(r.TimesS) {
			s[i].paces = r.PaceS
		}
		if r.CeilingGBS != nil {
			s[i].read = *r.CeilingGBS
		}
	}
	return s
}

// paced reports whether all rounds have arithmetic beside them.
func (s samples) paced() bool {
	for _, r := range s {
		if len(r.paces) == 0 {
			return false
		}
	}
	return len(s) > 0
}

// view is one way to say how long the calls of a case take.
type view struct {
	name string
	// of says it of rounds, one of a single one.
	of  func(s samples) float64
	one func(times, paces []float64) float64
}

// floorView is by the fastest calls, in units of the fastest arithmetic where there is
// some, which follows the processor's clock.
var floorView = view{ByFloor,
	func(s samples) float64 {
		var times, paces []float64
		for _, r := range s {
			times, paces = append(times, r.times...), append(paces, r.paces...)
		}
		return floor(times, paces)
	}, floor}

func floor(times, paces []float64) float64 {
	at := quantile(times, floorAt)
	if len(paces) > 0 {
		at /= quantile(paces, floorAt)
	}
	return at
}

// paceView is by the quotients.
var paceView = view{ByPace,
	func(s samples) float64 {
		var all []float64
		for _, r := range s {
			all = append(all, quotients(r.times, r.paces)...)
		}
		return median(all)
	},
	func(times, paces []float64) float64 { return median(quotients(times, paces)) }}

func quotients(times, paces []float64) []float64 {
	q := make([]float64, len(times))
	for i := range times {
		q[i] = times[i] / paces[i]
	}
	return q
}

// readView says how long calls take in units of how long reading their operands does,
// both undisturbed: the median over rounds.
func readView(s samples) float64 {
	var all []float64
	for _, r := range s {
		all = append(all, floor(r.times, nil)*r.read)
	}
	return median(all)
}

// rounds returns the view of each round.
func (v view) rounds(s samples) []float64 {
	all := make([]float64, len(s))
	for i, r := range s {
		all[i] = v.one(r.times, r.paces)
	}
	return all
}

// interval returns between which factors now lies above was, by drawing the rounds of
// both anew (Efron 1979): what varies from round to round then varies in the estimate
// as it would in other runs. The draw is always the same.
func (v view) interval(was, now samples) (low, high float64) {
	rng := rand.New(rand.NewPCG(1, 2))
	factors := make([]float64, resamples)
	for i := range factors {
		factors[i] = v.of(drawn(rng, now)) / v.of(drawn(rng, was))
	}
	slices.Sort(factors)
	return quantile(factors, tail), quantile(factors, 1-tail)
}

// drawn draws as many rounds as there are, with replacement.
func drawn(rng *rand.Rand, s samples) samples {
	d := make(samples, len(s))
	for i := range d {
		d[i] = s[rng.IntN(len(s))]
	}
	return d
}
