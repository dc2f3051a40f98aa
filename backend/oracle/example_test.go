package oracle_test

import (
	"fmt"

	"github.com/seed90331342/attn/backend/oracle"
)

// The result of one row over two keys, in float64, and whether a kernel's float32 is within the derived bound.
func Example() {
	a := oracle.Solve(oracle.Row{Q: []float32{1, 2}, K: []float32{1, 0, 0, 1}, V: []float32{3, 5}, Dv: 1, Scale: 0.5})
	fmt.Printf("o = %.4f, lse = %.4f\n", a.O[0], a.LSE)
	fmt.Println(oracle.Off(4.2449188, a.O[0], a.OBound[0]) <= 1)
	// Output:
	// o = 4.2449, lse = 1.4741
	// true
}
