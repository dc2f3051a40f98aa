package gpu

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/gpu/internal/port"
)

// faultyDevice forwards calls to another device and makes one of them fail.
type faultyDevice struct {
	port.Device

	mu     sync.Mutex
	left   int    // calls before the one that fails; negative for none
	of     string // the name of those calls; "" for any
	err    error
	failed string
	lose   bool // the failure is the loss of the device
	lost   error
	watch  func(call string)
	room   uint64 // unless 0, the device's memory in bytes
}

// injectFaults returns a device that forwards all calls to d.
func injectFaults(d port.Device) *faultyDevice { return &faultyDevice{Device: d, left: -1} }

// Fail makes the n-th call from now on return err, counting from 0. Later calls are
// forwarded again. A negative n means no call; it also restores a device that was lost.
func (d *faultyDevice) Fail(n int, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.left, d.err, d.failed, d.lose, d.lost = n, err, "", false, nil
}

// Lose makes the device lost at the n-th call from now on, counting from 0. That call
// and all later ones return port.ErrLost.
func (d *faultyDevice) Lose(n int) {
	d.Fail(n, fmt.Errorf("lost on purpose: %w", port.ErrLost))
	d.mu.Lock()
	defer d.mu.Unlock()
	d.lose = true
}

// Watch calls f with the name of each call before the call; nil removes f.
func (d *faultyDevice) Watch(f func(call string)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.watch = f
}

// Failed returns the name of the call that has failed since Fail, or "".
func (d *faultyDevice) Failed() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.failed
}

// saw reports a call to the function that watches.
func (d *faultyDevice) saw(call string) {
	d.mu.Lock()
	watch := d.watch
	d.mu.Unlock()
	if watch != nil {
		watch(call)
	}
}

// check returns the failure of a call, nil to forward it.
func (d *faultyDevice) check(call string) error {
	d.saw(call)
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.lost != nil || d.left < 0 || d.of != "" && d.of != call {
		return d.lost
	}
	d.left--
	if d.left >= 0 {
		return nil
	}
	d.failed = call
	if d.lose {
		d.lost = d.err
	}
	return d.err
}

// Lost returns the loss of Lose, else that of the other device.
func (d *faultyDevice) Lost() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.lost != nil {
		return d.lost
	}
	return d.Device.Lost()
}

// forward calls f, or returns the failure of the call.
func forward[T any](d *faultyDevice, call string, f func() (T, error)) (result T, err error) {
	if err := d.check(call); err != nil {
		return result, err
	}
	return f()
}

func (d *faultyDevice) CreateBuffer(size uint64, usage gputypes.BufferUsage) (port.Buffer, error) {
	return forward(d, "CreateBuffer", func() (port.Buffer, error) {
		if used := d.Live().Bytes; d.room > 0 && used+size > d.room {
			return nil, fmt.Errorf("%d of %d bytes are used: %w", used, d.room, port.ErrMemory)
		}
		return d.Device.CreateBuffer(size, usage)
	})
}

func (d *faultyDevice) CreatePipeline(desc port.PipelineDesc) (port.Pipeline, error) {
	return forward(d, "CreatePipeline", func() (port.Pipeline, error) { return d.Device.CreatePipeline(desc) })
}

func (d *faultyDevice) Submit(commands []port.Command, timed bool) (port.Ticket, error) {
	call := "Submit"
	if timed {
		call = "SubmitTimed"
	}
	return forward(d, call, func() (port.Ticket, error) { return d.Device.Submit(commands, timed) })
}

func (d *faultyDevice) Took(t port.Ticket) (time.Duration, bool, error) {
	if err := d.check("Took"); err != nil {
		return 0, false, err
	}
	return d.Device.Took(t)
}

func (d *faultyDevice) Write(b port.Buffer, offset uint64, data []byte) error {
	if err := d.check("Write"); err != nil {
		return err
	}
	return d.Device.Write(b, offset, data)
}

// Wait implements port.Device. When it fails, the submission continues; when it succeeds, it is also seen as Ended.
func (d *faultyDevice) Wait(ctx context.Context, t port.Ticket, due time.Time) (blocked bool, err error) {
	if err := d.check("Wait"); err != nil {
		return false, err
	}
	if blocked, err = d.Device.Wait(ctx, t, due); err == nil {
		d.saw("Ended")
	}
	return blocked, err
}

func (d *faultyDevice) Read(b port.Buffer, offset uint64, dst []byte) error {
	if err := d.check("Read"); err != nil {
		return err
	}
	return d.Device.Read(b, offset, dst)
}
