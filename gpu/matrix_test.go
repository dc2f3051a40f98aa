package gpu

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/backend/oracle"
	"github.com/seed90331342/attn/gpu/internal/cut"
	"github.com/seed90331342/attn/gpu/internal/port"
	"github.com/seed90331342/attn/gpu/internal/queue"
	"github.com/seed90331342/attn/gpu/internal/tune"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
	"github.com/seed90331342/attn/shaders"
)

// openMatrices opens a device with matrix units, such as that of a library that ATTN_WEBGPU names. Without them the
// test is skipped.
func openMatrices(t testing.TB, opt Options) *Backend {
	t.Helper()
	b := open(t, opt)
	if _, whyNot := b.matrices.Largest(); whyNot != "" {
		t.Skip("needs a device with matrix units")
	}
	return b
}

// halved returns c in low precision, with q, k and v of a type; q is bf16 next to f8.
func halved(t testing.TB, b *Backend, dtype backend.DType, c *backend.Call) *backend.Call {
	t.Helper()
	c.LowPrecision = true
	c.K, c.V = copied(t, b, dtype, c.K), copied(t, b, dtype, c.V)
	if dtype == backend.F8 {
		dtype = backend.BF16
	}
	c.Q = copied(t, b, dtype, c.Q)
	return c
}

// onMatrices runs c, which must take matrix units, and returns o and lse.
func onMatrices(t testing.TB, b *Backend, c *backend.Call) (results [][]float32, plan backend.Plan) {
	t.Helper()
	plan = must.Get(b.Plan(t.Context(), c))(t)
	if !strings.Contains(plan.Path, "matrix units WGSL, products of f16 matrices of ") {
		t.Fatalf("planned %q: %s", plan.Path, plan.Why)
	}
	if want := map[bool]int{false: 1, true: 3}[c.Split()]; plan.Matrices != want {
		t.Errorf("planned %d products for one, want %d", plan.Matrices, want)
	}
	check(t, b.Attention(context.Background(), c))
	return [][]float32{floats(t, b, c.O), floats(t, b, c.LSE)}, plan
}

// TestMatrixVariants compares workgroups of other sizes, loads ahead of time and loads of other widths, bit for bit.
func TestMatrixVariants(t *testing.T) {
	const heads, rows, keys, d = 2, 70, 75, 32
	b := openMatrices(t, Options{})
	for _, dtype := range []backend.DType{backend.F16, backend.BF16, backend.F32} {
		most := 2
		if dtype == backend.F32 {
			most = 1
		}
		of := func(rows, seed int) backend.Tensor {
			return upload(t, b, host(t, backend.Shape{1, heads, rows, d}, func(i int) float32 { return 4 * wave((i*i+seed)%8191) }))
		}
		c := halved(t, b, dtype, &backend.Call{Q: of(rows, 0), K: of(keys, 7), V: of(keys, 9), O: alloc(t, b, dtype, backend.Shape{1, heads, rows, d}),
			Problem: backend.Problem{Scale: 0.3, Visible: backend.Visibility{Left: backend.Unbounded, Offset: keys - rows}}})
		var want []float32
		for _, v := range []struct {
			vec   int
			ahead bool
		}{{2, false}, {2, true}, {1, true}, {0, false}} {
			check(t, b.run(context.Background(), "attention", func() (*queue.Op, error) {
				x, whyNot, err := must.Get(b.newAttention(c))(t).matrixPrefill(func(s tune.Shape, dim int) (shaders.Matrix, string) {
					k, whyNot := b.matrices.Kernel(s, dim)
					if k.Vec != most || !k.Full {
						t.Fatalf("the rule takes units of %d, full: %t", 4*k.Vec, k.Full)
					}
					k.Vec, k.Ahead, k.Full, k.TY = min(v.vec, most), v.ahead, v.vec > 0, 1+v.vec
					return k, whyNot
				})
				if err != nil || whyNot != "" {
					return nil, cmp.Or(err, errors.New(whyNot))
				}
				return x.op(), nil
			}))
			got := floats(t, b, c.O)
			if want == nil {
				want = got
			}
			sameRow(t, fmt.Sprintf("%v, %+v", dtype, v), got, want)
		}
	}
}

// mutated edits the kernels of a device whose labels begin with kernel.
type mutated struct {
	port.Device
	kernel string
	edit   func(wgsl string) string
	edited bool
}

