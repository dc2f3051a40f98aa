//go:build !unix

package npy

import (
	"errors"
	"os"

	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/internal/op"
)

// Map is not available: files are read into memory.
func (h *Header) Map(*os.File) ([]byte, func(), error) {
	return nil, nil, op.As(kernels.ErrUnsupported, errors.ErrUnsupported)
}
