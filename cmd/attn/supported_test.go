package main

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kvcache"
	"github.com/seed90331342/attn/kernels/nn"
)

var update = flag.Bool("update", false, "write the table of docs/options.md again")

// supportRow is a row of the table in docs/options.md: an option, its names, and a
// call with it.
type supportRow struct {
	option, kernels, run string
	call                 supportCall
}

// supportCall is a small call on random operands. Its result is recomputed in float64.
type supportCall struct {
	dims  kernels.Dims  // zero: B=2 H=4 Hkv=2 Sq=9 Sk=13 D=16
	dtype kernels.DType // of q, k and v
	kv    kernels.DType // of k and v where they have another
	bshd  bool
	opt   func(s *support) kernels.Options
	other func(s *support) error // instead of attention
}

// support runs calls on one device.
type support struct {
	t   *testing.T
	dev *kernels.Device
	d   kernels.Dims
	rng *rand.Rand
}

// draw returns a random tensor.
func (s *support) draw(dtype kernels.DType, shape kernels.Shape) kernels.Tensor {
	var t kernels.Tensor
	var err error
	if dtype == kernels.Bool {
		data := make([]bool, shape.Elements())
		for i := range data {
			data[i] = s.rng.IntN(3) > 0
		}
		if t, err = kernels.HostBool(data, shape); err == nil {
			t, err = s.dev.Upload(s.t.Context(), t)
		}
	} else {
		data := make([]float32, shape.Elements())
		for i := range data {
			data[i] = float32(s.rng.NormFloat64())
		}
		t, err = s.dev.FromFloat32(s.t.Context(), dtype, data, shape)
	}
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(t.Release)
	return t
}

// run runs the call. It returns ErrUnsupported, another error, or an error for a
// result that Check finds wrong.
func (s *support) run(c supportCall) error {
	s.d = c.dims
	if s.d == (kernels.Dims{}) {
		s.d = kernels.Dims{Batch: 2, Heads: 4, KVHeads: 2, SeqQ: 9, SeqK: 13, Dim: 16, ValueDim: 16}
	}
	if c.other != nil {
		return c.other(s)
	}
	d, kv := s.d, c.kv
	if kv == 0 {
		kv = c.dtype
	}
	tensor := func(dtype kernels.DType, heads, seq, dim int) kernels.Tensor {
		if !c.bshd {
			return s.draw(dtype, kernels.Shape{d.Batch, heads, seq, dim})
		}
		t, err := s.draw(dtype, kernels.Shape{d.Batch, seq, heads, dim}).Swap(kernels.Heads, kernels.Seq)
		if err != nil {
			s.t.Fatal(err)
		}
		return t
	}
	q, k, v := tensor(c.dtype, d.Heads, d.SeqQ, d.Dim), tensor(kv, d.KVHeads, d.SeqK, d.Dim), tensor(kv, d.KVHeads, d.SeqK, d.ValueDim)
	var opt kernels.Options
	if c.opt != nil {
		opt = c.opt(s)
	}
	prepared, err := s.dev.Prepare(q, k, v, opt)
	if err != nil {
		return err
	}
	r, err := prepared.Run(s.t.Context())
	if err != nil {
		return err
	}
	defer r.Release()
	report, err := prepared.Check(s.t.Context(), r, kernels.CheckOptions{Rows: 1 << 20})
	if err == nil && !report.OK() {
		err = fmt.Errorf("wrong: %s", report.Worst)
	}
	return err
}

// with returns a call with options that need no tensors.
func with(opt kernels.Options) supportCall {
	return supportCall{opt: func(*support) kernels.Options { return opt }}
}

// tensorsIn returns a call with options that need tensors, which set draws.
func tensorsIn(set func(s *support, o *kernels.Options)) supportCall {
	return supportCall{opt: func(s *support) kernels.Options {
		var o kernels.Options
		set(s, &o)
		return o
	}}
}

func (s *support) scores(b, h int) kernels.Shape { return kernels.Shape{b, h, s.d.SeqQ, s.d.SeqK} }

