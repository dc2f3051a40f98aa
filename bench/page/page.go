// Package page writes HTML pages with drawings, for light and dark themes and for phones. A page is
// one file that loads nothing.
//
// The content needs no script. The script adds zoom and tips to drawings, and sorting to tables:
//
//	<figure class="zoom">   contains an svg element with a viewBox and, as --drawn in its style, its
//	                        width; buttons zoom, dragging moves
//	[data-tip]              shows this text under the pointer
//	<table class="sort">    headers sort, by data-v of a cell or by its text
//
// The caller's script may call tip(event, text) and untip().
package page

import (
	_ "embed"
	"html/template"
	"io"

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
