package vec

import (
	"os"
	"regexp"
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
}

// TestInstructions shows that kernels run where their names say. Those of AVX2 need none of the instructions of AVX-512,
// and none of the registers that it adds: given such a register, the assembler turns an instruction of AVX into one of
// AVX-512 without a word.
func TestInstructions(t *testing.T) {
	source := must.Get(os.ReadFile("vec_amd64.s"))(t)
	wide, avx2 := regexp.MustCompile(`\b(AVX512\w*|[XY](1[6-9]|2\d|3[01])|Z\d+|K[0-7])\b`), 0
	for _, kernel := range strings.Split(string(source), "\n// func ")[1:] {
		name, text, _ := strings.Cut(kernel, "(")
		if strings.Contains(name, "AVX2") {
			avx2++
			if found := wide.FindString(text); found != "" {
				t.Errorf("%s uses %s", name, found)
			}
		}
		if uses := strings.Contains(text, "VPDPBUSD"); uses != (name == "dotsFixedAVX512") {
			t.Errorf("%s: uses VNNI %v", name, uses)
		}
		if uses := strings.Contains(text, "VPERMI2B"); uses != strings.HasSuffix(name, "VBMI") {
			t.Errorf("%s: uses VBMI %v", name, uses)
		}
	}
	if avx2 < 90 {
		t.Errorf("found %d kernels of AVX2", avx2)
	}
}