func supportRows() []supportRow {
	head := func(d, dv int) supportCall {
		return supportCall{dims: kernels.Dims{Batch: 1, Heads: 2, KVHeads: 1, SeqQ: 20, SeqK: 40, Dim: d, ValueDim: dv}}
	}
	mask := func(s *support, o *kernels.Options) { o.Mask = s.draw(kernels.Bool, s.scores(1, 4)) }
	bias := func(s *support, o *kernels.Options) { o.Bias = s.draw(kernels.F32, s.scores(2, 1)) }
	relative := func(s *support, o *kernels.Options) {
		o.RelativeBias = s.draw(kernels.F32, kernels.Shape{1, 4, 1, s.d.SeqQ + s.d.SeqK - 1})
	}
	blocks := func(s *support, o *kernels.Options) {
		o.BlockMask, o.BlockSize = s.draw(kernels.Bool, kernels.Shape{1, 4, 3, 4}), 4
	}
	both := func(a, b func(*support, *kernels.Options)) supportCall {
		return tensorsIn(func(s *support, o *kernels.Options) { a(s, o); b(s, o) })
	}
	return []supportRow{
		{"f32", "tensor dtype", "`--dtype`", supportCall{}},
		{"f16, bf16 (arithmetic in f32)", "tensor dtype", "`--dtype`", supportCall{dtype: kernels.F16}},
		{"k and v of another type than q", "tensor dtype", "", supportCall{kv: kernels.BF16}},
		{"any strides, `[B,H,S,D]` and `[B,S,H,D]`", "tensor views", "`--layout bshd`", supportCall{bshd: true}},
		{"any head size, another for v", "shapes", "shapes", head(192, 128)},
		{"head sizes 576 and 512 (absorbed latent attention)", "shapes", "shapes", head(576, 512)},
		{"grouped heads (`kvHeads` divides `heads`)", "shapes", "shapes", supportCall{}},
		{"scale (default 1/sqrt(D))", "`Scale`", "`--scale`", with(kernels.Options{Scale: new(0.0)})},
		{"softcap", "`Softcap`", "`--softcap`", with(kernels.Options{Softcap: 2})},
		{"causal, aligned upper left or lower right", "`Causal`, `Align`", "`--causal`, `--causal-align`", with(kernels.Options{Causal: true, Align: kernels.LowerRight})},
		{"sliding window", "`Window`", "`--window L,R`", with(kernels.Options{Window: &kernels.Window{Left: 3, Right: 2}})},
		{"position offset", "`Offset`", "`--offset`", with(kernels.Options{Causal: true, Offset: []int{3}})},
		{"keys per batch (right padding)", "`KLen`", "`--klen`", with(kernels.Options{KLen: []int{13, 5}})},
		{"prefix that all see", "`Prefix`", "`--prefix`", with(kernels.Options{Causal: true, Prefix: []int{4, 2}})},
		{"packed documents", "`QSegments`, `KSegments`", "`--segments`", with(kernels.Options{
			QSegments: [][]int32{{1, 1, 1, 2, 2, 2, 3, 3, 3}}, KSegments: [][]int32{{1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 3, 3}}})},
		{"boolean mask, broadcast, or with fewer keys", "`Mask`", "`--mask`", tensorsIn(mask)},
		{"additive bias f32, f16, bf16, likewise", "`Bias`", "`--bias`, `--mask`", tensorsIn(bias)},
		{"mask and bias", "both", "both", both(mask, bias)},
		{"linear biases (ALiBi)", "`ALiBi`", "`--alibi`", with(kernels.Options{ALiBi: []float32{1, .5, .25, .125}})},
		{"bias by distance", "`RelativeBias`", "`--relative-bias`", tensorsIn(relative)},
		{"bias by distance and bias", "both", "both", both(relative, bias)},
		{"mask of blocks, hidden ones not computed", "`BlockMask`", "`--block-mask`", tensorsIn(blocks)},
		{"mask of blocks and mask", "both", "both", both(blocks, mask)},
		{"attention sinks", "`Sinks`", "`--sinks`", with(kernels.Options{Sinks: []float32{1, -1, 0, 2}})},
		{"dropout (Philox 4x32-10)", "`Dropout`", "`--dropout`, `--seed`", with(kernels.Options{Dropout: kernels.Dropout{P: .3, Seed: 7}})},
		{"log-sum-exp out", "`LSE`", "`--lse`", with(kernels.Options{LSE: true})},
		{"weights out, by two more stages, O(S²) memory", "`Weights`", "`--weights`", with(kernels.Options{Weights: true})},
		{"scores out, at three points before the softmax", "`Scores`", "`--scores`, `--scores-at`", supportCall{other: scoresSupport}},
		{"largest weights of each query, O(S·n) memory", "`TopWeights`", "`--topk`", supportCall{other: topSupport}},
		{"packed sequences of different lengths", "`CuQ`, `CuK`", "`--cu-q`, `--cu-k`", supportCall{other: packedSupport}},
		{"cache: f32, f16, bf16", "`kvcache.Cache`", "", cacheSupport(kvcache.Config{DType: kernels.F16, Capacity: 16})},
		{"cache: int8, each row of each head with a scale of its own", "`kvcache.Cache`", "", cacheSupport(kvcache.Config{DType: kernels.Q8, Capacity: 16})},
		{"cache: rolling window", "`kvcache.Cache`", "", cacheSupport(kvcache.Config{Capacity: 20, Window: 6})},
		{"cache: pages, shared and copied on write", "`kvcache.Paged`", "", pagedSupport(kernels.F32, 16, false)},
		{"cache: pages of int8", "`kvcache.Paged`", "", pagedSupport(kernels.Q8, 16, false)},
		{"cache: a shared prefix computed once", "`SharePrefix`", "", pagedSupport(kernels.F32, 4, true)},
		{"merge of partial results", "`Merge`", "", supportCall{other: mergeSupport}},
		{"rotary embedding, half-split or interleaved, partial", "`Rotate`, `nn.RoPE`", "`--rope`", supportCall{other: rotateSupport}},
		{"whole layers (`MultiHeadAttention`), weights from `.npz`", "`nn.MultiHeadAttention`", "", supportCall{other: layerSupport}},
	}
}

