// Package picture draws attention weights as heat maps: PNG, SVG and HTML.
package picture

import (
	"fmt"
	"image"
	"image/color"
	"io"
	"math"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgimg"
	"gonum.org/v1/plot/vg/vgsvg"

	"github.com/seed90331342/attn/cmd/internal/flags"
	"github.com/seed90331342/attn/cmd/internal/matrix"
)

// Sizes of the picture. A cell of 44 points holds "0.98" with some padding. Longer axes shrink it until the data is
// mapSide long; with more than maxNumbered tokens cells have no numbers.
const (
	largestCell = vg.Length(44)
	mapSide     = vg.Length(560)
	minSide     = vg.Length(120) // of a map with square cells, and of the colour bar
	barWidth    = vg.Length(14)
	gap         = vg.Length(16)
	pad         = gap / 4
	small, big  = vg.Length(10), vg.Length(12) // sizes of the font
	maxNumbered = 12
	maxNames    = 40 // with more tokens, some have no name
	dpi         = 144
	pixel       = vg.Length(72) / dpi
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

// ticks returns the labels of n rows or columns, which are counted from 0: all or, for many
// labels, every few. Many numbered tokens get at most ten round numbers.
func (a Axis) ticks(n int) (ticks []plot.Tick) {
	if a.Labels != nil || n <= maxNumbered {
		for i := 0; i < n; i += (n + maxNames - 1) / maxNames {
			ticks = append(ticks, plot.Tick{Value: float64(i), Label: a.label(i)})
		}
		return ticks
	}
	round := 1
	for i := 1; (a.End-a.First)/round > 10; i++ {
		round = []int{1, 2, 5}[i%3] * int(math.Pow10(i/3))
	}
	for token := (a.First + round - 1) / round * round; token < a.End; token += round {
		ticks = append(ticks, plot.Tick{Value: (float64(token-a.First)+0.5)/float64(a.Step) - 0.5, Label: strconv.Itoa(token)})
	}
	return ticks
}

// WritePNG writes the picture as PNG.
func (h *HeatMap) WritePNG(w io.Writer) error {
	d, err := h.layout(true)
	if err != nil {
		return err
	}
	canvas := vgimg.NewWith(vgimg.UseWH(d.width, d.height), vgimg.UseDPI(dpi), vgimg.UseBackgroundColor(color.White))
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
	_, err := strings.NewReplacer(
		"<image ", `<image preserveAspectRatio="none" style="image-rendering:pixelated" `, // no soft edges of enlarged cells
		"font-family:Liberation Sans", "font-family:'Liberation Sans',Arimo,Arial,Helvetica,sans-serif", // fonts of the same widths
	).WriteString(w, b.String())
	return err
}

// cellSize returns the size of a cell: square, unless the matrix would be a thin strip.
func cellSize(rows, cols int) vg.Point {
	fit := func(n int) vg.Length {
		if size := mapSide / vg.Length(n); size < largestCell { // whole pixels avoid seams
			return max(1, vg.Length(math.Floor(float64(size/pixel)))) * pixel
		}
		return largestCell
	}
	if side := fit(max(rows, cols)); side*vg.Length(min(rows, cols)) >= minSide {
		return vg.Point{X: side, Y: side}
	}
	return vg.Point{X: fit(cols), Y: fit(rows)}
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
	cell := cellSize(rows, cols)
	pixels := (cell.X * vg.Length(cols)).Dots(dpi) * (cell.Y * vg.Length(rows)).Dots(dpi) * float64(panels)
	if pixels > maxPixels {
		return fmt.Errorf("the heat map would have %.0f million pixels, at most %d million are drawn", pixels/1e6, maxPixels/1_000_000)
	}
	return nil
}

// drawing is the layout of a picture, with the origin in the lower left corner.
type drawing struct {
	*HeatMap
	scale
	width, height vg.Length
	heading       string
	cells         []vg.Rectangle // of each panel
	bar           vg.Rectangle
	left, bottom  vg.Length // margins of a panel, for its labels
	turned        bool      // labels of the keys run upwards
}

// layout places the panels on the picture, with or without the heading.
func (h *HeatMap) layout(heading bool) (*drawing, error) {
	w := h.Weights
	if err := CheckSize(w.Rows, w.Cols, w.Batch); err != nil {
		return nil, err
	}
	d := &drawing{HeatMap: h, scale: h.scale()}
	cell := cellSize(w.Rows, w.Cols)
	data := vg.Point{X: cell.X * vg.Length(w.Cols), Y: cell.Y * vg.Length(w.Rows)}
	label := style(small, 0, 0)
	widest := func(ticks []plot.Tick) (width vg.Length) {
		for _, t := range ticks {
			width = max(width, label.Width(t.Label))
		}
		return width
	}
	keys, queries, title := widest(h.Key.ticks(w.Cols)), widest(h.Query.ticks(w.Rows)), 2*big
	d.turned = h.Key.Labels != nil && keys > cell.X*0.95
	right := keys / 2
	d.left, d.bottom = title+max(queries+pad, right), title+small+pad
	if d.turned {
		d.left, d.bottom, right = title+queries+pad, title+keys+pad, 0
	}
	top := vg.Length(0)
	if w.Batch > 1 {
		top = big + pad
	}
	width, height := d.left+data.X+right+gap, d.bottom+data.Y+top+gap // of a panel
	columns := int(math.Ceil(math.Sqrt(float64(w.Batch))))
	rows := (w.Batch + columns - 1) / columns
	barX := gap + vg.Length(columns)*width
	d.width = barX + barWidth + pad + widest(d.scale.ticks()) + title + gap
	d.height = gap + max(vg.Length(rows)*height, top+minSide+gap)
	upper := d.height - gap // of the panels
	if heading {
		large := style(big, 0, 0)
		d.heading = wrapTitle(h.Title, large, d.width-2*gap)
		d.height += large.Height(d.heading)
	}
	snap := func(x vg.Length) vg.Length { return vg.Length(math.Floor(float64(x/pixel))) * pixel } // avoids seams
	for b := range w.Batch {
		left := snap(gap + vg.Length(b%columns)*width + d.left)
		lower := snap(upper - vg.Length(b/columns)*height - top - data.Y)
		d.cells = append(d.cells, rectangle(left, lower, data.X, data.Y))
	}
	first, last := d.cells[0], d.cells[w.Batch-1]
	long := max(first.Max.Y-last.Min.Y, minSide)
	d.bar = rectangle(barX, first.Max.Y-long, barWidth, long)
	return d, nil
}

func rectangle(x, y, w, h vg.Length) vg.Rectangle {
	return vg.Rectangle{Min: vg.Point{X: x, Y: y}, Max: vg.Point{X: x + w, Y: y + h}}
}

// draw draws the picture without its background.
func (d *drawing) draw(c draw.Canvas) {
	c.FillText(style(big, draw.XCenter, draw.YTop), vg.Point{X: d.width / 2, Y: d.height - gap/2}, d.heading)
	for b := range d.cells {
		d.panel(c, b)
	}
	gradient := image.NewPaletted(image.Rect(0, 0, 1, len(blues)-1), blues)
	for i := range gradient.Pix {
		gradient.Pix[i] = uint8(len(gradient.Pix) - 1 - i)
	}
	c.DrawImage(d.bar, gradient)
	height := d.bar.Size().Y
	for _, t := range d.scale.ticks() {
		at := vg.Point{X: d.bar.Max.X + pad, Y: d.bar.Min.Y + vg.Length(d.share(t.Value))*height}
		c.FillText(style(small, draw.XLeft, draw.YCenter), at, t.Label)
	}
	name := "attention weight"
	if slices.ContainsFunc(d.Weights.Data, func(w float32) bool { return w != w }) {
		name = "weight, grey: NaN"
	}
	upwards(c, vg.Point{X: d.width - gap, Y: d.bar.Min.Y + height/2}, name)
}

// panel draws the matrix of batch b.
func (d *drawing) panel(c draw.Canvas, b int) {
	m, at := d.Weights.At(b), d.cells[b]
	size, middle := at.Size(), at.Min.Add(at.Size().Scale(0.5))
	if d.Weights.Batch > 1 {
		c.FillText(style(big, draw.XCenter, draw.YBottom), vg.Point{X: middle.X, Y: at.Max.Y + pad}, d.Names[b])
	}
	// Viewers smooth enlarged images, so the image has the resolution of the picture.
	dots := image.NewPaletted(image.Rect(0, 0, int(math.Round(size.X.Dots(dpi))), int(math.Round(size.Y.Dots(dpi)))), blues)
	for y := range dots.Rect.Max.Y {
		row := m.Row(y * m.Rows / dots.Rect.Max.Y)
		for x := range dots.Rect.Max.X {
			dots.Pix[y*dots.Stride+x] = d.shade(row[x*m.Cols/dots.Rect.Max.X])
		}
	}
	c.DrawImage(at, dots)
	x := func(j float64) vg.Length { return at.Min.X + vg.Length(j+0.5)*size.X/vg.Length(m.Cols) }
	y := func(i float64) vg.Length { return at.Max.Y - vg.Length(i+0.5)*size.Y/vg.Length(m.Rows) }
	key := style(small, draw.XCenter, draw.YTop)
	if d.turned {
		key = style(small, draw.XRight, draw.YCenter)
		key.Rotation = math.Pi / 2
	}
	for _, t := range d.Key.ticks(m.Cols) {
		c.FillText(key, vg.Point{X: x(t.Value), Y: at.Min.Y - pad}, t.Label)
	}
	for _, t := range d.Query.ticks(m.Rows) {
		c.FillText(style(small, draw.XRight, draw.YCenter), vg.Point{X: at.Min.X - pad, Y: y(t.Value)}, t.Label)
	}
	c.FillText(style(big, draw.XCenter, draw.YBottom), vg.Point{X: middle.X, Y: at.Min.Y - d.bottom}, "key")
	upwards(c, vg.Point{X: at.Min.X - d.left + big, Y: middle.Y}, "query")
	if max(m.Rows, m.Cols) > maxNumbered {
		return
	}
	for i := range m.Rows {
		for j, w := range m.Row(i) {
			number := style(small, draw.XCenter, draw.YCenter)
			number.Color = color.Gray{Y: 0x11} // not black, for which a page has the colour of its theme
			// White has the larger contrast above 0.63, where the luminance falls below 0.18 (4.6:1 for both).
			if d.share(float64(w)) > 0.63 {
				number.Color = color.White
			}
			c.FillText(number, vg.Point{X: x(float64(j)), Y: y(float64(i))}, fmt.Sprintf("%.2f", w))
		}
	}
}

// style returns the style of a text of that size and alignment.
func style(size vg.Length, x text.XAlignment, y text.YAlignment) text.Style {
	sans := font.Font{Typeface: "Liberation", Variant: "Sans", Size: size}
	return text.Style{Color: color.Black, Font: sans, XAlign: x, YAlign: y, Handler: plot.DefaultTextHandler}
}

// upwards draws the name of an axis whose right end, seen from its beginning, is at a point.
func upwards(c draw.Canvas, at vg.Point, name string) {
	s := style(big, draw.XCenter, draw.YBottom)
	s.Rotation = math.Pi / 2
	c.FillText(s, at, name)
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
