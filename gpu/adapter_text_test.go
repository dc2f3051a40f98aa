package gpu_test

import (
	"errors"
	"regexp"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

var check = gpu.Check

// TestMissingAdapter: the error names the last adapter that exists.
func TestMissingAdapter(t *testing.T) {
	_, err := gpu.Open("99", gpu.Options{})
	if !errors.Is(err, backend.ErrNoDevice) {
		t.Fatalf("gpu:99: %v", err)
	}
	if infos, none := (gpu.Driver{}).Devices(); none == nil && len(infos) > 0 && !regexp.MustCompile(`^gpu:99: there is no such adapter, the last one is gpu:\d+: no usable device$`).MatchString(err.Error()) {
		t.Errorf("gpu:99: %v", err)
	}
}

// TestOperationOnce: an error of the GPU names the operation once, with an operand that is not in
// its memory.
func TestOperationOnce(t *testing.T) {
	be, err := gpu.Open("", gpu.Options{})
	if errors.Is(err, backend.ErrNoDevice) {
		t.Skip(err)
	}
	check(t, err)
	dev := kernels.NewDevice(be)
	defer dev.Close()
	x := must.Get(dev.FromFloat32(t.Context(), backend.F32, make([]float32, 12), backend.Shape{1, 1, 3, 4}))(t)
	defer x.Release()
	mask := must.Get(backend.NewTensor(backend.NewMemory(new(int), "another device", 9, nil, nil), backend.Bool, backend.Shape{1, 1, 3, 3}))(t)
	_, err = dev.Attention(t.Context(), x, x, x, kernels.Options{Mask: mask})
	if !errors.Is(err, backend.ErrDevice) || !regexp.MustCompile(`^attention: mask is in another device`).MatchString(err.Error()) {
		t.Errorf("a mask of another device: %v", err)
	}
}
