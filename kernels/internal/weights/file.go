package weights

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/safetensors"
)

// File is a .safetensors file, of which a layer has the tensors whose names begin with Prefix.
type File struct {
	*safetensors.Header
	Prefix string
	r      io.ReaderAt
}

// Open reads the header of a file of the given size.
func Open(r io.ReaderAt, size int64, prefix string) (*File, error) {
	if r == nil {
		return nil, fmt.Errorf("the reader is nil, give a file: %w", kernels.ErrOption)
	}
	h, err := safetensors.ReadHeader(r, size)
	if err != nil && !errors.Is(err, kernels.ErrMemory) {
		err = fmt.Errorf("%w: %w", err, kernels.ErrFile)
	}
	return &File{h, prefix, r}, err
}

// Load reads weights from a file of the given size, see [File.Load].
func Load(r io.ReaderAt, size int64, prefix string, l List, harmless ...string) error {
	f, err := Open(r, size, prefix)
	if err != nil {
		return err
	}
	return f.Load(l, harmless...)
}

// Load reads the weights that the layer has. It refuses tensors of the layer that are neither weights nor harmless.
func (f *File) Load(l List, harmless ...string) error {
	var known []string
	for _, name := range harmless {
		known = append(known, f.Prefix+name)
	}
	for _, w := range l {
		if w.Has() {
			known = append(known, f.Prefix+w.Tensor)
		}
	}
	if others := f.List(f.Prefix, known...); others != "none" {
		return fmt.Errorf("loading would ignore %s: set the field of the config for it, compute the layer by the operations of the device, or remove what changes nothing from the file: %w", others, kernels.ErrFile)
	}
	for _, w := range l {
		if !w.Has() {
			continue
		}
		name := f.Prefix + w.Tensor
		exists := f.Has(name)
		if !exists && !w.Optional {
			return fmt.Errorf("the config has %s, but there is no %q: %w", w.Of, name, kernels.ErrFile)
		}
		var err error
		if !exists {
			*w.T, err = kernels.AllocHost(kernels.F32, w.Shape)
		} else if data, failed := partOf(l, w).read(f, name); failed != nil {
			err = fmt.Errorf("%s: %w", name, failed)
		} else {
			*w.T, err = kernels.HostF32(data, w.Shape)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// part is a weight [rows, columns], alone in a tensor or next to others.
type part struct {
	rows, columns      int
	heads              int // of a vector
	first, total       int // its first column in those of the tensor
	run, step          int // so many columns are adjacent, and so many from one run to the next
	transposed, vector bool
}

// partOf returns the part of its tensor that w is.
func partOf(l List, w Weight) part {
	groups := max(w.Groups, 1)
	p := part{rows: w.In(), columns: w.Out(), heads: w.Shape[kernels.Heads], run: w.Out() / groups, transposed: !w.Columns && !w.Vector, vector: w.Vector}
	for _, other := range l {
		if other.Tensor != w.Tensor || !other.Has() {
			continue
		}
		if other.T == w.T {
			p.first = p.total / groups
		}
		p.total += other.Out()
	}
	p.step = p.total / groups
	return p
}

// column returns the place of a column in the tensor.
func (p part) column(i int) int { return p.first + i/p.run*p.step + i%p.run }

// read reads a part of the named tensor.
func (p part) read(f *File, name string) ([]float32, error) {
	h, err := f.Tensor(name)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", err, kernels.ErrDType)
	}
	want := []int{p.rows, p.total}
	switch {
	case p.vector:
		want = want[1:]
	case p.transposed:
		want = []int{p.total, p.rows}
	}
	shape := h.Shape
	if p.vector && slices.Equal(shape, []int{p.heads, p.total / p.heads}) {
		shape = want
	}
	if one := func(n int) bool { return n == 1 }; len(shape) != len(want) { // as [C, 1, W] of a convolution, or [] of a factor
		shape, want = slices.DeleteFunc(slices.Clone(shape), one), slices.DeleteFunc(want, one)
	}
	if !slices.Equal(shape, want) {
		return nil, fmt.Errorf("shape is %v, for the config it must be %v: %w", h.Shape, want, kernels.ErrShape)
	}
	if h.Kind != 'f' && h.Kind != 'w' {
		return nil, fmt.Errorf("elements are %s, they must be f2, f4, f8 or bf16: %w", h.TypeName(), kernels.ErrDType)
	}
	// Lines of the file are rows, or columns.
	end, width := p.rows, p.total
	if p.transposed {
		end, width = p.columns, p.rows
	}
	const block = 16 // lines: whole cache lines of the transpose
	most := min(block, end) * width
	if err := kernels.CheckMemory(4*int64(p.rows)*int64(p.columns) + int64(most)*int64(4+h.Size)); err != nil {
		return nil, err
	}
	data, lines, raw := make([]float32, p.rows*p.columns), make([]float32, most), make([]byte, most*h.Size)
	overflows := 0
	for at, n := 0, 0; at < end; at += n {
		line := at
		if n = min(block, end-at); p.transposed {
			line, n = p.column(at), min(n, p.run-at%p.run)
		}
		if got, err := f.r.ReadAt(raw[:n*width*h.Size], h.Start+int64(line*width*h.Size)); got < n*width*h.Size {
			return nil, fmt.Errorf("%w: %w", err, kernels.ErrFile)
		}
		overflows += h.Float32s(lines[:n*width], raw)
		if p.transposed {
			for row := range p.rows {
				to := data[row*p.columns+at:][:n]
				for i := range to {
					to[i] = lines[i*width+row]
				}
			}
			continue
		}
		for i := 0; i < n*p.columns; i += p.run {
			copy(data[at*p.columns+i:][:p.run], lines[i/p.columns*width+p.column(i%p.columns):])
		}
	}
	if overflows > 0 {
		return nil, fmt.Errorf("numbers out of the range of float32: %d: %w", overflows, kernels.ErrDType)
	}
	return data, nil
}

// Write writes the weights that are present, under their names.
func (l List) Write(to io.Writer) error {
	if to == nil {
		return fmt.Errorf("the writer is nil, give a file: %w", kernels.ErrOption)
	}
	type entry struct {
		DType   string `json:"dtype"`
		Shape   []int  `json:"shape"`
		Offsets [2]int `json:"data_offsets"`
	}
	header, all, end := map[string]entry{}, [][]float32(nil), 0
	for _, w := range l {
		if w.T.IsZero() {
			continue
		}
		if err := w.contiguous(); err != nil {
			return err
		}
		data, err := w.T.Float32s()
		if err != nil {
			return fmt.Errorf("%s: %w", w.Name, err)
		}
		shape := w.T.Shape()
		axes, n := shape[kernels.Seq:], shape.Elements()
		if w.Vector {
			axes = []int{n}
		}
		header[w.Name] = entry{"F32", axes, [2]int{end, end + 4*n}}
		all, end = append(all, data[:n]), end+4*n
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
