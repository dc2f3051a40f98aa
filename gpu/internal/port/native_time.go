//go:build cgo && !gogpu && ((linux && amd64 && !android) || (darwin && !ios) || (windows && amd64))

package port

import (
	"encoding/binary"
	"math"
	"time"

	"github.com/rajveermalviya/go-webgpu/wgpu"
)

const (
	// timedSlots is how many timed submissions are remembered: those in flight
	// and a few for callers that look late.
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
	// nanosecond is how far the unit may be off 1 ns, as measured, to count as
	// exactly that, which most drivers tick in.
	nanosecond = 0.01
)

// nativeClock is a device's clock: a query set with two timestamps for each slot.
// It is made when it is asked for first, under the device's lock.
type nativeClock struct {
	there   bool // the adapter has timestamps
	queries *wgpu.QuerySet
	slots   [timedSlots]timedSlot
	next    int
	unit    float64 // nanoseconds a tick
}

// timedSlot is what one timed submission writes.
type timedSlot struct {
	first             uint32 // of its two queries
	ticket            Ticket
	resolved, staging *wgpu.Buffer
}

func (d *nativeDevice) SubmitTimed(commands []Command) (Ticket, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.usable(); err != nil {
		return 0, err
	}
	if d.clock.there && d.clock.unit == 0 {
		if err := d.startClock(); err != nil {
			return 0, err
		}
	}
	if !d.clock.there {
		return d.submit(commands, nil)
	}
	slot := &d.clock.slots[d.clock.next]
	if uint64(slot.ticket) > d.ended() {
		return d.submit(commands, nil) // more in flight than there are slots
	}
	d.clock.next = (d.clock.next + 1) % timedSlots
	t, err := d.submit(commands, slot)
	slot.ticket = t
	return t, err
}

func (d *nativeDevice) Took(t Ticket) (time.Duration, bool, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.usable(); err != nil {
		return 0, false, err
	}
	if uint64(t) > d.ended() {
		return 0, false, nil
	}
	for i := range d.clock.slots {
		s := &d.clock.slots[i]
		if s.ticket != t || t == 0 {
			continue
		}
		begin, end, err := d.stamps(s)
		if err != nil || end < begin { // the counter went round
			return 0, false, err
		}
		return time.Duration(math.Round(float64(end-begin) * d.clock.unit)), true, nil
	}
	return 0, false, nil
}

// stamps reads a slot's two timestamps, in ticks.
func (d *nativeDevice) stamps(s *timedSlot) (begin, end uint64, err error) {
	var raw [stampBytes]byte
	err = d.read(s.staging, 0, raw[:])
	return binary.LittleEndian.Uint64(raw[:]), binary.LittleEndian.Uint64(raw[8:]), err
}

// startClock makes the queries and measures the unit of their ticks against the
// clock on the wall, as the library does not tell it.
func (d *nativeDevice) startClock() (err error) {
	c := &d.clock
	defer func() {
		if err != nil {
			c.release()
		}
	}()
	if c.queries, err = d.dev.CreateQuerySet(&wgpu.QuerySetDescriptor{Type: wgpu.QueryType_Timestamp, Count: 2 * timedSlots}); err != nil {
		c.queries = nil // what comes beside an error is released already
		return d.outcome(err, ErrInvalid)
	}
	for i := range c.slots {
		s := &c.slots[i]
		*s = timedSlot{first: uint32(2 * i)}
		for _, b := range []struct {
			to    **wgpu.Buffer
			usage wgpu.BufferUsage
		}{
			{&s.resolved, wgpu.BufferUsage_QueryResolve | wgpu.BufferUsage_CopySrc},
			{&s.staging, wgpu.BufferUsage_MapRead | wgpu.BufferUsage_CopyDst},
		} {
			if *b.to, err = d.dev.CreateBuffer(&wgpu.BufferDescriptor{Size: stampBytes, Usage: b.usage}); err != nil {
				return d.outcome(err, ErrMemory)
			}
		}
	}
	t0, width0, ticks0, err := d.tick()
	if err != nil {
		return err
	}
	var t1 time.Time
	var ticks1 uint64
	for wait := calibrateTime; ; wait *= 2 {
		time.Sleep(wait)
		var width1 time.Duration
		if t1, width1, ticks1, err = d.tick(); err != nil {
			return err
		}
		gap := t1.Sub(t0)
		if gap >= calibrateMost || float64(width0+width1)/2 <= calibrateError*float64(gap) {
			break
		}
	}
	if ticks1 <= ticks0 {
		c.there = false // a clock that stands still
		c.release()
		return nil
	}
	c.unit = float64(t1.Sub(t0).Nanoseconds()) / float64(ticks1-ticks0)
	if math.Abs(c.unit-1) < nanosecond {
		c.unit = 1
	}
	return nil
}

// tick returns a time on the wall and the device's ticks at that time: the middle of
// the narrowest of some empty submissions, and how wide that one was.
func (d *nativeDevice) tick() (at time.Time, least time.Duration, ticks uint64, err error) {
	least = math.MaxInt64
	s := &d.clock.slots[0]
	for range calibrateTries {
		before := time.Now()
		if s.ticket, err = d.submit(nil, s); err != nil {
			return at, 0, 0, err
		}
		for start := time.Now(); d.ended() < uint64(s.ticket); {
			if err := d.usable(); err != nil {
				return at, 0, 0, err
			}
			if time.Since(start) > stallLimit {
				d.state.lost = 1
				return at, 0, 0, ErrLost
			}
			d.dev.Poll(false, nil) // without sleeping, which would widen the look
		}
		width := time.Since(before)
		_, end, err := d.stamps(s)
		if err != nil {
			return at, 0, 0, err
		}
		if width < least {
			least, at, ticks = width, before.Add(width/2), end
		}
	}
	return at, least, ticks, nil
}

// release gives back what startClock made.
func (c *nativeClock) release() {
	for i := range c.slots {
		s := &c.slots[i]
		for _, b := range []*wgpu.Buffer{s.resolved, s.staging} {
			if b != nil {
				b.Release()
			}
		}
		*s = timedSlot{}
	}
	if c.queries != nil {
		c.queries.Release()
		c.queries = nil
	}
	c.unit = 0
}
