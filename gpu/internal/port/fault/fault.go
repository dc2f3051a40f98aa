// Package fault makes calls of the port fail on purpose, once or for good, so that
// tests can see what each failure leaves behind.
package fault

import (
	"fmt"
	"sync"
	"time"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/gpu/internal/port"
)

// Device passes calls on to another device and makes one of them fail.
type Device struct {
	port.Device

	mu     sync.Mutex
	left   int // calls until the one that fails; below 0: none does
	err    error
	failed string
	lose   bool // the failure is the device's loss
	lost   error
	watch  func(call string)
}

// Wrap returns a device on which nothing fails yet.
func Wrap(d port.Device) *Device { return &Device{Device: d, left: -1} }

// Fail makes the n-th call from now on return err, counting from 0; the calls
// after it go through again. Below 0 none fails, and a device that was lost is back.
func (d *Device) Fail(n int, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.left, d.err, d.failed, d.lose, d.lost = n, err, "", false, nil
}

// Lose makes the device go away at the n-th call from now on, counting from 0: it
// and all later calls return port.ErrLost.
func (d *Device) Lose(n int) {
	d.Fail(n, fmt.Errorf("made to go away: %w", port.ErrLost))
	d.mu.Lock()
	defer d.mu.Unlock()
	d.lose = true
}

// Watch has f called with the name of each call before it is made; nil ends that.
func (d *Device) Watch(f func(call string)) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.watch = f
}

// Failed returns the name of the call that failed since Fail, "" if none has.
func (d *Device) Failed() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.failed
}

func (d *Device) check(call string) error {
	d.mu.Lock()
	watch := d.watch
	d.mu.Unlock()
	if watch != nil {
		watch(call)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.lost != nil || d.left < 0 {
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

// Lost is port.Device's, and the loss that was made.
func (d *Device) Lost() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.lost != nil {
		return d.lost
	}
	return d.Device.Lost()
}

// CreateBuffer is port.Device's, unless it is its turn to fail.
func (d *Device) CreateBuffer(size uint64, usage gputypes.BufferUsage) (port.Buffer, error) {
	if err := d.check("CreateBuffer"); err != nil {
		return nil, err
	}
	return d.Device.CreateBuffer(size, usage)
}

// CreatePipeline is port.Device's, unless it is its turn to fail.
func (d *Device) CreatePipeline(desc port.PipelineDesc) (port.Pipeline, error) {
	if err := d.check("CreatePipeline"); err != nil {
		return nil, err
	}
	return d.Device.CreatePipeline(desc)
}

// Write is port.Device's, unless it is its turn to fail.
func (d *Device) Write(b port.Buffer, offset uint64, data []byte) error {
	if err := d.check("Write"); err != nil {
		return err
	}
	return d.Device.Write(b, offset, data)
}

// Submit is port.Device's, unless it is its turn to fail.
func (d *Device) Submit(commands []port.Command) (port.Ticket, error) {
	if err := d.check("Submit"); err != nil {
		return 0, err
	}
	return d.Device.Submit(commands)
}

// SubmitTimed is port.Device's, unless it is its turn to fail.
func (d *Device) SubmitTimed(commands []port.Command) (port.Ticket, error) {
	if err := d.check("SubmitTimed"); err != nil {
		return 0, err
	}
	return d.Device.SubmitTimed(commands)
}

// Took is port.Device's, unless it is its turn to fail.
func (d *Device) Took(t port.Ticket) (time.Duration, bool, error) {
	if err := d.check("Took"); err != nil {
		return 0, false, err
	}
	return d.Device.Took(t)
}

// Wait is port.Device's, unless it is its turn to fail: then the submission goes
// on by itself.
func (d *Device) Wait(t port.Ticket) error {
	if err := d.check("Wait"); err != nil {
		return err
	}
	return d.Device.Wait(t)
}

// Read is port.Device's, unless it is its turn to fail.
func (d *Device) Read(b port.Buffer, offset uint64, dst []byte) error {
	if err := d.check("Read"); err != nil {
		return err
	}
	return d.Device.Read(b, offset, dst)
}
