package kernelstest

import (
	"cmp"
	"embed"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"path"
	"slices"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/backend/oracle"
	"github.com/seed90331342/attn/kernels"
)

//go:embed testdata/worked-examples/*.json
var workedExamples embed.FS

// workedExample is a published example with its intermediate tensors. The README next to the
// files describes the fields.
type workedExample struct {
	Title   string          `json:"title"`
	Scale   float64         `json:"scale"`
	X       json.RawMessage `json:"x"` // [S, M] or [B, S, M]
	WQuery  [][]float32     `json:"w_query"`
	WKey    [][]float32     `json:"w_key"`
	WValue  [][]float32     `json:"w_value"`
	Queries [][]float64     `json:"queries"`
	Keys    [][]float64     `json:"keys"`
	Values  [][]float64     `json:"values"`
	Scores  json.RawMessage `json:"scores"`
	Softmax json.RawMessage `json:"softmax"`
	Digits  int             `json:"digits"`

	SoftmaxRounded  [][]float32   `json:"softmax_rounded"`
	WeightedRounded [][][]float64 `json:"weighted_values_rounded"`
	OutputsRounded  [][]float64   `json:"outputs_rounded"`
	OutputsExact    [][]float64   `json:"outputs_exact"`
}

// testWorkedExamples computes each example and compares every tensor that it prints.
func testWorkedExamples(t *testing.T, dev *kernels.Device) {
	const dir = "testdata/worked-examples"
	files, err := workedExamples.ReadDir(dir)
	if err != nil || len(files) == 0 {
		t.Fatalf("no worked examples: %v", err)
	}
	for _, f := range files {
		t.Run(f.Name(), func(t *testing.T) {
			data := must(workedExamples.ReadFile(path.Join(dir, f.Name())))(t)
			var w workedExample
			noError(t, json.Unmarshal(data, &w))
			w.test(t, dev)
		})
	}
}

func (w *workedExample) test(t *testing.T, dev *kernels.Device) {
	x, shape := flatten(t, w.X)
	tx := up(t, dev, x, shape)
	q, k, v := tx, tx, tx
	if w.WQuery != nil {
		for _, m := range []struct {
			dst  *backend.Tensor
			from [][]float32
		}{{&q, w.WQuery}, {&k, w.WKey}, {&v, w.WValue}} {
			*m.dst = must(dev.Alloc(t.Context(), backend.F32, backend.Shape{1, 1, shape[backend.Seq], len(m.from[0])}))(t)
			defer m.dst.Release()
			noError(t, dev.Project(t.Context(), *m.dst, tx, up(t, dev, join(m.from), backend.Shape{1, 1, len(m.from), len(m.from[0])}), backend.Tensor{}))
		}
		same(t, "queries", read(t, dev, q), join(w.Queries), 0, 0)
		same(t, "keys", read(t, dev, k), join(w.Keys), 0, 0)
		same(t, "values", read(t, dev, v), join(w.Values), 0, 0)
	}

	// Printed numbers have an error of half their last digit. If inputs are printed with few digits, a score has the
	// error of D products of two such numbers, which are below 1 in these examples, and a weight has at most that error
	// too, because the sum of its derivatives by the scores is at most 1/2.
	printed, inputs := 0.0, 0.0
	scoreRel, softmaxRel := 0.0, 0.5e-7 // exact small integers; 8 digits
	if w.Digits > 0 {
		printed = 0.5 * math.Pow10(-w.Digits)
		scoreRel, softmaxRel = u, 8*u
		for _, f := range x {
			if f != float32(math.Round(float64(f)*2)/2) {
				inputs = 2 * printed * l1(x, shape)
				break
			}
		}
	}

	s := must(dev.QK(t.Context(), q, k))(t)
	defer s.Release()
	scores := read(t, dev, s)
	for i := range scores {
		scores[i] *= float32(w.Scale)
	}
	wantScores, _ := flatten64(t, w.Scores)
	same(t, "scores", scores, wantScores, printed+inputs, scoreRel)

	opt := kernels.Options{Scale: &w.Scale, Weights: true}
	r := must(dev.Attention(t.Context(), q, k, v, opt))(t)
	defer r.Release()
	weights := read(t, dev, r.Weights)
	wantSoftmax, _ := flatten64(t, w.Softmax)
	// 16: differences of scores up to 16 lose as many ulp (package oracle has the general bound).
	same(t, "softmax", weights, wantSoftmax, printed+inputs, softmaxRel+16*u)

	o := must(dev.PV(t.Context(), r.Weights, v))(t)
	defer o.Release()
	fused := must(dev.Attention(t.Context(), q, k, v, kernels.Options{Scale: &w.Scale}))(t)
	defer fused.Release()
	if w.OutputsExact != nil {
		same(t, "outputs, stages", read(t, dev, o), join(w.OutputsExact), 0, 32*u)
		same(t, "outputs, fused", read(t, dev, fused.O), join(w.OutputsExact), 0, 32*u)
	}
	if w.SoftmaxRounded != nil {
		w.testRounded(t, dev, weights, v)
	}
}

