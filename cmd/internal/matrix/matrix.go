// Package matrix has matrices of float32 that are printed and drawn.
package matrix

import "fmt"

// Matrix is Rows x Cols numbers, row by row, for each of Batch batches.
type Matrix struct {
	Batch, Rows, Cols int
	Data              []float32
}

// Row returns row i of the first batch.
func (m Matrix) Row(i int) []float32 { return m.Data[i*m.Cols : (i+1)*m.Cols] }

// At returns the matrix of batch b.
func (m Matrix) At(b int) Matrix {
	n := m.Rows * m.Cols
	return Matrix{1, m.Rows, m.Cols, m.Data[b*n : (b+1)*n]}
}

// Index returns the position of element i of an array of the given shape: [1][0][2].
func Index(shape []int, i int) string {
	text := ""
	for axis := len(shape) - 1; axis >= 0; axis-- {
		text = fmt.Sprintf("[%d]%s", i%shape[axis], text)
		i /= shape[axis]
	}
	return text
}
