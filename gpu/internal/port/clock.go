package port

import (
	"encoding/binary"
	"math"
	"slices"
	"time"

	"github.com/gogpu/gputypes"
)

const (
	// timedSlots is the number of timed submissions whose times are kept: those in
	// flight and a few more for callers that ask late.
	timedSlots = 8
	// StampBytes is the size of two timestamps.
	StampBytes = 16
)

// A tick is measured between two readings that are calibrateTime apart, each the narrowest of calibrateTries: some 50
// µs wide on an idle machine. A tick within nanosecond of 1 ns counts as exactly that, the one of most drivers.
const (
	calibrateTime  = 50 * time.Millisecond
	calibrateTries = 5
	nanosecond     = 0.05
)

// Stamps receive the timestamps before and after one submission.
type Stamps struct {
	// Queries First and First + 1 get the timestamps. They are resolved to a buffer, and copied
	// from there to a mappable one.
	Queries           Object
	First             uint32
	Resolved, Staging Object
	ticket            Ticket
}

// Stamper is a library with timestamps.
type Stamper interface {
	Library
	CreateQueries(count int) (Object, error)
	ReleaseQueries(q Object)
}

// clock is a device's clock. The first timed submission starts it. A nil clock has no times.
type clock struct {
	lib   Stamper
	tick  float64 // nanoseconds, 0 before it is measured
	none  bool    // the device has no timestamps after all
	slots [timedSlots]Stamps
	next  int
}

// start begins a timed submission: it starts the clock, once, and returns a slot, nil while the
// submissions of all slots run.
func (c *clock) start(ended Ticket) (*Stamps, error) {
	if c == nil || c.none {
		return nil, nil
	}
	if c.slots[0].Queries == nil {
		if err := c.create(); err != nil || c.tick == 0 {
			c.release()
			c.none = err == nil
			return nil, err
		}
	}
	s := &c.slots[c.next]
	if s.ticket > ended {
		return nil, nil
	}
	c.next = (c.next + 1) % timedSlots
	return s, nil
}

// create creates the queries and buffers and measures the tick, which stays 0 where the clock stands.
func (c *clock) create() error {
	queries, err := c.lib.CreateQueries(2 * timedSlots)
	if err != nil {
		return err
	}
	c.slots[0].Queries = queries
	resolved, err := c.lib.CreateBuffer(StampBytes, gputypes.BufferUsageQueryResolve|gputypes.BufferUsageCopySrc)
	if err != nil {
		return err
	}
	for i := range c.slots {
		c.slots[i] = Stamps{Queries: queries, Resolved: resolved, First: uint32(2 * i)}
		if c.slots[i].Staging, err = c.lib.CreateBuffer(StampBytes, gputypes.BufferUsageMapRead|gputypes.BufferUsageCopyDst); err != nil {
			return err
		}
	}
	if c.tick == 0 {
		c.tick, err = c.measure()
	}
	return err
}

// release releases what the clock has created.
func (c *clock) release() {
	if c == nil {
		return
	}
	for _, s := range c.slots {
		if s.Staging != nil {
			c.lib.ReleaseBuffer(s.Staging)
		}
	}
	if s := c.slots[0]; s.Resolved != nil {
		c.lib.ReleaseBuffer(s.Resolved)
	}
	if s := c.slots[0]; s.Queries != nil {
		c.lib.ReleaseQueries(s.Queries)
	}
	c.slots = [timedSlots]Stamps{}
}

// took returns the time of a submission that has ended.
func (c *clock) took(t Ticket) (time.Duration, bool, error) {
	if c == nil || t == 0 {
		return 0, false, nil
	}
	i := slices.IndexFunc(c.slots[:], func(s Stamps) bool { return s.ticket == t })
	if i < 0 {
		return 0, false, nil
	}
	begin, end, err := c.read(&c.slots[i])
	if err != nil || end < begin { // the counter wrapped around
		return 0, false, err
	}
	return time.Duration(math.Round(float64(end-begin) * c.tick)), true, nil
}

// read reads two timestamps, in ticks.
func (c *clock) read(s *Stamps) (begin, end uint64, err error) {
	var raw [StampBytes]byte
	err = read(c.lib, s.Staging, 0, raw[:])
	return binary.LittleEndian.Uint64(raw[:]), binary.LittleEndian.Uint64(raw[8:]), err
}

// measure measures the nanoseconds of a tick against the host's clock.
func (c *clock) measure() (float64, error) {
	t0, ticks0, err := c.now()
	if err != nil {
		return 0, err
	}
	time.Sleep(calibrateTime)
	t1, ticks1, err := c.now()
	if err != nil || ticks1 <= ticks0 { // the clock does not advance
		return 0, err
	}
	tick := float64(t1.Sub(t0).Nanoseconds()) / float64(ticks1-ticks0)
	if math.Abs(tick-1) < nanosecond {
		tick = 1
	}
	return tick, nil
}

// now returns a time of the host's clock and the device's ticks at that time. They are
// those of the shortest of some empty submissions.
func (c *clock) now() (at time.Time, ticks uint64, err error) {
	least := time.Duration(math.MaxInt64)
	for range calibrateTries {
		before := time.Now()
		t, err := c.lib.Submit(nil, &c.slots[0])
		for ended := Ticket(0); err == nil && ended < t; { // pausing would widen the reading
			if ended, err = c.lib.Poll(); time.Since(before) > HangLimit {
				err = ErrLost
			}
		}
		if err != nil {
			return at, 0, err
		}
		width := time.Since(before)
		_, end, err := c.read(&c.slots[0])
		if err != nil {
			return at, 0, err
		}
		if width < least {
			least, at, ticks = width, before.Add(width/2), end
		}
	}
	return at, ticks, nil
}
