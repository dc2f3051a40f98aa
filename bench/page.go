package bench

import (
	"bytes"
	_ "embed"
	"fmt"
	"html/template"
	"io"
	"math"
	"strconv"
	"strings"

	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"

	"github.com/seed90331342/attn/bench/page"
)

//go:embed page.html
var pageBody string

var pageTemplate = template.Must(template.New("report").Parse(pageBody))

// Measures of a picture on a page, which stands beside others and is enlarged to
// the room there is.
const (
	pagePictureWidth  = vg.Length(400)
	pagePictureHeight = vg.Length(250)
	pagePictureMargin = vg.Length(2)
	// hitRadius is how near to a figure the pointer must come, in points.
	hitRadius = 8
)

// pageData is what the template shows.
type pageData struct {
	Subtitle, Measured string
	Problems           []string
	Drawings           []pageDrawing
	Tables             []pageTable
	Environment        [][2]string
	Repeat, RepeatNote string
	Legend             [][2]string
}

// pageDrawing is a picture with its words.
type pageDrawing struct {
	Title, About string
	Drawing      template.HTML
}

// WritePageFile writes the report as a page, a file that appears complete or not at
// all.
func (r *Report) WritePageFile(path string) error {
	var b bytes.Buffer
	if err := r.WritePage(&b); err != nil {
		return err
	}
	return writeFile(path, b.Bytes())
}

// WritePage writes the report as a page that needs nothing else: pictures in which
// the pointer finds figures, tables that sort, the environment, how to repeat it.
// Without scripts all of that is there but for zoom and sorting.
func (r *Report) WritePage(w io.Writer) error {
	e := &r.Environment
	data := pageData{
		Subtitle:    strings.Join(notEmpty(e.CPU, count(e.CPUs, "CPU"), e.OS+"/"+e.Arch, e.GoVersion, e.revision(), e.Date), " · "),
		Environment: e.table(),
		RepeatNote:  "The figures depend on the machine and on what else it does; inputs and checked rows are drawn by the seed.",
		Legend:      figureLegend,
	}
	data.Measured, data.Problems = r.outcome()
	if len(e.Args) > 0 {
		data.Repeat = commandLine(e.Variables, e.Args)
	} else {
		data.Repeat = "(the command is not in the report)"
	}
	for _, c := range r.charts() {
		drawing, err := c.onPage()
		if err != nil {
			return fmt.Errorf("page: %s: %w", c.name, err)
		}
		data.Drawings = append(data.Drawings, pageDrawing{c.title, c.about, drawing})
	}
	data.Tables = r.pageTables()
	var body strings.Builder
	if err := pageTemplate.Execute(&body, data); err != nil {
		return fmt.Errorf("page: %w", err)
	}
	return page.Write(w, page.Page{Title: "attn bench", Body: template.HTML(body.String())})
}

// onPage draws the chart with a spot on each figure that the pointer finds.
func (c *chart) onPage() (template.HTML, error) {
	p := c.layout(pagePictureWidth, pagePictureHeight, pagePictureMargin, "", "")
	canvas := vgsvg.New(p.width, p.height)
	dc := draw.New(canvas)
	p.draw(dc)
	var svg strings.Builder
	if _, err := canvas.WriteTo(&svg); err != nil {
		return "", err
	}
	var spots strings.Builder
	for i := range c.lines {
		l := &c.lines[i]
		for j, at := range p.places(dc, l) {
			if about := l.points[j].about; about != "" {
				text := template.HTMLEscapeString(about)
				fmt.Fprintf(&spots, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"%d\" data-tip=\"%s\"><title>%s</title></circle>\n",
					float64(at.X), float64(at.Y), hitRadius, text, text)
			}
		}
	}
	colours := map[string]string{"#000000": "--ink"}
	colours[hex(grid)] = "--rule"
	colours[hex(soft)] = "--soft"
	for i, colour := range palette {
		colours[hex(colour)] = fmt.Sprintf("--c%d", i+1)
	}
	return page.Drawing(svg.String(), c.title, colours, template.HTML(spots.String()))
}

