//go:build js || (cgo && !gogpu && ((linux && amd64 && !android) || (darwin && !ios) || (windows && amd64)))

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
	stampBytes = 16 // a slot's two timestamps
)

// clock is a device's clock: queries for two timestamps of each slot. The first timed
// submission starts it.
type clock struct {
	there    bool    // the device has timestamps
	unit     float64 // nanoseconds a tick, 0 before the start
	queries  rawQueries
	resolved rawBuffer // the timestamps of the last submission that has ended
	slots    [timedSlots]timedSlot
	next     int
	slot     *timedSlot // of the submission that is being recorded
}

// timedSlot holds the timestamps of one submission.
type timedSlot struct {
	first   uint32 // of its two queries
	ticket  Ticket
	staging rawBuffer // a copy of its timestamps that can be mapped
}

// startTimed begins a timed submission: it starts the clock, once, and takes a slot. There is none
// while the submissions of all slots run.
func (l *library) startTimed(ended Ticket) error {
	c := &l.clock
	if c.there && c.unit == 0 {
		if err := l.startClock(); c.unit == 0 {
			l.releaseClock()
			c.there = err != nil // without an error there are no timestamps
			return err
		}
	}
	if s := &c.slots[c.next]; c.there && s.ticket <= ended {
		s.first = uint32(2 * c.next)
		c.slot, c.next = s, (c.next+1)%timedSlots
	}
	return nil
}

// startClock creates the queries and buffers. The unit stays 0 where the device has no timestamps.
func (l *library) startClock() (err error) {
	c := &l.clock
	if c.queries, err = l.createQueries(2 * timedSlots); err != nil {
		return err
	}
	if c.resolved, err = l.createBuffer(stampBytes, gputypes.BufferUsageQueryResolve|gputypes.BufferUsageCopySrc); err != nil {
		return err
	}
	for i := range c.slots {
		if c.slots[i].staging, err = l.createBuffer(stampBytes, gputypes.BufferUsageMapRead|gputypes.BufferUsageCopyDst); err != nil {
			return err
		}
	}
	c.unit, err = l.tickTime()
	return err
}

// releaseClock releases what startClock has created.
func (l *library) releaseClock() {
	c := &l.clock
	for _, s := range c.slots {
		if s.staging != nil {
			l.releaseBuffer(s.staging)
		}
	}
	if c.resolved != nil {
		l.releaseBuffer(c.resolved)
	}
	l.releaseQueries(c.queries)
	*c = clock{there: c.there}
}

// sent ends the recording of a submission, which is t if it was started, else 0.
func (l *library) sent(t Ticket) {
	if c := &l.clock; c.slot != nil {
		c.slot.ticket, c.slot = t, nil
	}
}

// took returns the time of a submission that has ended.
func (l *library) took(t Ticket) (time.Duration, bool, error) {
	c := &l.clock
	i := slices.IndexFunc(c.slots[:], func(s timedSlot) bool { return s.ticket == t })
	if i < 0 || t == 0 {
		return 0, false, nil
	}
	begin, end, err := l.stamps(&c.slots[i])
	if err != nil || end < begin { // the counter wrapped around
		return 0, false, err
	}
	return time.Duration(math.Round(float64(end-begin) * c.unit)), true, nil
}

// stamps reads a slot's two timestamps, in ticks.
func (l *library) stamps(s *timedSlot) (begin, end uint64, err error) {
	var raw [stampBytes]byte
	err = l.read(s.staging, 0, raw[:])
	return binary.LittleEndian.Uint64(raw[:]), binary.LittleEndian.Uint64(raw[8:]), err
}
