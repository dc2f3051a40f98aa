// Package picture draws attention weights as heat maps: PNG, SVG and HTML.
package picture

import (
	"fmt"
	"image/color"
	"io"
	"math"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/palette"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgimg"
	"gonum.org/v1/plot/vg/vgsvg"

	"github.com/seed90331342/attn/bench/page"
	"github.com/seed90331342/attn/cmd/internal/flags"
	"github.com/seed90331342/attn/cmd/internal/matrix"
)

// Sizes of the picture. A cell of 44 points holds "0.98" with some padding. Larger
// matrices shrink it until the data is mapWidth wide, and have no numbers above
// maxNumbered tokens.
const (
	cellSize    = vg.Length(44)
	pixel       = vg.Length(72) / pictureDPI
	mapWidth    = vg.Length(560)
	minSide     = vg.Length(120) // of the shorter side and of the colour bar
	maxNumbered = 12
	maxNames    = 40   // with more tokens, some have no name
	maxDrawn    = 4096 // more cells are the pixels of an image
	gap         = vg.Length(16)
	barWidth    = vg.Length(72)
	widestLabel = vg.Length(64 * 16) // 64 characters that are 1.6 times as wide as high
	pictureDPI  = 144
	maxPixels   = 16_000_000 // 4000 x 4000
)

// HeatMap is a picture of attention weights: a panel for each matrix, queries
// down, keys across, darker for larger weights, with one colour bar.
type HeatMap struct {
	Title      string
	Names      []string // of the panels, if there are several
	Query, Key Axis
	Weights    matrix.Matrix
	Log        bool // shades follow the logarithm
}

// Axis names the rows or columns of the matrices.
type Axis struct {
	Labels     []string // one for each; nil numbers them
	First, End int      // the tokens First to End-1
	Step       int      // tokens that one row or column joins
}

// label names row or column i.
func (a Axis) label(i int) string {
	if a.Labels == nil {
		return strconv.Itoa(a.First + i*a.Step)
	}
	return a.Labels[i]
}

// drawing is the layout of a picture, with the origin in the lower left corner.
type drawing struct {
	width, height vg.Length
	heading       string
	panels        []*plot.Plot
	data          []vg.Rectangle // of each panel
	bar           *plot.Plot
	barData       vg.Rectangle
}

// WritePNG writes the picture as PNG.
func (h *HeatMap) WritePNG(w io.Writer) error {
	d, err := h.layout(true)
	if err != nil {
		return err
	}
	canvas := vgimg.NewWith(vgimg.UseWH(d.width, d.height), vgimg.UseDPI(pictureDPI), vgimg.UseBackgroundColor(color.White))
	d.draw(draw.New(canvas))
	_, err = vgimg.PngCanvas{Canvas: canvas}.WriteTo(w)
	return err
}

// WriteSVG writes the picture as SVG.
func (h *HeatMap) WriteSVG(w io.Writer) error {
	d, err := h.layout(true)
	if err != nil {
		return err
	}
	return d.writeSVG(w, true)
}

// writeSVG writes the drawing, on a white background if ground is set.
func (d *drawing) writeSVG(w io.Writer, ground bool) error {
	canvas := vgsvg.New(d.width, d.height)
	dc := draw.New(canvas)
	if ground {
		dc.SetColor(color.White)
		dc.Fill(dc.Rectangle.Path())
	}
	d.draw(dc)
	var b strings.Builder
	if _, err := canvas.WriteTo(&b); err != nil {
		return err
	}
	// Scaled pictures must not get soft edges or seams between cells.
	_, err := strings.NewReplacer(
		"<image ", `<image preserveAspectRatio="none" style="image-rendering:pixelated" `,
		"<path ", `<path shape-rendering="crispEdges" `,
	).WriteString(w, page.Fonts(b.String()))
	return err
}

// cell returns the size of a cell: square, unless the matrix would be a thin strip.
func cell(rows, cols int) vg.Point {
	fit := func(n int) vg.Length {
		size := min(cellSize, mapWidth/vg.Length(n))
		if size < cellSize { // whole pixels avoid seams
			size = max(1, vg.Length(math.Floor(float64(size/pixel)))) * pixel
		}
		return size
	}
	square := fit(max(rows, cols))
	size := vg.Point{X: square, Y: square}
	widen := func(side *vg.Length, n int) {
		if *side*vg.Length(n) < minSide {
			*side = max(*side, min(fit(n), minSide/vg.Length(n)))
		}
	}
	widen(&size.X, cols)
	widen(&size.Y, rows)
	return size
}

