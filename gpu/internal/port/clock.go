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
	// StampBytes is the size of a slot's two timestamps.
	StampBytes = 16
)

// Clock is a device's clock: queries for two timestamps of each slot. The first timed submission
// starts it. A nil Clock has no times.
type Clock struct {
	lib  Stamper
	none bool    // the device has no timestamps after all
	unit float64 // nanoseconds a tick, 0 before the start
	// Queries are those of all slots. Resolved gets the timestamps of a submission.
	Queries, Resolved Object
	slots             [timedSlots]Slot
	next              int
	// Slot is that of the submission that is being recorded, nil if it is not timed.
	Slot *Slot
}

// Slot holds the timestamps of one submission.
type Slot struct {
	First   uint32 // of its two queries
	Staging Object // a copy of its timestamps that can be mapped
	ticket  Ticket
}

// Stamper is a library with timestamps.
type Stamper interface {
	Library
	CreateQueries(count int) (Object, error)
	ReleaseQueries(q Object)
	// TickTime returns the nanoseconds of a tick, 0 when the clock stands.
	TickTime() (float64, error)
}

// First returns the slot with which a library measures the unit.
func (c *Clock) First() *Slot { return &c.slots[0] }

// NewClock returns the clock of a library's device.
func NewClock(lib Stamper) *Clock { return &Clock{lib: lib} }

// start begins a timed submission: it starts the clock, once, and takes a slot. There is none
// while the submissions of all slots run.
func (c *Clock) start(ended Ticket) error {
	if c == nil || c.none {
		return nil
	}
	if c.unit == 0 {
		if err := c.create(); c.unit == 0 {
			c.Release()
			c.none = err == nil
			return err
		}
	}
	if s := &c.slots[c.next]; s.ticket <= ended {
		s.First = uint32(2 * c.next)
		c.Slot, c.next = s, (c.next+1)%timedSlots
	}
	return nil
}

// create creates the queries and buffers. The unit stays 0 where the clock stands.
func (c *Clock) create() (err error) {
	if c.Queries, err = c.lib.CreateQueries(2 * timedSlots); err != nil {
		return err
	}
	if c.Resolved, err = c.lib.CreateBuffer(StampBytes, gputypes.BufferUsageQueryResolve|gputypes.BufferUsageCopySrc); err != nil {
		return err
	}
	for i := range c.slots {
		if c.slots[i].Staging, err = c.lib.CreateBuffer(StampBytes, gputypes.BufferUsageMapRead|gputypes.BufferUsageCopyDst); err != nil {
			return err
		}
	}
	c.unit, err = c.lib.TickTime()
	return err
}

// Release releases what the clock has created.
func (c *Clock) Release() {
	if c == nil {
		return
	}
	for _, s := range c.slots {
		if s.Staging != nil {
			c.lib.ReleaseBuffer(s.Staging)
		}
	}
	if c.Resolved != nil {
		c.lib.ReleaseBuffer(c.Resolved)
	}
	if c.Queries != nil {
		c.lib.ReleaseQueries(c.Queries)
	}
	*c = Clock{lib: c.lib}
}

// sent ends the recording of a submission, which is t if it was started, else 0.
func (c *Clock) sent(t Ticket) {
	if c != nil && c.Slot != nil {
		c.Slot.ticket, c.Slot = t, nil
	}
}

// took returns the time of a submission that has ended.
func (c *Clock) took(t Ticket) (time.Duration, bool, error) {
	if c == nil || t == 0 {
		return 0, false, nil
	}
	i := slices.IndexFunc(c.slots[:], func(s Slot) bool { return s.ticket == t })
	if i < 0 {
		return 0, false, nil
	}
	begin, end, err := c.Stamps(&c.slots[i])
	if err != nil || end < begin { // the counter wrapped around
		return 0, false, err
	}
	return time.Duration(math.Round(float64(end-begin) * c.unit)), true, nil
}

// Stamps reads a slot's two timestamps, in ticks.
func (c *Clock) Stamps(s *Slot) (begin, end uint64, err error) {
	var raw [StampBytes]byte
	err = c.lib.Read(s.Staging, 0, raw[:])
	return binary.LittleEndian.Uint64(raw[:]), binary.LittleEndian.Uint64(raw[8:]), err
}
