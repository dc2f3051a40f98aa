package vec

import (
	"os"
	"strings"
	"testing"

	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// TestExtensions shows that no table for processors without VNNI or VBMI, Skylake-X for one, has kernels that need it.
func TestExtensions(t *testing.T) {
	for _, vnni := range []bool{true, false} {
		for _, x := range withNarrow([]*Kernels{tablesAVX512(vnni, vnni, zen5)}) {
			// Vectors of 8 lanes have the kernel of AVX2.
			if want := vnni || x.Lanes == 8; x.HasFixed() != want {
				t.Errorf("VNNI %v, %d query rows: HasFixed is %v", vnni, x.Width, !want)
			}
			if x.vbmi != nil && !vnni {
				t.Errorf("%d query rows have kernels of VBMI", x.Width)
			}
		}
	}
	source := must.Get(os.ReadFile("vec_amd64.s"))(t)
	for _, kernel := range strings.Split(string(source), "\n// func ")[1:] {
		name, text, _ := strings.Cut(kernel, "(")
		if uses := strings.Contains(text, "VPDPBUSD"); uses != (name == "dotsFixedAVX512") {
			t.Errorf("%s: uses VNNI %v", name, uses)
		}
		if uses := strings.Contains(text, "VPERMI2B"); uses != strings.HasSuffix(name, "VBMI") {
			t.Errorf("%s: uses VBMI %v", name, uses)
		}
	}
}
