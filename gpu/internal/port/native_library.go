//go:build cgo && !gogpu && ((linux && amd64 && !android) || (darwin && !ios) || (windows && amd64))

package port

import (
	"fmt"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/rajveermalviya/go-webgpu/wgpu"
)

// library is a device of wgpu-native. ref and Ref fields are the C objects.
type library struct {
	dev              *wgpu.Device
	queue            *wgpu.Queue
	devRef, queueRef unsafe.Pointer
	state            *portState
	scopes           sync.Mutex  // see scoped
	broken           atomic.Bool // a compilation panicked, see unsound
	submitted        uint64
	encoder          nativeEncoder
	clock            clock
}

type rawBuffer struct{ ref unsafe.Pointer }

type rawGroup = unsafe.Pointer

// dynamicStep is the unit of the offset that a dispatch sets for a pipeline's first uniform.
// The rest of the offset is part of the bind group.
const dynamicStep = 1

func (l *library) lost() error {
	if l.state.lost == 0 {
		return nil
	}
	return lossOf(l.state)
}

// Error types of webgpu.h.
const (
	errorOutOfMemory = 2
	errorDeviceLost  = 5
)

// outcome returns the error that callbacks have noted since the last call.
func (l *library) outcome() error { return outcome(l.state, ErrInvalid) }

// outcome returns the error that callbacks have noted in s since the last call. kind is the
// sentinel of all but lost devices and lack of memory.
func outcome(s *portState, kind error) error {
	noted := s.error
	s.error = 0
	switch {
	case s.lost != 0 || noted == errorDeviceLost:
		s.lost = 1
		return lossOf(s)
	case noted == 0:
		return nil
	case noted == errorOutOfMemory:
		kind = ErrMemory
	}
	return fault(message(s), kind)
}

func lossOf(s *portState) error { return fmt.Errorf("%s: %w", message(s), ErrLost) }

// poll runs the callbacks that are due and returns the last submission that has ended.
func (l *library) poll() (Ticket, error) {
	l.update()
	return Ticket(l.state.done), l.outcome()
}

// mapped reports whether the map of startMap has ended.
func (l *library) mapped() (bool, error) {
	if l.state.mapped == 0 {
		l.update()
	}
	if err := l.outcome(); err != nil {
		return false, err
	}
	if s := l.state.mapped - 1; s > 0 {
		return false, fmt.Errorf("map ended with status %d: %w", s, ErrInvalid)
	}
	return l.state.mapped != 0, nil
}
