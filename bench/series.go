package bench

import (
	"fmt"
	"slices"
	"strings"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
)

// Series is a case at several lengths. Its zero value is a sweep of plain attention
// with 8 heads of 64 in f32.
type Series struct {
	// Name tells it from other series in a report; "" is a name made of the rest
	// where there are several.
	Name string
	// Seqs are the sequence lengths, of keys and, unless SeqQ says otherwise, of
	// queries. None means a sweep: 256, 512, ... for as long as a call is
	// predicted to take about a second at most.
	Seqs []int
	// SeqQ is how many queries there are, the last on the last key, as in
	// decoding; 0 means as many as keys.
	SeqQ int
	// Batch, Heads and Dim are lengths; 0 means 1, 8 and 64. KVHeads divides
	// Heads; 0 means Heads.
	Batch, Heads, KVHeads, Dim int
	// Causal hides later keys from a row.
	Causal bool
	// Window, Softcap and Mask are those of [Case].
	Window  *kernels.Window
	Softcap float64
	Mask    bool
	// DType is the type of the operands.
	DType backend.DType
	// Variant is what runs, see [Case]; "" means [Fused].
	Variant string
}

// withDefaults fills in and checks s.
func (s Series) withDefaults() (Series, error) {
	or := func(n *int, def int) {
		if *n == 0 {
			*n = def
		}
	}
	or(&s.Batch, 1)
	or(&s.Heads, 8)
	or(&s.KVHeads, s.Heads)
	or(&s.Dim, 64)
	if s.Variant == "" {
		s.Variant = Fused
	}
	switch {
	case min(s.Batch, s.Heads, s.KVHeads, s.Dim) < 1:
		return s, fmt.Errorf("bench: batch %d, heads %d, kv-heads %d, dim %d: all must be at least 1: %w",
			s.Batch, s.Heads, s.KVHeads, s.Dim, backend.ErrShape)
	case s.Heads%s.KVHeads != 0:
		return s, fmt.Errorf("bench: heads is %d, kv-heads is %d: kv-heads must divide heads: %w", s.Heads, s.KVHeads, backend.ErrShape)
	case !s.DType.Float():
		return s, fmt.Errorf("bench: dtype is %v, it must be f32, f16 or bf16: %w", s.DType, backend.ErrDType)
	case s.SeqQ < 0 || s.SeqQ > maxSeq:
		return s, fmt.Errorf("bench: seq-q is %d, it must be 1 to %d, or 0 for as many queries as keys: %w", s.SeqQ, maxSeq, backend.ErrShape)
	case !slices.Contains(Variants, s.Variant):
		return s, fmt.Errorf("bench: variant is %q, it must be one of %v: %w", s.Variant, Variants, backend.ErrOption)
	}
	if w := s.Window; w != nil && min(w.Left, w.Right) < 0 {
		return s, fmt.Errorf("bench: window is %d,%d: both sides must be at least 0: %w", w.Left, w.Right, backend.ErrOption)
	}
	if c := s.Softcap; !(c == 0 || c >= 1e-30 && c <= 1e30) { // what a float32 holds, with room
		return s, fmt.Errorf("bench: softcap is %v, it must be 0 (off) or 1e-30 to 1e30: %w", c, backend.ErrOption)
	}
	for _, seq := range s.Seqs {
		if seq < 1 || seq > maxSeq {
			return s, fmt.Errorf("bench: sequence length is %d, it must be 1 to %d: %w", seq, maxSeq, backend.ErrShape)
		}
		if at := s.at(seq); at.bytes() < 0 {
			return s, fmt.Errorf("bench: %v is too large for this machine to count: %w", at, backend.ErrShape)
		}
	}
	return s, nil
}

// at returns the case of that many keys.
func (s *Series) at(seq int) Case {
	seqQ := seq
	if s.SeqQ > 0 {
		seqQ = s.SeqQ
	}
	return Case{Variant: s.Variant, DType: s.DType, Causal: s.Causal, Window: s.Window, Softcap: s.Softcap, Mask: s.Mask, Dims: backend.Dims{
		Batch: s.Batch, Heads: s.Heads, KVHeads: s.KVHeads, SeqQ: seqQ, SeqK: seq, Dim: s.Dim, ValueDim: s.Dim,
	}}
}

// String says what the series is but for its lengths of keys: "B=1 H=8 D=64 f32".
func (s *Series) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "B=%d H=%d", s.Batch, s.Heads)
	if s.KVHeads != s.Heads {
		fmt.Fprintf(&b, " Hkv=%d", s.KVHeads)
	}
	fmt.Fprintf(&b, " D=%d %v", s.Dim, s.DType)
	if s.SeqQ > 0 {
		fmt.Fprintf(&b, " Sq=%d", s.SeqQ)
	}
	if s.Causal {
		b.WriteString(" causal")
	}
	if w := s.Window; w != nil {
		fmt.Fprintf(&b, " window %s,%s", side(w.Left), side(w.Right))
	}
	if s.Softcap > 0 {
		fmt.Fprintf(&b, " softcap %v", s.Softcap)
	}
	if s.Mask {
		b.WriteString(" + mask f32")
	}
	if s.Variant != Fused {
		b.WriteString(" " + s.Variant)
	}
	return b.String()
}
