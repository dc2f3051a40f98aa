package workers

import (
	"fmt"
	"io"
	"net"
	"os"
)

// Prism waits forever for a process that has died between two bundles, and a process outlives
// a runner that was killed. Each process therefore holds a connection to the program that
// started it: its end shows either side that the other one has gone.

// watched is the environment variable of a worker process with the address to connect to.
const watched = "ATTN_BEAM_WATCH"

// watch accepts the connections of the worker processes. lost receives an error when one of
// them ends. stop closes the connections without one.
func watch() (address string, lost <-chan error, stop func(), err error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", nil, nil, err
	}
	ended := make(chan error, 1)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return // stopped
			}
			go func() {
				defer c.Close()
				var n [1]byte
				if _, err := io.ReadFull(c, n[:]); err != nil {
					return // not a worker
				}
				_, _ = io.Copy(io.Discard, c)
				select {
				case ended <- fmt.Errorf("worker process %d died before the work was done", n[0]):
				default: // not the first one
				}
			}()
		}
	}()
	return l.Addr().String(), ended, func() { l.Close() }, nil
}

// announce connects a worker process to the program that started it, and ends the process when that program has gone.
func announce(number int) error {
	c, err := net.Dial("tcp", os.Getenv(watched))
	if err != nil {
		return err
	}
	if _, err := c.Write([]byte{byte(number)}); err != nil {
		return err
	}
	go func() {
		_, _ = io.Copy(io.Discard, c)
		os.Exit(1)
	}()
	return nil
}
