package kernels

import (
	"fmt"
)

// Path is a way of computing a call that does not take all [Options]. It refuses the others
// by name, see [Options.CheckPath]. A call may be on several paths.
type Path uint

const (
	// CachePath is attention to a cache of keys and values.
	CachePath Path = 1 << iota
	// WindowPath is attention to a cache with a window.
	WindowPath
	// SharedPath is attention to a prefix that several sequences of a cache share.
	SharedPath
	// LayerPath is attention of a layer, which computes q, k and v.
	LayerPath

	packedPath // packed sequences (Options.CuQ)
	weightPath // attention that returns weights (Options.Weights)
	stagePath  // a stage alone: Softmax, Scores, TopWeights
	slicePath  // slices in host memory: AttentionFloat32
)

// paths lists each Path with the reason why it refuses options, and the error.
var paths = []struct {
	Path
	reason string
	err    error
}{
	{packedPath, "packed sequences differ in length: call Attention for each sequence", ErrUnsupported},
	{weightPath, "the stages QK and Softmax, which compute weights, cannot use it", ErrUnsupported},
	{stagePath, "a stage alone cannot use it", ErrUnsupported},
	{slicePath, "a call with slices returns the output alone and cannot use it: call Attention", ErrUnsupported},
	{LayerPath, "a layer computes its own queries, keys and values", ErrUnsupported},
	{CachePath, "the cache sets it itself", ErrOption},
	{WindowPath, "the cache has a window, so that keys change their places with each append", ErrOption},
	{SharedPath, "with it a shared prefix would not be the same for all rows", ErrOption},
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
	{"Offset", func(o *Options) bool { return o.Offset != nil }, WindowPath | SharedPath},
	{"KLen", func(o *Options) bool { return o.KLen != nil }, CachePath},
	{"Prefix", func(o *Options) bool { return o.Prefix != nil }, WindowPath | SharedPath},
	{"QSegments", func(o *Options) bool { return o.QSegments != nil }, packedPath | WindowPath | SharedPath},
	{"KSegments", func(o *Options) bool { return o.KSegments != nil }, packedPath | WindowPath | SharedPath},
	{"Mask", func(o *Options) bool { return !o.Mask.IsZero() }, packedPath | WindowPath | SharedPath},
	{"Bias", func(o *Options) bool { return !o.Bias.IsZero() }, packedPath | WindowPath | SharedPath},
	{"ALiBi", func(o *Options) bool { return o.ALiBi != nil }, SharedPath},
	{"RelativeBias", func(o *Options) bool { return !o.RelativeBias.IsZero() }, packedPath | WindowPath | SharedPath},
	{"BlockMask", func(o *Options) bool { return !o.BlockMask.IsZero() }, packedPath | WindowPath | SharedPath},
	{"Sinks", func(o *Options) bool { return o.Sinks != nil }, 0},
	{"Dropout", func(o *Options) bool { return o.Dropout.P > 0 }, WindowPath | SharedPath},
	{"Pages", func(o *Options) bool { return o.Pages != nil }, packedPath | weightPath | stagePath | slicePath | LayerPath | CachePath},
	{"CuQ", func(o *Options) bool { return o.CuQ != nil }, stagePath | LayerPath | CachePath},
	{"CuK", func(o *Options) bool { return o.CuK != nil }, stagePath | LayerPath | CachePath},
	{"LSE", func(o *Options) bool { return o.LSE }, stagePath | slicePath},
	{"Weights", func(o *Options) bool { return o.Weights }, packedPath | stagePath | slicePath | WindowPath | SharedPath},
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
