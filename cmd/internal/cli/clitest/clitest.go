// Package clitest runs command lines in tests and makes .npy files for them.
package clitest

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/sbinet/npyio/npy"
	"github.com/x448/float16"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cmd/internal/cli"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"

	// Register the backends.
	_ "github.com/seed90331342/attn/cpu"
	_ "github.com/seed90331342/attn/gpu"
)

// Named returns functions that run a program. attn returns its exit code and output; mustRun fails the test unless it
// succeeds with no output to standard error, and mustFail unless it fails as WantFailure requires.
func Named(p cli.Program) (
	attn func(t *testing.T, args ...string) (code int, stdout, stderr string),
	mustRun func(t *testing.T, args ...string) (stdout string),
	mustFail func(t *testing.T, want string, args ...string),
) {
	attn = func(t *testing.T, args ...string) (int, string, string) {
		var out, err bytes.Buffer
		code := p.Run(t.Context(), args, &out, &err)
		return code, out.String(), err.String()
	}
	mustRun = func(t *testing.T, args ...string) string {
		t.Helper()
		code, stdout, stderr := attn(t, args...)
		if code != 0 || stderr != "" {
			t.Fatalf("%s %s: exit code %d, %s", p.Name, strings.Join(args, " "), code, stderr)
		}
		return stdout
	}
	mustFail = func(t *testing.T, want string, args ...string) {
		t.Helper()
		code, stdout, stderr := attn(t, args...)
		WantFailure(t, code, stdout, stderr, want)
	}
	return attn, mustRun, mustFail
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

// Contains checks that text has each of the parts.
func Contains(t testing.TB, text string, parts ...string) {
	t.Helper()
	for _, part := range parts {
		if !strings.Contains(text, part) {
			t.Errorf("%q is missing from:\n%s", part, text)
		}
	}
}

// Files lists a folder, with hidden files.
func Files(t *testing.T, dir string) []string {
	t.Helper()
	entries := must.Get(os.ReadDir(dir))(t)
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
func Encode(descr string, data []float64) (b []byte) {
	var order binary.AppendByteOrder = binary.LittleEndian
	if descr[0] == '>' {
		order = binary.BigEndian
	}
	for _, x := range data {
		switch descr[1:] {
		case "f2":
			b = order.AppendUint16(b, float16.Fromfloat32(float32(x)).Bits())
		case "f4":
			b = order.AppendUint32(b, math.Float32bits(float32(x)))
		case "f8":
			b = order.AppendUint64(b, math.Float64bits(x))
		case "V2": // bf16
			b = order.AppendUint16(b, uint16(math.Float32bits(float32(x))>>16))
		default: // bool and one-byte integers
			b = append(b, byte(x))
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

// ReadFile returns the content of a file.
func ReadFile(t testing.TB, path string) []byte {
	t.Helper()
	content := must.Get(os.ReadFile(path))(t)
	return content
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

// Load reads an f4 or f2 array, its header with another reader than the program's.
func Load(t *testing.T, path string) (data []float64, shape []int, descr string) {
	t.Helper()
	text := ReadFile(t, path)
	r := must.Get(npy.NewReader(bytes.NewReader(text)))(t)
	descr, shape = r.Header.Descr.Type, r.Header.Descr.Shape
	size := int(descr[2] - '0')
	for raw := range slices.Chunk(text[len(text)-size*Elements(shape):], size) {
		if descr == "<f4" {
			data = append(data, float64(math.Float32frombits(binary.LittleEndian.Uint32(raw))))
		} else {
			data = append(data, float64(float16.Frombits(binary.LittleEndian.Uint16(raw)).Float32()))
		}
	}
	return data, shape, descr
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

// Open opens a backend until the test ends. It skips a test whose backend has no device here, or
// fails it on a CI machine.
func Open(t testing.TB, name string) *kernels.Device {
	t.Helper()
	dev := open(t, name)
	t.Cleanup(func() { must.Do(t, dev.Close()) })
	return dev
}

// NeedBackend skips or fails the test as Open does, and leaves no device open.
func NeedBackend(t *testing.T, name string) {
	t.Helper()
	must.Do(t, open(t, name).Close())
}

func open(t testing.TB, name string) *kernels.Device {
	t.Helper()
	dev, err := kernels.Open(name)
	if errors.Is(err, kernels.ErrNoDevice) && os.Getenv("CI") != "true" {
		t.Skipf("%s has no device here: %v", name, err)
	}
	must.Do(t, err)
	return dev
}

// OnCPU is a family of backends for backend.Register, which has no default device. A backend is what the function
// makes of a new one on the CPU.
type OnCPU func(cpu backend.Backend) backend.Backend

// Devices implements backend.Driver.
func (OnCPU) Devices() ([]backend.Info, error) { return nil, kernels.ErrNoDevice }

// Open implements backend.Driver.
func (f OnCPU) Open(string) (backend.Backend, error) {
	be, err := backend.Open("cpu")
	if err != nil {
		return nil, err
	}
	return f(be), nil
}
