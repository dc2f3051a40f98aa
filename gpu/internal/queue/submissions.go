package queue

import (
	"context"
	"errors"
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

// sent holds the submissions of all calls that are not known to have ended. Calls return when their last submission is
// made. A call that waits, for a tensor or for room, also notes what has ended.
//
// Buffers that a call or tensor releases are used again at once: the device runs submissions and writes in their order.
type sent struct {
	submitting chan struct{} // holds an element while a submission is made: tickets have the order of list

	mu      sync.Mutex
	list    []*submission // oldest first
	unused  []*submission
	ring    ring
	seconds float64 // expected, of list
	due     time.Time
	// When the last submissions were found to have ended, and whether they were waited for at that time.
	ended time.Time
	exact bool

	// writers are the calls that wrote to a tensor last, if they run or failed.
	writers map[*cut.Store]*inFlight
	failed  []*failure // that no call has returned
}

// submission is a submission that may still run.
type submission struct {
	ticket    port.Ticket
	call      *inFlight
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

// room returns a submission with room for so many bytes of parameters. The caller holds submitting.
func (d *Device) room(ctx context.Context, bytes uint64, seconds float64) (*submission, error) {
	s := d.sent
	deadline, waits := ctx.Deadline()
	waits = waits && d.pacing.blocks
	for {
		s.mu.Lock()
		at, ok := s.ring.find(bytes, s.list)
		ok = ok && (len(s.list) == 0 || len(s.list) < maxSent && s.seconds+seconds <= d.pacing.ahead(deadline) && !(waits && s.unmeasured()))
		if ok {
			var f *submission
			if n := len(s.unused); n > 0 {
				f, s.unused = s.unused[n-1], s.unused[:n-1]
			} else {
				f = new(submission)
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

// noteStart notes that f was submitted. The caller holds submitting.
func (s *sent) noteStart(f *submission) {
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
	if n := slices.IndexFunc(s.list, func(f *submission) bool { return f.ticket > t }); n >= 0 {
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
	if i := slices.IndexFunc(s.list[:n], func(f *submission) bool { return !f.call.returnedError }); i >= 0 {
		n, failed = i+1, s.list[i].ticket
	}
	d.drop(n, err)
	return failed
}

// drop removes the n oldest submissions, which ended with err, and releases their resources. The caller holds the lock.
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
		s.noteEnd(f.call, err)
		s.recycle(f)
	}
	if s.list = slices.Delete(s.list, 0, n); len(s.list) == 0 {
		s.seconds = 0
		d.Pool.Settled()
	}
}

// recycle keeps f and its slices for another submission. The caller holds the lock.
func (s *sent) recycle(f *submission) {
	clear(f.pipelines)
	*f = submission{pipelines: f.pipelines[:0]}
	s.unused = append(s.unused, f)
}

// learn corrects the pace of the pipeline that the ended submissions have in common. Short ones say more about the cost
// of a submission than about the kernel, and are ignored, as are those of which the beginning or the end is not known.
func (s *sent) learn(list []*submission, blocked bool, now time.Time, share float64) {
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
func (f *submission) only() *resource.Pipeline {
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

// reclaim waits for the submissions that use released memory, for a bounded time: a device
// that hangs keeps it. It returns the error of ctx alone.
func (d *Device) reclaim(ctx context.Context) error {
	bounded, cancel := context.WithTimeout(ctx, max(grace, maxAhead*d.pacing.budget))
	defer cancel()
	_ = d.Idle(bounded) // the calls have their errors
	return ctx.Err()
}
