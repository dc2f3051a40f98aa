// Package onnx runs conformance cases of operators of attention.
package onnx

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/seed90331342/attn/bench/plain"
	"github.com/seed90331342/attn/cmd/attn-onnx/internal/onnxfile"
	"github.com/seed90331342/attn/cmd/internal/cli"
	"github.com/seed90331342/attn/cmd/internal/files"
	"github.com/seed90331342/attn/kernels"
)

// Command is the command line of attn-onnx.
type Command struct {
	cli.Device `embed:""`

	JSONC bool     `name:"jsonc" help:"The arguments are files of ONNX Runtime's operator tests (js/web/test/data/ops/*.jsonc), with an operator of ONNX Runtime."`
	Cases []string `arg:"" name:"case" help:"Folders with a model.onnx (one node: Attention of opset 23 to 25, RotaryEmbedding, TensorScatter, LinearAttention or CausalConvWithState, or ONNX Runtime's LinearAttention, CausalConvWithState, MultiHeadAttention, GroupQueryAttention or PagedAttention) and test_data_set_* of input_N.pb and output_N.pb, as published by the ONNX project; with --jsonc files."`
}

// Run runs every case, prints a line for each, and counts the failures. A case that
// cannot be read or run is a failure: none is skipped.
func (c *Command) Run(ctx context.Context, out *cli.Streams) error {
	dev, err := c.Open()
	if err != nil {
		return err
	}
	defer dev.Close()
	r := report{out: out.Out}
	for _, path := range c.Cases {
		if c.JSONC {
			err = r.runFile(ctx, dev, path)
		} else {
			result, failure := runCase(ctx, dev, path)
			err = r.line(ctx, path, result, failure)
		}
		if err != nil {
			return err
		}
	}
	if _, err := fmt.Fprintf(out.Out, "%d passed, %d failed\n", r.passed, r.failed); err != nil {
		return err
	}
	if r.failed > 0 {
		return cli.ErrReported
	}
	return nil
}

// report prints and counts the results of cases.
type report struct {
	out            io.Writer
	passed, failed int
}

// line reports a case. It returns the error that ends the command.
func (r *report) line(ctx context.Context, name, result string, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	verdict := "ok  "
	if err != nil {
		verdict, result = "FAIL", plain.Line(err.Error())
		r.failed++
	} else {
		r.passed++
	}
	_, err = fmt.Fprintf(r.out, "%s  %s: %s\n", verdict, name, result)
	return err
}

// maxMessage is the most bytes that a message of protobuf has.
const maxMessage = 1<<31 - 1

// runCase runs all data sets of a folder and describes the result.
func runCase(ctx context.Context, dev *kernels.Device, dir string) (string, error) {
	if info, err := os.Stat(dir); err == nil && info.Mode().IsRegular() {
		return "", errors.New("it is a file, not a folder: files of operator tests need --jsonc")
	}
	data, err := files.Read(ctx, filepath.Join(dir, "model.onnx"), maxMessage)
	if err != nil {
		return "", fmt.Errorf("model.onnx: %w", err)
	}
	model, err := onnxfile.DecodeModel(data)
	if err != nil {
		return "", fmt.Errorf("model.onnx: %w", err)
	}
	n, err := newNode(model)
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
		r, err := runDataSet(ctx, dev, model, n, filepath.Join(dir, set))
		if err != nil {
			return "", fmt.Errorf("%s: %w", set, err)
		}
		if !slices.Contains(results, r) {
			results = append(results, r)
		}
	}
	return strings.Join(results, "; "), nil
}

// runDataSet runs the graph on the inputs of a folder and compares the results with its outputs.
func runDataSet(ctx context.Context, dev *kernels.Device, m *onnxfile.Model, n *node, dir string) (string, error) {
	tensors, want, err := readDataSet(ctx, m, dir)
	if err != nil {
		return "", err
	}
	return n.check(ctx, dev, tensors, m.Outputs, want, exactly)
}

// readDataSet returns the initializers and the inputs of a folder, by name, and its outputs.
func readDataSet(ctx context.Context, m *onnxfile.Model, dir string) (tensors map[string]*onnxfile.Tensor, want []*onnxfile.Tensor, err error) {
	tensors = map[string]*onnxfile.Tensor{}
	for _, t := range m.Initializers {
		tensors[t.Name] = t
	}
	feeds, err := readTensors(ctx, dir, "input", m.Inputs)
	if err != nil {
		return nil, nil, err
	}
	for i, name := range m.Inputs {
		tensors[name] = feeds[i]
	}
	want, err = readTensors(ctx, dir, "output", m.Outputs)
	return tensors, want, err
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
