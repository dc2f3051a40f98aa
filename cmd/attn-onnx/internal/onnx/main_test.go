package onnx

import (
	"github.com/seed90331342/attn/cmd/internal/cli"
	"github.com/seed90331342/attn/cmd/internal/cli/clitest"
)

var attn, _, mustFail = clitest.Named(cli.Program{Name: "attn-onnx", Grammar: func() any { return &Command{} }})