// drawn returns random q, k and v in f32.
func (s *support) drawn() (q, k, v kernels.Tensor) {
	d := s.d
	return s.draw(kernels.F32, kernels.Shape{d.Batch, d.Heads, d.SeqQ, d.Dim}),
		s.draw(kernels.F32, kernels.Shape{d.Batch, d.KVHeads, d.SeqK, d.Dim}),
		s.draw(kernels.F32, kernels.Shape{d.Batch, d.KVHeads, d.SeqK, d.ValueDim})
}

func scoresSupport(s *support) error {
	q, k, _ := s.drawn()
	x, err := s.dev.Scores(s.t.Context(), q, k, kernels.Biased, kernels.Options{Causal: true})
	x.Release()
	return err
}

func topSupport(s *support) error {
	q, k, _ := s.drawn()
	_, err := s.dev.TopWeights(s.t.Context(), q, k, 3, kernels.Options{Causal: true})
	return err
}

func packedSupport(s *support) error {
	s.d.Batch = 1
	q, k, v := s.drawn()
	r, err := s.dev.Attention(s.t.Context(), q, k, v, kernels.Options{Causal: true, CuQ: []int{0, 4, 9}, CuK: []int{0, 5, 13}})
	r.Release()
	return err
}

// last returns the last n rows of x.
func (s *support) last(x kernels.Tensor, n int) kernels.Tensor {
	rows := x.Shape()[kernels.Seq]
	x, err := x.Slice(kernels.Seq, rows-n, rows)
	if err != nil {
		s.t.Fatal(err)
	}
	return x
}

// cacheSupport appends all keys and attends with the last row.
func cacheSupport(c kvcache.Config) supportCall {
	return supportCall{other: func(s *support) error {
		q, k, v := s.drawn()
		c.Batch, c.KVHeads, c.Dim = s.d.Batch, s.d.KVHeads, s.d.Dim
		cache, err := kvcache.New(s.t.Context(), s.dev, c)
		if err != nil {
			return err
		}
		defer cache.Release()
		for j := range s.d.SeqK {
			row := func(x kernels.Tensor) kernels.Tensor {
				part, err := x.Slice(kernels.Seq, j, j+1)
				if err != nil {
					s.t.Fatal(err)
				}
				return part
			}
			if err := cache.Append(s.t.Context(), row(k), row(v), nil); err != nil {
				return err
			}
		}
		r, err := cache.Attention(s.t.Context(), s.last(q, 1), kvcache.CallOptions{})
		r.Release()
		return err
	}}
}

// pagedSupport appends the keys to a sequence, forks it, and attends with both.
func pagedSupport(dtype kernels.DType, size int, share bool) supportCall {
	return supportCall{other: func(s *support) error {
		q, k, v := s.drawn()
		cache, err := kvcache.NewPaged(s.t.Context(), s.dev, kvcache.PagedConfig{KVHeads: s.d.KVHeads, Dim: s.d.Dim, DType: dtype, PageSize: size, Pages: 8})
		if err != nil {
			return err
		}
		defer cache.Release()
		one, err := cache.NewSequence()
		if err != nil {
			return err
		}
		first := func(x kernels.Tensor) kernels.Tensor {
			x, err := x.Slice(kernels.Batch, 0, 1)
			if err != nil {
				s.t.Fatal(err)
			}
			return x
		}
		if err := cache.Batch(one).Append(s.t.Context(), first(k), first(v), nil); err != nil {
			return err
		}
		two, err := one.Fork()
		if err != nil {
			return err
		}
		both := cache.Batch(one, two)
		if err := both.Append(s.t.Context(), s.last(k, 1), s.last(v, 1), nil); err != nil {
			return err
		}
		r, err := both.Attention(s.t.Context(), s.last(q, 1), kvcache.CallOptions{SharePrefix: share})
		r.Release()
		return err
	}}
}

