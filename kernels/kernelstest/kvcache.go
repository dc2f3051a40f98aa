package kernelstest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kvcache"
	"github.com/seed90331342/attn/kernels/nn"
)

// history is a few sequences of random tokens. It records the keys and values that a cache should hold for
// them, rotated and rounded.
type history struct {
	dev   *kernels.Device
	dims  kernels.Dims // of heads and head sizes
	q, kv backend.DType
	rope  kvcache.Rotary
	rng   *rand.Rand
	k, v  [][]float32 // of each sequence, [tokens, Hkv, D]
	bare  bool        // attend without the LSE
	// visible, unless nil, reports whether row i of sequence b sees key j.
	visible func(b, i, j int) bool
	held    []backend.Tensor
}

func newHistory(t *testing.T, dev *kernels.Device, sequences int, q, kv backend.DType, rope kvcache.Rotary) *history {
	s := &history{dev: dev, dims: kernels.Dims{Heads: 4, KVHeads: 2, Dim: 16, ValueDim: 8}, q: q, kv: kv, rope: rope,
		rng: rand.New(rand.NewPCG(77, 0x6b76)), k: make([][]float32, sequences), v: make([][]float32, sequences)}
	if kv == backend.Q4 {
		s.dims.Dim, s.dims.ValueDim = 32, 64
	}
	t.Cleanup(s.release)
	return s
}

func (s *history) release() {
	for _, x := range s.held {
		x.Release()
	}
	s.held = nil
}

func (s *history) len(b int) int { return len(s.k[b]) / (s.dims.KVHeads * s.dims.Dim) }

// draw returns n rows of heads for some sequences.
func (s *history) draw(sequences, heads, n, dim int, dtype backend.DType) operand {
	o := drawn(s.rng, backend.Shape{sequences, heads, n, dim}, dtype)
	if dtype.Quantised() {
		o.quantise()
		o.dtype = backend.F32
	}
	return o
}

// put uploads an operand.
func (s *history) put(t *testing.T, o operand) backend.Tensor {
	t.Helper()
	x := must(s.dev.FromFloat32(t.Context(), o.dtype, o.data, o.shape))(t)
	s.held = append(s.held, x)
	return x
}

func (s *history) read(t *testing.T, x backend.Tensor) []float32 {
	t.Helper()
	return read(t, s.dev, x)
}

// turned returns o rotated by its positions and rounded to dtype. x is o on the device.
func (s *history) turned(t *testing.T, o operand, x backend.Tensor, from []int, dtype backend.DType) operand {
	t.Helper()
	if s.rope == nil {
		return o
	}
	var positions [][]int
	for _, p := range from {
		positions = append(positions, positionsOf(p, o.shape[2])...)
	}
	angles := must(s.rope.Angles(t.Context(), s.dev, o.shape[3], positions))(t)
	defer angles.Release()
	y := must(s.dev.Alloc(t.Context(), dtype, o.shape))(t)
	defer y.Release()
	noError(t, s.dev.Rotate(t.Context(), y, x, angles))
	o.data, o.dtype = s.read(t, y), dtype
	return o
}

// next draws n tokens for some of the sequences, as tensors to append.
func (s *history) next(t *testing.T, of []int, n int) (k, v backend.Tensor, remember func(count []int)) {
	t.Helper()
	ko := s.draw(len(of), s.dims.KVHeads, n, s.dims.Dim, s.kv)
	vo := s.draw(len(of), s.dims.KVHeads, n, s.dims.ValueDim, s.kv)
	k, v = s.put(t, ko), s.put(t, vo)
	from := make([]int, len(of))
	for i, b := range of {
		from[i] = s.len(b)
	}
	if s.rope != nil {
		ko = s.turned(t, ko, k, from, s.kv)
	}
	return k, v, func(count []int) {
		for i, b := range of {
			m := n
			if count != nil {
				m = count[i]
			}
			for j := range m {
				for h := range s.dims.KVHeads {
					s.k[b] = append(s.k[b], ko.rowOf(i, h, j)...)
					s.v[b] = append(s.v[b], vo.rowOf(i, h, j)...)
				}
			}
		}
	}
}

