// Package array reads .npy files and tensors of .safetensors files, and writes .npy files.
package array

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"unsafe"

	"github.com/seed90331342/attn/cmd/internal/files"
	"github.com/seed90331342/attn/cmd/internal/output"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/npy"
	"github.com/seed90331342/attn/kernels/safetensors"
)

// Note prints a line that is not an error.
type Note func(format string, args ...any)

// File is an array in a file whose header agrees with its size: a .npy file, or by
// FILE.safetensors#NAME a tensor of a .safetensors file.
type File struct {
	Flag string // the flag with the path, for errors; "" where they have it already
	Path string // as it was given
	npy.Header
}

// extension ends the names of files that hold several tensors.
const extension = ".safetensors"

// Named reports whether a text is the path of an array rather than a list of numbers.
func Named(s string) bool {
	return strings.HasSuffix(s, ".npy") || strings.HasSuffix(s, extension) || strings.Contains(s, extension+"#")
}

// Path returns the path of the file of an array: without the name of its tensor.
func Path(s string) string {
	path, _, _ := split(s)
	return path
}

// split cuts FILE.safetensors#NAME into the path and the name of the tensor. tensor reports a
// .safetensors file, whose name is "" if it is missing.
func split(s string) (path, name string, tensor bool) {
	if path, name, ok := strings.Cut(s, extension+"#"); ok {
		return path + extension, name, true
	}
	return s, "", strings.HasSuffix(s, extension)
}

// Open reads and checks the header of a file of floating point numbers or, if
// bools is set, of bools.
func Open(flag, path string, bools bool) (*File, error) {
	f, err := open(flag, path, false)
	if err == nil && f.Kind == 'b' && !bools {
		return nil, f.Errorf("elements are bool, they must be f2, f4, f8 or bf16")
	}
	return f, err
}

// ReadInts reads the rows of a file of 32-bit integers with one or two axes.
func ReadInts(flag, path string) ([][]int32, error) {
	f, err := open(flag, path, true)
	if err != nil {
		return nil, err
	}
	if len(f.Shape) < 1 || len(f.Shape) > 2 {
		return nil, f.Errorf("shape %v has %d axes, it must have 1 or 2", f.Shape, len(f.Shape))
	}
	if f.Count == 0 {
		return nil, f.Errorf("shape %v has no numbers", f.Shape)
	}
	all, err := read(context.Background(), f, f.Int64s)
	if err != nil {
		return nil, err
	}
	flat, err := kernels.Make[int32](len(all))
	if err != nil {
		return nil, f.Errorf("%w", err)
	}
	for i, x := range all {
		if flat[i] = int32(x); int64(flat[i]) != x {
			return nil, f.Errorf("%d does not fit in 32 bits", x)
		}
	}
	return slices.Collect(slices.Chunk(flat, f.Shape[len(f.Shape)-1])), nil
}

func open(flag, path string, ints bool) (*File, error) {
	f := &File{Flag: flag, Path: path}
	path, name, tensor := split(path)
	file, size, err := files.Open(path)
	if err != nil {
		return nil, f.Errorf("%w", err)
	}
	defer file.Close()
	if tensor {
		err = f.find(file, size, name, ints)
	} else {
		f.Header, err = npy.ReadHeader(file, size, ints)
	}
	if err != nil {
		return nil, f.Errorf("%w", output.Reason(err))
	}
	return f, nil
}

// find reads the header of a tensor of a .safetensors file.
func (f *File) find(file io.ReaderAt, size int64, name string, ints bool) error {
	h, err := safetensors.ReadHeader(file, size)
	if err != nil {
		return err
	}
	if name == "" {
		return fmt.Errorf("name one of its tensors as %s#NAME: it has %s", strings.TrimSuffix(f.Path, "#"), h.List(""))
	}
	if f.Header, err = h.Tensor(name); err != nil {
		return err
	}
	if whole := f.Kind == 'i' || f.Kind == 'u'; whole != ints {
		must := "numbers of F16, BF16, F32 or F64 (BOOL for a mask)"
		if ints {
			must = "integers"
		}
		return fmt.Errorf("elements are %s, they must be %s", f.TypeName(), must)
	}
	return nil
}

// Errorf returns an error about the file.
func (f *File) Errorf(format string, args ...any) error {
	if f.Flag == "" {
		return fmt.Errorf("%s: %w", f.Path, fmt.Errorf(format, args...))
	}
	return fmt.Errorf("--%s %s: %w", f.Flag, f.Path, fmt.Errorf(format, args...))
}

// DType returns the type of the elements in memory: that of the file, F32 for f8.
func (f *File) DType() kernels.DType {
	switch {
	case f.Kind == 'b':
		return kernels.Bool
	case f.Kind == 'w':
		return kernels.BF16
	case f.Size == 2:
		return kernels.F16
	}
	return kernels.F32
}

// Memory returns the bytes of memory that Upload needs: 0 for a mapped file, otherwise
// those of bools or of float32 numbers.
func (f *File) Memory(dtype kernels.DType) int64 {
	switch {
	case f.mappable(dtype):
		return 0
	case dtype == kernels.Bool:
		return int64(f.Count)
	}
	return 4 * int64(f.Count)
}

// mappable reports whether the bytes of the file are elements of dtype, aligned
// to their size.
func (f *File) mappable(dtype kernels.DType) bool {
	one := []byte{1, 0}
	return f.DType() == dtype && dtype != kernels.Bool && f.Size == dtype.Size() && int(f.Start)%f.Size == 0 &&
		f.Order.Uint16(one) == binary.NativeEndian.Uint16(one)
}

