package run

import (
	"context"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cmd/internal/cli"
	"github.com/seed90331342/attn/cmd/internal/cli/clitest"
)

var program = cli.Program{Name: "attn", Grammar: func() any {
	return &struct {
		Run Command `cmd:""`
	}{}
}}

var attn, mustRun, mustFail = clitest.Named(program)

// hooks are called around fused calls.
type hooks struct {
	before func(ctx context.Context, c *backend.Call) error
	after  func(c *backend.Call)
}

// register registers the CPU with the hooks as the family hooked.
func (h hooks) register() {
	backend.Register("hooked", clitest.OnCPU(func(be backend.Backend) backend.Backend { return hooked{be, h} }))
}

type hooked struct {
	backend.Backend
	hooks
}

// Attention implements backend.Backend.
func (h hooked) Attention(ctx context.Context, calls ...*backend.Call) error {
	for _, c := range calls {
		if h.before != nil {
			if err := h.before(ctx, c); err != nil {
				return err
			}
		}
	}
	err := h.Backend.Attention(ctx, calls...)
	for _, c := range calls {
		if h.after != nil {
			h.after(c)
		}
	}
	return err
}
