package kernels

import (
	"fmt"

	"github.com/seed90331342/attn/backend"
)

// Path is a way in which a call is computed. Each takes some of the [Options] and refuses
// the others by name, see [Options.CheckPath].
type Path uint

// The paths that do not take all options. A call may be on several.
const (
	// PackedPath is attention of packed sequences (Options.CuQ).
	PackedPath Path = 1 << iota
	// WeightsPath is attention that returns the weights (Options.Weights).
	WeightsPath
	// StagePath is a stage alone: Softmax, Scores and TopWeights.
	StagePath
	// SlicePath is attention of slices in host memory.
	SlicePath
	// CachePath is attention to a cache of keys and values.
	CachePath
	// WindowPath is attention to a cache with a window.
	WindowPath
	// SharedPath is attention to a prefix that several sequences of a cache share.
	SharedPath
)

// paths lists each Path with the reason why it refuses options, and the error.
var paths = []struct {
	Path
	reason string
	err    error
}{
	{PackedPath, "packed sequences differ in length: call Attention for each sequence", backend.ErrUnsupported},
	{WeightsPath, "the three stages, which return weights, cannot use it", backend.ErrUnsupported},
	{StagePath, "a stage alone cannot use it", backend.ErrUnsupported},
	{SlicePath, "a call with slices returns the output alone and cannot use it: call Attention", backend.ErrUnsupported},
	{CachePath, "the cache sets it itself", backend.ErrOption},
	{WindowPath, "the cache has a window, so that keys change their places with each append", backend.ErrOption},
	{SharedPath, "with it a shared prefix would not be the same for all rows", backend.ErrOption},
}

// optionRow is an option with the paths that refuse it.
type optionRow struct {
	name    string
	isSet   func(*Options) bool
	refused Path
}

// optionTable has a row for every option.
var optionTable = []optionRow{
	{"Scale", func(o *Options) bool { return o.Scale != nil }, 0},
	{"Softcap", func(o *Options) bool { return o.Softcap != 0 }, 0},
	{"Causal", func(o *Options) bool { return o.Causal }, 0},
	{"Window", func(o *Options) bool { return o.Window != nil }, WindowPath | SharedPath},
	{"Align", func(o *Options) bool { return o.Align != UpperLeft }, CachePath},
	{"Offset", func(o *Options) bool { return o.Offset != 0 }, WindowPath | SharedPath},
	{"Offsets", func(o *Options) bool { return o.Offsets != nil }, CachePath},
	{"KLen", func(o *Options) bool { return o.KLen != nil }, CachePath},
	{"Prefix", func(o *Options) bool { return o.Prefix != nil }, WindowPath | SharedPath},
	{"QSegments", func(o *Options) bool { return o.QSegments != nil }, PackedPath | WindowPath | SharedPath},
	{"KSegments", func(o *Options) bool { return o.KSegments != nil }, PackedPath | WindowPath | SharedPath},
	{"Mask", func(o *Options) bool { return !o.Mask.IsZero() }, PackedPath | WindowPath | SharedPath},
	{"Bias", func(o *Options) bool { return !o.Bias.IsZero() }, PackedPath | WindowPath | SharedPath},
	{"ALiBi", func(o *Options) bool { return o.ALiBi != nil }, SharedPath},
	{"RelativeBias", func(o *Options) bool { return !o.RelativeBias.IsZero() }, PackedPath | WindowPath | SharedPath},
	{"BlockMask", func(o *Options) bool { return !o.BlockMask.IsZero() }, PackedPath | WindowPath | SharedPath},
	{"Sinks", func(o *Options) bool { return o.Sinks != nil }, 0},
	{"Dropout", func(o *Options) bool { return o.Dropout.P > 0 }, WindowPath | SharedPath},
	{"Pages", func(o *Options) bool { return o.Pages != nil }, PackedPath | WeightsPath | StagePath | SlicePath | CachePath},
	{"CuQ", func(o *Options) bool { return o.CuQ != nil }, StagePath | CachePath},
	{"CuK", func(o *Options) bool { return o.CuK != nil }, StagePath | CachePath},
	{"LSE", func(o *Options) bool { return o.LSE }, StagePath | SlicePath},
	{"Weights", func(o *Options) bool { return o.Weights }, PackedPath | StagePath | SlicePath | WindowPath | SharedPath},
	{"Resume", func(o *Options) bool { return o.Resume != nil }, PackedPath | WeightsPath | StagePath | SharedPath},
}

// CheckPath returns an error that names the first option that is set although one of the
// paths refuses it. The error is ErrUnsupported, or ErrOption for the paths of a cache.
func (o *Options) CheckPath(on Path) error {
	if on == 0 {
		return nil
	}
	for _, option := range optionTable {
		if option.refused&on == 0 || !option.isSet(o) {
			continue
		}
		for _, p := range paths {
			if option.refused&on&p.Path != 0 {
				return fmt.Errorf("%s is set, but %s: %w", option.name, p.reason, p.err)
			}
		}
	}
	return nil
}
