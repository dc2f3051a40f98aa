package onnx

import (
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/seed90331342/attn/backend/backendtest/must"
	"github.com/seed90331342/attn/cmd/attn-onnx/internal/onnxfile"
)

var callsFile = flag.String("calls", "", "write calls for bench/peers/record.mjs to this file")

// jsonc returns the call as a test of a file.
func (c *onnxFiles) jsonc() string {
	p := jsoncProblem{in: arraysOf(c.in), out: arraysOf(c.want)}
	for _, name := range slices.Sorted(maps.Keys(c.ints)) {
		p.set("int", name, c.ints[name])
	}
	for _, name := range slices.Sorted(maps.Keys(c.floats)) {
		p.set("float", name, c.floats[name])
	}
	for _, name := range slices.Sorted(maps.Keys(c.texts)) {
		p.set("string", name, c.texts[name])
	}
	_, operator := c.name()
	return p.text(operator)
}

func arraysOf(tensors []*onnxfile.Tensor) []*array {
	all := make([]*array, len(tensors))
	for i, t := range tensors {
		if t == nil {
			continue
		}
		all[i] = &array{Dims: t.Shape, Data: []float64{}}
		for name, kind := range jsoncTypes {
			if kind == t.Type {
				all[i].Type = name
			}
		}
		for n := range t.Elements() {
			if t.Type.Float() {
				all[i].Data = append(all[i].Data, t.At(n))
			} else {
				all[i].Data = append(all[i].Data, float64(t.Int(n)))
			}
		}
	}
	return all
}

// calls returns small calls for the CPU provider of ONNX Runtime. record.mjs leaves out those that it refuses.
func calls() (tests []json.RawMessage) {
	add := func(n int, name string, draw func(seed uint64) string) {
		for seed := uint64(0); n > 0; seed++ {
			text := draw(seed)
			if text == "" || len(text) > 9500 || strings.Contains(text, "qk_norm") || strings.Contains(text, "quant") && n%3 > 0 {
				continue
			}
			n--
			tests = append(tests, json.RawMessage(strings.Replace(text, `"name":"drawn"`, fmt.Sprintf(`"name":"%s %d"`, name, seed), 1)))
		}
	}
	float := func(c *onnxFiles) string {
		if c.ints["state_window"] > 0 || c.in[0].Type != onnxfile.Float {
			return ""
		}
		return c.jsonc()
	}
	add(24, "group", func(seed uint64) string { return drawGroupQuery(seed, true) })
	add(10, "window", func(seed uint64) string { return drawWindowCache(seed, true) })
	add(4, "linear", func(seed uint64) string { return float(&drawLinear(seed, true).onnxFiles) })
	add(6, "conv", func(seed uint64) string { return float(drawConv(seed, true)) })
	return tests
}

// TestRecorded runs calls with the outputs that ONNX Runtime computed, on every instruction set of the CPU and on the GPU.
func TestRecorded(t *testing.T) {
	if *callsFile != "" {
		must.Do(t, os.WriteFile(*callsFile, must.Get(json.Marshal(calls()))(t), 0o644))
		return
	}
	everywhere(t, func(t *testing.T, backend string) {
		for name, n := range map[string]int{"cpu": 40, "paged": 9} {
			if backend == "cpu" || name != "cpu" || !testing.Short() {
				wantJSONC(t, backend, n, filepath.Join("../../testdata/onnxruntime-recorded", name+".jsonc"))
			}
		}
	})
}
