// Package page makes the pages that the command line writes: one file each that
// loads nothing, with drawings inside, readable in dark and light and on a phone.
//
// A page is complete as it stands; its script adds to drawings what a pointer can
// ask for (zoom, the number under it) and to tables sorting by column:
//
//	<figure class="zoom">   a drawing by [Drawing] inside; buttons to zoom, drag to move
//	[data-tip]              anything in it whose text shows under the pointer
//	<table class="sort">    heads that sort; data-v on a cell is what it sorts by
//
// A script of the caller's own may call tip(event, text) and untip().
package page

import (
	_ "embed"
	"errors"
	"html/template"
	"io"
	"regexp"
	"strings"
)

var (
	//go:embed page.html
	frame string
	//go:embed page.css
	style string
	//go:embed page.js
	script string
)

// Page is what a page holds.
type Page struct {
	// Title stands on top and names the page.
	Title string
	// Body is what follows the title.
	Body template.HTML
	// Script runs after the page's own, in the same scope.
	Script template.JS
}

var frameTemplate = template.Must(template.New("page").Parse(frame))

// Write writes the page.
func Write(w io.Writer, p Page) error {
	return frameTemplate.Execute(w, struct {
		Page
		Style template.CSS
		JS    template.JS
	}{p, template.CSS(style), template.JS(script) + p.Script})
}

// Drawing makes an SVG file a part of a page. It becomes as wide as there is
// room, but not much larger than it was drawn, and the colours named in colours,
// as #RRGGBB in capitals, become those CSS variables, so that they follow the
// page's theme. label says in words what is drawn. over is put on top, in the
// coordinates of the file's viewBox.
//
// It returns an error for a text that is no SVG file with a viewBox.
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

// Fonts makes an SVG file that gonum's plot drew in Liberation Sans name the fonts of
// the same widths, and a general one, for systems that do not have it.
func Fonts(svg string) string {
	return strings.ReplaceAll(svg, "font-family:Liberation Sans", "font-family:'Liberation Sans',Arimo,Arial,Helvetica,sans-serif")
}

// svgHead is the opening tag with its width and viewBox.
var svgHead = regexp.MustCompile(`<svg\s[^>]*?width="([0-9.]+pt)"[^>]*?viewBox="([-0-9. ]+)"[^>]*>`)