// rowOf returns row j of a head of a batch.
func (o operand) rowOf(b, h, j int) []float32 {
	at := ((b*o.shape[1]+h)*o.shape[2] + j) * o.shape[3]
	return o.data[at : at+o.shape[3]]
}

// whole returns a sequence's rows [tokens, Hkv, D] as [1, Hkv, tokens, D].
func (s *history) whole(rows []float32, dim int) operand {
	n := len(rows) / (s.dims.KVHeads * dim)
	o := operand{backend.Shape{1, s.dims.KVHeads, n, dim}, s.kv, make([]float32, len(rows))}
	for j := range n {
		for h := range s.dims.KVHeads {
			copy(o.rowOf(0, h, j), rows[(j*s.dims.KVHeads+h)*dim:][:dim])
		}
	}
	return o
}

// attend attends from n drawn rows of some of the sequences and compares the result with
// the oracle. merges is the number of merges of partial results in it.
func (s *history) attend(t *testing.T, of []int, n int, cache nn.KVCache, opt kvcache.CallOptions, merges float64) kernels.Result {
	t.Helper()
	qo := s.draw(len(of), s.dims.Heads, n, s.dims.Dim, s.q)
	q := s.put(t, qo)
	rows := backend.Shape{len(of), s.dims.Heads, n, s.dims.ValueDim}
	r := kernels.Result{O: s.alloc(t, s.q, rows)}
	rows[3] = 1
	if !s.bare {
		r.LSE = s.alloc(t, backend.F32, rows)
	}
	noError(t, cache.AttentionInto(t.Context(), r, q, opt))
	from := make([]int, len(of))
	for i, b := range of {
		from[i] = s.len(b) - n
		if opt.Count != nil {
			from[i] = s.len(b) - opt.Count[i]
		}
	}
	qo = s.turned(t, qo, q, from, s.q)
	all, sums := operand{r.O.Shape(), s.q, s.read(t, r.O)}, operand{dtype: backend.F32}
	if !s.bare {
		sums.shape, sums.data = r.LSE.Shape(), s.read(t, r.LSE)
	}
	for i, b := range of {
		m := s.len(b) - from[i]
		if m == 0 {
			continue
		}
		d := s.dims
		d.Batch, d.SeqQ, d.SeqK = 1, m, s.len(b)
		one := &built{Case: Case{Name: fmt.Sprintf("sequence %d", b), Dims: d, DType: s.q, Options: opt.Options}, k: s.whole(s.k[b], d.Dim), v: s.whole(s.v[b], d.ValueDim)}
		if opt.Spans != nil {
			one.Options.Spans = [][][2]int{forBatch(opt.Spans, b)}
		}
		one.Options.Causal, one.Options.Align = !opt.Bidirectional, kernels.LowerRight
		one.q = operand{backend.Shape{1, d.Heads, m, d.Dim}, s.q, nil}
		if s.visible != nil {
			one.MaskShape = backend.Shape{1, 1, m, d.SeqK}
			for i := range m * d.SeqK {
				one.mask = append(one.mask, s.visible(b, i/d.SeqK, i%d.SeqK))
			}
		}
		var got answer
		for h := range d.Heads {
			for j := range m {
				one.q.data = append(one.q.data, qo.rowOf(i, h, j)...)
				got.o = append(got.o, all.rowOf(i, h, j)...)
				if !s.bare {
					got.lse = append(got.lse, sums.rowOf(i, h, j)...)
				}
			}
		}
		if err := one.compareMerged(got, merges); err != nil {
			t.Fatalf("%v, %d tokens, %d rows: %v", one.Name, d.SeqK, m, err)
		}
	}
	return r
}