// Upload returns the data as a tensor of dtype in the device's memory, for the caller to release. If the tensor lies in
// a mapped file, the caller then calls unmap, which is nil otherwise. Rounding of f8 is noted.
func (f *File) Upload(ctx context.Context, dev *kernels.Device, dtype kernels.DType, shape kernels.Shape, note Note) (t kernels.Tensor, unmap func(), err error) {
	if f.mappable(dtype) {
		// Where mapping is not available the file is read.
		if host, unmap, err := f.mapped(dtype, shape); err == nil {
			t, err := dev.Upload(ctx, host)
			if err != nil {
				unmap()
				unmap = nil
			}
			return t, unmap, err
		}
	}
	if dtype != kernels.Bool {
		data, err := f.Float32s(ctx, note)
		if err == nil {
			t, err = dev.FromFloat32(ctx, dtype, data, shape)
		}
		return t, nil, err
	}
	data, err := read(ctx, f, decodeBools)
	if err == nil {
		t, err = kernels.HostBool(data, shape)
	}
	if err == nil {
		t, err = dev.Upload(ctx, t)
	}
	return t, nil, err
}

// mapped returns the data as a host tensor that lies in the mapped file.
func (f *File) mapped(dtype kernels.DType, shape kernels.Shape) (t kernels.Tensor, unmap func(), err error) {
	file, _, err := files.Open(Path(f.Path))
	if err != nil {
		return t, nil, err
	}
	defer file.Close()
	data, unmap, err := f.Map(file)
	if err != nil {
		return t, nil, err
	}
	at := unsafe.Pointer(unsafe.SliceData(data))
	if dtype == kernels.F32 {
		t, err = kernels.HostF32(unsafe.Slice((*float32)(at), f.Count), shape)
	} else {
		t, err = kernels.Host(unsafe.Slice((*uint16)(at), f.Count), dtype, shape)
	}
	if err == nil && f.Fortran {
		t, err = t.View(shape, kernels.Strides{1, shape[0], shape[0] * shape[1], shape[0] * shape[1] * shape[2]}, 0)
	}
	if err != nil {
		unmap()
	}
	return t, unmap, err
}

// Float32s reads the data of a file of numbers. Rounding of f8 is noted.
func (f *File) Float32s(ctx context.Context, note Note) ([]float32, error) {
	overflows := 0
	data, err := read(ctx, f, func(dst []float32, raw []byte) { overflows += f.Header.Float32s(dst, raw) })
	if err == nil && f.Size == 8 {
		beyond := ""
		if overflows > 0 {
			beyond = fmt.Sprintf("; %d numbers beyond the range of f4 became infinite", overflows)
		}
		note("--%s %s is f8, rounded to f4%s", f.Flag, f.Path, beyond)
	}
	return data, err
}

// decodeBools follows numpy: every byte but 0 is true.
func decodeBools(dst []bool, raw []byte) {
	for i, b := range raw {
		dst[i] = b != 0
	}
}

// read reads all elements. decode converts the bytes of a chunk.
func read[T any](ctx context.Context, f *File, decode func(dst []T, raw []byte)) ([]T, error) {
	file, _, err := files.Open(Path(f.Path))
	if err != nil {
		return nil, f.Errorf("%w", err)
	}
	defer file.Close()
	data, err := npy.Read(interruptible{ctx, io.NewSectionReader(file, f.Start, int64(f.Count)*int64(f.Size)), nil}, f.Header, decode)
	switch {
	case err == nil || ctx.Err() != nil:
	case errors.Is(err, kernels.ErrMemory):
		err = f.Errorf("%w", err)
	default:
		err = f.Errorf("it was cut short while it was read: %w", output.Reason(err))
	}
	return data, err
}

// interruptible is a reader and a writer that fail once the context has ended.
type interruptible struct {
	ctx context.Context
	r   io.Reader
	w   io.Writer
}

// Read implements io.Reader.
func (i interruptible) Read(p []byte) (int, error) {
	if err := i.ctx.Err(); err != nil {
		return 0, err
	}
	return i.r.Read(p)
}

// Write implements io.Writer.
func (i interruptible) Write(p []byte) (int, error) {
	if err := i.ctx.Err(); err != nil {
		return 0, err
	}
	return i.w.Write(p)
}

// WriteTensor writes a contiguous host tensor as an array of the given shape.
// bf16, which numpy lacks, becomes f4.
func WriteTensor(ctx context.Context, w io.Writer, t kernels.Tensor, shape []int) error {
	w = interruptible{ctx, nil, w}
	n := t.Shape().Elements()
	switch t.DType() {
	case kernels.F32:
		data, err := t.Float32s()
		if err != nil {
			return err
		}
		return npy.Write(w, "<f4", shape, data[:n])
	case kernels.Bool:
		data, err := t.Bools()
		if err != nil {
			return err
		}
		return npy.Write(w, "|b1", shape, data[:n])
	}
	data, err := t.Bits()
	if err != nil {
		return err
	}
	if t.DType() == kernels.F16 {
		return npy.Write(w, "<f2", shape, data[:n])
	}
	wide, err := kernels.Make[float32](n)
	if err != nil {
		return err
	}
	for i := range wide { // bf16 is the upper half of f4
		wide[i] = math.Float32frombits(uint32(data[i]) << 16)
	}
	return npy.Write(w, "<f4", shape, wide)
}
