package main

import (
	"bytes"
	"io"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/seed90331342/attn/cmd/internal/cli/clitest"
	"github.com/seed90331342/attn/cmd/internal/flags"
	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// TestTrain trains on different numbers of threads: the problem is solved, and all losses have
// the same bits. Without learning the loss is that of a guess.
func TestTrain(t *testing.T) {
	var first []float64
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(7)) // more threads would not compute
	counts := []int{1, 3, 1, 2, 7}
	if testing.Short() {
		counts = counts[:2]
	}
	for _, threads := range counts {
		dev := kernels.NewDevice(cpu.New(cpu.Options{Threads: threads}))
		defer dev.Close()
		losses, solved, err := train(t.Context(), dev, 1, 400, io.Discard)
		if err != nil || !solved {
			t.Fatalf("%d threads: solved %v after %d steps, %v", threads, solved, len(losses), err)
		}
		if first == nil {
			first = losses
		}
		if !slices.Equal(first, losses) {
			t.Errorf("%d threads: losses differ from those of one thread", threads)
		}
	}
	if guess := math.Log(symbols); first[0] < guess-0.5 || first[len(first)-1] > guess/10 {
		t.Errorf("the loss falls from %v to %v, a guess has %v", first[0], first[len(first)-1], guess)
	}
}

// TestNeedsAttention: a model that cannot look back does not solve the problem.
func TestNeedsAttention(t *testing.T) {
	dev := kernels.NewDevice(cpu.New(cpu.Options{}))
	defer dev.Close()
	m := must.Get(newModel(dev, 1))(t)
	wv := must.Get(m.weights.Wv.Float32s())(t)
	list := draw(rand.New(rand.NewPCG(1, 1)), batch)
	for n := 1; n <= 200; n++ {
		clear(wv)
		if _, _, err := m.run(t.Context(), list, true); err != nil {
			t.Fatal(err)
		}
		m.update(n)
	}
	clear(wv)
	if _, right, err := m.run(t.Context(), draw(rand.New(rand.NewPCG(2, 1)), tests), false); err != nil || right > tests/4 {
		t.Errorf("%d of %d right without values, %v", right, tests, err)
	}
}

// TestTrainOnGPU compares the losses of a few steps with those on the CPU. Later ones differ as
// rounding decides what is learnt first.
func TestTrainOnGPU(t *testing.T) {
	dev := clitest.Open(t, "gpu")
	host := kernels.NewDevice(cpu.New(cpu.Options{}))
	defer host.Close()
	const steps = 10
	got, _, err := train(t.Context(), dev, 1, steps, io.Discard)
	must.Do(t, err)
	want, _, err := train(t.Context(), host, 1, steps, io.Discard)
	must.Do(t, err)
	if len(got) != steps || want[steps-1] > want[0]-0.1 {
		t.Fatalf("%d losses; the loss falls from %v to %v on the CPU", len(got), want[0], want[len(want)-1])
	}
	for i := range want {
		if math.Abs(got[i]-want[i]) > 1e-4*want[i] {
			t.Errorf("step %d: loss %v, %v on the CPU", i+1, got[i], want[i])
		}
	}
}

func TestRun(t *testing.T) {
	var out bytes.Buffer
	if err := run(t.Context(), []string{"--seed", "2"}, &out, io.Discard); err != nil || !strings.HasSuffix(out.String(), "512 of 512 right\n") {
		t.Errorf("%v, printed:\n%s", err, out.String())
	}
	for _, c := range []struct {
		args, says string
		code       int
	}{
		{"--steps 0", "--steps is 0, it must be 1 to 1000000", 2}, {"--steps 1", "not solved after 1 steps", 1},
		{"now", `unexpected argument "now"`, 2}, {"--backend tpu", "--backend: ", 2}, {"--rate 1", "recall --help lists the flags", 2},
	} {
		err := run(t.Context(), strings.Fields(c.args), io.Discard, io.Discard)
		if err == nil || !strings.Contains(err.Error(), c.says) || flags.ExitCode(t.Context(), err) != c.code {
			t.Errorf("%s: error %v, exit code %d, want %q and %d", c.args, err, flags.ExitCode(t.Context(), err), c.says, c.code)
		}
	}
}
