package port

import (
	"context"
	"fmt"
	"runtime"
	"time"
)

// spinTime is the time for which a wait only yields between polls, when it begins and around its expected end: about
// that of a short kernel. The shortest sleep is a millisecond where timers are coarse.
const spinTime = 200 * time.Microsecond

// pause passes the time between two polls of a wait that began at start and is expected to end at due.
func pause(ctx context.Context, l Library, start, due time.Time) {
	if w, ok := l.(Waiter); ok {
		w.Pause(ctx)
	} else {
		Pause(start, due)
	}
}

// Pause is pause where a wait has to poll. Waits for short kernels poll often. Waits for long ones
// leave the processor to a software driver.
func Pause(start, due time.Time) {
	runtime.Gosched() // sleep keeps the goroutine's processor
	if d := pauseOf(time.Since(start), time.Until(due)); d > 0 {
		sleep(d)
	}
}

// pauseOf returns the time between two polls, 0 to only yield, by the time since the
// beginning and that to the expected end, which is negative once it has passed.
func pauseOf(waited, left time.Duration) time.Duration {
	if waited < spinTime || -spinTime < left && left < spinTime {
		return 0
	}
	d := min(waited/32, time.Millisecond)
	if left > 0 {
		d = min(d, left-spinTime)
	}
	return d
}

// mapLimit is the time after which a device that does not map an idle buffer counts as
// lost, if it was asked mapPolls times: the process may have been stopped meanwhile.
const (
	mapLimit = 5 * time.Second
	mapPolls = 100
)

// read copies bytes of a mappable, idle buffer to dst. A map takes a few polls, and other calls of
// the device can wait for it.
func read(lib Library, b Object, offset uint64, dst []byte) (err error) {
	if w, ok := lib.(Waiter); ok {
		return w.Read(b, offset, dst)
	}
	l := lib.(Mapper)
	if err := l.StartMap(b, offset, uint64(len(dst))); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			l.EndMap(b)
		}
	}()
	for start, polls := time.Now(), 0; ; Pause(start, time.Time{}) {
		if done, err := l.Mapped(); err != nil {
			return err
		} else if done {
			return l.CopyMapped(b, offset, dst)
		}
		if polls++; polls > mapPolls && time.Since(start) > mapLimit {
			return fmt.Errorf("map of an idle buffer did not end within %v: %w", mapLimit, ErrLost)
		}
	}
}
