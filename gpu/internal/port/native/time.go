package native

/*
#include "native.h"

typedef struct { void const *next; char const *label; int type; uint32_t count; void const *statistics; size_t n; } port_queries_desc;
extern void *wgpuDeviceCreateQuerySet(void *device, void const *desc);
extern void wgpuQuerySetRelease(void *queries);

static void *port_create_queries(uint32_t count, port_state *state) {
	port_queries_desc desc = { .type = 2, .count = count }; // timestamps
	return port_create(wgpuDeviceCreateQuerySet, &desc, state);
}
*/
import "C"

import (
	"math"
	"time"
	"unsafe"

	"github.com/seed90331342/attn/gpu/internal/port"
)

const (
	// The clock's unit is measured between two readings that are calibrateTime apart, each the
	// narrowest of calibrateTries: some 50 µs wide on an idle machine. A unit within nanosecond
	// of 1 ns counts as exactly that, the unit of most drivers.
	calibrateTime  = 50 * time.Millisecond
	calibrateTries = 5
	nanosecond     = 0.05
)

// CreateQueries implements port.Stamper.
func (l *library) CreateQueries(count int) (port.Object, error) {
	defer l.scoped()()
	q := C.port_create_queries(C.uint32_t(count), l.state)
	if err := l.outcome(); err != nil {
		return nil, err
	}
	return q, nil
}

// ReleaseQueries implements port.Stamper.
func (l *library) ReleaseQueries(q port.Object) {
	if !l.unsound() {
		C.wgpuQuerySetRelease(q.(unsafe.Pointer))
	}
}

// TickTime measures the nanoseconds of a tick against the host's clock, because the library does
// not report them.
func (l *library) TickTime() (float64, error) {
	t0, ticks0, err := l.tick()
	if err != nil {
		return 0, err
	}
	time.Sleep(calibrateTime)
	t1, ticks1, err := l.tick()
	if err != nil || ticks1 <= ticks0 { // the clock does not advance
		return 0, err
	}
	unit := float64(t1.Sub(t0).Nanoseconds()) / float64(ticks1-ticks0)
	if math.Abs(unit-1) < nanosecond {
		unit = 1
	}
	return unit, nil
}

// tick returns a time of the host's clock and the device's ticks at that time. They are
// those of the shortest of some empty submissions.
func (l *library) tick() (at time.Time, ticks uint64, err error) {
	least := time.Duration(math.MaxInt64)
	l.clock.Slot = l.clock.First()
	defer func() { l.clock.Slot = nil }()
	for range calibrateTries {
		before := time.Now()
		t, err := l.Submit()
		for ended := port.Ticket(0); err == nil && ended < t; { // pausing would widen the reading
			if ended, err = l.Poll(); time.Since(before) > port.HangLimit {
				err = port.ErrLost
			}
		}
		if err != nil {
			return at, 0, err
		}
		width := time.Since(before)
		_, end, err := l.clock.Stamps(l.clock.Slot)
		if err != nil {
			return at, 0, err
		}
		if width < least {
			least, at, ticks = width, before.Add(width/2), end
		}
	}
	return at, ticks, nil
}
