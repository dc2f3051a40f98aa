package llama

import (
	"encoding/binary"
	"math"
	"math/rand/v2"
	"testing"

	_ "github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// TestSampleFrequencies compares frequencies of drawn tokens with their probabilities, within five standard deviations.
func TestSampleFrequencies(t *testing.T) {
	const n, temperature = 20000, 0.5
	logits := []float32{1, -1, 0.5, float32(math.Inf(-1)), 1}
	count, sum := make([]int, len(logits)), 0.
	rng := rand.New(rand.NewPCG(1, 2))
	for range n {
		count[Sample(logits, temperature, rng)]++
	}
	for _, x := range logits {
		sum += math.Exp(float64(x) / temperature)
	}
	for i, x := range logits {
		p := math.Exp(float64(x)/temperature) / sum
		if off := math.Abs(float64(count[i]) - n*p); off > 5*math.Sqrt(n*p) {
			t.Errorf("token %d is drawn %d times of %d, its probability is %v", i, count[i], n, p)
		}
	}
}

// TestModel compares the lengths with those in the checkpoint.
func TestModel(t *testing.T) {
	dev := must.Get(kernels.Open("cpu"))(t)
	defer dev.Close()
	m := must.Get(Load(t.Context(), dev, CheckpointFile))(t)
	if want := [7]int32{dim, hidden, Layers, Heads, KVHeads, vocab, Positions}; m.Header != want {
		t.Errorf("the checkpoint has lengths %d, not %d", m.Header, want)
	}
	if rest := len(CheckpointFile) - binary.Size(m.checkpoint); rest != Positions*HeadDim*4 {
		t.Errorf("%d bytes follow the weights, should be cosines and sines of %d positions", rest, Positions)
	}
}
