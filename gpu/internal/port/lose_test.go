package port

import (
	"context"
	"time"
)

// Lose puts a device into the state that follows its loss.
func Lose(d Device) {
	x := d.(*device)
	x.mu.Lock()
	defer x.mu.Unlock()
	x.lost = ErrLost
}

// WhileCompiling calls f during each compilation until the function that it returns.
func WhileCompiling(f func()) (end func()) {
	createPipeline = func(l Library, desc PipelineDesc, dynamic int) (Object, error) {
		f()
		return l.CreatePipeline(desc, dynamic)
	}
	return func() { createPipeline = Library.CreatePipeline }
}

// Elsewhere ends a submission of a program to the device's queue, ago in the past.
func Elsewhere(d Device, ago time.Duration) error {
	x := d.(*device)
	x.mu.Lock()
	defer x.mu.Unlock()
	t, err := x.lib.Submit(nil, nil)
	for err == nil && x.ended < t {
		pause(context.Background(), x.lib, time.Now(), time.Time{})
		err = x.poll()
	}
	x.progress = time.Now().Add(-ago)
	return err
}
