package kernels

import (
	"context"
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels/internal/op"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

func meta(t *testing.T, dtype DType, s ...int) Tensor {
	t.Helper()
	return must.Get(Meta(dtype, Shape(s)))(t)
}

// noBackend fails the test when an invalid call reaches it.
type noBackend struct {
	backend.Backend
	t *testing.T
}

func (b noBackend) Alloc(context.Context, DType, Shape) (Tensor, error) {
	b.t.Error("an invalid call allocates")
	return Tensor{}, ErrMemory
}
func refusing(t *testing.T) *Device { return NewDevice(noBackend{t: t}) }

func (b noBackend) Info() backend.Info { return backend.Info{Name: "none"} }

func TestAttentionRefuses(t *testing.T) {
	f32, f16 := F32, F16
	q := meta(t, f32, 2, 4, 8, 16)
	k := meta(t, f32, 2, 2, 9, 16)
	v := meta(t, f32, 2, 2, 9, 5)
	nan, inf := math.NaN(), math.Inf(1)
	for _, c := range []struct {
		name    string
		q, k, v Tensor
		opt     Options
		want    error
		says    string
	}{
		{"q missing", Tensor{}, k, v, Options{}, ErrShape, "q is missing"},
		{"bool k", q, meta(t, Bool, 2, 2, 9, 16), v, Options{}, ErrDType, "k is bool"},
		{"mixed types", q, meta(t, f16, 2, 2, 9, 16), v, Options{}, ErrDType, "k is f16, v is f32"},
		{"no columns", meta(t, f32, 2, 4, 8, 0), meta(t, f32, 2, 2, 9, 0), v, Options{}, ErrShape, "the head sizes of q [2 4 8 0] and v [2 2 9 5] are 0 and 5"},
		{"no columns of v", q, k, meta(t, f32, 2, 2, 9, 0), Options{}, ErrShape, "v [2 2 9 0] are 16 and 0"},
		{"no kv heads", q, meta(t, f32, 2, 0, 9, 16), meta(t, f32, 2, 0, 9, 5), Options{}, ErrShape, "k has 0 heads, q has 4"},
		{"prefix of no rows", meta(t, f32, 2, 4, 0, 16), k, v, Options{Prefix: []int{1, 2, 3}}, ErrShape, "prefix has 3 elements"},
		{"keys beyond the pages", q, k, v, Options{Pages: &Pages{Table: [][]int32{{0}, {1}}, Keys: 1 << 40}, KLen: []int{1, 1}}, ErrShape, "pages: there are 1099511627776 keys"},
		{"batches", q, meta(t, f32, 3, 2, 9, 16), v, Options{}, ErrShape, "batches differ: q [2 4 8 16], k [3 2 9 16]"},
		{"head size", q, meta(t, f32, 2, 2, 9, 15), v, Options{}, ErrShape, "k [2 2 9 15] has head size 15, q [2 4 8 16] has 16"},
		{"keys of v", q, k, meta(t, f32, 2, 2, 8, 5), Options{}, ErrShape, "v [2 2 8 5] and k [2 2 9 16] must have the same heads and keys"},
		{"kv heads", q, meta(t, f32, 2, 3, 9, 16), meta(t, f32, 2, 3, 9, 5), Options{}, ErrShape, "k has 3 heads, q has 4: the kv heads must divide the query heads"},
		{"score mod without a function", q, k, v, Options{ScoreMod: &ScoreMod{}}, ErrOption, "score mod: Go is nil"},
		{"score mod before the first row", q, k, v, Options{ScoreMod: &ScoreMod{WGSL: "return score;", First: [4]int{0, 0, -1, 0}}}, ErrOption, "score mod has First [0 0 -1 0], each must be 0 to 536870912"},
		{"score mod beyond all keys", q, k, v, Options{ScoreMod: &ScoreMod{WGSL: "return score;", First: [4]int{0, 0, 0, 1<<29 + 1}}}, ErrOption, "score mod has First [0 0 0 536870913]"},
		{"too few key indices", q, k, v, Options{KeyIndices: &KeyIndices{Indices: make([]int32, 15), TopK: 1}}, ErrShape, "there are 15, [B, Hkv or 1, ⌈Sq/Rows⌉, TopK] is [2 2 8 1] (or 1 head)"},
		{"negative top k", q, k, v, Options{KeyIndices: &KeyIndices{TopK: -1}}, ErrOption, "TopK is -1 and Rows 0"},
		{"a key index beyond the keys", q, k, v, Options{KeyIndices: &KeyIndices{Indices: []int32{8, -1, 1, 0, 2, 9, 0, 7}, TopK: 2, Rows: 4}}, ErrOption, "the one at [1 0 0 1] is 9, there are 9 keys: it must be 0 to 8"},
		{"a negative key index", q, k, v, Options{KeyIndices: &KeyIndices{Indices: []int32{8, -1, 1, 0, -2, 9, 0, 7}, TopK: 2, Rows: 4}}, ErrOption, "the one at [1 0 0 0] is -2"},
		{"a key index twice", q, k, v, Options{KeyIndices: &KeyIndices{Indices: []int32{8, 7, 7, 7}, TopK: 2, Rows: 9}}, ErrOption, "the one at [1 0 0 1] is 7, which the list has already"},
		{"key indices of f32", q, k, v, Options{KeyIndices: &KeyIndices{Tensor: meta(t, f32, 2, 1, 8, 3)}}, ErrDType, "key indices is f32, it must be one of [i32]"},
		{"key indices of other rows", q, k, v, Options{KeyIndices: &KeyIndices{Tensor: meta(t, I32, 2, 1, 7, 3)}}, ErrShape, "key indices has shape [2 1 7 3], it must be [2 1 8 3]"},
		{"key indices of other heads", q, k, v, Options{KeyIndices: &KeyIndices{Tensor: meta(t, I32, 2, 4, 8, 3)}}, ErrShape, "key indices has shape [2 4 8 3], it must be [2 2 8 3]"},
		{"key indices twice", q, k, v, Options{KeyIndices: &KeyIndices{Tensor: meta(t, I32, 2, 1, 8, 3), Indices: []int32{1}}}, ErrOption, "next to a Tensor of 3 keys a row, there are 1 Indices"},
		{"a tensor for two rows", q, k, v, Options{KeyIndices: &KeyIndices{Tensor: meta(t, I32, 2, 1, 8, 3), Rows: 2}}, ErrOption, "Rows 2: leave them 0"},
		{"another top k", q, k, v, Options{KeyIndices: &KeyIndices{Tensor: meta(t, I32, 2, 1, 8, 3), TopK: 2}}, ErrOption, "TopK is 2"},
		{"NaN scale", q, k, v, Options{Scale: &nan}, ErrOption, "scale is NaN"},
		{"scale too large for float32", q, k, v, Options{Scale: new(1e300)}, ErrOption, "scale is 1e+300"},
		{"scale too large", q, k, v, Options{Scale: new(-0x1.1p60)}, ErrOption, "it must be 0 or have a magnitude from 2^-60 to 2^60"},
		{"scale too small", q, k, v, Options{Scale: new(0x1p-61)}, ErrOption, "scale is 4.3"},
		{"softcap too large", q, k, v, Options{Softcap: 1e38}, ErrOption, "softcap is 1e+38"},
		{"scale too large for its softcap", q, k, v, Options{Scale: new(0x1p50), Softcap: 0x1p-11}, ErrOption, "it must be at least |scale|/2^60"},
		{"negative softcap", q, k, v, Options{Softcap: -1}, ErrOption, "softcap is -1"},
		{"infinite softcap", q, k, v, Options{Softcap: inf}, ErrOption, "softcap is +Inf"},
		{"softcap that rounds to 0", q, k, v, Options{Softcap: 1e-60}, ErrOption, "softcap is 1e-60"},
		{"negative window", q, k, v, Options{Window: &Window{-1, 3}}, ErrOption, "window is -1,3"},
		{"align", q, k, v, Options{Align: 2}, ErrOption, "align is 2"},
		{"offset", q, k, v, Options{Offset: []int{1 << 31}}, ErrOption, "offset[0] is 2147483648"},
		{"pages of packed rows with cuK", meta(t, f32, 1, 4, 8, 16), k, v, Options{CuQ: []int{0, 8}, CuK: []int{0, 9}, Pages: &Pages{Table: [][]int32{{0}}, Keys: 9}}, ErrOption, "cuK is set with pages"},
		{"keys of packed rows beyond the pages", meta(t, f32, 1, 4, 8, 16), k, v, Options{CuQ: []int{0, 8}, KLen: []int{1}, Pages: &Pages{Table: [][]int32{{0}}, Keys: 1 << 40}}, ErrShape, "pages: there are 1099511627776 keys"},
		{"pages of another number of sequences", meta(t, f32, 1, 4, 8, 16), k, v, Options{CuQ: []int{0, 8}, Pages: &Pages{Keys: 9}}, ErrShape, "the table has 0 rows, cuQ has 1 sequences"},
		{"offsets of batches", q, k, v, Options{Offset: []int{0, 1 << 29}}, ErrOption, "offset[1] is 536870912, it must lie within ±268435456"},
		{"klen count", q, k, v, Options{KLen: []int{1}}, ErrShape, "klen has 1 elements, it must have 2, the number of batches"},
		{"klen range", q, k, v, Options{KLen: []int{9, 10}}, ErrOption, "klen[1] is 10, there are 9 keys"},
		{"klen negative", q, k, v, Options{KLen: []int{-1, 1}}, ErrOption, "klen[0] is -1"},
		{"float mask", q, k, v, Options{Mask: meta(t, f32, 1, 1, 8, 9)}, ErrDType, "give a float mask as Bias"},
		{"bool bias", q, k, v, Options{Bias: meta(t, Bool, 1, 1, 8, 9)}, ErrDType, "give a bool mask as Mask"},
		{"mask shape", q, k, v, Options{Mask: meta(t, Bool, 1, 2, 8, 9)}, ErrShape, "mask: shape [1 2 8 9] does not broadcast to [2 4 8 9]"},
		{"bias shape", q, k, v, Options{Bias: meta(t, f16, 1, 1, 9, 8)}, ErrShape, "bias: shape [1 1 9 8] does not broadcast to [2 4 8 8]"},
		{"mask with more keys", q, k, v, Options{Mask: meta(t, Bool, 1, 1, 8, 10)}, ErrShape, "mask: shape [1 1 8 10] does not broadcast to [2 4 8 9]"},
		{"mask without keys", q, k, v, Options{Mask: meta(t, Bool, 1, 1, 8, 0)}, ErrShape, "mask: shape [1 1 8 0]"},
		{"prefix count", q, k, v, Options{Prefix: []int{1, 2, 3}}, ErrShape, "prefix has 3 elements, it must have 1 or 2, the number of batches"},
		{"prefix count of one batch", meta(t, f32, 1, 4, 9, 16), meta(t, f32, 1, 2, 9, 16), meta(t, f32, 1, 2, 9, 5), Options{Prefix: []int{1, 2, 3}}, ErrShape, "it must have 1, the number of batches"},
		{"spans count", q, k, v, Options{Spans: make([][][2]int, 3)}, ErrShape, "spans has 3 elements, it must have 1 or 2, the number of batches"},
		{"spans overlap", q, k, v, Options{Spans: [][][2]int{nil, {{0, 3}, {2, 4}}}}, ErrOption, "spans[1] has the span 2 to 4 after 3, there are 9 keys"},
		{"span range", q, k, v, Options{Spans: [][][2]int{{{5, 10}}}}, ErrOption, "spans[0] has the span 5 to 10 after 0, there are 9 keys"},
		{"empty span", q, k, v, Options{Spans: [][][2]int{{{5, 5}}}}, ErrOption, "spans must ascend, not overlap and not be empty"},
		{"spans and prefix", q, k, v, Options{Spans: [][][2]int{{{5, 6}}}, Prefix: []int{3}}, ErrOption, "give a prefix of n keys as the span 0 to n"},
		{"prefix range", q, k, v, Options{Prefix: []int{0, 10}}, ErrOption, "prefix[1] is 10, there are 9 keys"},
		{"segments of keys missing", q, k, v, Options{QSegments: [][]int32{make([]int32, 8)}}, ErrShape, "qsegments have ids for 8 rows, there are 9 keys: give ksegments too"},
		{"segments of rows missing", q, k, v, Options{KSegments: [][]int32{make([]int32, 9)}}, ErrShape, "ksegments are given without qsegments"},
		{"segments of too few batches", meta(t, f32, 3, 4, 9, 16), meta(t, f32, 3, 2, 9, 16), meta(t, f32, 3, 2, 9, 5), Options{QSegments: make([][]int32, 2)}, ErrShape, "qsegments has 2 elements, it must have 1 or 3, the number of batches"},
		{"segments of too few keys", q, k, v, Options{QSegments: [][]int32{make([]int32, 8)}, KSegments: [][]int32{make([]int32, 9), make([]int32, 8)}}, ErrShape, "ksegments[1] has 8 elements, it must have 9, the number of keys"},
		{"a segment in two places", q, k, v, Options{QSegments: [][]int32{make([]int32, 8)}, KSegments: [][]int32{{0, 0, 7, 7, 7, 2, 7, 7, 2}}}, ErrOption, "segment 7 of batch 0 has keys 2 to 4 and again 6 to 7"},
		{"a segment inside a page", q, meta(t, f32, 9, 2, 16, 16), meta(t, f32, 9, 2, 16, 5), Options{Pages: &Pages{Table: [][]int32{{0}, {1}}, Keys: 9},
			QSegments: [][]int32{{0, 0, 0, 0, 1, 1, 1, 1}}, KSegments: [][]int32{{0, 0, 0, 0, 0, 1, 1, 1, 1}}}, ErrUnsupported, "begins at key 5, inside a page"},
		{"a segment inside a block", q, k, v, Options{QSegments: [][]int32{{1, 1, 1, 1, 2, 2, 2, 2}}, KSegments: [][]int32{{1, 1, 1, 2, 2, 2, 2, 2, 2}}, BlockMask: meta(t, Bool, 1, 1, 4, 5), BlockSize: 2}, ErrOption, "begins at key 3, inside a block"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := refusing(t).Attention(t.Context(), c.q, c.k, c.v, c.opt)
			if !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.says) || strings.Contains(err.Error(), "\n") {
				t.Errorf("error is %q, should be %q and say %q", err, c.want, c.says)
			}
			must.Fail(t, "prepare", must.Err(refusing(t).Prepare(c.q, c.k, c.v, c.opt)), c.want)
		})
	}
}

