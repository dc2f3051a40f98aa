package cpu

import (
	"path/filepath"
	"runtime"
	"testing"

	"github.com/seed90331342/attn/backend/backendtest"
)

// TestDigests holds the output bits of each tier to those that were recorded. They are
// those of amd64: other machines have other multiplications and sums in gonum.
func TestDigests(t *testing.T) {
	if runtime.GOARCH != "amd64" {
		t.Skip("the digests were recorded on amd64")
	}
	for _, tier := range Tiers() {
		t.Run(tier, func(t *testing.T) {
			backendtest.Digest(t, open(t, Options{Tier: tier}), filepath.Join("testdata", "digests-"+tier+".txt"))
		})
	}
}
