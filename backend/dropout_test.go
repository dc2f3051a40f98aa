package backend

import (
	"math"
	"testing"
)

// TestPhilox compares the generator with the known answers that its authors publish in Random123
// (kat_vectors, philox4x32 10).
func TestPhilox(t *testing.T) {
	const all = 0xffffffff
	for _, c := range []struct {
		counter [4]uint32
		key     [2]uint32
		want    [4]uint32
	}{
		{[4]uint32{}, [2]uint32{}, [4]uint32{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
		{[4]uint32{all, all, all, all}, [2]uint32{all, all}, [4]uint32{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
		{[4]uint32{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, [2]uint32{0xa4093822, 0x299f31d0}, [4]uint32{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
	} {
		if got := philox(c.counter, c.key); got != c.want {
			t.Errorf("philox(%x, %x) = %x, published: %x", c.counter, c.key, got, c.want)
		}
	}
}

// TestDropoutShare counts the weights that are kept of 2^16 with a fixed seed: within 5 standard deviations of 1-P.
func TestDropoutShare(t *testing.T) {
	const n = 256
	for _, p := range []float32{0, 0.1, 0.5, 0.9} {
		d := Dropout{P: p, Seed: 42}
		kept := 0
		for i := range n {
			for j := range n {
				if d.Keeps(1, 2, i, j) {
					kept++
				}
			}
		}
		want, sd := n*n*(1-float64(p)), n*math.Sqrt(float64(p)*(1-float64(p)))
		if !(math.Abs(float64(kept)-want) <= 5*sd) {
			t.Errorf("P=%v keeps %d of %d, about %.0f were expected", p, kept, n*n, want)
		}
	}
	part := Dropout{P: 0.5, Seed: 7, First: [4]int{1, 2, 3, 4}}
	whole := Dropout{P: 0.5, Seed: 7}
	for i := range 20 {
		for j := range 20 {
			if part.Keeps(0, 0, i, j) != whole.Keeps(1, 2, i+3, j+4) {
				t.Fatalf("a part that begins at (3, 4) differs at (%d, %d)", i, j)
			}
		}
	}
}
