package heatmap

import (
	"encoding/json"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/seed90331342/attn/bench/plain"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// FuzzLabels reads arbitrary labels: they can be drawn, and lines and JSON agree.
func FuzzLabels(f *testing.F) {
	for _, text := range []string{"the\ncat\nsat\n", "a\r\nb", `["the", "cat", "[", "\u001b[31m"]`, "[\nno JSON\n", "", strings.Repeat("w", 65000), "\x1b[31m\xff\n東京\u202e"} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		labels := parseLabels(text)
		for _, label := range labels {
			if utf8.RuneCountInString(label) > 64 || plain.Text(label) != label {
				t.Errorf("%q has the label %q", text, label)
			}
		}
		encoded := must.Get(json.Marshal(labels))(t)
		if again := parseLabels(encoded); strings.Join(again, "\n") != strings.Join(labels, "\n") {
			t.Errorf("%q is read as %q, as JSON as %q", text, labels, again)
		}
	})
}
