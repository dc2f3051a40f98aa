package bench

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/seed90331342/attn/kernels"
)

// ParseSeqs reads sequence lengths: a list "256,1k,4096", where k and M stand for 1024 and 1024², and "256..4k" for
// 256, 512, ... doubling up to 4096. It returns them sorted without duplicates. Errors name the invalid part.
func ParseSeqs(list string) ([]int, error) {
	var seqs []int
	for part := range strings.SplitSeq(list, ",") {
		part = strings.TrimSpace(part)
		first, last, isRange := strings.Cut(part, "..")
		lo, err := parseSeq(first)
		if err != nil {
			return nil, err
		}
		hi := lo
		if isRange {
			if hi, err = parseSeq(last); err != nil {
				return nil, err
			}
			if hi < lo {
				return nil, fmt.Errorf("sequence lengths %q are in reverse order, a range starts with the shorter length: %w", part, kernels.ErrOption)
			}
		}
		seqs = append(seqs, doubling(lo, hi)...)
	}
	slices.Sort(seqs)
	return slices.Compact(seqs), nil
}

func parseSeq(text string) (int, error) {
	digits := strings.TrimRight(text, "kKM")
	shift, ok := map[string]int{"": 0, "k": 10, "K": 10, "M": 20}[text[len(digits):]]
	n, err := strconv.Atoi(digits)
	switch {
	case err != nil || !ok:
		return 0, fmt.Errorf("sequence length %q is not a number, write 256, 4k, 1M or a range like 256..4k: %w", text, kernels.ErrOption)
	case n < 1 || n > maxSeq>>shift:
		return 0, fmt.Errorf("sequence length %q must be 1 to %d: %w", text, maxSeq, kernels.ErrOption)
	}
	return n << shift, nil
}

// doubling returns lo, 2·lo, ... up to hi.
func doubling(lo, hi int) []int {
	var seqs []int
	for s := lo; s <= hi; s *= 2 {
		seqs = append(seqs, s)
	}
	return seqs
}
