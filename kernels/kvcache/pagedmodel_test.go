package kvcache_test

import (
	"context"
	"errors"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
	"github.com/seed90331342/attn/kernels/kvcache"
	"github.com/seed90331342/attn/kernels/nn"
)

// TestPagedModel compares a paged cache, after random appends, forks, rewinds, keeps, frees and attention calls, with a
// model that has the tokens of each sequence in slices of its own, on each tier of the CPU.
func TestPagedModel(t *testing.T) {
	for _, tier := range cpu.Tiers() {
		t.Run(tier, func(t *testing.T) {
			be := cpu.New(cpu.Options{Tier: tier})
			defer be.Close()
			rapid.Check(t, func(t *rapid.T) {
				m := newModel(t, be)
				defer m.cache.Release()
				t.Repeat(map[string]func(*rapid.T){
					"new": m.add, "fork": m.fork, "free": m.free, "append": m.append, "rewind": m.rewind, "keep": m.keep, "attend": m.attend, "": m.check,
				})
				for len(m.seqs) > 0 {
					m.drop(0)
				}
				if n := m.cache.FreePages(); n != m.config.Pages {
					t.Fatalf("all sequences are free, and %d of %d pages", n, m.config.Pages)
				}
			})
		})
	}
}

// model is a paged cache and the tokens that should be in it.
type model struct {
	machine
	cache  *kvcache.Paged
	config kvcache.PagedConfig
	seqs   []*modelled
}

// machine is what the models of both kinds of caches share: a device whose copies may fail.
type machine struct {
	be     *failing
	dev    *kernels.Device
	dtype  kernels.DType // of keys and values
	latent int           // modelDim if the keys are the values
}

func newMachine(t *rapid.T, be *cpu.Backend) machine {
	m := machine{be: &failing{Backend: be, after: -1}, dtype: rapid.SampledFrom([]kernels.DType{kernels.F32, kernels.F16, kernels.Q8}).Draw(t, "type")}
	m.dev = kernels.NewDevice(m.be)
	if m.dtype != kernels.Q8 && rapid.Bool().Draw(t, "latent") {
		m.latent = modelDim
	}
	return m
}

// modelled is a sequence and its tokens, [tokens, Hkv, D].
type modelled struct {
	seq  *kvcache.Sequence
	k, v []float32
}

func (s *modelled) len() int { return len(s.k) / (modelHeads * modelDim) }

// cut leaves n tokens.
func (s *modelled) cut(n int) {
	s.k, s.v = s.k[:n*modelHeads*modelDim], s.v[:n*modelHeads*modelDim]
}

// failing is a backend whose copies fail after a number of them.
type failing struct {
	*cpu.Backend
	after  int // number of copies that succeed; negative means all
	failed bool
}

var errCopy = errors.New("this copy fails")

func (f *failing) Copy(ctx context.Context, dst, src []kernels.Tensor) error {
	for i := range dst {
		if f.after == 0 {
			f.failed = true
			return errCopy
		}
		f.after--
		if err := f.Backend.Copy(ctx, dst[i:i+1], src[i:i+1]); err != nil {
			return err
		}
	}
	return nil
}

const modelHeads, modelDim = 2, 16

func newModel(t *rapid.T, be *cpu.Backend) *model {
	m := &model{machine: newMachine(t, be)}
	m.config = kvcache.PagedConfig{KVHeads: modelHeads, Dim: modelDim, Latent: m.latent, DType: m.dtype,
		PageSize: rapid.SampledFrom([]int{1, 3, 16}).Draw(t, "page"), Pages: rapid.IntRange(1, 24).Draw(t, "pages")}
	m.cache = must.Get(kvcache.NewPaged(context.Background(), m.dev, m.config))(t)
	return m
}

func (m *model) add(t *rapid.T) {
	if len(m.seqs) == 6 {
		t.Skip("enough sequences")
	}
	s := must.Get(m.cache.NewSequence())(t)
	m.seqs = append(m.seqs, &modelled{seq: s})
}

// one draws a sequence.
func (m *model) one(t *rapid.T) int {
	if len(m.seqs) == 0 {
		t.Skip("no sequences")
	}
	return rapid.IntRange(0, len(m.seqs)-1).Draw(t, "sequence")
}

func (m *model) fork(t *rapid.T) {
	if len(m.seqs) == 6 {
		t.Skip("enough sequences")
	}
	from := m.seqs[m.one(t)]
	free := m.cache.FreePages()
	s := must.Get(from.seq.Fork())(t)
	if n := m.cache.FreePages(); n != free {
		t.Fatalf("a fork took %d pages", free-n)
	}
	m.seqs = append(m.seqs, &modelled{s, slices.Clone(from.k), slices.Clone(from.v)})
}

func (m *model) drop(i int) {
	m.seqs[i].seq.Free()
	m.seqs = slices.Delete(m.seqs, i, i+1)
}

