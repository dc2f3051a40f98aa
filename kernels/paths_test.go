package kernels

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/seed90331342/attn/backend/backendtest/must"
	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels/internal/op"
)

// setOptions returns Options with a single option set, for each option of the table: those of a call of one row and key.
func setOptions(t *testing.T) map[string]Options {
	t.Helper()
	x := meta(t, F32, 1, 1, 1, 1)
	seen := meta(t, Bool, 1, 1, 1, 1)
	list, ends := []int{0}, []int{0, 1}
	ids := [][]int32{{0}}
	return map[string]Options{
		"Scale": {Scale: new(1.0)}, "ScoreMod": {ScoreMod: &ScoreMod{Go: func([]float32, Position) {}}}, "Softcap": {Softcap: 1}, "Causal": {Causal: true}, "Window": {Window: &Window{}},
		"Align": {Align: LowerRight}, "Offset": {Offset: list}, "KLen": {KLen: list}, "Prefix": {Prefix: list}, "Spans": {Spans: [][][2]int{nil}},
		"QSegments": {QSegments: ids}, "KSegments": {KSegments: ids}, "Mask": {Mask: seen}, "Bias": {Bias: x}, "ALiBi": {ALiBi: []float32{1}},
		"RelativeBias": {RelativeBias: x}, "BlockMask": {BlockMask: seen, BlockSize: 1}, "Sinks": {Sinks: []float32{1}},
		"Dropout": {Dropout: Dropout{P: 0.5}}, "Pages": {Pages: &Pages{}}, "CuQ": {CuQ: ends}, "CuK": {CuK: ends},
		"LSE": {LSE: true}, "Weights": {Weights: true}, "LowPrecision": {LowPrecision: true}, "KeyIndices": {KeyIndices: &KeyIndices{TopK: 1, Indices: []int32{0}}},
	}
}

// TestOptionTable: the table has every option and recognises when it is set.
func TestOptionTable(t *testing.T) {
	set := setOptions(t)
	var names []string
	for _, option := range optionTable {
		names = append(names, option.name)
		opt, ok := set[option.name]
		if !ok || !option.isSet(&opt) || option.isSet(&Options{}) {
			t.Errorf("%s: set %t, in the zero value %t", option.name, option.isSet(&opt), option.isSet(&Options{}))
		}
	}
	for _, f := range reflect.VisibleFields(reflect.TypeFor[Options]()) {
		if !slices.Contains(names, f.Name) && f.Name != "BlockSize" { // part of BlockMask
			t.Errorf("the table lacks Options.%s", f.Name)
		}
	}
	for _, p := range paths {
		for name, opt := range set {
			i := slices.Index(names, name)
			err := opt.checkPath(p.Path)
			if refused := optionTable[i].refused&p.Path != 0; refused != errors.Is(err, p.err) || refused && !strings.Contains(err.Error(), name+" is set, but "+p.reason) {
				t.Errorf("%s on the path of %q: error is %v, refused %t", name, p.reason, err, refused)
			}
		}
	}
}

// TestPathsRefuse: functions refuse by name the options that they do not take, before they
// reach the backend.
func TestPathsRefuse(t *testing.T) {
	dev, ctx := refusing(t), t.Context()
	x := meta(t, F32, 1, 1, 1, 1)
	calls := map[op.Path]map[string]func(Options) error{
		op.StagePath: {
			"Softmax": func(o Options) error { o.Scale = new(1.0); return dev.Softmax(ctx, x, Tensor{}, o) },
			"Scores":  func(o Options) error { _, err := dev.Scores(ctx, x, x, Biased, o); return err },
			"TopWeights": func(o Options) error {
				_, err := dev.TopWeights(ctx, x, x, 1, o)
				return err
			},
			"EachWeightRow": func(o Options) error {
				return dev.EachWeightRow(ctx, x, x, WeightRange{Rows: [2]int{0, 1}, Keys: [2]int{0, 1}}, o, func(int, int, []float32) {})
			},
		},
		op.WeightPath: {"Prepare": func(o Options) error {
			o.Weights = true
			_, err := dev.Prepare(x, x, x, o)
			return err
		}},
		op.PackedPath: {"Prepare": func(o Options) error {
			o.CuQ = []int{0, 1}
			_, err := dev.Prepare(x, x, x, o)
			return err
		}},
		op.ListPath: {"Prepare": func(o Options) error {
			o.KeyIndices = &KeyIndices{Tensor: meta(t, I32, 1, 1, 1, 1)}
			_, err := dev.Prepare(x, x, x, o)
			return err
		}},
		op.IndexPath: {"Index": func(o Options) error {
			_, err := dev.Index(ctx, x, x, x, 1, o)
			return err
		}},
		op.SlicePath: {"AttentionFloat32": func(o Options) error {
			one := []float32{1}
			_, err := dev.AttentionFloat32(ctx, Dims{SeqQ: 1, Dim: 1}, BHSD, one, one, one, o)
			return err
		}},
	}
	set := setOptions(t)
	for _, option := range optionTable {
		name, opt := option.name, set[option.name]
		for path, functions := range calls {
			if option.refused&path == 0 {
				continue
			}
			for function, call := range functions {
				must.Fail(t, fmt.Sprintf("%s with %s", function, name), call(opt), ErrUnsupported, name+" is set")
			}
		}
	}
	// Weights may also be requested by an output.
	call := must.Get(dev.Prepare(x, x, x, Options{CuQ: []int{0, 1}}))(t)
	must.Fail(t, "weights of packed sequences", call.RunInto(ctx, Result{O: x, Weights: x}), ErrUnsupported, "Weights is set")
}

// TestShortWays: package cpu computes a small call without tiles if the table takes its options there, and no other.
// Conformance compares the results of this way and of caches with the reference, option by option.
func TestShortWays(t *testing.T) {
	dev := NewDevice(cpu.New(cpu.Options{}))
	defer dev.Close()
	x := meta(t, F32, 1, 1, 1, 1)
	small := func(opt Options) bool {
		call := must.Get(dev.Prepare(x, x, x, opt))(t)
		return strings.Contains(must.Get(call.Plan(t.Context()))(t).Cut, "keys at once")
	}
	if !small(Options{}) {
		t.Skip("this tier has no such way")
	}
	set := setOptions(t)
	for _, option := range optionTable {
		switch option.name {
		case "Pages", "KSegments", "CuK": // not without others
			continue
		}
		if got := small(set[option.name]); got != option.small {
			t.Errorf("%s: without tiles is %t, the table has %t", option.name, got, !got)
		}
	}
}
