// Package page writes HTML pages with drawings, for light and dark themes and for phones. A page is
// one file that loads nothing.
//
// The content needs no script. The script adds zoom and tips to drawings, and sorting to
// tables:
//
//	<figure class="zoom">   contains a drawing by [Drawing]; buttons zoom, dragging moves
//	[data-tip]              shows this text under the pointer
//	<table class="sort">    headers sort, by data-v of a cell or by its text
//
// The caller's script may call tip(event, text) and untip().
package page

import (
	_ "embed"
	"errors"
	"html/template"
	"io"
	"regexp"
	"strings"

	"github.com/seed90331342/attn/bench/plain"
)

var (
	//go:embed page.html
	frame string
	//go:embed page.css
	style string
	//go:embed page.js
	script string
)

// Page is the content of a page.
type Page struct {
	// Title is the heading and the title of the document.
	Title string
	// Body follows the heading.
	Body template.HTML
	// Script runs after the page's own, in the same scope.
	Script template.JS
}

var frameTemplate = template.Must(template.New("page").Parse(frame))

// Write writes the page, with U+FFFD for characters that are not safe in it.
func Write(w io.Writer, p Page) error {
	return frameTemplate.Execute(&plain.Writer{W: w}, struct {
		Page
		Style template.CSS
		JS    template.JS
	}{p, template.CSS(style), template.JS(script) + p.Script})
}

// Drawing returns an SVG file as a part of a page, as wide as the page allows but not much
// larger than the original. It replaces each colour of colours, #RRGGBB in capitals, by a
// CSS variable, which follows the page's theme. label is the text for screen readers; over
// is drawn on top, in the coordinates of the file's viewBox.
//
// It returns an error for a text that is not an SVG file with a width and a viewBox.
func Drawing(svg, label string, colours map[string]string, over template.HTML) (template.HTML, error) {
	head := svgHead.FindStringSubmatchIndex(svg)
	end := strings.LastIndex(svg, "</svg>")
	if head == nil || end < head[1] {
		return "", errors.New("page: not an SVG file with a width and a viewBox")
	}
	width, box := svg[head[2]:head[3]], svg[head[4]:head[5]]
	var pairs []string
	for colour, variable := range colours {
		pairs = append(pairs, colour, "var("+variable+")")
	}
	body := strings.NewReplacer(pairs...).Replace(svg[head[1]:end])
	return template.HTML(`<svg role="img" aria-label="` + template.HTMLEscapeString(label) + `" viewBox="` + box +
		`" style="--drawn:` + width + `" xmlns:xlink="http://www.w3.org/1999/xlink">` + body + string(over) + "</svg>"), nil
}

// Fonts adds alternatives of the same widths to the font Liberation Sans of an SVG file by
// gonum's plot, for systems without that font.
func Fonts(svg string) string {
	return strings.ReplaceAll(svg, "font-family:Liberation Sans", "font-family:'Liberation Sans',Arimo,Arial,Helvetica,sans-serif")
}

// svgHead matches the opening tag with its width and viewBox.
var svgHead = regexp.MustCompile(`<svg\s[^>]*?width="([0-9.]+pt)"[^>]*?viewBox="([-0-9. ]+)"[^>]*>`)