func (m *model) free(t *rapid.T) { m.drop(m.one(t)) }

// some draws different sequences.
func (m *model) some(t *rapid.T) []*modelled {
	if len(m.seqs) == 0 {
		t.Skip("no sequences")
	}
	all := rapid.Permutation(m.seqs).Draw(t, "order")
	return all[:rapid.IntRange(1, len(all)).Draw(t, "sequences")]
}

func (m *model) batch(of []*modelled) *kvcache.Batch {
	var seqs []*kvcache.Sequence
	for _, s := range of {
		seqs = append(seqs, s.seq)
	}
	return m.cache.Batch(seqs...)
}

// tokens draws rows that the cache's type stores exactly: halves of small integers, and
// 63.5 in each row, for which the scale of int8 is a half.
func tokens(t *rapid.T, sequences, heads, n int) (kernels.Tensor, []float32) {
	data := make([]float32, sequences*heads*n*modelDim)
	seed := rapid.Uint32().Draw(t, "numbers")
	for i := range data {
		seed = seed*1664525 + 1013904223
		data[i] = float32(int(seed>>24)%9-4) / 2
		if i%modelDim == 0 {
			data[i] = 63.5
		}
	}
	x := must.Get(kernels.HostF32(data, kernels.Shape{sequences, heads, n, modelDim}))(t)
	return x, data
}

// append appends at most so many drawn tokens while copies may fail. Adjacent rows and pages are written by one copy,
// so an append may need fewer copies than succeed. It returns the counts of tokens and the error of the append.
func (m *machine) append(t *rapid.T, c nn.KVCache, of []*modelled, most int) (count []int, err error) {
	n := rapid.IntRange(1, most).Draw(t, "tokens")
	k, kd := tokens(t, len(of), modelHeads, n)
	v, vd := kernels.Tensor{}, kd
	if m.latent == 0 {
		v, vd = tokens(t, len(of), modelHeads, n)
	}
	count = rapid.SliceOfN(rapid.IntRange(0, n), len(of), len(of)).Draw(t, "count")
	given := count
	if rapid.IntRange(0, 3).Draw(t, "all at 3") == 3 {
		given, count = nil, slices.Repeat([]int{n}, len(of))
	}
	m.be.after, m.be.failed = rapid.SampledFrom([]int{-1, -1, -1, 0, 1, 2, 3, 5}).Draw(t, "copies"), false
	err = c.Append(context.Background(), k, v, given)
	m.be.after = -1
	switch {
	case m.be.failed != errors.Is(err, errCopy):
		t.Fatalf("a copy failed: %v, the append returns %v", m.be.failed, err)
	case err == nil:
		remember(of, kd, vd, n, count)
	case !m.be.failed && !errors.Is(err, kernels.ErrCapacity):
		t.Fatal(err)
	}
	return count, err
}

func (m *model) append(t *rapid.T) {
	of, free := m.some(t), m.cache.FreePages()
	if _, err := m.machine.append(t, m.batch(of), of, 20); err != nil && m.cache.FreePages() != free {
		t.Fatalf("a failed append left %d pages free of %d: %v", m.cache.FreePages(), free, err)
	}
}

func (m *model) rewind(t *rapid.T) {
	s := m.seqs[m.one(t)]
	n := rapid.IntRange(0, s.len()).Draw(t, "length")
	must.Do(t, s.seq.Rewind(n))
	s.cut(n)
}

// keep keeps drawn ones of the last tokens of s while copies may fail. After a failure s has
// all its tokens or those before the first that moves.
func (m *machine) keep(t *rapid.T, s *modelled, keep func(ctx context.Context, from int, rows []int) error, length func() int) error {
	n := s.len()
	from := n - rapid.IntRange(0, min(n, 20)).Draw(t, "tokens")
	var rows []int
	still := from
	for i := range n - from {
		if rapid.Bool().Draw(t, "keep") {
			rows = append(rows, i)
			if still == from+i {
				still++
			}
		}
	}
	m.be.after, m.be.failed = rapid.SampledFrom([]int{-1, -1, 0, 1, 2, 5}).Draw(t, "copies"), false
	err := keep(context.Background(), from, rows)
	m.be.after = -1
	switch got := length(); {
	case m.be.failed != errors.Is(err, errCopy):
		t.Fatalf("a copy failed: %v, keep returns %v", m.be.failed, err)
	case m.be.failed && (got == n || got == still):
		s.cut(got)
	case err == nil:
		k, v := s.k, s.v
		s.k, s.v = slices.Clone(k[:from*modelHeads*modelDim]), slices.Clone(v[:from*modelHeads*modelDim])
		for _, i := range rows {
			lo, hi := (from+i)*modelHeads*modelDim, (from+i+1)*modelHeads*modelDim
			s.k, s.v = append(s.k, k[lo:hi]...), append(s.v, v[lo:hi]...)
		}
	case got != n:
		t.Fatalf("%d of %d tokens after keep from %d on failed: %v", got, n, from, err)
	}
	return err
}

