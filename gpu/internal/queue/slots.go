package queue

import (
	"context"
	"sync"

	"github.com/seed90331342/attn/gpu/internal/port"
)

const (
	// slotCount is the number of submissions of all calls on a device at a time: those
	// of two long calls.
	slotCount = 2 * MaxFlight
	// slotBytes holds the parameters of some 50 dispatches of the largest kernel, 1.2 KiB
	// each at an alignment of 256 bytes.
	slotBytes = 64 << 10
)

// slots are the uniform buffers of a device. A submission has one to itself until it
// ends. The slot returned last is used first, so that consecutive calls find their bind
// groups again.
type slots struct {
	size  uint64        // of each, in bytes
	align int           // of parameters in them
	turn  chan struct{} // holds one element for each free slot

	mu   sync.Mutex
	free []port.Buffer
}

func newSlots(dev port.Device) (*slots, error) {
	l := dev.Limits()
	s := &slots{
		size: min(slotBytes, l.MaxBufferSize&^15), align: max(int(l.MinUniformBufferOffsetAlignment), 16),
		turn: make(chan struct{}, slotCount),
	}
	for range slotCount {
		buf, err := dev.CreateBuffer(s.size, UniformUsage)
		if err != nil {
			return nil, err
		}
		s.give(buf)
	}
	return s, nil
}

// try returns a free slot, nil when there is none.
func (s *slots) try() port.Buffer {
	select {
	case <-s.turn:
		return s.pop()
	default:
		return nil
	}
}

// wait waits for a free slot. It returns the context's error.
func (s *slots) wait(ctx context.Context) (port.Buffer, error) {
	select {
	case <-s.turn:
		return s.pop(), nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (s *slots) pop() port.Buffer {
	s.mu.Lock()
	defer s.mu.Unlock()
	last := len(s.free) - 1
	buf := s.free[last]
	s.free = s.free[:last]
	return buf
}

// give returns a slot.
func (s *slots) give(buf port.Buffer) {
	s.mu.Lock()
	s.free = append(s.free, buf)
	s.mu.Unlock()
	s.turn <- struct{}{}
}
