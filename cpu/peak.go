package cpu

import (
	"context"
	"fmt"

	"github.com/seed90331342/attn/cpu/internal/peak"
)

// PeakFLOPS implements backend.PeakMeter: the best of five measurements of 8
// milliseconds each, with AVX-512F or AVX2 where the machine has them and a
// plain Go loop, a lower bound, elsewhere. It counts one call as running, so
// Close waits for it.
func (be *Backend) PeakFLOPS(ctx context.Context) (float64, error) {
	if err := be.gate.enter(ctx, "peak"); err != nil {
		return 0, err
	}
	defer be.gate.leave()
	flops, err := peak.FLOPS(ctx, be.threads())
	if err != nil {
		return 0, fmt.Errorf("cpu: peak: %w", err)
	}
	return flops, nil
}
