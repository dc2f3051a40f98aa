package vec

import (
	"testing"

	"github.com/seed90331342/attn/cpu/internal/generated"
)

// TestGenerated shows that the checked-in assembly is what the generator writes.
func TestGenerated(t *testing.T) {
	generated.Check(t, []string{"vec_amd64.s", "vec_amd64.go"},
		[]string{"-out", "../vec_amd64.s", "-stubs", "../vec_amd64.go", "-pkg", "vec"})
}
