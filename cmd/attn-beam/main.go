// Command attn-beam computes attention over sequences that do not fit one machine, as a
// pipeline of Apache Beam.
package main

import (
	"fmt"
	"os"

	"github.com/seed90331342/attn/cmd/attn-beam/internal/workers"
)

func main() {
	workers.Serve()
	fmt.Fprintln(os.Stderr, "attn-beam: no command yet")
	os.Exit(2)
}
