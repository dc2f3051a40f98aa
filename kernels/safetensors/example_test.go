package safetensors_test

import (
	"encoding/binary"
	"fmt"
	"log"
	"strings"

	"github.com/seed90331342/attn/kernels/safetensors"
)

// The header of a file lists its tensors, whose data is read from Start on.
func Example() {
	text := `{"wq":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]}}`
	file := string(binary.LittleEndian.AppendUint64(nil, uint64(len(text)))) + text + "\x00\x00\x80\x3f\x00\x00\x00\x40"
	header, err := safetensors.ReadHeader(strings.NewReader(file), int64(len(file)))
	if err != nil {
		log.Fatal(err)
	}
	wq, err := header.Tensor("wq")
	if err != nil {
		log.Fatal(err)
	}
	data := make([]float32, wq.Count)
	wq.Float32s(data, []byte(file[wq.Start:]))
	fmt.Println(wq.Shape, data)
	// Output: [1 2] [1 2]
}
