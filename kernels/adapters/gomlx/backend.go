// Package gomlx is a backend for gomlx that computes attention on a [kernels.Device].
//
//	import _ "github.com/seed90331342/attn/kernels/adapters/gomlx" // GOMLX_BACKEND=attn:cpu
//
// It delegates every operation to gomlx's Go backend, but two: FusedScaledDotProductAttention and
// its gradient, FusedScaledDotProductAttentionVJP. For query row i and key j of one head
//
//	s_ij = scale·q_i·k_j + mask_ij + bias_ij    o_i = Σ_j softmax(s_i)_j · v_j
//
// in O(Sq + Sk) memory, forward and backward. Causal, boolean and additive masks, biases, lengths
// of queries and keys, and grouped-query heads, in f32, f16 and bf16, in both layouts. What is not
// among these yields compute.ErrNotImplemented, on which gomlx decomposes the operation.
//
// The Go backend has no public way to add an operation. This package therefore records a graph and
// compiles it as stages: the Go backend runs those, and attention runs between them. A stage ends
// where an operation needs the result of attention, so that a model of n layers has n+1 stages,
// and 2n+1 in training. Buffers pass from one to the next without a copy.
package gomlx

import (
	"cmp"
	"fmt"
	"strings"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/gobackend"
	"github.com/gomlx/compute/shapes"
	"github.com/seed90331342/attn/kernels"
)

// Name is that of the backend in GOMLX_BACKEND: "attn:DEVICE" or "attn:DEVICE,OPTIONS", with a
// device for [kernels.Open] and options of gomlx's Go backend. The program imports the devices
// that it wants to open, attn/cpu or attn/gpu.
const Name = "attn"

func init() {
	compute.Register(Name, func(config string) (compute.Backend, error) {
		device, options, _ := strings.Cut(config, ",")
		dev, err := kernels.Open(cmp.Or(device, "auto"))
		if err != nil {
			return nil, fmt.Errorf("gomlx: %w", err)
		}
		b, err := newBackend(dev, options)
		if err != nil {
			dev.Close()
			return nil, err
		}
		b.opened = true
		return b, nil
	})
}

// New returns a backend that computes attention on dev and everything else with gomlx's Go
// backend, whose options, as in GOMLX_BACKEND, may be empty. A device that computes in host memory
// reads and writes gomlx's buffers without a copy; another one transfers them. Finalize does not
// close dev. It returns the error of the Go backend for unknown options.
func New(dev *kernels.Device, options string) (compute.Backend, error) {
	return newBackend(dev, options)
}

func newBackend(dev *kernels.Device, options string) (*backend, error) {
	b, err := gobackend.New(options)
	if err != nil {
		return nil, fmt.Errorf("gomlx: %w", err)
	}
	return &backend{Backend: b, dev: dev}, nil
}

// backend delegates to the Go backend what it does not override.
type backend struct {
	compute.Backend
	dev    *kernels.Device
	opened bool // by this package, which closes it
}

func (b *backend) Name() string   { return Name }
func (b *backend) String() string { return Name }

func (b *backend) Description() string {
	return fmt.Sprintf("%s, attention by attn on %s", b.Backend.Description(), b.dev.Info().Name)
}

func (b *backend) Capabilities() compute.Capabilities {
	c := b.Backend.Capabilities().Clone()
	c.Operations[compute.OpTypeFusedScaledDotProductAttention] = true
	c.Operations[compute.OpTypeFusedScaledDotProductAttentionVJP] = true
	return c
}

func (b *backend) Builder(name string) compute.Builder { return newBuilder(b, name) }

func (b *backend) Finalize() {
	b.Backend.Finalize()
	if b.opened {
		b.dev.Close()
	}
}

func (b *backend) BufferFromFlatData(device compute.DeviceNum, flat any, shape shapes.Shape) (compute.Buffer, error) {
	return b.buffer(b.Backend.BufferFromFlatData(device, flat, shape))
}

func (b *backend) NewSharedBuffer(device compute.DeviceNum, shape shapes.Shape) (compute.Buffer, any, error) {
	buf, flat, err := b.Backend.NewSharedBuffer(device, shape)
	buf, err = b.buffer(buf, err)
	return buf, flat, err
}

// buffer is a buffer of the Go backend that belongs to b: gomlx refuses tensors of other backends.
type buffer struct {
	compute.Buffer
	b *backend
}

func (b *backend) buffer(buf compute.Buffer, err error) (compute.Buffer, error) {
	if err != nil {
		return nil, err
	}
	return &buffer{buf, b}, nil
}

func (buf *buffer) Backend() compute.Backend { return buf.b }

func (buf *buffer) CopyToDevice(device compute.DeviceNum) (compute.Buffer, error) {
	return buf.b.buffer(buf.Buffer.CopyToDevice(device))
}
