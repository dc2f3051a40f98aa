package onnx

import (
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/seed90331342/attn/cmd/attn-onnx/internal/onnxfile"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

var (
	callsFile = flag.String("calls", "", "write calls for bench/peers/record.mjs to this file")
	provider  = flag.String("provider", "cpu", "the provider of -calls: cpu or webgpu")
)

// jsonc returns the call as a test of a file.
func (c *onnxFiles) jsonc(name string) json.RawMessage {
	attributes := []any{}
	add := func(kind, name string, x any) {
		attributes = append(attributes, map[string]any{"name": name, "type": kind, "data": x})
	}
	for _, name := range slices.Sorted(maps.Keys(c.ints)) {
		add("int", name, c.ints[name])
	}
	for _, name := range slices.Sorted(maps.Keys(c.floats)) {
		add("float", name, c.floats[name])
	}
	for _, name := range slices.Sorted(maps.Keys(c.texts)) {
		add("string", name, c.texts[name])
	}
	domain, operator := c.name()
	test, err := json.Marshal(map[string]any{
		"name": name, "operator": operator, "opset": map[string]any{"domain": domain, "version": c.opset},
		"attributes": attributes, "cases": []any{map[string]any{"name": "T[0]", "inputs": arraysOf(c.in), "outputs": arraysOf(c.want)}},
	})
	if err != nil {
		panic(err)
	}
	return test
}

func arraysOf(tensors []*onnxfile.Tensor) []any {
	all := make([]any, len(tensors))
	for i, t := range tensors {
		if t == nil {
			all[i] = map[string]any{"data": nil, "type": "float32"}
			continue
		}
		kind, data := "", make([]float64, t.Elements())
		for name, d := range jsoncTypes {
			if d == t.Type {
				kind = name
			}
		}
		for n := range data {
			if t.Type.Float() {
				data[n] = t.At(n)
			} else {
				data[n] = float64(t.Int(n))
			}
		}
		all[i] = map[string]any{"type": kind, "dims": t.Shape, "data": data}
	}
	return all
}

// calls returns small calls for a provider of ONNX Runtime: the CPU's, or that for WebGPU, which alone of both has norms, and
// does not read softcap and position_ids. record.mjs leaves out those that it refuses.
func calls(provider string) (tests []json.RawMessage) {
	add := func(n, size int, name string, draw func(seed uint64, runtime bool) *onnxFiles, skip func(c *onnxFiles, n int) bool) {
		for seed := uint64(0); n > 0; seed++ {
			c := draw(seed, true)
			if text := c.jsonc(fmt.Sprint(name, " ", seed)); len(text) <= size && !skip(c, n) {
				n--
				tests = append(tests, text)
			}
		}
	}
	if provider == "webgpu" {
		add(5, 16000, "norm", drawGroupQuery, func(c *onnxFiles, _ int) bool {
			_, causal := c.ints["causal"]
			return c.in[gqQueryNorm] == nil || c.in[gqKey] == nil || c.ints["do_rotary"] == 0 || c.in[gqPositions] != nil || c.floats["softcap"] > 0 || c.ints["qk_output"] > 0 || causal
		})
		return tests
	}
	skip := func(c *onnxFiles, n int) bool {
		return c.ints["state_window"] > 0 || c.in[0].Type != onnxfile.Float || c.floats["qk_norm_epsilon"] > 0 || c.texts["k_quant_type"] != "" && n%3 > 0
	}
	add(24, 9500, "group", drawGroupQuery, skip)
	add(10, 9500, "window", drawWindowCache, skip)
	add(4, 9500, "linear", drawLinear, skip)
	add(6, 9500, "conv", drawConv, skip)
	return tests
}

// TestRecorded runs calls with the outputs that ONNX Runtime computed, on every instruction set of the CPU and on the GPU.
func TestRecorded(t *testing.T) {
	if *callsFile != "" {
		must.Do(t, os.WriteFile(*callsFile, must.Get(json.Marshal(calls(*provider)))(t), 0o644))
		return
	}
	everywhere(t, func(t *testing.T, backend string) {
		for name, n := range map[string]int{"cpu": 41, "paged": 9, "webgpu": 5} {
			if backend == "cpu" || name != "cpu" || !testing.Short() {
				wantJSONC(t, backend, n, filepath.Join("../../testdata/onnxruntime-recorded", name+".jsonc"))
			}
		}
	})
}
