package beamattn

import (
	"bytes"
	"fmt"
	"io"
	"log/slog"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/apache/beam/sdks/v2/go/pkg/beam"

	"github.com/seed90331342/attn/cmd/attn-beam/internal/cut"
	"github.com/seed90331342/attn/cmd/attn-beam/internal/shards"
	"github.com/seed90331342/attn/cmd/attn-beam/internal/workers"
	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

func TestMain(m *testing.M) {
	workers.Serve()
	beam.Init()
	slog.SetDefault(slog.New(slog.NewTextHandler(io.Discard, nil)))
	os.Exit(m.Run())
}

// problem is a call with its operands.
type problem struct {
	dims    kernels.Dims
	dtype   kernels.DType
	q, k, v []float32
	options kernels.Options
}

// draw returns a problem whose elements dtype holds exactly.
func draw(d kernels.Dims, dtype kernels.DType, o kernels.Options) *problem {
	rng := rand.New(rand.NewPCG(1, uint64(d.SeqK)))
	tensor := func(n int) []float32 {
		x := make([]float32, n)
		for i := range x {
			x[i] = dtype.Round(float32(rng.NormFloat64()))
		}
		return x
	}
	p := &problem{dims: d, dtype: dtype, options: o}
	p.q = tensor(d.Batch * d.Heads * d.SeqQ * d.Dim)
	p.k = tensor(d.Batch * d.KVHeads * d.SeqK * d.Dim)
	p.v = tensor(d.Batch * d.KVHeads * d.SeqK * d.ValueDim)
	return p
}

// spec writes the operands in n shards each and returns the call over them.
func (p *problem) spec(t *testing.T, n int) Spec {
	t.Helper()
	dir := t.TempDir()
	elements := "f4"
	if p.dtype == kernels.F16 {
		elements = "f2"
	}
	for _, x := range []struct {
		name               string
		data               []float32
		heads, rows, width int
	}{{"q", p.q, p.dims.Heads, p.dims.SeqQ, p.dims.Dim}, {"k", p.k, p.dims.KVHeads, p.dims.SeqK, p.dims.Dim}, {"v", p.v, p.dims.KVHeads, p.dims.SeqK, p.dims.ValueDim}} {
		for i := range n {
			lo, hi := x.rows*i/n, x.rows*(i+1)/n
			var shard []float32
			for h := range p.dims.Batch * x.heads {
				shard = append(shard, x.data[(h*x.rows+lo)*x.width:(h*x.rows+hi)*x.width]...)
			}
			must.Do(t, shards.WriteTensor(t.Context(), fmt.Sprintf("%s/%s-%d.npy", dir, x.name, i), elements, []int{p.dims.Batch, x.heads, hi - lo, x.width}, shard))
		}
	}
	return Spec{Q: dir + "/q-*.npy", K: dir + "/k-*.npy", V: dir + "/v-*.npy", Out: dir + "/out", Options: p.options, DType: p.dtype.String(), Backend: "cpu"}
}

// direct returns O and LSE of one call.
func (p *problem) direct(t *testing.T) (o, lse []float32) {
	t.Helper()
	dev := kernels.NewDevice(cpu.New(cpu.Options{}))
	defer dev.Close()
	var tensors [3]kernels.Tensor
	for i, x := range []struct {
		data  []float32
		shape kernels.Shape
	}{
		{p.q, kernels.Shape{p.dims.Batch, p.dims.Heads, p.dims.SeqQ, p.dims.Dim}}, {p.k, kernels.Shape{p.dims.Batch, p.dims.KVHeads, p.dims.SeqK, p.dims.Dim}},
		{p.v, kernels.Shape{p.dims.Batch, p.dims.KVHeads, p.dims.SeqK, p.dims.ValueDim}},
	} {
		tensors[i] = must.Get(dev.FromFloat32(t.Context(), p.dtype, x.data, x.shape))(t)
	}
	opt := p.options
	opt.LSE = true
	r := must.Get(dev.Attention(t.Context(), tensors[0], tensors[1], tensors[2], opt))(t)
	defer r.Release()
	return must.Get(dev.ToFloat32(t.Context(), r.O))(t), must.Get(dev.ToFloat32(t.Context(), r.LSE))(t)
}

// run runs a job in n worker processes.
func run(t *testing.T, spec Spec, n int) error {
	t.Helper()
	spec.Branches = n
	job, err := Prepare(t.Context(), spec)
	if err != nil {
		return err
	}
	p, s := beam.NewPipelineWithRoot()
	job.Attention(s)
	_, err = workers.Run(t.Context(), p, workers.Options{Workers: n, Env: map[string]string{"GOMAXPROCS": "1"}})
	return err
}

// results reads the outputs that the manifest of a folder names.
func results(t *testing.T, out string, p *problem) (o, lse []float32) {
	t.Helper()
	m := must.Get(shards.ReadManifest(t.Context(), out+"/manifest.json"))(t)
	if !bytes.Contains(m.Options, []byte(`"DType"`)) {
		t.Errorf("the manifest has the options %s", m.Options)
	}
	read := func(a *shards.Array) []float32 {
		if a == nil {
			return nil
		}
		must.Do(t, a.Check(t.Context()))
		var all []float32
		for b := range a.Shape[0] {
			part := make([]float32, a.Shape[1]*a.Shape[2]*a.Shape[3])
			must.Do(t, a.Read(t.Context(), part, b, cut.Span{Hi: a.Shape[1]}, cut.Span{Hi: a.Shape[2]}))
			all = append(all, part...)
		}
		return all
	}
	if left, err := filepath.Glob(out + "/partial/*"); err != nil || len(left) > 0 {
		t.Errorf("partial results are left: %v (%v)", left, err)
	}
	return read(m.Outputs["o"]), read(m.Outputs["lse"])
}

func sameBits(a, b []float32) bool {
	return slices.EqualFunc(a, b, func(x, y float32) bool { return math.Float32bits(x) == math.Float32bits(y) })
}

// TestOptions: every option that partial results carry, with the bits of one call. Keys are more than two splits.
func TestOptions(t *testing.T) {
	const keys = 2*cpu.ShardKeys + 1500
	inf := float32(math.Inf(-1))
	segments := make([]int32, keys)
	for i := range segments {
		segments[i] = int32(i / 30000)
	}
	rows := make([]int32, 300)
	for i := range rows {
		rows[i] = int32(i / 110)
	}
	for _, c := range []struct {
		name  string
		dtype kernels.DType
		o     kernels.Options
	}{
		{"plain", kernels.F32, kernels.Options{}},
		{"causal", kernels.F32, kernels.Options{Causal: true, Align: kernels.LowerRight}},
		{"causal from the first key", kernels.F32, kernels.Options{Causal: true}},
		{"window with an offset", kernels.F32, kernels.Options{Window: &kernels.Window{Left: 40000, Right: 7}, Offset: []int{2*cpu.ShardKeys - 100}}},
		{"offsets", kernels.F32, kernels.Options{Causal: true, Offset: []int{40000, -100}}},
		{"klen", kernels.F32, kernels.Options{KLen: []int{40000, 0}}},
		{"softcap and scale", kernels.F32, kernels.Options{Softcap: 2, Scale: new(0.3)}},
		{"sinks", kernels.F32, kernels.Options{Sinks: []float32{0.5, 2, inf, -1}, Causal: true, Align: kernels.LowerRight}},
		{"sinks and rows that see the second split only", kernels.F32, kernels.Options{Sinks: []float32{0.5, 2, inf, -1}, Window: &kernels.Window{Left: 100}, Offset: []int{cpu.ShardKeys + 200}}},
		{"sinks and rows that see nothing", kernels.F32, kernels.Options{Sinks: []float32{0.5, 2, inf, -1}, Causal: true, Offset: []int{-150}}},
		{"alibi", kernels.F32, kernels.Options{ALiBi: []float32{0.001, 0.0001, 0.5, 0}, Causal: true, Align: kernels.LowerRight}},
		{"segments", kernels.F32, kernels.Options{QSegments: [][]int32{rows}, KSegments: [][]int32{segments}}},
		{"f16", kernels.F16, kernels.Options{Causal: true, Align: kernels.LowerRight}},
		{"bf16", kernels.BF16, kernels.Options{Causal: true, Align: kernels.LowerRight}},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.o.LSE = true
			p := draw(kernels.Dims{Batch: 2, Heads: 4, KVHeads: 2, SeqQ: 300, SeqK: keys, Dim: 8, ValueDim: 5}, c.dtype, c.o)
			spec := p.spec(t, 3)
			must.Do(t, run(t, spec, 2))
			o, lse := results(t, spec.Out, p)
			wantO, wantLSE := p.direct(t)
			if !sameBits(o, wantO) || !sameBits(lse, wantLSE) {
				t.Errorf("O has the bits of one call: %t, LSE: %t", sameBits(o, wantO), sameBits(lse, wantLSE))
			}
		})
	}
}

// TestBalance: each unit belongs to one branch, and branches have almost as many pairs.
func TestBalance(t *testing.T) {
	for _, branches := range []int{2, 4, 7} {
		x := must.Get(cut.New(kernels.Dims{Batch: 1, Heads: 1, KVHeads: 1, SeqQ: 65536, SeqK: 65536, Dim: 64, ValueDim: 64}, kernels.Options{Causal: true}, cut.Config{Workers: branches}))(t)
		var all, most int64
		for i := range branches {
			var pairs int64
			(&unitsFn{Blocks: x.Blocks, Branch: i, Branches: branches}).ProcessElement(nil, func(u cut.Unit) { pairs += u.Pairs })
			all, most = all+pairs, max(most, pairs)
		}
		if all != x.Pairs || float64(most) > 1.05*float64(all)/float64(branches) {
			t.Errorf("%d branches: %d pairs of %d, at most %d in one", branches, all, x.Pairs, most)
		}
	}
}
