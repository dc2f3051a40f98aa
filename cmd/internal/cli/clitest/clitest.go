// Package clitest runs command lines in tests and makes .npy files for them.
package clitest

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/alecthomas/kong"
	"github.com/sbinet/npyio/npy"
	"github.com/x448/float16"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cmd/internal/cli"
	"github.com/seed90331342/attn/kernels"

	// Register the backends.
	_ "github.com/seed90331342/attn/cpu"
	_ "github.com/seed90331342/attn/gpu"
)

func init() {
	// See cli.Program.Main.
	if os.Getenv("XDG_RUNTIME_DIR") == "" {
		os.Setenv("XDG_RUNTIME_DIR", "/nonexistent")
	}
}

// Program returns functions that run attn with a grammar, see Named.
func Program(grammar func() any, options ...kong.Option) (attn Run, mustRun MustRun, mustFail MustFail) {
	return Named(cli.Program{Name: "attn", Grammar: grammar, Options: options})
}

// Run runs a program and returns its exit code and output.
type Run func(t *testing.T, args ...string) (code int, stdout, stderr string)

// MustRun fails the test unless the program succeeds with no output to standard error.
type MustRun func(t *testing.T, args ...string) (stdout string)

// MustFail fails the test unless the program fails as WantFailure requires.
type MustFail func(t *testing.T, want string, args ...string)

// Named returns functions that run a program.
func Named(p cli.Program) (Run, MustRun, MustFail) {
	run := func(t *testing.T, args ...string) (int, string, string) {
		var out, err bytes.Buffer
		code := p.Run(t.Context(), args, &out, &err)
		return code, out.String(), err.String()
	}
	mustRun := func(t *testing.T, args ...string) string {
		t.Helper()
		code, stdout, stderr := run(t, args...)
		if code != 0 || stderr != "" {
			t.Fatalf("%s %s: exit code %d, %s", p.Name, strings.Join(args, " "), code, stderr)
		}
		return stdout
	}
	return run, mustRun, func(t *testing.T, want string, args ...string) {
		t.Helper()
		code, stdout, stderr := run(t, args...)
		WantFailure(t, code, stdout, stderr, want)
	}
}

// line is an error of attn or of attn-onnx.
var line = regexp.MustCompile(`^attn(-[a-z]+)?: .*\n$`)

// WantFailure checks a failure: an exit code, nothing on stdout, and one line on stderr that
// contains want, in which " … " stands for any text. The line has no stack.
func WantFailure(t *testing.T, code int, stdout, stderr, want string) {
	t.Helper()
	if code == 0 || stdout != "" || !line.MatchString(stderr) {
		t.Errorf("exit code %d, stdout %q, stderr %q, should be one line that starts with the program's name", code, stdout, stderr)
	}
	rest := stderr
	for part := range strings.SplitSeq(want, " … ") {
		_, after, ok := strings.Cut(rest, part)
		if !ok {
			t.Errorf("stderr is %q, should say %q", stderr, want)
		}
		rest = after
	}
	for _, trace := range []string{"goroutine", "panic", ".go:", "internal error"} {
		if strings.Contains(stderr, trace) {
			t.Errorf("stderr %q holds %q", stderr, trace)
		}
	}
}

