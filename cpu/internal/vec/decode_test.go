package vec

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"unsafe"

	"github.com/seed90331342/attn/backend"
)

// TestDecodeIsPrefill shows that keys as lanes and queries as lanes give the
// same bits, scores and values.
func TestDecodeIsPrefill(t *testing.T) {
	eachAssembly(t, func(t *testing.T, x, twin *Kernels, rng *rand.Rand) {
		w, n := x.Width, 9*x.Lanes
		for _, d := range []int{x.Lanes, 3 * x.Lanes, 4 * x.Lanes, 9 * x.Lanes} {
			for i, heads := range []int{1, 2, 3, 4, 1, 2, 4, 5, 8} {
				adjacent := i < 4
				k, q := random(rng, n*(d+1)), random(rng, heads*d)
				qt := make([]float32, d*w)
				for h := range heads {
					for i := range d {
						qt[i*w+h] = q[h*d+i]
					}
				}
				s, st := make([]float32, heads*n), make([]float32, n*w)
				ld, runs := d+1, inRuns(rng, x.Lanes, n, k, d+1, n, d)
				if adjacent {
					ld, runs = d, AppendRun(nil, k, d, n, d, k[n*d:])
				}
				x.Dots(F32, s, n, runs, ld, q, d, heads, d)
				x.Scores(st, runs, ld, qt, d, Stairs{}, filled(w, 0))
				for h := range heads {
					for j := range n {
						if s[h*n+j] != st[j*w+h] {
							t.Fatalf("score %d of row %d of %d: %v, with queries as lanes %v", j, h, heads, s[h*n+j], st[j*w+h])
						}
					}
				}
				two := make([]float32, heads*n)
				twin.Dots(F32, two, n, runs, ld, q, d, heads, d)
				within(t, "dots", s, two, 0)

				o, alpha := random(rng, heads*d), random(rng, w)
				ot := make([]float32, d*w)
				for h := range heads {
					for i := range d {
						ot[i*w+h] = o[h*d+i]
					}
				}
				o2 := clone(o)
				if runs = inRuns(rng, 1, n, k, ld, n, d); adjacent {
					runs = AppendRun(nil, k, d, n, d, k[n*d:])
				}
				x.Mix(F32, o, d, runs, ld, s, n, alpha, heads, d)
				valuesByLane(x, ot, runs, ld, st, d, Stairs{}, alpha)
				twin.Mix(F32, o2, d, runs, ld, s, n, alpha, heads, d)
				within(t, "mix", o, o2, 0)
				for h := range heads {
					for i := range d {
						if o[h*d+i] != ot[i*w+h] {
							t.Fatalf("element %d of row %d of %d: %v, with queries as lanes %v", i, h, heads, o[h*d+i], ot[i*w+h])
						}
					}
				}
			}
		}
	})
}

// inRuns returns n rows of k, copied to runs of their own whose lengths are multiples of by and at most long.
func inRuns[T float32 | uint16 | byte](rng *rand.Rand, by, long int, k []T, ld, n, d int) (runs []Run) {
	for at := 0; at < n; {
		m := min(long, by*(1+rng.IntN((n-at)/by)))
		own := clone(k[at*ld : (at+m)*ld])
		runs = AppendRun(runs, own, ld, m, d, own)
		at += m
	}
	return runs
}

