package chart

import (
	"fmt"
	"math"
	"testing"

	"github.com/seed90331342/attn/bench/internal/format"
)

// TestAxis: an axis contains its range and has a readable number of round ticks.
func TestAxis(t *testing.T) {
	for _, tt := range []struct {
		a      Axis
		lo, hi float64
		want   string
	}{
		{Axis{Format: format.Plain}, 1, 100, "[1 2 3 5 10 20 30 50 100]"},
		{Axis{Format: format.Plain}, 190, 211, "[150 200 300]"},
		{Axis{Format: format.Plain}, 1e-3, 1e9, "[0.01 1 100 10000 1000000 1e+08]"},
		{Axis{Format: format.Size, Binary: true}, 1 << 20, 1 << 30, "[1.0 MiB 4.0 MiB 16.0 MiB 64.0 MiB 256.0 MiB 1.0 GiB]"},
		{Axis{Format: format.Duration}, 4e-7, 8, "[1.00 µs 10.0 µs 100 µs 1.00 ms 10.0 ms 100 ms 1.00 s 10.0 s]"},
	} {
		tt.a.fit(tt.lo, tt.hi)
		var got []string
		for _, x := range tt.a.Ticks {
			got = append(got, tt.a.Format(x))
		}
		if fmt.Sprint(got) != tt.want {
			t.Errorf("%v to %v: %v, should be %v", tt.lo, tt.hi, got, tt.want)
		}
	}
	for lo := 1e-9; lo < 1e9; lo *= 7 {
		for ratio := 1.0; ratio < 1e15; ratio *= 3.3 {
			s := Axis{Format: format.Plain}
			s.fit(lo, lo*ratio)
			if s.min >= lo || s.max <= lo*ratio || len(s.Ticks) < 1 || len(s.Ticks) > maxTicks {
				t.Errorf("%v to %v: %v to %v, ticks %v", lo, lo*ratio, s.min, s.max, s.Ticks)
			}
		}
	}
	var lengths []float64
	for x := 1.0; x <= 1<<20; x *= 2 {
		lengths = append(lengths, x)
	}
	s := Axis{Format: format.Plain, Ticks: lengths}
	s.fit(1, 1<<20)
	if len(s.Ticks) < 4 || len(s.Ticks) > maxTicks+2 {
		t.Errorf("21 lengths: ticks %v", s.Ticks)
	}
	for _, x := range s.Ticks {
		if math.Exp2(math.Round(math.Log2(x))) != x {
			t.Errorf("tick %v is not one of the lengths", x)
		}
	}
}