func (d *mutated) CreatePipeline(desc port.PipelineDesc) (port.Pipeline, error) {
	if strings.HasPrefix(desc.Label, d.kernel) {
		old := desc.WGSL
		desc.WGSL = d.edit(old)
		d.edited = d.edited || desc.WGSL != old
	}
	return d.Device.CreatePipeline(desc)
}

// TestMatrixMutants: the results are within the bound of low precision, and those of mistakes are not. In bf16 there are
// elements that f16 does not hold: in all rows of queries, in some keys, and in values, one of which is close to infinity.
func TestMatrixMutants(t *testing.T) {
	const heads, rows, keys, d = 2, 37, 75, 32
	type mutant struct{ name, old, new string }
	data := func(dtype backend.DType, n int, wild map[[2]int]float32) func(i int) float32 {
		return func(i int) float32 {
			for _, at := range [][2]int{{i / d, i % d}, {-1, i % d}} { // an element, or a column
				if x, ok := wild[at]; ok && dtype != backend.F16 {
					return x
				}
			}
			return dtype.Round(3 * wave((i*i+n)%8191))
		}
	}
	run := func(dtype backend.DType, m mutant) {
		q := data(dtype, 0, map[[2]int]float32{{-1, 4}: 0x1p20, {5, 3}: 0x1p100, {45, 7}: 0x1p-60})
		k := data(dtype, 7, map[[2]int]float32{{-1, 3}: 0, {11, 4}: 0x1.8p-22, {50, 4}: -0x1p-23, {-1, 4}: 0})
		v := data(dtype, 9, map[[2]int]float32{{40, 1}: 300, {41, 1}: -0x1p-27, {30, 2}: 0x1p-100, {60, 2}: 0x1p127, {-1, 6}: 0x1.8p-90, {3, 7}: 0x1p63, {61, 7}: -0x1p64})
		b := openMatrices(t, Options{})
		port := &mutated{Device: b.dev.Port, kernel: "matrix ", edit: strings.NewReplacer(m.old, m.new).Replace}
		b = must.Get(newBackend(port, b.info, Options{}))(t)
		c := halved(t, b, dtype, &backend.Call{
			Q: upload(t, b, host(t, backend.Shape{1, heads, rows, d}, q)), K: upload(t, b, host(t, backend.Shape{1, 1, keys, d}, k)),
			V: upload(t, b, host(t, backend.Shape{1, 1, keys, d}, v)), O: alloc(t, b, backend.F32, backend.Shape{1, heads, rows, d}),
			LSE: alloc(t, b, backend.F32, backend.Shape{1, heads, rows, 1}), Problem: backend.Problem{Scale: 0.1, Visible: backend.Visibility{Left: backend.Unbounded, Offset: keys - rows}},
		})
		got, _ := onMatrices(t, b, c)
		if m.old != "" && !port.edited {
			t.Fatalf("%v, %s: the kernel has no %q", dtype, m.name, m.old)
		}
		of := func(data func(int) float32, first, count int) (x []float32) {
			for i := range count {
				x = append(x, data(first+i))
			}
			return x
		}
		worst := 0.0
		for row := range heads * rows {
			a := oracle.Solve(oracle.Row{Q: of(q, row*d, d), K: of(k, 0, keys*d), V: of(v, 0, keys*d), Dv: d, Scale: 0.1, Rounded: dtype, Split: dtype == backend.F32,
				Hidden: func(j int) bool { return j > row%rows+keys-rows }})
			for x, o := range a.O {
				worst = max(worst, oracle.Off(float64(got[0][row*d+x]), o, a.OBound[x]))
			}
			worst = max(worst, oracle.Off(float64(got[1][row]), a.LSE, a.LSEBound))
		}
		t.Logf("%v, %s: %.3g of the bound", dtype, m.name, worst)
		if (worst > 1) != (m.old != "") {
			t.Errorf("%v, %s: %.3g of the bound", dtype, m.name, worst)
		}
	}
	for _, m := range []mutant{
		{"the kernel itself", "", ""},
		{"a product of scores is dropped", "subgroupMatrixMultiplyAccumulate(query[1u], x, s[0u])", "s[0u]"},
		{"sums of scores begin again", "subgroupMatrixMultiplyAccumulate(query[1u], x, s[0u])", "subgroupMatrixMultiplyAccumulate(query[1u], x, Result())"},
		{"a product of the output is dropped", "subgroupMatrixMultiplyAccumulate(w, x, acc[1u])", "acc[1u]"},
		{"sums of the output begin again", "subgroupMatrixMultiplyAccumulate(w, x, acc[1u])", "subgroupMatrixMultiplyAccumulate(w, x, Result())"},
		{"the output is not rescaled", "if (anew) {", "if (anew && called.x == 0u) {"},
		{"the sum is not rescaled", "fma(l[0u], rescale[0u], ", "fma(l[0u], 1.0, "},
		{"keys before the diagonal are hidden", "(min(i + p.hi, cap))", "(min(i + p.hi - 3, cap))"},
	} {
		run(backend.F16, m)
	}
	for _, m := range []mutant{
		{"the kernel itself", "", ""},
		{"weights lack their factor", "e[0u] = e[0u] * power_of_two(127u + W_UP);", ""},
		{"odd keys are left to matrices", "select(odd_keys, 0xffffffffu, ", "select(0u, 0xffffffffu, "},
		{"odd rows are left to matrices", "select(odd_keys, 0xffffffffu, odd_row[0u])", "odd_keys"},
		{"odd values are lost", "is_odd(z, V_TOP) | vec4<bool>(alone)", "vec4<bool>(alone)"},
		{"a huge value is added like others", "huge_row[0u] = true;", ""},
		{"all elements of the row become far", "far | becomes_far", "vec4<bool>(alone)"},
		{"elements are far for one tile", "far_of(y, huge_before[0u])", "vec4<bool>(false)"},
		{"others are far after a tile", "select(vec4<u32>(0u), vec4<u32>(1u), far & (exponent", "select(vec4<u32>(1u), vec4<u32>(1u), far & (exponent"},
		{"elements do not change their factor", "either_power(127u, 63u, becomes_far)", "1.0"},
		{"far elements are written as others", "either_power(127u, 191u - UP, far)", "1.0"},
	} {
		run(backend.BF16, m)
	}
	for _, m := range []mutant{
		{"the kernel itself", "", ""},
		{"low queries are left out", "subgroupMatrixMultiplyAccumulate(query[5u], high, s[0u])", "s[0u]"},
		{"low keys are left out", "subgroupMatrixMultiplyAccumulate(query[1u], low, s[0u])", "s[0u]"},
		{"low weights are left out", "(part == 0u) { return high; }", "(true) { return high; }"},
		{"low values are left out", ", low, acc[0u])", ", high, acc[0u])"},
		{"low parts of weights of odd values are left out", " / 2048.0;", " * 0.0;"},
	} {
		run(backend.F32, m)
	}
}

