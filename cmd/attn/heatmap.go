package main

import (
	"fmt"
	"image/color"
	"io"
	"math"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgimg"
)

// Measures of the picture. A cell of 44 points holds "0.98" with air around it;
// larger matrices shrink it until the data is mapWidth wide, and go without
// numbers from maxNumbered tokens on.
const (
	cellSize    = vg.Length(44)
	minCell     = vg.Length(1)
	mapWidth    = vg.Length(560)
	maxNumbered = 12
	maxNames    = 40 // more tokens than this are named in steps
	gap         = vg.Length(16)
	barWidth    = vg.Length(72)
	pictureDPI  = 144
	maxPixels   = 16_000_000 // 4000 x 4000: 2000 tokens
)

// drawHeatMaps writes a PNG of the attention weights: a panel for each batch,
// query down, key across, darker the larger, and one colour bar for all.
func drawHeatMaps(w io.Writer, title string, labels []string, weights stack) error {
	largest := 0.0
	for _, x := range weights.data {
		largest = math.Max(largest, float64(x))
	}
	if !(largest > 0) { // all 0, or NaN
		largest = 1
	}
	shades := &blues{max: largest, alpha: 1}
	cell := max(minCell, min(cellSize, mapWidth/vg.Length(weights.cols)))
	data := vg.Point{X: cell * vg.Length(weights.cols), Y: cell * vg.Length(weights.rows)}
	if pixels := data.X.Dots(pictureDPI) * data.Y.Dots(pictureDPI) * float64(weights.batch); pixels > maxPixels {
		return fmt.Errorf("the heat map would have %.0f million pixels, at most %d million are drawn", pixels/1e6, maxPixels/1_000_000)
	}
	panels := make([]*plot.Plot, weights.batch)
	var around margins // what stands around the data of a panel
	for b := range panels {
		name := ""
		if weights.batch > 1 {
			name = fmt.Sprintf("batch %d", b+1)
		}
		p, err := heatMap(name, labels, weights.at(b), shades, cell)
		if err != nil {
			return err
		}
		panels[b] = p
		m := marginsOf(p, data)
		around = margins{max(around.left, m.left), max(around.right, m.right), max(around.bottom, m.bottom), max(around.top, m.top)}
	}
	width, height := around.left+data.X+around.right, around.bottom+data.Y+around.top
	columns := int(math.Ceil(math.Sqrt(float64(len(panels)))))
	rows := (len(panels) + columns - 1) / columns
	inner := vg.Point{X: vg.Length(columns) * (width + gap), Y: vg.Length(rows) * (height + gap)}
	total := inner.X + barWidth + 2*gap
	style := titleStyle()
	heading := wrapTitle(title, style, total-2*gap)
	headHeight := gap + style.Height(heading)

	canvas := vgimg.NewWith(vgimg.UseWH(total, inner.Y+headHeight+gap), vgimg.UseDPI(pictureDPI), vgimg.UseBackgroundColor(color.White))
	dc := draw.New(canvas)
	dc.FillText(style, vg.Point{X: total / 2, Y: dc.Max.Y - gap}, heading)
	// Panels stand one below the other from here down, each as large as its
	// own margins make it, so that cells are square and data lie in line.
	top := dc.Max.Y - headHeight - gap/2
	for b, p := range panels {
		m := marginsOf(p, data)
		left := gap + vg.Length(b%columns)*(width+gap) + around.left - m.left
		bottom := top - vg.Length(b/columns)*(height+gap) - height + around.bottom - m.bottom
		p.Draw(draw.Canvas{Canvas: dc.Canvas, Rectangle: rectangle(left, bottom, m.left+data.X+m.right, m.bottom+data.Y+m.top)})
	}
	bar := colourBar(shades)
	lowest := top - vg.Length(rows)*(height+gap) + gap + around.bottom
	highest := top - around.top
	m := marginsOf(bar, vg.Point{X: barWidth, Y: highest - lowest})
	bar.Draw(draw.Canvas{Canvas: dc.Canvas, Rectangle: rectangle(gap+inner.X, lowest-m.bottom, barWidth, highest-lowest+m.bottom+m.top)})
	_, err := vgimg.PngCanvas{Canvas: canvas}.WriteTo(w)
	return err
}

// margins are what a plot's axes and titles take around its data.
type margins struct{ left, right, bottom, top vg.Length }

// marginsOf measures them for a data area of the given size. They depend on it
// a little, by labels that stand out over the ends of an axis, so that the
// second look is at nearly the final size and the third at the final one.
func marginsOf(p *plot.Plot, data vg.Point) margins {
	var m margins
	for range 3 {
		w, h := m.left+data.X+m.right, m.bottom+data.Y+m.top
		if m == (margins{}) {
			w, h = w+data.X, h+data.Y
		}
		inner := p.DataCanvas(draw.NewCanvas(vgimg.New(1, 1), w, h))
		m = margins{inner.Min.X, w - inner.Max.X, inner.Min.Y, h - inner.Max.Y}
	}
	return m
}

