package gpu

import (
	"context"
	"sync"

	"github.com/seed90331342/attn/gpu/internal/port"
)

const (
	// slotCount is how many submissions a device has at a time, of all calls
	// together: two calls that go on side by side, or four short ones.
	slotCount = 2 * maxFlight
	// slotBytes holds the parameters of some 50 dispatches of the largest kernel,
	// 1.2 KiB each at an alignment of 256 bytes.
	slotBytes = 64 << 10
)

// slots are the uniform buffers of a device, made once: a submission has one to
// itself until it has ended. The one that was given back last goes out first, so
// that calls which follow one another find their bind groups again.
type slots struct {
	size uint64        // of each, bytes
	turn chan struct{} // holds one for each that is free

	mu   sync.Mutex
	free []port.Buffer
}

func (b *Backend) newSlots() error {
	b.slots.size = min(slotBytes, b.limits.MaxBufferSize&^15)
	b.slots.turn = make(chan struct{}, slotCount)
	for range slotCount {
		buf, err := b.dev.CreateBuffer(b.slots.size, uniformUsage)
		if err != nil {
			return translate(b.info.Name, err)
		}
		b.slots.give(buf)
	}
	return nil
}

// try returns a free one, nil when there is none.
func (s *slots) try() port.Buffer {
	select {
	case <-s.turn:
		return s.pop()
	default:
		return nil
	}
}

// wait returns a free one as soon as there is one, or the context's error.
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

// give puts one back, which is not nil.
func (s *slots) give(buf port.Buffer) {
	s.mu.Lock()
	s.free = append(s.free, buf)
	s.mu.Unlock()
	s.turn <- struct{}{}
}
