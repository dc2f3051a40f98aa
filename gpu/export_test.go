package gpu

import "github.com/seed90331342/attn/gpu/internal/port"

// Port returns the device of b.
func Port(b *Backend) port.Device { return b.dev.Port }
