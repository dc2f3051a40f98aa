package report

import "testing"

func TestBound(t *testing.T) {
	for _, tc := range []struct {
		why          string
		flops, bytes int64
		peak, read   float64
		launch       float64
		want         Bound
	}{
		{"prefill", 1e9, 1e6, 100e9, 10e9, 1e-5, BoundFMA},
		{"decoding", 1e6, 1e6, 100e9, 10e9, 1e-5, BoundRead},
		{"both at once", 10e6, 1e6, 100e9, 10e9, 0, BoundFMA},
		{"a short call", 1e6, 1e6, 100e9, 10e9, 1e-3, BoundLaunch},
		{"a short call, no bandwidth", 1e6, 1e6, 100e9, 0, 1e-3, BoundLaunch},
		{"no bandwidth", 1e6, 1e6, 100e9, 0, 0, BoundFMA},
		{"no peak", 1e6, 1e6, 0, 10e9, 1e-3, ""},
		{"nothing", 1e6, 1e6, 0, 0, 0, ""},
	} {
		m := Measurement{Rates: Rates{FLOPs: tc.flops, Bytes: tc.bytes, CeilingGFLOPS: Positive(tc.peak / 1e9), CeilingGBS: Positive(tc.read / 1e9), LaunchS: Positive(tc.launch)}}
		if m.findBound(); m.Bound != tc.want {
			t.Errorf("%s: %q, want %q", tc.why, m.Bound, tc.want)
		}
	}
}
