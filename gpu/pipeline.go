package gpu

import (
	"context"
	"fmt"
	"hash/maphash"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/port"
	"github.com/seed90331342/attn/shaders"
)

// variant is a kernel with values for its constants.
type variant struct {
	kernel shaders.Kernel
	consts map[string]uint32
}

// key names a variant: attention ACC=8 DVB=2 ...
func (v variant) key() string {
	var s strings.Builder
	s.WriteString(v.kernel.Name)
	for _, name := range slices.Sorted(maps.Keys(v.consts)) {
		fmt.Fprintf(&s, " %s=%d", name, v.consts[name])
	}
	return s.String()
}

var hashSeed = maphash.MakeSeed()

// hash is of what key names, without building it: a call that is repeated asks
// for each of its pipelines.
func (v variant) hash() uint64 {
	h := maphash.String(hashSeed, v.kernel.Name)
	for name, value := range v.consts { // in any order, so that terms must commute
		h += maphash.String(hashSeed, name) * (2*uint64(value) + 1)
	}
	return h
}

func (v variant) equal(w variant) bool {
	return v.kernel.Name == w.kernel.Name && maps.Equal(v.consts, w.consts)
}

// pipe is a variant on a device: its pipeline, once it is compiled, and how fast
// it has been.
type pipe struct {
	variant variant
	kinds   string // of its bindings but the uniform
	uniform int    // the place of that
	pace    pace

	mu       sync.Mutex // held while it compiles
	compiled port.Pipeline
}

// pipes are the variants that a device has met.
type pipes struct {
	mu     sync.Mutex
	byHash map[uint64][]*pipe
}

// pipe returns the one of v, which need not be compiled.
func (b *Backend) pipe(v variant) *pipe {
	h := v.hash()
	b.pipes.mu.Lock()
	defer b.pipes.mu.Unlock()
	for _, p := range b.pipes.byHash[h] {
		if p.variant.equal(v) {
			return p
		}
	}
	before, after, _ := strings.Cut(v.kernel.Bindings, "u")
	p := &pipe{variant: v, kinds: before + after, uniform: len(before)}
	p.pace.start(b.firstSpeed)
	b.pipes.byHash[h] = append(b.pipes.byHash[h], p)
	return p
}

// pipeline returns p's pipeline and compiles it unless that was done before.
// backend.ErrUnsupported when the device has less than the kernel takes, or does
// not accept it.
func (b *Backend) pipeline(ctx context.Context, p *pipe) (port.Pipeline, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.compiled != nil {
		return p.compiled, nil
	}
	start := time.Now()
	k := p.variant.kernel
	if k.WorkgroupMemory > int(b.limits.MaxComputeWorkgroupStorageSize) || k.Threads > int(b.limits.MaxComputeInvocationsPerWorkgroup) {
		return nil, fmt.Errorf("kernel %s takes %d bytes of workgroup memory and %d threads, %s has %d and %d: %w",
			k.Name, k.WorkgroupMemory, k.Threads, b.info.Name, b.limits.MaxComputeWorkgroupStorageSize,
			b.limits.MaxComputeInvocationsPerWorkgroup, backend.ErrUnsupported)
	}
	src, err := k.Specialise(p.variant.consts)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", err, backend.ErrUnsupported)
	}
	kinds := make([]port.BindingKind, len(k.Bindings))
	for i, c := range k.Bindings {
		switch c {
		case 'r':
			kinds[i] = port.ReadOnly
		case 'w':
			kinds[i] = port.ReadWrite
		case 'u':
			kinds[i] = port.Uniform
		}
	}
	label := p.variant.key()
	if p.compiled, err = b.dev.CreatePipeline(port.PipelineDesc{Label: label, WGSL: src, Entry: "main", Bindings: kinds}); err != nil {
		p.compiled = nil
		return nil, translate(b.info.Name, err)
	}
	if tell := backend.TraceOf(ctx).Compile; tell != nil {
		tell(label, time.Since(start))
	}
	return p.compiled, nil
}
