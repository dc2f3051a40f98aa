package run

import (
	"github.com/seed90331342/attn/cmd/internal/cli"
	"github.com/seed90331342/attn/cmd/internal/cli/clitest"
)

var program = cli.Program{Name: "attn", Grammar: func() any {
	return &struct {
		Run Command `cmd:""`
	}{}
}}

var attn, mustRun, mustFail = clitest.Named(program)
