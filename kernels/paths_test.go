package kernels

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels/internal/op"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
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

// TestOptionTable: Set names each option that is set, and the table of refusals has every option.
func TestOptionTable(t *testing.T) {
	set := setOptions(t)
	if opt := (Options{}); len(opt.Set()) > 0 {
		t.Errorf("the zero value sets %v", opt.Set())
	}
	for _, f := range reflect.VisibleFields(reflect.TypeFor[Options]()) {
		if f.Name == "BlockSize" { // part of BlockMask
			continue
		}
		opt := set[f.Name]
		if got := opt.Set(); !slices.Equal(got, []string{f.Name}) {
			t.Errorf("%s alone: Set names %v", f.Name, got)
		}
		if _, ok := op.Refused[f.Name]; !ok {
			t.Errorf("the table of refusals lacks Options.%s", f.Name)
		}
	}
	if len(op.Refused) != len(set) {
		t.Errorf("the table has %d options, there are %d", len(op.Refused), len(set))
	}
	for path, p := range op.Paths {
		for name, opt := range set {
			err := op.CheckPath(opt.Set(), path)
			if refused := op.Refused[name]&path != 0; refused != errors.Is(err, p.Err) || refused && !strings.Contains(err.Error(), name+" is set, but "+p.Reason) {
				t.Errorf("%s on the path of %q: error is %v, refused %t", name, p.Reason, err, refused)
			}
		}
		must.Fail(t, "an option that the table lacks", op.CheckPath([]string{"Causal", "Unknown"}, path), p.Err, "Unknown is set, but "+p.Reason)
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
	for name, opt := range set {
		for path, functions := range calls {
			if op.Refused[name]&path == 0 {
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

// TestShortWays: package cpu computes a small call without tiles if it has none of some options.
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
	tiled := []string{"ScoreMod", "Softcap", "Mask", "Bias", "ALiBi", "RelativeBias", "BlockMask", "KeyIndices", "Dropout"}
	for name, opt := range setOptions(t) {
		switch name {
		case "Pages", "KSegments", "CuK": // not without others
			continue
		}
		if got, want := small(opt), !slices.Contains(tiled, name); got != want {
			t.Errorf("%s: without tiles is %t, should be %t", name, got, want)
		}
	}
}
