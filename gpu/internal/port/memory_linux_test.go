package port_test

import (
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/seed90331342/attn/gpu/internal/port"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
	"golang.org/x/sys/unix"
)

const limitedChild = "ATTN_PORT_CHILD"

// TestOutOfMemory exhausts the address space of a process. The software driver then has no
// memory, which is ErrMemory for buffers of every size, and released buffers return it.
func TestOutOfMemory(t *testing.T) {
	if os.Getenv(limitedChild) == "" {
		adapter(t)
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestOutOfMemory$", "-test.v")
		cmd.Env = append(os.Environ(), limitedChild+"=1")
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%v\n%.3000s", err, out)
		}
		if strings.Contains(string(out), "--- SKIP") {
			t.Skipf("%s", out)
		}
		return
	}
	d := open(t, nil)
	must.Do(t, roundTrip(d)) // the driver has compiled
	const slack = 1 << 30    // for the device and for Go's arenas
	limit := unix.Rlimit{Cur: uint64(statm(t)[0])*uint64(os.Getpagesize()) + slack, Max: unix.RLIM_INFINITY}
	if err := unix.Setrlimit(unix.RLIMIT_AS, &limit); err != nil {
		t.Skipf("needs a limit on the address space: %v", err)
	}
	fill := func(size uint64) (bufs []port.Buffer) {
		for {
			b, err := d.CreateBuffer(size, storage)
			if err != nil {
				if !errors.Is(err, port.ErrMemory) || errors.Is(err, port.ErrInvalid) {
					t.Fatalf("%d bytes: %v, want ErrMemory", size, err)
				}
				return bufs
			}
			if bufs = append(bufs, b); uint64(len(bufs))*size > 2*slack {
				t.Skip("the device's memory is not this process's")
			}
		}
	}
	release := func(bufs []port.Buffer) {
		for _, b := range bufs {
			b.Release()
		}
	}
	for _, size := range []uint64{160 << 20, 32 << 20} {
		bufs := fill(size)
		if len(bufs) < 3 {
			t.Fatalf("%d buffers of %d bytes in %d", len(bufs), size, slack)
		}
		release(bufs[:2])
		again := fill(size)
		if len(again) < 2 {
			t.Errorf("2 buffers of %d bytes released, room for %d", size, len(again))
		}
		release(again)
		release(bufs[2:])
	}
	must.Pass(t, "afterwards", roundTrip(d))
}
