package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/bench/report"
	"github.com/seed90331342/attn/cmd/internal/files"
)

// gpuResults is what bench/gpu.sh writes: the rows of the table in docs/gpu.md, and the
// times of PyTorch's attention.
type gpuResults struct {
	Version int      `json:"gpu_table"` // 1
	Rows    []gpuRow `json:"rows"`
	Peers   []struct {
		DType   string  `json:"dtype"`
		Heads   int     `json:"heads"`
		Seq     int     `json:"seq"`
		Dim     int     `json:"dim"`
		Causal  bool    `json:"causal"`
		Route   string  `json:"route"`
		Seconds float64 `json:"seconds"`
	} `json:"peers"`
}

// gpuRow is a run of attn bench, with its report, or of another program, with the lines of
// its output.
type gpuRow struct {
	Name    string          `json:"name"`
	Aim     string          `json:"aim"`
	Against string          `json:"against"` // the name of the row that it is compared with
	Flags   string          `json:"flags"`
	OK      bool            `json:"ok"`
	Text    json.RawMessage `json:"report"`
	Lines   []string        `json:"lines"`
	report  *report.Report
}

// gpuTable writes the rows of the table in docs/gpu.md.
func gpuTable(ctx context.Context, path string, out io.Writer) error {
	data, err := files.Read(ctx, path, files.MaxText)
	if err != nil {
		return fmt.Errorf("--gpu-table: %w", err)
	}
	var r gpuResults
	if err := json.Unmarshal(data, &r); err != nil {
		return fmt.Errorf("--gpu-table: %s is not a file of results of bench/gpu.sh: %v: %w", path, err, backend.ErrOption)
	}
	if r.Version != 1 {
		return fmt.Errorf("--gpu-table: %s has version %d of the results of bench/gpu.sh, it must be 1: %w", path, r.Version, backend.ErrOption)
	}
	for i := range r.Rows {
		row := &r.Rows[i]
		if len(row.Text) == 0 || string(row.Text) == "null" {
			continue
		}
		if row.report, err = report.Read(bytes.NewReader(row.Text)); err != nil {
			return fmt.Errorf("--gpu-table: %s: the report of %q: %w", path, row.Name, err)
		}
	}
	var b strings.Builder
	b.WriteString("| case | aim | measured | command: `attn bench --backend gpu` and |\n| --- | --- | --- | --- |\n")
	for _, row := range r.Rows {
		command := ""
		if row.Flags != "" {
			command = "`" + row.Flags + "`"
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s |\n", row.Name, row.Aim, cell(r.measured(&row)), command)
	}
	fmt.Fprintf(&b, "| f32 against PyTorch's better of math and efficient | 1.0x | %s | |\n", cell(r.againstPeers()))
	_, err = io.WriteString(out, b.String())
	return err
}

// cell returns the text of a cell, in which a bar would end it.
func cell(texts []string) string {
	if len(texts) == 0 {
		return "not measured"
	}
	return strings.ReplaceAll(strings.Join(texts, "; "), "|", "/")
}

// measured returns the figures of a row, one text for each case.
func (r *gpuResults) measured(row *gpuRow) (texts []string) {
	if row.report == nil {
		for _, l := range row.Lines {
			if overhead, ok := metric(l, "us-over-empty"); ok {
				return []string{overhead + " µs"}
			}
			if strings.HasPrefix(l, "Benchmark") {
				texts = append(texts, l)
			}
		}
		switch {
		case !row.OK && len(row.Lines) == 0:
			return []string{"failed"}
		case !row.OK:
			return []string{"failed: " + row.Lines[len(row.Lines)-1]}
		case len(texts) == 0:
			return []string{"passed"}
		}
		return texts
	}
	for _, c := range row.report.Ceilings {
		for _, f := range []struct {
			value *float64
			text  string
		}{{c.GFLOPS, "%.0f GFLOP/s"}, {c.MemoryGBS, "%.0f GB/s read"}, {launch(c.LaunchS), "%.0f µs launch"}} {
			if f.value != nil {
				texts = append(texts, fmt.Sprintf(f.text, *f.value))
			}
		}
		for _, o := range c.Others {
			texts = append(texts, fmt.Sprintf("%.0f GB/s %s", o.GBS, o.Name))
		}
	}
	for i := range row.report.Cases {
		m := &row.report.Cases[i]
		text := figures(m)
		if other := r.find(row.Against, m); other != nil && m.MedianS != nil {
			text += fmt.Sprintf(", %.0f%% of the speed of %s", 100**other.MedianS / *m.MedianS, row.Against)
		}
		if len(row.report.Cases) > 1 {
			text = fmt.Sprintf("D=%d: %s", m.Dim, text)
		}
		texts = append(texts, text)
	}
	return texts
}

// launch returns a time in microseconds.
func launch(s *float64) *float64 {
	if s == nil {
		return nil
	}
	us := 1e6 * *s
	return &us
}

// figures returns the rate of a case and its percent of the ceiling that binds it.
func figures(m *report.Measurement) string {
	if m.Status != report.OK || m.MedianS == nil {
		return strings.TrimSuffix(fmt.Sprintf("%s: %s", m.Status, strings.TrimPrefix(m.Note, string(m.Status)+": ")), ": ")
	}
	text := fmt.Sprintf("%.4g s", *m.MedianS)
	switch {
	case m.Bound == report.BoundRead && m.GBS != nil:
		text = fmt.Sprintf("%.0f GB/s", *m.GBS)
	case m.GFLOPS != nil:
		text = fmt.Sprintf("%.0f GFLOP/s", *m.GFLOPS)
	}
	if m.PercentOfBound != nil {
		text += fmt.Sprintf(", %.0f%%", *m.PercentOfBound)
	}
	return text
}

// find returns the case of the named row that equals m in all but the path that it took,
// nil when it was not measured.
func (r *gpuResults) find(name string, m *report.Measurement) *report.Measurement {
	for _, row := range r.Rows {
		if row.Name != name || row.report == nil {
			continue
		}
		for i := range row.report.Cases {
			if c := &row.report.Cases[i]; c.Name == m.Name && c.SeqK == m.SeqK && c.Dim == m.Dim && c.MedianS != nil {
				return c
			}
		}
	}
	return nil
}

// againstPeers returns, for each case that PyTorch also ran, the ratio of its better time
// to attn's.
func (r *gpuResults) againstPeers() (texts []string) {
	type key struct {
		seq, dim int
		causal   bool
	}
	best := map[key]float64{}
	var order []key
	for _, p := range r.Peers {
		k := key{p.Seq, p.Dim, p.Causal}
		if p.DType != "f32" || p.Heads != 16 || p.Seconds <= 0 {
			continue
		}
		if old, ok := best[k]; !ok || p.Seconds < old {
			best[k] = p.Seconds
		}
		if !slices.Contains(order, k) {
			order = append(order, k)
		}
	}
	for _, k := range order {
		for _, row := range r.Rows {
			if row.report == nil {
				continue
			}
			for _, m := range row.report.Cases {
				if m.MedianS != nil && m.DType == "f32" && m.Heads == 16 && m.SeqK == k.seq && m.SeqQ == k.seq && m.Dim == k.dim && m.Causal == k.causal {
					causal := ""
					if k.causal {
						causal = " causal"
					}
					texts = append(texts, fmt.Sprintf("D=%d%s: %.2fx", k.dim, causal, best[k] / *m.MedianS))
				}
			}
		}
	}
	return texts
}

// metric returns the value of a unit in a line of Go's benchmarks.
func metric(line, unit string) (value string, ok bool) {
	words := strings.Fields(line)
	i := slices.Index(words, unit)
	if i < 1 {
		return "", false
	}
	return words[i-1], true
}