// CheckNames returns an error for a file whose name ends as that of another format: --png h.jpg.
func CheckNames(outputs []flags.File) error {
	for _, f := range outputs {
		format := strings.TrimPrefix(f.Flag, "--")
		switch ext := strings.ToLower(filepath.Ext(f.Path)); ext {
		case ".png", ".svg", ".html", ".jpg", ".jpeg", ".gif", ".webp", ".bmp", ".tiff", ".pdf":
			if ext != "."+format {
				return flags.Usagef("%s %s: the file would be %s, not %s: end its name in .%s (the formats are --png, --svg and --html)",
					f.Flag, f.Path, strings.ToUpper(format), strings.ToUpper(ext[1:]), format)
			}
		}
	}
	return nil
}

// CheckSize returns an error for panels of rows x cols cells that are too many to draw.
func CheckSize(rows, cols, panels int) error {
	size := cell(rows, cols)
	pixels := (size.X * vg.Length(cols)).Dots(pictureDPI) * (size.Y * vg.Length(rows)).Dots(pictureDPI) * float64(panels)
	if pixels > maxPixels {
		return fmt.Errorf("the heat map would have %.0f million pixels, at most %d million are drawn", pixels/1e6, maxPixels/1_000_000)
	}
	return nil
}

// layout places the panels on the picture, with or without the heading.
func (h *HeatMap) layout(heading bool) (*drawing, error) {
	w := h.Weights
	shades := h.shades()
	size := cell(w.Rows, w.Cols)
	data := vg.Point{X: size.X * vg.Length(w.Cols), Y: size.Y * vg.Length(w.Rows)}
	if err := CheckSize(w.Rows, w.Cols, w.Batch); err != nil {
		return nil, err
	}
	d := &drawing{}
	var around margins // of all panels
	for b := range w.Batch {
		name := ""
		if w.Batch > 1 {
			name = h.Names[b]
		}
		p, err := h.panel(name, w.At(b), shades, size)
		if err != nil {
			return nil, err
		}
		d.panels = append(d.panels, p)
		m := marginsOf(p, data)
		around = margins{max(around.left, m.left), max(around.right, m.right), max(around.bottom, m.bottom), max(around.top, m.top)}
	}
	width, height := around.left+data.X+around.right, around.bottom+data.Y+around.top
	columns := int(math.Ceil(math.Sqrt(float64(len(d.panels)))))
	rows := (len(d.panels) + columns - 1) / columns
	inner := vg.Point{X: vg.Length(columns) * (width + gap), Y: max(vg.Length(rows)*(height+gap), around.top+minSide+gap)}
	d.width = inner.X + barWidth + 2*gap
	headHeight := gap / 2
	if heading {
		style := titleStyle()
		d.heading = wrapTitle(h.Title, style, d.width-2*gap)
		headHeight = gap + style.Height(d.heading)
	}
	d.height = inner.Y + headHeight + gap

	// Cells start at whole pixels.
	top := d.height - headHeight - gap/2
	snap := func(x vg.Length) vg.Length { return vg.Length(math.Floor(float64(x/pixel))) * pixel }
	for b := range d.panels {
		left := snap(gap + vg.Length(b%columns)*(width+gap) + around.left)
		bottom := snap(top - vg.Length(b/columns)*(height+gap) - height + around.bottom)
		d.data = append(d.data, rectangle(left, bottom, data.X, data.Y))
	}
	d.bar = h.colourBar(shades)
	highest := top - around.top
	lowest := min(top-vg.Length(rows)*(height+gap)+gap+around.bottom, highest-minSide)
	d.barData = rectangle(gap+inner.X, lowest, barWidth, highest-lowest)
	return d, nil
}

// logDecades is the range of logarithmic shades below the largest weight. The eye
// sees no difference below a millionth.
const logDecades = 6

// shades returns the colours of the levels from 0, or from logDecades below the
// largest weight, to the largest weight.
func (h *HeatMap) shades() palette.ColorMap {
	largest := 0.0
	for _, x := range h.Weights.Data {
		largest = max(largest, float64(x)) // NaN stays
	}
	if !(largest > 0) || math.IsInf(largest, 0) { // all 0, or NaN
		largest = 1
	}
	if h.Log {
		return blues(math.Log10(largest)-logDecades, math.Log10(largest))
	}
	return blues(0, largest)
}

// level returns the position of a weight on the scale of shades.
func (h *HeatMap) level(weight float32, shades palette.ColorMap) float64 {
	if !h.Log {
		return float64(weight)
	}
	return max(math.Log10(float64(weight)), shades.Min())
}

