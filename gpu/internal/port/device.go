package port

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/gogpu/gputypes"
)

// device implements Device over a library: it validates arguments, tracks objects, keeps bind groups and bounds waits.
type device struct {
	lib      Library
	traits   Traits
	limits   gputypes.Limits
	features Features

	compiling sync.RWMutex // held around a compilation and taken before mu
	mu        sync.Mutex   // held around every call of the library but compilations
	closed    bool
	lost      error
	buffers   map[*buffer]bool
	pipelines map[*pipeline]bool
	lastID    uint64    // of a buffer or pipeline
	last      Ticket    // the last submission
	ended     Ticket    // the last submission that is known to have ended
	progress  time.Time // when that was seen, or the first of the others was started
	groups    map[groupKey]*group
	clock     *clock   // nil where there is none
	key       groupKey // of the dispatch that is being recorded
	steps     []Step   // of the submission that is being recorded
}

type buffer struct {
	d    *device
	raw  Object
	id   uint64
	size uint64
	// imported means that the program owns the buffer.
	imported bool
}

type pipeline struct {
	d   *device
	raw Object
	id  uint64
	// dynamic is the binding whose offset is set by the dispatch and not by the bind group, or -1.
	dynamic int
}

// causes are the texts by which the libraries name a cause that their errors do not: in wgpu-native the errors of its
// devices, which its error scopes take for violated rules, in Dawn and gogpu the results of Vulkan. After a failed
// submission gogpu waits forever for semaphores that nothing signals: the device is lost, whatever the result.
var causes = []struct {
	text *regexp.Regexp
	kind error
}{
	{regexp.MustCompile(`Parent device is lost|vkQueueSubmit failed|vk\w+ (failed:|returned) -4\b`), ErrLost},
	{regexp.MustCompile(`Not enough memory left|VK_ERROR_OUT_OF_\w+_MEMORY|vk\w+ (failed:|returned) -[125]\b`), ErrMemory},
}

// Fault returns an error with a library's message. It wraps the sentinel of the cause
// that the message names, else kind.
func Fault(message string, kind error) error {
	for _, c := range causes {
		if c.text.MatchString(message) {
			message, kind = strings.Join(strings.Fields(message), " "), c.kind
			break
		}
	}
	return fmt.Errorf("%s: %w", message, kind)
}

func newDevice(lib Library, limits gputypes.Limits, features Features) *device {
	d := &device{
		lib: lib, traits: lib.Traits(), limits: limits, features: features, buffers: map[*buffer]bool{}, pipelines: map[*pipeline]bool{}, groups: map[groupKey]*group{},
	}
	if d.traits.Timed {
		d.clock = &clock{lib: lib.(Stamper), tick: d.traits.Tick}
	}
	return d
}

func (d *device) Limits() gputypes.Limits { return d.limits }

func (d *device) Features() Features { return d.features }

func (d *device) Live() Live {
	d.mu.Lock()
	defer d.mu.Unlock()
	live := Live{Buffers: len(d.buffers), Pipelines: len(d.pipelines), Groups: len(d.groups)}
	for b := range d.buffers {
		live.Bytes += b.size
	}
	return live
}

func (d *device) Lost() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.loss()
}

// loss returns the device's loss, also one that the library has reported meanwhile.
func (d *device) loss() error {
	if d.lost == nil && !d.closed {
		d.lost = d.lib.Lost()
	}
	return d.lost
}

// usable returns an error when the device is closed or lost.
func (d *device) usable() error {
	if d.closed {
		return ErrClosed
	}
	return d.loss()
}

// note returns err and remembers a loss.
func (d *device) note(err error) error {
	if d.lost == nil && errors.Is(err, ErrLost) {
		d.lost = err
	}
	return err
}

func (d *device) has(b Buffer) (*buffer, bool) {
	x, _ := b.(*buffer)
	return x, d.buffers[x]
}

func (d *device) CreateBuffer(size uint64, usage gputypes.BufferUsage) (Buffer, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.usable(); err != nil {
		return nil, err
	}
	if size > d.limits.MaxBufferSize {
		return nil, fmt.Errorf("buffer of %d bytes is over the limit of %d: %w", size, d.limits.MaxBufferSize, ErrInvalid)
	}
	raw, err := d.lib.CreateBuffer(size, usage)
	if err != nil {
		return nil, fmt.Errorf("buffer of %d bytes: %w", size, d.note(err))
	}
	return d.keep(&buffer{raw: raw, size: size}), nil
}

func (d *device) Import(b any) (Buffer, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.usable(); err != nil {
		return nil, err
	}
	lib, ok := d.lib.(Sharer)
	if !ok {
		return nil, fmt.Errorf("this library shares no devices: %w", ErrInvalid)
	}
	raw, size, usage, err := lib.Import(b)
	if err != nil {
		return nil, err
	}
	if !usage.Contains(ImportUsage) {
		return nil, fmt.Errorf("the buffer lacks a usage, create it with Storage, CopySrc and CopyDst: %w", ErrInvalid)
	}
	for x := range d.buffers {
		if x.raw == raw {
			return nil, fmt.Errorf("the buffer is in use already, make views of that tensor or release it first: %w", ErrInvalid)
		}
	}
	lib.Reference(raw)
	return d.keep(&buffer{raw: raw, size: size, imported: true}), nil
}

