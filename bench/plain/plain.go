// Package plain makes texts from files, arguments, drivers and errors safe to show on terminals and web pages.
package plain

import (
	"io"
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"
)

// maxLabel is the length of a name in tables and pictures, in characters.
const maxLabel = 64

// safe reports whether c is neither a control nor a formatting character.
func safe(c rune) bool { return !unicode.IsControl(c) && !unicode.Is(unicode.Cf, c) }

// Text replaces each control or formatting character, such as an escape or a mark that changes
// the direction of the text, and each byte that is not UTF-8, by U+FFFD.
func Text(text string) string { return replaced(text, "") }

func replaced(text, except string) string {
	return strings.Map(func(c rune) rune {
		if safe(c) || strings.ContainsRune(except, c) {
			return c
		}
		return unicode.ReplacementChar
	}, text)
}

// Line is [Text] with "; " for line breaks.
func Line(text string) string {
	return Text(strings.Join(strings.FieldsFunc(text, func(c rune) bool { return c == '\n' || c == '\r' }), "; "))
}

// Label is [Text], shortened to 64 characters.
func Label(text string) string {
	runes := []rune(Text(text))
	if len(runes) > maxLabel {
		return string(runes[:maxLabel-1]) + "…"
	}
	return string(runes)
}

// JSON returns JSON with escapes for the characters in strings that [Text] replaces.
func JSON(text []byte) []byte {
	var out []byte
	for _, c := range string(text) {
		if safe(c) || c == '\n' {
			out = utf8.AppendRune(out, c)
			continue
		}
		for _, unit := range utf16.AppendRune(nil, c) {
			const digits = "0123456789abcdef"
			out = append(out, '\\', 'u', digits[unit>>12], digits[unit>>8&15], digits[unit>>4&15], digits[unit&15])
		}
	}
	return out
}

// Writer writes [Text] to W, with line breaks and tabs. The bytes of an incomplete character wait for the rest.
type Writer struct {
	W    io.Writer
	rest []byte
}

// Write implements io.Writer.
func (w *Writer) Write(p []byte) (int, error) {
	text := append(w.rest, p...)
	end := len(text)
	for n := 1; n < utf8.UTFMax && n <= len(text); n++ {
		if last := text[len(text)-n:]; utf8.RuneStart(last[0]) {
			if !utf8.FullRune(last) {
				end -= n
			}
			break
		}
	}
	w.rest = append([]byte(nil), text[end:]...)
	_, err := io.WriteString(w.W, replaced(string(text[:end]), "\n\t"))
	return len(p), err
}
