package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sbinet/npyio/npy"
	"github.com/x448/float16"

	"github.com/seed90331342/attn/backend"
)

// attn runs the program and returns its exit code and what it printed.
func attn(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, err bytes.Buffer
	code = run(t.Context(), args, &out, &err)
	return code, out.String(), err.String()
}

// mustRun fails the test unless the program succeeds without a word on standard
// error.
func mustRun(t *testing.T, args ...string) (stdout string) {
	t.Helper()
	code, stdout, stderr := attn(t, args...)
	if code != 0 || stderr != "" {
		t.Fatalf("attn %s: exit code %d, %s", strings.Join(args, " "), code, stderr)
	}
	return stdout
}

// wantFailure checks what every failure must be: an exit code, one line that
// holds all of want, nothing on standard output, no stack.
func wantFailure(t *testing.T, code int, stdout, stderr string, want ...string) {
	t.Helper()
	if code == 0 {
		t.Errorf("exit code 0, stdout %q", stdout)
	}
	if stdout != "" {
		t.Errorf("stdout is %q, should be empty", stdout)
	}
	if strings.Count(stderr, "\n") != 1 || !strings.HasPrefix(stderr, "attn: ") || !strings.HasSuffix(stderr, "\n") {
		t.Errorf("stderr is %q, should be one line that starts with attn:", stderr)
	}
	for _, w := range want {
		if !strings.Contains(stderr, w) {
			t.Errorf("stderr is %q, should say %q", stderr, w)
		}
	}
	for _, trace := range []string{"goroutine", "panic", ".go:", "internal error"} {
		if strings.Contains(stderr, trace) {
			t.Errorf("stderr %q holds %q", stderr, trace)
		}
	}
}

// files lists a folder, hidden files too.
func files(t *testing.T, dir string) []string {
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

// rawNPY builds a file from a header dict and data, so that either can lie.
func rawNPY(dict string, data []byte) []byte {
	dict += "\n"
	head := append([]byte("\x93NUMPY\x01\x00"), byte(len(dict)), byte(len(dict)>>8))
	return append(append(head, dict...), data...)
}

func dict(descr string, fortran bool, shape ...int) string {
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

// encode writes numbers as a numpy type.
func encode(descr string, data []float64) []byte {
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

func elements(shape []int) int {
	n := 1
	for _, l := range shape {
		n *= l
	}
	return n
}

// normal draws numbers that every type holds exactly: multiples of 1/16.
func normal(seed uint64, n int) []float64 {
	rng := rand.New(rand.NewPCG(seed, 0))
	data := make([]float64, n)
	for i := range data {
		data[i] = math.Round(rng.NormFloat64()*16) / 16
	}
	return data
}

func writeFile(t *testing.T, dir, name string, content []byte) string {
	t.Helper()
	path := filepath.Join(dir, name)
	if err := os.WriteFile(path, content, 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

// save writes an array and returns its path.
func save(t *testing.T, dir, name, descr string, data []float64, shape ...int) string {
	t.Helper()
	return writeFile(t, dir, name, rawNPY(dict(descr, false, shape...), encode(descr, data)))
}

// load reads an f4 or f2 array with another reader than the program's own.
func load(t *testing.T, path string) (data []float64, shape []int, descr string) {
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
	n := elements(r.Header.Descr.Shape)
	for i := range n {
		data = append(data, float64(float16.Frombits(binary.LittleEndian.Uint16(raw[len(raw)-2*(n-i):])).Float32()))
	}
	return data, r.Header.Descr.Shape, descr
}

// near checks numbers against a reference.
func near(t *testing.T, what string, got, want []float64, tolerance float64) {
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

// hookDriver is a family of backends for tests: the CPU's, with a hook in front
// of each fused call.
type hookDriver struct {
	before func(ctx context.Context, c *backend.Call) error
	after  func(c *backend.Call)
}

// Devices implements backend.Driver.
func (hookDriver) Devices() ([]backend.Info, error) { return nil, backend.ErrNoDevice }

// Open implements backend.Driver.
func (d hookDriver) Open(string) (backend.Backend, error) {
	be, err := backend.Open("cpu")
	return hooked{be, d}, err
}

type hooked struct {
	backend.Backend
	hookDriver
}

// Attention implements backend.Backend.
func (h hooked) Attention(ctx context.Context, c *backend.Call) error {
	if h.before != nil {
		if err := h.before(ctx, c); err != nil {
			return err
		}
	}
	err := h.Backend.Attention(ctx, c)
	if h.after != nil {
		h.after(c)
	}
	return err
}