func rectangle(x, y, w, h vg.Length) vg.Rectangle {
	return vg.Rectangle{Min: vg.Point{X: x, Y: y}, Max: vg.Point{X: x + w, Y: y + h}}
}

// heatMap returns the panel of one matrix.
func heatMap(name string, labels []string, m matrix, shades *blues, cell vg.Length) (*plot.Plot, error) {
	p := plot.New()
	p.Title.Text = name
	h := plotter.NewHeatMap(grid(m), shades.Palette(256))
	h.Min, h.Max = 0, shades.max
	h.NaN = color.Gray{Y: 128}
	h.Rasterized = cell == minCell // blurs, and is much faster than a polygon a cell
	p.Add(h)
	p.X.Label.Text, p.Y.Label.Text = "key", "query"
	p.X.Tick.Marker, p.Y.Tick.Marker = tokenTicks(labels, m.cols, false), tokenTicks(labels, m.rows, true)
	// plot sets the names a descent too high: the padding makes room for it.
	p.X.Padding, p.Y.Padding = p.X.Tick.Label.FontExtents().Descent+1, 2
	p.X.LineStyle.Width, p.Y.LineStyle.Width = 0, 0
	p.X.Tick.LineStyle.Width, p.Y.Tick.LineStyle.Width = 0, 0
	// Names wider than their cells stand on end.
	for _, l := range labels {
		if p.X.Tick.Label.Width(l) > cell*0.95 {
			p.X.Tick.Label.Rotation = math.Pi / 2
			p.X.Tick.Label.XAlign, p.X.Tick.Label.YAlign = draw.XRight, draw.YCenter
			break
		}
	}
	if max(m.rows, m.cols) > maxNumbered {
		return p, nil
	}
	numbers, err := cellNumbers(m, shades.max)
	if err != nil {
		return nil, err
	}
	p.Add(numbers)
	return p, nil
}

// cellNumbers are the weights as text in the middle of their cells, white on
// the dark ones.
func cellNumbers(m matrix, largest float64) (*plotter.Labels, error) {
	var at plotter.XYLabels
	for i := range m.rows {
		for j, w := range m.row(i) {
			at.XYs = append(at.XYs, plotter.XY{X: float64(j), Y: float64(m.rows - 1 - i)})
			at.Labels = append(at.Labels, fmt.Sprintf("%.2f", w))
		}
	}
	l, err := plotter.NewLabels(at)
	if err != nil {
		return nil, err
	}
	for n := range l.TextStyle {
		s := &l.TextStyle[n]
		s.XAlign, s.YAlign = draw.XCenter, draw.YCenter
		s.Color = color.Black
		// From here on white has the larger contrast (the luminance of the
		// blues falls below 0.18, where both have 4.6:1).
		if float64(m.data[n]) > 0.7*largest {
			s.Color = color.White
		}
	}
	return l, nil
}

// tokenTicks names the rows or columns, in steps when there are many.
func tokenTicks(labels []string, n int, down bool) plot.ConstantTicks {
	step := (n + maxNames - 1) / maxNames
	var ticks plot.ConstantTicks
	for i := 0; i < n; i += step {
		at := i
		if down {
			at = n - 1 - i
		}
		ticks = append(ticks, plot.Tick{Value: float64(at), Label: labels[i]})
	}
	return ticks
}

// grid shows a matrix to the plotter, whose rows count upwards.
type grid matrix

func (g grid) Dims() (c, r int)   { return g.cols, g.rows }
func (g grid) Z(c, r int) float64 { return float64(matrix(g).row(g.rows - 1 - r)[c]) }
func (g grid) X(c int) float64    { return float64(c) }
func (g grid) Y(r int) float64    { return float64(r) }

// colourBar returns the legend of the shades.
func colourBar(shades *blues) *plot.Plot {
	p := plot.New()
	p.Add(&plotter.ColorBar{ColorMap: shades, Vertical: true, Colors: 256})
	p.HideX()
	p.Y.Label.Text = "attention weight"
	p.Y.Padding = 0
	return p
}

// wrapTitle breaks a title into lines that fit width.
func wrapTitle(title string, style text.Style, width vg.Length) string {
	var out []string
	line := ""
	for _, word := range strings.Fields(title) {
		if line != "" && style.Width(line+" "+word) > width {
			out = append(out, line)
			line = word
			continue
		}
		line = strings.TrimSpace(line + " " + word)
	}
	out = append(out, line)
	return strings.Join(out, "\n")
}

// titleStyle is what plots have as their titles' style, at the top and centred.
func titleStyle() text.Style {
	s := plot.New().Title.TextStyle
	s.Font.Size = font.Length(11)
	s.XAlign, s.YAlign = draw.XCenter, draw.YTop
	return s
}
