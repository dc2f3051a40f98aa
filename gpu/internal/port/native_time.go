//go:build cgo && !gogpu && ((linux && amd64 && !android) || (darwin && !ios) || (windows && amd64))

package port

import (
	"encoding/binary"
	"math"
	"time"

	"github.com/gogpu/gputypes"
	"github.com/rajveermalviya/go-webgpu/wgpu"
)

const (
	// timedSlots is the number of timed submissions whose times are kept: those in
	// flight and a few more for callers that ask late.
	timedSlots = 8
	stampBytes = 16 // a slot's two timestamps
	// The clock's unit is measured between two readings, each the narrowest of
	// calibrateTries. They are calibrateTime apart, or longer on a busy machine: until
	// the width of the readings, 50 µs on an idle machine, is below calibrateError of
	// the time between them.
	calibrateTime  = 20 * time.Millisecond
	calibrateMost  = time.Second
	calibrateTries = 5
	calibrateError = 0.005
	// A unit within nanosecond of 1 ns counts as exactly that, the unit of most drivers.
	nanosecond = 0.01
)

// nativeClock is a device's clock: a query set with two timestamps for each slot. The
// first timed submission creates it.
type nativeClock struct {
	there   bool // the adapter has timestamps
	queries *wgpu.QuerySet
	slots   [timedSlots]timedSlot
	next    int
	unit    float64 // nanoseconds a tick
}

// timedSlot holds the timestamps of one submission.
type timedSlot struct {
	first    uint32 // of its two queries
	ticket   Ticket
	resolved *wgpu.Buffer
	staging  rawBuffer
}

// slot returns a slot whose submission has ended, nil when there is none.
func (c *nativeClock) slot(timed bool, ended Ticket) *timedSlot {
	s := &c.slots[c.next]
	if !timed || !c.there || s.ticket > ended {
		return nil
	}
	c.next = (c.next + 1) % timedSlots
	return s
}

func (l *library) took(t Ticket) (time.Duration, bool, error) {
	if t > Ticket(l.state.done) {
		return 0, false, nil
	}
	for i := range l.clock.slots {
		s := &l.clock.slots[i]
		if s.ticket != t || t == 0 {
			continue
		}
		begin, end, err := l.stamps(s)
		if err != nil || end < begin { // the counter wrapped around
			return 0, false, err
		}
		return time.Duration(math.Round(float64(end-begin) * l.clock.unit)), true, nil
	}
	return 0, false, nil
}

// stamps reads a slot's two timestamps, in ticks.
func (l *library) stamps(s *timedSlot) (begin, end uint64, err error) {
	var raw [stampBytes]byte
	err = l.read(s.staging, 0, raw[:])
	return binary.LittleEndian.Uint64(raw[:]), binary.LittleEndian.Uint64(raw[8:]), err
}

// startClock creates the queries, once, and measures the unit of their ticks against the
// host's clock, because the library does not report it.
func (l *library) startClock() (err error) {
	c := &l.clock
	if !c.there || c.unit != 0 {
		return nil
	}
	defer func() {
		if err != nil {
			c.release()
		}
	}()
	if c.queries, err = l.dev.CreateQuerySet(&wgpu.QuerySetDescriptor{Type: wgpu.QueryType_Timestamp, Count: 2 * timedSlots}); err != nil {
		c.queries = nil // the binding has released it
		return l.outcome(err, ErrInvalid)
	}
	for i := range c.slots {
		s := &c.slots[i]
		*s = timedSlot{first: uint32(2 * i)}
		resolved, err := l.createBuffer(stampBytes, gputypes.BufferUsage(wgpu.BufferUsage_QueryResolve|wgpu.BufferUsage_CopySrc))
		if err != nil {
			return err
		}
		s.resolved = resolved.b
		if s.staging, err = l.createBuffer(stampBytes, gputypes.BufferUsageMapRead|gputypes.BufferUsageCopyDst); err != nil {
			return err
		}
	}
	t0, width0, ticks0, err := l.tick()
	if err != nil {
		return err
	}
	var t1 time.Time
	var ticks1 uint64
	for wait := calibrateTime; ; wait *= 2 {
		time.Sleep(wait)
		var width1 time.Duration
		if t1, width1, ticks1, err = l.tick(); err != nil {
			return err
		}
		gap := t1.Sub(t0)
		if gap >= calibrateMost || float64(width0+width1)/2 <= calibrateError*float64(gap) {
			break
		}
	}
	if ticks1 <= ticks0 {
		c.there = false // the clock does not advance
		c.release()
		return nil
	}
	c.unit = float64(t1.Sub(t0).Nanoseconds()) / float64(ticks1-ticks0)
	if math.Abs(c.unit-1) < nanosecond {
		c.unit = 1
	}
	return nil
}

// tick returns a time of the host's clock and the device's ticks at that time. They are
// those of the shortest of some empty submissions; least is its length.
func (l *library) tick() (at time.Time, least time.Duration, ticks uint64, err error) {
	least = math.MaxInt64
	s := &l.clock.slots[0]
	for range calibrateTries {
		before := time.Now()
		t, err := l.submitTo(s)
		if err != nil {
			return at, 0, 0, err
		}
		for start := time.Now(); Ticket(l.state.done) < t; { // pausing would widen the reading
			if _, err := l.poll(); err != nil {
				return at, 0, 0, err
			}
			if time.Since(start) > hangLimit {
				return at, 0, 0, ErrLost
			}
		}
		width := time.Since(before)
		_, end, err := l.stamps(s)
		if err != nil {
			return at, 0, 0, err
		}
		if width < least {
			least, at, ticks = width, before.Add(width/2), end
		}
	}
	return at, least, ticks, nil
}

// release releases the queries and buffers of startClock.
func (c *nativeClock) release() {
	for i := range c.slots {
		for _, b := range []*wgpu.Buffer{c.slots[i].resolved, c.slots[i].staging.b} {
			if b != nil {
				b.Release()
			}
		}
		c.slots[i] = timedSlot{}
	}
	if c.queries != nil {
		c.queries.Release()
		c.queries = nil
	}
	c.unit = 0
}
