package port

import (
	"testing"
	"time"
)

// Waits yield at their beginning and around their expected end, and sleep otherwise, never
// past the time at which they yield again.
func TestPause(t *testing.T) {
	const ms = time.Millisecond
	for _, c := range []struct{ waited, left, want time.Duration }{
		{0, -time.Hour, 0},
		{spinTime - 1, time.Hour, 0},
		{spinTime, time.Hour, spinTime / 32},
		{16 * ms, time.Hour, ms / 2},
		{time.Second, time.Hour, ms},
		{time.Second, ms, ms - spinTime},
		{time.Second, spinTime, 0},
		{time.Second, spinTime + 1, 1},
		{time.Second, spinTime - 1, 0},
		{time.Second, 1 - spinTime, 0},
		{time.Second, -spinTime, ms},
		{time.Second, -time.Hour, ms},
	} {
		if got := pauseOf(c.waited, c.left); got != c.want {
			t.Errorf("after %v, %v before the expected end: %v, want %v", c.waited, c.left, got, c.want)
		}
	}
}
