package cli

import (
	"io"
	"strings"
	"unicode"
)

// maxLabel is the length of a name in tables and pictures, in characters.
const maxLabel = 64

// Plain returns text from a file or an argument for a terminal, SVG or HTML: control and
// formatting characters, and bytes that are not UTF-8, become U+FFFD.
func Plain(text string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) || unicode.Is(unicode.Cf, r) {
			return unicode.ReplacementChar
		}
		return r
	}, text)
}

// Label is Plain, shortened to 64 characters.
func Label(text string) string {
	runes := []rune(Plain(text))
	if len(runes) > maxLabel {
		return string(runes[:maxLabel-1]) + "…"
	}
	return string(runes)
}

// output is standard output. After an error it drops what follows, so that a command
// whose reader has gone still writes its files; Run returns the error in the end.
type output struct {
	w   io.Writer
	err error
}

// Write implements io.Writer.
func (o *output) Write(p []byte) (int, error) {
	if o.err == nil {
		_, o.err = o.w.Write(p)
	}
	return len(p), nil
}
