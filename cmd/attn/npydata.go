package main

import (
	"bufio"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"math"
	"os"
	"unsafe"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels/npy"
)

// chunk is how many elements are converted between two looks at the context:
// large enough that the system calls do not count, small enough to stay in the
// second-level cache.
const chunk = 64 << 10

// float32s reads the data of a file of numbers as float32. It also says how
// many finite f8 numbers were beyond float32 and became infinite.
func (n *npyFile) float32s(ctx context.Context) (data []float32, overflows int, err error) {
	data = make([]float32, n.Count)
	err = n.each(ctx, func(at int, raw []byte) {
		overflows += n.Float32s(data[at:min(at+chunk, len(data))], raw)
	})
	return data, overflows, err
}

// mappable reports whether the file's bytes are elements of dtype in memory as
// they are, and lie at multiples of their size.
func (n *npyFile) mappable(dtype backend.DType) bool {
	one := []byte{1, 0}
	return n.dtype() == dtype && dtype != backend.Bool && n.Size == dtype.Size() && int(n.Start)%n.Size == 0 &&
		n.Order.Uint16(one) == binary.NativeEndian.Uint16(one)
}

// mapped returns the data of a file that is mappable as a host tensor over the file
// itself, which unmap ends.
func (n *npyFile) mapped(dtype backend.DType, shape backend.Shape) (t backend.Tensor, unmap func(), err error) {
	data, unmap, err := mapFile(n.path, int(n.Start)+n.Count*n.Size)
	if err != nil {
		return t, nil, err
	}
	at := unsafe.Pointer(unsafe.SliceData(data[n.Start:]))
	if dtype == backend.F32 {
		t, err = backend.HostF32(unsafe.Slice((*float32)(at), n.Count), shape)
	} else {
		t, err = backend.HostBits(unsafe.Slice((*uint16)(at), n.Count), dtype, shape)
	}
	if err != nil {
		unmap()
	}
	return t, unmap, err
}

// bits reads the data of an f2 file as it is.
func (n *npyFile) bits(ctx context.Context) ([]uint16, error) {
	data := make([]uint16, n.Count)
	err := n.each(ctx, func(at int, raw []byte) {
		for i := range len(raw) / 2 {
			data[at+i] = n.Order.Uint16(raw[2*i:])
		}
	})
	return data, err
}

// bools reads the data of a bool file; as in numpy, any byte but 0 is true.
func (n *npyFile) bools(ctx context.Context) ([]bool, error) {
	data := make([]bool, n.Count)
	err := n.each(ctx, func(at int, raw []byte) {
		for i, b := range raw {
			data[at+i] = b != 0
		}
	})
	return data, err
}

// each hands the data to f in pieces of up to chunk elements, with the index of
// the piece's first element.
func (n *npyFile) each(ctx context.Context, f func(at int, raw []byte)) error {
	file, err := os.Open(n.path)
	if err != nil {
		return fmt.Errorf("--%s: %w", n.name, err)
	}
	defer file.Close()
	if _, err := file.Seek(n.Start, io.SeekStart); err != nil {
		return fmt.Errorf("--%s: %w", n.name, err)
	}
	buf := make([]byte, min(chunk, n.Count)*n.Size)
	for at := 0; at < n.Count; at += chunk {
		if err := ctx.Err(); err != nil {
			return err
		}
		raw := buf[:min(chunk, n.Count-at)*n.Size]
		if _, err := io.ReadFull(file, raw); err != nil {
			return fmt.Errorf("--%s %s: it became shorter while it was read: %w", n.name, n.path, err)
		}
		f(at, raw)
	}
	return nil
}

// writeNPY writes a contiguous host tensor as an array of the given shape: f32
// as f4, f16 as f2, bf16, which numpy has no type for, as f4, and bool as bool.
func writeNPY(ctx context.Context, w io.Writer, t backend.Tensor, shape []int) error {
	descr := "<f4"
	switch t.DType() {
	case backend.F16:
		descr = "<f2"
	case backend.Bool:
		descr = "|b1"
	}
	put, err := elementWriter(t)
	if err != nil {
		return err
	}
	return writeArray(ctx, w, descr, shape, put)
}

// writeArray writes an array whose element i put appends.
func writeArray(ctx context.Context, w io.Writer, descr string, shape []int, put func(b []byte, i int) []byte) error {
	buf := bufio.NewWriterSize(w, 1<<20)
	if _, err := buf.WriteString(npy.Head(descr, shape)); err != nil {
		return err
	}
	n := 1
	for _, l := range shape {
		n *= l
	}
	var scratch []byte
	for at := 0; at < n; at += chunk {
		if err := ctx.Err(); err != nil {
			return err
		}
		scratch = scratch[:0]
		for i := at; i < min(at+chunk, n); i++ {
			scratch = put(scratch, i)
		}
		if _, err := buf.Write(scratch); err != nil {
			return err
		}
	}
	return buf.Flush()
}

// elementWriter returns the function that appends element i of t in the file's
// form.
func elementWriter(t backend.Tensor) (func(b []byte, i int) []byte, error) {
	if t.DType() == backend.F32 {
		data, err := t.Float32s()
		return func(b []byte, i int) []byte {
			return binary.LittleEndian.AppendUint32(b, math.Float32bits(data[i]))
		}, err
	}
	if t.DType() == backend.Bool {
		data, err := t.Bools()
		return func(b []byte, i int) []byte {
			if data[i] {
				return append(b, 1)
			}
			return append(b, 0)
		}, err
	}
	data, err := t.Bits()
	if t.DType() == backend.F16 {
		return func(b []byte, i int) []byte { return binary.LittleEndian.AppendUint16(b, data[i]) }, err
	}
	return func(b []byte, i int) []byte {
		return binary.LittleEndian.AppendUint32(b, uint32(data[i])<<16)
	}, err
}
