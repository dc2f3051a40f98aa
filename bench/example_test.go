package bench_test

import (
	"context"
	"fmt"
	"log"

	"github.com/seed90331342/attn/bench"
	"github.com/seed90331342/attn/bench/report"
	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
)

// One case is measured, checked against float64 and compared with the peak rate of the same run.
func Example() {
	dev := kernels.NewDevice(cpu.New(cpu.Options{Threads: 1}))
	defer dev.Close()
	series := bench.Series{Seqs: []int{64}, Case: report.Case{Heads: 2, Dim: 16, Causal: true}}
	r, err := bench.Run(context.Background(), []*kernels.Device{dev}, bench.Config{Series: []bench.Series{series}})
	if err == nil {
		err = r.Err()
	}
	if err != nil {
		log.Fatal(err)
	}
	c := r.Cases[0]
	fmt.Printf("%s on %s: %s, %d operations\n", c.Name, c.Backend, c.Status, c.FLOPs)
	fmt.Println("a call takes time:", *c.MedianS > 0)
	fmt.Println("it has a speed and a ceiling:", *c.GFLOPS > 0 && *c.CeilingGFLOPS > 0) // a busy machine may measure a low ceiling
	fmt.Println("within the error bound:", *c.MaxError <= *c.ErrorBound)
	// Output:
	// f32/b1h2s64d16/causal on cpu: ok, 266240 operations
	// a call takes time: true
	// it has a speed and a ceiling: true
	// within the error bound: true
}
