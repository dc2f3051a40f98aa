package cpu

import (
	"context"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"

	"go.uber.org/goleak"
	"gonum.org/v1/gonum/blas/blas32"
	"gonum.org/v1/gonum/blas/gonum"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu/internal/vec"
	"github.com/seed90331342/attn/kernels/kernelstest"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// In wasm the runtime keeps a goroutine for events.
func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("runtime.handleEvent"))
}

// tierGonum is the tier that every machine has.
const tierGonum = "gonum"

// TestPairsInRegisters runs calls in low precision without AMX.
func TestPairsInRegisters(t *testing.T) {
	k := vec.Tiers()[0].WithoutTiles()
	if k.PairUnit() == "" {
		t.Skip("this machine has no AVX512-BF16")
	}
	kernelstest.Run(t, kernelstest.Harness{Extent: kernelstest.Extent{Only: []string{"LowPrecision"}}, Open: func(tb testing.TB) backend.Backend {
		be := open(tb, Options{})
		be.kernels = k
		return be
	}})
}

// TestConformance runs the suite on each tier. With the race detector it runs concurrent
// calls on each tier and the cases on one: the Go code of the others is the same. For that reason
// -short takes every fourth of the long lists and of the gradients on the others, and half of the cases at edges.
func TestConformance(t *testing.T) {
	for i, tier := range Tiers() {
		t.Run(tier, func(t *testing.T) {
			h := kernelstest.Harness{Open: func(tb testing.TB) backend.Backend { return open(tb, Options{Tier: tier}) }, Extent: kernelstest.Extent{Draws: 500, Small: 20000},
				Digests: filepath.Join("testdata", "digests-"+tier+".txt")}
			if tier == tierGonum && runtime.GOARCH != "amd64" { // gonum sums in another order: no digests are recorded
				h.Digests = filepath.Join("testdata", "digests-"+tier+"-"+runtime.GOARCH+".txt")
			}
			if testing.Short() && i > 0 {
				h.Extent.PairsEvery, h.Extent.GradientsEvery = 4, 4
			}
			if raceEnabled {
				h.Extent.Only = []string{"Batch", "Concurrent", "Cancel", "Release", "Close"}
				if i == 0 {
					h.Extent.Only = append(h.Extent.Only, "Cases", "Linear", "Conv", "Index")
				}
			}
			kernelstest.Run(t, h)
		})
	}
}

// TestDigestsOfVectorTiers shows that the recorded results of AVX2 and NEON have the same bits.
// Calls that return weights add rows by lanes, so their bits are those of a number of lanes.
// The powers of AVX-512, whose fractions one instruction computes, differ in their last bit.
func TestDigestsOfVectorTiers(t *testing.T) {
	fused := func(tier string) map[string]string {
		raw := must.Get(os.ReadFile(filepath.Join("testdata", "digests-"+tier+".txt")))(t)
		found := map[string]string{}
		for line := range strings.Lines(string(raw)) {
			if sum, name, _ := strings.Cut(line, " "); strings.HasSuffix(name, "weights false\n") {
				found[name] = sum
			}
		}
		return found
	}
	avx2, neon := fused("avx2"), fused("neon")
	if len(avx2) == 0 || !maps.Equal(avx2, neon) {
		t.Errorf("of %d results on avx2 and %d on neon not all have the same bits", len(avx2), len(neon))
	}
}

// TestOpen shows the names that open the backend, and those that do not.
func TestOpen(t *testing.T) {
	be := must.Get(backend.Open("cpu"))(t)
	must.Do(t, be.Close())
	must.Fail(t, "cpu:3", must.Err(backend.Open("cpu:3")), backend.ErrNoDevice, "cpu:3")
	if pick, why := backend.Auto(); pick != "cpu" {
		t.Errorf("auto picks %s (%s) where there is only the CPU", pick, why)
	}
}

func TestInfo(t *testing.T) {
	info := open(t, Options{Threads: 3}).Info()
	if info.Name != "cpu" || info.Type != backend.CPU || info.Device == "" || info.Threads != 3 || !strings.Contains(info.Provider, "gonum), gonum blas32") {
		t.Errorf("%+v", info)
	}
	for _, threads := range []int{-1, 0, runtime.GOMAXPROCS(0) + 97} {
		be := New(Options{Threads: threads})
		defer be.Close()
		plan := must.Get(be.Plan(t.Context(), plain(t, 1, 8, 8)))(t)
		if got := be.Info().Threads; got != runtime.GOMAXPROCS(0) || plan.Limits[0].Value != int64(got) {
			t.Errorf("of %d threads Info has %d and Plan %v, GOMAXPROCS is %d", threads, got, plan.Limits, runtime.GOMAXPROCS(0))
		}
	}
	blas32.Use(otherBLAS{})
	defer blas32.Use(gonum.Implementation{})
	if got := open(t, Options{}).Info().Provider; !strings.HasSuffix(got, ", blas32 of cpu.otherBLAS") {
		t.Errorf("a plugged-in BLAS is called %q", got)
	}
}

// otherBLAS represents a BLAS that a program plugs in.
type otherBLAS struct{ gonum.Implementation }

func TestParseModel(t *testing.T) {
	for _, c := range []struct{ say, text, want string }{
		{"the first of two cores", "processor\t: 0\nmodel\t\t: 17\nmodel name\t: Fast CPU @ 2.60GHz: x\n\nmodel name\t: other\n", "Fast CPU @ 2.60GHz: x"},
		{"no name, as on arm64", "processor\t: 0\nFeatures\t: fp asimd\n", runtime.GOARCH},
		{"nothing", "", runtime.GOARCH},
	} {
		if got := parseModel([]byte(c.text)); got != c.want {
			t.Errorf("%s: %q, want %q", c.say, got, c.want)
		}
	}
}

// TestCloseWaits shows that Close returns once the calls inside are done, and
// that later calls are refused meanwhile.
func TestCloseWaits(t *testing.T) {
	be := New(Options{})
	inside, end, closed := make(chan struct{}), make(chan struct{}), make(chan error, 2)
	go func() {
		closed <- be.do(t.Context(), "first", func() error { close(inside); <-end; return nil })
	}()
	<-inside
	go func() { closed <- errors.Join(be.Close(), be.Close()) }()
	for !errors.Is(be.Wait(t.Context()), backend.ErrClosed) {
		runtime.Gosched()
	}
	select {
	case <-closed:
		t.Fatal("Close returned with a call inside")
	default:
	}
	close(end)
	must.Do(t, errors.Join(<-closed, <-closed))
}

// countedContext is a context that is cancelled after left calls of Err, and counts the calls that come later.
type countedContext struct {
	context.Context
	left, later atomic.Int64
}

func (c *countedContext) Err() error {
	if c.left.Add(-1) >= 0 {
		return nil
	}
	c.later.Add(1)
	return context.Canceled
}

// TestCancelMidway shows that a call checks its context while it computes, and that each
// of its goroutines stops at the first check that fails.
func TestCancelMidway(t *testing.T) {
	eachTier(t, func(t *testing.T, tier string) {
		for _, threads := range []int{1, 3} {
			ctx := &countedContext{Context: t.Context()}
			ctx.left.Store(20)
			// Without a check this call takes half a minute, or many.
			must.Fail(t, "cancelled", open(t, Options{Threads: threads, Tier: tier}).Attention(ctx, plain(t, 1, 65536, 64)), context.Canceled)
			if n := ctx.later.Load(); n > int64(threads) {
				t.Errorf("%d goroutines check a cancelled context %d times", threads, n)
			}
		}
	})
}