// TestMatrixEights: keys and values of f8, among them all its numbers, next to queries of f16 and bf16, and NaN where they are hidden.
func TestMatrixEights(t *testing.T) {
	const heads, keys, d = 2, 75, 32
	hidden := func(key int) bool { return key%9 == 4 }
	all := func(i int) float32 { // of the 254 codes that are numbers
		code := i * 37 % 254
		x := math.Ldexp(float64(8+code%8), max(code/8%16, 1)-10)
		if code/8%16 == 0 {
			x = math.Ldexp(float64(code%8), -9)
		}
		if code%127 == 126 || code >= 127 {
			x = -x
		}
		return backend.F8.Round(float32(min(max(x, -448), 448)))
	}
	data := func(i int) float32 {
		if hidden(i / d) {
			return float32(math.NaN())
		}
		return all(i*i + i)
	}
	q := func(dtype backend.DType) func(i int) float32 {
		return func(i int) float32 { return dtype.Round(wave(i * i % 8191)) }
	}
	for _, rows := range []int{37, 5} { // which are decoded
		for _, dtype := range []backend.DType{backend.F16, backend.BF16} {
			for _, m := range []struct{ name, old, new string }{
				{},
				{"hidden NaN are left", "x & ~((nan", "x | (0u * (nan"},
				{"values have another factor", "const V_TOP: u32 = 135u", "const V_TOP: u32 = 134u"},
			} {
				if m.old != "" && (rows < 16 || strings.Contains(m.old, "V_TOP") != (dtype == backend.BF16)) {
					continue
				}
				b := openMatrices(t, Options{})
				port := &mutated{Device: b.dev.Port, kernel: "matrix ", edit: strings.NewReplacer(m.old, m.new).Replace}
				b = must.Get(newBackend(port, b.info, Options{}))(t)
				kv := func() backend.Tensor {
					return copied(t, b, backend.F8, upload(t, b, host(t, backend.Shape{1, 1, keys, d}, data)))
				}
				c := &backend.Call{Q: tensor(t, b, dtype, backend.Shape{1, heads, rows, d}, q(dtype)), K: kv(), V: kv(), O: alloc(t, b, backend.F32, backend.Shape{1, heads, rows, d}),
					LSE: alloc(t, b, backend.F32, backend.Shape{1, heads, rows, 1}), Problem: backend.Problem{LowPrecision: true, Scale: 0x1p-8, Visible: backend.Everything()}}
				c.Mask = bools(t, b, backend.Shape{1, 1, 1, keys}, func(key int) bool { return !hidden(key) })
				got, _ := onMatrices(t, b, c)
				row := oracle.Row{Dv: d, Scale: 0x1p-8, Rounded: backend.F16, Hidden: hidden}
				for i := range keys * d {
					row.K = append(row.K, data(i))
				}
				row.V = row.K
				worst := 0.0
				for n := range heads * rows {
					row.Q = nil
					for i := range d {
						row.Q = append(row.Q, q(dtype)(n*d+i))
					}
					a := oracle.Solve(row)
					for x, o := range a.O {
						worst = max(worst, oracle.Off(float64(got[0][n*d+x]), o, a.OBound[x]))
					}
					worst = max(worst, oracle.Off(float64(got[1][n]), a.LSE, a.LSEBound))
				}
				t.Logf("%d rows, %v, %s: %.3g of the bound", rows, dtype, m.name, worst)
				if (worst > 1) != (m.old != "") || port.edited != (m.old != "") {
					t.Errorf("%d rows, %v, %s: %.3g of the bound, edited: %t", rows, dtype, m.name, worst, port.edited)
				}
			}
		}
	}
}

