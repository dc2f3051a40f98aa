package gpu

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/backend/oracle"
	"github.com/seed90331342/attn/gpu/internal/cut"
	"github.com/seed90331342/attn/gpu/internal/port"
	"github.com/seed90331342/attn/shaders"
)

// openMatrices opens a device with matrix units, such as that of a library that ATTN_WEBGPU names. Without them the
// test is skipped.
func openMatrices(t testing.TB, opt Options) *Backend {
	t.Helper()
	b := open(t, opt)
	if len(b.matrices.Sizes) == 0 {
		t.Skip("needs a device with matrix units")
	}
	return b
}

// halved returns c in low precision, with q, k and v of f16.
func halved(t testing.TB, b *Backend, c *backend.Call) *backend.Call {
	t.Helper()
	c.LowPrecision = true
	for _, x := range []*backend.Tensor{&c.Q, &c.K, &c.V} {
		*x = copied(t, b, backend.F16, *x)
	}
	return c
}

// onMatrices runs c, which must take matrix units, and returns o and lse.
func onMatrices(t testing.TB, b *Backend, c *backend.Call) (results [2][]float32, chunks int) {
	t.Helper()
	plan, err := b.Plan(t.Context(), c)
	check(t, err)
	if !strings.Contains(plan.Path, "matrix units WGSL, products of f16 matrices of ") {
		t.Fatalf("planned %q: %s", plan.Path, plan.Why)
	}
	check(t, b.Attention(context.Background(), c))
	return [2][]float32{floats(t, b, c.O), floats(t, b, c.LSE)}, plan.Chunks
}

// TestMatrixCuts compares calls with every option, cut and uncut, bit for bit.
func TestMatrixCuts(t *testing.T) {
	for name, of := range map[string]func(testing.TB, *Backend) *backend.Call{"mask and bias": problem, "blocks and bias by distance": distant} {
		b := openMatrices(t, Options{})
		want, _ := onMatrices(t, b, halved(t, b, of(t, b)))
		for _, l := range []struct {
			name string
			opt  Options
		}{
			{"submissions of 100,000 operations", Options{MaxWork: 1e5}},
			{"bindings of 16 KiB", Options{Limits: gputypes.Limits{MaxStorageBufferBindingSize: 16 << 10}}},
		} {
			b := openMatrices(t, l.opt)
			got, chunks := onMatrices(t, b, halved(t, b, of(t, b)))
			if chunks < 2 {
				t.Errorf("%s, %s: nothing was cut", name, l.name)
			}
			sameRow(t, name+", "+l.name+": o", got[0], want[0])
			sameRow(t, name+", "+l.name+": lse", got[1], want[1])
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
		d.edited = desc.WGSL != old
	}
	return d.Device.CreatePipeline(desc)
}

// TestMatrixMutants: the results are within the bound of low precision, and those of mistakes are not.
func TestMatrixMutants(t *testing.T) {
	const heads, rows, keys, d = 2, 37, 75, 32
	data := func(n int) func(i int) float32 {
		return func(i int) float32 { return backend.F16.Round(3 * wave((i*i+n)%8191)) }
	}
	for _, m := range []struct{ name, old, new string }{
		{"the kernel itself", "", ""},
		{"a product of scores is dropped", "subgroupMatrixMultiplyAccumulate(query[1u], x, s[0u])", "s[0u]"},
		{"sums of scores begin again", "subgroupMatrixMultiplyAccumulate(query[1u], x, s[0u])", "subgroupMatrixMultiplyAccumulate(query[1u], x, Result())"},
		{"a product of the output is dropped", "subgroupMatrixMultiplyAccumulate(w[0u], x, acc[1u])", "acc[1u]"},
		{"sums of the output begin again", "subgroupMatrixMultiplyAccumulate(w[0u], x, acc[1u])", "subgroupMatrixMultiplyAccumulate(w[0u], x, Result())"},
		{"the output is not rescaled", "if (called != 0u) {", "if (called > 9u) {"},
		{"the sum is not rescaled", "fma(l[0u], rescale[0u], ", "fma(l[0u], 1.0, "},
		{"keys before the diagonal are hidden", "(min(i + p.hi, cap))", "(min(i + p.hi - 3, cap))"},
	} {
		b := openMatrices(t, Options{})
		port := &mutated{Device: b.dev.Port, kernel: "matrix ", edit: strings.NewReplacer(m.old, m.new).Replace}
		b, err := newBackend(port, b.info, Options{})
		check(t, err)
		c := halved(t, b, &backend.Call{
			Q: upload(t, b, host(t, backend.Shape{1, heads, rows, d}, data(0))), K: upload(t, b, host(t, backend.Shape{1, 1, keys, d}, data(7))),
			V: upload(t, b, host(t, backend.Shape{1, 1, keys, d}, data(9))), O: alloc(t, b, backend.F32, backend.Shape{1, heads, rows, d}),
			LSE: alloc(t, b, backend.F32, backend.Shape{1, heads, rows, 1}), Problem: backend.Problem{Scale: 0.1, Visible: backend.Visibility{Left: backend.Unbounded, Offset: keys - rows}},
		})
		got, _ := onMatrices(t, b, c)
		if m.old != "" && !port.edited {
			t.Fatalf("%s: the kernel has no %q", m.name, m.old)
		}
		of := func(n, first, count int) (x []float32) {
			for i := range count {
				x = append(x, data(n)(first+i))
			}
			return x
		}
		worst := 0.0
		for row := range heads * rows {
			a := oracle.Solve(oracle.Row{Q: of(0, row*d, d), K: of(7, 0, keys*d), V: of(9, 0, keys*d), Dv: d, Scale: 0.1, Rounded: backend.F16,
				Hidden: func(j int) bool { return j > row%rows+keys-rows }})
			for x, o := range a.O {
				worst = max(worst, oracle.Off(float64(got[0][row*d+x]), o, a.OBound[x]))
			}
			worst = max(worst, oracle.Off(float64(got[1][row]), a.LSE, a.LSEBound))
		}
		t.Logf("%s: %.3g of the bound", m.name, worst)
		if (worst > 1) != (m.old != "") {
			t.Errorf("%s: %.3g of the bound", m.name, worst)
		}
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
	err = r.Dispatch(m, []cut.Window{{Buf: cut.StoreOf(out).Parts[0], Size: 256}}, &shaders.MatrixPeakParams{Rounds: rounds, Factor: 0x04000400}, [3]uint32{1, 1, 1})
	if err == nil {
		err = r.Flush()
	}
	if r.Finish(err); err != nil {
		t.Fatal(err)
	}
	for i, x := range floats(t, b, out) {
		if want := float32(64*rounds*m.K) / (1 << 14); x != want {
			t.Fatalf("element %d is %v after %d rounds, want %v", i, x, rounds, want)
		}
	}
	none := &Backend{dev: b.dev, info: b.info}
	if _, err := none.MatrixFLOPS(t.Context()); !errors.Is(err, backend.ErrUnsupported) {
		t.Errorf("without matrices: %v", err)
	}
}
