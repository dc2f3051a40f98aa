package bench

import (
	"fmt"
	"image/color"
	"slices"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
)

// Measures of a picture, in points. At 144 dots an inch that of a file is 1200
// dots wide.
const (
	pictureWidth  = vg.Length(600)
	pictureHeight = vg.Length(330) // of the plot, without titles and legend
	pictureMargin = vg.Length(12)
	pictureDPI    = 144
	swatch        = vg.Length(22) // the piece of a line that a legend shows
	legendGap     = vg.Length(14) // between entries of a legend
	markRadius    = vg.Length(2.8)
)

var (
	white = color.NRGBA{255, 255, 255, 255}
	grid  = color.NRGBA{0xd5, 0xda, 0xe0, 255}
	soft  = color.NRGBA{0x57, 0x60, 0x6a, 255}
)

// palette are the colours of lines: each has a contrast of at least 4.5:1 on
// white, and no two that follow each other differ in hue alone. Pages replace
// them by their CSS variables --c1 to --c8, see package page.
var palette = [...]color.NRGBA{
	{0x0b, 0x5c, 0xad, 255}, {0xc2, 0x41, 0x0c, 255}, {0x15, 0x80, 0x3d, 255}, {0x7c, 0x3a, 0xed, 255},
	{0xb4, 0x23, 0x7a, 255}, {0x0e, 0x74, 0x90, 255}, {0x85, 0x4d, 0x0e, 255}, {0x47, 0x55, 0x69, 255},
}

// marks tell lines apart that have the same colour, and all of them where there
// are no colours.
var marks = [...]draw.GlyphDrawer{draw.CircleGlyph{}, draw.BoxGlyph{}, draw.PyramidGlyph{}, diamond{}}

// hollowMarks are the same without a filling.
var hollowMarks = [...]draw.GlyphDrawer{draw.RingGlyph{}, draw.SquareGlyph{}, draw.TriangleGlyph{}, hollowDiamond{}}

// dashes of a ceiling.
var dashes = []vg.Length{vg.Points(5), vg.Points(3)}

// hex writes a colour as SVG files have it.
func hex(c color.NRGBA) string { return fmt.Sprintf("#%02X%02X%02X", c.R, c.G, c.B) }

func (l *chartLine) rgb() color.NRGBA { return palette[l.colour%len(palette)] }

func (l *chartLine) mark(hollow bool) draw.GlyphDrawer {
	at := (l.colour + l.colour/len(palette)) % len(marks)
	if hollow {
		return hollowMarks[at]
	}
	return marks[at]
}

func (l *chartLine) style() draw.LineStyle {
	s := draw.LineStyle{Color: l.rgb(), Width: vg.Points(1.6)}
	if l.ceiling {
		s.Width, s.Dashes = vg.Points(1.1), dashes
	}
	return s
}

// picture is a chart laid out.
type picture struct {
	chart         *chart
	width, height vg.Length
	margin        vg.Length
	title         string
	caption       string
	legend        []legendEntry
	plot          *plot.Plot
	plotHeight    vg.Length
}

// legendEntry is a line's name in the legend, x and y from the upper left corner.
type legendEntry struct {
	line *chartLine
	x, y vg.Length
}

// layout places a chart on a picture: the title and what it is of, the legend in
// as many rows as it needs, the plot. Without title there is none.
func (c *chart) layout(width, plotHeight, margin vg.Length, title, caption string) *picture {
	p := &picture{chart: c, width: width, margin: margin, plotHeight: plotHeight, title: title, caption: caption}
	y := margin
	if title != "" {
		y += p.titleStyle().Height(title) + 4
		if caption != "" {
			y += p.textStyle().Height(caption) + 6
		}
	}
	style := p.textStyle()
	x, rowHeight := margin, style.Height("Hg")+5
	for i := range c.lines {
		l := &c.lines[i]
		if len(l.points) == 0 {
			continue
		}
		wide := swatch + 4 + style.Width(l.name)
		if x > margin && x+wide > width-margin {
			x, y = margin, y+rowHeight
		}
		p.legend = append(p.legend, legendEntry{l, x, y})
		x += wide + legendGap
	}
	y += rowHeight + 4
	p.height = y + plotHeight + margin
	p.plot = c.plot()
	return p
}

func (p *picture) titleStyle() text.Style {
	s := p.textStyle()
	s.Font.Size = font.Length(14)
	return s
}

// textStyle is that of all other text.
func (p *picture) textStyle() text.Style {
	s := plot.New().Legend.TextStyle
	s.Font.Variant, s.Font.Size = "Sans", font.Length(10.5)
	s.YAlign = draw.YTop
	return s
}

// plot makes the plot of a chart.
func (c *chart) plot() *plot.Plot {
	p := plot.New()
	p.BackgroundColor = nil // that of the picture, or of the page around it
	for _, s := range []*text.Style{&p.X.Label.TextStyle, &p.Y.Label.TextStyle, &p.X.Tick.Label, &p.Y.Tick.Label} {
		s.Font.Variant, s.Font.Size = "Sans", font.Length(10.5)
	}
	for _, a := range []*plot.Axis{&p.X, &p.Y} {
		a.Padding = 0
		a.LineStyle.Width, a.Tick.LineStyle.Width, a.Tick.Length = vg.Points(0.7), vg.Points(0.7), vg.Points(4)
	}
	c.x.put(&p.X, c.xLabel)
	c.y.put(&p.Y, c.yLabel)
	lines := plotter.NewGrid()
	lines.Horizontal = draw.LineStyle{Color: grid, Width: vg.Points(0.6)}
	lines.Vertical = lines.Horizontal
	p.Add(lines)
	for i := range c.lines {
		p.Add(&c.lines[i])
	}
	return p
}

