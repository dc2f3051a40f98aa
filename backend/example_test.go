package backend_test

import (
	"fmt"
	"log"

	"github.com/seed90331342/attn/backend"
)

// A driver reads the strides of a view and the rule of visibility: here [B, S, H, D] data of two
// heads, and the keys that each row of a causal call over a cache of two tokens sees.
func Example() {
	t, err := backend.Host([]float32{0, 1, 10, 11, 20, 21}, backend.F32, backend.Shape{1, 3, 2, 1})
	if err != nil {
		log.Fatal(err)
	}
	if t, err = t.Swap(backend.Heads, backend.Seq); err != nil {
		log.Fatal(err)
	}
	fmt.Println(t.Shape(), t.Strides())

	causal := backend.Visibility{Offset: 2, Left: backend.Unbounded}
	for i := range 3 {
		fmt.Println(causal.Range(0, i, 5))
	}
	// Output:
	// [1 2 3 1] [6 1 2 1]
	// 0 3
	// 0 4
	// 0 5
}
