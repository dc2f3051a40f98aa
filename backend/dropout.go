package backend

import "math/bits"

// Dropout drops softmax weights at random: w_ij = p_ij / (1 - P) if Keeps(b, h, i, j), and 0 otherwise (Srivastava et
// al. 2014; on attention weights as in Vaswani et al. 2017). The choice depends only on the seed and the position, so
// that every backend, tiling and cut of a call drops the same weights.
type Dropout struct {
	// P is the probability that a weight is dropped, 0 <= P < 1.
	P    float32
	Seed uint64
	// First is added to the batch, query head, row and key of a weight. It is not zero in
	// a call that computes a part of another call. Each fits 31 bits.
	First [4]int
}

// Factor returns 1/(1-P), the factor of the weights that are kept.
func (d Dropout) Factor() float32 { return 1 / (1 - d.P) }

// Threshold returns P·2^32: a weight is kept if its random word is at least that.
func (d Dropout) Threshold() uint32 { return uint32(float64(d.P) * (1 << 32)) }

// Keeps reports whether the weight of row i and key j of head h of batch b is kept, that is whether word row mod 4 of
//
//	Philox4x32-10 of counter (row/4, key, head, batch) and key (Seed mod 2^32, Seed / 2^32)
//
// is at least Threshold. First is added to the position.
func (d Dropout) Keeps(b, h, i, j int) bool {
	row := uint32(d.First[Seq] + i)
	x := philox([4]uint32{row / 4, uint32(d.First[Dim] + j), uint32(d.First[Heads] + h), uint32(d.First[Batch] + b)},
		[2]uint32{uint32(d.Seed), uint32(d.Seed >> 32)})
	return x[row%4] >= d.Threshold()
}

// philox is the counter-based generator Philox4x32-10 (Salmon et al. 2011, Parallel
// Random Numbers: As Easy as 1, 2, 3).
func philox(counter [4]uint32, key [2]uint32) [4]uint32 {
	const m0, m1 = 0xd2511f53, 0xcd9e8d57
	const w0, w1 = 0x9e3779b9, 0xbb67ae85
	c, k := counter, key
	for range 10 {
		h0, l0 := bits.Mul32(m0, c[0])
		h1, l1 := bits.Mul32(m1, c[2])
		c = [4]uint32{h1 ^ c[1] ^ k[0], l1, h0 ^ c[3] ^ k[1], l0}
		k[0] += w0
		k[1] += w1
	}
	return c
}
