package explain

import (
	"github.com/seed90331342/attn/cmd/internal/cli"
	"github.com/seed90331342/attn/cmd/internal/cli/clitest"
)

var attn, mustRun, _ = clitest.Named(cli.Program{Name: "attn", Grammar: func() any {
	return &struct {
		Explain Command `cmd:""`
	}{}
}})