func (s *history) alloc(t *testing.T, dtype backend.DType, shape backend.Shape) backend.Tensor {
	t.Helper()
	x := must(s.dev.Alloc(t.Context(), dtype, shape))(t)
	s.held = append(s.held, x)
	return x
}

// testKVCache tests caches whose sequences are contiguous.
func testKVCache(t *testing.T, dev *kernels.Device) {
	f32, f16, bf16, q8, q4 := backend.F32, backend.F16, backend.BF16, backend.Q8, backend.Q4
	both := []int{0, 1}
	open := func(t *testing.T, s *history, capacity, window int) *kvcache.Cache {
		t.Helper()
		c, err := kvcache.New(t.Context(), s.dev, kvcache.Config{Batch: len(s.k), KVHeads: s.dims.KVHeads, Dim: s.dims.Dim, ValueDim: s.dims.ValueDim,
			DType: s.kv, Capacity: capacity, Window: window, RoPE: s.rope})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(c.Release)
		return c
	}
	add := func(t *testing.T, s *history, c nn.KVCache, n int, count []int) {
		t.Helper()
		k, v, remember := s.next(t, both, n)
		noError(t, c.Append(t.Context(), k, v, count))
		remember(count)
	}
	for _, kind := range []struct{ q, kv backend.DType }{{f32, f32}, {f32, f16}, {bf16, bf16}, {f32, q8}, {f32, q4}, {f32, backend.F8}} {
		t.Run(fmt.Sprintf("generation, %v keys", kind.kv), func(t *testing.T) {
			needs(t, dev, Case{Keys: &kind.kv})
			s := newHistory(t, dev, 2, kind.q, kind.kv, nil)
			c := open(t, s, 48, 0)
			add(t, s, c, 37, nil)
			s.attend(t, both, 37, c, kvcache.CallOptions{}, 0)
			for range 3 {
				add(t, s, c, 1, nil)
				s.attend(t, both, 1, c, kvcache.CallOptions{}, 0)
			}
		})
	}
	t.Run("ragged", func(t *testing.T) {
		needsAll(t, dev, "alibi")
		s := newHistory(t, dev, 2, f32, f32, &nn.RoPE{Dim: 8})
		c := open(t, s, 60, 0)
		for _, count := range [][]int{{19, 7}, {0, 11}, {1, 1}, {4, 2}} {
			n := max(count[0], count[1])
			add(t, s, c, n, count)
			s.attend(t, both, n, c, kvcache.CallOptions{Count: count}, 0)
		}
		s.attend(t, both, 1, c, kvcache.CallOptions{}, 0)
		s.attend(t, both, 3, c, kvcache.CallOptions{Options: kernels.Options{Window: &kernels.Window{Left: 8}, ALiBi: []float32{0.5, 0.25, 0.125, 0.0625}}}, 0)
		if got := c.Lens(); got[0] != 24 || got[1] != 21 {
			t.Errorf("lengths are %v, should be 24 and 21", got)
		}
	})
	t.Run("cross attention", func(t *testing.T) {
		s := newHistory(t, dev, 2, f32, f32, nil)
		c := open(t, s, 9, 0)
		add(t, s, c, 9, []int{9, 4})
		s.attendAcross(t, both, 12, c)
	})
	t.Run("rewind and reset", func(t *testing.T) {
		s := newHistory(t, dev, 2, f32, f32, &nn.RoPE{})
		c := open(t, s, 20, 0)
		add(t, s, c, 12, nil)
		noError(t, c.Rewind(1, 5))
		s.k[1], s.v[1] = s.k[1][:5*2*16], s.v[1][:5*2*8]
		add(t, s, c, 3, nil)
		s.attend(t, both, 3, c, kvcache.CallOptions{}, 0)
		noError(t, c.Reset())
		s.k, s.v = [][]float32{nil, nil}, [][]float32{nil, nil}
		add(t, s, c, 20, nil)
		s.attend(t, both, 2, c, kvcache.CallOptions{}, 0)
	})
	t.Run("rolling window", func(t *testing.T) {
		s := newHistory(t, dev, 2, f32, f32, &nn.RoPE{})
		const w = 7
		c := open(t, s, 2*w+4, w)
		opt := kvcache.CallOptions{}
		for i, n := range []int{3, 1, 6, 1, 1, 5, 6, 2, 1, 6, 1, 4} {
			count := []int{n, max(1, n-i%3)}
			add(t, s, c, n, count)
			s.attendWindow(t, both, n, c, opt, count, w)
		}
		k, v, _ := s.next(t, both, 7)
		wantError(t, "more at once than fits next to the window", kernels.ErrCapacity, c.Append(t.Context(), k, v, nil))
		s.attendWindow(t, both, 1, c, opt, nil, w)
	})
	t.Run("a failed append changes nothing", func(t *testing.T) {
		s := newHistory(t, dev, 2, f32, f32, nil)
		c := open(t, s, 10, 0)
		add(t, s, c, 8, []int{8, 6})
		q := s.put(t, s.draw(2, 4, 2, 16, f32))
		before := s.result(t, c, q)
		k, v, _ := s.next(t, both, 3)
		_, short, _ := s.next(t, both, 2)
		gone, stop := context.WithCancel(t.Context())
		stop()
		for _, bad := range []struct {
			name  string
			ctx   context.Context
			k, v  backend.Tensor
			count []int
			want  error
			text  string
		}{
			{"no room", t.Context(), k, v, nil, kernels.ErrCapacity, "sequence 0 has 8 of 10 tokens, 3 more do not fit"},
			{"no room for one", t.Context(), k, v, []int{3, 1}, kernels.ErrCapacity, "larger Capacity"},
			{"shapes", t.Context(), k, short, nil, backend.ErrShape, "v has shape [2 2 2 8], it must be [2 2 3 8]"},
			{"heads", t.Context(), q, v, nil, backend.ErrShape, "k has shape [2 4 2 16], it must be [2 2 2 16]"},
			{"missing", t.Context(), k, backend.Tensor{}, nil, backend.ErrShape, "v is missing"},
			{"counts", t.Context(), k, v, []int{1}, backend.ErrShape, "count has 1 numbers"},
			{"count", t.Context(), k, v, []int{1, 4}, backend.ErrOption, "count[1] is 4"},
			{"cancelled", gone, k, v, []int{1, 1}, context.Canceled, ""},
		} {
			err := c.Append(bad.ctx, bad.k, bad.v, bad.count)
			if !errors.Is(err, bad.want) || !strings.Contains(err.Error(), bad.text) {
				t.Errorf("%s: error is %v, should be %v and contain %q", bad.name, err, bad.want, bad.text)
			}
			if after := s.result(t, c, q); !slices.Equal(before, after) {
				t.Errorf("%s: attention gives another result than before", bad.name)
			}
		}
		if _, err := c.Attention(t.Context(), s.put(t, s.draw(2, 4, 7, 16, f32)), kvcache.CallOptions{}); !errors.Is(err, backend.ErrShape) || !strings.Contains(err.Error(), "append their keys first") {
			t.Errorf("more rows than tokens: %v", err)
		}
		c.Release()
		wantError(t, "append after release", backend.ErrReleased, c.Append(t.Context(), k, v, nil))
		wantError(t, "attention after release", backend.ErrReleased, errorOf(c.Attention(t.Context(), q, kvcache.CallOptions{})))
	})
}