// testRounded tests the variant of the example that rounds weights to one decimal.
func (w *workedExample) testRounded(t *testing.T, dev *kernels.Device, weights []float32, v backend.Tensor) {
	rounded := roundRows(weights, len(w.SoftmaxRounded[0]))
	want := join(w.SoftmaxRounded)
	n := len(w.SoftmaxRounded)
	for i := range want {
		if rounded[i] != want[i] {
			t.Errorf("softmax_rounded[%d,%d] is %v, should be %v", i/n, i%n, rounded[i], want[i])
		}
	}
	values := read(t, dev, v)
	dv := v.Shape()[backend.Dim]
	for j, queries := range w.WeightedRounded {
		for i, channels := range queries {
			for c, want := range channels {
				// One rounding of the weight (0.9 is not a float32) and one of the product.
				if got := rounded[i*n+j] * values[j*dv+c]; !(math.Abs(float64(got)-want) <= 2*u*math.Abs(want)) {
					t.Errorf("weighted_values_rounded[%d,%d,%d] is %v, should be %v", j, i, c, got, want)
				}
			}
		}
	}
	o := must(dev.PV(t.Context(), up(t, dev, rounded, backend.Shape{1, 1, n, n}), v))(t)
	defer o.Release()
	same(t, "outputs_rounded", read(t, dev, o), join(w.OutputsRounded), 0, 4*u)
}

// roundRows rounds weights to tenths whose sum in each row of n is 1, as in the example (whose first row .06 .47 .47
// becomes 0 .5 .5): all are rounded down, and the missing tenths are added to the largest remainders.
func roundRows(weights []float32, n int) []float32 {
	out := make([]float32, len(weights))
	for at := 0; at < len(weights); at += n {
		row, tenths := weights[at:at+n], out[at:at+n]
		missing := 10
		for i, x := range row {
			tenths[i] = float32(math.Floor(float64(x) * 10))
			missing -= int(tenths[i])
		}
		order := make([]int, n)
		for i := range order {
			order[i] = i
		}
		rest := func(i int) float32 { return row[i]*10 - tenths[i] }
		slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(rest(b), rest(a)) })
		for _, i := range order[:missing] {
			tenths[i]++
		}
		for i := range tenths {
			tenths[i] /= 10
		}
	}
	return out
}

// l1 returns the largest sum of magnitudes of a row of x.
func l1(x []float32, s backend.Shape) float64 {
	best := 0.0
	for i := 0; i < len(x); i += s[3] {
		sum := 0.0
		for _, f := range x[i : i+s[3]] {
			sum += math.Abs(float64(f))
		}
		best = max(best, sum)
	}
	return best
}

func join[T any](m [][]T) []T {
	var all []T
	for _, row := range m {
		all = append(all, row...)
	}
	return all
}

func flatten(t *testing.T, raw json.RawMessage) ([]float32, backend.Shape) {
	t.Helper()
	x, s := flatten64(t, raw)
	f := make([]float32, len(x))
	for i := range x {
		f[i] = float32(x[i])
	}
	return f, s
}

// flatten64 returns the elements and the shape of nested lists [S, M] or [B, S, M].
func flatten64(t *testing.T, raw json.RawMessage) ([]float64, backend.Shape) {
	t.Helper()
	var batches [][][]float64
	if err := json.Unmarshal(raw, &batches); err != nil {
		var one [][]float64
		noError(t, json.Unmarshal(raw, &one))
		batches = [][][]float64{one}
	}
	var all []float64
	for _, b := range batches {
		all = append(all, join(b)...)
	}
	return all, backend.Shape{len(batches), 1, len(batches[0]), len(batches[0][0])}
}

// same compares with an absolute and a relative tolerance.
func same(t *testing.T, name string, got []float32, want []float64, abs, rel float64) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%s has %d elements, should have %d", name, len(got), len(want))
	}
	for i := range want {
		if tol := abs + rel*math.Abs(want[i]); !(math.Abs(float64(got[i])-want[i]) <= tol) {
			t.Errorf("%s: element %d is %v, should be %v%s", name, i, got[i], want[i], fmt.Sprintf(" within %.2g", tol))
			return
		}
	}
}

// torchRecord has the gradients of a case that PyTorch's autograd computed in float64.
// TestTorchGradients writes the file with -update-torch.
type torchRecord struct {
	Case      string    // as printed, so that no other case is compared
	Gradients [7][]byte // float64, little endian
}

//go:embed testdata/torch-gradients.json
var torchFile []byte