// TestListsNeedMemory: the memory that lists need is requested before they are read. The key of this one does not exist.
func TestListsNeedMemory(t *testing.T) {
	q, k := meta(t, F32, 1, 1, 1, 16), meta(t, F32, 1, 1, 9, 16)
	for n := 1; n <= 2; n++ {
		stop := backend.FailMemory(n)
		_, err := refusing(t).Prepare(q, k, k, Options{KeyIndices: &KeyIndices{Indices: []int32{9}, TopK: 1}})
		if stop(); !errors.Is(err, ErrMemory) {
			t.Errorf("request %d is refused: %v", n, err)
		}
	}
}

func TestOutputsRefused(t *testing.T) {
	f32 := F32
	q, k, v := meta(t, F16, 1, 2, 8, 16), meta(t, F16, 1, 2, 9, 16), meta(t, F16, 1, 2, 9, 5)
	o := meta(t, F16, 1, 2, 8, 5)
	for _, c := range []struct {
		name string
		out  Result
		want error
		says string
	}{
		{"no o", Result{}, ErrShape, "o is missing"},
		{"o shape", Result{O: meta(t, f32, 1, 2, 8, 16)}, ErrShape, "o has shape [1 2 8 16], it must be [1 2 8 5]"},
		{"o type", Result{O: meta(t, BF16, 1, 2, 8, 5)}, ErrDType, "o is bf16"},
		{"lse shape", Result{O: o, LSE: meta(t, f32, 1, 2, 1, 8)}, ErrShape, "lse has shape [1 2 1 8], it must be [1 2 8 1]"},
		{"lse type", Result{O: o, LSE: meta(t, F16, 1, 2, 8, 1)}, ErrDType, "lse is f16"},
		{"weights shape", Result{O: o, Weights: meta(t, f32, 1, 2, 8, 8)}, ErrShape, "weights has shape [1 2 8 8], it must be [1 2 8 9]"},
	} {
		call := must.Get(refusing(t).Prepare(q, k, v, Options{}))(t)
		must.Fail(t, c.name, call.RunInto(t.Context(), c.out), c.want, c.says)
	}
}

