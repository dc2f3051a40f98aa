// Package onnx is the command attn onnx.
package onnx

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/seed90331342/attn/bench/plain"
	"github.com/seed90331342/attn/cmd/attn/internal/cli"
	"github.com/seed90331342/attn/cmd/attn/internal/files"
	"github.com/seed90331342/attn/cmd/attn/internal/onnxfile"
	"github.com/seed90331342/attn/kernels"
)

// Command is attn onnx: conformance cases of the ONNX operator Attention.
type Command struct {
	cli.Device `embed:""`

	Cases []string `arg:"" name:"case-dir" help:"Folders with a model.onnx (one Attention node, opset 23 or 24) and test_data_set_* of input_N.pb and output_N.pb, as published by the ONNX project."`
}

// Run runs every case, prints a line for each, and counts the failures. A case that
// cannot be read or run is a failure: none is skipped.
func (c *Command) Run(ctx context.Context, out *cli.Streams) error {
	dev, err := c.Open()
	if err != nil {
		return err
	}
	defer dev.Close()
	passed := 0
	for _, dir := range c.Cases {
		result, err := runCase(ctx, dev, dir)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		verdict := "ok  "
		if err != nil {
			verdict, result = "FAIL", plain.Line(err.Error())
		} else {
			passed++
		}
		if _, err := fmt.Fprintf(out.Out, "%s  %s: %s\n", verdict, dir, result); err != nil {
			return err
		}
	}
	failed := len(c.Cases) - passed
	if _, err := fmt.Fprintf(out.Out, "%d passed, %d failed\n", passed, failed); err != nil {
		return err
	}
	if failed > 0 {
		return cli.ErrReported
	}
	return nil
}

// maxMessage is the most bytes that a message of protobuf has.
const maxMessage = 1<<31 - 1

// runCase runs all data sets of a folder and describes the result.
func runCase(ctx context.Context, dev *kernels.Device, dir string) (string, error) {
	data, err := files.Read(ctx, filepath.Join(dir, "model.onnx"), maxMessage)
	if err != nil {
		return "", fmt.Errorf("model.onnx: %w", err)
	}
	model, err := onnxfile.DecodeModel(data)
	if err != nil {
		return "", fmt.Errorf("model.onnx: %w", err)
	}
	op, err := attentionNode(model)
	if err != nil {
		return "", fmt.Errorf("model.onnx: %w", err)
	}
	sets, err := fs.Glob(os.DirFS(dir), "test_data_set_*")
	if err != nil {
		return "", err
	}
	if len(sets) == 0 {
		return "", errors.New("there is no test_data_set_0 in it: nothing to run")
	}
	var results []string
	for _, set := range sets {
		r, err := runDataSet(ctx, dev, model, op, filepath.Join(dir, set))
		if err != nil {
			return "", fmt.Errorf("%s: %w", set, err)
		}
		if !slices.Contains(results, r) {
			results = append(results, r)
		}
	}
	return strings.Join(results, "; "), nil
}

// runDataSet runs the graph on the inputs of a folder and compares the results with
// its outputs.
func runDataSet(ctx context.Context, dev *kernels.Device, m *onnxfile.Model, op *attentionOp, dir string) (string, error) {
	tensors := map[string]*onnxfile.Tensor{}
	for _, t := range m.Initializers {
		tensors[t.Name] = t
	}
	feeds, err := readTensors(ctx, dir, "input", m.Inputs)
	if err != nil {
		return "", err
	}
	for i, name := range m.Inputs {
		tensors[name] = feeds[i]
	}
	want, err := readTensors(ctx, dir, "output", m.Outputs)
	if err != nil {
		return "", err
	}
	call, err := op.call(tensors)
	if err != nil {
		return "", err
	}
	got, err := call.run(ctx, dev)
	if err != nil {
		return "", err
	}
	if len(want) == 0 {
		return "", errors.New("the graph has no outputs: nothing to compare")
	}
	var shares []string
	for i, name := range m.Outputs {
		t := got[name]
		if t == nil {
			return "", fmt.Errorf("graph output %q is not an output of the Attention node", name)
		}
		off, err := compareTensors(name, t, want[i])
		if err != nil {
			return "", err
		}
		shares = append(shares, fmt.Sprintf("%s %.2g%%", name, 100*off))
	}
	return fmt.Sprintf("%s; %s of the tolerance", call.how(), strings.Join(shares, ", ")), nil
}

// readTensors reads kind_0.pb, kind_1.pb, ... in dir, one for each name.
func readTensors(ctx context.Context, dir, kind string, names []string) ([]*onnxfile.Tensor, error) {
	path := func(i int) string { return fmt.Sprintf("%s_%d.pb", kind, i) }
	tensors := make([]*onnxfile.Tensor, len(names))
	for i, name := range names {
		data, err := files.Read(ctx, filepath.Join(dir, path(i)), maxMessage)
		if err != nil {
			return nil, fmt.Errorf("%s, the graph's %s %q: %w", path(i), kind, name, err)
		}
		if tensors[i], err = onnxfile.DecodeTensor(data); err != nil {
			return nil, fmt.Errorf("%s: %w", path(i), err)
		}
	}
	extra := path(len(names))
	if _, err := os.Stat(filepath.Join(dir, extra)); err == nil {
		return nil, fmt.Errorf("%s is one too many: the graph has %d %ss", extra, len(names), kind)
	}
	return tensors, nil
}
