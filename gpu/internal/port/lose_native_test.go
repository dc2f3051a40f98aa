//go:build cgo && !gogpu && ((linux && amd64 && !android) || (darwin && !ios) || (windows && amd64))

package port

// Lose makes the device look as if its library had reported it lost.
func Lose(d Device) {
	n := d.(*nativeDevice)
	n.mu.Lock()
	defer n.mu.Unlock()
	n.state.lost = 1
}
