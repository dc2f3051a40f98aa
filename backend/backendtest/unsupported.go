package backendtest

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
)

// optionals are the options that Harness.Unsupported may name.
var optionals = []struct {
	name string
	uses func(c *Case) bool
	drop func(c *Case)
	add  func(c *Case)
}{
	{"softcap", func(c *Case) bool { return c.Options.Softcap > 0 },
		func(c *Case) { c.Options.Softcap = 0 }, func(c *Case) { c.Options.Softcap = 2 }},
	{"mask", func(c *Case) bool { return c.MaskShape != backend.Shape{} },
		func(c *Case) { c.MaskShape = backend.Shape{} }, func(c *Case) { c.MaskShape = backend.Shape{1, 1, c.SeqQ, c.SeqK} }},
	{"block mask", func(c *Case) bool { return c.BlockSize > 0 },
		func(c *Case) { c.BlockSize, c.BlockShape = 0, backend.Shape{} }, func(c *Case) { c.BlockSize, c.BlockShape = 16, backend.Shape{1, 1, 1, 1} }},
	{"bias", func(c *Case) bool { return c.BiasShape != backend.Shape{} },
		func(c *Case) { c.BiasShape = backend.Shape{} }, func(c *Case) { c.BiasShape = backend.Shape{1, 1, c.SeqQ, c.SeqK} }},
	{"relative bias", func(c *Case) bool { return c.RelativeShape != backend.Shape{} },
		func(c *Case) { c.RelativeShape = backend.Shape{} }, func(c *Case) { c.RelativeShape = backend.Shape{1, 1, 1, c.SeqQ + c.SeqK - 1} }},
	{"alibi", func(c *Case) bool { return c.Options.ALiBi != nil },
		func(c *Case) { c.Options.ALiBi = nil }, func(c *Case) { c.Options.ALiBi = slopes(c.Heads) }},
	{"sinks", func(c *Case) bool { return c.Options.Sinks != nil },
		func(c *Case) { c.Options.Sinks = nil }, func(c *Case) { c.Options.Sinks = make([]float32, c.Heads) }},
	{"dropout", func(c *Case) bool { return c.Options.Dropout.P > 0 },
		func(c *Case) { c.Options.Dropout.P = 0 }, func(c *Case) { c.Options.Dropout.P = 0.5 }},
	{"pages", func(c *Case) bool { return c.PageSize > 0 },
		func(c *Case) { c.PageSize = 0 }, func(c *Case) { c.PageSize = 16 }},
	{"q8", func(c *Case) bool { return c.keyType() == backend.Q8 },
		func(c *Case) { c.Keys = nil }, func(c *Case) { c.Keys = new(backend.Q8) }},
}

// lacking reports whether Harness.Unsupported has an option.
func lacking(dev *kernels.Device, option string) bool {
	p, ok := dev.Backend().(*poisoned)
	return ok && slices.Contains(p.unsupported, option)
}

// supported returns c without the options that Harness.Unsupported has.
func supported(dev *kernels.Device, c Case) Case {
	for _, o := range optionals {
		if o.uses(&c) && lacking(dev, o.name) {
			o.drop(&c)
		}
	}
	return c
}

// unsupported returns the first option of c that Harness.Unsupported has, or "".
func unsupported(dev *kernels.Device, c Case) string {
	for _, o := range optionals {
		if o.uses(&c) && lacking(dev, o.name) {
			return o.name
		}
	}
	return ""
}

// needs skips a test of c that Harness.Unsupported excludes.
func needs(t *testing.T, dev *kernels.Device, c Case) {
	t.Helper()
	if name := unsupported(dev, c); name != "" {
		t.Skipf("Harness.Unsupported has %s", name)
	}
}

// needsAll skips a test that needs options which Harness.Unsupported has.
func needsAll(t *testing.T, dev *kernels.Device, options ...string) {
	t.Helper()
	for _, name := range options {
		if lacking(dev, name) {
			t.Skipf("Harness.Unsupported has %s", name)
		}
	}
}

// testUnsupported skips a test for each entry of Harness.Unsupported, and fails for those that the
// backend supports.
func testUnsupported(t *testing.T, dev *kernels.Device, list []string) {
	for _, name := range list {
		t.Run(name, func(t *testing.T) {
			why := must(refuses(t, dev, name))(t)
			t.Skip(why)
		})
	}
}

// refuses returns why the backend refuses an option, or an error if it does not.
func refuses(t testing.TB, dev *kernels.Device, name string) (why, failure error) {
	var names []string
	for _, o := range optionals {
		names = append(names, o.name)
		if o.name != name {
			continue
		}
		c := Case{Name: name, Dims: dims(1, 2, 1, 5, 9, 8, 8), Seed: 1}
		o.add(&c)
		on := c.build().on(t, dev)
		defer on.release()
		switch _, err := on.run(t, fused); {
		case err == nil:
			return nil, fmt.Errorf("%s supports %s: remove it from Harness.Unsupported", dev.Info().Name, name)
		case !errors.Is(err, backend.ErrUnsupported):
			return nil, fmt.Errorf("%s refuses %s with %w, should be %w", dev.Info().Name, name, err, backend.ErrUnsupported)
		default:
			return err, nil
		}
	}
	return nil, fmt.Errorf("Harness.Unsupported has %q, it may have %s", name, strings.Join(names, ", "))
}