func TestStagesRefuse(t *testing.T) {
	dev := refusing(t)
	f32 := F32
	s := meta(t, f32, 1, 2, 8, 9)
	none := Tensor{}
	second := func(_ Tensor, err error) error { return err }
	for name, c := range map[string]struct {
		err, want error
		says      string
	}{
		"softmax without scale": {dev.Softmax(t.Context(), s, none, Options{}), ErrOption, "set Scale"},
		"softmax of f16":        {dev.Softmax(t.Context(), meta(t, F16, 1, 1, 1, 1), none, Options{Scale: new(1.0)}), ErrDType, "s is f16"},
		"softmax lse":           {dev.Softmax(t.Context(), s, meta(t, f32, 1, 2, 9, 1), Options{Scale: new(1.0)}), ErrShape, "lse has shape"},
		"pv weights":            {second(dev.PV(t.Context(), meta(t, F16, 1, 2, 8, 9), meta(t, f32, 1, 2, 9, 4))), ErrDType, "w is f16"},
		"pv keys":               {second(dev.PV(t.Context(), s, meta(t, f32, 1, 2, 8, 4))), ErrShape, "a weight for each of its keys"},
		"pv heads":              {second(dev.PV(t.Context(), s, meta(t, f32, 1, 3, 9, 4))), ErrShape, "v has 3 heads, w has 2"},
		"qk heads":              {second(dev.QK(t.Context(), s, meta(t, f32, 1, 3, 7, 9))), ErrShape, "k has 3 heads, q has 2"},
		"merge":                 {dev.Merge(t.Context(), Result{O: s}, Result{O: s}), ErrUnsupported, "none"},
		"project":               {dev.Project(t.Context(), s, s, s, none), ErrUnsupported, "none"},
		"copy":                  {dev.Copy(t.Context(), nil, nil), ErrUnsupported, "none"},
	} {
		must.Fail(t, name, c.err, c.want, c.says)
	}
}

