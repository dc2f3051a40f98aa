package resource

import (
	"slices"
	"testing"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/gpu/internal/port"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// memoryPort creates buffers and counts the sizes of those that live.
type memoryPort struct {
	port.Device
	live []uint64
}

type memory struct {
	port.Buffer
	dev  *memoryPort
	size uint64
}

func (*memoryPort) Limits() gputypes.Limits { return gputypes.Limits{MaxBufferSize: 1 << 30} }

func (p *memoryPort) CreateBuffer(size uint64, _ gputypes.BufferUsage) (port.Buffer, error) {
	p.live = append(p.live, size)
	return &memory{dev: p, size: size}, nil
}

func (m *memory) Size() uint64 { return m.size }
func (m *memory) Release() {
	i := slices.Index(m.dev.live, m.size)
	m.dev.live = slices.Delete(m.dev.live, i, i+1)
}

// The pool keeps what was released last, within its bound: the memory of a call that is repeated, whatever
// other calls left. It keeps no buffer over the bound for which it would drop all others.
func TestPoolKeepsTheLast(t *testing.T) {
	dev := &memoryPort{}
	p := NewPool(dev, 8<<10, nil)
	get := func(size uint64) port.Buffer {
		return must.Get(p.Get(t.Context(), size, StorageUsage))(t)
	}
	var all []port.Buffer
	for _, size := range []uint64{1 << 10, 3 << 10, 2 << 10, 4 << 10, 16 << 10} {
		all = append(all, get(size))
	}
	for _, b := range all {
		p.Put(b, StorageUsage, true)
	}
	if want := []uint64{2 << 10, 4 << 10}; !slices.Equal(dev.live, want) {
		t.Errorf("the pool keeps %d, should keep %d", dev.live, want)
	}
	if want := int64(1+3+16) << 10; p.retired != want {
		t.Errorf("%d bytes are retired, should be %d", p.retired, want)
	}
	if b := get(4 << 10); b != all[3] {
		t.Error("a buffer of the pool is not used again")
	}
	if p.Put(all[3], UniformUsage, false); get(4<<10) == all[3] {
		t.Error("a buffer is used for something else")
	}
	if !p.Drain() || p.Drain() {
		t.Error("Drain reports something else than whether there were buffers")
	}
	none := NewPool(dev, -1, nil)
	before := len(dev.live)
	b, err := none.Get(t.Context(), 1<<10, StorageUsage)
	if none.Put(b, StorageUsage, false); err != nil || len(dev.live) != before {
		t.Errorf("%d buffers live, %v", len(dev.live), err)
	}
}
