package queue

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/seed90331342/attn/gpu/internal/cut"
)

// inFlight is a call with submissions that may still run.
type inFlight struct {
	name string
	out  []Output
	uses []*inFlight // calls whose results it uses and that ran when it began
	// left is the number of its submissions that are not known to have ended.
	left          int
	submitted     bool // all submissions are made, and nobody but calls uses it
	returnedError bool // it has returned an error
	failure       *failure
}

// failure is the error of a submission, shared by the calls that use its result.
type failure struct {
	of       *inFlight
	err      error
	reported bool // a call has returned it
}

// begin returns a call that writes to out and reads in. It returns the failure of a call that wrote to them.
func (s *sent) begin(name string, out []Output, in []*cut.Store) (*inFlight, error) {
	c := &inFlight{name: name, out: out}
	s.mu.Lock()
	defer s.mu.Unlock()
	use := func(x *cut.Store, written bool) error {
		w := s.writers[x]
		switch {
		case w == nil:
		case w.failure == nil:
			if !slices.Contains(c.uses, w) {
				c.uses = append(c.uses, w)
			}
		case !written || !w.failure.reported: // results are overwritten once the program knows
			return s.report(w.failure)
		}
		return nil
	}
	for _, x := range in {
		if err := use(x, false); err != nil {
			return nil, err
		}
	}
	for _, x := range out {
		if err := use(x.Store, true); err != nil {
			return nil, err
		}
	}
	return c, nil
}

// end notes that c has returned err.
func (s *sent) end(c *inFlight, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c.submitted = true
	if err != nil {
		c.returnedError = true
		if x := c.failure; x != nil && x.of == c {
			_ = s.report(x)
		}
		return
	}
	for _, x := range c.out {
		if w := s.writers[x.Store]; w == nil || w.failure == nil || x.Whole { // else a part is still incomplete
			s.writers[x.Store] = c
		}
	}
	s.clean(c)
}

// clean forgets a call that has succeeded. The caller holds the lock.
func (s *sent) clean(c *inFlight) {
	if c.left > 0 {
		return
	}
	c.uses = nil
	if c.submitted && c.failure == nil {
		for _, x := range c.out {
			if s.writers[x.Store] == c {
				delete(s.writers, x.Store)
			}
		}
	}
}

// noteEnd notes that a submission of c has ended, or failed with err. The caller holds the lock.
func (s *sent) noteEnd(c *inFlight, err error) {
	c.left--
	if err != nil && c.failure == nil {
		c.failure = &failure{of: c, err: err, reported: c.returnedError}
		if !c.returnedError && len(s.failed) < maxSent {
			s.failed = append(s.failed, c.failure)
		}
	}
	for _, x := range c.uses {
		if c.failure == nil {
			c.failure = x.failure
		}
	}
	s.clean(c)
}

// report returns the error of a failure, which the program then knows. The caller holds the lock.
func (s *sent) report(x *failure) error {
	x.reported = true
	s.failed = slices.DeleteFunc(s.failed, func(y *failure) bool { return y == x })
	return fmt.Errorf("%s: %w", x.of.name, x.err)
}

// result returns the error of the submissions of c that have ended.
func (s *sent) result(c *inFlight) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c.failure == nil {
		return nil
	}
	err := s.report(c.failure)
	if c.failure.of == c {
		err = c.failure.err // the caller adds the name
	}
	return err
}

// errorOf returns the error of the call that wrote to a tensor last.
func (s *sent) errorOf(x *cut.Store) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if w := s.writers[x]; w != nil && w.failure != nil {
		return s.report(w.failure)
	}
	return nil
}

// first returns the first error that no call has returned, and forgets the others: calls
// that use incomplete results still return theirs.
func (s *sent) first() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.failed) == 0 {
		return nil
	}
	err := s.report(s.failed[0])
	for _, x := range s.failed {
		x.reported = true
	}
	s.failed = nil
	return err
}

// Wait waits until no submission runs. It returns the first error of a call that had
// returned, unless another call has returned that error.
func (d *Device) Wait(ctx context.Context) error {
	err := d.Idle(ctx)
	if ctx.Err() != nil && err != nil {
		return err
	}
	return cmp.Or(d.sent.first(), err)
}

// Lost returns an error when the device is lost: that of a call which was running, if no call has returned it.
func (d *Device) Lost() error {
	err := d.wrap(d.Port.Lost())
	if err == nil {
		return nil
	}
	for t := d.sent.last(); t > 0 && d.fail(t, err) > 0; {
	}
	return cmp.Or(d.sent.first(), err)
}
