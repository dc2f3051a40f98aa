package main

import (
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
	//go:embed heatmap.html
	heatMapBody string
	//go:embed heatmap.js
	heatMapScript string
)

var heatMapTemplate = template.Must(template.New("heatmap").Parse(heatMapBody))

// largestListed is how many weights the page lists.
const largestListed = 20

// listedWeight is a row of the page's list.
type listedWeight struct {
	Panel, Query, Key string
	Weight            string
	Value             float32
}

// pageData is what the page's script reads: the values under the pointer, row by
// row, panel after panel, as little-endian float32 in base64.
type pageData struct {
	Rows   int          `json:"rows"`
	Cols   int          `json:"cols"`
	Names  []string     `json:"names"`
	Query  []string     `json:"query"`
	Key    []string     `json:"key"`
	Data   [][4]float64 `json:"data"` // of each panel x, y, width, height in the drawing, y down
	Values string       `json:"values"`
}

// writePage writes the picture as a page; facts are said below it.
func (h *heatMaps) writePage(w io.Writer, facts [][2]string) error {
	d, err := h.layout(false)
	if err != nil {
		return err
	}
	var svg strings.Builder
	if err := d.writeSVG(&svg, false); err != nil {
		return err
	}
	drawing, err := page.Drawing(svg.String(), "heat map of attention weights: "+h.title, map[string]string{"#000000": "--ink"}, "")
	if err != nil {
		return err
	}
	data := pageData{Rows: h.weights.rows, Cols: h.weights.cols, Names: h.names}
	if h.weights.batch == 1 {
		data.Names = []string{""}
	}
	for i := range h.weights.rows {
		data.Query = append(data.Query, h.query.tokens(i))
	}
	for j := range h.weights.cols {
		data.Key = append(data.Key, h.key.tokens(j))
	}
	for _, r := range d.data {
		data.Data = append(data.Data, [4]float64{float64(r.Min.X), float64(d.height - r.Max.Y), float64(r.Size().X), float64(r.Size().Y)})
	}
	raw := make([]byte, 0, 4*len(h.weights.data))
	for _, x := range h.weights.data {
		raw = binary.LittleEndian.AppendUint32(raw, math.Float32bits(x))
	}
	data.Values = base64.StdEncoding.EncodeToString(raw)
	var body strings.Builder
	err = heatMapTemplate.Execute(&body, struct {
		Drawing template.HTML
		Listed  []listedWeight
		Panels  bool
		Log     bool
		Facts   [][2]string
		Data    pageData
	}{drawing, h.largest(data), h.weights.batch > 1, h.log, facts, data})
	if err != nil {
		return err
	}
	return page.Write(w, page.Page{Title: h.title, Body: template.HTML(body.String()), Script: template.JS(heatMapScript)})
}

// tokens names the tokens that row or column i joins.
func (a axis) tokens(i int) string {
	lo := a.first + i*a.step
	name := strconv.Itoa(lo)
	if hi := min(lo+a.step, a.end) - 1; hi > lo {
		name = fmt.Sprintf("%d to %d", lo, hi)
	}
	if a.labels != nil {
		name += fmt.Sprintf(" (%s)", a.labels[i])
	}
	return name
}

// largest lists the largest weights, or cells.
func (h *heatMaps) largest(data pageData) []listedWeight {
	// The list of all indices would take more than the weights: those that come
	// into question are kept in order as they are found.
	var top []int
	values := h.weights.data
	for i, w := range values {
		if !(w > 0) || len(top) == largestListed && w <= values[top[len(top)-1]] {
			continue
		}
		at, _ := slices.BinarySearchFunc(top, w, func(j int, w float32) int {
			if values[j] >= w {
				return -1
			}
			return 1
		})
		top = slices.Insert(top, at, i)
		top = top[:min(len(top), largestListed)]
	}
	var listed []listedWeight
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
