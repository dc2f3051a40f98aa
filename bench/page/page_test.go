package page

import (
	"strings"
	"testing"

	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// TestPlainText: no escape, direction mark or broken UTF-8 reaches a page.
func TestPlainText(t *testing.T) {
	var got strings.Builder
	must.Do(t, Write(&got, Page{Title: "a\x1b[2Jb", Body: "<p>c\u202ed\xffe</p>"}))
	for _, want := range []string{"a\ufffd[2Jb", "<p>c\ufffdd\ufffde</p>"} {
		if !strings.Contains(got.String(), want) {
			t.Errorf("%q is not in %s", want, got.String())
		}
	}
	if strings.ContainsAny(got.String(), "\x1b\u202e") {
		t.Error("the page has the characters")
	}
}

// TestWrite: a title is text, whatever is in it, and there is one script and one style.
func TestWrite(t *testing.T) {
	var b strings.Builder
	must.Do(t, Write(&b, Page{Title: "</title><script>alert(1)</script>", Body: "<p>here</p>", Script: "/* mine */"}))
	for part, want := range map[string]int{"<script": 1, "<style>": 1, "<p>here</p>": 1, "/* mine */": 1, "alert(1)": 2, "http:": 0, "https:": 0, "ZgotmplZ": 0} {
		if n := strings.Count(b.String(), part); n != want {
			t.Errorf("%q is there %d times, should be %d", part, n, want)
		}
	}
}
