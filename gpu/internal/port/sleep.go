//go:build !linux && !js

package port

import "time"

func sleep(d time.Duration) { time.Sleep(d) }
