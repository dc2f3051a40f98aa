package gpu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
	"golang.org/x/sys/unix"
)

// vulkanFaults are the faults of testdata/vkfault/layer.c, numbered from 1, with the errors
// that a session may end with. Positions are those of the calls that fail, up to most.
var vulkanFaults = []struct {
	name        string
	want        []error // nil is the right result
	short, most int     // positions
}{
	{"oom", []error{nil, backend.ErrMemory}, 8, 60},
	{"full", []error{nil, backend.ErrMemory}, 8, 60},
	{"lost", []error{backend.ErrDeviceLost}, 3, 30},
	{"gone", []error{backend.ErrDeviceLost}, 3, 20},
	{"late", []error{nil}, 1, 30},
	{"host", []error{nil, backend.ErrMemory, backend.ErrDeviceLost}, 12, 200},
	{"hang", []error{context.Canceled}, 2, 30},
}

// faultPage is the memory that the layer shares with a test.
type faultPage struct{ kind, position, calls, fired, released, orphans atomic.Int64 }

func (p *faultPage) arm(kind, position int) {
	p.kind.Store(0)
	for _, x := range []*atomic.Int64{&p.calls, &p.fired, &p.released, &p.orphans} {
		x.Store(0)
	}
	p.position.Store(int64(position))
	p.kind.Store(int64(kind))
}

func (p *faultPage) disarm() {
	p.released.Store(1)
	p.kind.Store(0)
}

const (
	faultPageEnv = "ATTN_VKFAULT"
	faultEnv     = "ATTN_VKFAULT_SWEEP" // kind, first position, end, whether a program opens the devices
)

// TestVulkanFaults makes Vulkan itself fail, below the WebGPU library: each fault at each of the first calls of a
// session with several submissions. A session ends with the right result or the right error, in time, and so does the
// next one. It runs in a child process, which a library may abort.
func TestVulkanFaults(t *testing.T) {
	if os.Getenv(faultEnv) != "" {
		sweepFaults(t)
		return
	}
	open(t, Options{}).Close()
	gcc, err := exec.LookPath("gcc")
	if err != nil {
		t.Skipf("needs gcc to build a Vulkan layer: %v", err)
	}
	dir := t.TempDir()
	layer := filepath.Join(dir, "layer.so")
	if out, err := exec.CommandContext(t.Context(), gcc, "-shared", "-fPIC", "-fvisibility=hidden", "-O1", "-o", layer, filepath.Join("testdata", "vkfault", "layer.c")).CombinedOutput(); err != nil {
		t.Skipf("needs Vulkan's headers (libvulkan-dev) to build a layer: %v\n%.300s", err, out)
	}
	manifest := fmt.Sprintf(`{"file_format_version": "1.1.0", "layer": {"name": "VK_LAYER_ATTN_fault", "type": "GLOBAL", "library_path": %q,
		"api_version": "1.3.0", "implementation_version": "1", "description": "faults for tests"}}`, layer)
	check(t, os.WriteFile(filepath.Join(dir, "layer.json"), []byte(manifest), 0o600))
	for i := range 2 * len(vulkanFaults) {
		kind, shared := i%len(vulkanFaults), i >= len(vulkanFaults)
		f := vulkanFaults[kind]
		name := f.name
		if shared {
			name += " on a program's device"
		}
		t.Run(name, func(t *testing.T) {
			if f.name == "hang" { // two children that wait
				t.Parallel()
			}
			page := filepath.Join(dir, fmt.Sprint("page", i))
			check(t, os.WriteFile(page, make([]byte, os.Getpagesize()), 0o600))
			end := f.most
			if testing.Short() || shared {
				end = f.short
			}
			outcomes, tried := map[string]int{}, 0
			for first := 0; first < end; {
				cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestVulkanFaults$")
				cmd.Env = append(os.Environ(), "VK_LAYER_PATH="+dir, "VK_INSTANCE_LAYERS=VK_LAYER_ATTN_fault", faultPageEnv+"="+page,
					fmt.Sprintf("%s=%d %d %d %t", faultEnv, kind+1, first, end, shared))
				out, err := cmd.CombinedOutput()
				ended := false
				for line := range strings.Lines(string(out)) {
					if rest, ok := strings.CutPrefix(line, "outcome: "); ok {
						outcomes[strings.TrimSpace(rest)]++
						tried++
						first++
					}
					ended = ended || strings.HasPrefix(line, "ended")
				}
				if err == nil && ended {
					break
				}
				t.Errorf("position %d: %v\n%s", first, err, out[max(len(out)-6000, 0):])
				outcomes["process ended"]++
				first++
			}
			t.Logf("%d positions: %v", tried, outcomes)
			if tried == 0 {
				t.Error("no call was made to fail")
			}
		})
	}
}

