package bench

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/seed90331342/attn/backend"
)

// TestGPUTable makes the rows of a file as bench/gpu.sh writes it: with a measured, a
// streamed and a failed run, a benchmark, the suite, and times of PyTorch.
func TestGPUTable(t *testing.T) {
	const environment = `"environment": {"backends": [{"name": "gpu", "type": "discrete-gpu"}]}`
	const one = `{"backend": "gpu", "status": "ok", "variant": "fused", "dtype": "f32", "batch": 1, "plan": {}, "max_error": 0, "error_bound": 1e-6, "repetitions": 1, "rounds": [{"times_s": [0.02], "pace_s": [], "ceiling_gflops": 20000}], `
	const measured = one + `"heads": 16, "kv_heads": 16, "seq_q": 8192, "seq_k": 8192, "dim": 64}`
	const streamed = one + `"heads": 1, "kv_heads": 1, "seq_q": 16384, "seq_k": 262144, "dim": 64}`
	const predicted = `{"backend": "gpu", "status": "predicted", "note": "predicted: beyond the budget", "predicted_s": 9, "variant": "fused", "dtype": "f32", "batch": 1, "heads": 1, "kv_heads": 1, "seq_q": 1048576, "seq_k": 1048576, "dim": 64}`
	run := func(cases string) string { return `{"schema": 2, ` + environment + `, "cases": [` + cases + `]}` }
	results := `{"gpu_table": 1, "rows": [
{"name": "suite", "aim": "passes", "ok": true, "lines": ["PASS"]},
{"name": "other suite", "aim": "passes", "ok": false, "lines": ["FAIL | x"]},
{"name": "f32, H=16", "aim": "50%", "against": "", "flags": "--heads 16", "ok": true, "report": ` + run(measured) + `},
{"name": "resident", "aim": "", "against": "", "flags": "--seq 256k", "ok": true, "report": ` + run(strings.Replace(streamed, "0.02", "0.015", 1)) + `},
{"name": "streamed", "aim": "70%", "against": "resident", "flags": "--device-memory 256M", "ok": true, "report": ` + run(streamed) + `},
{"name": "long", "aim": "completes", "against": "", "flags": "--seq 1M", "ok": true, "report": ` + run(predicted) + `},
{"name": "nothing", "aim": "", "against": "", "flags": "--seq 1", "ok": false, "report": null},
{"name": "S=64", "aim": "50 µs", "ok": true, "lines": ["BenchmarkCallOverhead 100 90210 ns/op 12.5 us-empty 41.2 us-over-empty"]}
], "peers": [
{"dtype": "f32", "heads": 16, "seq": 8192, "dim": 64, "causal": false, "route": "math", "seconds": 0.05},
{"dtype": "f32", "heads": 16, "seq": 8192, "dim": 64, "causal": false, "route": "efficient", "seconds": 0.025}]}`
	file := filepath.Join(t.TempDir(), "results.json")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(results)
	var out strings.Builder
	if err := gpuTable(t.Context(), file, &out); err != nil {
		t.Fatal(err)
	}
	for _, row := range []string{
		"| suite | passes | passed |  |",
		"| other suite | passes | failed: FAIL / x |  |",
		"| f32, H=16 | 50% | 13744 GFLOP/s, 69% | `--heads 16` |",
		"| streamed | 70% | 54976 GFLOP/s, 275%, 75% of the speed of resident | `--device-memory 256M` |",
		"| long | completes | predicted: beyond the budget | `--seq 1M` |",
		"| nothing |  | failed | `--seq 1` |",
		"| S=64 | 50 µs | 41.2 µs |  |",
		"| f32 against PyTorch's better of math and efficient | 1.0x | D=64: 1.25x | |",
	} {
		if !strings.Contains(out.String(), row+"\n") {
			t.Errorf("no row %s in\n%s", row, out.String())
		}
	}
	for _, wrong := range []string{"{", "{}", `{"gpu_table": 2}`} {
		if write(wrong); !errors.Is(gpuTable(t.Context(), file, &out), backend.ErrOption) {
			t.Errorf("%s: no ErrOption", wrong)
		}
	}
}
