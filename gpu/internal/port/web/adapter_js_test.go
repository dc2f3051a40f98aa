package web_test

import (
	"fmt"
	"reflect"
	"syscall/js"
	"testing"

	"github.com/seed90331342/attn/gpu/internal/port"
	"github.com/seed90331342/attn/gpu/internal/port/web"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// TestFeatures: an adapter has the features that its browser lists, with sizes that the browser does not hide, and a device
// is asked for these. A browser that lists a feature and refuses it says so.
func TestFeatures(t *testing.T) {
	const (
		listed = `"timestamp-query", "float32-filterable", "shader-f16", "subgroups", "chromium-experimental-subgroup-matrix"`
		lanes  = `subgroupMinSize: 8, subgroupMaxSize: 32, `
		shapes = `subgroupMatrixConfigs: [{componentType: "f16", resultComponentType: "f32", M: 16, N: 8, K: 32}, {componentType: "u8", resultComponentType: "u32", M: 1, N: 2, K: 3}]`
	)
	all := []port.Matrix{{M: 16, N: 8, K: 32, Component: port.F16, Result: port.F32}, {M: 1, N: 2, K: 3, Component: "u8", Result: "u32"}}
	for _, c := range []struct {
		name, features, info string
		want                 port.Features
		asked                string
	}{
		{"all", listed, "{" + lanes + shapes + "}", port.Features{F16: true, SubgroupMin: 8, SubgroupMax: 32, Matrices: all},
			"chromium-experimental-subgroup-matrix shader-f16 subgroups timestamp-query"},
		{"shapes are hidden", listed, "{" + lanes + "}", port.Features{F16: true, SubgroupMin: 8, SubgroupMax: 32}, "shader-f16 subgroups timestamp-query"},
		{"lanes are hidden", listed, "{" + shapes + "}", port.Features{F16: true}, "shader-f16 timestamp-query"},
		{"nothing is described", listed, "undefined", port.Features{F16: true}, "shader-f16 timestamp-query"},
		{"sizes alone", "", "{" + lanes + shapes + "}", port.Features{}, ""},
		{"no matrices", `"subgroups"`, "{" + lanes + shapes + "}", port.Features{SubgroupMin: 8, SubgroupMax: 32}, "subgroups"},
	} {
		navigator := js.Global().Get("navigator")
		was := navigator.Get("gpu")
		navigator.Set("gpu", js.Global().Call("eval", fmt.Sprintf(`({requestAdapter: async () => ({
			features: new Set([%s]), info: %s, limits: {},
			requestDevice: async d => { throw new TypeError("refused: " + d.requiredFeatures.sort().join(" ") + ".") },
		})})`, c.features, c.info)))
		adapters, err := web.Adapters()
		navigator.Set("gpu", was)
		if must.Do(t, err); len(adapters) != 1 {
			t.Fatalf("%s: %d adapters", c.name, len(adapters))
		}
		if got := adapters[0].Info().Features; !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: features are %+v, want %+v", c.name, got, c.want)
		}
		_, err = port.NewAdapter(adapters[0]).Open(adapters[0].Limits())
		must.Fail(t, c.name, err, port.ErrInvalid, "refused: "+c.asked+".")
	}
}
