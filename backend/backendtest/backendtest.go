// Package backendtest is the conformance suite that every backend passes: one
// function, [Run], runs all of it against any [backend.Backend]. A backend's
// test file hands it a [Harness]:
//
//	func TestConformance(t *testing.T) {
//		backendtest.Run(t, backendtest.Harness{Open: open})
//	}
//
// Results are compared element by element with the float64 reference of package
// oracle, within bounds that are derived there and nowhere tuned. Beside the
// reference stand properties that need none: the same row in any company, keys
// in another order, values of one, results merged from parts.
package backendtest

import (
	"testing"

	"github.com/seed90331342/attn/backend"
)

// Harness is what a backend brings to the suite.
type Harness struct {
	// Open returns a new backend; the suite closes it.
	Open func(t testing.TB) backend.Backend
	// Against, unless nil, opens another backend whose results on drawn
	// problems are compared with this one's directly, PairDraws of them.
	Against   func(t testing.TB) backend.Backend
	PairDraws int
	// Draws is how many problems are drawn and compared with the oracle; 0
	// means 100. With -short all draws are cut to a tenth.
	Draws int
	// PairsEvery is for paths that take the place of a backend's usual one and differ from
	// it in little: they run one in so many of the cases of [Pairs]; 0 means all.
	PairsEvery int
	// Lowered says that the device's limits are lowered: it may refuse head sizes over 256,
	// and pages of 16-bit elements that do not begin at words.
	Lowered bool
	// Digests is a file of recorded digests of output bits, for backends whose bits do
	// not depend on the machine; -update-digests writes it.
	Digests string
}

// Run runs the whole suite as subtests of t.
func Run(t *testing.T, h Harness) {
	be := h.Open(t)
	t.Cleanup(func() {
		if err := be.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	bits := readDigests(t, h.Digests)
	t.Run("Transfer", func(t *testing.T) { testTransfer(t, be) })
	t.Run("Cases", func(t *testing.T) { testCases(t, be, bits) })
	t.Run("Pairs", func(t *testing.T) { testPairs(t, be, h, bits) })
	t.Run("Caches", func(t *testing.T) { testCaches(t, be, bits) })
	if h.Digests != "" {
		t.Run("Digests", bits.finish)
	}
	t.Run("KVCache", func(t *testing.T) { testKVCache(t, be) })
	t.Run("PagedCache", func(t *testing.T) { testPagedCache(t, be) })
	t.Run("Copy", func(t *testing.T) { testCopy(t, be) })
	t.Run("Batch", func(t *testing.T) { testBatch(t, be) })
	t.Run("Varlen", func(t *testing.T) { testVarlen(t, be) })
	t.Run("Scores", func(t *testing.T) { testScores(t, be) })
	t.Run("TopWeights", func(t *testing.T) { testTopWeights(t, be) })
	t.Run("Edges", func(t *testing.T) { testEdges(t, be) })
	t.Run("HeadSizes", func(t *testing.T) { testHeadSizes(t, be, h) })
	t.Run("WorkedExamples", func(t *testing.T) { testWorkedExamples(t, be) })
	t.Run("Projections", func(t *testing.T) { testProjections(t, be) })
	t.Run("Rotate", func(t *testing.T) { testRotate(t, be) })
	t.Run("MultiHead", func(t *testing.T) { testMultiHead(t, be) })
	t.Run("Stages", func(t *testing.T) { testStages(t, be) })
	t.Run("Drawn", func(t *testing.T) { testDrawn(t, be, draws(h.Draws, 100)) })
	t.Run("Properties", func(t *testing.T) { testProperties(t, be) })
	t.Run("Merge", func(t *testing.T) { testMerge(t, be) })
	t.Run("Refused", func(t *testing.T) { testRefused(t, be) })
	t.Run("Plan", func(t *testing.T) { testPlan(t, be) })
	t.Run("Concurrent", func(t *testing.T) { testConcurrent(t, be) })
	t.Run("Cancel", func(t *testing.T) { testCancel(t, be) })
	t.Run("Release", func(t *testing.T) { testRelease(t, be) })
	t.Run("Close", func(t *testing.T) { testClose(t, h) })
	if h.Against != nil {
		t.Run("Pair", func(t *testing.T) {
			other := h.Against(t)
			defer other.Close()
			testPair(t, be, other, draws(h.PairDraws, 1000))
		})
	}
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
