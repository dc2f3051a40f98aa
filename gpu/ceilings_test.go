package gpu

import (
	"context"
	"errors"
	"testing"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/gpu/internal/cut"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/shaders"
)

// ones returns a tensor of n ones on the device.
func ones(t *testing.T, be backend.Backend, n int) backend.Tensor {
	t.Helper()
	data := make([]float32, n)
	for i := range data {
		data[i] = 1
	}
	x, err := kernels.NewDevice(be).FromFloat32(t.Context(), backend.F32, data, backend.Shape{1, 1, 1, n})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(x.Release)
	return x
}

// downloaded returns the elements of x.
func downloaded(t *testing.T, be backend.Backend, x backend.Tensor) []float32 {
	t.Helper()
	host, err := backend.AllocHost(backend.F32, x.Shape())
	if err == nil {
		err = be.Download(t.Context(), host, x)
	}
	if err != nil {
		t.Fatal(err)
	}
	all, err := host.Float32s()
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// runSteps runs probes and waits for them.
func runSteps(t *testing.T, b *Backend, steps ...probe) {
	t.Helper()
	r := b.dev.NewRunner(t.Context())
	var err error
	for _, s := range steps {
		if err == nil {
			err = s.add(r)
		}
	}
	if err == nil {
		err = r.Flush()
	}
	if r.Finish(err); err != nil {
		t.Fatal(err)
	}
}

// plausible is from less than a slow disk's rate to more than all the registers of
// the largest GPU have, a second.
func plausible(rate float64) bool { return rate > 1e6 && rate < 1e16 }

func TestCeilings(t *testing.T) {
	b := open(t, Options{})
	defer b.Close()
	all, err := b.Ceilings(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"copy", "workgroup memory", "upload", "download"}
	if len(all) != len(want) {
		t.Fatalf("%+v", all)
	}
	for i, c := range all {
		if c.Name != want[i] || !plausible(c.BytesPerSecond) {
			t.Errorf("%+v, want %s", c, want[i])
		}
		t.Logf("%s %.3g GB/s", c.Name, c.BytesPerSecond/1e9)
	}
	launch, err := b.LaunchTime(t.Context())
	if err != nil || launch <= 0 || launch.Seconds() > 1 {
		t.Errorf("launch %v, %v", launch, err)
	}
	peak, err := b.PeakFLOPS(t.Context())
	if err != nil || !plausible(peak) {
		t.Errorf("peak %v, %v", peak, err)
	}
	x, y := ones(t, b, 1<<21), ones(t, b, 1000)
	read, err := b.ReadBandwidth(t.Context(), x, backend.Tensor{}, y)
	if err != nil || !plausible(read) {
		t.Errorf("reads %v bytes/s, %v", read, err)
	}
	t.Logf("launch %v, peak %.3g GFLOP/s, read %.3g GB/s", launch, peak/1e9, read/1e9)
	if rate, err := b.ReadBandwidth(t.Context(), y); rate != 0 || err != nil {
		t.Errorf("4 KB: %v, %v", rate, err)
	}
	elsewhere := cpu.New(cpu.Options{})
	defer elsewhere.Close()
	if _, err := b.ReadBandwidth(t.Context(), ones(t, elsewhere, 4)); !errors.Is(err, backend.ErrDevice) {
		t.Errorf("a tensor that lives elsewhere: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := b.Ceilings(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}

// The rates count what the kernels do: that many reads and copies, no fewer.
func TestProbesDoWhatTheyCount(t *testing.T) {
	b := open(t, Options{Limits: gputypes.Limits{MaxStorageBufferBindingSize: 128 << 10, MaxComputeWorkgroupsPerDimension: 31}})
	defer b.Close()
	run := func(steps ...probe) { runSteps(t, b, steps...) }
	read := func(x backend.Tensor) []float32 { return downloaded(t, b, x) }
	sum := func(x backend.Tensor) (total float64) {
		for _, v := range read(x) {
			total += float64(v)
		}
		return total
	}

	// 5.5 windows of whole chunks, so two dispatches, each three times.
	const rounds, groups, elements = 3, 31, 11 * (64 << 10) / 4
	x := ones(t, b, elements)
	spans := b.spans(x)
	if len(spans) != 6 {
		t.Fatalf("%d windows", len(spans))
	}
	total := 0.0
	for _, in := range [][]cut.Window{spans[:4], spans[4:]} {
		out := ones(t, b, groups*probeThreads*4)
		part := newReadPart(in, cut.Window{Buf: cut.StoreOf(out).Parts[0], Size: uint64(out.Bytes())})
		run(part.step(rounds, groups))
		total += sum(out)
	}
	if total != rounds*elements {
		t.Errorf("%v elements were read, want %v", total, rounds*elements)
	}

	const some, laps = 15, 2
	from, to := ones(t, b, laps*some*probeThreads*moveBytes/4), ones(t, b, laps*some*probeThreads*moveBytes/4)
	zero, err := b.Alloc(t.Context(), backend.F32, to.Shape())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(zero.Release)
	whole := func(x backend.Tensor) cut.Window {
		return cut.Window{Buf: cut.StoreOf(x).Parts[0], Size: uint64(x.Bytes())}
	}
	copying := func(from, to backend.Tensor, rounds int) probe {
		return probe{shaders.Copy, []cut.Window{whole(from), whole(to)}, &shaders.CopyParams{Rounds: rounds, Laps: laps, Threads: some * probeThreads}, some}
	}
	run(probe{shaders.Banks, []cut.Window{whole(from)}, &shaders.BanksParams{Rounds: 5}, some})
	for i, got := range read(from)[:4*probeThreads] {
		want := 0
		for r := range 5 {
			at := (i/4 + r) % 64
			want += 4*at + 0 + 1 + 2 + 3
		}
		if int(got) != want {
			t.Fatalf("the loads of thread %d add up to %v, want %v", i/4, got, want)
		}
	}
	run(copying(from, zero, 1), copying(from, to, 2))
	half, all := read(zero), read(to)
	for i, want := range read(from) {
		if all[i] != want || i < len(all)/2 && half[i] != want {
			t.Fatalf("element %d was copied as %v and %v, want %v", i, half[i], all[i], want)
		}
	}
}
