// Package kernelstest is the conformance suite of all backends. [Run] runs it against a
// [backend.Backend], which a [Harness] opens:
//
//	func TestConformance(t *testing.T) {
//		kernelstest.Run(t, kernelstest.Harness{Open: open})
//	}
//
// It compares results element by element with the float64 reference of package oracle, within the bounds that are
// derived there, and tests properties that need no reference: a row yields the same bits in any batch, keys may be
// permuted, values of 1 yield 1, partial results merge.
//
// Read case.go first: a [Case] is one problem, and all tests are lists of them.
//
//	the cases                 list.go, pairs.go (every pair of options), small.go (random), published.go
//	a case on a device        device.go, undertest.go (poisoned outputs, options that a backend lacks)
//	fused calls               fused.go, parts.go (packed, batched, merged), bits.go (no reference needed)
//	stages and gradients      stages.go, gradients.go
//	caches and layers         caches.go (dtypes, pages), copies.go, kvcache.go, layers.go
//	every operation on views  views.go
//	errors, memory, closing   lifecycle.go, memory.go
package kernelstest

import (
	"errors"
	"flag"
	"fmt"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
)

// Harness configures the suite for a backend.
type Harness struct {
	// Open opens a new backend; the suite closes it.
	Open func(t testing.TB) backend.Backend
	// Again, unless nil, wraps the backend. Caches run a second time on the wrapped one, because
	// their calls depend on each other's results; with -short and GradientsEvery those of KVCache alone.
	Again func(be backend.Backend) backend.Backend
	// Against, unless nil, opens another backend. The results of both on random problems are compared
	// with each other, and the gradients of a tenth as many.
	Against func(t testing.TB) backend.Backend
	// Digests is a file of recorded digests of output bits, for backends whose bits do not depend on the
	// machine; -update-digests writes it. Where it is set, keys and values of F8 must yield the bits of the same
	// numbers in F32, with which they are compared instead of a digest, also while the file does not exist.
	Digests string
	// Unsupported lists the options that the backend refuses with backend.ErrUnsupported: score mod,
	// softcap, mask, block mask, bias, relative bias, alibi, sinks, dropout, pages, key indices, q8, q4, f8. Tests that need
	// one are skipped and name it, and random problems lack them. An entry that the backend
	// supports is a failure, so that the list shrinks as the backend grows.
	Unsupported []string
	// Extent is how much of the suite runs.
	Extent Extent
}

// Extent is how much of the suite runs. The zero value is usual; other values are for slow or small devices, and for
// code paths that differ little from the backend's usual one.
type Extent struct {
	// Only lists the subtests to run; nil means all.
	Only []string
	// Draws is the number of random problems to compare with the oracle; 0 means 100. The
	// gradients of as many are compared, or of 1,000; of lists of keys at most Small.
	// With -short all these numbers of random problems are a tenth.
	Draws int
	// AgainstDraws is the number of random problems to compare with Harness.Against; 0 means 1,000.
	AgainstDraws int
	// Small is the number of small random problems to compare with the oracle; 0 means 20, or one n-th with PairsEvery
	// n. The gradients of a quarter as many are compared, and the results of a quarter as many histories of caches: at
	// least 5 of each. With -short they are a hundredth, and at least 4.
	Small int
	// PairsEvery n > 1 runs only every n-th case of the long lists: [Pairs], trained models, listed
	// keys, low precision and score mods. The first is case PairsFrom: paths with other numbers run other cases.
	PairsEvery, PairsFrom int
	// CasesEvery n > 1 runs only every n-th of [Cases]: for devices with the kernels of one that runs all of them.
	CasesEvery int
	// GradientsEvery n > 1 computes the gradients of only every n-th case with -short, of few random
	// problems, of no large heads, and all of a call at once, every second case of caches, and half of the edges
	// of tiles, for backends that take long: they compile a kernel for most random problems, which are then the same
	// each time, so that drivers may keep it.
	GradientsEvery int
	// LargeHeads is what devices with lowered limits or little memory may return for head sizes over 256: ErrUnsupported
	// for all calls, or ErrMemory for gradients. nil means that they compute them.
	LargeHeads error

	left *int // counts the cases of a part that are left out
}

