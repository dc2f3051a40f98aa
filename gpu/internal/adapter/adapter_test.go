package adapter

import (
	"slices"
	"testing"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/gpu/internal/port"
)

func TestFeatures(t *testing.T) {
	for _, c := range []struct {
		has  port.Features
		want []string
	}{
		{port.Features{}, nil},
		{port.Features{F16: true, SubgroupMin: 32, SubgroupMax: 32}, []string{"f16", "subgroups of 32 lanes"}},
		{port.Features{SubgroupMin: 8, SubgroupMax: 64, Matrices: []port.Matrix{{M: 16, N: 8, K: 32, Component: port.F16, Result: port.F32}}},
			[]string{"subgroups of 8 to 64 lanes", "16x8x32 f16->f32"}},
	} {
		if got := Describe("gpu:0", port.Info{Features: c.has}, gputypes.Limits{}).Features; !slices.Equal(got, c.want) {
			t.Errorf("%+v: %q, want %q", c.has, got, c.want)
		}
	}
}