// attendAcross is attend for rows that see every token.
func (s *history) attendAcross(t *testing.T, of []int, n int, c nn.KVCache) {
	t.Helper()
	qo := s.draw(len(of), s.dims.Heads, n, s.dims.Dim, s.q)
	r := kernels.Result{O: s.alloc(t, s.q, backend.Shape{len(of), s.dims.Heads, n, s.dims.ValueDim})}
	noError(t, c.AttentionInto(t.Context(), r, s.put(t, qo), kvcache.CallOptions{Bidirectional: true}))
	got := operand{r.O.Shape(), s.q, s.read(t, r.O)}
	for i, b := range of {
		k, v := s.whole(s.k[b], s.dims.Dim), s.whole(s.v[b], s.dims.ValueDim)
		one := qo
		one.shape[0] = 1
		one.data = qo.data[i*len(qo.data)/len(of):][:len(qo.data)/len(of)]
		want := must(s.dev.Attention(t.Context(), s.put(t, one), s.put(t, k), s.put(t, v), kernels.Options{}))(t)
		for j, x := range s.read(t, want.O) {
			if y := got.data[i*len(got.data)/len(of)+j]; !sameNumber(x, y) {
				t.Fatalf("sequence %d: element %d is %v, of the same keys without a cache %v", b, j, y, x)
			}
		}
		want.Release()
	}
}

