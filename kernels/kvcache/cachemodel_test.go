package kvcache_test

import (
	"context"
	"errors"
	"math"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
	"github.com/seed90331342/attn/kernels/kvcache"
)

// TestCacheModel compares a contiguous cache, after random appends, failed appends, rewinds, keeps, resets and
// attention calls, with a model that has all tokens of each sequence, with and without a window.
func TestCacheModel(t *testing.T) {
	be := cpu.New(cpu.Options{})
	defer be.Close()
	rapid.Check(t, func(t *rapid.T) {
		m := newCacheModel(t, be)
		defer m.cache.Release()
		t.Repeat(map[string]func(*rapid.T){
			"append": m.append, "generate": m.generate, "rewind": m.rewind, "keep": m.keep, "reset": m.reset, "attend": m.attend, "": m.check,
		})
	})
}

// cacheModel is a cache and the tokens that should be in it.
type cacheModel struct {
	machine
	cache  *kvcache.Cache
	config kvcache.Config
	seqs   []*modelled // without seq
	// short marks sequences whose last row may see a token that is overwritten: a rewind
	// and a failed append keep what the next new row sees, which is one token less.
	short []bool
}

func newCacheModel(t *rapid.T, be *cpu.Backend) *cacheModel {
	m := &cacheModel{machine: newMachine(t, be)}
	window := rapid.SampledFrom([]int{0, 1, 2, 5}).Draw(t, "window")
	m.config = kvcache.Config{KVHeads: modelHeads, Dim: modelDim, Latent: m.latent, Window: window, DType: m.dtype,
		Batch: rapid.IntRange(1, 3).Draw(t, "batch"), Capacity: 2*window + rapid.IntRange(1, 8).Draw(t, "capacity")}
	if window == 0 {
		m.config.Capacity += 12
	}
	m.cache = must.Get(kvcache.New(context.Background(), m.dev, m.config))(t)
	for range m.config.Batch {
		m.seqs, m.short = append(m.seqs, new(modelled)), append(m.short, false)
	}
	return m
}

func (m *cacheModel) append(t *rapid.T) {
	count, err := m.machine.append(t, m.cache, m.seqs, 6)
	if err != nil && !m.be.failed && m.fits(count) {
		t.Fatal(err)
	}
	for b, n := range count {
		m.short[b] = m.be.failed || m.short[b] && (err != nil || n == 0)
	}
}

// generate appends and attends in turns, until a rolling window has moved a few times.
func (m *cacheModel) generate(t *rapid.T) {
	for range rapid.IntRange(1, 12).Draw(t, "steps") {
		m.append(t)
		m.attend(t)
	}
}

// fits reports whether every sequence has room for its count of tokens.
func (m *cacheModel) fits(count []int) bool {
	for b, n := range count {
		if w := m.config.Window; w == 0 && m.len(b)+n > m.config.Capacity || w > 0 && n > m.config.Capacity-2*(w-1) {
			return false
		}
	}
	return true
}

func (m *cacheModel) len(b int) int { return m.seqs[b].len() }

func (m *cacheModel) rewind(t *rapid.T) {
	b := rapid.IntRange(0, len(m.seqs)-1).Draw(t, "sequence")
	n := m.len(b) - rapid.IntRange(0, min(3, m.len(b))).Draw(t, "tokens")
	err := m.cache.Rewind(b, n)
	if errors.Is(err, kernels.ErrOption) && m.config.Window > 0 {
		return // the window needs tokens that are overwritten
	}
	must.Do(t, err)
	m.seqs[b].cut(n)
	m.short[b] = true
}

func (m *cacheModel) keep(t *rapid.T) {
	b := rapid.IntRange(0, len(m.seqs)-1).Draw(t, "sequence")
	err := m.machine.keep(t, m.seqs[b], func(ctx context.Context, from int, rows []int) error {
		return m.cache.Keep(ctx, b, from, rows)
	}, func() int { return m.cache.Lens()[b] })
	if err != nil && !m.be.failed && (!errors.Is(err, kernels.ErrOption) || m.config.Window == 0) {
		t.Fatal(err)
	}
	m.short[b] = m.short[b] || err == nil || m.be.failed
}

func (m *cacheModel) reset(t *rapid.T) {
	if rapid.IntRange(0, 9).Draw(t, "reset at 9") < 9 {
		t.Skip("most runs reset rarely")
	}
	must.Do(t, m.cache.Reset())
	for _, s := range m.seqs {
		s.k, s.v = nil, nil
	}
	clear(m.short)
}

func (m *cacheModel) check(t *rapid.T) {
	for b, n := range m.cache.Lens() {
		if n != m.len(b) {
			t.Fatalf("sequence %d has %d tokens, should have %d", b, n, m.len(b))
		}
	}
}

// attend compares the last row of each sequence with that of plain attention. Without a
// window the bits are equal. With one the keys begin elsewhere and are summed in another
// order: outputs below 64 may differ by a few of their roundings, 2^-18 each.
func (m *cacheModel) attend(t *rapid.T) {
	for b := range m.seqs {
		if m.len(b) == 0 {
			return
		}
	}
	q, qd := queries(t, len(m.seqs), 1)
	r, err := m.cache.Attention(context.Background(), q, kvcache.CallOptions{})
	if errors.Is(err, kernels.ErrOption) && m.config.Window > 0 && slices.Contains(m.short, true) {
		return
	}
	must.Do(t, err)
	var opt kernels.Options
	same := func(a, b float32) bool { return a == b }
	if w := m.config.Window; w > 0 {
		opt.Window = &kernels.Window{Left: w - 1}
		same = func(a, b float32) bool { return math.Abs(float64(a)-float64(b)) <= 0x1p-14 }
	}
	m.compare(t, r, m.seqs, qd, 1, opt, same)
}

// TestAppendWritesTogether: equally long sequences of a Cache are appended to by one copy of keys and one of values.
func TestAppendWritesTogether(t *testing.T) {
	be := cpu.New(cpu.Options{})
	defer be.Close()
	counting := &failing{Backend: be, after: -1}
	c := must.Get(kvcache.New(t.Context(), kernels.NewDevice(counting), kvcache.Config{Batch: 3, Dim: 8, Capacity: 8}))(t)
	defer c.Release()
	x := must.Get(kernels.AllocHost(kernels.F32, kernels.Shape{3, 1, 2, 8}))(t)
	var copies []int
	for _, count := range [][]int{nil, {2, 2, 1}, nil} {
		counting.after = -1
		must.Do(t, c.Append(t.Context(), x, x, count))
		copies = append(copies, -1-counting.after)
	}
	if want := []int{2, 4, 4}; !slices.Equal(copies, want) {
		t.Errorf("appends make %v copies, should make %v", copies, want)
	}
}
