package onnx

import "github.com/seed90331342/attn/cmd/attn/internal/cli/clitest"

var attn, _ = clitest.Program(func() any {
	return &struct {
		ONNX Command `cmd:"" name:"onnx"`
	}{}
})
