package kernels

import (
	"fmt"

	"github.com/seed90331342/attn/backend"
)

// addSequences validates the options of packed sequences and appends the subcalls of each.
func (c *Call) addSequences() error {
	if c.opt.CuK == nil {
		c.opt.CuK = c.opt.CuQ
	}
	if err := c.checkPacked(); err != nil {
		return err
	}
	for n := range len(c.opt.CuQ) - 1 {
		if c.opt.CuQ[n] == c.opt.CuQ[n+1] {
			continue
		}
		if err := c.addSequence(n); err != nil {
			return fmt.Errorf("sequence %d: %w", n, err)
		}
	}
	return nil
}

// checkPacked checks the lengths of sequences and of the options that have one value for
// each.
func (c *Call) checkPacked() error {
	opt, d := &c.opt, c.dims
	if d.Batch != 1 {
		return fmt.Errorf("q has shape %v, packed sequences have 1 batch: %w", c.q.Shape(), backend.ErrShape)
	}
	if err := checkCumulative("cuQ", opt.CuQ, d.SeqQ, "rows"); err != nil {
		return err
	}
	if err := checkCumulative("cuK", opt.CuK, d.SeqK, "keys"); err != nil {
		return err
	}
	n := len(opt.CuQ) - 1
	switch {
	case len(opt.CuK) != len(opt.CuQ):
		return fmt.Errorf("cuK has %d entries, cuQ has %d: both have one more than there are sequences: %w", len(opt.CuK), len(opt.CuQ), backend.ErrShape)
	case opt.KLen != nil && len(opt.KLen) != n:
		return fmt.Errorf("klen has %d lengths, there are %d sequences: give one for each: %w", len(opt.KLen), n, backend.ErrShape)
	case opt.Offsets != nil && len(opt.Offsets) != n:
		return fmt.Errorf("offsets has %d, there are %d sequences: give one for each: %w", len(opt.Offsets), n, backend.ErrShape)
	case opt.Prefix != nil && len(opt.Prefix) != 1 && len(opt.Prefix) != n:
		return fmt.Errorf("prefix has %d lengths, there are %d sequences: give 1 or %d: %w", len(opt.Prefix), n, n, backend.ErrShape)
	case opt.ALiBi != nil && len(opt.ALiBi) != d.Heads && len(opt.ALiBi) != n*d.Heads:
		return fmt.Errorf("alibi has %d slopes, there are %d heads in %d sequences: give %d or %d: %w", len(opt.ALiBi), d.Heads, n, d.Heads, n*d.Heads, backend.ErrShape)
	}
	return nil
}

// checkCumulative checks a list of cumulative lengths.
func checkCumulative(name string, cu []int, total int, of string) error {
	if len(cu) < 2 {
		return fmt.Errorf("%s has %d entries, it must have 0 and then the end of each sequence: %w", name, len(cu), backend.ErrShape)
	}
	for n, at := range cu {
		switch {
		case n == 0 && at != 0:
			return fmt.Errorf("%s[0] is %d, it must be 0: %w", name, at, backend.ErrOption)
		case n > 0 && at < cu[n-1]:
			return fmt.Errorf("%s[%d] is %d, less than %s[%d], which is %d: a sequence cannot end before it begins: %w", name, n, at, name, n-1, cu[n-1], backend.ErrOption)
		}
	}
	if last := cu[len(cu)-1]; last != total {
		return fmt.Errorf("%s[%d] is %d, there are %d %s: they must be equal: %w", name, len(cu)-1, last, total, of, backend.ErrOption)
	}
	return nil
}

// addSequence appends the subcalls of sequence n, which has rows.
func (c *Call) addSequence(n int) error {
	opt, heads := c.opt, c.dims.Heads
	row, key, keys := opt.CuQ[n], opt.CuK[n], opt.CuK[n+1]-opt.CuK[n]
	opt.Dropout.First[backend.Batch] += n
	if opt.KLen != nil {
		opt.KLen = c.opt.KLen[n : n+1]
	}
	if opt.Prefix != nil {
		opt.Prefix = []int{ofBatch(c.opt.Prefix, n)}
	}
	if opt.Offsets != nil {
		opt.Offsets = c.opt.Offsets[n : n+1]
	}
	if len(opt.ALiBi) > heads {
		opt.ALiBi = c.opt.ALiBi[n*heads : (n+1)*heads]
	}
	if keys == 0 { // a backend call needs a key, even if no row sees it
		if opt.KLen != nil && opt.KLen[0] != 0 {
			return fmt.Errorf("klen[%d] is %d, the sequence has no keys: %w", n, opt.KLen[0], backend.ErrOption)
		}
		opt.KLen, opt.Prefix = []int{0}, nil
		key, keys = min(key, c.dims.SeqK-1), 1
	} else if len(c.opt.Prefix) == 1 {
		opt.Prefix[0] = min(opt.Prefix[0], keys)
	}
	d := c.dims
	d.SeqQ, d.SeqK = opt.CuQ[n+1]-row, keys
	p, err := opt.problem(d)
	if err != nil {
		return err
	}
	return c.add(&p, row, key)
}
