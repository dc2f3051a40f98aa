package vec

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// TestAVX2Kernels shows that the kernels of AVX2 run without AVX-512: they need none of its
// instructions, and none of the registers that it adds. Given such a register, the assembler turns
// an instruction of AVX into one of AVX-512 without a word.
func TestAVX2Kernels(t *testing.T) {
	source := must.Get(os.ReadFile("vec_amd64.s"))(t)
	wide, kernels := regexp.MustCompile(`\b(AVX512\w*|[XY](1[6-9]|2\d|3[01])|Z\d+|K[0-7])\b`), 0
	for _, kernel := range strings.Split(string(source), "\n// func ")[1:] {
		name, text, _ := strings.Cut(kernel, "(")
		if !strings.Contains(name, "AVX2") {
			continue
		}
		kernels++
		if found := wide.FindString(text); found != "" {
			t.Errorf("%s uses %s", name, found)
		}
	}
	if kernels < 90 {
		t.Errorf("found %d kernels", kernels)
	}
}