// TestMatrixGradientMutants: gradients on matrix units are within the bound, and those of mistakes are not. In bf16 there are
// elements that matrices do not hold, in one row or key of q, k, v and dO each, and dO of other sizes than 1.
func TestMatrixGradientMutants(t *testing.T) {
	const dim, columns = 32, 24
	type edit = func(operand string, i int, x float32) float32
	// odd makes an element of an operand odd: large in q and v, next to small elements of k and dO, else the only one of its column.
	odd := func(in string) edit {
		large := map[string]string{"q": "k", "v": "do"}[in]
		return func(operand string, i int, x float32) float32 {
			width := map[string]int{"q": dim, "k": dim, "v": columns, "do": columns}[operand]
			switch first := i/width == 5; {
			case i%width == 3 && operand == large:
				return x / 1024
			case i%width == 3 && operand == in && first:
				return map[bool]float32{true: 1000, false: 0x1p-60}[large != ""]
			case i%width == 3 && operand == in && large == "":
				return 0
			}
			return x
		}
	}
	every := func(operand string, i int, x float32) float32 {
		for _, in := range []string{"q", "k", "v", "do"} {
			x = odd(in)(operand, i, x)
		}
		return x
	}
	loss := func(exponent func(row int) int) edit {
		return func(operand string, i int, x float32) float32 {
			if operand == "do" {
				return float32(math.Ldexp(float64(x), exponent(i/columns)))
			}
			return x
		}
	}
	tiny, mixed := loss(func(int) int { return -40 }), loss(func(row int) int { return row/7%5*15 - 40 })
	const dkv, dq = "const OF: u32 = 0u;", "const OF: u32 = 1u;"
	causal := kernels.Options{Causal: true, Align: kernels.LowerRight, LowPrecision: true}
	steep := kernels.Options{ALiBi: []float32{1, 1.5}, LowPrecision: true} // dX grow by more than 2^7 a tile
	for _, m := range []struct {
		name         string
		in, old, new string // of kernels with in
		opt          kernels.Options
		edit         edit // of operands in bf16; nil: f16
	}{
		{"the kernel itself", "", "", "", causal, nil},
		{"steep slopes", "", "", "", steep, nil},
		{"a product of S is dropped", "", "s = subgroupMatrixMultiplyAccumulate(own1[i]", "if (i == 1u) { continue; } s = subgroupMatrixMultiplyAccumulate(own1[i]", causal, nil},
		{"a product of dP is dropped", "", "s = subgroupMatrixMultiplyAccumulate(own2[i]", "if (i == 1u) { continue; } s = subgroupMatrixMultiplyAccumulate(own2[i]", causal, nil},
		{"a product of dV is dropped", "", "acc2[n] = subgroup", "if (n == 1u) { continue; } acc2[n] = subgroup", causal, nil},
		{"a product of dK is dropped", dkv, "acc1[n] = subgroupMatrixMul", "if (n == 1u) { continue; } acc1[n] = subgroupMatrixMul", causal, nil},
		{"a product of dQ is dropped", dq, "acc1[n] = subgroupMatrixMul", "if (n == 1u) { continue; } acc1[n] = subgroupMatrixMul", causal, nil},
		{"sums of dK are not rescaled", dkv, "*= factors[", "*= 1.0 + 0.0 * factors[", steep, nil},
		{"sums of dQ are not rescaled", dq, "*= factors[", "*= 1.0 + 0.0 * factors[", steep, nil},
		{"P lacks its factor", "", "e * 32768.0", "e * 16384.0", causal, nil},
		{"keys before the diagonal are hidden", "", "(min(i + p.hi, cap))", "(min(i + p.hi - 3, cap))", causal, nil},
		{"bf16", "", "", "", steep, every},
		{"dO over 2^120", "", "", "", causal, loss(func(row int) int { return row/7%5*30 - 60 })},
		{"small dO is left to lanes", dkv, "acc2[n] = subgroupMatrixMul", "if (n == 1u) { continue; } acc2[n] = subgroupMatrixMul", causal, tiny},
		{"sums of dV keep their factor", dkv, "power_of_two(127u + sum_top - g_top)", "1.0", causal, mixed},
		{"odd rows are left to matrices in dK", dkv, "atomicLoad(&odd_others[tiles % 2u])", "0u", causal, odd("q")},
		{"odd rows are left to matrices in dV", dkv, "atomicLoad(&odd_others[tiles % 2u])", "0u", causal, odd("do")},
		{"odd keys are left to matrices in dQ", dq, "atomicLoad(&odd_others[tiles % 2u])", "0u", causal, odd("k")},
		{"odd keys are left to matrices in dK", dkv, "atomicLoad(&odd_own[subgroup])", "0u", causal, odd("v")},
		{"odd rows are left to matrices in dQ", dq, "atomicLoad(&odd_own[subgroup])", "0u", causal, loss(func(int) int { return 20 })},
		{"odd keys lack their sums", dkv, "0xffffffffu >> (32u - OTHERS)", "0u", causal, odd("v")},
		{"lanes leave dP to matrices", "", "u = select(u, sum, apart)", "", causal, odd("v")},
		{"lanes leave S to matrices", "", "x = select(x, sum, apart)", "", causal, odd("q")},
		{"dX of lanes count twice", "", "dx[0u] = select(dx[0u], vec4<f32>(0.0), apart)", "", causal, every},
		{"P of lanes count twice", dkv, "w = select(w, vec4<f32>(0.0), apart)", "", causal, odd("q")},
		{"sums of lanes are lost", "", "state[to] += state[", "state[to] += 0.0 * state[", causal, every},
	} {
		b := openMatrices(t, Options{})
		dtype := backend.F16
		if m.edit != nil {
			dtype = backend.BF16
		}
		port := &mutated{Device: b.dev.Port, kernel: "matrixgradient ", edit: func(wgsl string) string {
			if !strings.Contains(wgsl, m.in) {
				return wgsl
			}
			return strings.NewReplacer(m.old, m.new).Replace(wgsl)
		}}
		b = must.Get(newBackend(port, b.info, Options{}))(t)
		b.info.Type = backend.CPU // whose kernels have loops
		if m.old == "" {
			b.info.Type = backend.Discrete
		}
		err := kernelstest.CheckGradients(t, kernels.NewDevice(b), kernelstest.Case{Name: m.name, DType: dtype, Seed: 2, Options: m.opt, Edit: m.edit,
			Dims: kernels.Dims{Batch: 1, Heads: 2, KVHeads: 1, SeqQ: 37, SeqK: 75, Dim: dim, ValueDim: columns}})
		t.Logf("%s: %v", m.name, err)
		if port.edited != (m.old != "") || (err != nil) != port.edited {
			t.Errorf("%s: edited: %t, %v", m.name, port.edited, err)
		}
	}
}