// keep counts b among the device's buffers.
func (d *device) keep(b *buffer) *buffer {
	d.lastID++
	b.d, b.id = d, d.lastID
	d.buffers[b] = true
	return b
}

func (b *buffer) Size() uint64 { return b.size }

func (b *buffer) Release() {
	b.d.mu.Lock()
	defer b.d.mu.Unlock()
	if b.d.buffers[b] {
		b.d.releaseBuffer(b)
	}
}

func (d *device) releaseBuffer(b *buffer) {
	delete(d.buffers, b)
	d.dropGroups(func(k groupKey) bool {
		return slices.ContainsFunc(k.spans[:], func(s groupSpan) bool { return s.buffer == b.id })
	})
	if b.imported {
		d.lib.(Sharer).Dereference(b.raw)
		return
	}
	d.lib.ReleaseBuffer(b.raw)
}

// createPipeline is Library.CreatePipeline, except in tests.
var createPipeline = Library.CreatePipeline

func (d *device) CreatePipeline(desc PipelineDesc) (Pipeline, error) {
	var one sync.Locker = &d.compiling
	if d.traits.CompilesTogether {
		one = d.compiling.RLocker()
	}
	one.Lock()
	defer one.Unlock()
	d.mu.Lock()
	err := d.usable()
	d.mu.Unlock()
	if err != nil {
		return nil, err
	}
	dynamic := slices.Index(desc.Bindings, Uniform)
	raw, err := createPipeline(d.lib, desc, dynamic)
	d.mu.Lock()
	defer d.mu.Unlock()
	if err == nil {
		if err = d.usable(); err != nil { // closed or lost meanwhile
			d.lib.ReleasePipeline(raw)
			return nil, err
		}
	}
	if err != nil {
		return nil, fmt.Errorf("pipeline %s: %w", desc.Label, d.note(err))
	}
	d.lastID++
	p := &pipeline{d: d, raw: raw, id: d.lastID, dynamic: dynamic}
	d.pipelines[p] = true
	return p, nil
}

func (p *pipeline) Release() {
	p.d.mu.Lock()
	defer p.d.mu.Unlock()
	if p.d.pipelines[p] {
		p.d.releasePipeline(p)
	}
}

func (d *device) releasePipeline(p *pipeline) {
	delete(d.pipelines, p)
	d.dropGroups(func(k groupKey) bool { return k.pipeline == p.id })
	d.lib.ReleasePipeline(p.raw)
}

func (d *device) Write(b Buffer, offset uint64, data []byte) error {
	return d.move("write", Library.Write, b, offset, 4, data)
}

func (d *device) Read(b Buffer, offset uint64, dst []byte) error {
	return d.move("read", read, b, offset, 8, dst)
}

// move moves data to or from a span of b at a multiple of align.
func (d *device) move(verb string, how func(Library, Object, uint64, []byte) error, b Buffer, offset, align uint64, data []byte) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.usable(); err != nil {
		return err
	}
	x, ok := d.has(b)
	if !ok || offset%align != 0 || len(data)%4 != 0 || offset+uint64(len(data)) > x.size {
		return fmt.Errorf("%s %d bytes at %d: %w", verb, len(data), offset, ErrInvalid)
	}
	if len(data) == 0 {
		return nil
	}
	return d.note(how(d.lib, x.raw, offset, data))
}

func (d *device) Submit(commands []Command, timed bool) (t Ticket, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.usable(); err != nil {
		return 0, err
	}
	var stamps *Stamps
	if timed {
		stamps, err = d.clock.start(d.ended)
	}
	for i := 0; err == nil && i < len(commands); i++ {
		err = d.record(&commands[i])
	}
	if err == nil {
		t, err = d.lib.Submit(d.steps, stamps)
	}
	if stamps != nil {
		stamps.ticket = t
	}
	clear(d.steps)
	d.steps = d.steps[:0]
	d.trimGroups()
	if err != nil {
		return 0, d.note(err)
	}
	if d.ended >= d.last { // greater where a program submits to the same queue
		d.progress = time.Now()
	}
	d.last = t
	return t, nil
}

// record appends a command to steps.
func (d *device) record(c *Command) error {
	if c.Pipeline == nil {
		src, ok := d.has(c.Src)
		dst, ok2 := d.has(c.Dst)
		if !ok || !ok2 || c.SrcOffset+c.Size > src.size || c.DstOffset+c.Size > dst.size {
			return fmt.Errorf("copy of %d bytes from %d to %d outside its buffers: %w", c.Size, c.SrcOffset, c.DstOffset, ErrInvalid)
		}
		d.steps = append(d.steps, Step{Src: src.raw, Dst: dst.raw, SrcOffset: c.SrcOffset, DstOffset: c.DstOffset, Size: c.Size})
		return nil
	}
	p, _ := c.Pipeline.(*pipeline)
	if !d.pipelines[p] {
		return fmt.Errorf("dispatch of a released pipeline: %w", ErrInvalid)
	}
	for _, n := range c.Groups {
		if n > d.limits.MaxComputeWorkgroupsPerDimension {
			return fmt.Errorf("dispatch of %v workgroups, the limit is %d a dimension: %w", c.Groups, d.limits.MaxComputeWorkgroupsPerDimension, ErrInvalid)
		}
	}
	d.steps = append(d.steps, Step{Pipeline: p.raw, Groups: c.Groups})
	return d.bind(&d.steps[len(d.steps)-1], p, c.Bindings)
}

