package kernels

import (
	"fmt"

	"github.com/seed90331342/attn/kernels/internal/op"
)

// paths lists each [op.Path] with the reason why it refuses options, and the error.
var paths = []struct {
	op.Path
	reason string
	err    error
}{
	{op.PackedPath, "packed sequences differ in length: call Attention for each sequence", ErrUnsupported},
	{op.WeightPath, "the stages QK and Softmax, which compute weights, cannot use it", ErrUnsupported},
	{op.StagePath, "a stage alone cannot use it", ErrUnsupported},
	{op.SlicePath, "a call with slices returns the output alone and cannot use it: call Attention", ErrUnsupported},
	{op.LayerPath, "a layer computes its own queries, keys and values", ErrUnsupported},
	{op.CachePath, "the cache sets it itself", ErrOption},
	{op.WindowPath, "the cache has a window, so that keys change their places with each append", ErrOption},
	{op.SharedPath, "with it a shared prefix would not be the same for all rows", ErrOption},
}

// optionTable has every option, with the paths that refuse it and the short ways that it may go. Other special cases of
// calls meet every option: calls without rows or keys, few rows on a GPU, copies and merges.
var optionTable = []struct {
	name    string
	isSet   func(*Options) bool
	refused op.Path
	goes    op.Way
}{
	{"Scale", func(o *Options) bool { return o.Scale != nil }, 0, op.Placeless | op.Small},
	{"ScoreMod", func(o *Options) bool { return o.ScoreMod != nil }, op.WindowPath | op.SharedPath, 0},
	{"Softcap", func(o *Options) bool { return o.Softcap != 0 }, 0, op.Placeless},
	{"Causal", func(o *Options) bool { return o.Causal }, 0, op.Small},
	{"Window", func(o *Options) bool { return o.Window != nil }, op.WindowPath | op.SharedPath, op.Small},
	{"Align", func(o *Options) bool { return o.Align != UpperLeft }, op.CachePath, op.Placeless | op.Small},
	{"Offset", func(o *Options) bool { return o.Offset != nil }, op.WindowPath | op.SharedPath, op.Placeless | op.Small},
	{"KLen", func(o *Options) bool { return o.KLen != nil }, op.CachePath, op.Placeless | op.Small},
	{"Prefix", func(o *Options) bool { return o.Prefix != nil }, op.WindowPath | op.SharedPath, op.Placeless | op.Small},
	{"Spans", func(o *Options) bool { return o.Spans != nil }, op.PackedPath | op.SharedPath, op.Placeless | op.Small},
	{"QSegments", func(o *Options) bool { return o.QSegments != nil }, op.PackedPath | op.WindowPath | op.SharedPath, op.Placeless | op.Small},
	{"KSegments", func(o *Options) bool { return o.KSegments != nil }, op.PackedPath | op.WindowPath | op.SharedPath, op.Placeless | op.Small},
	{"Mask", func(o *Options) bool { return !o.Mask.IsZero() }, op.PackedPath | op.WindowPath | op.SharedPath, op.Placeless},
	{"Bias", func(o *Options) bool { return !o.Bias.IsZero() }, op.PackedPath | op.WindowPath | op.SharedPath, op.Placeless},
	{"ALiBi", func(o *Options) bool { return o.ALiBi != nil }, op.SharedPath, 0},
	{"RelativeBias", func(o *Options) bool { return !o.RelativeBias.IsZero() }, op.PackedPath | op.WindowPath | op.SharedPath, op.Placeless},
	{"BlockMask", func(o *Options) bool { return !o.BlockMask.IsZero() }, op.PackedPath | op.WindowPath | op.SharedPath, op.Placeless},
	{"KeyIndices", func(o *Options) bool { return o.KeyIndices != nil }, op.PackedPath | op.WeightPath | op.StagePath | op.LayerPath | op.WindowPath | op.SharedPath, op.Placeless},
	{"Sinks", func(o *Options) bool { return o.Sinks != nil }, 0, op.Placeless | op.Small},
	{"Dropout", func(o *Options) bool { return o.Dropout.P > 0 }, op.WindowPath | op.SharedPath, op.Placeless},
	{"LowPrecision", func(o *Options) bool { return o.LowPrecision }, op.StagePath, op.Placeless | op.Small},
	{"Pages", func(o *Options) bool { return o.Pages != nil }, op.PackedPath | op.WeightPath | op.StagePath | op.SlicePath | op.LayerPath | op.CachePath, op.Placeless | op.Small},
	{"CuQ", func(o *Options) bool { return o.CuQ != nil }, op.StagePath | op.LayerPath | op.CachePath, op.Placeless | op.Small},
	{"CuK", func(o *Options) bool { return o.CuK != nil }, op.StagePath | op.LayerPath | op.CachePath, op.Placeless | op.Small},
	{"LSE", func(o *Options) bool { return o.LSE }, op.StagePath | op.SlicePath, op.Placeless | op.Small},
	{"Weights", func(o *Options) bool { return o.Weights }, op.PackedPath | op.StagePath | op.SlicePath | op.WindowPath | op.SharedPath, op.Placeless | op.Small},
}

func init() {
	op.Takes = func(options any, on op.Way) bool { return options.(*Options).takes(on) }
	op.CheckPath = func(options any, on op.Path) error { return options.(*Options).checkPath(on) }
}

// checkPath is [op.CheckPath]. The error is ErrUnsupported, or ErrOption for the paths of a
// cache.
func (o *Options) checkPath(on op.Path) error {
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

// takes is [op.Takes].
func (o *Options) takes(on op.Way) bool {
	for i := range optionTable {
		if option := &optionTable[i]; option.goes&on != on && option.isSet(o) {
			return false
		}
	}
	return true
}
