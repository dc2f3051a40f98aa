package gpu

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/port"
	"github.com/seed90331342/attn/gpu/internal/queue"
	"github.com/seed90331342/attn/gpu/internal/tune"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// small returns a function that makes a call of 64 queries and keys of one head with
// preallocated outputs, and waits for it.
func small(t testing.TB, b *Backend) func() error {
	t.Helper()
	c := plain(t, b, 64, 64, 64)
	out := kernels.Result{O: c.O, LSE: c.LSE}
	call := prepare(t, b, c.Q, c.K, c.V, kernels.Options{})
	return func() error {
		if err := call.RunInto(t.Context(), out); err != nil {
			return err
		}
		return b.Wait(t.Context())
	}
}

// BenchmarkCallOverhead reports how much longer a call of 64 queries and keys takes than an empty dispatch of one
// workgroup (us-over-empty): medians from submission to end, measured in turns. The time includes the kernel.
func BenchmarkCallOverhead(b *testing.B) {
	be := open(b, Options{})
	call := small(b, be)
	if err := call(); err != nil { // compiles
		b.Fatal(err)
	}
	b.ReportAllocs()
	var calls, launches []time.Duration
	for b.Loop() {
		start := time.Now()
		check(b, call())
		calls = append(calls, time.Since(start))
		if len(calls)%100 == 1 {
			b.StopTimer()
			empty := must.Get(be.LaunchTime(b.Context()))(b)
			launches = append(launches, empty)
			b.StartTimer()
		}
	}
	median := func(d []time.Duration) float64 {
		slices.Sort(d)
		return float64(d[len(d)/2].Nanoseconds()) / 1e3
	}
	b.ReportMetric(median(launches), "us-empty")
	b.ReportMetric(median(calls)-median(launches), "us-over-empty")
}

// TestAllocationsOfACall checks that a warm call allocates only its plan: a few dozen small
// objects for any length, and none for submissions. The pure Go provider allocates more.
func TestAllocationsOfACall(t *testing.T) {
	if !strings.HasPrefix(Provider, "go-webgpu") {
		t.Skip("the pure Go library allocates for each submission")
	}
	b := open(t, Options{})
	call := small(t, b)
	many := testing.AllocsPerRun(50, func() {
		check(t, call())
	})
	t.Logf("%g allocations a call", many)
	if many > 40 {
		t.Errorf("%g allocations a call", many)
	}
}

// oneCommand counts dispatches, and submits one command of each submission.
type oneCommand struct {
	port.Device
	dispatches *int
}

func (d oneCommand) Submit(commands []port.Command, timed bool) (port.Ticket, error) {
	if !timed {
		for _, c := range commands {
			if c.Pipeline != nil {
				*d.dispatches++
			}
		}
		commands = commands[:min(len(commands), 1)]
	}
	return d.Device.Submit(commands, timed)
}

