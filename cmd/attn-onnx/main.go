// Command attn-onnx runs test cases that others publish for operators of attention: folders of the
// ONNX project, and with --jsonc files of ONNX Runtime:
//
//	attn-onnx cmd/attn-onnx/testdata/onnx/test_*
//	attn-onnx --jsonc cmd/attn-onnx/testdata/onnxruntime/*.jsonc
//
// It prints a line a case and exits with 1 when one failed.
package main

import (
	"os"

	"github.com/seed90331342/attn/cmd/attn-onnx/internal/onnx"
	"github.com/seed90331342/attn/cmd/internal/cli"

	// Register the backends.
	_ "github.com/seed90331342/attn/cpu"
	_ "github.com/seed90331342/attn/gpu"
)

func main() { program.Main(os.Args[1:]) }

var program = cli.Program{
	Name:    "attn-onnx",
	Help:    "Run conformance cases of operators of attention, of ONNX and ONNX Runtime.",
	Grammar: func() any { return &onnx.Command{} },
}
