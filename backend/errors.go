package backend

import (
	"errors"

	"github.com/seed90331342/attn/backend/internal/limits"
)

// Sentinel errors. Every error of a backend, of package kernels and of the packages below it wraps one of
// them, a context error, or the error of a writer or a function of the program, for [errors.Is]. Its text
// names the argument, the shapes and the rule. Package kernels documents each of them.
var (
	ErrShape       = errors.New("shapes do not match")
	ErrDType       = errors.New("element type not accepted")
	ErrOption      = errors.New("option out of range")
	ErrDevice      = errors.New("tensor is on another device")
	ErrReleased    = errors.New("tensor was released")
	ErrOverlap     = errors.New("output overlaps")
	ErrUnsupported = errors.New("not supported")
	ErrNoBackend   = errors.New("no such backend")
	ErrNoDevice    = errors.New("no usable device")
	ErrDeviceLost  = errors.New("device lost")
	ErrMemory      = limits.ErrMemory
	ErrInternal    = errors.New("internal error")
	ErrCallback    = errors.New("a function of the program failed")
	ErrFile        = errors.New("file cannot be used")
	ErrClosed      = errors.New("backend is closed")
)