// TestOperationsOfManySequences counts the dispatches of many sequences of unequal lengths: a step of decoding has one for the splits
// of all, and one for their merges. So have packed sequences, and segments. Dropout depends on the number of a sequence, so that each
// has dispatches of its own. A call of many such makes the operations of one submission at a time: by the memory of the host at each submission, and by the operations that a cancelled call has made.
func TestOperationsOfManySequences(t *testing.T) {
	for _, x := range []struct {
		name            string
		sequences, rows int
		windowed, paged bool
		packed, odd     bool // odd: of unequal numbers of rows
		segments        bool
		lengths         []int // in place of rows
		want            int
	}{
		{name: "32 decoded", sequences: 32, rows: 1, want: 2},
		{name: "64 decoded", sequences: 64, rows: 1, want: 2},
		{name: "32 decoded with a window", sequences: 32, rows: 1, windowed: true, want: 2},
		{name: "64 decoded with a window", sequences: 64, rows: 1, windowed: true, want: 2},
		{name: "64 decoded from pages", sequences: 64, rows: 1, paged: true, want: 2},
		{name: "64 decoded from pages with a window", sequences: 64, rows: 1, windowed: true, paged: true, want: 2},
		{name: "64 prompts", sequences: 64, rows: 40, want: 1},
		{name: "64 prompts with a window", sequences: 64, rows: 40, windowed: true, want: 1},
		{name: "64 packed prompts", sequences: 64, rows: 40, packed: true, want: 1},
		{name: "packed prompts of 40, 17 and 5 tokens", lengths: []int{40, 17, 5}, sequences: 3, packed: true, want: 1},
		{name: "60 packed tokens and 4 prompts from pages", lengths: append(slices.Repeat([]int{1}, 60), 40, 33, 39, 28), sequences: 64, packed: true, paged: true, want: 3},
		{name: "200 packed prompts", sequences: 200, rows: 40, packed: true, odd: true, want: 1},
		{name: "200 packed prompts with a window", sequences: 200, rows: 40, packed: true, odd: true, windowed: true, want: 1},
		{name: "64 packed prompts from pages", sequences: 64, rows: 40, packed: true, odd: true, paged: true, want: 1},
		{name: "64 packed tokens from pages", sequences: 64, rows: 1, packed: true, paged: true, want: 2},
		{name: "32 segments", sequences: 32, rows: 40, segments: true, want: 1},
	} {
		t.Run(x.name, func(t *testing.T) {
			b, d := simulate(t, Options{Budget: emitBudget}, func() time.Duration { return 0 })
			defer b.Close()
			dispatches := 0
			b.dev.Port = oneCommand{d, &dispatches}
			const keys, pages, dim, kvHeads = 1024, 4, 64, 2
			q, k := backend.Shape{x.sequences, 2 * kvHeads, x.rows, dim}, backend.Shape{x.sequences, kvHeads, keys, dim}
			opt := kernels.Options{Causal: true}
			if x.windowed {
				opt.Window = &kernels.Window{Left: 300}
			}
			if x.paged {
				k[backend.Batch], k[backend.Seq] = pages*x.sequences, keys/pages
				opt.Pages = &kernels.Pages{Keys: keys}
			}
			for i := range x.sequences {
				n := keys - 13*i
				opt.KLen, opt.Offset = append(opt.KLen, n), append(opt.Offset, n-x.rows)
				if p := int32(pages * i); x.paged {
					opt.Pages.Table = append(opt.Pages.Table, []int32{p, p + 1, p + 2, p + 3})
				}
			}
			if x.packed || x.segments {
				cu, segments := make([]int, x.sequences+1), []int32(nil)
				for i := range x.sequences {
					cu[i+1] = cu[i] + x.rows
					if x.odd {
						cu[i+1] -= i % 8
					}
					if x.lengths != nil {
						cu[i+1] = cu[i] + x.lengths[i]
					}
					segments = append(segments, slices.Repeat([]int32{int32(i)}, x.rows)...)
				}
				q[backend.Batch], q[backend.Seq] = 1, cu[x.sequences]
				if opt.CuQ = cu; !x.paged {
					k, opt.KLen, opt.Offset = q, nil, nil
				}
				if x.segments {
					opt.CuQ, opt.QSegments = nil, [][]int32{segments}
				}
			}
			kv := alloc(t, b, backend.F16, k)
			call := prepare(t, b, alloc(t, b, backend.F16, q), kv, kv, opt)
			check(t, call.RunInto(t.Context(), kernels.Result{O: alloc(t, b, backend.F16, q)}))
			if dispatches != x.want {
				t.Errorf("%d dispatches, should be %d", dispatches, x.want)
			}
		})
	}
	const sequences, rows, most = 4000, 20, 128 // of them, of each, and dispatches of a submission
	b, dev := faulty(t, Options{})
	dev.Device = oneCommand{dev.Device, new(int)}
	made, choose := 0, b.choose
	b.choose = func(s tune.Shape) (tune.Variant, string) { // once for the one dispatch of a sequence
		made++
		return choose(s)
	}
	cu := make([]int, sequences+1)
	for i := range cu {
		cu[i] = rows * i
	}
	x := input(t, b, backend.Shape{1, 1, rows * sequences, 8})
	out := kernels.Result{O: alloc(t, b, backend.F32, x.Shape())}
	call := prepare(t, b, x, x, x, kernels.Options{CuQ: cu, Dropout: kernels.Dropout{P: 0.1}})
	check(t, call.RunInto(t.Context(), out)) // compiles, and leaves slices that later calls use
	if made != sequences {
		t.Fatalf("%d operations for %d sequences", made, sequences)
	}
	made = 0
	before, held, submitted := heap(), 0, 0
	dev.Watch(func(name string) {
		if name == "Submit" {
			if submitted++; submitted%16 == 0 {
				held = max(held, heap()-before)
			}
		}
	})
	check(t, call.RunInto(t.Context(), out))
	// The list of pinned operands; one unit, one output and three inputs of a sequence in lists that grow by less than twice; and up
	// to 8 KiB for an operation, its dispatch and its parameters.
	bound := sequences*int(unsafe.Sizeof(backend.Pinned{})+2*(unsafe.Sizeof(unit{})+unsafe.Sizeof(queue.Output{})+3*unsafe.Sizeof(dev))) + most*8<<10
	t.Logf("%d submissions, %d bytes of the host, %d are allowed", submitted, held, bound)
	if submitted < sequences/most || held > bound {
		t.Errorf("%d submissions, %d bytes of the host, %d are allowed", submitted, held, bound)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	made = 0
	dev.Watch(func(name string) {
		if name == "Submit" {
			cancel()
		}
	})
	must.Fail(t, "cancelled at the first submission", call.RunInto(ctx, out), context.Canceled)
	if made > most+1 {
		t.Errorf("cancelled at the first submission: %d operations, a submission has %d", made, most)
	}
	dev.Watch(nil)
}

// heap returns the bytes that Go's heap holds.
func heap() int {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int(m.HeapAlloc)
}

// resident returns the bytes of memory of the process, 0 where the system does not report it.
func resident() (bytes int) {
	data, _ := os.ReadFile("/proc/self/statm") // empty is no number
	var all, pages int
	if _, err := fmt.Sscan(string(data), &all, &pages); err != nil {
		return 0
	}
	return pages * os.Getpagesize()
}

// TestManyCalls makes 10,000 small calls, some with transfers, in two halves. After the second half the device holds
// what it held after the first, and the process has grown by no more than noise.
func TestManyCalls(t *testing.T) {
	calls := 10_000
	if testing.Short() {
		calls = 500
	}
	b, dev := faulty(t, Options{})
	x := input(t, b, backend.Shape{1, 1, 4, 8})
	var want []float32
	one := func(i int) {
		r := must.Get(kernels.NewDevice(b).Attention(t.Context(), x, x, x, kernels.Options{}))(t)
		defer r.Release()
		if i%50 != 0 {
			return
		}
		u := must.Get(b.Upload(t.Context(), host(t, backend.Shape{1, 1, 4, 8}, wave)))(t)
		u.Release()
		if got := floats(t, b, r.O); want == nil {
			want = got
		} else if !slices.Equal(got, want) {
			t.Fatalf("call %d gives another result", i)
		}
	}
	half := func() (live port.Live, used, rss int) {
		for i := range calls / 2 {
			one(i)
		}
		return dev.Live(), heap(), resident()
	}
	live, used, rss := half()
	lastLive, lastUsed, lastRSS := half()
	t.Logf("%d calls: %+v, %d, %d, then %+v, %d, %d", calls, live, used, rss, lastLive, lastUsed, lastRSS)
	if lastLive != live {
		t.Errorf("the device holds %+v, before %+v", lastLive, live)
	}
	if grown := lastUsed - used; grown > 1<<20 {
		t.Errorf("the heap grew by %d bytes", grown)
	}
	if grown := lastRSS - rss; grown > 8<<20 {
		t.Errorf("the process grew by %d bytes", grown)
	}
}
