package npy_test

import (
	"bytes"
	"fmt"
	"log"

	"github.com/seed90331342/attn/kernels/npy"
)

// An array is written as numpy.save does, and read again with its shape.
func Example() {
	var file bytes.Buffer
	if err := npy.Write(&file, "<f4", []int{2, 3}, []float32{1, 2, 3, 4, 5, 6}); err != nil {
		log.Fatal(err)
	}
	header, rest, err := npy.Open(&file, int64(file.Len()))
	if err != nil {
		log.Fatal(err)
	}
	data, err := npy.Read(rest, header, func(dst []float32, raw []byte) { header.Float32s(dst, raw) })
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(header.Shape, data)
	// Output: [2 3] [1 2 3 4 5 6]
}