// Plot implements plot.Plotter: a line through what was measured, marks on it.
func (l *chartLine) Plot(c draw.Canvas, p *plot.Plot) {
	x, y := p.Transforms(&c)
	var at []vg.Point
	for _, point := range l.points {
		at = append(at, vg.Point{X: x(point.x), Y: y(point.y)})
	}
	if l.ceiling && len(at) == 1 { // a line of one point would not be seen
		at = []vg.Point{{X: at[0].X - swatch, Y: at[0].Y}, {X: at[0].X + swatch, Y: at[0].Y}}
		c.StrokeLines(l.style(), c.ClipLinesX(at)...)
		return
	}
	// What was predicted hangs on the rest by dashes.
	measured := slices.IndexFunc(l.points, func(p chartPoint) bool { return p.predicted })
	if measured < 0 {
		measured = len(at)
	}
	c.StrokeLines(l.style(), c.ClipLinesXY(at[:measured])...)
	if measured < len(at) {
		style := l.style()
		style.Dashes = []vg.Length{vg.Points(1.5), vg.Points(2.5)}
		c.StrokeLines(style, c.ClipLinesXY(at[max(measured-1, 0):])...)
	}
	if l.ceiling {
		return
	}
	for i, point := range l.points {
		if point.low > 0 {
			low, high := y(point.low), y(point.high)
			if high-low > 2*markRadius { // less is hidden by the mark
				c.StrokeLine2(draw.LineStyle{Color: l.rgb(), Width: vg.Points(0.8)}, at[i].X, low, at[i].X, high)
			}
		}
		c.DrawGlyph(draw.GlyphStyle{Color: l.rgb(), Radius: markRadius, Shape: l.mark(point.predicted)}, at[i])
	}
}

// draw draws the picture on a canvas of its size.
func (p *picture) draw(dc draw.Canvas) {
	style := p.textStyle()
	if p.title != "" {
		dc.FillText(p.titleStyle(), vg.Point{X: p.margin, Y: p.height - p.margin}, p.title)
		small := style
		small.Color = soft
		dc.FillText(small, vg.Point{X: p.margin, Y: p.height - p.margin - p.titleStyle().Height(p.title) - 4}, p.short(p.caption))
	}
	for _, e := range p.legend {
		middle := p.height - e.y - style.Height("x")/2 - 1
		dc.StrokeLine2(e.line.style(), e.x, middle, e.x+swatch, middle)
		if !e.line.ceiling {
			dc.DrawGlyph(draw.GlyphStyle{Color: e.line.rgb(), Radius: markRadius, Shape: e.line.mark(false)}, vg.Point{X: e.x + swatch/2, Y: middle})
		}
		dc.FillText(style, vg.Point{X: e.x + swatch + 4, Y: p.height - e.y}, e.line.name)
	}
	p.plot.Draw(p.plotCanvas(dc))
}

// plotCanvas is the part of the picture that the plot has.
func (p *picture) plotCanvas(dc draw.Canvas) draw.Canvas {
	return draw.Canvas{Canvas: dc.Canvas, Rectangle: vg.Rectangle{
		Min: vg.Point{X: p.margin, Y: p.margin}, Max: vg.Point{X: p.width - p.margin, Y: p.margin + p.plotHeight}}}
}

// places returns where the points of a line lie, from the upper left corner.
func (p *picture) places(dc draw.Canvas, l *chartLine) []vg.Point {
	inner := p.plot.DataCanvas(p.plotCanvas(dc))
	x, y := p.plot.Transforms(&inner)
	var at []vg.Point
	for _, point := range l.points {
		at = append(at, vg.Point{X: x(point.x), Y: p.height - y(point.y)})
	}
	return at
}

// short cuts a text that is wider than the picture.
func (p *picture) short(s string) string {
	style := p.textStyle()
	for style.Width(s) > p.width-2*p.margin {
		words := strings.Fields(s)
		if len(words) < 2 {
			break
		}
		s = strings.Join(words[:len(words)-1], " ")
	}
	return s
}

// diamond is a mark that stands on its corner.
type diamond struct{}

// DrawGlyph implements draw.GlyphDrawer.
func (diamond) DrawGlyph(c *draw.Canvas, s draw.GlyphStyle, at vg.Point) { c.Fill(rhombus(s, at)) }

// hollowDiamond is its outline.
type hollowDiamond struct{}

// DrawGlyph implements draw.GlyphDrawer.
func (hollowDiamond) DrawGlyph(c *draw.Canvas, s draw.GlyphStyle, at vg.Point) {
	c.SetLineStyle(draw.LineStyle{Color: s.Color, Width: vg.Points(0.5)})
	c.Stroke(rhombus(s, at))
}

func rhombus(s draw.GlyphStyle, at vg.Point) vg.Path {
	r := s.Radius * 1.35
	var p vg.Path
	p.Move(vg.Point{X: at.X, Y: at.Y + r})
	for _, to := range []vg.Point{{X: r}, {Y: -r}, {X: -r}} {
		p.Line(vg.Point{X: at.X + to.X, Y: at.Y + to.Y})
	}
	p.Close()
	return p
}
