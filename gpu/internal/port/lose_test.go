package port

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
