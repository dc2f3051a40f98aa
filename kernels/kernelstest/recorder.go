package kernelstest

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/x448/float16"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/safetensors"
)

var updateRecordings = flag.Bool("update-recordings", false, "write the recorded queries, keys and values instead of comparing them")

// Recorder is a backend that keeps the operands of attention calls. Those of trained models are cases of the
// suite: random numbers have no outliers, and no keys that many rows attend to.
type Recorder struct {
	*poisoned
	t     testing.TB
	calls [][3]operand // q, k, v
}

// Record returns a device that records the calls on be. The test closes both.
func Record(t testing.TB, be backend.Backend) (*kernels.Device, *Recorder) {
	h := Harness{}
	r := &Recorder{poisoned: h.underTest(t, be).Backend().(*poisoned), t: t}
	dev := kernels.NewDevice(r)
	t.Cleanup(func() { dev.Close() })
	return dev, r
}

// Attention implements backend.Backend.
func (r *Recorder) Attention(ctx context.Context, calls ...*backend.Call) error {
	for _, c := range calls {
		var call [3]operand
		for i, x := range []backend.Tensor{c.Q, c.K, c.V} {
			if lens := c.Visible.KLen; i > 0 && lens != nil {
				var err error
				if x, err = x.Slice(backend.Seq, 0, lens[0]); err != nil {
					r.t.Fatal(err)
				}
			}
			data, err := kernels.NewDevice(r.Backend).ToFloat32(ctx, x)
			if err != nil {
				r.t.Fatal(err)
			}
			call[i] = operand{x.Shape(), x.DType(), data}
		}
		r.calls = append(r.calls, call)
	}
	return r.poisoned.Attention(ctx, calls...)
}

// Check compares the first recorded calls with the tensors name.q, name.k and name.v of a file of testdata/models. They
// are stored in float16; other CPUs and tiers yield numbers that differ in the last bits of float32.
func (r *Recorder) Check(file string, names []string) {
	r.t.Helper()
	if len(r.calls) < len(names) {
		r.t.Fatalf("%d calls are recorded, there should be %d", len(r.calls), len(names))
	}
	tensors := map[string]operand{}
	for i, name := range names {
		for j, operand := range []string{"q", "k", "v"} {
			tensors[name+"."+operand] = r.calls[i][j]
		}
	}
	raw := r.File(file, encodeTensors(tensors))
	h, err := safetensors.ReadHeader(bytes.NewReader(raw), int64(len(raw)))
	if err != nil {
		r.t.Fatal(err)
	}
	for name, want := range tensors {
		if err := compareStored(raw, h, name, want); err != nil {
			r.t.Errorf("%s is stale, run the test with -update-recordings: %v", file, err)
		}
	}
}

// File returns the content of a file of testdata/models, which -update-recordings writes.
func (r *Recorder) File(name string, content []byte) []byte {
	r.t.Helper()
	root := ".."
	for range 5 { // tests run in the folder of their package
		if _, err := os.Stat(filepath.Join(root, "go.mod")); err == nil {
			break
		}
		root = filepath.Join(root, "..")
	}
	path := filepath.Join(root, "kernels", "kernelstest", "testdata", "models", name)
	if *updateRecordings {
		if err := os.WriteFile(path, content, 0o644); err != nil {
			r.t.Fatal(err)
		}
	}
	stored, err := os.ReadFile(path)
	if err != nil {
		r.t.Fatal(err)
	}
	return stored
}

// compareStored compares a tensor of a file.
func compareStored(raw []byte, h *safetensors.Header, name string, want operand) error {
	stored, err := h.Tensor(name)
	if err != nil {
		return err
	}
	got := make([]float32, stored.Count)
	stored.Float32s(got, raw[stored.Start:])
	if !slices.Equal(stored.Shape, want.shape[:]) {
		return fmt.Errorf("%s has shape %d, should be %d", name, stored.Shape, want.shape)
	}
	largest := 0.
	for _, x := range want.data {
		largest = max(largest, math.Abs(float64(x)))
	}
	for i, x := range want.data {
		if tol := 1e-4*largest + math.Abs(float64(x))*0x1p-11; !(math.Abs(float64(got[i]-x)) <= tol) {
			return fmt.Errorf("%s: element %d is %v, should be %v", name, i, got[i], x)
		}
	}
	return nil
}

// encodeTensors returns a .safetensors file.
func encodeTensors(tensors map[string]operand) []byte {
	type entry struct {
		DType   string        `json:"dtype"`
		Shape   backend.Shape `json:"shape"`
		Offsets [2]int        `json:"data_offsets"`
	}
	header := map[string]entry{}
	var data []byte
	for _, name := range slices.Sorted(maps.Keys(tensors)) {
		x, from := tensors[name], len(data)
		for _, v := range x.data {
			data = binary.LittleEndian.AppendUint16(data, float16.Fromfloat32(v).Bits())
		}
		header[name] = entry{"F16", x.shape, [2]int{from, len(data)}}
	}
	text, _ := json.Marshal(header) // of strings and numbers, cannot fail
	return slices.Concat(binary.LittleEndian.AppendUint64(nil, uint64(len(text))), text, data)
}
