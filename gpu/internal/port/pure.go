//go:build !(cgo && !gogpu && ((linux && amd64 && !android) || (darwin && !ios) || (windows && amd64)))

package port

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/gogpu/gputypes"
	"github.com/gogpu/wgpu"
)

// Provider names the library behind the port.
const Provider = "gogpu/wgpu v0.31.5 (pure Go)"

var instance = sync.OnceValues(func() (*wgpu.Instance, error) {
	return wgpu.CreateInstance(&wgpu.InstanceDescriptor{
		Backends: wgpu.BackendsVulkan | wgpu.BackendsMetal | wgpu.BackendsDX12,
	})
})

// Adapters lists the adapters for the caller to release. The library has no
// list, only wishes: the adapters that its three kinds of wish lead to are what
// can be told apart, so of two equal cards one is seen. ErrNoAdapter when there
// are none.
func Adapters() ([]Adapter, error) {
	inst, err := instance()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", err.Error(), ErrNoAdapter)
	}
	wishes := []*wgpu.RequestAdapterOptions{
		{PowerPreference: wgpu.PowerPreferenceHighPerformance},
		{PowerPreference: wgpu.PowerPreferenceLowPower},
		{ForceFallbackAdapter: true},
	}
	var all []Adapter
	seen := map[gputypes.AdapterInfo]bool{}
	for _, w := range wishes {
		a, err := inst.RequestAdapter(w)
		if err != nil {
			continue // no adapter of this kind
		}
		if seen[a.Info()] {
			a.Release()
			continue
		}
		seen[a.Info()] = true
		all = append(all, &pureAdapter{a: a})
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("no Vulkan, Metal or DX12 driver answered: %w", ErrNoAdapter)
	}
	return all, nil
}

type pureAdapter struct {
	once sync.Once
	a    *wgpu.Adapter
}

func (a *pureAdapter) Release()                   { a.once.Do(a.a.Release) }
func (a *pureAdapter) Info() gputypes.AdapterInfo { return a.a.Info() }
func (a *pureAdapter) Limits() gputypes.Limits    { return a.a.Limits() }

// Open checks the limits that compute meets itself: the library takes any.
func (a *pureAdapter) Open(l gputypes.Limits) (Device, error) {
	have := a.a.Limits()
	for _, c := range []struct {
		name      string
		want, has uint64
	}{
		{"MaxBufferSize", l.MaxBufferSize, have.MaxBufferSize},
		{"MaxStorageBufferBindingSize", l.MaxStorageBufferBindingSize, have.MaxStorageBufferBindingSize},
		{"MaxComputeWorkgroupStorageSize", uint64(l.MaxComputeWorkgroupStorageSize), uint64(have.MaxComputeWorkgroupStorageSize)},
		{"MaxComputeInvocationsPerWorkgroup", uint64(l.MaxComputeInvocationsPerWorkgroup), uint64(have.MaxComputeInvocationsPerWorkgroup)},
		{"MaxComputeWorkgroupsPerDimension", uint64(l.MaxComputeWorkgroupsPerDimension), uint64(have.MaxComputeWorkgroupsPerDimension)},
		{"MaxStorageBuffersPerShaderStage", uint64(l.MaxStorageBuffersPerShaderStage), uint64(have.MaxStorageBuffersPerShaderStage)},
	} {
		if c.want > c.has {
			return nil, fmt.Errorf("open device on %q: %s of %d is over the adapter's %d: %w", a.a.Info().Name, c.name, c.want, c.has, ErrInvalid)
		}
	}
	dev, err := a.a.RequestDevice(&wgpu.DeviceDescriptor{Label: "attn", RequiredLimits: l})
	if err != nil {
		return nil, fmt.Errorf("open device on %q: %w", a.a.Info().Name, translate(err, ErrInvalid))
	}
	vulkan := a.a.Info().Backend == gputypes.BackendVulkan
	return &pureDevice{dev: dev, queue: dev.Queue(), limits: l, spirv: vulkan, buffers: map[*pureBuffer]bool{}, written: map[*pureBuffer]bool{}, pipelines: map[*purePipeline]bool{},
		groups: newGroups((*wgpu.BindGroup).Release)}, nil
}

// translate wraps the library's error in the port's sentinel, kind when the
// library has no more precise one.
func translate(err, kind error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, wgpu.ErrDeviceLost):
		kind = ErrLost
	case errors.Is(err, wgpu.ErrOutOfMemory):
		kind = ErrMemory
	}
	return fmt.Errorf("%s: %w", err.Error(), kind)
}

// pureDevice serialises calls: the library allows concurrent ones, but buffers
// must not be released while a submission that binds them is being recorded.
type pureDevice struct {
	dev    *wgpu.Device
	queue  *wgpu.Queue
	limits gputypes.Limits
	spirv  bool // shaders are compiled here, see compile

	mu      sync.Mutex
	closed  bool
	lost    error
	live    Live
	buffers map[*pureBuffer]bool
	// written holds the buffers with writes that wait for the next submission.
	// The library copies into them then, released or not, so drop must not let
	// go of one before.
	written   map[*pureBuffer]bool
	doomed    []doomed
	last      uint64 // submission
	pipelines map[*purePipeline]bool
	lastID    uint64 // of a buffer or pipeline
	groups    *groups[*wgpu.BindGroup]
	key       groupKey // of the dispatch that is being recorded
}

