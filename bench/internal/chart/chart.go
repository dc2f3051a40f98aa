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

// picture is a chart of a certain size: the plot with its title above a legend.
type picture struct {
	plot          *plot.Plot
	legend        plot.Legend
	width, height vg.Length
	margin, below vg.Length // below is the height of the legend
}

// swatch is the length of the line in a legend entry.
const swatch = vg.Length(22)

// picture places the plot and the legend.
func (c *Chart) picture(width, plotHeight, margin vg.Length, title string) *picture {
	p := &picture{plot: c.plot(), legend: plot.NewLegend(), width: width, margin: margin}
	p.plot.Title.Text = title
	p.legend.Left, p.legend.ThumbnailWidth, p.legend.Padding = true, swatch, 2
	sans(&p.legend.TextStyle, textSize)
	for i := range c.Lines {
		if l := &c.Lines[i]; len(l.Points) > 0 {
			p.legend.Add(" "+l.Name, l)
		}
	}
	p.below = p.legend.Rectangle(draw.Canvas{}).Size().Y
	p.height = plotHeight + p.plot.Title.TextStyle.Height(title) + p.below + 3*margin
	return p
}

// plot returns the axes, the grid and the lines.
func (c *Chart) plot() *plot.Plot {
	p := plot.New()
	p.BackgroundColor = nil // that of the picture or of the page
	sans(&p.Title.TextStyle, titleSize)
	for _, s := range []*text.Style{&p.X.Label.TextStyle, &p.Y.Label.TextStyle, &p.X.Tick.Label, &p.Y.Tick.Label} {
		sans(s, textSize)
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

// Thumbnail implements plot.Thumbnailer.
func (l *Line) Thumbnail(c *draw.Canvas) {
	c.StrokeLine2(l.style(), c.Min.X, c.Center().Y, c.Max.X, c.Center().Y)
	if !l.Ceiling {
		c.DrawGlyph(l.mark(false), c.Center())
	}
}

// draw draws the picture on a canvas of its size.
func (p *picture) draw(dc draw.Canvas) {
	p.legend.Draw(draw.Crop(dc, p.margin, -p.margin, p.margin, 0))
	p.plot.Draw(p.upper(dc))
}

// upper is the part of the picture above the legend.
func (p *picture) upper(dc draw.Canvas) draw.Canvas {
	return draw.Crop(dc, p.margin, -p.margin, 2*p.margin+p.below, -p.margin)
}

// places returns the positions of a line's points from the upper left corner.
func (p *picture) places(dc draw.Canvas, l *Line) []vg.Point {
	inner := p.plot.DataCanvas(p.upper(dc))
	x, y := p.plot.Transforms(&inner)
	var at []vg.Point
	for _, point := range l.Points {
		at = append(at, vg.Point{X: x(point.X), Y: p.height - y(point.Y)})
	}
	return at
}
