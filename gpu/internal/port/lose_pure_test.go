//go:build !(cgo && !gogpu && ((linux && amd64 && !android) || (darwin && !ios) || (windows && amd64)))

package port

// Lose makes the device look as if its library had reported it lost.
func Lose(d Device) {
	p := d.(*pureDevice)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.lost = ErrLost
}
