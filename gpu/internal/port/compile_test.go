package port_test

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/backend/backendtest/must"
	"github.com/seed90331342/attn/gpu/internal/port"
)

// A compilation holds up no other call of the device: each would wait forever here.
func TestCallsDuringCompilation(t *testing.T) {
	d := open(t, nil)
	src, dst := buffer(t, d, 64, storage), buffer(t, d, 64, staging)
	ran := 0
	defer port.WhileCompiling(func() {
		ran++
		if err := d.Write(src, 0, words(1, 2)); err != nil {
			t.Error(err)
		}
		ticket, err := d.Submit([]port.Command{{Src: src, Dst: dst, Size: 8}})
		if err != nil {
			t.Error(err)
		}
		if _, err := d.Wait(t.Context(), ticket, time.Time{}); err != nil {
			t.Error(err)
		}
		got := make([]byte, 8)
		if err := d.Read(dst, 0, got); err != nil || string(got) != string(words(1, 2)) {
			t.Errorf("read %v, %v", got, err)
		}
		b, err := d.CreateBuffer(16, storage)
		if err != nil {
			t.Error(err)
		} else {
			b.Release()
		}
		if l := d.Live(); l.Buffers != 2 || d.Hung() || d.Lost() != nil {
			t.Errorf("%+v, hung %v, lost %v", l, d.Hung(), d.Lost())
		}
	})()
	p, err := d.CreatePipeline(doublerDesc)
	if err != nil || ran != 1 {
		t.Fatalf("%d compilations, %v", ran, err)
	}
	p.Release()
}

// A device that is closed during a compilation is closed after it, and leaves nothing.
func TestCloseDuringCompilation(t *testing.T) {
	d := open(t, nil)
	closed := make(chan error)
	defer port.WhileCompiling(func() {
		go func() { closed <- d.Close() }()
		for { // until the device refuses calls
			b, err := d.CreateBuffer(16, storage)
			if err != nil {
				break
			}
			b.Release()
		}
		select {
		case <-closed:
			t.Error("closed while a shader compiles")
		default:
		}
	})()
	must.Fail(t, "the pipeline of a closed device", must.Err(d.CreatePipeline(doublerDesc)), port.ErrClosed)
	must.Do(t, <-closed)
	if l := d.Live(); l != (port.Live{}) {
		t.Errorf("Close left %+v", l)
	}
}

// The errors of compilations and of other calls at the same time reach their own callers.
func TestErrorsDuringCompilation(t *testing.T) {
	d := open(t, nil)
	wrong := doublerDesc
	wrong.WGSL = strings.Replace(doubler, "2u", "undeclared", 1)
	var wg sync.WaitGroup
	wg.Go(func() {
		for range 20 {
			must.Fail(t, "a wrong shader", must.Err(d.CreatePipeline(wrong)), port.ErrShader, "undeclared")
			p, err := d.CreatePipeline(doublerDesc)
			if err != nil {
				t.Errorf("a right shader: %v", err)
				continue
			}
			p.Release()
		}
	})
	for range 200 {
		b, err := d.CreateBuffer(64, storage)
		if err != nil {
			t.Errorf("a buffer: %v", err)
			continue
		}
		if err := d.Write(b, 0, words(1, 2)); err != nil {
			t.Error(err)
		}
		if ticket, err := d.Submit(nil); err != nil {
			t.Error(err)
		} else if _, err := d.Wait(t.Context(), ticket, time.Time{}); err != nil {
			t.Error(err)
		}
		must.Fail(t, "a write behind the end", d.Write(b, 64, words(1, 2)), port.ErrInvalid)
		b.Release()
	}
	wg.Wait()
}

// After a loss every call returns ErrLost, Release and Close work in any order, and
// another device opens.
func TestLost(t *testing.T) {
	d := open(t, nil)
	must.Do(t, d.Lost())
	p := must.Get(d.CreatePipeline(doublerDesc))(t)
	var bufs []port.Buffer
	for _, usage := range []gputypes.BufferUsage{storage, storage, uniform, staging} {
		bufs = append(bufs, buffer(t, d, 256, usage))
	}
	dispatch := []port.Command{{Pipeline: p, Groups: [3]uint32{1, 1, 1}, Bindings: []port.Binding{
		{Buffer: bufs[0], Size: 256}, {Buffer: bufs[1], Size: 256}, {Buffer: bufs[2], Size: 16}}}}
	ticket, err := d.Submit(dispatch) // under way, or not, when it happens
	must.Do(t, err)
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
		must.Fail(t, fmt.Sprintf("%s of a lost device", name), call(), port.ErrLost)
	}
	bufs[0].Release()
	must.Do(t, d.Close())
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
		must.Do(t, port.Elsewhere(d, time.Hour))
		must.Do(t, roundTrip(d))
	}
}
