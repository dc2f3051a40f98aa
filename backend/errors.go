package backend

import (
	"errors"
)

// Sentinel errors. Every error of this module wraps one of them or a context error, for
// [errors.Is]. The text of the error names the argument, the shapes and the violated rule.
var (
	// ErrShape reports shapes that do not match each other or the operation.
	ErrShape = errors.New("shapes do not match")
	// ErrDType reports an element type that the operation does not accept.
	ErrDType = errors.New("element type not accepted")
	// ErrOption reports an option outside its range, such as a NaN scale, a negative
	// window or a KLen greater than Sk.
	ErrOption = errors.New("option out of range")
	// ErrDevice reports a tensor whose memory belongs to another backend or to none.
	ErrDevice = errors.New("tensor is on another device")
	// ErrReleased reports a tensor used after its memory was released.
	ErrReleased = errors.New("tensor was released")
	// ErrOverlap reports an output that shares memory with an input, another output or
	// itself.
	ErrOverlap = errors.New("output overlaps")
	// ErrUnsupported reports a valid request that the backend does not support.
	ErrUnsupported = errors.New("not supported")
	// ErrNoBackend reports the name of a backend that is not registered.
	ErrNoBackend = errors.New("no such backend")
	// ErrNoDevice reports a backend without a usable device: no driver, no adapter.
	ErrNoDevice = errors.New("no usable device")
	// ErrDeviceLost reports a device that was lost before or during the call, with all
	// its memory. Open the backend again.
	ErrDeviceLost = errors.New("device lost")
	// ErrMemory reports that the device or the host has not enough memory, or that a limit
	// of the process leaves too little: ulimit, a control group or GOMEMLIMIT.
	ErrMemory = errors.New("out of memory")
	// ErrCapacity reports a cache that is full.
	ErrCapacity = errors.New("cache is full")
	// ErrVerify reports a result that differs from float64 by more than the error bound of
	// its arithmetic: a defect of the device, its driver or its memory.
	ErrVerify = errors.New("result is wrong")
	// ErrInternal reports a defect of this module: a panic while a call was computed. The text
	// contains the stack; please report it. Other calls and the backend are not affected.
	ErrInternal = errors.New("internal error")
	// ErrFile reports a file that is damaged or has other contents than expected.
	ErrFile = errors.New("file cannot be used")
	// ErrClosed reports a backend used after Close.
	ErrClosed = errors.New("backend is closed")
)
