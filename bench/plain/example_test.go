package plain_test

import (
	"fmt"

	"github.com/seed90331342/attn/bench/plain"
)

// An error of a driver becomes one line without control characters.
func ExampleLine() {
	fmt.Println(plain.Line("device lost\nreset failed\x1b[2J"))
	// Output: device lost; reset failed�[2J
}
