package kvcache_test

import (
	"os"
	"strings"
	"testing"

	"github.com/seed90331342/attn/backend/backendtest/must"
)

// TestServersPage: docs/guides/servers.md has the function of Example_vllm that writes slots.
func TestServersPage(t *testing.T) {
	page := string(must.Get(os.ReadFile("../../docs/guides/servers.md"))(t))
	example := string(must.Get(os.ReadFile("example_vllm_test.go"))(t))
	_, after, _ := strings.Cut(example, "\n// writeSlots")
	function, _, found := strings.Cut(after, "\n}\n")
	if want := "```go\n// writeSlots" + function + "\n}\n```\n"; !found || !strings.Contains(page, want) {
		t.Errorf("docs/guides/servers.md lacks\n%s", want)
	}
}
