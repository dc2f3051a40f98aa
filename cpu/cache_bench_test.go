package cpu

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/seed90331342/attn/backend"
)

// cacheKind is the type and the layout of keys and values.
type cacheKind struct {
	dtype backend.DType
	page  int // 0: in one tensor
	want  float64
}

func (k cacheKind) String() string {
	if k.page == 0 {
		return k.dtype.String()
	}
	return fmt.Sprintf("%v/pages%d", k.dtype, k.page)
}

// BenchmarkCache measures one query row a head over 32,768 keys in narrower types and in
// shuffled pages. Each call takes turns with two others. %ofF32 is the time of the call
// over float32 keys in one tensor in percent of its own, next to the target; %ofCeiling
// is its bandwidth in percent of that of reading keys of its type in one tensor.
//
//	go test -run '^$' -bench Cache -benchtime 15x ./cpu
func BenchmarkCache(b *testing.B) {
	for _, c := range []vectorCase{
		{name: "d64", heads: 8, sq: 1, sk: 32768, dim: 64},
		{name: "d128", heads: 8, sq: 1, sk: 32768, dim: 128},
		{name: "d128/32to4", heads: 32, kv: 4, sq: 1, sk: 32768, dim: 128},
	} {
		plain := c.call(b)
		for _, k := range []cacheKind{
			{backend.F32, 64, 90}, {backend.F32, 16, 90}, {backend.F16, 0, 0}, {backend.F16, 16, 0}, {backend.BF16, 0, 0}, {backend.Q8, 0, 100}, {backend.Q8, 64, 100}, {backend.Q8, 16, 100},
		} {
			for _, threads := range []int{1, 2} {
				b.Run(fmt.Sprintf("%s/%v/threads%d", c.name, k, threads), func(b *testing.B) { benchCache(b, plain, k, threads) })
			}
		}
	}
}

func benchCache(b *testing.B, plain *backend.Call, k cacheKind, threads int) {
	be := open(b, Options{Threads: threads})
	c := *plain
	c.K, c.V = typed(b, plain.K, k.dtype), typed(b, plain.V, k.dtype)
	k0, v0 := c.K, c.V
	if k.page > 0 {
		paged(b, &c, k.page)
	}
	for _, c := range []*backend.Call{plain, &c} {
		if err := be.Attention(b.Context(), c); err != nil {
			b.Fatal(err)
		}
	}
	timed := func(c *backend.Call) float64 {
		calls, start := 0, time.Now()
		for time.Since(start) < 20*time.Millisecond {
			if err := be.Attention(b.Context(), c); err != nil {
				b.Fatal(err)
			}
			calls++
		}
		return time.Since(start).Seconds() / float64(calls)
	}
	var ratios, shares, rates []float64
	bytes := float64(k0.Bytes() + v0.Bytes())
	for b.Loop() {
		most, err := be.ReadBandwidth(b.Context(), k0, v0)
		if err != nil {
			b.Fatal(err)
		}
		before := timed(plain)
		own := timed(&c)
		before = (before + timed(plain)) / 2
		ratios, rates, shares = append(ratios, 100*before/own), append(rates, bytes/own/1e9), append(shares, 100*bytes/own/most)
	}
	for _, m := range []struct {
		values []float64
		unit   string
	}{{ratios, "%ofF32"}, {shares, "%ofCeiling"}, {rates, "GB/s"}} {
		slices.Sort(m.values)
		b.ReportMetric(m.values[len(m.values)/2], m.unit)
	}
	b.ReportMetric(k.want, "%wanted")
	b.ReportMetric(0, "ns/op")
}

// paged puts the keys and values of c, of one batch, into pages in a drawn order.
func paged(tb testing.TB, c *backend.Call, size int) {
	tb.Helper()
	seq := c.K.Shape()[backend.Seq]
	order := rand.New(rand.NewPCG(7, 7)).Perm(ceilDiv(seq, size))
	be := open(tb, Options{})
	pool := func(from backend.Tensor) backend.Tensor {
		s := from.Shape()
		// A head's pages are adjacent, as in kvcache.Paged.
		to, err := backend.AllocHost(from.DType(), backend.Shape{s[backend.Heads], len(order), size, s[backend.Dim]})
		if err == nil {
			to, err = to.Swap(backend.Batch, backend.Heads)
		}
		if err != nil {
			tb.Fatal(err)
		}
		for i, p := range order {
			lo, hi := i*size, min((i+1)*size, seq)
			rows, err := from.Slice(backend.Seq, lo, hi)
			if err != nil {
				tb.Fatal(err)
			}
			page, err := to.Slice(backend.Batch, p, p+1)
			if err == nil {
				page, err = page.Slice(backend.Seq, 0, hi-lo)
			}
			if err == nil {
				err = be.Copy(tb.Context(), []backend.Tensor{page}, []backend.Tensor{rows})
			}
			if err != nil {
				tb.Fatal(err)
			}
		}
		return to
	}
	c.K, c.V = pool(c.K), pool(c.V)
	c.Pages = &backend.Pages{Table: [][]int32{make([]int32, len(order))}, Keys: seq}
	for i, p := range order {
		c.Pages.Table[0][i] = int32(p)
	}
}
