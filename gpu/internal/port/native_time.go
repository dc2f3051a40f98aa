//go:build cgo && !gogpu && ((linux && amd64 && !android) || (darwin && !ios) || (windows && amd64))

package port

/*
#include "native.h"

typedef struct { void const *next; char const *label; int type; uint32_t count; void const *statistics; size_t n; } port_queries_desc;
extern void *wgpuDeviceCreateQuerySet(void *device, port_queries_desc const *desc);
extern void wgpuQuerySetRelease(void *queries);

static void *port_create_queries(uint32_t count, port_state *state) {
	port_queries_desc desc = { .type = 2, .count = count }; // timestamps
	port_enter(state);
	void *queries = wgpuDeviceCreateQuerySet(state->device, &desc);
	port_leave(state);
	return queries;
}
*/
import "C"

import (
	"math"
	"time"
	"unsafe"

	"github.com/gogpu/gputypes"
)

const (
	// The clock's unit is measured between two readings that are calibrateTime apart, each the
	// narrowest of calibrateTries: some 50 µs wide on an idle machine. A unit within nanosecond
	// of 1 ns counts as exactly that, the unit of most drivers.
	calibrateTime  = 50 * time.Millisecond
	calibrateTries = 5
	nanosecond     = 0.05
)

// rawClock has two timestamps for each slot.
type rawClock struct{ queries unsafe.Pointer }

// rawStamps is where the timestamps of a slot are resolved, and copied for reading.
type rawStamps struct {
	resolved, staging rawBuffer
}

func (l *library) readStamps(s *timedSlot, dst []byte) error { return l.read(s.staging, 0, dst) }

// startClock creates the queries and buffers, and measures the unit of their ticks against the
// host's clock, because the library does not report it.
func (l *library) startClock() (err error) {
	c := &l.clock
	unlock := l.scoped()
	c.queries = C.port_create_queries(2*timedSlots, l.state)
	unlock()
	if err := l.outcome(); err != nil {
		return err
	}
	for i := range c.slots {
		s := &c.slots[i]
		if s.resolved, err = l.createBuffer(stampBytes, gputypes.BufferUsageQueryResolve|gputypes.BufferUsageCopySrc); err != nil {
			return err
		}
		if s.staging, err = l.createBuffer(stampBytes, gputypes.BufferUsageMapRead|gputypes.BufferUsageCopyDst); err != nil {
			return err
		}
	}
	t0, ticks0, err := l.tick()
	if err != nil {
		return err
	}
	time.Sleep(calibrateTime)
	t1, ticks1, err := l.tick()
	if err != nil || ticks1 <= ticks0 { // the clock does not advance
		return err
	}
	c.unit = float64(t1.Sub(t0).Nanoseconds()) / float64(ticks1-ticks0)
	if math.Abs(c.unit-1) < nanosecond {
		c.unit = 1
	}
	return nil
}

// tick returns a time of the host's clock and the device's ticks at that time. They are
// those of the shortest of some empty submissions.
func (l *library) tick() (at time.Time, ticks uint64, err error) {
	least := time.Duration(math.MaxInt64)
	s := &l.clock.slots[0]
	l.clock.slot = s
	defer func() { l.clock.slot = nil }()
	for range calibrateTries {
		before := time.Now()
		t, err := l.submit()
		for ended := Ticket(0); err == nil && ended < t; { // pausing would widen the reading
			if ended, err = l.poll(); time.Since(before) > hangLimit {
				err = ErrLost
			}
		}
		if err != nil {
			return at, 0, err
		}
		width := time.Since(before)
		_, end, err := l.stamps(s)
		if err != nil {
			return at, 0, err
		}
		if width < least {
			least, at, ticks = width, before.Add(width/2), end
		}
	}
	return at, ticks, nil
}

// releaseClock releases the queries and buffers of startClock.
func (l *library) releaseClock() {
	c := &l.clock
	for i := range c.slots {
		for _, b := range []rawBuffer{c.slots[i].resolved, c.slots[i].staging} {
			if b != nil {
				C.wgpuBufferRelease(b)
			}
		}
		c.slots[i] = timedSlot{}
	}
	if c.queries != nil {
		C.wgpuQuerySetRelease(c.queries)
		c.queries = nil
	}
}