func TestOptionsBecomeTheRule(t *testing.T) {
	d := backend.Dims{Batch: 2, Heads: 1, SeqQ: 4, SeqK: 6, Dim: 4}
	un := Unbounded
	for _, c := range []struct {
		name string
		opt  Options
		want backend.Visibility
	}{
		{"nothing", Options{}, backend.Visibility{Left: un, Right: un}},
		{"causal", Options{Causal: true}, backend.Visibility{Left: un}},
		{"causal lower right", Options{Causal: true, Align: LowerRight}, backend.Visibility{Left: un, Offset: 2}},
		{"window lower right with offset", Options{Window: &Window{1, 2}, Align: LowerRight, Offset: []int{3}}, backend.Visibility{Left: 1, Right: 2, Offset: 5}},
		{"window and causal", Options{Window: &Window{1, 2}, Causal: true}, backend.Visibility{Left: 1}},
		{"a window too wide to matter", Options{Window: &Window{10, 11}}, backend.Visibility{Left: un, Right: un}},
		{"equal offsets", Options{Causal: true, Offset: []int{3, 3}}, backend.Visibility{Left: un, Offset: 3}},
		{"each batch at its own lower right", Options{Causal: true, Offset: []int{2, -1}, KLen: []int{6, 3}}, backend.Visibility{Left: un, Offsets: []int{2, -1}, KLen: []int{6, 3}}},
	} {
		p, err := c.opt.problem(d)
		if err != nil || !reflect.DeepEqual(p.Visible, c.want) || p.Regions != nil {
			t.Errorf("%s: rule is %+v, %v, should be %+v", c.name, p.Visible, err, c.want)
		}
		if p.Scale != 0.5 {
			t.Errorf("%s: scale is %v, should be 1/sqrt(4)", c.name, p.Scale)
		}
	}
	if p, err := (&Options{Scale: new(1.0)}).problem(d); err != nil || p.Scale != 1 {
		t.Errorf("scale 1 gives %v, %v", p.Scale, err)
	}
}