// bind sets the bind group of a dispatch and the offset of its dynamic binding, if it has one. It checks the spans
// because gogpu does not, and shaders run there without index clamps. Multiples of the library's dynamicStep are the
// dynamic offset, the rest is part of the group: calls find their group again wherever their parameters lie.
func (d *device) bind(s *Step, p *pipeline, bindings []Binding) (err error) {
	if len(bindings) > MaxBindings {
		return fmt.Errorf("dispatch with %d bindings, the limit is %d: %w", len(bindings), MaxBindings, ErrInvalid)
	}
	d.key = groupKey{pipeline: p.id}
	for i := range bindings {
		b := &bindings[i]
		x, ok := d.has(b.Buffer)
		if !ok {
			return fmt.Errorf("binding %d is a released buffer: %w", i, ErrInvalid)
		}
		if b.Offset+b.Size > x.size || b.Size > d.limits.MaxStorageBufferBindingSize {
			return fmt.Errorf("binding %d has %d bytes at %d of a buffer of %d, the limit is %d: %w",
				i, b.Size, b.Offset, x.size, d.limits.MaxStorageBufferBindingSize, ErrInvalid)
		}
		at := b.Offset
		if i == p.dynamic {
			s.Dynamic, s.Offset[0], at = 1, uint32(at-at%d.traits.DynamicStep), at%d.traits.DynamicStep
		}
		d.key.spans[i] = groupSpan{x.id, at, b.Size}
	}
	if known := d.groups[d.key]; known != nil {
		known.used, s.Group = d.last, known.raw
		return nil
	}
	spans := make([]Span, len(bindings))
	for i, b := range bindings {
		spans[i] = Span{b.Buffer.(*buffer).raw, d.key.spans[i].offset, b.Size}
	}
	if s.Group, err = d.lib.CreateGroup(p.raw, spans); err == nil {
		d.groups[d.key] = &group{s.Group, d.last}
	}
	return err
}

func (d *device) Took(t Ticket) (time.Duration, bool, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := d.usable(); err != nil || t > d.ended {
		return 0, false, err
	}
	took, ok, err := d.clock.took(t)
	return took, ok, d.note(err)
}

// Wait looks whether the submission has ended, and pauses between looks, instead of blocking in the
// library. The wait of wgpu-native gives up after 5 s and then reports work as done that is not.
func (d *device) Wait(ctx context.Context, t Ticket, due time.Time) (blocked bool, err error) {
	for start := time.Now(); ; pause(ctx, d.lib, start, due) {
		if done, err := d.done(t); done || err != nil {
			return blocked, err
		}
		blocked = true
		if err := ctx.Err(); err != nil {
			return blocked, err
		}
	}
}

// done reports whether a submission has ended.
func (d *device) done(t Ticket) (bool, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.ended >= t {
		return true, nil
	}
	if err := d.usable(); err != nil {
		return false, err
	}
	if err := d.poll(); err != nil {
		return false, err
	}
	if d.ended < t && time.Since(d.progress) > stallLimit {
		return false, d.note(fmt.Errorf("submission %d did not end within %v: %w", t, stallLimit, ErrLost))
	}
	return d.ended >= t, nil
}

// poll finds the submissions that have ended.
func (d *device) poll() error {
	ended, err := d.lib.Poll()
	if ended > d.ended {
		d.ended, d.progress = ended, time.Now()
	}
	return d.note(err)
}

func (d *device) Hung() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return !d.closed && d.running() && time.Since(d.progress) > HangLimit
}

// running reports whether submissions of a device that is not lost have not ended.
func (d *device) running() bool {
	return d.lib.Lost() == nil && d.ended < d.last && d.poll() == nil && d.ended < d.last
}

func (d *device) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return nil
	}
	d.closed = true // ends the waits of calls
	for start := time.Now(); d.running(); {
		if time.Since(d.progress) > HangLimit {
			return d.note(fmt.Errorf("submission %d did not end within %v, its memory remains with the driver: %w", d.ended+1, HangLimit, ErrLost))
		}
		d.mu.Unlock()
		pause(context.Background(), d.lib, start, time.Time{})
		d.mu.Lock()
	}
	d.mu.Unlock()
	d.compiling.Lock() // waits for a compilation
	defer d.compiling.Unlock()
	d.mu.Lock()
	for p := range d.pipelines {
		d.releasePipeline(p)
	}
	for b := range d.buffers {
		d.releaseBuffer(b)
	}
	d.clock.release()
	d.lib.Close()
	return nil
}
