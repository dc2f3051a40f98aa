package vec

import (
	"math"
	"unsafe"

	"github.com/seed90331342/attn/backend"
)

// Dots computes scores with keys as lanes, each the same sum as in Scores:
//
//	S[h][key] = Σ_d K[key][d]·Q[h][d]
//
//	s [heads, n], rows lds apart    k [n, d] of type e, rows ldk apart    q [heads, d], rows ldq apart
//
// The n keys are those of all runs. The length of each run and d are multiples of Lanes, and
// the size of d elements is one of 16 bytes.
func (x *Kernels) Dots(e backend.DType, s []float32, lds int, runs []Run, ldk int, q []float32, ldq, heads, d int) {
	n := rowsOf(runs)
	_, _ = s[(heads-1)*lds+n-1], q[(heads-1)*ldq+d-1]
	if x.OnlyKeyLanes {
		for _, r := range runs {
			scoresGonum(s, lds, r.float32s(ldk, d), ldk, r.n, q, ldq, heads, d)
			s = s[r.n:]
		}
		return
	}
	most, at := max(1, budget/(d*heads))*x.Lanes, 0
	apart := max(1, e.Size()) * ldk // Fixed has no size
	dots := x.forRuns(e, runs, apart, heads).dots[e]
	for i := 0; i < len(runs); i++ {
		n, first := runs[i].n, i
		if e != F32 && e != Q4 && heads == 1 && x.Lanes > 4 && most >= 2*pairedRun && paired(runs[i:]) {
			n, i = 2*n, i+1
		}
		for j := 0; j < n; j += most {
			some := min(most, n-j)
			dots(&s[at+j], 4*lds, (*byte)(unsafe.Add(unsafe.Pointer(runs[first].rows), j*apart)), apart, runs[first].words(),
				&q[0], 4*ldq, heads, d/x.Lanes, some/x.Lanes)
		}
		at += n
	}
}

// forRuns returns the table whose kernels Dots and Mix call for rows of type e that are apart bytes apart, and heads query rows.
// Kernels that prefetch in the order of addresses go on behind the last row, so the rows to prefetch have to lie there. With
// 8 query rows they are slower.
func (x *Kernels) forRuns(e backend.DType, runs []Run, apart, heads int) *Kernels {
	r := &runs[0]
	switch {
	case !x.zen5:
	case e == F8 && x.vbmi != nil:
		return x.vbmi
	case heads <= 4 && len(runs) == 1 && r.jump <= 0 && r.next == uintptr(unsafe.Pointer(r.rows))+uintptr(r.n*apart) && x.ordered.dots[e] != nil:
		return x.ordered
	}
	return x
}

// pairedRun is the length of runs that some kernels take in pairs: the dots of one row and a type other than F32, where
// a vector has 8 or 16 lanes, because several chains of FMAs hide their latency, and the scores of 8 query rows in
// vectors of 16. The generator has the same constant.
const pairedRun = 16

// paired reports whether the first two of runs are such a pair.
func paired(runs []Run) bool {
	return len(runs) > 1 && runs[0].n == pairedRun && runs[1].n == pairedRun
}

// Mix adds a block of values to a few outputs, each the same sum as in Values:
//
//	O[h][d] = alpha[h]·O[h][d] + Σ_key V[key][d]·P[h][key]
//
//	o [heads, d], rows ldo apart    v [n, d] of type e, rows ldv apart    p [heads, n], rows ldp apart    alpha [heads]
//
// The n values are those of all runs. d is a multiple of Lanes.
func (x *Kernels) Mix(e backend.DType, o []float32, ldo int, runs []Run, ldv int, p []float32, ldp int, alpha []float32, heads, d int) {
	n := rowsOf(runs)
	_, _, _ = o[(heads-1)*ldo+d-1], p[(heads-1)*ldp+n-1], alpha[heads-1]
	if x.OnlyKeyLanes {
		valuesGonum(o, ldo, runs, ldv, p, ldp, alpha, heads, d)
		return
	}
	vectors, apart := d/x.Lanes, e.Size()*ldv
	mix := x.forRuns(e, runs, apart, heads).mix[e]
	for h := 0; h < heads; {
		rows, done := 0, 0
		for i := range mix {
			t := &mix[i]
			if rows == 0 && h+t.rows <= heads {
				rows = t.rows
			}
			if strips := (vectors - done) / t.vectors; t.rows == rows && strips > 0 {
				c := done * x.Lanes
				t.kernel(&o[h*ldo+c], 4*ldo, runs[0].words(), len(runs), apart, &p[h*ldp], 4*ldp, &alpha[h], e.Size()*(e.Row(c)-e.Lead()), strips)
				done += strips * t.vectors
			}
		}
		h += rows
	}
}

// Reads reports whether Dots and Mix take rows of type e.
func (x *Kernels) Reads(e backend.DType) bool { return e == F32 || x.dots[e] != nil }

// HasFixed reports whether Dots takes Fixed.
func (x *Kernels) HasFixed() bool { return x.dots[Fixed] != nil }

// Fix replaces a query row, of a multiple of 4 elements, by integers of 16 bits for Dots with Fixed,
// whose sums of their products with the integers of keys are exact. Their unit is the largest
// magnitude over 127·2^8, or NaN if the row has NaN or Inf. It follows the integers. For VNNI, the upper
// bytes of four of them precede their lower ones, and 128 times the sum of all follows the unit.
func (x *Kernels) Fix(row []float32) {
	magnitude, sum := uint32(0), int32(0) // of the largest, as bits: those of NaN and Inf are larger still
	for _, y := range row {
		magnitude = max(magnitude, math.Float32bits(y)&^(1<<31))
	}
	top := math.Float32frombits(magnitude)
	steps := 127 << 8 / max(float64(top), math.SmallestNonzeroFloat32)
	words := unsafe.Slice((*int16)(unsafe.Pointer(unsafe.SliceData(row))), 2*len(row))
	bytes := unsafe.Slice((*[2]uint32)(unsafe.Pointer(unsafe.SliceData(row))), len(row)/2)
	for i := 0; i < len(row); i += 4 {
		var upper, lower uint32
		for j, y := range [4]float32(row[i:]) {
			const rounding = 0x1.8p52 // the sum has the integer in its last bits, rounded to even
			n := int32(math.Float64bits(float64(float64(y)*steps) + rounding))
			if sum += n; x.Lanes == 8 {
				words[i+j] = int16(n)
				continue
			}
			up := (n + 128) >> 8
			upper, lower = upper|uint32(uint8(up))<<(8*j), lower|uint32(uint8(n-up<<8))<<(8*j)
		}
		if x.Lanes != 8 {
			bytes[i/4] = [2]uint32{upper, lower}
		}
	}
	row[len(row)/2], row[len(row)/2+1] = top/(127<<8)+(top-top), math.Float32frombits(uint32(sum)<<7)
}