// idleBackend computes nothing.
type idleBackend struct{ backend.Backend }

func (idleBackend) Attention(context.Context, ...*backend.Call) error { return nil }
func (idleBackend) QK(context.Context, Tensor, Tensor, Tensor) error {
	return nil
}
func (idleBackend) Softmax(context.Context, Tensor, Tensor, *backend.Problem) error {
	return nil
}

// TestRunIntoDoesNotAllocate: a prepared call with preallocated outputs does not allocate,
// nor do new operands and a reset.
func TestRunIntoDoesNotAllocate(t *testing.T) {
	q := meta(t, F16, 1, 4, 8, 16)
	k := meta(t, F16, 1, 2, 9, 16)
	out := Result{O: meta(t, F32, 1, 4, 8, 16), LSE: meta(t, F32, 1, 4, 8, 1)}
	opt := Options{Causal: true, Window: &Window{3, 3}, Mask: meta(t, Bool, 1, 1, 8, 9), Bias: meta(t, F32, 1, 4, 8, 9), KLen: []int{7}}
	dev := NewDevice(idleBackend{})
	ctx := t.Context()
	call := must.Get(dev.Prepare(q, k, k, opt))(t)
	weights := out
	weights.Weights = meta(t, F32, 1, 4, 8, 9)
	for _, out := range []Result{out, weights} {
		if n := testing.AllocsPerRun(200, func() {
			must.Do(t, errors.Join(call.RunInto(ctx, out), call.Reset(q, k, k, opt)))
		}); n != 0 {
			t.Errorf("%v allocations a prepared call, with weights: %v", n, !out.Weights.IsZero())
		}
	}
}

