package gpu

import (
	"context"
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/backend/oracle"
	"github.com/seed90331342/attn/kernels/kernelstest"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// fewRows is a call that is decoded on matrix units: three heads share keys, of which there are two splits and a part of a third. Each row
// sees a window. The second batch has keys in one split only, which the window leaves to no row but the first ones.
type fewRows struct {
	*backend.Call
	dtype   backend.DType
	q, k, v []float32
	masked  bool
}

const fewHeads, fewSq, fewKeys, fewDim = 6, 3, 601, 32

// newFewRows returns the call. In bf16 there are elements that f16 does not hold: in queries, in some keys, and in values, one of which is
// close to infinity. With wild, hidden keys and values are NaN, and a visible value is infinite.
func newFewRows(t testing.TB, b *Backend, dtype backend.DType, masked, wild bool) fewRows {
	x := fewRows{dtype: dtype, masked: masked}
	data := func(n, seed int, odd map[[2]int]float32) []float32 {
		all := make([]float32, n*fewDim)
		for i := range all {
			all[i] = dtype.Round(3 * wave((i*i+seed)%8191))
			for _, at := range [][2]int{{i / fewDim, i % fewDim}, {-1, i % fewDim}} { // an element, or a column
				if x, ok := odd[at]; ok && dtype == backend.BF16 {
					all[i] = x
					break
				}
			}
		}
		return all
	}
	x.q = data(2*fewHeads*fewSq, 0, map[[2]int]float32{{-1, 4}: 0x1p20, {4, 3}: 0x1p100, {25, 7}: 0x1p-60})
	x.k = data(2*2*fewKeys, 7, map[[2]int]float32{{-1, 3}: 0, {311, 4}: 0x1.8p-22, {550, 4}: -0x1p-23, {fewKeys + 400, 4}: 0x1p-23, {-1, 4}: 0})
	x.v = data(2*2*fewKeys, 9, map[[2]int]float32{{340, 1}: 300, {341, 1}: -0x1p-27, {330, 2}: 0x1p-100, {560, 2}: 0x1p127, {-1, 6}: 0x1.8p-90, {fewKeys + 280, 5}: 0x1p127})
	if wild {
		nan := float32(math.NaN())
		for j := range 2 * 2 * fewKeys {
			if x.hides(j/fewKeys/2, 0, 0, j%fewKeys) && x.hides(j/fewKeys/2, 0, fewSq-1, j%fewKeys) {
				x.k[j*fewDim+j%7], x.v[j*fewDim+j%5] = nan, nan
			}
		}
		x.v[450*fewDim+9] = float32(math.Inf(1))
	}
	from := func(heads, rows int, of []float32) backend.Tensor {
		return upload(t, b, host(t, backend.Shape{2, heads, rows, fewDim}, func(i int) float32 { return of[i] }))
	}
	x.Call = halved(t, b, dtype, &backend.Call{
		Q: from(fewHeads, fewSq, x.q), K: from(2, fewKeys, x.k), V: from(2, fewKeys, x.v),
		O: alloc(t, b, backend.F32, backend.Shape{2, fewHeads, fewSq, fewDim}), LSE: alloc(t, b, backend.F32, backend.Shape{2, fewHeads, fewSq, 1}),
		Problem: backend.Problem{Scale: 0.1, Visible: backend.Visibility{Left: 420, Right: 10, Offset: fewKeys - fewSq - 10, KLen: []int{fewKeys, 170}}},
	})
	if masked {
		x.Mask = bools(t, b, backend.Shape{2, fewHeads, fewSq, fewKeys}, func(i int) bool {
			return !x.hidden(i/fewKeys/fewSq/fewHeads, i/fewKeys/fewSq%fewHeads, i/fewKeys%fewSq, i%fewKeys)
		})
	}
	return x
}

// hidden reports whether the mask hides a key: one in four, and for one row those of a whole split.
func (x *fewRows) hidden(b, h, row, j int) bool {
	return x.masked && ((h+row+j)%4 == 0 || h == 4 && row == 1 && j < 512)
}

func (x *fewRows) hides(b, h, row, j int) bool {
	i := row + fewKeys - fewSq - 10
	return j < i-420 || j > i+10 || b == 1 && j >= 170 || x.hidden(b, h, row, j)
}

// worst returns the largest error of results, as a share of the bound.
func (x *fewRows) worst(o, lse []float32) (worst float64) {
	for n := range 2 * fewHeads * fewSq {
		b, h, row := n/fewSq/fewHeads, n/fewSq%fewHeads, n%fewSq
		kv := (b*2 + h/3) * fewKeys * fewDim
		a := oracle.Solve(oracle.Row{Q: x.q[n*fewDim : (n+1)*fewDim], K: x.k[kv : kv+fewKeys*fewDim], V: x.v[kv : kv+fewKeys*fewDim], Dv: fewDim, Scale: 0.1, Rounded: x.dtype,
			Hidden: func(j int) bool { return x.hides(b, h, row, j) }})
		for c, want := range a.O {
			worst = max(worst, oracle.Off(float64(o[n*fewDim+c]), want, a.OBound[c]))
		}
		worst = max(worst, oracle.Off(float64(lse[n]), a.LSE, a.LSEBound))
	}
	return worst
}

// TestMatrixDecode: decoding on matrix units is within the bound of low precision, and mistakes are not.
func TestMatrixDecode(t *testing.T) {
	type mutant struct{ name, old, new string }
	as := backend.CPU // whose kernels have small tiles
	run := func(dtype backend.DType, masked, wild bool, m mutant) {
		b := openMatrices(t, Options{})
		port := &mutated{Device: b.dev.Port, kernel: "matrix ", edit: strings.NewReplacer(m.old, m.new).Replace}
		b = must.Get(newBackend(port, b.info, Options{}))(t)
		defer b.Close()
		b.info.Type = as
		x := newFewRows(t, b, dtype, masked, wild)
		got, plan := onMatrices(t, b, x.Call)
		if !strings.Contains(plan.Path, "decode") || m.old != "" && !port.edited {
			t.Fatalf("%v, %s: edited: %t, plan %s", dtype, m.name, port.edited, plan.Path)
		}
		worst := x.worst(got[0], got[1])
		t.Logf("%v, masked: %t, wild: %t, %s: %.3g of the bound", dtype, masked, wild, m.name, worst)
		if (worst > 1) != (m.old != "") {
			t.Errorf("%v, %s: %.3g of the bound", dtype, m.name, worst)
		}
	}
	for _, dtype := range []backend.DType{backend.F16, backend.BF16} {
		run(dtype, false, false, mutant{name: "the kernel itself"})
		run(dtype, true, true, mutant{name: "hidden NaN, a visible infinity"})
	}
	as = backend.Discrete
	run(backend.BF16, true, false, mutant{name: "large tiles, loads ahead"})
	as = backend.CPU
	for _, m := range []mutant{
		{"queries are those of the first head", "row / p.rows * p.q.h", "0u"},
		{"positions are those of the first row", "min(i + p.hi, cap)", "min(offset + p.hi, cap)"},
		{"a split ends a tile too early", "end = min(min(i_last + p.hi, cap), i32(split_key + SPLIT))", "end = min(min(i_last + p.hi, cap), i32(split_key + SPLIT - KEYS))"},
		{"the maximum is that of a row that sees no key", "+ WIDTH - 1u].x = m[0u]", "+ WIDTH - 1u].x = LOWEST"},
		{"the sum is left out", "+ WIDTH - 5u].x = sum", "+ WIDTH - 5u].x = 1.0"},
		{"columns of the second turn are those of the first", "c * (KEYS / 4u) + x] = y", "x] = y"},
	} {
		run(backend.F16, false, false, m)
	}
	run(backend.F16, true, false, mutant{"the mask is that of the first head", "added(shown, batch, head, row,", "added(shown, batch, h0, row,"})
	for _, m := range []mutant{
		{"the output keeps its factor", "127u - UP - up[0u], 191u - UP - up[0u]", "127u - up[0u], 191u - up[0u]"},
		{"far elements are written as others", "191u - UP - up[0u]", "127u - UP - up[0u]"},
		{"other elements are written as far ones", "either_power(127u - UP - up[0u]", "either_power(191u - UP - up[0u]"},
		{"the sum of rows with huge values lacks the factor", "sum = sum * power_of_two(127u - up[0u]);", ""},
		{"the maximum of rows with huge values lacks the factor", "m[0u] = m[0u] + f32(up[0u]);", ""},
		{"odd rows are those of the first head", "row_of_q(q_at, number, rows)", "q_at"},
	} {
		run(backend.BF16, false, false, m)
	}
}

// TestConformanceOfFewRows runs low precision with every call on the decode path, on matrix units where heads have up to 128 elements.
func TestConformanceOfFewRows(t *testing.T) {
	openMatrices(t, Options{})
	kernelstest.Run(t, kernelstest.Harness{Extent: kernelstest.Extent{Only: []string{"LowPrecision"}},
		Open: func(t testing.TB) backend.Backend { return openMatrices(t, Options{decodeRows: everyRow}) }})
}

// TestMatrixDecodeAlone: the bits of a row do not depend on other rows, heads and batches, nor on where its split begins in the chunk.
func TestMatrixDecodeAlone(t *testing.T) {
	b := openMatrices(t, Options{})
	x := newFewRows(t, b, backend.BF16, false, false)
	all, _ := onMatrices(t, b, x.Call)
	slice := func(s backend.Tensor, axis, lo, hi int) backend.Tensor { return must.Get(s.Slice(axis, lo, hi))(t) }
	for _, at := range [][3]int{{0, 0, 1}, {0, 1, 2}, {1, 1, 0}} { // batch, key head, row
		batch, kh, row := at[0], at[1], at[2]
		c := *x.Call
		for _, s := range []*backend.Tensor{&c.Q, &c.K, &c.V} {
			*s = slice(*s, backend.Batch, batch, batch+1)
		}
		c.Q = slice(slice(c.Q, backend.Heads, 3*kh+1, 3*kh+3), backend.Seq, row, row+1)
		c.K, c.V = slice(c.K, backend.Heads, kh, kh+1), slice(c.V, backend.Heads, kh, kh+1)
		c.O, c.LSE = alloc(t, b, backend.F32, c.Q.Shape()), alloc(t, b, backend.F32, backend.Shape{1, 2, 1, 1})
		c.Visible.KLen, c.Visible.Offset = c.Visible.KLen[batch:batch+1], c.Visible.Offset+row
		got, _ := onMatrices(t, b, &c)
		for h := range 2 {
			n := (batch*fewHeads+3*kh+1+h)*fewSq + row
			sameRow(t, fmt.Sprint(at, h), got[0][h*fewDim:(h+1)*fewDim], all[0][n*fewDim:(n+1)*fewDim])
			sameRow(t, fmt.Sprint(at, h, " lse"), got[1][h:h+1], all[1][n:n+1])
		}
	}
	padded := func(s backend.Tensor, of []float32) backend.Tensor { // rows at odd elements
		x := upload(t, b, host(t, backend.Shape{2, 2, fewKeys, fewDim + 1}, func(i int) float32 { return of[i/(fewDim+1)*fewDim+min(i%(fewDim+1), fewDim-1)] }))
		return slice(copied(t, b, s.DType(), x), backend.Dim, 0, fewDim)
	}
	x.K, x.V = padded(x.K, x.k), padded(x.V, x.v)
	got, _ := onMatrices(t, b, x.Call)
	sameRow(t, "padded", got[0], all[0])
	check(t, b.Warmup(context.Background(), false, x.Call))
}

// TestMatrixDecodeState: what an earlier call has left in the state changes nothing, also where listed keys end before the last split.
func TestMatrixDecodeState(t *testing.T) {
	b := openMatrices(t, Options{})
	x := newFewRows(t, b, backend.F16, false, false)
	nan := tensor(t, b, backend.F16, x.K.Shape(), func(int) float32 { return float32(math.NaN()) })
	listed := *x.Call
	listed.Q, listed.Visible = must.Get(x.Q.Slice(backend.Seq, 0, 1))(t), backend.Everything()
	listed.O, listed.LSE = alloc(t, b, backend.F32, listed.Q.Shape()), alloc(t, b, backend.F32, backend.Shape{2, fewHeads, 1, 1})
	lists := make([]int32, 2*fewKeys)
	for i := range lists {
		if lists[i] = int32(i % fewKeys); i >= fewKeys+100 {
			lists[i] = -1
		}
	}
	listed.Lists = upload(t, b, must.Get(backend.Host(lists, backend.I32, backend.Shape{2, 1, 1, fewKeys}))(t))
	for name, c := range map[string]*backend.Call{"rows": x.Call, "listed keys": &listed} {
		want, _ := onMatrices(t, b, c)
		before := *c
		before.K, before.V, before.LowPrecision, before.Lists, before.Visible = nan, nan, false, backend.Tensor{}, backend.Everything()
		check(t, b.Attention(t.Context(), &before))
		got, _ := onMatrices(t, b, c)
		sameRow(t, name, got[0], want[0])
		sameRow(t, name+" lse", got[1], want[1])
	}
}
