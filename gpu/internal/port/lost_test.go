package port_test

import (
	"errors"
	"testing"
	"time"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/gpu/internal/port"
)

// After a loss every call returns ErrLost, Release and Close work in any order, and
// another device opens.
func TestLost(t *testing.T) {
	d := open(t, nil)
	if err := d.Lost(); err != nil {
		t.Fatalf("before: %v", err)
	}
	p, err := d.CreatePipeline(doublerDesc)
	check(t, err)
	var bufs []port.Buffer
	for _, usage := range []gputypes.BufferUsage{storage, storage, uniform, staging} {
		bufs = append(bufs, buffer(t, d, 256, usage))
	}
	dispatch := []port.Command{{Pipeline: p, Groups: [3]uint32{1, 1, 1}, Bindings: []port.Binding{
		{Buffer: bufs[0], Size: 256}, {Buffer: bufs[1], Size: 256}, {Buffer: bufs[2], Size: 16}}}}
	ticket, err := d.Submit(dispatch) // under way, or not, when it happens
	check(t, err)
	port.Lose(d)
	for name, call := range map[string]func() error{
		"CreateBuffer":   func() error { _, err := d.CreateBuffer(16, storage); return err },
		"CreatePipeline": func() error { _, err := d.CreatePipeline(doublerDesc); return err },
		"Write":          func() error { return d.Write(bufs[0], 0, words(1)) },
		"Submit":         func() error { _, err := d.Submit(dispatch); return err },
		"Wait":           func() error { _, err := d.Wait(t.Context(), ticket+1, time.Time{}); return err },
		"Read":           func() error { return d.Read(bufs[3], 0, make([]byte, 8)) },
		"Lost":           d.Lost,
	} {
		if err := call(); !errors.Is(err, port.ErrLost) {
			t.Errorf("%s of a lost device: %v", name, err)
		}
	}
	bufs[0].Release()
	if err := d.Close(); err != nil {
		t.Error(err)
	}
	bufs[1].Release()
	if l := d.Live(); l != (port.Live{}) {
		t.Errorf("Close of a lost device left %+v", l)
	}
	if err := roundTrip(open(t, nil)); err != nil {
		t.Errorf("the next device: %v", err)
	}
}

// TestSubmissionsElsewhere submits after a program's own submissions to the same queue. A
// device that was idle for long is not lost.
func TestSubmissionsElsewhere(t *testing.T) {
	d := open(t, nil)
	for range 20 {
		check(t, port.Elsewhere(d, time.Hour))
		check(t, roundTrip(d))
	}
}
