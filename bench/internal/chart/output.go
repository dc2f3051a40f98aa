package chart

import (
	"fmt"
	"html/template"
	"image/color"
	"io"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgimg"
	"gonum.org/v1/plot/vg/vgsvg"

	"github.com/seed90331342/attn/bench/page"
)

// Sizes in points. At 144 dots an inch a file is 1200 dots wide.
const (
	fileWidth  = vg.Length(600)
	fileHeight = vg.Length(330) // of the plot, without title and legend
	fileMargin = vg.Length(12)
	fileDPI    = 144
	pageWidth  = vg.Length(400)
	pageHeight = vg.Length(250)
	pageMargin = vg.Length(2)
	// tipRadius is the distance from a point within which the pointer shows its tip.
	tipRadius  = 8
	markRadius = vg.Length(2.8)
	textSize   = font.Length(10.5)
	titleSize  = font.Length(12)
)

var (
	white = color.NRGBA{255, 255, 255, 255}
	grid  = color.NRGBA{0xd5, 0xda, 0xe0, 255}
	soft  = color.NRGBA{0x57, 0x60, 0x6a, 255}
)

// palette has the colours of lines, each with a contrast of at least 4.5:1 on white.
// Neighbours differ in more than hue. Pages replace them by the CSS variables --c1 to --c8
// of package page.
var palette = [...]color.NRGBA{
	{0x0b, 0x5c, 0xad, 255}, {0xc2, 0x41, 0x0c, 255}, {0x15, 0x80, 0x3d, 255}, {0x7c, 0x3a, 0xed, 255},
	{0xb4, 0x23, 0x7a, 255}, {0x0e, 0x74, 0x90, 255}, {0x85, 0x4d, 0x0e, 255}, {0x47, 0x55, 0x69, 255},
}

// marks and hollowMarks distinguish lines of the same colour, and lines in a print without
// colours: 24 lines in all with eight colours.
var (
	marks       = [...]draw.GlyphDrawer{draw.CircleGlyph{}, draw.BoxGlyph{}, draw.PyramidGlyph{}}
	hollowMarks = [...]draw.GlyphDrawer{draw.RingGlyph{}, draw.SquareGlyph{}, draw.TriangleGlyph{}}
)

// hex writes a colour as SVG files do.
func hex(c color.NRGBA) string { return fmt.Sprintf("#%02X%02X%02X", c.R, c.G, c.B) }

func (l *Line) rgb() color.NRGBA { return palette[l.Colour%len(palette)] }

func (l *Line) mark(hollow bool) draw.GlyphStyle {
	at := l.Colour % len(marks)
	s := draw.GlyphStyle{Color: l.rgb(), Radius: markRadius, Shape: marks[at]}
	if hollow {
		s.Shape = hollowMarks[at]
	}
	return s
}

func (l *Line) style() draw.LineStyle {
	if l.Ceiling {
		return draw.LineStyle{Color: l.rgb(), Width: vg.Points(1.1), Dashes: []vg.Length{vg.Points(5), vg.Points(3)}}
	}
	return draw.LineStyle{Color: l.rgb(), Width: vg.Points(1.6)}
}

// sans sets the font of a style.
func sans(s *text.Style, size font.Length) { s.Font.Variant, s.Font.Size = "Sans", size }

// file is the picture of a file. caption is below the title, cut to the width.
func (c *Chart) file(caption string) *picture {
	style := plot.New().Title.TextStyle
	sans(&style, titleSize)
	words := strings.Fields(caption)
	for len(words) > 1 && style.Width(strings.Join(words, " ")) > fileWidth-2*fileMargin {
		words = words[:len(words)-1]
	}
	return c.picture(fileWidth, fileHeight, fileMargin, c.Title+"\n"+strings.Join(words, " "))
}

// WritePNG draws the chart as a PNG file; caption is below the title.
func (c *Chart) WritePNG(w io.Writer, caption string) error {
	p := c.file(caption)
	canvas := vgimg.NewWith(vgimg.UseWH(p.width, p.height), vgimg.UseDPI(fileDPI), vgimg.UseBackgroundColor(white))
	p.draw(draw.New(canvas))
	_, err := vgimg.PngCanvas{Canvas: canvas}.WriteTo(w)
	return err
}

// WriteSVG draws the chart as an SVG file; caption is below the title.
func (c *Chart) WriteSVG(w io.Writer, caption string) error {
	p := c.file(caption)
	canvas := vgsvg.New(p.width, p.height)
	dc := draw.New(canvas)
	dc.SetColor(white)
	dc.Fill(vg.Rectangle{Max: vg.Point{X: p.width, Y: p.height}}.Path())
	p.draw(dc)
	var b strings.Builder
	if _, err := canvas.WriteTo(&b); err != nil {
		return err
	}
	_, err := io.WriteString(w, page.Fonts(b.String()))
	return err
}

// Inline draws the chart as a part of a page, with a spot on each point that shows its tip.
func (c *Chart) Inline() (template.HTML, error) {
	p := c.picture(pageWidth, pageHeight, pageMargin, "")
	canvas := vgsvg.New(p.width, p.height)
	dc := draw.New(canvas)
	p.draw(dc)
	var svg, spots strings.Builder
	if _, err := canvas.WriteTo(&svg); err != nil {
		return "", err
	}
	for i := range c.Lines {
		l := &c.Lines[i]
		for j, at := range p.places(dc, l) {
			if tip := template.HTMLEscapeString(l.Points[j].Tip); tip != "" {
				fmt.Fprintf(&spots, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"%d\" data-tip=\"%s\"><title>%s</title></circle>\n",
					float64(at.X), float64(at.Y), tipRadius, tip, tip)
			}
		}
	}
	colours := map[string]string{"#000000": "--ink", hex(grid): "--rule", hex(soft): "--soft"}
	for i, colour := range palette {
		colours[hex(colour)] = fmt.Sprintf("--c%d", i+1)
	}
	return page.Drawing(svg.String(), c.Title, colours, template.HTML(spots.String()))
}
