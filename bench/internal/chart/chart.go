// Package chart draws lines over logarithmic axes as SVG inside a page.
package chart

import (
	"fmt"
	"html/template"
	"math"
	"strings"
)

// Chart is a picture of lines.
type Chart struct {
	Title string
	About string // what is drawn, in a sentence
	X, Y  Axis
	Lines []Line
}

// Line is one line of a chart. Its number is that of its colour and mark.
type Line struct {
	Name   string
	Points []Point
	// Ceiling is a dashed line in the same colour.
	Ceiling []Point
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

// Places in the drawing. The axes start at (left, bottom), below them is the legend.
const (
	left, top     = 58.0, 6.0
	right, bottom = 394.0, 232.0
	entry         = 15.0 // height of a legend entry
	// tipRadius is the distance from a point within which the pointer shows its tip.
	tipRadius = 8
)

// colours is the number of CSS variables --c1, --c2, ... of package page.
const colours = 8

// marks distinguish lines of the same colour, and lines in a print without colours: 24 lines
// in all. They are paths from the middle.
var marks = [...]string{"m-2.8 0a2.8 2.8 0 1 0 5.6 0a2.8 2.8 0 1 0 -5.6 0z", "m-2.5 -2.5h5v5h-5z", "m0 -3.4l3.2 5.6h-6.4z"}

// Draw returns the chart as a part of a page, with a spot on each point that shows its tip.
func (c *Chart) Draw() template.HTML {
	c.fit()
	var b, spots strings.Builder
	height := bottom + 40 + entry*float64(len(c.Lines))
	fmt.Fprintf(&b, `<svg role="img" aria-label="%s" viewBox="0 0 400 %g" font-size="11" style="--drawn:400pt">`, template.HTMLEscapeString(c.Title), height)
	c.axes(&b)
	for i := range c.Lines {
		l := &c.Lines[i]
		// The ceiling is not filled, but its group is, as the marks are.
		fmt.Fprintf(&b, "\n"+`<g style="stroke:var(--c%d);fill:var(--c%[1]d)">`, 1+i%colours)
		mark := marks[i%len(marks)]
		c.path(&b, "1.1", "5 3", l.Ceiling)
		measured := 0
		for measured < len(l.Points) && !l.Points[measured].Predicted {
			measured++
		}
		c.path(&b, "1.6", "none", l.Points[:measured])
		if measured < len(l.Points) {
			c.path(&b, "1.6", "1.5 2.5", l.Points[max(measured-1, 0):])
		}
		for _, p := range l.Points {
			x, y := c.place(p.X, p.Y)
			if p.Low > 0 {
				_, low := c.place(p.X, p.Low)
				_, high := c.place(p.X, p.High)
				fmt.Fprintf(&b, `<path d="M%.1f %.1fV%.1f" stroke-width=".8"/>`, x, low, high)
			}
			fill := ""
			if p.Predicted {
				fill = ` fill="none"`
			}
			fmt.Fprintf(&b, `<path class="mark" d="M%.1f %.1f%s"%s/>`, x, y, mark, fill)
			tip := template.HTMLEscapeString(p.Tip)
			fmt.Fprintf(&spots, "\n"+`<circle cx="%.1f" cy="%.1f" r="%d" data-tip="%s"><title>%[4]s</title></circle>`, x, y, tipRadius, tip)
		}
		y := bottom + 44 + entry*float64(i)
		fmt.Fprintf(&b, `<path d="M8 %gh22" stroke-width="1.6"/><path d="M19 %[1]g%s"/></g>`, y, mark)
		fmt.Fprintf(&b, `<text x="36" y="%g">%s</text>`, y+3.5, template.HTMLEscapeString(l.Name))
	}
	return template.HTML(b.String() + spots.String() + "\n</svg>")
}

// fit sets the limits and ticks of both axes from the points.
func (c *Chart) fit() {
	xs, ys := [2]float64{math.Inf(1), 0}, [2]float64{math.Inf(1), 0}
	for _, l := range c.Lines {
		for _, points := range [][]Point{l.Points, l.Ceiling} {
			for _, p := range points {
				xs = [2]float64{min(xs[0], p.X), max(xs[1], p.X)}
				ys = [2]float64{min(ys[0], p.Y), max(ys[1], p.Y)}
				if p.Low > 0 {
					ys = [2]float64{min(ys[0], p.Low), max(ys[1], p.High)}
				}
			}
		}
	}
	c.X.fit(xs[0], xs[1])
	c.Y.fit(ys[0], ys[1])
}

// place returns where a figure is in the drawing.
func (c *Chart) place(x, y float64) (float64, float64) {
	return left + (right-left)*c.X.at(x), bottom - (bottom-top)*c.Y.at(y)
}

// axes draws the grid with its labels.
func (c *Chart) axes(b *strings.Builder) {
	for _, x := range c.X.Ticks {
		at, _ := c.place(x, c.Y.min)
		fmt.Fprintf(b, `<path stroke="var(--rule)" stroke-width=".6" d="M%.1f %gV%g"/><text x="%.1[1]f" y="%[4]g" text-anchor="middle">%[5]s</text>`, at, top, bottom, bottom+14, c.X.Format(x))
	}
	for _, y := range c.Y.Ticks {
		_, at := c.place(c.X.min, y)
		fmt.Fprintf(b, `<path stroke="var(--rule)" stroke-width=".6" d="M%g %.1fH%g"/><text x="%g" y="%.1f" text-anchor="end">%s</text>`, left, at, right, left-6, at+3.5, c.Y.Format(y))
	}
	fmt.Fprintf(b, `<path d="M%g %gV%gH%g" fill="none" stroke="var(--soft)"/>`, left, top, bottom, right)
	fmt.Fprintf(b, `<text x="%g" y="%g" text-anchor="middle">%s</text>`, (left+right)/2, bottom+28, c.X.Label)
	fmt.Fprintf(b, `<text transform="translate(10 %g)rotate(-90)" text-anchor="middle">%s</text>`, (top+bottom)/2, c.Y.Label)
}

// path draws straight lines through points.
func (c *Chart) path(b *strings.Builder, width, dashes string, points []Point) {
	if len(points) == 1 { // would be invisible
		x, y := c.place(points[0].X, points[0].Y)
		fmt.Fprintf(b, `<path d="M%.1f %.1fh22" stroke-width="%s" stroke-dasharray="%s"/>`, x-11, y, width, dashes)
		return
	}
	var d strings.Builder
	for i, p := range points {
		x, y := c.place(p.X, p.Y)
		fmt.Fprintf(&d, "%c%.1f %.1f", "ML"[min(i, 1)], x, y)
	}
	fmt.Fprintf(b, `<path d="%s" fill="none" stroke-width="%s" stroke-dasharray="%s"/>`, &d, width, dashes)
}
