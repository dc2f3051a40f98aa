package heatmap

import "github.com/seed90331342/attn/cmd/internal/cli/clitest"

var _, mustRun, mustFail = clitest.Program(func() any {
	return &struct {
		HeatMap Command `cmd:"" name:"heatmap"`
	}{}
})
