package run

import (
	"context"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cmd/internal/cli"
	"github.com/seed90331342/attn/cmd/internal/cli/clitest"
	"github.com/seed90331342/attn/kernels"
)

var program = cli.Program{Name: "attn", Grammar: func() any {
	return &struct {
		Run Command `cmd:""`
	}{}
}}

var attn, mustRun, mustFail = clitest.Named(program)

// hooks is a family of backends: the CPU, with hooks around fused calls.
type hooks struct {
	before func(ctx context.Context, c *backend.Call) error
	after  func(c *backend.Call)
}

// Devices implements backend.Driver.
func (hooks) Devices() ([]backend.Info, error) { return nil, kernels.ErrNoDevice }

// Open implements backend.Driver.
func (d hooks) Open(string) (backend.Backend, error) {
	be, err := backend.Open("cpu")
	return hooked{be, d}, err
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