// TestMatrixExtremes: elements that vanish in the unit of their row count, and no weight overflows where the sum of a
// score and the largest change of a maximum is rounded up.
func TestMatrixExtremes(t *testing.T) {
	const rows, keys, d = 20, 16, 8
	for _, c := range []struct {
		name  string
		dtype backend.DType
		q     [2]float32
		k0    float32
		k1    func(j int) float32
		scale float32
		lse   float64
	}{
		{"small queries", backend.BF16, [2]float32{0x1p127, 0x1p-50}, 0, func(int) float32 { return 0x1p10 }, 0x1p40, 1 + math.Log(keys)},
		{"scores of 2^27, f16", backend.F16, [2]float32{0x1p13, 16}, 0x1p14, func(j int) float32 { return float32(1 + j/8) }, math.Ln2, 0x1p27 * math.Ln2},
		{"scores of 2^27, bf16", backend.BF16, [2]float32{0x1p13, 16}, 0x1p14, func(j int) float32 { return float32(1 + j/8) }, math.Ln2, 0x1p27 * math.Ln2},
	} {
		b := openMatrices(t, Options{})
		on := func(rows int, f func(row int) [d]float32) backend.Tensor {
			return upload(t, b, host(t, backend.Shape{1, 1, rows, d}, func(i int) float32 { return f(i / d)[i%d] }))
		}
		x := halved(t, b, c.dtype, &backend.Call{
			Q: on(rows, func(int) [d]float32 { return [d]float32{c.q[0], c.q[1]} }), K: on(keys, func(j int) [d]float32 { return [d]float32{c.k0, c.k1(j)} }),
			V: on(keys, func(int) [d]float32 { return [d]float32{1} }), O: alloc(t, b, backend.F32, backend.Shape{1, 1, rows, d}),
			LSE: alloc(t, b, backend.F32, backend.Shape{1, 1, rows, 1}), Problem: backend.Problem{Scale: c.scale, Visible: backend.Everything()},
		})
		got, _ := onMatrices(t, b, x)
		for row, lse := range got[1] {
			if o := got[0][row*d]; math.Abs(float64(o)-1) > 1e-3 || math.Abs(float64(lse)-c.lse) > 1e-5*c.lse {
				t.Errorf("%s: o and lse of row %d are %v and %v, want 1 and %v", c.name, row, o, lse, c.lse)
			}
		}
	}
}

