package cli

import (
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/seed90331342/attn/cmd/internal/flags"
	"github.com/seed90331342/attn/kernels"
)

// Percent is a flag of a percentage: 5%, 2.5.
type Percent float64

// UnmarshalText implements encoding.TextUnmarshaler.
func (p *Percent) UnmarshalText(text []byte) error {
	x, err := strconv.ParseFloat(strings.TrimSuffix(string(text), "%"), 64)
	if err != nil || !(x >= 0 && x <= 1e6) {
		return fmt.Errorf("%q is not a percentage of at least 0, write 5%% or 2.5", text)
	}
	*p = Percent(x)
	return nil
}

// Size is a flag of a number of bytes: 1000000, 512k, 256M, 2G.
type Size int64

// UnmarshalText implements encoding.TextUnmarshaler.
func (n *Size) UnmarshalText(text []byte) error {
	digits := strings.TrimRight(string(text), "kMG")
	shift, ok := map[string]int{"": 0, "k": 10, "M": 20, "G": 30}[string(text[len(digits):])]
	x, err := strconv.ParseInt(digits, 10, 64)
	if !ok || err != nil || x < 1 || x > math.MaxInt64>>shift {
		return fmt.Errorf("%q is not a size, write a number of bytes of at least 1, or 512k, 256M, 2G", text)
	}
	*n = Size(x << shift)
	return nil
}

// ParseDType returns the type f32, f16 or bf16 of a flag.
func ParseDType(flag, name string) (kernels.DType, error) {
	for _, d := range []kernels.DType{kernels.F32, kernels.F16, kernels.BF16} {
		if d.String() == strings.TrimSpace(name) {
			return d, nil
		}
	}
	return 0, flags.Usagef("%s is %q, it must be f32, f16 or bf16", flag, name)
}
