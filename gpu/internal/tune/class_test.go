package tune

import (
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// Calls that share a class share its measurement, and no others.
func TestClasses(t *testing.T) {
	base := soft
	base.Tiling, base.ValueDim, base.Heads, base.SeqQ = TilingOf(64, 64), 64, 8, 1024
	for _, x := range []struct {
		name   string
		change func(s *Shape)
		same   bool
	}{
		{"a bit longer", func(s *Shape) { s.SeqQ = 3000 }, true},
		{"other heads", func(s *Shape) { s.Heads = 5 }, true},
		{"a few columns less", func(s *Shape) { s.ValueDim = 40 }, true},
		{"much longer", func(s *Shape) { s.SeqQ = 1 << 20 }, false},
		{"as many rows in many heads", func(s *Shape) { s.Heads, s.SeqQ = 512, 16 }, false},
		{"half the columns", func(s *Shape) { s.ValueDim = 32 }, false},
		{"another type", func(s *Shape) { s.In = backend.BF16 }, false},
		{"another type of keys", func(s *Shape) { s.KV = backend.F16 }, false},
		{"a mask", func(s *Shape) { s.Pairs.Mask = true }, false},
		{"odd strides", func(s *Shape) { s.Wide = false }, false},
		{"heads that fill the class", func(s *Shape) { s.Partial = false }, false},
		{"a 16 bit output", func(s *Shape) { s.Half = true }, false},
		{"a larger head", func(s *Shape) { s.Tiling = TilingOf(80, 64) }, false},
	} {
		s := base
		x.change(&s)
		if same := s.stored() == base.stored(); same != x.same || same != (s.class() == base.class()) {
			t.Errorf("%s: the same class: %v, %+v", x.name, same, s.stored())
		}
		list := s.Candidates()
		if len(list) == 0 {
			t.Fatalf("%s: no candidates", x.name)
		}
		if first, _ := s.Rule(); list[0].Label() != first.Label() {
			t.Errorf("%s: %s is tried first, the rule takes %s", x.name, list[0].Label(), first.Label())
		}
	}
	// A GPU has variants with more than the safe memory, which are measured on request only.
	s := base
	s.Software, s.Limits.Memory = false, 48<<10
	risky := 0
	for _, v := range s.Candidates() {
		if s.risky(v) {
			risky++
			if v.memory() <= safeMemory {
				t.Errorf("%s has %d bytes", v.Label(), v.memory())
			}
		}
	}
	if risky == 0 || risky == len(s.Candidates()) {
		t.Errorf("%d of %d candidates are risky", risky, len(s.Candidates()))
	}
}

// On a GPU each set of options has a class of its own, whose calls have these options. On
// software drivers all sets share a kernel and a class.
func TestOptionClasses(t *testing.T) {
	gpu := soft
	gpu.Software = false
	seen := map[Class]Pairs{}
	for _, x := range []struct{ pairs, measured Pairs }{
		{Pairs{}, Pairs{}},
		{Pairs{Mask: true}, Pairs{Mask: true}},
		{Pairs{Blocks: true}, Pairs{Mask: true}},
		{Pairs{Bias: true}, Pairs{Bias: true}},
		{Pairs{OtherBias: true}, Pairs{Bias: true}},
		{Pairs{Slopes: true}, Pairs{Slopes: true}},
		{Pairs{Softcap: true}, Pairs{Softcap: true}},
		{Pairs{Dropout: true}, Pairs{Dropout: true}},
		{Pairs{Mask: true, Bias: true, Slopes: true, Softcap: true, Dropout: true}, Pairs{Mask: true, Bias: true, Slopes: true, Softcap: true, Dropout: true}},
	} {
		s := gpu
		s.Pairs = x.pairs
		if p, had := seen[s.stored()]; had != (x.pairs != x.measured) || had && p != x.measured {
			t.Errorf("%+v shares the class of %+v", x.pairs, p)
		}
		seen[s.stored()] = x.pairs
		r := newFake(t)
		e := must.Get(newExercise(t.Context(), r, s))(must.In(t, "%+v", x.pairs))
		for _, c := range []*backend.Call{&e.long, &e.edge} {
			got := Pairs{Mask: !c.Mask.IsZero(), Bias: !c.Bias.IsZero(), Slopes: c.Slopes != nil, Softcap: c.Softcap > 0, Dropout: c.Dropout.P > 0}
			if got != x.measured {
				t.Errorf("%+v: calls with %+v are measured", x.pairs, got)
			}
			if _, err := r.Run(t.Context(), c, Variant{}, 1); err != nil {
				t.Errorf("%+v: %v", x.pairs, err)
			}
		}
		e.release()
		s.Software = true
		if got := s.measured(); got != exercised && x.pairs != (Pairs{}) {
			t.Errorf("%+v on software drivers: calls with %+v are measured", x.pairs, got)
		}
	}
}
