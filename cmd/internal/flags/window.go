// Package flags has the flags that several programs share.
package flags

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/seed90331342/attn/kernels"
)

// Window is a flag of a sliding window: L,R, where inf is no limit.
type Window kernels.Window

// UnmarshalText implements encoding.TextUnmarshaler.
func (w *Window) UnmarshalText(text []byte) error {
	sides := strings.Split(string(text), ",")
	if len(sides) != 2 {
		return fmt.Errorf("%q must be L,R: the keys visible before and after a row's own position", text)
	}
	for i, to := range []*int{&w.Left, &w.Right} {
		side := strings.TrimSpace(sides[i])
		n, err := strconv.ParseInt(side, 10, 32)
		switch {
		case side == "inf":
			n = kernels.Unbounded
		case err != nil:
			return fmt.Errorf("the side %q is neither a whole number of keys nor inf", side)
		case n < 0:
			return fmt.Errorf("the side %d is negative, it must be at least 0, or inf for no limit", n)
		}
		*to = int(n)
	}
	return nil
}
