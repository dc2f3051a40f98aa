package port

import (
	"syscall"
	"time"
)

// sleep sleeps about that long. time.Sleep takes a millisecond or more where no goroutine runs. A signal
// that ends the sleep costs one more poll.
func sleep(d time.Duration) {
	ts := syscall.NsecToTimespec(d.Nanoseconds())
	_ = syscall.Nanosleep(&ts, nil)
}
