package vec

import (
	"math"
	"math/rand/v2"
	"testing"
	"unsafe"
)

// TestFixedDots compares Dots of integers with sums in float64, for all numbers of rows and groups, and
// Fix with the error that it states. All keys and queries of the largest magnitude must not overflow.
func TestFixedDots(t *testing.T) {
	rng := rand.New(rand.NewPCG(8, 9))
	for _, x := range assembly {
		if !x.HasFixed() {
			t.Logf("%s has no such products", x.Tier)
			continue
		}
		for _, d := range []int{16, 64, 80, 128, MaxFixed} {
			for _, rows := range []int{1, 3, 4, 8, 13} {
				const keys = 80
				ld, lds := d+Q8Lead+3, keys+5
				k, q, s := make([]byte, keys*ld), make([]float32, rows*d), make([]float32, rows*lds)
				for j := range keys {
					*(*float32)(unsafe.Pointer(&k[j*ld])) = rng.Float32() - 0.5
					for c := range d {
						if k[j*ld+Q8Lead+c] = byte(rng.Uint32()); j == 1 {
							k[j*ld+Q8Lead+c] = 0x80
						}
					}
				}
				for i := range q {
					if q[i] = float32(rng.NormFloat64()); i < d {
						q[i] = 1
					}
				}
				fixed := clone(q)
				for r := range rows {
					x.Fix(fixed[r*d:][:d])
				}
				x.Dots(Fixed, s, lds, AppendRun(nil, k, ld, keys, d, k), ld, fixed, d, rows, d)
				for r := range rows {
					top := 0.0
					for _, y := range q[r*d:][:d] {
						top = max(top, math.Abs(float64(y)))
					}
					for j := range keys {
						want, size, row := 0.0, 0.0, k[j*ld:]
						scale := float64(*(*float32)(unsafe.Pointer(&row[0])))
						for c := range d {
							y := scale * float64(int8(row[Q8Lead+c]))
							want, size = want+y*float64(q[r*d+c]), size+math.Abs(y)
						}
						bound := size*top*(0x1p-16+0x1p-22) + math.Abs(want)*0x1p-22
						if got := float64(s[r*lds+j]); !(math.Abs(got-want) <= bound) {
							t.Fatalf("%s, D=%d, row %d of %d, key %d: %v, want %v within %v", x.Tier, d, r, rows, j, got, want, bound)
						}
					}
				}
			}
		}
	}
}

// TestFix: zeros stay zeros, and NaN and Inf make a score NaN.
func TestFix(t *testing.T) {
	inf := float32(math.Inf(1))
	for _, c := range []struct{ x, unit float32 }{{0, 0}, {-inf, float32(math.NaN())}, {float32(math.NaN()), float32(math.NaN())}, {-127 << 8, 1}, {0x1p-149, 0}} {
		row := make([]float32, 16)
		row[5] = c.x
		if (&Kernels{Lanes: 16}).Fix(row); ulps(row[8], c.unit) != 0 {
			t.Errorf("%v: the unit is %v, want %v", c.x, row[8], c.unit)
		}
	}
}
