package nn_test

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/seed90331342/attn/kernels/kernelstest/must"
	"github.com/seed90331342/attn/kernels/nn"
)

// TestModelsPage: the table of docs/models.md has the families that ParseConfig reads and no others, and each row has a
// program.
func TestModelsPage(t *testing.T) {
	page := string(must.Get(os.ReadFile("../../docs/models.md"))(t))
	err := must.Err(nn.ParseConfig([]byte(`{"model_type": "none"}`)))
	_, list, _ := strings.Cut(err.Error(), "one of ")
	var read, rows []string
	for _, m := range regexp.MustCompile(`"(\w+)"`).FindAllStringSubmatch(list, -1) {
		read = append(read, m[1])
	}
	for _, m := range regexp.MustCompile(`(?m)^\| [^|\n]*\(([^|\n]*)\)[^|\n]* \|(.*)$`).FindAllStringSubmatch(page, -1) {
		for _, family := range regexp.MustCompile("`(\\w+)`").FindAllStringSubmatch(m[1], -1) {
			rows = append(rows, family[1])
		}
		if !strings.Contains(m[2], "](../kernels/nn/example_") {
			t.Errorf("docs/models.md has a row without a program: %s", m[0])
		}
	}
	slices.Sort(rows)
	if rows = slices.Compact(rows); len(read) == 0 || !slices.Equal(rows, read) {
		t.Errorf("the rows of docs/models.md are of %q, ParseConfig reads %q", rows, read)
	}
}