// torchCases returns the recorded cases: small shapes, each with other options.
func torchCases() (cases []Case) {
	const causal, lower, mask, bias, softcap, klen, window, more = 1, 2, 4, 8, 16, 32, 64, 128
	for n, c := range []struct {
		dims    kernels.Dims
		options int
	}{
		{dims(1, 1, 1, 5, 7, 4, 4), 0},
		{dims(2, 2, 2, 6, 6, 8, 8), causal},
		{dims(1, 2, 1, 4, 9, 8, 8), causal | lower},
		{dims(1, 4, 2, 9, 5, 3, 5), causal | lower},
		{dims(1, 2, 2, 1, 17, 8, 8), 0},
		{dims(2, 2, 1, 1, 12, 6, 4), klen},
		{dims(1, 2, 2, 8, 8, 4, 4), mask},
		{dims(2, 4, 2, 5, 6, 4, 4), mask},
		{dims(1, 2, 2, 7, 9, 5, 5), bias},
		{dims(2, 4, 2, 6, 7, 4, 4), bias},
		{dims(1, 3, 1, 6, 8, 4, 6), bias | causal},
		{dims(2, 2, 2, 5, 8, 4, 4), bias | mask},
		{dims(1, 2, 1, 7, 7, 8, 8), softcap},
		{dims(1, 4, 2, 5, 6, 4, 4), softcap | causal | bias},
		{dims(2, 2, 1, 6, 9, 4, 4), softcap | mask | klen},
		{dims(1, 2, 2, 12, 12, 4, 4), window},
		{dims(1, 2, 1, 10, 14, 4, 4), window | lower | bias},
		{dims(2, 4, 1, 5, 7, 4, 4), klen | causal | mask},
		{dims(1, 2, 2, 6, 8, 4, 4), more},
		{dims(1, 4, 2, 7, 7, 4, 4), more | causal},
		{dims(2, 4, 2, 5, 6, 4, 4), more | bias | mask},
		{dims(1, 2, 1, 9, 11, 5, 3), more | softcap | bias | causal | lower},
		{dims(1, 1, 1, 20, 33, 4, 4), causal},
		{dims(1, 1, 1, 3, 70, 4, 4), softcap | bias},
	} {
		has := func(option int) bool { return c.options&option > 0 }
		x := Case{Name: fmt.Sprintf("PyTorch %d", n), Dims: c.dims, Seed: uint64(3000 + 2*n)}
		o := &x.Options
		o.Causal = has(causal)
		if has(lower) {
			o.Align = kernels.LowerRight
		}
		if has(mask) {
			x.MaskShape, x.HideRows = backend.Shape{x.Batch, 1, x.SeqQ, x.SeqK}, true
		}
		if has(bias) {
			// Alternately shared by the batches, and by the rows too.
			x.BiasShape = backend.Shape{1, x.Heads, 1 + n%2*(x.SeqQ-1), x.SeqK}
		}
		if has(softcap) {
			o.Softcap = 1.5
		}
		if has(klen) {
			for b := range x.Batch {
				o.KLen = append(o.KLen, x.SeqK-3*b)
			}
		}
		if has(window) {
			o.Window = &kernels.Window{Left: 3, Right: 1}
		}
		if has(more) {
			o.ALiBi, o.Sinks = slopes(x.Heads), []float32{0.5, -1, 2, 0}[:x.Heads]
			o.Dropout = kernels.Dropout{P: 0.25, Seed: 9}
			x.RelativeShape = backend.Shape{1, x.Heads, 1, x.SeqQ + x.SeqK - 1}
		}
		cases = append(cases, x)
	}
	return cases
}

// testTorchGradients compares gradients with those that PyTorch's autograd computed.
func testTorchGradients(t *testing.T, dev *kernels.Device) {
	var records []torchRecord
	noError(t, json.Unmarshal(torchFile, &records))
	for n, c := range torchCases() {
		if n >= len(records) || records[n].Case != c.String() {
			t.Fatalf("%v is not recorded: run TestTorchGradients with -update-torch", c)
		}
		var torch [7][]float64
		for n, raw := range records[n].Gradients {
			torch[n] = doubles(raw)
		}
		if unsupported(dev, c) != "" {
			continue
		}
		on := c.build().on(t, dev)
		x := on.forward(t)
		sums := x.differentiate(x.do, x.dlse)
		worst := nearby(x.mustBackward(t), torch, sums, func(n int, s *oracle.Sum) float64 { return s.Bound(backend.F32) })
		if err := worst.Err(); err != nil {
			t.Errorf("%v: %v", c, err)
		}
		on.release()
	}
}

// nearby compares gradients with others, except where they are unspecified.
func nearby[T float32 | float64](got [7][]T, want [7][]float64, sums [7][]oracle.Sum, bound func(n int, s *oracle.Sum) float64) (worst oracle.Worst) {
	for n := range sums {
		if len(got[n]) != len(sums[n]) || len(want[n]) != len(sums[n]) {
			worst.See(float64(len(got[n])), float64(len(want[n])), 0, func() string { return "the number of elements of " + gradientNames[n] })
			continue
		}
		for i := range sums[n] {
			if s := &sums[n][i]; !math.IsNaN(s.Value) {
				worst.See(float64(got[n][i]), want[n][i], bound(n, s), func() string { return fmt.Sprintf("%s, element %d", gradientNames[n], i) })
			}
		}
	}
	return worst
}

// doubles decodes float64, little endian.
func doubles(raw []byte) (x []float64) {
	for at := range slices.Chunk(raw, 8) {
		x = append(x, math.Float64frombits(binary.LittleEndian.Uint64(at)))
	}
	return x
}
