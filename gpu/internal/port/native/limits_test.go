//go:build cgo

package native

import (
	"math"
	"testing"

	"github.com/rajveermalviya/go-webgpu/wgpu"
)

type unlimited struct{}

func (unlimited) GetLimits() (l wgpu.SupportedLimits) {
	l.Limits.MaxBufferSize = wgpu.LimitU64Undefined
	return l
}

// TestNoLimitOfBuffers: an adapter without a limit opens with one that the library does not take for its default.
func TestNoLimitOfBuffers(t *testing.T) {
	if got := limitsOf(unlimited{}).MaxBufferSize; got != math.MaxInt64 {
		t.Errorf("the limit is %d, should be %d", got, math.MaxInt64)
	}
}
