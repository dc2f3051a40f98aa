package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cmd/attn/internal/onnx"
)

// onnxCmd is attn onnx: conformance cases of the ONNX operator Attention.
type onnxCmd struct {
	Cases   []string `arg:"" name:"case-dir" help:"Folders with a model.onnx (one Attention node, opset 23 or 24) and test_data_set_* of input_N.pb and output_N.pb, as the ONNX project publishes them."`
	Backend string   `name:"backend" default:"auto" help:"auto, cpu, gpu, gpu:N or gpu:NAME."`
}

// errSaid ends the program with a failure that its output has told in full.
var errSaid = errors.New("failed, as was said")

// Run runs every case and prints a line for each, then how many passed. What
// cannot be read or run has failed: nothing is skipped.
func (c *onnxCmd) Run(ctx context.Context, out *streams) error {
	be, err := backend.Open(c.Backend)
	if err != nil {
		return err
	}
	defer be.Close()
	passed, failed := 0, 0
	for _, dir := range c.Cases {
		said, err := runONNXCase(ctx, be, dir)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		verdict := "ok  "
		if err != nil {
			failed++
			verdict, said = "FAIL", oneLine(err)
		} else {
			passed++
		}
		if _, err := fmt.Fprintf(out.out, "%s  %s: %s\n", verdict, dir, said); err != nil {
			return err
		}
	}
	if _, err := fmt.Fprintf(out.out, "%d passed, %d failed\n", passed, failed); err != nil {
		return err
	}
	if failed > 0 {
		return errSaid
	}
	return nil
}

// runONNXCase runs one folder: all of its data sets. It says how they compare.
func runONNXCase(ctx context.Context, be backend.Backend, dir string) (string, error) {
	data, err := os.ReadFile(filepath.Join(dir, "model.onnx"))
	if err != nil {
		return "", err
	}
	model, err := onnx.DecodeModel(data)
	if err != nil {
		return "", fmt.Errorf("model.onnx: %w", err)
	}
	op, err := attentionNode(model)
	if err != nil {
		return "", fmt.Errorf("model.onnx: %w", err)
	}
	sets, err := dataSets(dir)
	if err != nil {
		return "", err
	}
	var said []string
	for _, set := range sets {
		s, err := runDataSet(ctx, be, &model.Graph, op, filepath.Join(dir, set))
		if err != nil {
			return "", fmt.Errorf("%s: %w", set, err)
		}
		if !slices.Contains(said, s) {
			said = append(said, s)
		}
	}
	return strings.Join(said, "; "), nil
}

// dataSets lists the folders of data in a case, at least one.
func dataSets(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var sets []string
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), "test_data_set_") {
			sets = append(sets, e.Name())
		}
	}
	if len(sets) == 0 {
		return nil, errors.New("there is no test_data_set_0 in it: nothing to run")
	}
	return sets, nil
}

// runDataSet feeds the graph with one folder's inputs and compares what it gives
// with the folder's outputs.
func runDataSet(ctx context.Context, be backend.Backend, g *onnx.Graph, op *attentionOp, dir string) (string, error) {
	tensors := map[string]*onnx.Tensor{}
	for i, t := range g.Initializers {
		tensors[t.Name] = &g.Initializers[i]
	}
	feeds, err := readTensors(dir, "input", g.Inputs)
	if err != nil {
		return "", err
	}
	for i, name := range g.Inputs {
		tensors[name] = feeds[i]
	}
	want, err := readTensors(dir, "output", g.Outputs)
	if err != nil {
		return "", err
	}
	call, err := op.call(tensors)
	if err != nil {
		return "", err
	}
	got, err := call.run(ctx, be)
	if err != nil {
		return "", err
	}
	if len(want) == 0 {
		return "", errors.New("the graph has no outputs: nothing to compare")
	}
	var said []string
	for i, name := range g.Outputs {
		t := got[name]
		if t == nil {
			return "", fmt.Errorf("graph output %q is no output of the Attention node", name)
		}
		off, err := compareTensors(name, t, want[i])
		if err != nil {
			return "", err
		}
		said = append(said, fmt.Sprintf("%s %.2g%%", name, 100*off))
	}
	return fmt.Sprintf("%s; %s of the tolerance", call.how(), strings.Join(said, ", ")), nil
}

// readTensors reads kind_0.pb, kind_1.pb, ... in dir, one for each name.
func readTensors(dir, kind string, names []string) ([]*onnx.Tensor, error) {
	path := func(i int) string { return fmt.Sprintf("%s_%d.pb", kind, i) }
	tensors := make([]*onnx.Tensor, len(names))
	for i, name := range names {
		data, err := os.ReadFile(filepath.Join(dir, path(i)))
		if err != nil {
			return nil, fmt.Errorf("the graph's %s %q: %w", kind, name, err)
		}
		if tensors[i], err = onnx.DecodeTensor(data); err != nil {
			return nil, fmt.Errorf("%s: %w", path(i), err)
		}
	}
	if extra := path(len(names)); fileExists(filepath.Join(dir, extra)) {
		return nil, fmt.Errorf("%s is one too many: the graph has %d %ss", extra, len(names), kind)
	}
	return tensors, nil
}

func fileExists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
