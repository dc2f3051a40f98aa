package kernels_test

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// TestReadmeHoldsTheExample: README contains the program of Example, which also imports gpu
// there: see TestModules.
func TestReadmeHoldsTheExample(t *testing.T) {
	example := must.Get(os.ReadFile("example_test.go"))(t)
	readme := must.Get(os.ReadFile("../README.md"))(t)
	want := strings.NewReplacer("package kernels_test", "package main", "func Example()", "func main()",
		" // and attn/gpu, for a GPU\n", "\n\t_ \"github.com/seed90331342/attn/gpu\"\n").Replace(string(example))
	want = regexp.MustCompile(`(?m)^\t// Output: (.*)$`).ReplaceAllString(want, "\t// prints $1")
	if !strings.Contains(string(readme), "```go\n"+want+"```") {
		t.Errorf("README.md does not hold this program:\n%s", want)
	}
}