func TestPackedRefuses(t *testing.T) {
	f32 := F32
	q, k, v := meta(t, f32, 1, 4, 8, 16), meta(t, f32, 1, 2, 9, 16), meta(t, f32, 1, 2, 9, 5)
	cuQ, cuK := []int{0, 3, 8}, []int{0, 9, 9}
	for _, c := range []struct {
		name     string
		q        Tensor
		cuQ, cuK []int
		opt      Options
		want     error
		says     string
	}{
		{"two batches", meta(t, f32, 2, 4, 8, 16), cuQ, cuK, Options{}, ErrShape, "batches differ"},
		{"no sequences", q, []int{0}, []int{0}, Options{}, ErrShape, "cuQ has 1 entries"},
		{"begins late", q, []int{1, 8}, []int{0, 9}, Options{}, ErrOption, "cuQ[0] is 1"},
		{"falls", q, []int{0, 5, 4, 8}, []int{0, 4, 5, 9}, Options{}, ErrOption, "cuQ[2] is 4, after 5: the list must begin with 0 and never fall"},
		{"ends early", q, cuQ, []int{0, 4, 8}, Options{}, ErrOption, "cuK[2] is 8, there are 9 keys"},
		{"ends late", q, []int{0, 3, 9}, cuK, Options{}, ErrOption, "cuQ[2] is 9, there are 8 rows"},
		{"lists of two lengths", q, cuQ, []int{0, 9}, Options{}, ErrShape, "cuQ has 3 entries and cuK 2"},
		{"keys as rows", q, cuQ, nil, Options{}, ErrOption, "cuK[2] is 8, there are 9 keys"},
		{"a mask", q, cuQ, cuK, Options{Mask: meta(t, Bool, 1, 1, 8, 9)}, ErrUnsupported, "Mask is set, but packed sequences differ in length"},
		{"weights", q, cuQ, cuK, Options{Weights: true}, ErrUnsupported, "Weights is set, but packed"},
		{"klen count", q, cuQ, cuK, Options{KLen: []int{1}}, ErrShape, "klen has 1 elements, it must have 2, the number of sequences"},
		{"klen without keys", q, cuQ, cuK, Options{KLen: []int{1, 1}}, ErrOption, "sequence 1: klen[1] is 1, the sequence has no keys"},
		{"klen range", q, cuQ, cuK, Options{KLen: []int{10, 0}}, ErrOption, "sequence 0: klen[0] is 10"},
		{"prefix count", q, cuQ, cuK, Options{Prefix: []int{1, 1, 1}}, ErrShape, "prefix has 3 elements, it must have 1 or 2, the number of sequences"},
		{"slopes", q, cuQ, cuK, Options{ALiBi: make([]float32, 5)}, ErrShape, "alibi has 5 elements, it must have 4 or 8, the number of heads, or of heads in all sequences"},
		{"softcap", q, cuQ, cuK, Options{Softcap: -1}, ErrOption, "softcap is -1"},
	} {
		c.opt.CuQ, c.opt.CuK = c.cuQ, c.cuK
		must.Fail(t, c.name, must.Err(refusing(t).Prepare(c.q, k, v, c.opt)), c.want, c.says)
	}
	must.Fail(t, "CuQ that falls", must.Err(refusing(t).Attention(t.Context(), q, k, v, Options{CuQ: []int{0, 9, 8}, CuK: cuK})), ErrOption)
}

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

// TestPathsRefuse: functions refuse by name the options that they do not take, before they reach the backend.
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