// Run runs the suite as subtests of t.
func Run(t *testing.T, h Harness) {
	be := h.Open(t)
	dev := h.underTest(t, be)
	t.Cleanup(func() {
		if err := dev.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	if h.hurries() {
		noError(t, setFlag(t, "rapid.seed", "1"))
	}
	run := func(name string, f func(t *testing.T)) {
		if h.Extent.Only == nil || slices.Contains(h.Extent.Only, name) {
			t.Run(name, func(t *testing.T) {
				h.Extent.left = new(int)
				if f(t); *h.Extent.left > 0 {
					t.Logf("%d cases or sizes are left out", *h.Extent.left)
				}
			})
		}
	}
	bits := readDigests(t, h)
	twice := func(name string, f func(t *testing.T, dev *kernels.Device, bits *digests)) {
		run(name, func(t *testing.T) {
			f(t, dev, bits)
			if h.Again != nil && !(h.hurries() && name == "Caches") {
				again := h.underTest(t, h.Again(be)) // closed as dev
				t.Run("again", func(t *testing.T) { f(t, again, &digests{file: bits.file, want: bits.want}) })
			}
		})
	}
	run("Unsupported", func(t *testing.T) { testUnsupported(t, dev, h.Unsupported) })
	run("Transfer", func(t *testing.T) { testTransfer(t, dev) })
	run("Cases", func(t *testing.T) { testCases(t, dev, h, bits) })
	run("Pairs", func(t *testing.T) { testPairs(t, dev, h, bits) })
	twice("Caches", func(t *testing.T, dev *kernels.Device, bits *digests) { testCaches(t, dev, h, bits) })
	if h.Digests != "" {
		run("Digests", bits.finish)
	}
	twice("KVCache", func(t *testing.T, dev *kernels.Device, _ *digests) { testKVCache(t, dev) })
	run("CacheOptions", func(t *testing.T) { testCacheOptions(t, dev, h) })
	run("PagedCache", func(t *testing.T) { testPagedCache(t, dev) })
	run("Factors", func(t *testing.T) { testFactors(t, dev) })
	run("Trees", func(t *testing.T) { testTrees(t, dev, h) })
	run("Hadamard", func(t *testing.T) { testHadamards(t, dev) })
	run("Copy", func(t *testing.T) { testCopy(t, dev) })
	run("Batch", func(t *testing.T) { testBatch(t, dev) })
	run("Packed", func(t *testing.T) { testPacked(t, dev) })
	run("Scores", func(t *testing.T) { testScores(t, dev) })
	run("TopWeights", func(t *testing.T) { testTopWeights(t, dev) })
	run("Edges", func(t *testing.T) { testEdges(t, dev, h) })
	run("HeadSizes", func(t *testing.T) { testHeadSizes(t, dev, h) })
	run("Models", func(t *testing.T) { testModels(t, dev, h) })
	run("WorkedExamples", func(t *testing.T) { testWorkedExamples(t, dev) })
	run("Projections", func(t *testing.T) { testProjections(t, dev) })
	run("Rotate", func(t *testing.T) { testRotate(t, dev) })
	run("NormGate", func(t *testing.T) { testNormGate(t, dev) })
	run("Linear", func(t *testing.T) { testLinear(t, dev) })
	run("Conv", func(t *testing.T) { testConv(t, dev) })
	run("Index", func(t *testing.T) { testIndex(t, dev) })
	run("States", func(t *testing.T) { testStates(t, dev, max(3, draws(h.Extent.Draws, 100)/5)) })
	run("MultiHead", func(t *testing.T) { testMultiHead(t, dev) })
	run("Views", func(t *testing.T) { testViews(t, dev, max(4, draws(h.Extent.Draws, 100)/2)) })
	run("ScoreMods", func(t *testing.T) { testScoreMods(t, dev, h) })
	run("KeyIndices", func(t *testing.T) { testKeyIndices(t, dev, h) })
	run("Spans", func(t *testing.T) { testSpans(t, dev, h) })
	run("LowPrecision", func(t *testing.T) { testLowPrecision(t, dev, h) })
	run("Stages", func(t *testing.T) { testStages(t, dev) })
	run("Drawn", func(t *testing.T) { testDrawn(t, dev, draws(h.Extent.Draws, 100)) })
	run("Extremes", func(t *testing.T) { testExtremes(t, dev, draws(h.Extent.Draws, 100)) })
	run("Small", func(t *testing.T) { testSmall(t, dev, h.small(1)) })
	run("Properties", func(t *testing.T) { testProperties(t, dev) })
	run("Merge", func(t *testing.T) { testMerge(t, dev) })
	run("Gradients", func(t *testing.T) { testGradients(t, dev, h) })
	run("SmallGradients", func(t *testing.T) {
		n := h.small(4)
		if h.hurries() {
			n = 5
		}
		testSmallGradients(t, dev, n)
	})
	run("Histories", func(t *testing.T) { testHistories(t, dev, h.small(4)) })
	run("Refused", func(t *testing.T) { testRefused(t, dev) })
	run("HostOperands", func(t *testing.T) { testHostOperands(t, dev) })
	run("Plan", func(t *testing.T) { testPlan(t, dev) })
	run("Concurrent", func(t *testing.T) { testConcurrent(t, dev) })
	run("Cancel", func(t *testing.T) { testCancel(t, dev) })
	run("Release", func(t *testing.T) { testRelease(t, dev) })
	run("Close", func(t *testing.T) { testClose(t, h) })
	if h.Against != nil {
		run("Against", func(t *testing.T) {
			other := h.underTest(t, h.Against(t))
			defer other.Close()
			testAgainst(t, dev, other, draws(h.Extent.AgainstDraws, 1000))
			t.Run("gradients", func(t *testing.T) { testGradientsAgainst(t, dev, other, draws(h.Extent.AgainstDraws/10, 100)) })
		})
	}
}

// hurries reports whether GradientsEvery counts.
func (h *Harness) hurries() bool { return testing.Short() && h.Extent.GradientsEvery > 0 }

func (h *Harness) every() int { return max(1, h.Extent.PairsEvery) }

// takes reports whether case n of a long list is run.
func (h *Harness) takes(n int) bool { return h.take(n%h.every() == h.Extent.PairsFrom%h.every()) }

// take returns yes, and counts what is left out.
func (h *Harness) take(yes bool) bool {
	if !yes && h.Extent.left != nil {
		*h.Extent.left++
	}
	return yes
}

// edge reports whether number i of edges is taken: all, or powers of two, what follows them, and what precedes others.
func (h *Harness) edge(i int) bool { return h.take(!h.hurries() || i/3%2 == 0) }

// small returns the number of small problems, divided by a number.
func (h *Harness) small(by int) int {
	n := h.Extent.Small
	if n == 0 {
		n = 20 / h.every()
	}
	least := 5
	if testing.Short() {
		n, least = n/20, 20 // rapid divides by 5
	}
	return max(least, n/by)
}

func draws(n, def int) int {
	if n == 0 {
		n = def
	}
	if testing.Short() {
		n = max(1, n/10)
	}
	return n
}

// setFlag sets a flag of the test binary until t ends, because rapid has no other way to set
// the number of checks. A value from the command line has precedence.
func setFlag(t *testing.T, name, value string) error {
	f := flag.Lookup(name)
	if f == nil {
		return fmt.Errorf("no flag %s", name)
	}
	given := false
	flag.Visit(func(v *flag.Flag) { given = given || v.Name == name })
	if given {
		return nil
	}
	old := f.Value.String()
	t.Cleanup(func() { _ = f.Value.Set(old) })
	return f.Value.Set(value)
}

// Benchmark measures the named cases of [Cases] on a device as sub-benchmarks of b: prepared
// calls with preallocated outputs. The cases are short: what differs between them is the
// cost of an option in a short call. Cases that the device does not support are skipped.
func Benchmark(b *testing.B, dev *kernels.Device) {
	for _, c := range Cases() {
		b.Run(c.Name, func(b *testing.B) {
			on := c.build().on(b, dev)
			defer on.release()
			call := must(dev.Prepare(on.q.view, on.k.view, on.v.view, on.opt))(b)
			out, err := call.Run(b.Context())
			if errors.Is(err, backend.ErrUnsupported) {
				b.Skip(err)
			}
			if err != nil {
				b.Fatal(err)
			}
			defer out.Release()
			plan := must(call.Plan(b.Context()))(b)
			b.ReportAllocs()
			for b.Loop() {
				noError(b, call.RunInto(b.Context(), out))
				noError(b, dev.Wait(b.Context()))
			}
			b.ReportMetric(float64(plan.FLOPs)*float64(b.N)/b.Elapsed().Seconds()/1e9, "GFLOP/s")
		})
	}
}

// Draw returns a random case, the same one for the same seed: one in three is small.
func Draw(seed int) Case {
	return rapid.Custom(func(t *rapid.T) Case {
		if seed%3 == 0 {
			return drawSmall(t, false)
		}
		return drawCase(t)
	}).Example(seed)
}

// Operands are the operands of a case on a device, for tests that compare calls with each other.
type Operands struct {
	Q, K, V backend.Tensor
	Options kernels.Options
	memory  [3]flat // of Q, K and V
}

// Put uploads the operands of c in its layout, with NaN in the gaps.
func (c Case) Put(tb testing.TB, dev *kernels.Device) Operands {
	o := c.build().on(tb, dev)
	return Operands{o.q.view, o.k.view, o.v.view, o.opt, [3]flat{o.q, o.k, o.v}}
}

// Unchanged returns an error if the F32 operands in host memory, or the gaps between their
// elements, have changed since Put.
func (o Operands) Unchanged() error {
	for i, m := range o.memory {
		if !m.all.OnHost() || m.all.DType() != backend.F32 {
			continue
		}
		now, err := m.all.Float32s()
		if err != nil {
			continue // released
		}
		for n, x := range now {
			if !sameNumber(x, m.before[n]) {
				return fmt.Errorf("element %d of the memory of %c was %v and is now %v", n, "qkv"[i], m.before[n], x)
			}
		}
	}
	return nil
}
