//go:build unix

package clitest

import (
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"syscall"
	"testing"
)

// Pipe makes a pipe of that name, or skips the test.
func Pipe(t *testing.T, dir, name string) string {
	t.Helper()
	pipe := filepath.Join(dir, name)
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Skip(err)
	}
	return pipe
}

// InterruptedPipe interrupts a process that waits for a pipe, of which the test opens the other
// end with the mode O_RDONLY or O_WRONLY. It leaves as many files in the folder as there were.
func InterruptedPipe(t *testing.T, pipe string, mode int, args ...string) {
	t.Helper()
	before := Files(t, filepath.Dir(pipe))
	var other *os.File
	Interrupted(t, Process(args...), os.Interrupt, func() {
		var err error
		if other, err = os.OpenFile(pipe, mode, 0); err != nil { // returns when the program opens its end
			t.Error(err)
		}
	}, func() {
		// A program that did not open its end must not block the test. Closed before the next
		// case begins, which would take this for its program's end.
		if both, err := os.OpenFile(pipe, os.O_RDWR, 0); err == nil {
			both.Close()
		}
	})
	other.Close()
	if after := Files(t, filepath.Dir(pipe)); len(after) != len(before) {
		t.Errorf("the folder holds %v", after)
	}
}

// Limited runs the program with 4 GiB of address space and returns its exit code and outputs.
// The test fails if it took more than 256 MiB of memory; the program alone takes about 30.
func Limited(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	cmd := Process(args...)
	cmd.Args = append([]string{"sh", "-c", `ulimit -v 4194304 && exec "$0" "$@"`, cmd.Path}, args...)
	cmd.Path = "/bin/sh"
	// On Linux a new process inherits the peak of its parent: reset the peak of this process first
	// (proc_pid_clear_refs(5)).
	debug.FreeOSMemory()
	if err := os.WriteFile("/proc/self/clear_refs", []byte("5"), 0); err != nil {
		t.Fatal(err)
	}
	code, stdout, stderr = run(t, cmd, func() {}, func() {})
	peak := cmd.ProcessState.SysUsage().(*syscall.Rusage).Maxrss * 1024
	t.Logf("%d MiB", peak>>20)
	if peak > 256<<20 {
		t.Errorf("%s took %d MiB of memory", strings.Join(args, " "), peak>>20)
	}
	return code, stdout, stderr
}

// Sparse returns a file of that content and then size bytes of zeros, which take no space.
func Sparse(t *testing.T, dir, name string, size int64, content ...byte) string {
	t.Helper()
	path := WriteFile(t, dir, name, content)
	if err := os.Truncate(path, int64(len(content))+size); err != nil {
		t.Skipf("this file system has no sparse files: %v", err)
	}
	return path
}
