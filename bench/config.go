package bench

import (
	"fmt"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
)

// Config says what a run measures. Its zero value is a sweep of plain attention
// with 8 heads of 64 in f32.
type Config struct {
	// Seqs are the sequence lengths, of keys and, unless SeqQ says otherwise, of
	// queries. None means a
	// sweep: 256, 512, ... for as long as a call is predicted to take about a
	// second at most.
	Seqs []int
	// SeqQ is how many queries there are, the last on the last key, as in
	// decoding; 0 means as many as keys.
	SeqQ int
	// Batch, Heads and Dim are lengths; 0 means 1, 8 and 64. KVHeads divides
	// Heads; 0 means Heads.
	Batch, Heads, KVHeads, Dim int
	// Causal hides later keys from a row.
	Causal bool
	// Window, Softcap and Mask are those of [Case].
	Window  *kernels.Window
	Softcap float64
	Mask    bool
	// DType is the type of the operands.
	DType backend.DType
	// Budget is the time that the run may take in all, shared among the
	// backends; 0 is no limit.
	Budget time.Duration
	// Rows is how many rows of a result are recomputed in float64; 0 means 16.
	Rows int
	// Seed draws the inputs and the rows.
	Seed uint64
	// Missing names backends that there are without a device, and why; it
	// goes into the report as it is.
	Missing []string
	// Progress, when set, is called when something else starts to run, from
	// the goroutine of Run.
	Progress func(Progress)
}

// defaultRows takes a few milliseconds at S = 4096 and finds an error that a tenth
// of the rows have with a chance of 4 in 5 a check.
const defaultRows = 16

// withDefaults fills in and checks c.
func (c Config) withDefaults() (Config, error) {
	or := func(n *int, def int) {
		if *n == 0 {
			*n = def
		}
	}
	or(&c.Batch, 1)
	or(&c.Heads, 8)
	or(&c.KVHeads, c.Heads)
	or(&c.Dim, 64)
	or(&c.Rows, defaultRows)
	switch {
	case min(c.Batch, c.Heads, c.KVHeads, c.Dim, c.Rows) < 1:
		return c, fmt.Errorf("bench: batch %d, heads %d, kv-heads %d, dim %d, rows %d: all must be at least 1: %w",
			c.Batch, c.Heads, c.KVHeads, c.Dim, c.Rows, backend.ErrShape)
	case c.Heads%c.KVHeads != 0:
		return c, fmt.Errorf("bench: heads is %d, kv-heads is %d: kv-heads must divide heads: %w", c.Heads, c.KVHeads, backend.ErrShape)
	case !c.DType.Float():
		return c, fmt.Errorf("bench: dtype is %v, it must be f32, f16 or bf16: %w", c.DType, backend.ErrDType)
	case c.Budget < 0:
		return c, fmt.Errorf("bench: budget is %v, it must be positive, or 0 for no limit: %w", c.Budget, backend.ErrOption)
	}
	if c.SeqQ < 0 || c.SeqQ > maxSeq {
		return c, fmt.Errorf("bench: seq-q is %d, it must be 1 to %d, or 0 for as many queries as keys: %w", c.SeqQ, maxSeq, backend.ErrShape)
	}
	if w := c.Window; w != nil && min(w.Left, w.Right) < 0 {
		return c, fmt.Errorf("bench: window is %d,%d: both sides must be at least 0: %w", w.Left, w.Right, backend.ErrOption)
	}
	if s := c.Softcap; !(s == 0 || s >= 1e-30 && s <= 1e30) { // what a float32 holds, with room
		return c, fmt.Errorf("bench: softcap is %v, it must be 0 (off) or 1e-30 to 1e30: %w", s, backend.ErrOption)
	}
	for _, s := range c.Seqs {
		if s < 1 || s > maxSeq {
			return c, fmt.Errorf("bench: sequence length is %d, it must be 1 to %d: %w", s, maxSeq, backend.ErrShape)
		}
		if at := c.at(s); at.bytes() < 0 {
			return c, fmt.Errorf("bench: %v is too large for this machine to count: %w", at, backend.ErrShape)
		}
	}
	return c, nil
}

// Check reports what Run would refuse, without running anything: ErrShape,
// ErrDType and ErrOption name the setting.
func (c Config) Check() error {
	_, err := c.withDefaults()
	return err
}

// at returns the case of that many keys.
func (c Config) at(seq int) Case {
	seqQ := seq
	if c.SeqQ > 0 {
		seqQ = c.SeqQ
	}
	return Case{Variant: Fused, DType: c.DType, Causal: c.Causal, Window: c.Window, Softcap: c.Softcap, Mask: c.Mask, Dims: backend.Dims{
		Batch: c.Batch, Heads: c.Heads, KVHeads: c.KVHeads, SeqQ: seqQ, SeqK: seq, Dim: c.Dim, ValueDim: c.Dim,
	}}
}