func mergeSupport(s *support) error {
	q, k, v := s.drawn()
	var parts [2]kernels.Result
	for i := range parts {
		r, err := s.dev.Attention(s.t.Context(), q, k, v, kernels.Options{LSE: true})
		if err != nil {
			return err
		}
		defer r.Release()
		parts[i] = r
	}
	return s.dev.Merge(s.t.Context(), parts[0], parts[1])
}

func rotateSupport(s *support) error {
	q, _, _ := s.drawn()
	positions, err := nn.Positions(3, s.d.SeqQ)
	if err != nil {
		return err
	}
	angles, err := (&nn.RoPE{Dim: 8, Interleaved: true}).Angles(s.t.Context(), s.dev, s.d.Dim, positions)
	if err != nil {
		return err
	}
	defer angles.Release()
	return s.dev.Rotate(s.t.Context(), q, q, angles)
}

func layerSupport(s *support) error {
	config := nn.MultiHeadConfig{Model: 32, Heads: 4, KVHeads: 2}
	weights, err := config.Initialise(nn.Initialiser{Seed: 1})
	if err != nil {
		return err
	}
	layer, err := nn.NewMultiHeadAttention(s.t.Context(), s.dev, config, weights)
	if err != nil {
		return err
	}
	defer layer.Release()
	r, err := layer.Apply(s.t.Context(), s.draw(kernels.F32, kernels.Shape{2, 1, 9, 32}), nn.MultiHeadOptions{})
	r.Release()
	return err
}

// TestSupportTable asks every backend for each option of the table in docs/options.md:
// yes is a result (confirmed in float64 for attention), refused is ErrUnsupported. It
// compares the table with the answers; -update writes it. Without an adapter the
// column of the GPU stays as it is.
func TestSupportTable(t *testing.T) {
	const path = "../../docs/options.md"
	const begin, end = "<!-- what backends answer: go test ./cmd/attn -run Support -update -->\n", "<!-- end -->\n"
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, ok := strings.Cut(string(raw), begin)
	old, after, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		t.Fatalf("docs/options.md has no part between %q and %q", begin, end)
	}
	names := []string{"cpu", "gpu"}
	answers := map[string][]string{}
	for _, name := range names {
		dev, err := kernels.Open(name)
		if name == "gpu" && errors.Is(err, kernels.ErrNoDevice) {
			for _, line := range strings.Split(strings.TrimSpace(old), "\n")[min(2, strings.Count(old, "\n")):] {
				cells := strings.Split(line, " | ")
				answers[name] = append(answers[name], strings.TrimSuffix(cells[len(cells)-1], " |"))
			}
			t.Log("no adapter: the gpu's column is not asked for")
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = dev.Close() }() // after the tensors of the subtests
		for _, row := range supportRows() {
			t.Run(name+" "+row.option, func(t *testing.T) {
				s := &support{t: t, dev: dev, rng: rand.New(rand.NewPCG(1, 2))}
				answer := "yes"
				switch err := s.run(row.call); {
				case errors.Is(err, kernels.ErrUnsupported):
					answer = "refused"
				case err != nil:
					t.Errorf("%v", err)
				}
				answers[name] = append(answers[name], answer)
			})
		}
	}
	table := []string{"| option | in `kernels` | `attn run` | cpu | gpu |", "| --- | --- | --- | --- | --- |"}
	for i, row := range supportRows() {
		cells := []string{row.option, row.kernels, row.run}
		for _, name := range names {
			if len(answers[name]) != len(supportRows()) {
				t.Fatalf("%s has %d answers for %d options", name, len(answers[name]), len(supportRows()))
			}
			cells = append(cells, answers[name][i])
		}
		table = append(table, "| "+strings.Join(cells, " | ")+" |")
	}
	text := strings.Join(table, "\n") + "\n"
	if text == old {
		return
	}
	if !*update {
		for i, line := range strings.Split(text, "\n") {
			if was := strings.Split(old, "\n"); !slices.Contains(was, line) {
				t.Errorf("docs/options.md, row %d, should be\n%s\n(-update writes it)", i, line)
			}
		}
		return
	}
	if err := os.WriteFile(path, []byte(before+begin+text+end+after), 0o644); err != nil {
		t.Fatal(err)
	}
}
