package report_test

import (
	"fmt"
	"log"
	"os"

	"github.com/seed90331342/attn/bench/report"
)

// A report that attn bench --json wrote is read and compared with another one, here itself.
func Example() {
	f, err := os.Open("testdata/real.json")
	if err != nil {
		log.Fatal(err)
	}
	defer f.Close()
	r, err := report.Read(f)
	if err != nil {
		log.Fatal(err)
	}
	for _, m := range r.Cases[4:6] {
		fmt.Printf("%s %s %s: %s, bound by %s\n", m.Backend, m.Variant, m.Name, m.Status, m.Bound)
	}
	changes := report.Compare(r, r, 4) // changes of at least 4% that exceed the noise
	fmt.Println("slower by 5% or broken:", report.Worst(changes, 5) != nil)
	// Output:
	// cpu stages f32/b1h4s32d16/kv2/causal/window40,inf/softcap20/mask: ok, bound by fma
	// gpu:0 fused f32/b1h2s32d16/causal: ok, bound by launch
	// slower by 5% or broken: false
}
