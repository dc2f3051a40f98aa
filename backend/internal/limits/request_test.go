package limits

import (
	"errors"
	"math"
	"runtime"
	"testing"

	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// ask requests bytes and reports a grant that calls nothing.
func ask(bytes int64) error {
	taken := false
	err := Request(bytes, func() *byte { taken = true; return nil })
	if err == nil && !taken {
		return errors.New("granted, but not taken")
	}
	return err
}

// withFree sets a limit of 1 GiB that leaves free bytes.
func withFree(t *testing.T, free func() int64) {
	t.Cleanup(func() { tightest = Tightest; memory.granted.Store(0) })
	tightest = func(bool) (Limit, int64) { return Limit{Name: "GOMEMLIMIT", Max: gib}, free() }
	memory.granted.Store(0)
}

func TestRequest(t *testing.T) {
	left := int64(100 * mib)
	withFree(t, func() int64 { return left })
	for _, c := range []struct {
		why   string
		bytes int64
		ok    bool
	}{
		{"nothing", 0, true}, {"what is there", 100 * mib, true}, {"a byte more", 100*mib + 1, false},
		{"a negative number", -1, false}, {"a byte", 1, true}, {"any number", math.MaxInt64, false}, {"a small one", step - 1, true},
	} {
		err := ask(c.bytes)
		if (err == nil) != c.ok || err != nil && !errors.Is(err, ErrMemory) {
			t.Errorf("%s: %v", c.why, err)
		}
	}
	want := "2000000000 bytes requested, 104857600 available, GOMEMLIMIT is 1073741824: out of memory"
	if err := ask(2_000_000_000); err == nil || err.Error() != want {
		t.Errorf("%v, want %s", err, want)
	}

	// Small requests are compared with the limits once their sum reaches a step.
	left = 0
	memory.granted.Store(0)
	granted := 0
	for ask(mib) == nil {
		granted++
	}
	if granted != step/mib-1 {
		t.Errorf("%d small requests granted at a limit that is reached, want %d", granted, step/mib-1)
	}
	left = 100 * mib // for example because a caller released memory
	must.Do(t, ask(mib))
}

func TestRequestCollectsGarbage(t *testing.T) {
	collected := false
	var stats runtime.MemStats
	runtime.ReadMemStats(&stats)
	before := stats.NumForcedGC
	withFree(t, func() int64 {
		runtime.ReadMemStats(&stats)
		if collected = stats.NumForcedGC > before; collected {
			return 100 * mib
		}
		return 0
	})
	if err := ask(100 * mib); err != nil || !collected {
		t.Errorf("%v, garbage collected: %v", err, collected)
	}
}
