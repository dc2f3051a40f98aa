package shaders_test

import (
	"fmt"
	"log"
	"strings"

	"github.com/seed90331342/attn/shaders"
)

// The bindings and the size of the kernel for rotary position embedding.
func Example() {
	kernel := shaders.RoPE{InPlace: true}
	src, err := shaders.Render(kernel)
	if err != nil {
		log.Fatal(err)
	}
	for line := range strings.Lines(src) {
		if strings.HasPrefix(line, "@group(0)") {
			fmt.Print(line)
		}
	}
	fmt.Printf("%s: %d threads a workgroup\n", shaders.Key(kernel), shaders.Describe(kernel).Threads)
	// Output:
	// @group(0) @binding(0) var<storage, read> x: array<u32>;
	// @group(0) @binding(1) var<storage, read> cosine: array<f32>;
	// @group(0) @binding(2) var<storage, read> sine: array<f32>;
	// @group(0) @binding(3) var<storage, read_write> o: Words;
	// @group(0) @binding(4) var<uniform> p: RoPEParams;
	// rope INPLACE=1: 64 threads a workgroup
}
