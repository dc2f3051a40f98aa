// Package matrix has matrices of float32 that are printed and drawn.
package matrix

// Matrix is Rows x Cols numbers, row by row.
type Matrix struct {
	Rows, Cols int
	Data       []float32
}

// Row returns row i.
func (m Matrix) Row(i int) []float32 { return m.Data[i*m.Cols : (i+1)*m.Cols] }

// Stack is a matrix for each batch.
type Stack struct {
	Batch, Rows, Cols int
	Data              []float32
}

// At returns the matrix of batch b.
func (s Stack) At(b int) Matrix {
	n := s.Rows * s.Cols
	return Matrix{s.Rows, s.Cols, s.Data[b*n : (b+1)*n]}
}