func (m *model) keep(t *rapid.T) {
	s, free := m.seqs[m.one(t)], m.cache.FreePages()
	err := m.machine.keep(t, s, s.seq.Keep, s.seq.Len)
	if err != nil && !m.be.failed && (!errors.Is(err, kernels.ErrCapacity) || m.cache.FreePages() != free) {
		t.Fatalf("%d of %d free pages are left: %v", m.cache.FreePages(), free, err)
	}
}

// remember adds the first count[b] of n tokens to the model of sequence b of a batch.
func remember(of []*modelled, k, v []float32, n int, count []int) {
	for b, s := range of {
		for j := range count[b] {
			for h := range modelHeads {
				at := ((b*modelHeads+h)*n + j) * modelDim
				s.k = append(s.k, k[at:at+modelDim]...)
				s.v = append(s.v, v[at:at+modelDim]...)
			}
		}
	}
}

// attend compares the bits of the last rows with those of plain attention.
func (m *model) attend(t *rapid.T) {
	of := m.some(t)
	least := len(of[0].k)
	for _, s := range of {
		least = min(least, len(s.k))
	}
	n := rapid.IntRange(1, 3).Draw(t, "rows")
	if n > least/(modelHeads*modelDim) {
		t.Skip("too few tokens")
	}
	q, qd := queries(t, len(of), n)
	r := must.Get(m.batch(of).Attention(context.Background(), q, kvcache.CallOptions{}))(t)
	m.compare(t, r, of, qd, n, kernels.Options{}, func(a, b float32) bool { return a == b })
}

// queries draws queries whose scores are small.
func queries(t *rapid.T, sequences, n int) (kernels.Tensor, []float32) {
	q, data := tokens(t, sequences, 2*modelHeads, n)
	for i := range data {
		data[i] /= 64
	}
	return q, data
}

// compare compares a result with that of plain attention from the last n rows of each sequence.
func (m *machine) compare(t *rapid.T, r kernels.Result, of []*modelled, q []float32, n int, opt kernels.Options, same func(a, b float32) bool) {
	defer r.Release()
	got := must.Get(m.dev.ToFloat32(context.Background(), r.O))(t)
	each := len(got) / len(of)
	opt.Causal, opt.Align = true, kernels.LowerRight
	for b, s := range of {
		want := must.Get(plain(m.dev, m.dtype, s, q[b*each:(b+1)*each], n, opt))(t)
		for i, x := range got[b*each : (b+1)*each] {
			if !same(x, want[i]) {
				t.Fatalf("sequence %d of %d, %d tokens, %d rows: output %d is %v, over the same tokens in one tensor %v", b, len(of), len(s.k)/(modelHeads*modelDim), n, i, x, want[i])
			}
		}
	}
}

// plain attends to the tokens of a sequence in one tensor of dtype.
func plain(dev *kernels.Device, dtype kernels.DType, s *modelled, q []float32, n int, opt kernels.Options) ([]float32, error) {
	ctx := context.Background()
	of := func(rows []float32) (kernels.Tensor, error) {
		seq := len(rows) / (modelHeads * modelDim)
		data := make([]float32, len(rows))
		for i, x := range rows {
			j, h, c := i/modelDim/modelHeads, i/modelDim%modelHeads, i%modelDim
			data[(h*seq+j)*modelDim+c] = x
		}
		return dev.FromFloat32(ctx, dtype, data, kernels.Shape{1, modelHeads, seq, modelDim})
	}
	k, err := of(s.k)
	if err != nil {
		return nil, err
	}
	v, err := of(s.v)
	if err != nil {
		return nil, err
	}
	qt, err := kernels.HostF32(q, kernels.Shape{1, 2 * modelHeads, n, modelDim})
	if err != nil {
		return nil, err
	}
	r, err := dev.Attention(ctx, qt, k, v, opt)
	if err != nil {
		return nil, err
	}
	defer r.Release()
	return dev.ToFloat32(ctx, r.O)
}

// check compares lengths and pages with the model. Sequences take the pages of their tokens
// if they share nothing, and fewer if they share pages.
func (m *model) check(t *rapid.T) {
	most, least := 0, 0
	for i, s := range m.seqs {
		n := s.len()
		if got := s.seq.Len(); got != n {
			t.Fatalf("sequence %d has %d tokens, should have %d", i, got, n)
		}
		pages := (n + m.config.PageSize - 1) / m.config.PageSize
		most, least = most+pages, max(least, pages)
	}
	if taken := m.config.Pages - m.cache.FreePages(); taken > most || taken < least {
		t.Fatalf("%d pages are taken, should be %d to %d", taken, least, most)
	}
}
