package queue

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/seed90331342/attn/gpu/internal/cut"
	"github.com/seed90331342/attn/gpu/internal/port"
	"github.com/seed90331342/attn/gpu/internal/resource"
)

// Bounds on the submissions on a device. A call that would exceed one waits for the oldest.
const (
	maxSent  = 512
	maxAhead = 10 // budgets: what the submissions together are expected to take
)

// sent holds the submissions of all calls that are not known to have ended. Calls return
// when their last submission is made. A call that waits, for a tensor or for room, also notes
// what has ended.
//
// Buffers that a call or tensor releases are used again at once: the device runs
// submissions and writes in their order.
type sent struct {
	turn chan struct{} // holds an element while a submission is made: tickets have the order of list

	mu      sync.Mutex
	list    []*flight // oldest first
	unused  []*flight
	ring    ring
	seconds float64 // expected, of list
	due     time.Time
	// When the last submissions were found to have ended, and whether they were waited for
	// at that time.
	ended time.Time
	exact bool

	// writers are the calls that wrote to a tensor last, if they run or failed.
	writers map[*cut.Store]*call
	failed  []*failure // that no call has returned
}

// flight is a submission.
type flight struct {
	ticket    port.Ticket
	call      *call
	lo, hi    uint64               // its parameters in the ring
	pipelines []*resource.Pipeline // one for each dispatch
	began     time.Time
	seconds   float64 // expected
	due       time.Time
}

// last returns the ticket of the newest submission, 0 if there is none.
func (s *sent) last() port.Ticket {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n := len(s.list); n > 0 {
		return s.list[n-1].ticket
	}
	return 0
}

// runs reports whether a submission is not known to have ended, and when it is expected to.
func (s *sent) runs(t port.Ticket) (running bool, due time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := s.through(t)
	if n == 0 {
		return false, due
	}
	return true, s.list[n-1].due
}

// unmeasured reports whether the newest submission has a kernel that runs for the first time:
// software drivers compile it then. The caller holds the lock.
func (s *sent) unmeasured() bool {
	return slices.ContainsFunc(s.list[len(s.list)-1].pipelines, func(p *resource.Pipeline) bool { return !p.Measured.Load() })
}

// room returns a flight with room for so many bytes of parameters. The caller has the turn.
func (d *Device) room(ctx context.Context, bytes uint64, seconds float64) (*flight, error) {
	s := d.sent
	deadline, waits := ctx.Deadline()
	waits = waits && d.pacing.blocks
	for {
		s.mu.Lock()
		at, ok := s.ring.find(bytes, s.list)
		ok = ok && (len(s.list) == 0 || len(s.list) < maxSent && s.seconds+seconds <= d.pacing.ahead(deadline) && !(waits && s.unmeasured()))
		if ok {
			var f *flight
			if n := len(s.unused); n > 0 {
				f, s.unused = s.unused[n-1], s.unused[:n-1]
			} else {
				f = new(flight)
			}
			s.mu.Unlock()
			f.lo, f.hi, f.seconds = at, at+bytes, seconds
			return f, nil
		}
		oldest := s.list[0].ticket
		s.mu.Unlock()
		if err := d.await(ctx, oldest); err != nil {
			return nil, err
		}
	}
}

// add notes that f was submitted. The caller has the turn.
func (s *sent) add(f *flight) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if f.due = f.began; s.due.After(f.due) {
		f.due = s.due
	}
	f.due = f.due.Add(time.Duration(f.seconds * float64(time.Second)))
	s.due = f.due
	s.ring.head = f.hi
	s.seconds += f.seconds
	s.list = append(s.list, f)
	f.call.left++
}

// await waits for a submission and those before it. The errors of calls become failures;
// await returns the context's error and those that belong to no call.
func (d *Device) await(ctx context.Context, t port.Ticket) error {
	for {
		_, due := d.sent.runs(t)
		blocked, err := d.Port.Wait(ctx, t, due)
		if err != nil && ctx.Err() != nil && errors.Is(err, ctx.Err()) {
			return err
		}
		if err == nil {
			d.settle(t, blocked)
			return nil
		}
		err = d.wrap(err)
		switch failed := d.fail(t, err); failed {
		case 0:
			return err
		case t:
			return nil
		}
	}
}

// through returns the number of submissions up to t. The caller holds the lock.
func (s *sent) through(t port.Ticket) int {
	if n := slices.IndexFunc(s.list, func(f *flight) bool { return f.ticket > t }); n >= 0 {
		return n
	}
	return len(s.list)
}

// settle notes that a submission and those before it have ended.
func (d *Device) settle(t port.Ticket, blocked bool) {
	s := d.sent
	s.mu.Lock()
	defer s.mu.Unlock()
	if n := s.through(t); n > 0 {
		s.learn(s.list[:n], blocked, time.Now(), d.pacing.share(time.Time{}))
		d.drop(n, nil)
	}
}

// fail notes that the oldest submission up to t of a call that has returned no error has
// failed, and those before it. It returns the ticket, 0 if there is none.
func (d *Device) fail(t port.Ticket, err error) (failed port.Ticket) {
	s := d.sent
	s.mu.Lock()
	defer s.mu.Unlock()
	s.exact = false
	n := s.through(t)
	// Of other calls the program would not see the error, which may be another's.
	if i := slices.IndexFunc(s.list[:n], func(f *flight) bool { return !f.call.refused }); i >= 0 {
		n, failed = i+1, s.list[i].ticket
	}
	d.drop(n, err)
	return failed
}

