package bench

import (
	"bytes"
	"encoding/csv"
	"fmt"
	"strconv"
	"strings"

	"github.com/seed90331342/attn/backend"
)

// csvField is a column of a CSV file with a value of it.
type csvField struct {
	name  string
	value any
}

// csvCase returns the fields of a case by their names in JSON.
func csvCase(m *Measurement) []csvField {
	return []csvField{
		{"backend", m.Backend},
		{"contender", m.Contender},
		{"series", m.Series},
		{"name", m.Name},
		{"variant", m.Variant},
		{"dtype", m.DType},
		{"batch", m.Batch},
		{"heads", m.Heads},
		{"kv_heads", m.KVHeads},
		{"seq_q", m.SeqQ},
		{"seq_k", m.SeqK},
		{"dim", m.Dim},
		{"causal", m.Causal},
		{"window_left", m.WindowLeft},
		{"window_right", m.WindowRight},
		{"softcap", m.Softcap},
		{"mask", m.Mask},
		{"threads", m.Threads},
		{"status", string(m.Status)},
		{"note", m.Note},
		{"path", m.Path},
		{"repetitions", m.Repetitions},
		{"predicted_s", m.PredictedS},
		{"median_s", m.MedianS},
		{"low_s", m.LowS},
		{"high_s", m.HighS},
		{"confidence", m.Confidence},
		{"min_s", m.MinS},
		{"q1_s", m.Q1S},
		{"q3_s", m.Q3S},
		{"others_percent", m.OthersPercent},
		{"kernel_s", m.KernelS},
		{"compile_s", m.CompileS},
		{"move_s", m.MoveS},
		{"moved_bytes", m.MovedBytes},
		{"pairs", m.Pairs},
		{"flops", m.FLOPs},
		{"flops_full", m.FLOPsFull},
		{"gflops", m.GFLOPS},
		{"gflops_full", m.GFLOPSFull},
		{"ceiling_gflops", m.CeilingGFLOPS},
		{"percent", m.Percent},
		{"bytes", m.Bytes},
		{"gbs", m.GBS},
		{"ceiling_gbs", m.CeilingGBS},
		{"intensity", m.Intensity},
		{"roof_gflops", m.RoofGFLOPS},
		{"launch_s", m.LaunchS},
		{"bound", string(m.Bound)},
		{"percent_of_bound", m.PercentOfBound},
		{"stages_s", m.StagesS},
		{"max_error", m.MaxError},
		{"error_bound", m.ErrorBound},
		{"allocs", m.Allocs},
		{"memory_operands", m.Memory.Operands},
		{"memory_scratch", m.Memory.Scratch},
		{"memory_square", m.Memory.Square},
		{"memory_host_peak", m.Memory.HostPeak},
		{"memory_device", m.Memory.Device},
		{"memory_device_peak", m.Memory.DevicePeak},
	}
}

// csvEnvironment returns what a case was measured on, the same for all of a backend.
func csvEnvironment(e *Environment, info *backend.Info) []csvField {
	return []csvField{
		{"date", e.Date},
		{"cpu", e.CPU},
		{"cpus", e.CPUs},
		{"os", e.OS + "/" + e.Arch},
		{"go_version", e.GoVersion},
		{"version", e.Version},
		{"commit", e.Commit},
		{"seed", e.Seed},
		{"device", info.Device},
		{"provider", info.Provider},
		{"driver", info.Driver},
		{"limits", limitsText(info.Limits)},
	}
}

// limitsText writes limits as "name=value name=value".
func limitsText(limits []backend.Limit) string {
	var words []string
	for _, l := range limits {
		words = append(words, fmt.Sprintf("%s=%d", l.Name, l.Value))
	}
	return strings.Join(words, " ")
}

// text writes a value: null is empty, numbers are exact.
func (f csvField) text() string {
	switch x := f.value.(type) {
	case *float64:
		if x != nil {
			return strconv.FormatFloat(*x, 'g', -1, 64)
		}
	case *int64:
		if x != nil {
			return strconv.FormatInt(*x, 10)
		}
	case *int:
		if x != nil {
			return strconv.Itoa(*x)
		}
	case float64:
		return strconv.FormatFloat(x, 'g', -1, 64)
	default:
		return fmt.Sprint(x)
	}
	return ""
}

// WriteCSVFile writes the figures of the cases as CSV (RFC 4180): a line of names, then
// a line a case, with what it was measured on in the last columns. A figure that was
// not measured is empty. The file appears complete or not at all.
func (r *Report) WriteCSVFile(path string) error {
	var b bytes.Buffer
	w := csv.NewWriter(&b)
	line := func(fields []csvField, of func(f csvField) string) {
		words := make([]string, len(fields))
		for i, f := range fields {
			words[i] = of(f)
		}
		w.Write(words) // into a Buffer, which takes everything
	}
	line(append(csvCase(&Measurement{}), csvEnvironment(&Environment{}, &backend.Info{})...), func(f csvField) string { return f.name })
	for i := range r.Cases {
		m := &r.Cases[i]
		info := backend.Info{Provider: m.Provider}
		for _, b := range r.Environment.Backends {
			if m.on(b) {
				info = b
			}
		}
		line(append(csvCase(m), csvEnvironment(&r.Environment, &info)...), csvField.text)
	}
	w.Flush()
	return writeFile(path, b.Bytes())
}