// Files lists a folder, with hidden files.
func Files(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// RawNPY returns a file of a header and data, which may contradict each other.
func RawNPY(dict string, data []byte) []byte {
	dict += "\n"
	head := append([]byte("\x93NUMPY\x01\x00"), byte(len(dict)), byte(len(dict)>>8))
	return append(append(head, dict...), data...)
}

func Dict(descr string, fortran bool, shape ...int) string {
	order := "False"
	if fortran {
		order = "True"
	}
	s := strings.Trim(strings.ReplaceAll(fmt.Sprint(shape), " ", ", "), "[]")
	if len(shape) == 1 {
		s += ","
	}
	return fmt.Sprintf("{'descr': '%s', 'fortran_order': %s, 'shape': (%s), }", descr, order, s)
}

// Encode encodes numbers as a numpy type.
func Encode(descr string, data []float64) []byte {
	order := binary.ByteOrder(binary.LittleEndian)
	if descr[0] == '>' {
		order = binary.BigEndian
	}
	size := int(descr[2] - '0')
	b := make([]byte, len(data)*size)
	for i, x := range data {
		at := b[i*size:]
		switch descr[1:] {
		case "f2":
			order.PutUint16(at, float16.Fromfloat32(float32(x)).Bits())
		case "f4":
			order.PutUint32(at, math.Float32bits(float32(x)))
		case "f8":
			order.PutUint64(at, math.Float64bits(x))
		default: // bool and one-byte integers
			at[0] = byte(x)
		}
	}
	return b
}

func Elements(shape []int) int {
	n := 1
	for _, l := range shape {
		n *= l
	}
	return n
}

// Normal returns random numbers that every type represents exactly: multiples of 1/16.
func Normal(seed uint64, n int) []float64 {
	rng := rand.New(rand.NewPCG(seed, 0))
	data := make([]float64, n)
	for i := range data {
		data[i] = math.Round(rng.NormFloat64()*16) / 16
	}
	return data
}

func WriteFile(t testing.TB, dir, name string, content []byte) string {
	t.Helper()
	path := filepath.Join(dir, name)
	if err := os.WriteFile(path, content, 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

// Save writes an array and returns its path.
func Save(t *testing.T, dir, name, descr string, data []float64, shape ...int) string {
	t.Helper()
	return WriteFile(t, dir, name, RawNPY(Dict(descr, false, shape...), Encode(descr, data)))
}

// Load reads an f4 or f2 array with another reader than the program's.
func Load(t *testing.T, path string) (data []float64, shape []int, descr string) {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	r, err := npy.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	descr = r.Header.Descr.Type
	if descr == "<f4" {
		var x []float32
		if err := r.Read(&x); err != nil {
			t.Fatal(err)
		}
		for _, v := range x {
			data = append(data, float64(v))
		}
		return data, r.Header.Descr.Shape, descr
	}
	raw, err := os.ReadFile(path) // npyio reads no f2
	if err != nil {
		t.Fatal(err)
	}
	n := Elements(r.Header.Descr.Shape)
	for i := range n {
		data = append(data, float64(float16.Frombits(binary.LittleEndian.Uint16(raw[len(raw)-2*(n-i):])).Float32()))
	}
	return data, r.Header.Descr.Shape, descr
}

// Near checks numbers against a reference.
func Near(t *testing.T, what string, got, want []float64, tolerance float64) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%s has %d numbers, should have %d", what, len(got), len(want))
	}
	for i := range got {
		if !(math.Abs(got[i]-want[i]) <= tolerance) && !(math.IsInf(want[i], -1) && got[i] == want[i]) {
			t.Fatalf("%s: number %d is %v, should be %v", what, i, got[i], want[i])
		}
	}
}

// HookDriver is a family of backends: the CPU, with hooks around fused calls.
type HookDriver struct {
	Before func(ctx context.Context, c *backend.Call) error
	After  func(c *backend.Call)
}

// Devices implements backend.Driver.
func (HookDriver) Devices() ([]kernels.Info, error) { return nil, kernels.ErrNoDevice }

// Open implements backend.Driver.
func (d HookDriver) Open(string) (backend.Backend, error) {
	be, err := backend.Open("cpu")
	return hooked{be, d}, err
}

type hooked struct {
	backend.Backend
	HookDriver
}

// Attention implements backend.Backend.
func (h hooked) Attention(ctx context.Context, calls ...*backend.Call) error {
	for _, c := range calls {
		if h.Before != nil {
			if err := h.Before(ctx, c); err != nil {
				return err
			}
		}
	}
	err := h.Backend.Attention(ctx, calls...)
	for _, c := range calls {
		if h.After != nil {
			h.After(c)
		}
	}
	return err
}

// NeedBackend skips a test whose backend has no device here, or fails it on a CI
// machine.
func NeedBackend(t *testing.T, name string) {
	t.Helper()
	be, err := backend.Open(name)
	switch {
	case err == nil:
		if err := be.Close(); err != nil {
			t.Fatal(err)
		}
	case errors.Is(err, kernels.ErrNoDevice) && os.Getenv("CI") != "true":
		t.Skipf("%s has no device here: %v", name, err)
	default:
		t.Fatal(err)
	}
}