// drop removes the n oldest submissions, which ended with err, and releases their resources. The
// caller holds the lock.
func (d *Device) drop(n int, err error) {
	s := d.sent
	for _, f := range s.list[:n] {
		s.seconds -= f.seconds
		for _, p := range f.pipelines {
			if err == nil {
				p.Measured.Store(true)
			}
			d.Pipelines.Release(p)
		}
		s.landed(f.call, err)
		s.recycle(f)
	}
	if s.list = slices.Delete(s.list, 0, n); len(s.list) == 0 {
		s.seconds = 0
		d.Pool.Settled()
	}
}

// recycle keeps f and its slices for another submission. The caller holds the lock.
func (s *sent) recycle(f *flight) {
	clear(f.pipelines)
	*f = flight{pipelines: f.pipelines[:0]}
	s.unused = append(s.unused, f)
}

// learn corrects the pace of the pipeline that the ended submissions have in common. Short
// ones say more about the cost of a submission than about the kernel, and are ignored, as
// are those of which the beginning or the end is not known.
func (s *sent) learn(list []*flight, blocked bool, now time.Time, share float64) {
	from, known := list[0].began, true
	if s.ended.After(from) { // they waited for those before
		from, known = s.ended, s.exact
	}
	s.ended, s.exact = now, blocked
	p, expected := list[0].only(), 0.0
	for _, f := range list {
		if f.only() != p {
			return
		}
		expected += f.seconds
	}
	took := now.Sub(from).Seconds()
	if p == nil || !known || expected <= 0 || max(took, expected) <= share/8 || !blocked && took > expected {
		return
	}
	p.Pace.Measured(took / expected)
}

// only returns the pipeline of all dispatches of f, nil if there are several.
func (f *flight) only() *resource.Pipeline {
	for _, p := range f.pipelines {
		if p != f.pipelines[0] {
			return nil
		}
	}
	return f.pipelines[0]
}

// Idle waits until no submission runs.
func (d *Device) Idle(ctx context.Context) error {
	if t := d.sent.last(); t > 0 {
		return d.await(ctx, t)
	}
	return nil
}

// Wait waits until no submission runs. It returns the first error of a call that had
// returned, unless another call has returned that error.
func (d *Device) Wait(ctx context.Context) error {
	err := d.Idle(ctx)
	if ctx.Err() != nil && err != nil {
		return err
	}
	if failed := d.sent.first(); failed != nil {
		return failed
	}
	return err
}

// Lost returns an error when the device is lost: that of a call which was running, if no
// call has returned it.
func (d *Device) Lost() error {
	err := d.wrap(d.Port.Lost())
	if err == nil {
		return nil
	}
	for t := d.sent.last(); t > 0 && d.fail(t, err) > 0; {
	}
	if failed := d.sent.first(); failed != nil {
		return failed
	}
	return err
}

// reclaim waits for the submissions that use released memory, for a bounded time: a device
// that hangs keeps it. It returns the error of ctx alone.
func (d *Device) reclaim(ctx context.Context) error {
	bounded, cancel := context.WithTimeout(ctx, max(grace, maxAhead*d.pacing.budget))
	defer cancel()
	_ = d.Idle(bounded) // the calls have their errors
	return ctx.Err()
}

// call is a call with submissions that may still run.
type call struct {
	name string
	out  []Output
	of   []*call // calls whose results it uses and that ran when it began
	// left is the number of its submissions that are not known to have ended.
	left     int
	returned bool // all submissions are made, and nobody but calls uses it
	refused  bool // it has returned an error
	failure  *failure
}

// failure is the error of a submission, shared by the calls that use its result.
type failure struct {
	of   *call
	err  error
	told bool // a call has returned it
}

// begin returns a call that writes to out and reads in. It returns the failure of a call
// that wrote to them.
func (s *sent) begin(name string, out []Output, in []*cut.Store) (*call, error) {
	c := &call{name: name, out: out}
	s.mu.Lock()
	defer s.mu.Unlock()
	use := func(x *cut.Store, written bool) error {
		w := s.writers[x]
		switch {
		case w == nil:
		case w.failure == nil:
			if !slices.Contains(c.of, w) {
				c.of = append(c.of, w)
			}
		case !written || !w.failure.told: // results are overwritten once the program knows
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
func (s *sent) end(c *call, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c.returned = true
	if err != nil {
		c.refused = true
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
func (s *sent) clean(c *call) {
	if c.left > 0 {
		return
	}
	c.of = nil
	if c.returned && c.failure == nil {
		for _, x := range c.out {
			if s.writers[x.Store] == c {
				delete(s.writers, x.Store)
			}
		}
	}
}

// landed notes that a submission of c has ended, or failed with err. The caller holds the lock.
func (s *sent) landed(c *call, err error) {
	c.left--
	if err != nil && c.failure == nil {
		c.failure = &failure{of: c, err: err, told: c.refused}
		if !c.refused && len(s.failed) < maxSent {
			s.failed = append(s.failed, c.failure)
		}
	}
	for _, x := range c.of {
		if c.failure == nil {
			c.failure = x.failure
		}
	}
	s.clean(c)
}

// report returns the error of a failure, which the program then knows. The caller holds the
// lock.
func (s *sent) report(x *failure) error {
	x.told = true
	s.failed = slices.DeleteFunc(s.failed, func(y *failure) bool { return y == x })
	return fmt.Errorf("%s: %w", x.of.name, x.err)
}

// result returns the error of the submissions of c that have ended.
func (s *sent) result(c *call) error {
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
		x.told = true
	}
	s.failed = nil
	return err
}
