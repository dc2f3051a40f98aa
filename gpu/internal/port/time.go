package port

import (
	"encoding/binary"
	"math"
	"slices"
	"time"
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
	there bool    // the device has timestamps
	unit  float64 // nanoseconds a tick, 0 before the start
	slots [timedSlots]timedSlot
	next  int
	rawClock
}

// timedSlot holds the timestamps of one submission.
type timedSlot struct {
	first  uint32 // of its two queries
	ticket Ticket
	rawStamps
}

// slot returns a slot whose submission has ended, nil when there is none.
func (c *clock) slot(timed bool, ended Ticket) *timedSlot {
	s := &c.slots[c.next]
	if !timed || !c.there || s.ticket > ended {
		return nil
	}
	c.next = (c.next + 1) % timedSlots
	return s
}

func (l *library) took(t Ticket) (time.Duration, bool, error) {
	i := slices.IndexFunc(l.clock.slots[:], func(s timedSlot) bool { return s.ticket == t })
	if i < 0 || t == 0 || t > l.endedTicket() {
		return 0, false, nil
	}
	begin, end, err := l.stamps(&l.clock.slots[i])
	if err != nil || end < begin { // the counter wrapped around
		return 0, false, err
	}
	return time.Duration(math.Round(float64(end-begin) * l.clock.unit)), true, nil
}

// stamps reads a slot's two timestamps, in ticks.
func (l *library) stamps(s *timedSlot) (begin, end uint64, err error) {
	var raw [stampBytes]byte
	err = l.readStamps(s, raw[:])
	return binary.LittleEndian.Uint64(raw[:]), binary.LittleEndian.Uint64(raw[8:]), err
}
