package port

// Lose puts a device into the state that follows its loss.
func Lose(d Device) {
	x := d.(*device)
	x.mu.Lock()
	defer x.mu.Unlock()
	x.lost = ErrLost
}
