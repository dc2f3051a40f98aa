package backend

import (
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"strings"
	"syscall"
	"testing"

	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

const (
	mib = 1 << 20
	gib = 1 << 30
)

func TestMake(t *testing.T) {
	defer debug.SetMemoryLimit(debug.SetMemoryLimit(512 * mib))
	for _, n := range []int{-1, math.MinInt, math.MaxInt, math.MaxInt / 8, math.MaxInt/8 + 1, 64 * mib} {
		if s, err := Make[float64](n); !errors.Is(err, ErrMemory) || s != nil {
			t.Errorf("%d: %d elements, %v", n, len(s), err)
		}
	}
	for _, n := range []int{0, 1, 3 * mib} {
		if s, err := Make[float64](n); err != nil || len(s) != n {
			t.Errorf("%d: %d elements, %v", n, len(s), err)
		}
	}
	if s, err := Make[struct{}](7); err != nil || len(s) != 7 {
		t.Errorf("no bytes: %d elements, %v", len(s), err)
	}
}

func TestFailMemory(t *testing.T) {
	stop := FailMemory(2)
	_, first := Make[byte](1)
	second := CheckMemory(1)
	third := CheckMemory(1)
	if first != nil || !errors.Is(second, ErrMemory) || third != nil {
		t.Errorf("%v, %v, %v, want the second alone to fail", first, second, third)
	}
	if n := stop(); n != 3 {
		t.Errorf("%d requests, want 3", n)
	}
	must.Do(t, CheckMemory(1))
}

// TestGoMemoryLimit shows that a request observes the limit of Go's runtime.
func TestGoMemoryLimit(t *testing.T) {
	defer debug.SetMemoryLimit(debug.SetMemoryLimit(512 * mib))
	must.Fail(t, "more than GOMEMLIMIT", CheckMemory(gib), ErrMemory, "GOMEMLIMIT is 536870912")
	if free, limit := HostMemory(); limit != 512*mib || free > 512*mib {
		t.Errorf("limit %d, free %d", limit, free)
	}
}

const limitedChild = "ATTN_LIMITED_CHILD"

// TestUlimit fills a process that ulimit limits: the requests end with ErrMemory, not with the process, and
// what is released can be requested again.
func TestUlimit(t *testing.T) {
	if os.Getenv(limitedChild) != "" {
		fill(t)
		return
	}
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			if s.Key == "-race" && s.Value == "true" {
				t.Skip("the race detector maps more than any limit")
			}
		}
	}
	if errors.Is(exec.CommandContext(t.Context(), os.Args[0], "-test.run=^$").Run(), syscall.ENOEXEC) {
		t.Skip("the system cannot start this binary, which runs under an emulator")
	}
	for _, limit := range []string{"-v 2500000", "-d 1048576"} {
		cmd := exec.CommandContext(t.Context(), "sh", "-c", "ulimit "+limit+" && exec \"$0\" -test.run='^TestUlimit$'", os.Args[0])
		cmd.Env = append(os.Environ(), limitedChild+"=1")
		out, err := cmd.CombinedOutput()
		if runtime.GOOS != "linux" {
			t.Skipf("limits of processes are read on Linux only: %v", err)
		}
		if err != nil || !strings.Contains(string(out), "ulimit "+limit[:2]+" is") {
			t.Errorf("ulimit %s: %v\n%.2000s", limit, err, out)
		}
	}
}

func fill(t *testing.T) {
	for _, bytes := range []int{4 * mib, 30 * mib, 200 * mib} {
		var err error
		var all [2]int
		for turn := range all {
			var held [][]byte
			for err = nil; err == nil; {
				var b []byte
				b, err = Make[byte](bytes)
				held = append(held, b)
			}
			all[turn] = len(held) - 1
		}
		fmt.Println(bytes, all, err)
		if !errors.Is(err, ErrMemory) || all[0] == 0 || all[1] < all[0]/2 {
			t.Errorf("%d bytes: granted %d times, then %d: %v", bytes, all[0], all[1], err)
		}
	}

	// Parts of the heap that are too small for a request do not grant it by their sum.
	var held [][]byte
	for b, err := Make[byte](30 * mib); err == nil; b, err = Make[byte](30 * mib) {
		held = append(held, b)
	}
	for i := 0; i < len(held); i += 2 {
		held[i] = nil
	}
	if b, err := Make[byte](200 * mib); !errors.Is(err, ErrMemory) {
		t.Errorf("%d bytes between %d blocks: %v", len(b), len(held)/2, err)
	}
	b, err := Make[byte](15 * mib)
	must.Do(t, err)
	runtime.KeepAlive([][][]byte{held, {b}})
}
