package cpu

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime/metrics"
	"syscall"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels/kernelstest"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

const (
	peakChild = "ATTN_CPU_PEAK_CHILD" // set in the process that TestPeakMemory measures
	peakDim   = 64
	mib       = 1 << 20
)

// TestPeakMemory runs a fused call over one head in a process of its own and
// reads how much memory that process had at most: all of it, code and runtime
// included, fits into inputs + outputs + 64 MiB.
func TestPeakMemory(t *testing.T) {
	if child := os.Getenv(peakChild); child != "" {
		var seq, left int
		must.Get(fmt.Sscan(child, &seq, &left))(t)
		fmt.Printf("peak %d\n", peakOfThisProcess(t, seq, left))
		return
	}
	if raceEnabled {
		t.Skip("the race detector multiplies memory, so its peak is meaningless")
	}
	// A full call over 65,536 keys takes 10 seconds, and a minute on the gonum tier. With a window, the last 64 queries
	// see all keys; the memory of a call depends on neither, as its plan shows.
	vector := !open(t, Options{}).kernels.OnlyKeyLanes
	for _, c := range []struct {
		name, tier string
		seq, left  int
		run        bool
	}{
		{"65,536 full", "", 65536, backend.Unbounded, vector && !testing.Short()},
		{"65,536 window 1,024", "", 65536, 1023, vector},
		{"16,384 window 1,024, gonum", tierGonum, 16384, 1023, true},
		{"65,536 window 1,024, gonum", tierGonum, 65536, 1023, !testing.Short()},
		{"1,048,576 window 4,096", "", 1 << 20, 4095, vector && !testing.Short()},
	} {
		if c.run {
			t.Run(c.name, func(t *testing.T) { testPeakMemory(t, c.tier, c.seq, c.left) })
		}
	}
}

func testPeakMemory(t *testing.T, tier string, seq, left int) {
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestPeakMemory$", "-test.count=1")
	cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%d %d", peakChild, seq, left))
	if tier != "" {
		cmd.Env = append(cmd.Env, tierEnv+"="+tier)
	}
	out, err := cmd.CombinedOutput()
	if errors.Is(err, syscall.ENOEXEC) {
		t.Skip("the system cannot start this binary, which runs under an emulator")
	}
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	var peak int64
	if _, err := fmt.Sscanf(string(out), "peak %d", &peak); err != nil {
		t.Fatalf("%v in %q", err, out)
	}
	operands := int64(4*seq*peakDim*4 + seq*4) // q k v o, lse
	t.Logf("peak %.1f MiB, operands %.1f MiB", float64(peak)/mib, float64(operands)/mib)
	if peak > operands+64*mib {
		t.Errorf("peak is %.1f MiB in addition to the operands, 64 are allowed", float64(peak-operands)/mib)
	}
}

// peakOfThisProcess makes the calls and returns the process's largest resident
// size in bytes, or the memory that the runtime has mapped where the system does not
// report it.
func peakOfThisProcess(t *testing.T, seq, left int) int64 {
	be, c := open(t, Options{}), plain(t, 1, seq, peakDim)
	c.LSE = alloc(t, backend.Shape{1, 1, seq, 1})
	everything := *c
	c.Visible.Left = left
	if left != backend.Unbounded {
		c.Visible.Right = 0
	}
	a := must.Get(be.Plan(t.Context(), c))(t)
	b := must.Get(be.Plan(t.Context(), &everything))(t)
	if a.Scratch > b.Scratch || a.Scratch > 4*mib*int64(be.threads()) {
		t.Fatalf("a window takes %d bytes of scratch, no window %d; at most 4 MiB a thread are expected", a.Scratch, b.Scratch)
	}
	must.Do(t, be.Attention(t.Context(), c))
	if left != backend.Unbounded {
		for _, x := range []*backend.Tensor{&everything.Q, &everything.O, &everything.LSE} {
			*x = cut(t, *x, backend.Seq, seq-64, seq)
		}
		must.Do(t, be.Attention(t.Context(), &everything))
	}
	if status, err := os.ReadFile("/proc/self/status"); err == nil {
		if _, line, ok := bytes.Cut(status, []byte("VmHWM:")); ok {
			var kib int64
			if _, err := fmt.Sscanf(string(line), "%d kB", &kib); err == nil {
				return kib * 1024
			}
		}
	}
	total := []metrics.Sample{{Name: "/memory/classes/total:bytes"}}
	metrics.Read(total)
	return int64(total[0].Value.Uint64())
}

// TestAllocations shows that a fused call with preallocated outputs does not allocate, and that the allocations of a stage
// depend on its threads, not on the number of its tiles or rows.
func TestAllocations(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector empties pools at random")
	}
	eachTier(t, func(t *testing.T, tier string) {
		for _, threads := range []int{1, 2} {
			be := open(t, Options{Threads: threads, Tier: tier})
			for _, shape := range [][2]int{{200, 200}, {1, 5000}, {100, 3000}, {700, 1500}} {
				q, k := random(t, 1, backend.Shape{1, 2, shape[0], 24}), random(t, 2, backend.Shape{1, 1, shape[1], 24})
				c := &backend.Call{Q: q, K: k, V: k, O: alloc(t, q.Shape()), LSE: alloc(t, backend.Shape{1, 2, shape[0], 1}),
					Problem: backend.Problem{Scale: 1, Softcap: 2, Visible: backend.Visibility{Offset: 3, Left: 2000}}}
				s := alloc(t, backend.Shape{1, 2, shape[0], shape[1]})
				for _, op := range []struct {
					name string
					most float64 // a collection in between may empty the pool: four allocations a thread
					call func(ctx context.Context) error
				}{
					{"attention", 0, func(ctx context.Context) error { return be.Attention(ctx, c) }},
					{"qk", 8 + 8*float64(threads), func(ctx context.Context) error { return be.QK(ctx, s, c.Q, c.K) }},
					{"softmax", 8 + 8*float64(threads), func(ctx context.Context) error { return be.Softmax(ctx, s, c.LSE, &c.Problem) }},
					{"pv", 8 + 8*float64(threads), func(ctx context.Context) error { return be.PV(ctx, c.O, s, c.V) }},
				} {
					n := testing.AllocsPerRun(10, func() { must.Do(t, op.call(t.Context())) })
					if n > op.most {
						t.Errorf("%s, %d threads, %d queries and %d keys: %g allocations", op.name, threads, shape[0], shape[1], n)
					}
				}
			}
		}
	})
}

// TestAllocTooLarge shows that memory that the machine does not have is an
// error: Go itself would end the program.
func TestAllocTooLarge(t *testing.T) {
	be := open(t, Options{})
	for _, shape := range []backend.Shape{{1 << 20, 1 << 10, 1 << 10, 1 << 10}, {1, 1, 1 << 24, 1 << 24}} {
		must.Fail(t, fmt.Sprintf("shape %v", shape), must.Err(be.Alloc(t.Context(), backend.F32, shape)), backend.ErrMemory)
	}
	for _, shape := range []backend.Shape{{-1, 1, 1, 1}, {1 << 30, 1 << 30, 1 << 30, 1}} {
		must.Fail(t, fmt.Sprintf("shape %v", shape), must.Err(be.Alloc(t.Context(), backend.F32, shape)), backend.ErrShape)
	}
}

// TestOutOfMemory makes each request for memory fail, on each tier.
func TestOutOfMemory(t *testing.T) {
	eachTier(t, func(t *testing.T, tier string) {
		kernelstest.RunOutOfMemory(t, open(t, Options{Tier: tier, Threads: 2}), kernelstest.Memory{Fail: backend.FailMemory})
	})
}
