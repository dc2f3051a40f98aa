package backend

import "errors"

// Sentinel errors. Every error of this module wraps one of them, or a context
// error, so that callers can decide with [errors.Is]; the text around it names
// the argument, the shapes and the rule that was broken.
var (
	// ErrShape reports shapes that do not fit each other or the operation.
	ErrShape = errors.New("shapes do not fit")
	// ErrDType reports an element type that the operation does not take there.
	ErrDType = errors.New("element type not taken here")
	// ErrOption reports an option outside its range: a NaN scale, a negative
	// window, a key length beyond the keys.
	ErrOption = errors.New("option out of range")
	// ErrDevice reports a tensor whose memory belongs to another backend, or
	// to none.
	ErrDevice = errors.New("tensor lives elsewhere")
	// ErrReleased reports a tensor used after its memory was released.
	ErrReleased = errors.New("tensor was released")
	// ErrOverlap reports an output that shares memory with an input, with
	// another output or with itself.
	ErrOverlap = errors.New("output overlaps")
	// ErrUnsupported reports a valid request that this backend does not do.
	ErrUnsupported = errors.New("not supported by this backend")
	// ErrNoBackend reports a name that no registered backend answers to.
	ErrNoBackend = errors.New("no such backend")
	// ErrNoDevice reports a backend without a usable device: no driver, no
	// adapter.
	ErrNoDevice = errors.New("no usable device")
	// ErrDeviceLost reports a device that went away during or before the call.
	// Everything on it is gone; open the backend again.
	ErrDeviceLost = errors.New("device lost")
	// ErrMemory reports memory that the device or the host could not give.
	ErrMemory = errors.New("out of memory")
	// ErrCapacity reports a cache that has no room for what is appended.
	ErrCapacity = errors.New("no room in the cache")
	// ErrFile reports a file that is damaged, or does not hold what is read from it.
	ErrFile = errors.New("file cannot be used")
	// ErrClosed reports a backend used after Close.
	ErrClosed = errors.New("backend is closed")
)
