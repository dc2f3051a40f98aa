//go:build !js

package gpu_test

import (
	"context"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu"
	"github.com/seed90331342/attn/gpu/internal/port"
	"github.com/seed90331342/attn/kernels/kernelstest"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// TestSharedConformance runs the suite's cases in buffers of a program, on devices that it has opened without limits,
// which go-webgpu opens with WebGPU's defaults. It compares the recorded bits.
func TestSharedConformance(t *testing.T) {
	needAdapter(t)
	var device string
	var wrapped atomic.Int64
	open := func(t testing.TB) backend.Backend {
		adapter, dev, release, err := openDevice()
		check(t, err)
		t.Cleanup(release)
		b := must.Get(gpu.Open("", gpu.Options{Shared: &gpu.Shared{Adapter: adapter, Device: dev}}))(t)
		p := &programsBuffers{Backend: b, device: dev, wrapped: &wrapped}
		t.Cleanup(func() { _ = p.Close() })
		device = b.Info().Device
		return p
	}
	_ = open(t).Close()
	every := 1
	if testing.Short() { // a device compiles its kernels anew
		every = 5
	}
	name := strings.ToLower(strings.NewReplacer(" ", "-", "(", "", ")", "", ",", "", "/", "-").Replace(device))
	kernelstest.Run(t, kernelstest.Harness{
		Digests: filepath.Join("testdata", "digests-"+name+".txt"), Open: open,
		Extent: kernelstest.Extent{CasesEvery: every, Only: []string{"Cases", "Digests"}},
	})
	if n := wrapped.Load(); n == 0 {
		t.Error("no tensor was in a program's buffer")
	} else {
		t.Logf("%d tensors in the program's buffers", n)
	}
}

// programsBuffers is a backend whose tensors are in buffers of the program, each as small as it can be.
type programsBuffers struct {
	*gpu.Backend
	device  *gpu.SharedDevice
	wrapped *atomic.Int64 // counts them

	mu      sync.Mutex
	buffers []*gpu.SharedBuffer
}

func (p *programsBuffers) Alloc(ctx context.Context, dtype backend.DType, shape backend.Shape) (t backend.Tensor, err error) {
	bytes := dtype.Bytes(shape)
	if bytes < 0 || bytes > 1<<20 {
		return p.Backend.Alloc(ctx, dtype, shape) // its errors are those of the backend
	}
	buffer, err := newBuffer(p.device, max(uint64(bytes)+15, 16)&^15, port.ImportUsage)
	if err != nil {
		return t, err
	}
	p.mu.Lock()
	p.buffers = append(p.buffers, buffer)
	p.mu.Unlock()
	p.wrapped.Add(1)
	return p.Wrap(buffer, dtype, shape)
}

// Upload copies what the backend uploads, except masks and what is broadcast.
func (p *programsBuffers) Upload(ctx context.Context, host backend.Tensor) (backend.Tensor, error) {
	src, err := p.Backend.Upload(ctx, host)
	if err != nil || src.DType() == backend.Bool || !src.IsContiguous() || src.Shape().Elements() == 0 {
		return src, err
	}
	defer src.Release()
	dst, err := p.Alloc(ctx, src.DType(), src.Shape())
	if err == nil {
		err = p.Copy(ctx, []backend.Tensor{dst}, []backend.Tensor{src})
	}
	return dst, err
}

func (p *programsBuffers) Close() error {
	err := p.Backend.Close()
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, b := range p.buffers {
		b.Release()
	}
	p.buffers = nil
	return err
}
