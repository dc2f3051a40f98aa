package bench

import (
	"fmt"
	"slices"
	"time"

	"github.com/seed90331342/attn/backend"
)

// Config says what a run measures. Its zero value is the sweep that is the zero
// [Series].
type Config struct {
	// Series are measured one after the other on each backend; none means one,
	// the zero Series.
	Series []Series
	// Budget is the time that the run may take in all, shared among the
	// backends and their series; 0 is no limit.
	Budget time.Duration
	// Rows is how many rows of a result are recomputed in float64; 0 means 16.
	Rows int
	// Seed draws the inputs and the rows.
	Seed uint64
	// Args say how to repeat the run, as the words of a command line; they go into
	// the report as they are, and so does Missing, which names backends that
	// there are without a device, and why.
	Args, Missing []string
	// Resume, when set, is the report of a run that ended early: the cases that it
	// measured are not measured again, but taken over as they are.
	Resume *Report
	// Progress, when set, is called when something else starts to run, from
	// the goroutine of Run; Measured with the report so far when a case is done.
	Progress func(Progress)
	Measured func(*Report)
}

// defaultRows takes a few milliseconds at S = 4096 and finds an error that a tenth
// of the rows have with a chance of 4 in 5 a check.
const defaultRows = 16

// withDefaults fills in and checks c.
func (c Config) withDefaults() (Config, error) {
	if c.Rows == 0 {
		c.Rows = defaultRows
	}
	switch {
	case c.Rows < 1:
		return c, fmt.Errorf("bench: rows is %d, it must be at least 1: %w", c.Rows, backend.ErrShape)
	case c.Budget < 0:
		return c, fmt.Errorf("bench: budget is %v, it must be positive, or 0 for no limit: %w", c.Budget, backend.ErrOption)
	}
	if len(c.Series) == 0 {
		c.Series = []Series{{}}
	}
	c.Series = slices.Clone(c.Series)
	seen := map[string]bool{}
	for i, s := range c.Series {
		s, err := s.withDefaults()
		if err != nil {
			return c, err
		}
		if s.Name == "" && len(c.Series) > 1 {
			s.Name = s.String()
		}
		if seen[s.Name] {
			return c, fmt.Errorf("bench: there are two series %q: %w", s.Name, backend.ErrOption)
		}
		seen[s.Name], c.Series[i] = true, s
	}
	return c, nil
}

// withLengths is withDefaults for runs that do not sweep: a series without lengths gets
// those of a comparison.
func (c Config) withLengths() (Config, error) {
	c, err := c.withDefaults()
	for i := range c.Series {
		if len(c.Series[i].Seqs) == 0 {
			c.Series[i].Seqs = compareSeqs
		}
	}
	return c, err
}

// Check reports what Run would refuse, without running anything: ErrShape,
// ErrDType and ErrOption name the setting.
func (c Config) Check() error {
	_, err := c.withDefaults()
	return err
}
