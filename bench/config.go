package bench

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/seed90331342/attn/bench/report"
	"github.com/seed90331342/attn/kernels"
)

// Config is what a run measures. Its zero value is the sweep of the zero [Series].
type Config struct {
	// Series are measured one after the other on each device; none means the zero Series.
	Series []Series
	// Budget limits the time of the whole run and is shared among devices and series; 0 is no limit.
	Budget time.Duration
	// Rounds is the number of rounds of each case; 0 repeats them until the median is precise.
	Rounds int
	// Seed draws the inputs and the rows of a result that are recomputed in float64.
	Seed uint64
	// NoStages leaves out the comparison with the three stages, which keep all weights in memory.
	NoStages bool
	// Args are the arguments of a command line that repeats the run, and Missing has a line
	// for each backend without a device. The report contains both.
	Args, Missing []string
	// Resume, when set, is the report of a run that ended early: the cases that it measured
	// are copied, not measured again. Each of them must be a case of this run.
	Resume *report.Report
	// Progress, when set, is called before each step from the goroutine of Run, and
	// Measured after each case with the report so far, which is marked as interrupted.
	Progress func(Progress)
	Measured func(*report.Report)
}

// checkedRows take a few milliseconds at S = 4096. If a tenth of the rows are wrong, a
// check finds one with a probability of 4 in 5.
const checkedRows = 16

// withDefaults fills in and checks c.
func (c Config) withDefaults() (Config, error) {
	switch {
	case c.Rounds < 0:
		return c, fmt.Errorf("bench: rounds is %d, it must be positive, or 0 for as many as a precise median takes: %w", c.Rounds, kernels.ErrOption)
	case c.Budget < 0:
		return c, fmt.Errorf("bench: budget is %v, it must be positive, or 0 for no limit: %w", c.Budget, kernels.ErrOption)
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
			s.Name = s.Shape()
		}
		if seen[s.Name] {
			return c, fmt.Errorf("bench: there are two series %q: %w", s.Name, kernels.ErrOption)
		}
		seen[s.Name], c.Series[i] = true, s
	}
	return c, nil
}

// Check returns the error of Run for an invalid setting, without running anything: ErrShape, ErrDType or ErrOption.
func (c Config) Check() error {
	_, err := c.withDefaults()
	return err
}

// Series is a case at several lengths. Its zero value is a sweep of plain attention with 8 heads of size 64 in f32.
type Series struct {
	// Name identifies the series in a report. By default it is that of [report.Case.Shape], if
	// there are several series.
	Name string
	// Seqs are the sequence lengths, of keys and, unless SeqQ is set, of queries. None means a
	// sweep: 256, 512, ... as long as a call is predicted to take about a second.
	Seqs []int
	// Case has the rest, its SeqK is ignored. "" means the variant "fused" and the type "f32". Batch,
	// Heads and Dim default to 1, 8 and 64. KVHeads divides Heads and defaults to it.
	report.Case
}

// withDefaults fills in and checks s.
func (s Series) withDefaults() (Series, error) {
	s.Batch, s.Heads, s.Dim = cmp.Or(s.Batch, 1), cmp.Or(s.Heads, 8), cmp.Or(s.Dim, 64)
	s.KVHeads, s.Variant, s.DType = cmp.Or(s.KVHeads, s.Heads), cmp.Or(s.Variant, report.Fused), cmp.Or(s.DType, kernels.F32.String())
	switch {
	case min(s.Batch, s.Heads, s.KVHeads, s.Dim) < 1:
		return s, fmt.Errorf("bench: batch %d, heads %d, kv-heads %d, dim %d: all must be at least 1: %w",
			s.Batch, s.Heads, s.KVHeads, s.Dim, kernels.ErrShape)
	case s.Heads%s.KVHeads != 0:
		return s, fmt.Errorf("bench: heads is %d, kv-heads is %d: kv-heads must divide heads: %w", s.Heads, s.KVHeads, kernels.ErrShape)
	case report.DTypes[s.DType].String() != s.DType:
		return s, fmt.Errorf("bench: dtype is %s, it must be f32, f16 or bf16: %w", s.DType, kernels.ErrDType)
	case s.SeqQ < 0 || s.SeqQ > maxSeq:
		return s, fmt.Errorf("bench: seq-q is %d, it must be 1 to %d, or 0 for as many queries as keys: %w", s.SeqQ, maxSeq, kernels.ErrShape)
	case !slices.Contains(report.Variants, s.Variant):
		return s, fmt.Errorf("bench: variant is %q, it must be one of %v: %w", s.Variant, report.Variants, kernels.ErrOption)
	}
	if s.Cache != "" {
		// Meta refuses a head size that q4 does not have.
		cache, ok := report.Caches[s.Cache]
		if _, err := kernels.Meta(cache, kernels.Shape{1, 1, 1, s.Dim}); err != nil || !ok {
			return s, fmt.Errorf("bench: cache is %s, it must be q8, q4 or f8, and for q4 the head size %d a multiple of 32: %w", s.Cache, s.Dim, kernels.ErrDType)
		}
		if s.Variant != report.Fused {
			return s, fmt.Errorf("bench: a cache in %s is read by the fused call, the variant is %s: %w", s.Cache, s.Variant, kernels.ErrOption)
		}
	}
	if s.LowPrecision && s.Variant != report.Fused {
		return s, fmt.Errorf("bench: low precision is an option of the fused call, the variant is %s: %w", s.Variant, kernels.ErrOption)
	}
	for _, side := range []*int{s.WindowLeft, s.WindowRight} {
		if side != nil && *side < 0 {
			return s, fmt.Errorf("bench: window is %s: both sides must be at least 0: %w", s.Window(), kernels.ErrOption)
		}
	}
	if f32 := kernels.F32.String(); s.Mask != "" && s.Mask != f32 {
		return s, fmt.Errorf("bench: mask is %s, it must be %s, or empty for none: %w", s.Mask, f32, kernels.ErrDType)
	}
	if c := s.Softcap; !(c == 0 || c >= 1e-30 && c <= 1e30) { // well within the range of a float32
		return s, fmt.Errorf("bench: softcap is %v, it must be 0 (off) or 1e-30 to 1e30: %w", c, kernels.ErrOption)
	}
	for _, seq := range s.Seqs {
		if seq < 1 || seq > maxSeq {
			return s, fmt.Errorf("bench: sequence length is %d, it must be 1 to %d: %w", seq, maxSeq, kernels.ErrShape)
		}
		if at := s.at(seq); at.hostBytes() < 0 {
			return s, fmt.Errorf("bench: %s is too large for this machine to count: %w", at.Name(), kernels.ErrShape)
		}
	}
	return s, nil
}

// at returns the case with seq keys.
func (s *Series) at(seq int) call {
	c := s.Case
	c.SeqK, c.SeqQ = seq, cmp.Or(c.SeqQ, seq)
	return call{c}
}