// sweepFaults runs in the child process.
func sweepFaults(t *testing.T) {
	var kind, first, end int
	var shared bool
	_, err := fmt.Sscan(os.Getenv(faultEnv), &kind, &first, &end, &shared)
	check(t, err)
	// Devices of the program are not released: go-webgpu ends the process when that waits for a lost one.
	device := func() (s *Shared) {
		if shared {
			var err error
			s, err = OpenProgram()
			check(t, err)
		}
		return s
	}
	file := must.Get(os.OpenFile(os.Getenv(faultPageEnv), os.O_RDWR, 0))(t)
	data := must.Get(unix.Mmap(int(file.Fd()), 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED))(t)
	page := (*faultPage)(unsafe.Pointer(&data[0]))
	page.disarm() // an earlier process may have ended while a fault was armed
	want := faultSession(nil, t.Context(), device())
	if want.err != nil {
		t.Fatal(want.err)
	}
	want.b.Close()
	f := vulkanFaults[kind-1]
	for position := first; position < end; position++ {
		late := time.AfterFunc(2*time.Minute, func() { panic("position " + strconv.Itoa(position) + ": no end in 2 minutes") })
		ctx, cancel := context.WithCancel(t.Context())
		program := device()
		page.arm(kind, position)
		if f.name == "hang" {
			go func() {
				for page.fired.Load() == 0 && ctx.Err() == nil {
					time.Sleep(time.Millisecond)
				}
				cancel()
			}()
		}
		got := faultSession(nil, ctx, program)
		fired := page.fired.Load() != 0
		page.disarm()
		cancel()
		if !fired {
			if got.err != nil || !slices.Equal(got.out, want.out) {
				t.Errorf("position %d: nothing failed, %v", position, got.err)
			}
			position = end
		} else {
			i := slices.IndexFunc(f.want, func(e error) bool { return e == nil && got.err == nil || e != nil && errors.Is(got.err, e) })
			if i < 0 {
				t.Errorf("position %d: %v, want %v", position, got.err, f.want)
			} else if got.err == nil && !slices.Equal(got.out, want.out) {
				t.Errorf("position %d: another result", position)
			} else {
				fmt.Printf("outcome: %v\n", f.want[i])
			}
			if n := page.orphans.Load(); n > 0 {
				t.Errorf("position %d: %d devices have no instance any more", position, n)
			}
			if got.b != nil {
				next, lost := faultSession(got.b, t.Context(), nil), errors.Is(got.err, backend.ErrDeviceLost)
				if lost && !errors.Is(next.err, backend.ErrDeviceLost) || !lost && (next.err != nil || !slices.Equal(next.out, want.out)) {
					t.Errorf("position %d, %v: afterwards %v", position, got.err, next.err)
				}
			}
		}
		if got.b != nil {
			got.b.Close()
		}
		late.Stop()
	}
	fmt.Println("ended")
}

type faultResult struct {
	b   *Backend
	out []float32
	err error
}

// faultSession runs one attention call of several submissions: on b, or on a device of its own or of a program.
func faultSession(b *Backend, ctx context.Context, program *Shared) (r faultResult) {
	const sq, sk, d = 16, 2048, 64 // 8 MFLOP
	if r.b = b; b == nil {
		if r.b, r.err = Open("", Options{MaxWork: 2e6, Shared: program}); r.err != nil {
			return r
		}
	}
	u := uploads{b: r.b, ctx: ctx}
	defer u.release()
	for range 2 { // with memory of their own: the library has other tensors share some
		x, err := r.b.Alloc(ctx, backend.F32, backend.Shape{1, 1, 1 << 16, 1 << 9})
		if r.err = err; err != nil {
			return r
		}
		u.have = append(u.have, x)
	}
	up := func(rows int) backend.Tensor { return u.up(backend.Shape{1, 1, rows, d}) }
	q, k, v, o := up(sq), up(sk), up(sk), up(sq)
	if r.err = u.err; r.err != nil {
		return r
	}
	if r.err = r.b.Attention(ctx, &backend.Call{Q: q, K: k, V: v, O: o, Problem: backend.Problem{Scale: 1, Visible: backend.Everything()}}); r.err != nil {
		return r
	}
	r.out = make([]float32, sq*d)
	h, err := backend.Host(r.out, backend.F32, o.Shape())
	if r.err = err; err == nil {
		r.err = r.b.Download(ctx, h, o)
	}
	return r
}
