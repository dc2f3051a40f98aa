package cpu

import (
	"runtime"
	"sync"

	"gonum.org/v1/gonum/blas"

	"github.com/seed90331342/attn/cpu/internal/vec"
)

func init() {
	if runtime.GOARCH == "wasm" {
		vec.Gemm = plainGemm
	}
}

// columnsPool holds the *[]float32 of plainGemm.
var columnsPool = sync.Pool{New: func() any { return new([]float32) }}

// plainGemm is vec.Gemm four rows and four columns at a time. Go has no vectors in wasm, where gonum's
// loops make half as many operations a second.
func plainGemm(tb blas.Transpose, m, n, k int, a []float32, lda int, b []float32, ldb int, beta float32, c []float32, ldc int) {
	row, col := ldb, 1 // from an element of b to that of the next k, of the next column
	if tb == blas.Trans {
		row, col = 1, ldb
	}
	mem := columnsPool.Get().(*[]float32)
	defer columnsPool.Put(mem)
	if cap(*mem) < 4*k {
		*mem = make([]float32, 4*k)
	}
	columns := (*mem)[:4*k]
	for j := 0; j < n; j += 4 {
		for x := range 4 * k {
			columns[x] = b[x/4*row+min(j+x%4, n-1)*col]
		}
		for i := 0; i < m; i += 4 {
			var rows [4][]float32
			for r := range rows {
				rows[r] = a[min(i+r, m-1)*lda:][:k]
			}
			var sums [16]float32
			for r := 0; beta != 0 && r < min(4, m-i); r++ {
				for q, x := range c[(i+r)*ldc+j:][:min(4, n-j)] {
					sums[4*r+q] = beta * x
				}
			}
			addFours(&sums, rows, columns)
			for r := range min(4, m-i) {
				copy(c[(i+r)*ldc+j:][:min(4, n-j)], sums[4*r:])
			}
		}
	}
}

// addFours adds the products of four rows and four columns, whose elements alternate, to s.
func addFours(s *[16]float32, rows [4][]float32, columns []float32) {
	s00, s01, s02, s03, s10, s11, s12, s13 := s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7]
	s20, s21, s22, s23, s30, s31, s32, s33 := s[8], s[9], s[10], s[11], s[12], s[13], s[14], s[15]
	a0, a1, a2, a3 := rows[0], rows[1][:len(rows[0])], rows[2][:len(rows[0])], rows[3][:len(rows[0])]
	for x, y := range a0 {
		b := (*[4]float32)(columns[4*x:])
		b0, b1, b2, b3 := b[0], b[1], b[2], b[3]
		s00, s01, s02, s03 = s00+y*b0, s01+y*b1, s02+y*b2, s03+y*b3
		y = a1[x]
		s10, s11, s12, s13 = s10+y*b0, s11+y*b1, s12+y*b2, s13+y*b3
		y = a2[x]
		s20, s21, s22, s23 = s20+y*b0, s21+y*b1, s22+y*b2, s23+y*b3
		y = a3[x]
		s30, s31, s32, s33 = s30+y*b0, s31+y*b1, s32+y*b2, s33+y*b3
	}
	*s = [16]float32{s00, s01, s02, s03, s10, s11, s12, s13, s20, s21, s22, s23, s30, s31, s32, s33}
}