// draw draws the picture without its background.
func (d *drawing) draw(dc draw.Canvas) {
	dc.FillText(titleStyle(), vg.Point{X: d.width / 2, Y: d.height - gap}, d.heading)
	// Each panel has its own margins, which aligns the data of all panels.
	for b, p := range d.panels {
		at := d.data[b]
		m := marginsOf(p, at.Size())
		p.Draw(draw.Canvas{Canvas: dc.Canvas, Rectangle: rectangle(at.Min.X-m.left, at.Min.Y-m.bottom,
			m.left+at.Size().X+m.right, m.bottom+at.Size().Y+m.top)})
	}
	m := marginsOf(d.bar, d.barData.Size())
	d.bar.Draw(draw.Canvas{Canvas: dc.Canvas, Rectangle: rectangle(d.barData.Min.X, d.barData.Min.Y-m.bottom,
		d.barData.Size().X, d.barData.Size().Y+m.bottom+m.top)})
}

// margins is the space for a plot's axes and titles around its data.
type margins struct{ left, right, bottom, top vg.Length }

// marginsOf measures the margins around data of the given size. They depend a
// little on the size of the plot, as labels may exceed the ends of an axis. The
// first iteration has room for any label, the third measures at the final size.
func marginsOf(p *plot.Plot, data vg.Point) margins {
	var m margins
	for range 3 {
		w, h := m.left+data.X+m.right, m.bottom+data.Y+m.top
		if m == (margins{}) {
			w, h = w+widestLabel, h+widestLabel
		}
		inner := p.DataCanvas(draw.NewCanvas(vgimg.New(1, 1), w, h))
		m = margins{inner.Min.X, w - inner.Max.X, inner.Min.Y, h - inner.Max.Y}
	}
	return m
}

func rectangle(x, y, w, h vg.Length) vg.Rectangle {
	return vg.Rectangle{Min: vg.Point{X: x, Y: y}, Max: vg.Point{X: x + w, Y: y + h}}
}

// corners is a heat map that reserves room for its corner cells only. No other cell extends
// beyond them, and plot would look at each of a million cells several times.
type corners struct{ *plotter.HeatMap }

// GlyphBoxes implements plot.GlyphBoxer.
func (c corners) GlyphBoxes(p *plot.Plot) (boxes []plot.GlyphBox) {
	cols, rows := c.GridXYZ.Dims()
	room := vg.Rectangle{Min: vg.Point{X: -5, Y: -5}, Max: vg.Point{X: 5, Y: 5}} // as plotter.HeatMap
	for _, at := range [][2]int{{0, 0}, {cols - 1, rows - 1}} {
		boxes = append(boxes, plot.GlyphBox{X: p.X.Norm(c.GridXYZ.X(at[0])), Y: p.Y.Norm(c.GridXYZ.Y(at[1])), Rectangle: room})
	}
	return boxes
}

// panel returns the plot of one matrix.
func (h *HeatMap) panel(name string, m matrix.Matrix, shades palette.ColorMap, size vg.Point) (*plot.Plot, error) {
	p := sansPlot()
	p.Title.Text = name
	levels := grid{Matrix: m, at: func(w float32) float64 { return h.level(w, shades) }, perCol: 1, perRow: 1}
	cells := plotter.NewHeatMap(levels, shades.Palette(256))
	if cells.Rasterized = m.Rows*m.Cols > maxDrawn; cells.Rasterized {
		// Viewers smooth enlarged images, so the image has the resolution of the picture.
		levels.perCol, levels.perRow = int(math.Round(float64(size.X/pixel))), int(math.Round(float64(size.Y/pixel)))
		cells.GridXYZ = levels
	}
	cells.Min, cells.Max = shades.Min(), shades.Max()
	cells.NaN, cells.Underflow, cells.Overflow = notANumber, notANumber, notANumber
	p.Add(corners{cells})
	p.X.Label.Text, p.Y.Label.Text = "key", "query"
	p.X.Tick.Marker, p.Y.Tick.Marker = h.Key.ticks(m.Cols, false), h.Query.ticks(m.Rows, true)
	// Package plot sets labels too high by their descent; the padding corrects it.
	p.X.Padding, p.Y.Padding = p.X.Tick.Label.FontExtents().Descent+1, 2
	p.X.LineStyle.Width, p.Y.LineStyle.Width = 0, 0
	p.X.Tick.LineStyle.Width, p.Y.Tick.LineStyle.Width = 0, 0
	if h.Key.Labels != nil {
		// Labels wider than their cells are rotated.
		for j := range m.Cols {
			if p.X.Tick.Label.Width(h.Key.label(j)) > size.X*0.95 {
				p.X.Tick.Label.Rotation = math.Pi / 2
				p.X.Tick.Label.XAlign, p.X.Tick.Label.YAlign = draw.XRight, draw.YCenter
				break
			}
		}
	}
	if max(m.Rows, m.Cols) > maxNumbered {
		return p, nil
	}
	numbers, err := cellNumbers(levels, shades)
	if err != nil {
		return nil, err
	}
	p.Add(numbers)
	return p, nil
}

