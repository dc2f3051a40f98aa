package explain

import (
	"slices"
	"strings"
	"testing"

	"github.com/seed90331342/attn/cmd/internal/cli/clitest"
)

// TestExample: the example of the help holds with all its expected values. The help has every field.
func TestExample(t *testing.T) {
	path := clitest.WriteFile(t, t.TempDir(), "example.json", []byte(example))
	out := mustRun(t, "explain", "--backend=cpu", "--round=1", path)
	for _, field := range slices.Concat(expectedFields, roundedFields) {
		if !strings.Contains(out, "\n  "+field+": ") {
			t.Errorf("%s is not checked:\n%s", field, out)
		}
	}
	help := mustRun(t, "explain", "--help")
	for _, field := range slices.Concat(expectedFields, roundedFields, []string{"w_query", "b_value", "scale", "softcap", "title", "labels", "digits", "d_outputs"}) {
		if !strings.Contains(help, field) {
			t.Errorf("the help has no %s", field)
		}
	}
}