// TestDecodeNarrow shows that kernels that convert keys and values yield the bits of converting them first.
func TestDecodeNarrow(t *testing.T) {
	eachAssembly(t, func(t *testing.T, x, twin *Kernels, rng *rand.Rand) {
		n := 9 * x.Lanes // runs of more than 4 vectors of keys, which neon takes at once
		for _, d := range []int{x.Lanes, 16, 5 * x.Lanes, 80, 96, 8 * x.Lanes} {
			for i, heads := range []int{1, 1, 6, 9, 12} {
				long := n
				if heads == 1 {
					long = pairedRun
				}
				bits := make([]uint16, n*(d+3))
				for i := range bits {
					bits[i] = uint16(rng.IntN(0x4400)) | uint16(rng.IntN(2))<<15
				}
				rows := make([]byte, n*(d+12))
				for i := range rows {
					rows[i] = byte(rng.IntN(256))
				}
				for r := range n {
					scale := rng.Float32()
					if i%2 == 1 && rng.IntN(8) == 0 { // kernels for one row cannot divide all of these by 2^24
						scale = []float32{0, 0x1p-102, -0x1p-102, 0x1p-103, -0x1.8p-120, 0x1p-149}[rng.IntN(6)]
					}
					binary.NativeEndian.PutUint32(rows[r*(d+12):], math.Float32bits(scale))
				}
				blocks := make([]byte, n*(d/32*18+6))
				for i := range blocks {
					blocks[i] = byte(rng.IntN(256))
				}
				for i := 0; i < len(blocks); i += 2 {
					blocks[i+1] &= 0xbf // a scale below 2, or a subnormal one
				}
				codes := slices.Clone(rows)
				for i, c := range codes {
					if c&0x7f == 0x7f && rng.IntN(64) > 0 { // a row or column without NaN now and then
						codes[i] = 0
					}
				}
				for _, kernels := range []*Kernels{x, twin} {
					wide, want := make([]float32, n*d), make([]float32, d)
					quantised := func(e backend.DType, data []byte, ld int) {
						Load(kernels, e, wide, d, data, ld, n, d)
						for r := range n {
							e.Dequantise(want, data[r*ld:])
							within(t, fmt.Sprint(kernels.Tier, ", ", e), wide[r*d:(r+1)*d], want, 0)
						}
						if x.Reads(e) {
							narrow(t, kernels, x, e, inRuns(rng, x.Lanes, long, data, ld, n, e.Row(d)), ld, wide, heads, d)
						}
					}
					for _, e := range []backend.DType{F16, BF16} {
						if d%8 == 0 { // rows have a multiple of 16 bytes
							Load(kernels, e, wide, d, bits, d+3, n, d)
							narrow(t, kernels, x, e, inRuns(rng, x.Lanes, long, bits, d+3, n, d), d+3, wide, heads, d)
							Load(kernels, e, wide, d, bits, d, n, d)
							narrow(t, kernels, x, e, AppendRun(nil, bits, d, n, d, bits[n*d:]), d, wide, 1+i%4, d)
						}
					}
					if d%32 == 0 {
						quantised(Q4, blocks, len(blocks)/n)
					}
					if d%16 == 0 {
						quantised(F8, codes, d+12)
						quantised(Q8, rows, d+12)
					}
				}
			}
		}
	})
}

// narrow compares rows of a type with the same rows in float32.
func narrow(t *testing.T, x, plain *Kernels, e backend.DType, runs []Run, ld int, wide []float32, heads, d int) {
	t.Helper()
	rng := rand.New(rand.NewPCG(uint64(d), uint64(e)))
	n := len(wide) / d
	q, alpha, o := random(rng, heads*d), random(rng, heads), random(rng, heads*d)
	s, s2 := make([]float32, heads*n), make([]float32, heads*n)
	all := AppendRun(nil, wide, d, n, d, wide)
	var odd []Run // Mix takes runs of any length
	for _, r := range runs {
		first, rest := r, r
		first.n, rest.n = 1, r.n-1
		rest.rows = (*byte)(unsafe.Add(unsafe.Pointer(r.rows), ld*e.Size()))
		odd = append(odd, first, rest)
	}
	if len(runs) == 1 {
		odd = slices.Clone(runs)
	}
	x.Dots(e, s, n, runs, ld, q, d, heads, d)
	plain.Dots(F32, s2, n, all, d, q, d, heads, d)
	what := fmt.Sprintf("%s, type %d, %d heads of %d", x.Tier, e, heads, d)
	within(t, what+", scores", s, s2, 0)
	o2 := clone(o)
	x.Mix(e, o, d, odd, ld, s, n, alpha, heads, d)
	plain.Mix(F32, o2, d, all, d, s, n, alpha, heads, d)
	within(t, what+", values", o, o2, 0)
}
