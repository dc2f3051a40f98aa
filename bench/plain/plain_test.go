package plain

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// texts have escapes, direction marks and broken UTF-8.
var texts = []struct{ text, want string }{
	{"Größe 東京", "Größe 東京"},
	{"a\x1b[31mb\x00\x7f", "a\ufffd[31mb\ufffd\ufffd"},
	{"a\u009bb\u202ec", "a\ufffdb\ufffdc"},
	{"a\xffb\n", "a\ufffdb\ufffd"},
	{"\xe6\x9d", "\ufffd\ufffd"},
	{"\U000e0041", "\ufffd"},
}

func TestText(t *testing.T) {
	for _, c := range texts {
		if got := Text(c.text); got != c.want {
			t.Errorf("%q becomes %q, should be %q", c.text, got, c.want)
		}
	}
	if got := Label(strings.Repeat("é", 65000)); utf8.RuneCountInString(got) != maxLabel || !strings.HasSuffix(got, "…") {
		t.Errorf("a long label becomes %q", got)
	}
	if got, want := Line("one\r\ntwo \x1b[2J"), "one; two \ufffd[2J"; got != want {
		t.Errorf("an error becomes %q, should be %q", got, want)
	}
}

// TestWriter writes texts in one piece and byte by byte.
func TestWriter(t *testing.T) {
	for _, c := range texts {
		want := strings.ReplaceAll(c.want+".", "b\ufffd.", "b\n.") // line breaks stay
		if !strings.HasSuffix(c.text, "\n") {
			want = c.want + "."
		}
		for _, size := range []int{1, 2, 100} {
			var out bytes.Buffer
			w := Writer{W: &out}
			for rest := []byte(c.text + "."); len(rest) > 0; {
				n := must.Get(w.Write(rest[:min(size, len(rest))]))(t)
				rest = rest[n:]
			}
			if out.String() != want {
				t.Errorf("%q in pieces of %d bytes becomes %q, should be %q", c.text, size, &out, want)
			}
		}
	}
}

// TestJSON: a terminal sees no escape, a program the same text.
func TestJSON(t *testing.T) {
	for _, c := range texts {
		encoded := must.Get(json.MarshalIndent([]string{c.text}, "", "  "))(t)
		safe := JSON(encoded)
		if got := replaced(string(safe), "\n"); got != string(safe) {
			t.Errorf("%q is written as %q", c.text, safe)
		}
		var got, want []string
		if json.Unmarshal(encoded, &want) != nil || json.Unmarshal(safe, &got) != nil || got[0] != want[0] {
			t.Errorf("%q is read as %q from %q", c.text, got, safe)
		}
	}
}