// TestMatrixUnitsUnreached: where a library reaches matrix units of a device, the list without that library has them too, as
// in a browser, or says that the device has some.
func TestMatrixUnitsUnreached(t *testing.T) {
	has := func(library, feature string) (devices []string) {
		for _, info := range must.Get(Driver{Options: Options{Library: library}}.Devices())(t) {
			if strings.Contains(strings.Join(info.Features, ", "), feature) {
				devices = append(devices, info.Device)
			}
		}
		return devices
	}
	reached, told := has("", "f16->f32"), has("off", "matrix units only")
	if told = append(has("off", "f16->f32"), told...); !slices.Equal(reached, told) {
		t.Errorf("matrix units of %q are reached, and the list without a library tells of %q", reached, told)
	}
	if both := has("", "matrix units only"); both != nil && reached != nil {
		t.Errorf("the list with a library tells of %q", both)
	}
}

// TestMatrixPeak: the kernel makes the 64 products a round that the rate counts. With elements of 2^-14 and 1 each adds
// K·2^-14 to one of four results, whose sum is stored.
func TestMatrixPeak(t *testing.T) {
	b := openMatrices(t, Options{})
	rate, err := b.MatrixFLOPS(t.Context())
	if err != nil || !(rate > 1e6) {
		t.Errorf("%v operations a second, %v", rate, err)
	}
	m, _ := b.matrices.Largest()
	out := alloc(t, b, backend.F32, backend.Shape{1, 1, 1, 64})
	r, rounds := b.dev.NewRunner(t.Context()), 3
	err = r.Dispatch(m, []cut.Window{{Buf: cut.StoreOf(out).Parts[0], Size: 256}}, &shaders.MatrixPeakParams{Rounds: rounds, Factor: 0x04000400}, 1)
	if err == nil {
		err = r.Flush()
	}
	r.Finish(err)
	check(t, err)
	for i, x := range floats(t, b, out) {
		if want := float32(64*rounds*m.K) / (1 << 14); x != want {
			t.Fatalf("element %d is %v after %d rounds, want %v", i, x, rounds, want)
		}
	}
	none := &Backend{dev: b.dev, info: b.info}
	must.Fail(t, "without matrices", must.Err(none.MatrixFLOPS(t.Context())), backend.ErrUnsupported)
}