func (d *pureDevice) Limits() gputypes.Limits { return d.limits }

func (d *pureDevice) Live() Live {
	d.mu.Lock()
	defer d.mu.Unlock()
	live := d.live
	live.Groups = len(d.groups.byKey)
	return live
}

func (d *pureDevice) Lost() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.lost
}

func (d *pureDevice) usable() error {
	if d.closed {
		return ErrClosed
	}
	return d.lost
}

// outcome remembers a lost device.
func (d *pureDevice) outcome(err, kind error) error {
	err = translate(err, kind)
	if errors.Is(err, ErrLost) && d.lost == nil {
		d.lost = err
	}
	return err
}

type pureBuffer struct {
	d    *pureDevice
	b    *wgpu.Buffer
	id   uint64 // in groupKey
	size uint64
}

func (b *pureBuffer) Size() uint64 { return b.size }

func (b *pureBuffer) Release() {
	b.d.mu.Lock()
	defer b.d.mu.Unlock()
	if b.d.buffers[b] {
		b.d.drop(b)
	}
}

func (d *pureDevice) drop(b *pureBuffer) {
	delete(d.buffers, b)
	d.live.Buffers--
	d.live.Bytes -= b.size
	d.groups.dropBuffer(b.id)
	if d.written[b] {
		d.settle()
	}
	d.doomed = append(d.doomed, doomed{b.b, d.last})
	d.reap()
}

// settle starts the writes that wait.
func (d *pureDevice) settle() {
	if index, err := d.queue.Submit(); err == nil {
		d.last = index
	}
	clear(d.written)
}

// doomed is a buffer that may go once a submission has ended. The library keeps
// what a submission copies, but not what it binds.
type doomed struct {
	b     *wgpu.Buffer
	after uint64
}

// reap lets go of the buffers whose time has come.
func (d *pureDevice) reap() {
	if len(d.doomed) == 0 {
		return
	}
	ended := d.queue.Poll()
	d.doomed = slices.DeleteFunc(d.doomed, func(x doomed) bool {
		if x.after > ended {
			return false
		}
		x.b.Release()
		return true
	})
}

func (d *pureDevice) CreateBuffer(size uint64, usage gputypes.BufferUsage) (Buffer, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.usable(); err != nil {
		return nil, err
	}
	if size > d.limits.MaxBufferSize {
		return nil, fmt.Errorf("buffer of %d bytes is over the limit of %d: %w", size, d.limits.MaxBufferSize, ErrInvalid)
	}
	d.reap()
	b, err := d.dev.CreateBuffer(&wgpu.BufferDescriptor{Size: size, Usage: usage})
	if err != nil {
		return nil, fmt.Errorf("buffer of %d bytes: %w", size, d.outcome(err, ErrMemory))
	}
	d.lastID++
	pb := &pureBuffer{d: d, b: b, id: d.lastID, size: size}
	d.buffers[pb] = true
	d.live.Buffers++
	d.live.Bytes += size
	return pb, nil
}

func (d *pureDevice) Write(b Buffer, offset uint64, data []byte) error {
	pb, _ := b.(*pureBuffer)
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.usable(); err != nil {
		return err
	}
	if !d.buffers[pb] {
		return fmt.Errorf("write to a buffer that is not there: %w", ErrInvalid)
	}
	if len(data) == 0 {
		return nil
	}
	d.written[pb] = true
	return d.outcome(d.queue.WriteBuffer(pb.b, offset, data), ErrInvalid)
}

func (d *pureDevice) Read(b Buffer, offset uint64, dst []byte) error {
	pb, _ := b.(*pureBuffer)
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.usable(); err != nil {
		return err
	}
	if !d.buffers[pb] || offset%8 != 0 || len(dst)%4 != 0 || offset+uint64(len(dst)) > pb.size {
		return fmt.Errorf("read %d bytes at %d: %w", len(dst), offset, ErrInvalid)
	}
	if len(dst) == 0 {
		return nil
	}
	size := uint64(len(dst))
	pending, err := pb.b.MapAsync(wgpu.MapModeRead, offset, size)
	if err != nil {
		return d.outcome(err, ErrInvalid)
	}
	defer pending.Release()
	for start := time.Now(); ; {
		d.dev.Poll(wgpu.PollPoll)
		ready, err := pending.Status()
		if err != nil {
			return d.outcome(err, ErrInvalid)
		}
		if ready {
			break
		}
		if time.Since(start) > stallLimit {
			d.lost = fmt.Errorf("map did not end within %v: %w", stallLimit, ErrLost)
			return d.lost
		}
		pause(start)
	}
	rng, err := pb.b.MappedRange(offset, size)
	if err != nil {
		return d.outcome(errors.Join(err, pb.b.Unmap()), ErrInvalid)
	}
	copy(dst, rng.Bytes())
	rng.Release()
	return d.outcome(pb.b.Unmap(), ErrInvalid)
}

func (d *pureDevice) Close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return
	}
	if len(d.written) > 0 {
		d.settle()
	}
	_ = d.dev.WaitIdle() // a lost device cannot be waited for, and need not
	for p := range d.pipelines {
		d.dropPipeline(p)
	}
	for b := range d.buffers {
		d.drop(b)
	}
	for _, x := range d.doomed {
		x.b.Release() // nothing runs any more
	}
	d.doomed = nil
	d.closed = true
	d.dev.Release()
}
