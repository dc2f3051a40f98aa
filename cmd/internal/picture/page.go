package picture

import (
	"cmp"
	_ "embed"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"html/template"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/seed90331342/attn/bench/page"
)

var (
	//go:embed page.html
	pageBody string
	//go:embed page.js
	pageScript string
)

var pageTemplate = template.Must(template.New("page").Parse(pageBody))

// largestListed is the number of weights in the list of the page.
const largestListed = 20

// listedWeight is a row of the page's list.
type listedWeight struct {
	Panel, Query, Key string
	Weight            string
	Value             float32
}

// pageData is the input of the page's script. Values are the weights, panel after
// panel and row by row, as little-endian float32 in base64.
type pageData struct {
	Rows   int          `json:"rows"`
	Cols   int          `json:"cols"`
	Names  []string     `json:"names"`
	Query  []string     `json:"query"`
	Key    []string     `json:"key"`
	Data   [][4]float64 `json:"data"` // x, y, width, height of each panel in the drawing, y down
	Values string       `json:"values"`
}

// WritePage writes the picture as a web page. The facts are listed below it.
func (h *HeatMap) WritePage(w io.Writer, facts [][2]string) error {
	d, err := h.layout(false)
	if err != nil {
		return err
	}
	drawing, err := d.element()
	if err != nil {
		return err
	}
	data := pageData{Rows: h.Weights.Rows, Cols: h.Weights.Cols, Names: h.Names}
	if h.Weights.Batch == 1 {
		data.Names = []string{""}
	}
	for i := range h.Weights.Rows {
		data.Query = append(data.Query, h.Query.tokens(i))
	}
	for j := range h.Weights.Cols {
		data.Key = append(data.Key, h.Key.tokens(j))
	}
	for _, r := range d.cells {
		data.Data = append(data.Data, [4]float64{float64(r.Min.X), float64(d.height - r.Max.Y), float64(r.Size().X), float64(r.Size().Y)})
	}
	raw := make([]byte, 0, 4*len(h.Weights.Data))
	for _, x := range h.Weights.Data {
		raw = binary.LittleEndian.AppendUint32(raw, math.Float32bits(x))
	}
	data.Values = base64.StdEncoding.EncodeToString(raw)
	var body strings.Builder
	err = pageTemplate.Execute(&body, struct {
		Drawing template.HTML
		Listed  []listedWeight
		Panels  bool
		Log     bool
		Facts   [][2]string
		Data    pageData
	}{drawing, h.largest(data), h.Weights.Batch > 1, h.Log, facts, data})
	if err != nil {
		return err
	}
	return page.Write(w, page.Page{Title: h.Title, Body: template.HTML(body.String()), Script: template.JS(pageScript)})
}

// element returns the drawing as a part of a page. Black, the default, is the ink of its theme there.
func (d *drawing) element() (template.HTML, error) {
	var b strings.Builder
	if err := d.writeSVG(&b, false); err != nil {
		return "", err
	}
	_, file, _ := strings.Cut(b.String(), "<svg")
	_, content, _ := strings.Cut(file, ">")
	head := fmt.Sprintf(`<svg role="img" aria-label="%s" viewBox="0 0 %.5g %.5g" style="--drawn:%.5[2]gpt" xmlns:xlink="http://www.w3.org/1999/xlink">`,
		template.HTMLEscapeString("heat map of attention weights: "+d.Title), d.width, d.height)
	return template.HTML(head + strings.TrimRight(content, "\n")), nil
}

// tokens names the tokens of row or column i.
func (a Axis) tokens(i int) string {
	lo := a.First + i*a.Step
	name := strconv.Itoa(lo)
	if hi := min(lo+a.Step, a.End) - 1; hi > lo {
		name = fmt.Sprintf("%d to %d", lo, hi)
	}
	if a.Labels != nil {
		name += fmt.Sprintf(" (%s)", a.Labels[i])
	}
	return name
}

// largest returns the largest cells in descending order.
func (h *HeatMap) largest(data pageData) (listed []listedWeight) {
	// Sorting all indices would take more memory than the weights.
	var top []int
	values := h.Weights.Data
	for i, w := range values {
		if !(w > 0) || len(top) == largestListed && w <= values[top[len(top)-1]] {
			continue
		}
		top = append(top, i)
		slices.SortStableFunc(top, func(i, j int) int { return cmp.Compare(values[j], values[i]) })
		top = top[:min(len(top), largestListed)]
	}
	for _, i := range top {
		cell := i % (data.Rows * data.Cols)
		listed = append(listed, listedWeight{
			Panel: data.Names[i/(data.Rows*data.Cols)],
			Query: data.Query[cell/data.Cols], Key: data.Key[cell%data.Cols],
			Weight: fmt.Sprintf("%#.4g", values[i]), Value: values[i],
		})
	}
	return listed
}
