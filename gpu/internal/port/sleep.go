//go:build !linux

package port

import "time"

func sleep(d time.Duration) { time.Sleep(d) }
