package clitest

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"runtime"
	"testing"

	"github.com/seed90331342/attn/cmd/internal/flags"
)

// IsProgram is the environment variable of processes that run the program instead of tests.
const IsProgram = "ATTN_TEST_PROGRAM"

// Main runs the tests, or main in a process that Process started.
func Main(m *testing.M, main func()) {
	if os.Getenv(IsProgram) != "" {
		main()
	}
	os.Exit(m.Run())
}

// Process returns a process that runs the program, see Main.
func Process(args ...string) *exec.Cmd {
	cmd := exec.Command(os.Args[0], args...)
	cmd.Env = append(os.Environ(), IsProgram+"=1")
	return cmd
}

// run runs a process, calls start when it runs and after when it has ended, and returns what
// Program's function returns.
func run(t *testing.T, cmd *exec.Cmd, start, after func()) (code int, stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() {
		err := cmd.Wait()
		after()
		ended <- err
	}()
	start()
	if err := <-ended; err != nil && !errors.As(err, new(*exec.ExitError)) {
		t.Fatal(err)
	}
	return cmd.ProcessState.ExitCode(), out.String(), errs.String()
}

// Interrupted runs a process and sends it a signal when started returns. The process must end
// with the error of an interrupted command, which has written no file.
func Interrupted(t *testing.T, cmd *exec.Cmd, signal os.Signal, started, after func()) {
	t.Helper()
	if runtime.GOOS == "windows" {
		t.Skip("Windows has no way to send Ctrl-C to one process")
	}
	code, stdout, stderr := run(t, cmd, func() {
		started()
		_ = cmd.Process.Signal(signal) // fails if it has ended
	}, after)
	if code != flags.ExitInterrupted {
		t.Errorf("exit code %d, should be %d", code, flags.ExitInterrupted)
	}
	WantFailure(t, code, stdout, stderr, "interrupted, no file was written")
}
