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
	{op.IndexPath, "index scores have no such option: Causal, Window, Align, Offset and KLen hide keys", ErrUnsupported},
	{op.ListPath, "lists of keys in device memory (KeyIndices.Tensor) cannot use it: give KeyIndices.Indices", ErrUnsupported},
	{op.LayerPath, "a layer computes its own queries, keys and values", ErrUnsupported},
	{op.CachePath, "the cache sets it itself", ErrOption},
	{op.WindowPath, "the cache has a window, so that keys change their places with each append", ErrOption},
	{op.SharedPath, "with it a shared prefix would not be the same for all rows", ErrOption},
}

// optionTable has every option, with the paths that refuse it and whether package cpu's way for groups of few rows and few
// keys, without tiles, takes it. Other special cases of calls meet every option: calls without rows or keys, few rows on a GPU, copies and merges.
var optionTable = []struct {
	name    string
	isSet   func(*Options) bool
	refused op.Path
	small   bool
}{
	{"Scale", func(o *Options) bool { return o.Scale != nil }, op.IndexPath, true},
	{"ScoreMod", func(o *Options) bool { return o.ScoreMod != nil }, op.WindowPath | op.SharedPath | op.IndexPath | op.ListPath, false},
	{"Softcap", func(o *Options) bool { return o.Softcap != 0 }, op.IndexPath, false},
	{"Causal", func(o *Options) bool { return o.Causal }, 0, true},
	{"Window", func(o *Options) bool { return o.Window != nil }, op.WindowPath | op.SharedPath, true},
	{"Align", func(o *Options) bool { return o.Align != UpperLeft }, op.CachePath, true},
	{"Offset", func(o *Options) bool { return o.Offset != nil }, op.WindowPath | op.SharedPath, true},
	{"KLen", func(o *Options) bool { return o.KLen != nil }, op.CachePath, true},
	{"Prefix", func(o *Options) bool { return o.Prefix != nil }, op.WindowPath | op.SharedPath | op.IndexPath | op.ListPath, true},
	{"Spans", func(o *Options) bool { return o.Spans != nil }, op.PackedPath | op.SharedPath | op.IndexPath | op.ListPath, true},
	{"QSegments", func(o *Options) bool { return o.QSegments != nil }, op.PackedPath | op.WindowPath | op.SharedPath | op.IndexPath | op.ListPath, true},
	{"KSegments", func(o *Options) bool { return o.KSegments != nil }, op.PackedPath | op.WindowPath | op.SharedPath | op.IndexPath | op.ListPath, true},
	{"Mask", func(o *Options) bool { return !o.Mask.IsZero() }, op.PackedPath | op.WindowPath | op.SharedPath | op.IndexPath | op.ListPath, false},
	{"Bias", func(o *Options) bool { return !o.Bias.IsZero() }, op.PackedPath | op.WindowPath | op.SharedPath | op.IndexPath | op.ListPath, false},
	{"ALiBi", func(o *Options) bool { return o.ALiBi != nil }, op.SharedPath | op.IndexPath, false},
	{"RelativeBias", func(o *Options) bool { return !o.RelativeBias.IsZero() }, op.PackedPath | op.WindowPath | op.SharedPath | op.IndexPath | op.ListPath, false},
	{"BlockMask", func(o *Options) bool { return !o.BlockMask.IsZero() }, op.PackedPath | op.WindowPath | op.SharedPath | op.IndexPath | op.ListPath, false},
	{"KeyIndices", func(o *Options) bool { return o.KeyIndices != nil }, op.PackedPath | op.WeightPath | op.StagePath | op.LayerPath | op.WindowPath | op.SharedPath | op.IndexPath, false},
	{"Sinks", func(o *Options) bool { return o.Sinks != nil }, op.IndexPath, true},
	{"Dropout", func(o *Options) bool { return o.Dropout.P > 0 }, op.WindowPath | op.SharedPath | op.IndexPath | op.ListPath, false},
	{"LowPrecision", func(o *Options) bool { return o.LowPrecision }, op.StagePath | op.IndexPath, true},
	{"Pages", func(o *Options) bool { return o.Pages != nil }, op.WeightPath | op.StagePath | op.SlicePath | op.LayerPath | op.CachePath | op.IndexPath, true},
	{"CuQ", func(o *Options) bool { return o.CuQ != nil }, op.StagePath | op.LayerPath | op.CachePath | op.IndexPath, true},
	{"CuK", func(o *Options) bool { return o.CuK != nil }, op.StagePath | op.LayerPath | op.CachePath | op.IndexPath, true},
	{"LSE", func(o *Options) bool { return o.LSE }, op.StagePath | op.SlicePath | op.IndexPath, true},
	{"Weights", func(o *Options) bool { return o.Weights }, op.PackedPath | op.StagePath | op.SlicePath | op.WindowPath | op.SharedPath | op.IndexPath, true},
}

func init() {
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
