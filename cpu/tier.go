package cpu

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/seed90331342/attn/cpu/internal/vec"
)

// The tiers of Options.Tier and of the environment variable ATTN_CPU_TIER.
const (
	tierGonum = "gonum"
	tierEnv   = "ATTN_CPU_TIER"
)

// ErrTier reports a tier of instructions that the machine does not have.
var ErrTier = errors.New("no such tier of instructions on this machine")

// Tiers returns the names that Options.Tier takes on this machine, the fastest
// first: of "avx512" (AVX-512F, DQ and VL), "avx2" (with FMA and F16C) and, always
// and last, "gonum".
func Tiers() []string {
	var names []string
	for _, k := range vec.Tiers() {
		names = append(names, k.Tier)
	}
	return append(names, tierGonum)
}

// kernelsOf returns the kernels of a tier, nil for the gonum path. "" is what the
// environment variable says, and the fastest where that says nothing.
func kernelsOf(tier string) (*vec.Kernels, error) {
	asked := "Options.Tier"
	if tier == "" {
		tier, asked = os.Getenv(tierEnv), tierEnv
	}
	all := vec.Tiers()
	if tier == tierGonum || tier == "" && len(all) == 0 {
		return nil, nil
	}
	if tier == "" {
		return all[0], nil
	}
	for _, k := range all {
		if k.Tier == tier {
			return k, nil
		}
	}
	return nil, fmt.Errorf("cpu: %s is %q, this machine has %s: %w", asked, tier, strings.Join(Tiers(), ", "), ErrTier)
}

// tierName names the tier in use.
func (be *Backend) tierName() string {
	if be.kernels == nil {
		return tierGonum
	}
	return be.kernels.Tier
}
