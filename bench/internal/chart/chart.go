// Package chart draws lines over a logarithmic axis as PNG, as SVG and inside a page.
package chart

import (
	"math"
	"slices"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
)

// Chart is a picture of lines.
type Chart struct {
	Name  string // of its files
	Title string
	About string // what is drawn, in a sentence
	X, Y  Axis
	Lines []Line
}

// Line is one line of a chart.
type Line struct {
	Name    string
	Colour  int  // index of a colour and mark
	Ceiling bool // dashed and without marks
	Points  []Point
}

// Point is a figure.
type Point struct {
	X, Y float64
	// Low and High are the ends of the confidence interval of Y; 0 when unknown.
	Low, High float64
	// Predicted points were not measured and have hollow marks.
	Predicted bool
	// Tip is the text under the pointer.
	Tip string
}

// Fit sets the limits and ticks of both axes from the points.
func (c *Chart) Fit() {
	xs, ys := [2]float64{math.Inf(1), 0}, [2]float64{math.Inf(1), 0}
	for _, l := range c.Lines {
		for _, p := range l.Points {
			xs = [2]float64{min(xs[0], p.X), max(xs[1], p.X)}
			ys = [2]float64{min(ys[0], p.Y), max(ys[1], p.Y)}
			if p.Low > 0 {
				ys = [2]float64{min(ys[0], p.Low), max(ys[1], p.High)}
			}
		}
	}
	c.X.fit(xs[0], xs[1])
	c.Y.fit(ys[0], ys[1])
}

// layout is a chart placed on a picture of a certain size.
type layout struct {
	plot          *plot.Plot
	width, height vg.Length
	margin        vg.Length
	plotHeight    vg.Length
	title         string // "" for none
	caption       string // below the title
	legend        []legendEntry
}

// legendEntry is the name of a line; x and y are from the upper left corner.
type legendEntry struct {
	line *Line
	x, y vg.Length
}

const (
	swatch    = vg.Length(22) // length of the line in a legend entry
	legendGap = vg.Length(14) // between entries of a legend
)

// layOut places the title and caption, if any, the legend in as many rows as it needs, and
// the plot.
func (c *Chart) layOut(width, plotHeight, margin vg.Length, title, caption string) *layout {
	p := &layout{plot: c.plot(), width: width, margin: margin, plotHeight: plotHeight, title: title, caption: caption}
	style := textStyle(textSize)
	y := margin
	if title != "" {
		y += textStyle(titleSize).Height(title) + 4 + style.Height(caption) + 6
	}
	x, rowHeight := margin, style.Height("Hg")+5
	for i := range c.Lines {
		l := &c.Lines[i]
		if len(l.Points) == 0 {
			continue
		}
		wide := swatch + 4 + style.Width(l.Name)
		if x > margin && x+wide > width-margin {
			x, y = margin, y+rowHeight
		}
		p.legend = append(p.legend, legendEntry{l, x, y})
		x += wide + legendGap
	}
	p.height = y + rowHeight + 4 + plotHeight + margin
	return p
}

// plot returns the axes, the grid and the lines.
func (c *Chart) plot() *plot.Plot {
	p := plot.New()
	p.BackgroundColor = nil // that of the picture or of the page
	for _, s := range []*text.Style{&p.X.Label.TextStyle, &p.Y.Label.TextStyle, &p.X.Tick.Label, &p.Y.Tick.Label} {
		s.Font.Variant, s.Font.Size = "Sans", textSize
	}
	for _, a := range []*plot.Axis{&p.X, &p.Y} {
		a.Padding = 0
		a.LineStyle.Width, a.Tick.LineStyle.Width, a.Tick.Length = vg.Points(0.7), vg.Points(0.7), vg.Points(4)
	}
	c.X.apply(&p.X)
	c.Y.apply(&p.Y)
	lines := plotter.NewGrid()
	lines.Horizontal = draw.LineStyle{Color: grid, Width: vg.Points(0.6)}
	lines.Vertical = lines.Horizontal
	p.Add(lines)
	for i := range c.Lines {
		p.Add(&c.Lines[i])
	}
	return p
}

// Plot implements plot.Plotter: a line through the measured points, dashes through the
// predicted ones, marks and confidence intervals.
func (l *Line) Plot(c draw.Canvas, p *plot.Plot) {
	x, y := p.Transforms(&c)
	var at []vg.Point
	for _, point := range l.Points {
		at = append(at, vg.Point{X: x(point.X), Y: y(point.Y)})
	}
	if l.Ceiling && len(at) == 1 { // a line through one point would be invisible
		at = []vg.Point{{X: at[0].X - swatch, Y: at[0].Y}, {X: at[0].X + swatch, Y: at[0].Y}}
		c.StrokeLines(l.style(), c.ClipLinesX(at)...)
		return
	}
	measured := slices.IndexFunc(l.Points, func(p Point) bool { return p.Predicted })
	if measured < 0 {
		measured = len(at)
	}
	c.StrokeLines(l.style(), c.ClipLinesXY(at[:measured])...)
	if measured < len(at) {
		style := l.style()
		style.Dashes = []vg.Length{vg.Points(1.5), vg.Points(2.5)}
		c.StrokeLines(style, c.ClipLinesXY(at[max(measured-1, 0):])...)
	}
	if l.Ceiling {
		return
	}
	for i, point := range l.Points {
		if point.Low > 0 {
			low, high := y(point.Low), y(point.High)
			if high-low > 2*markRadius { // otherwise the mark covers it
				c.StrokeLine2(draw.LineStyle{Color: l.rgb(), Width: vg.Points(0.8)}, at[i].X, low, at[i].X, high)
			}
		}
		c.DrawGlyph(l.mark(point.Predicted), at[i])
	}
}

// draw draws the picture on a canvas of its size.
func (p *layout) draw(dc draw.Canvas) {
	style := textStyle(textSize)
	if p.title != "" {
		title, small := textStyle(titleSize), style
		dc.FillText(title, vg.Point{X: p.margin, Y: p.height - p.margin}, p.title)
		small.Color = soft
		dc.FillText(small, vg.Point{X: p.margin, Y: p.height - p.margin - title.Height(p.title) - 4}, p.shortened(p.caption))
	}
	for _, e := range p.legend {
		middle := p.height - e.y - style.Height("x")/2 - 1
		dc.StrokeLine2(e.line.style(), e.x, middle, e.x+swatch, middle)
		if !e.line.Ceiling {
			dc.DrawGlyph(e.line.mark(false), vg.Point{X: e.x + swatch/2, Y: middle})
		}
		dc.FillText(style, vg.Point{X: e.x + swatch + 4, Y: p.height - e.y}, e.line.Name)
	}
	p.plot.Draw(p.plotCanvas(dc))
}

// plotCanvas is the part of the picture that the plot covers.
func (p *layout) plotCanvas(dc draw.Canvas) draw.Canvas {
	return draw.Canvas{Canvas: dc.Canvas, Rectangle: vg.Rectangle{
		Min: vg.Point{X: p.margin, Y: p.margin}, Max: vg.Point{X: p.width - p.margin, Y: p.margin + p.plotHeight}}}
}

// places returns the positions of a line's points from the upper left corner.
func (p *layout) places(dc draw.Canvas, l *Line) []vg.Point {
	inner := p.plot.DataCanvas(p.plotCanvas(dc))
	x, y := p.plot.Transforms(&inner)
	var at []vg.Point
	for _, point := range l.Points {
		at = append(at, vg.Point{X: x(point.X), Y: p.height - y(point.Y)})
	}
	return at
}
