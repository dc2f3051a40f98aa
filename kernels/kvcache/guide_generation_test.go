package kvcache_test

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// TestGenerationGuide: docs/guides/generation.md shows lines of Example_generation, and its output.
func TestGenerationGuide(t *testing.T) {
	page := string(must.Get(os.ReadFile("../../docs/guides/generation.md"))(t))
	program := string(must.Get(os.ReadFile("example_generation_test.go"))(t))
	flat := regexp.MustCompile(`(?m)^[\t ]+`)
	program = flat.ReplaceAllString(program, "")
	blocks := regexp.MustCompile("(?s)```go\n(.*?)```").FindAllStringSubmatch(page, -1)
	for _, m := range blocks {
		if !strings.Contains(program, flat.ReplaceAllString(m[1], "")) {
			t.Errorf("example_generation_test.go lacks the lines\n%s", m[1])
		}
	}
	_, output, _ := strings.Cut(program, "// Output:\n")
	output, _, _ = strings.Cut(output, "}\n")
	if want := "```\n" + strings.ReplaceAll(output, "// ", "") + "```"; len(blocks) == 0 || !strings.Contains(page, want) {
		t.Errorf("%d blocks of code in docs/guides/generation.md, which must have the output\n%s", len(blocks), want)
	}
}
