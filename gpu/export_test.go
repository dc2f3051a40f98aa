package gpu

import "github.com/seed90331342/attn/gpu/internal/port"

// Port returns the device of b.
func Port(b *Backend) port.Device { return b.dev.Port }

var Check = check // for package gpu_test

// OpenProgram opens a device as a program does. The tests in package gpu_test set it.
var OpenProgram func() (*Shared, error)
