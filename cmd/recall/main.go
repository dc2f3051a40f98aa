// Recall trains a small attention model until it solves associative recall: it is shown pairs
// of a key and a value, and asked for the value of one key. It shows how a program trains
// with attn: forward, backward, and weights that an optimiser changes between the steps.
//
//	go run ./cmd/recall
//
// The losses are the same numbers in every run with the same seed, on any number of threads.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"

	"github.com/seed90331342/attn/cmd/internal/flags"
	_ "github.com/seed90331342/attn/cpu"
	_ "github.com/seed90331342/attn/gpu"
	"github.com/seed90331342/attn/kernels"
)

func main() { flags.Main("recall", run) }

func run(ctx context.Context, args []string, out, messages io.Writer) error {
	f := flag.NewFlagSet("recall", flag.ContinueOnError)
	device := f.String("backend", "cpu", "`device` that computes: auto, cpu, gpu, gpu:1")
	steps := f.Int("steps", 1000, "largest `number` of training steps")
	seed := f.Uint64("seed", 1, "`number` that determines the weights and the problems")
	if help, err := flags.Parse(f, args, messages); help || err != nil {
		return err
	}
	switch {
	case f.NArg() > 0:
		return flags.Usagef("unexpected argument %q", f.Arg(0))
	case *steps < 1 || *steps > 1_000_000:
		return flags.Usagef("--steps is %d, it must be 1 to 1000000", *steps)
	}
	dev, err := kernels.Open(*device)
	if err != nil {
		return fmt.Errorf("--backend: %w", err)
	}
	defer dev.Close()
	if _, solved, err := train(ctx, dev, *seed, *steps, out); solved || err != nil {
		return err
	}
	return fmt.Errorf("not solved after %d steps: allow more with --steps", *steps)
}

const (
	batch = 64 // problems of a step
	every = 50 // steps between two tests
	tests = 512
)

// train trains a model until it answers all problems of a test, and returns the loss of each
// step.
func train(ctx context.Context, dev *kernels.Device, seed uint64, steps int, out io.Writer) (losses []float64, solved bool, err error) {
	m, err := newModel(dev, seed)
	if err != nil {
		return nil, false, err
	}
	rng := rand.New(rand.NewPCG(seed, 1))
	for n := 1; n <= steps; n++ {
		loss, _, err := m.run(ctx, draw(rng, batch), true)
		if err != nil {
			return losses, false, err
		}
		losses = append(losses, loss)
		m.update(n)
		if n%every != 0 {
			continue
		}
		_, right, err := m.run(ctx, draw(rng, tests), false)
		if err != nil {
			return losses, false, err
		}
		if _, err := fmt.Fprintf(out, "step %4d  loss %.4f  %3d of %d right\n", n, loss, right, tests); err != nil {
			return losses, false, err
		}
		if right == tests {
			return losses, true, nil
		}
	}
	return losses, false, nil
}
