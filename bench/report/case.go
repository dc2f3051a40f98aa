package report

import (
	"fmt"
	"strings"

	"github.com/seed90331342/attn/kernels"
)

// Case is a call of certain lengths and options.
type Case struct {
	// Variant is what runs, one of [Variants].
	Variant string `json:"variant"`
	// DType is the type of Q, K, V and O, one of [DTypes].
	DType string `json:"dtype"`
	// Cache is the type of K and V where it is another one, one of [Caches].
	Cache string `json:"cache,omitempty"`
	// Batch to Dim are the lengths of the call. Dim is also the head size of the values.
	Batch   int `json:"batch"`
	Heads   int `json:"heads"`
	KVHeads int `json:"kv_heads"`
	SeqQ    int `json:"seq_q"`
	SeqK    int `json:"seq_k"`
	Dim     int `json:"dim"`
	// Causal hides later keys from a row. The last query is at the position of the last key, as if
	// the queries followed a cache.
	Causal bool `json:"causal"`
	// WindowLeft and WindowRight are how many keys a row sees before and after its own, by the same
	// positions; null is no limit.
	WindowLeft  *int `json:"window_left"`
	WindowRight *int `json:"window_right"`
	// Softcap c > 0 replaces scores s by c·tanh(s/c); 0 is off.
	Softcap float64 `json:"softcap"`
	// LowPrecision allows products in fewer bits than those of float32.
	LowPrecision bool `json:"low_precision,omitempty"`
	// Mask is the type of an additive mask [1, 1, SeqQ, SeqK], which all heads and batches share; "" is none.
	Mask string `json:"mask"`
}

// The variants of a case are what runs. The stages store scores and weights of [B, H, Sq, Sk]
// and compute every pair, visible or not.
const (
	// Fused is the fused attention call, Stages the same call as three stages.
	Fused  = "fused"
	Stages = "stages"
	// QK, Softmax and PV are a single stage.
	QK      = "qk"
	Softmax = "softmax"
	PV      = "pv"
	// Backward computes the gradients of Q, K and V from the result of the fused call, whose time does not count.
	Backward = "backward"
)

// Variants lists the variants.
var Variants = []string{Fused, Stages, QK, Softmax, PV, Backward}

// DTypes are the types of operands by name. Caches are those in which only caches store K and V.
var (
	DTypes = map[string]kernels.DType{"f32": kernels.F32, "f16": kernels.F16, "bf16": kernels.BF16}
	Caches = map[string]kernels.DType{"q8": kernels.Q8, "q4": kernels.Q4, "f8": kernels.F8}
)

// Types returns the type of Q and O, and that of K and V.
func (c *Case) Types() (q, k kernels.DType) {
	q = DTypes[c.DType]
	if k, ok := Caches[c.Cache]; ok {
		return q, k
	}
	return q, q
}

// Visible is the rule that hides keys from rows.
func (c *Case) Visible() kernels.Visibility {
	v := kernels.Visibility{Left: kernels.Unbounded, Right: kernels.Unbounded, Offset: c.SeqK - c.SeqQ}
	if w := c.WindowLeft; w != nil && *w < c.SeqQ+c.SeqK { // others hide nothing
		v.Left = *w
	}
	if w := c.WindowRight; w != nil && *w < c.SeqQ+c.SeqK {
		v.Right = *w
	}
	if c.Causal {
		v.Right = 0
	}
	return v
}

// SeenKeys returns the number of keys that at least one row of a head sees. The first row looks back the furthest.
func (c *Case) SeenKeys() int {
	v := c.Visible()
	return c.SeqK - max(0, min(v.Offset-v.Left, c.SeqK))
}

// Name is the case in the form of a Go benchmark: f32/b1h8s1024d64, followed by what differs from plain self-attention.
func (c *Case) Name() string {
	return strings.Join(append([]string{fmt.Sprintf("%s/b%dh%ds%dd%d", c.DType, c.Batch, c.Heads, c.SeqK, c.Dim)}, c.differences()...), "/")
}

// Shape describes the case without its length: "B=1 H=8 D=64 f32 causal qk". The variant is
// left out for the fused call.
func (c *Case) Shape() string {
	words := append([]string{fmt.Sprintf("B=%d H=%d D=%d %s", c.Batch, c.Heads, c.Dim, c.DType)}, c.differences()...)
	if c.Variant != Fused {
		words = append(words, c.Variant)
	}
	return strings.Join(words, " ")
}

// Window is the window as a flag has it: "256,inf".
func (c *Case) Window() string {
	side := func(n *int) string {
		if n == nil {
			return "inf"
		}
		return fmt.Sprint(*n)
	}
	return side(c.WindowLeft) + "," + side(c.WindowRight)
}

// differences lists what differs from plain self-attention.
func (c *Case) differences() (all []string) {
	add := func(differs bool, format string, args ...any) {
		if differs {
			all = append(all, fmt.Sprintf(format, args...))
		}
	}
	add(c.Cache != "", "cache-%s", c.Cache)
	add(c.KVHeads != c.Heads, "kv%d", c.KVHeads)
	add(c.SeqQ != c.SeqK, "q%d", c.SeqQ)
	add(c.Causal, "causal")
	add(c.WindowLeft != nil || c.WindowRight != nil, "window%s", c.Window())
	add(c.Softcap > 0, "softcap%v", c.Softcap)
	add(c.LowPrecision, "low")
	add(c.Mask != "", "mask")
	return all
}
