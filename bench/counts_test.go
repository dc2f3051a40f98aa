package bench

import (
	"fmt"
	"testing"

	"github.com/seed90331342/attn/bench/report"
	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// counted are the counts of a case by a loop over every pair, with the visibility rule of
// the documentation.
type counted struct{ pairs, flops, bytes, operands, square int64 }

func countByLoop(d report.Case) counted {
	size := int64(report.DTypes[d.DType].Size())
	var n counted
	for range d.Batch {
		seen := map[[2]int]bool{} // kv head and key
		for h := range d.Heads {
			kv := h / (d.Heads / d.KVHeads)
			for i := range d.SeqQ {
				n.operands += int64(2*d.Dim) * size // a row of Q and of O
				at := i + d.SeqK - d.SeqQ           // the row's own position: the last row is at the last key
				for j := range d.SeqK {
					visible := true
					if d.Causal && j > at {
						visible = false
					}
					if l, r := d.WindowLeft, d.WindowRight; l != nil && j < at-*l || r != nil && j > at+*r {
						visible = false
					}
					pair := int64(4 * d.Dim) // a multiplication and an addition for each element of K, and of V
					if visible {
						n.pairs++
						n.flops += pair
						seen[[2]int{kv, j}] = true
					}
				}
			}
		}
		n.bytes += int64(len(seen)) * int64(2*d.Dim) * size
		n.operands += int64(d.KVHeads*d.SeqK*(2*d.Dim)) * size
		n.bytes += int64(d.Heads*d.SeqQ*(2*d.Dim)) * size
	}
	if d.Mask != "" {
		n.bytes += int64(d.SeqQ*d.SeqK) * 4
		n.square += int64(d.SeqQ*d.SeqK) * 4
	}
	return n
}

// Operations, bytes and memory equal those of a loop over the visibility rule, for plans of
// the CPU backend.
func TestCountsAreThoseOfALoop(t *testing.T) {
	be := kernels.NewDevice(cpu.New(cpu.Options{Threads: 1}))
	defer be.Close()
	n := 0
	for _, dims := range []report.Case{
		{Batch: 1, Heads: 1, KVHeads: 1, SeqQ: 1, SeqK: 1, Dim: 1},
		{Batch: 2, Heads: 4, KVHeads: 2, SeqQ: 17, SeqK: 17, Dim: 3},
		{Batch: 1, Heads: 3, KVHeads: 1, SeqQ: 5, SeqK: 23, Dim: 8},
		{Batch: 3, Heads: 2, KVHeads: 2, SeqQ: 1, SeqK: 40, Dim: 4},
		{Batch: 1, Heads: 2, KVHeads: 1, SeqQ: 9, SeqK: 4, Dim: 2},
	} {
		for _, w := range [][2]*int{{}, {new(0), new(0)}, {new(3), new(0)}, {new(0), new(2)}, {new(6), new(5)}, {nil, new(1)}, {new(2), nil}, {new(100), new(100)}} {
			for _, causal := range []bool{false, true} {
				for _, dtype := range []string{"f32", "bf16"} {
					c := call{dims}
					c.Variant, c.DType, c.Causal, c.WindowLeft, c.WindowRight = report.Fused, dtype, causal, w[0], w[1]
					if n%3 == 0 {
						c.Mask = "f32"
					}
					n++
					m := must.Get(planned(t.Context(), be, "", c))(t)
					want := countByLoop(c.Case)
					got := counted{m.Pairs, m.FLOPs, m.Bytes, m.Memory.Operands, m.Memory.Square}
					if got != want {
						t.Errorf("%s: %+v, the loop counts %+v", c.Name(), got, want)
					}
					if m.Memory.Scratch != m.Plan.Scratch || m.Memory.Counted() != got.operands+got.square+m.Plan.Scratch {
						t.Errorf("%s: memory %+v, the plan's scratch is %d", c.Name(), m.Memory, m.Plan.Scratch)
					}
				}
			}
		}
	}
}

// A cache stores rows of fewer bytes: in q8 an integer for each element and a float32, in q4 18 bytes for 32
// elements, in fp8 a byte for each. What is measured is within its bound, and the case has another name.
func TestCaches(t *testing.T) {
	be := kernels.NewDevice(cpu.New(cpu.Options{Threads: 1}))
	defer be.Close()
	names := map[string]bool{}
	for _, tc := range []struct {
		cache string
		row   int64
	}{{"", 64 * 4}, {"q8", 64 + 4}, {"q4", 2 * 18}, {"f8", 64}} {
		r := must.Get(Run(t.Context(), []*kernels.Device{be}, Config{Rounds: 1, Series: []Series{
			{Seqs: []int{40}, Case: report.Case{Heads: 4, KVHeads: 2, SeqQ: 8, Cache: tc.cache, WindowLeft: new(3), WindowRight: new(0)}}}}))(t)
		m := r.Cases[0]
		if names[m.Name] = true; m.Status != report.OK || m.MaxError == nil || *m.MaxError > *m.ErrorBound {
			t.Errorf("%q: %v %v", tc.cache, m.Status, m.Note)
		}
		q := int64(4 * 8 * 64 * 4)
		if want := 2*q + 2*2*(8+3)*tc.row; m.Bytes != want { // the rows see 11 keys
			t.Errorf("%q moves %d bytes, want %d", tc.cache, m.Bytes, want)
		}
	}
	if len(names) != 4 {
		t.Errorf("the names are %v", names)
	}
}

// The stages compute every pair and store the scores.
func TestCountsOfStages(t *testing.T) {
	c := call{report.Case{DType: "bf16", Causal: true, Mask: "f32", Batch: 2, Heads: 4, KVHeads: 2, SeqQ: 3, SeqK: 5, Dim: 7}}
	const (
		all  = 2 * 4 * 3 * 5
		seen = 2 * 4 * (3 + 4 + 5)
		q    = 2 * 4 * 3 * 7 * 2
		k    = 2 * 2 * 5 * 7 * 2
		mask = 3 * 5 * 4
	)
	for _, tc := range []struct {
		variant              string
		flops, bytes, square int64
	}{
		{report.QK, all * 14, q + k + 4*all, mask + 4*all},
		{report.Softmax, 0, 2*4*all + mask, mask + 4*all},
		{report.PV, all * 14, q + k + 4*all, mask + 4*all},
		{report.Stages, seen * 28, 2*q + 2*k + mask + 4*4*all, mask + 4*all},
		{report.Fused, seen * 28, 2*q + 2*k + mask, mask},
	} {
		c.Variant = tc.variant
		m := c.row("", kernels.Info{})
		m.Plan = &kernels.Plan{Scratch: 5}
		m.Derive()
		if got, want := fmt.Sprint(m.FLOPs, m.Bytes, m.Memory.Square), fmt.Sprint(tc.flops, tc.bytes, tc.square); got != want {
			t.Errorf("%s: operations, bytes, memory %s, want %s", tc.variant, got, want)
		}
		if m := m.Memory; m.Scratch != 5 || m.Operands != 2*q+2*k {
			t.Errorf("%s: %+v", tc.variant, m)
		}
	}
}