// notANumber is the colour of NaN cells, onLight that of text on light cells. It is
// not black, which a page replaces by the colour of its theme.
var (
	notANumber = color.Gray{Y: 128}
	onLight    = color.Gray{Y: 0x11}
)

// cellNumbers prints the weights in their cells, in white on dark cells.
func cellNumbers(m grid, shades palette.ColorMap) (*plotter.Labels, error) {
	var at plotter.XYLabels
	for i := range m.Rows {
		for j, w := range m.Row(i) {
			at.XYs = append(at.XYs, plotter.XY{X: float64(j), Y: float64(m.Rows - 1 - i)})
			at.Labels = append(at.Labels, fmt.Sprintf("%.2f", w))
		}
	}
	l, err := plotter.NewLabels(at)
	if err != nil {
		return nil, err
	}
	for n := range l.TextStyle {
		s := &l.TextStyle[n]
		sans(s)
		s.XAlign, s.YAlign = draw.XCenter, draw.YCenter
		s.Color = onLight
		// White has the larger contrast above 0.63, where the luminance falls below
		// 0.18 (4.6:1 for both).
		if m.at(m.Data[n])-shades.Min() > 0.63*(shades.Max()-shades.Min()) {
			s.Color = color.White
		}
	}
	return l, nil
}

// ticks returns the labels of the axis: all or, for many labels, every few. Many
// numbered tokens get about eight round numbers.
func (a Axis) ticks(n int, down bool) plot.ConstantTicks {
	var ticks plot.ConstantTicks
	add := func(at float64, label string) {
		if down {
			at = float64(n-1) - at
		}
		ticks = append(ticks, plot.Tick{Value: at, Label: label})
	}
	if a.Labels != nil || n <= maxNumbered {
		for i, step := 0, (n+maxNames-1)/maxNames; i < n; i += step {
			add(float64(i), a.label(i))
		}
		return ticks
	}
	tokens := a.End - a.First
	round := 1
	for power := 1; power*8 <= tokens; power *= 10 {
		for _, digit := range []int{1, 2, 5} {
			if digit*power*8 <= tokens {
				round = digit * power
			}
		}
	}
	for token := (a.First + round - 1) / round * round; token < a.End; token += round {
		add((float64(token-a.First)+0.5)/float64(a.Step)-0.5, strconv.Itoa(token))
	}
	return ticks
}

// grid gives the levels of a matrix to the plotter, whose rows count upwards. It
// repeats each level perCol and perRow times along the axes.
type grid struct {
	matrix.Matrix
	at             func(weight float32) float64
	perCol, perRow int
}

func (g grid) Dims() (c, r int)   { return g.Cols * g.perCol, g.Rows * g.perRow }
func (g grid) Z(c, r int) float64 { return g.at(g.Row(g.Rows - 1 - r/g.perRow)[c/g.perCol]) }
func (g grid) X(c int) float64    { return (float64(c)+0.5)/float64(g.perCol) - 0.5 }
func (g grid) Y(r int) float64    { return (float64(r)+0.5)/float64(g.perRow) - 0.5 }

// colourBar returns the legend of the shades.
func (h *HeatMap) colourBar(shades palette.ColorMap) *plot.Plot {
	p := sansPlot()
	p.Add(&plotter.ColorBar{ColorMap: shades, Vertical: true, Colors: 256})
	p.HideX()
	p.Y.Label.Text = "attention weight"
	if slices.ContainsFunc(h.Weights.Data, func(w float32) bool { return w != w }) {
		p.Y.Label.Text = "weight, grey: NaN"
	}
	p.Y.Padding = 0
	if h.Log {
		var ticks plot.ConstantTicks
		for exponent := math.Ceil(shades.Min()); exponent <= shades.Max(); exponent++ {
			label := fmt.Sprintf("1e%.0f", exponent)
			if exponent > -3 {
				label = strconv.FormatFloat(math.Pow(10, exponent), 'g', 3, 64)
			}
			ticks = append(ticks, plot.Tick{Value: exponent, Label: label})
		}
		p.Y.Tick.Marker = ticks
	}
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

// sansPlot returns an empty plot with a sans-serif font.
func sansPlot() *plot.Plot {
	p := plot.New()
	p.BackgroundColor = nil // the picture or the page draws it
	for _, s := range []*text.Style{&p.Title.TextStyle, &p.X.Label.TextStyle, &p.Y.Label.TextStyle, &p.X.Tick.Label, &p.Y.Tick.Label} {
		sans(s)
	}
	return p
}

func sans(s *text.Style) { s.Font.Variant = "Sans" }

// titleStyle is the style of a plot's title, centred at the top.
func titleStyle() text.Style {
	s := plot.New().Title.TextStyle
	sans(&s)
	s.Font.Size = font.Length(11)
	s.XAlign, s.YAlign = draw.XCenter, draw.YTop
	return s
}