// outcome says what became of the cases, and what went wrong.
func (r *Report) outcome() (measured string, problems []string) {
	n := map[Status]int{}
	for i := range r.Cases {
		m := &r.Cases[i]
		n[m.Status]++
		if m.Status == Wrong || m.Status == Failed {
			problems = append(problems, fmt.Sprintf("%s at S = %d: %s", m.who(), m.SeqK, m.Note))
		}
	}
	if r.Interrupted {
		problems = append(problems, "The run was interrupted: this is what was measured until then.")
	}
	if len(r.Cases) == 0 {
		return fmt.Sprintf("The ceilings of %s.", count(len(r.Ceilings), "contender")), problems
	}
	parts := []string{fmt.Sprintf("%d of %s measured", n[OK], count(len(r.Cases), "case"))}
	for _, s := range []Status{Wrong, Failed, Predicted, NotRun} {
		if n[s] > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", n[s], s))
		}
	}
	measured = strings.Join(parts, ", ") + "."
	if n[OK] > 0 {
		measured += fmt.Sprintf(" Each result was compared with float64 on %s.", count(r.Environment.CheckedRows, "row"))
	}
	return measured, problems
}

// revision names what was measured.
func (e *Environment) revision() string {
	if e.Commit == "" {
		return e.Version
	}
	text := fmt.Sprintf("%.10s", e.Commit)
	if e.Modified {
		text += " and changes"
	}
	return text
}

// table lists the environment.
func (e *Environment) table() [][2]string {
	rows := [][2]string{
		{"date", e.Date}, {"CPU", fmt.Sprintf("%s, %s, %s for Go", e.CPU, count(e.CPUs, "CPU"), count(e.Threads, "thread"))},
	}
	add := func(name, value string) {
		if value != "" {
			rows = append(rows, [2]string{name, value})
		}
	}
	if e.MemoryBytes > 0 {
		add("memory", size(float64(e.MemoryBytes)))
	}
	for _, b := range e.Backends {
		parts := notEmpty(b.Device, string(b.Type), b.Provider, b.Driver)
		if b.Threads > 0 {
			parts = append(parts, count(b.Threads, "thread"))
		}
		add("backend "+b.Name, strings.Join(parts, " · "))
		var limits []string
		for _, l := range b.Limits {
			value := strconv.FormatInt(l.Value, 10)
			if l.Value >= 1<<20 { // so much is bytes: there are no more workgroups or bindings than 65535
				value = size(float64(l.Value))
			}
			limits = append(limits, l.Name+" "+value)
		}
		add("limits of "+b.Name, strings.Join(limits, " · "))
	}
	for _, m := range e.Missing {
		add("missing", m)
	}
	add("system", e.OS+"/"+e.Arch)
	cgo := "without cgo"
	if e.CGO {
		cgo = "with cgo"
	}
	add("Go", e.GoVersion+", "+cgo)
	add("version", e.Version)
	if e.Commit != "" {
		add("commit", e.revision())
	}
	add("variables", strings.Join(e.Variables, " "))
	add("seed", strconv.FormatUint(e.Seed, 10))
	if e.BudgetS > 0 {
		add("budget", duration(e.BudgetS))
	}
	return rows
}

// commandLine writes a command as a shell reads it.
func commandLine(variables, args []string) string {
	var words []string
	for _, v := range variables {
		name, value, _ := strings.Cut(v, "=")
		words = append(words, name+"="+quoted(value))
	}
	words = append(words, "attn")
	for _, a := range args {
		words = append(words, quoted(a))
	}
	return strings.Join(words, " ")
}

// quoted quotes a word that a shell would not take as it is.
func quoted(word string) string {
	plain := func(c rune) bool {
		return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || strings.ContainsRune("-_=.,:/+@%", c)
	}
	if word != "" && strings.IndexFunc(word, func(c rune) bool { return !plain(c) }) < 0 {
		return word
	}
	return "'" + strings.ReplaceAll(word, "'", `'\''`) + "'"
}

// notEmpty leaves out empty texts.
func notEmpty(texts ...string) []string {
	var out []string
	for _, t := range texts {
		if t != "" {
			out = append(out, t)
		}
	}
	return out
}

// sortKey writes a figure so that scripts read it; "" for none.
func sortKey(x *float64) string {
	if x == nil || math.IsNaN(*x) {
		return ""
	}
	return strconv.FormatFloat(*x, 'g', -1, 64)
}
