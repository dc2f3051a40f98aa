package gpu

import (
	"context"
	"strings"
	"testing"

	"github.com/seed90331342/attn/gpu/internal/meter"
	"github.com/seed90331342/attn/gpu/internal/port"
	"github.com/seed90331342/attn/kernels/kernelstest"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// precise stands for a device whose own exp2 is within the bound.
func precise(context.Context, port.Device) (ulp float64, err error) { return meter.MaxExp2Error, nil }

// With the device's exp2, too, prefill, decoding and merges compute the same bits, and results
// keep the error bound. The software driver's exp2 is off by 3 ulp; the bound allows 4.
func TestOwnExp2(t *testing.T) {
	compareDecodeWithPrefill(t, Options{exp2: precise}, true)
	t.Run("bound", func(t *testing.T) {
		conform(t, "runs a part of the suite again", Options{exp2: precise}, nil, kernelstest.Harness{Extent: kernelstest.Extent{PairsFrom: 3,
			Only: []string{"Cases", "Pairs", "Edges", "TopWeights", "Stages", "Drawn", "Extremes", "Merge"}}})
		checkGradients(t, open(t, Options{exp2: precise}), gradientCases())
	})
}

// A device is opened with its own exp2 only where that was measured to be within the bound.
// Its plans state which one it uses.
func TestChoiceOfExp2(t *testing.T) {
	for _, c := range []struct {
		ulp  float64
		err  error
		own  bool
		text string
	}{
		{1.5, nil, true, "exponentials of the device (off by up to 1.5 ulp)"},
		{2, nil, true, "exponentials of the device (off by up to 2 ulp)"},
		{2.01, nil, false, "exponentials in software (the device's are off by up to 2.01 ulp)"},
		{0, port.ErrShader, false, "exponentials in software (the device's: shader not accepted)"},
		{0, port.ErrMemory, false, "exponentials in software (the device's: device out of memory)"},
	} {
		b := open(t, Options{exp2: func(context.Context, port.Device) (float64, error) { return c.ulp, c.err }})
		if b.dev.Pipelines.OwnExp2 != c.own {
			t.Errorf("%v ulp, %v: the device's exp2 is used: %v", c.ulp, c.err, b.dev.Pipelines.OwnExp2)
		}
		for _, rows := range []int{1, 100} {
			p, err := b.Plan(t.Context(), plain(t, b, rows, 100, 64))
			if err != nil || !strings.Contains(p.Why, c.text) {
				t.Errorf("%v ulp, %v: %d rows are planned as %q, %v", c.ulp, c.err, rows, p.Why, err)
			}
		}
		check(t, b.Close())
	}
}

// Each call of the measurement may fail: nothing stays on the device, which then opens
// without its own exp2 or reports its loss.
func TestMeasuringExp2Fails(t *testing.T) {
	_, dev := faulty(t, Options{})
	before := dev.Live()
	for n := 0; ; n++ {
		dev.Fail(n, port.ErrMemory)
		_, err := meter.Exp2(t.Context(), dev)
		if dev.Failed() == "" {
			if err != nil || n < 8 {
				t.Errorf("%d calls, %v", n, err)
			}
			break
		}
		must.Fail(t, dev.Failed()+" fails", err, port.ErrMemory)
		if l := dev.Live(); l != before {
			t.Errorf("after %s failed %+v is left, there was %+v", dev.Failed(), l, before)
		}
	}
}