// attendWindow is attend for a cache with a window of w.
func (s *history) attendWindow(t *testing.T, of []int, n int, c nn.KVCache, opt kvcache.CallOptions, count []int, w int) {
	t.Helper()
	opt.Count = count
	s.attend(t, of, n, windowed{c}, kvcache.CallOptions{Options: kernels.Options{Window: &kernels.Window{Left: w - 1}}, Count: count}, 0)
}

// windowed removes the window from the options of a call: the cache has its own, and attend gives the
// option to the oracle alone.
type windowed struct{ nn.KVCache }

func (c windowed) AttentionInto(ctx context.Context, out kernels.Result, q backend.Tensor, opt kvcache.CallOptions) error {
	opt.Window = nil
	return c.KVCache.AttentionInto(ctx, out, q, opt)
}

// result returns the output of attention from q.
func (s *history) result(t *testing.T, c nn.KVCache, q backend.Tensor) []float32 {
	t.Helper()
	shape := q.Shape()
	shape[3] = s.dims.ValueDim
	r := kernels.Result{O: s.alloc(t, s.q, shape)}
	noError(t, c.AttentionInto(t.Context(), r, q, kvcache.CallOptions{}))
	return s.read(t, r.O)
}

// testPagedCache tests sequences that share pages.
func testPagedCache(t *testing.T, dev *kernels.Device) {
	needsAll(t, dev, "pages")
	for _, kv := range []backend.DType{backend.F32, backend.F16, backend.Q8, backend.Q4, backend.F8} {
		t.Run(fmt.Sprintf("%v", kv), func(t *testing.T) {
			needs(t, dev, Case{Keys: &kv})
			s := newHistory(t, dev, 4, backend.F32, kv, nil)
			if kv == backend.F32 {
				s.rope = &nn.RoPE{}
			}
			testForks(t, s)
		})
	}
	for _, kv := range []backend.DType{backend.F32, backend.BF16, backend.Q8} {
		t.Run(fmt.Sprintf("prefixes of prefixes, %v", kv), func(t *testing.T) {
			needs(t, dev, Case{Keys: &kv})
			testPrefixes(t, newHistory(t, dev, 6, backend.F32, kv, nil))
		})
	}
	t.Run("window", func(t *testing.T) {
		s := newHistory(t, dev, 2, backend.F32, backend.F32, nil)
		const w = 9
		c := must(kvcache.NewPaged(t.Context(), s.dev, kvcache.PagedConfig{KVHeads: 2, Dim: 16, ValueDim: 8, PageSize: 4, Pages: 14, Window: w}))(t)
		defer c.Release()
		a, b := sequence(t, c), sequence(t, c)
		for i := range 12 {
			n := 1 + i*5%7
			k, v, remember := s.next(t, []int{0, 1}, n)
			count := []int{n, n - n/3}
			noError(t, c.Batch(a, b).Append(t.Context(), k, v, count))
			remember(count)
			s.attendWindow(t, []int{0, 1}, n, c.Batch(a, b), kvcache.CallOptions{}, count, w)
		}
		a.Free()
		b.Free()
		if n := c.FreePages(); n != 14 {
			t.Errorf("%d pages are free in the end, should be 14", n)
		}
	})
}

