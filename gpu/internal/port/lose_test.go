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
	createPipeline = func(l *library, desc PipelineDesc, dynamic int) (rawPipeline, error) {
		f()
		return l.createPipeline(desc, dynamic)
	}
	return func() { createPipeline = (*library).createPipeline }
}

// Elsewhere ends a submission of a program to the device's queue, ago in the past.
func Elsewhere(d Device, ago time.Duration) error {
	x := d.(*device)
	x.mu.Lock()
	defer x.mu.Unlock()
	t, err := x.lib.submit()
	x.lib.discard()
	for err == nil && x.ended < t {
		x.lib.pause(context.Background(), time.Now(), time.Time{})
		err = x.poll()
	}
	x.progress = time.Now().Add(-ago)
	return err
}
