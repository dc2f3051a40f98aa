package nn

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"strings"

	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/internal/op"
)

// WriteSafetensors writes w to a .safetensors file, under the names wq, wk, wv, wo, bq, bk, bv,
// bo, qnorm, knorm, sinks, wg and bg, which [MultiHeadConfig.LoadSafetensors] reads.
//
// Errors: ErrShape, ErrDType and ErrReleased for weights that are not as in
// [MultiHeadWeights], found before anything is written, and those of to.
func (w MultiHeadWeights) WriteSafetensors(to io.Writer) (err error) {
	defer op.Annotate(&err, "weights")
	if to == nil {
		return fmt.Errorf("the writer is nil, give a file: %w", kernels.ErrOption)
	}
	type entry struct {
		DType   string `json:"dtype"`
		Shape   []int  `json:"shape"`
		Offsets [2]int `json:"data_offsets"`
	}
	header, all, end := map[string]entry{}, [][]float32(nil), 0
	for _, p := range w.named() {
		if p.t.IsZero() {
			continue
		}
		if !p.t.IsContiguous() {
			return fmt.Errorf("%s has strides %v, weights must be contiguous: %w", p.name, p.t.Strides(), kernels.ErrShape)
		}
		data, err := p.t.Float32s()
		if err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
		shape := p.t.Shape()
		all = append(all, data[:shape.Elements()])
		axes := shape[kernels.Seq:]
		if p.vector {
			axes = []int{shape.Elements()}
		}
		start := end
		end += 4 * shape.Elements()
		header[p.name] = entry{"F32", axes, [2]int{start, end}}
	}
	text, err := json.Marshal(header)
	if err != nil {
		return err
	}
	text = append(text, strings.Repeat(" ", -len(text)&7)...) // the data is aligned to 8 bytes
	out := bufio.NewWriterSize(to, 1<<20)
	if _, err := out.Write(append(binary.LittleEndian.AppendUint64(nil, uint64(len(text))), text...)); err != nil {
		return err
	}
	for _, data := range all {
		if err := binary.Write(out, binary.LittleEndian, data); err != nil {
			return err
		}
	}
	return out.Flush()
}
