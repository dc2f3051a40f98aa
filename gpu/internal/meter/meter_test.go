package meter

import (
	"cmp"
	"encoding/binary"
	"errors"
	"math"
	"os"
	"testing"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/cut"
	"github.com/seed90331342/attn/gpu/internal/port"
	"github.com/seed90331342/attn/gpu/internal/port/libraries"
	"github.com/seed90331342/attn/gpu/internal/queue"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// open opens the first adapter, with the limits that are not zero.
func open(t testing.TB, lower gputypes.Limits) *queue.Device {
	t.Helper()
	adapters, err := libraries.Adapters("")
	if errors.Is(err, port.ErrNoAdapter) && os.Getenv("CI") != "true" {
		t.Skipf("needs a WebGPU adapter (CI=true makes that a failure): %v", err)
	}
	must.Do(t, err)
	for _, a := range adapters {
		defer a.Release()
	}
	limits := adapters[0].Limits()
	limits.MaxStorageBufferBindingSize = cmp.Or(lower.MaxStorageBufferBindingSize, limits.MaxStorageBufferBindingSize)
	limits.MaxComputeWorkgroupsPerDimension = cmp.Or(lower.MaxComputeWorkgroupsPerDimension, limits.MaxComputeWorkgroupsPerDimension)
	dev := must.Get(adapters[0].Open(limits))(t)
	t.Cleanup(func() { _ = dev.Close() })
	return must.Get(queue.New(dev, "gpu", backend.CPU, queue.Config{}))(t)
}

// filled returns the memory of n elements of a value.
func filled(t *testing.T, d *queue.Device, n int, value float32) *cut.Store {
	t.Helper()
	data := make([]byte, 0, 4*n)
	for range n {
		data = binary.LittleEndian.AppendUint32(data, math.Float32bits(value))
	}
	s, free, err := d.Alloc(t.Context(), uint64(len(data)))
	must.Do(t, err)
	t.Cleanup(free)
	must.Do(t, d.Write(t.Context(), s, 0, data))
	return s
}

// elements downloads the first n elements of s.
func elements(t *testing.T, d *queue.Device, s *cut.Store, n int) []float32 {
	t.Helper()
	data := make([]byte, 4*n)
	must.Do(t, d.Read(t.Context(), s, 0, data))
	all := make([]float32, n)
	for i := range all {
		all[i] = math.Float32frombits(binary.LittleEndian.Uint32(data[4*i:]))
	}
	return all
}

// The rate counts what the kernel does: that many reads, no fewer.
func TestReadsWhatItCounts(t *testing.T) {
	d := open(t, gputypes.Limits{MaxStorageBufferBindingSize: 128 << 10, MaxComputeWorkgroupsPerDimension: 31})
	// 5.5 windows of whole chunks are two dispatches, each three times.
	const rounds, groups, count, sums = 3, 31, 11 * (64 << 10) / 4, 31 * probeThreads * 4
	x := must.Get(backend.NewTensor(backend.NewMemory(nil, "gpu", 4*count, filled(t, d, count, 1), nil), backend.F32, backend.Shape{1, 1, 1, count}))(t)
	windows := spans(d, x)
	if len(windows) != 6 {
		t.Fatalf("%d windows", len(windows))
	}
	total := 0.0
	for _, in := range [][]cut.Window{windows[:4], windows[4:]} {
		out := filled(t, d, sums, 1)
		r := d.NewRunner(t.Context())
		err := read(r, in, cut.Window{Buf: out.Parts[0], Size: 4 * sums}, groups, rounds)
		if err == nil {
			err = r.Flush()
		}
		if r.Finish(err); err != nil {
			t.Fatal(err)
		}
		for _, v := range elements(t, d, out, sums) {
			total += float64(v)
		}
	}
	if total != rounds*count {
		t.Errorf("%v elements were read, want %v", total, rounds*count)
	}
}