func sequence(t *testing.T, c *kvcache.Paged) *kvcache.Sequence {
	t.Helper()
	s := must(c.NewSequence())(t)
	return s
}

// testForks forks a sequence in the middle of a page, lets the forks diverge, and reads their common prefix once.
func testForks(t *testing.T, s *history) {
	c := must(kvcache.NewPaged(t.Context(), s.dev, kvcache.PagedConfig{KVHeads: 2, Dim: s.dims.Dim, ValueDim: s.dims.ValueDim, DType: s.kv, PageSize: 16, Pages: 9, RoPE: s.rope}))(t)
	defer c.Release()
	add := func(of []int, n int, count []int, b *kvcache.Batch) {
		t.Helper()
		k, v, remember := s.next(t, of, n)
		noError(t, b.Append(t.Context(), k, v, count))
		remember(count)
	}
	free := func(want int) {
		t.Helper()
		if n := c.FreePages(); n != want {
			t.Errorf("%d pages are free, should be %d", n, want)
		}
	}
	seqs := []*kvcache.Sequence{sequence(t, c)}
	add([]int{0}, 37, nil, c.Batch(seqs[0]))
	s.attend(t, []int{0}, 37, c.Batch(seqs[0]), kvcache.CallOptions{}, 0)
	free(6)
	for i := 1; i < 3; i++ {
		fork := must(seqs[0].Fork())(t)
		seqs = append(seqs, fork)
		s.k[i], s.v[i] = slices.Clone(s.k[0]), slices.Clone(s.v[0])
	}
	free(6)
	all := []int{0, 1, 2}
	batch := c.Batch(seqs...)
	add(all, 1, nil, batch) // two copies of the last page
	free(4)
	s.attend(t, all, 1, batch, kvcache.CallOptions{}, 0)
	s.attend(t, all, 1, batch, kvcache.CallOptions{SharePrefix: true}, 1)
	add(all, 12, []int{12, 0, 5}, batch) // one more page for the first
	free(3)
	s.attend(t, all, 12, batch, kvcache.CallOptions{Count: []int{12, 0, 5}}, 0)
	s.attend(t, all, 3, batch, kvcache.CallOptions{SharePrefix: true}, 1)
	seqs[0].Free()
	seqs[0].Free()
	free(5) // the last two of its pages
	s.attend(t, []int{2, 1}, 1, c.Batch(seqs[2], seqs[1]), kvcache.CallOptions{}, 0)
	k, v, _ := s.next(t, []int{1, 2}, 60)
	for _, bad := range []struct {
		name  string
		batch *kvcache.Batch
		want  error
		text  string
	}{
		{"too few pages", c.Batch(seqs[1:]...), kernels.ErrCapacity, "5 of 9 pages of 16 tokens are free"},
		{"freed", c.Batch(seqs[0], seqs[1]), backend.ErrReleased, "sequence 0: the sequence was freed"},
		{"twice", c.Batch(seqs[1], seqs[1]), backend.ErrOption, "Fork it"},
		{"none", c.Batch(), backend.ErrShape, "no sequences"},
		{"nil", c.Batch(seqs[1], nil), backend.ErrOption, "sequence 1 is nil"},
	} {
		if err := bad.batch.Append(t.Context(), k, v, nil); !errors.Is(err, bad.want) || !strings.Contains(err.Error(), bad.text) {
			t.Errorf("%s: error is %v, should be %v and contain %q", bad.name, err, bad.want, bad.text)
		}
		free(5)
	}
	s.attend(t, []int{1, 2}, 2, c.Batch(seqs[1:]...), kvcache.CallOptions{}, 0)
	for _, x := range seqs {
		x.Free()
	}
	free(9)
}
