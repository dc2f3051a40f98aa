// Package npy reads .npy files of numbers and bools, in C or Fortran order, and writes them in C
// order, after numpy/lib/format.py: magic, version, header length, a Python dict as text, then the
// data. It checks a header against the size of its file, so that reading the data cannot fail
// halfway for lack of it.
package npy

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/x448/float16"

	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/internal/op"
)

// Header describes the data of a .npy file, or of a tensor of package safetensors.
type Header struct {
	Kind  byte // numpy's letter: 'f', 'b', 'i' or 'u'; 'w' for bf16, which numpy writes as <V2 with ml_dtypes
	Size  int  // bytes of an element: 1, 2, 4 or 8
	Order binary.ByteOrder
	Shape []int // empty for a single number
	Count int   // elements
	Start int64 // offset of the data in the file
	// Fortran reports that neighbours along the first axis, not the last, lie together. The
	// stride of axis i is the product of the lengths before it.
	Fortran bool
}

// TypeName returns numpy's short name without the byte order: f2, f4, f8, i4, bool; or bf16.
func (h *Header) TypeName() string {
	switch h.Kind {
	case 'b':
		return "bool"
	case 'w':
		return "bf16"
	}
	return string(h.Kind) + strconv.Itoa(h.Size)
}

// Int64s decodes len(dst) integers from raw.
func (h *Header) Int64s(dst []int64, raw []byte) {
	for i := range dst {
		var x uint64
		switch h.Size {
		case 1:
			x = uint64(raw[i])
		case 2:
			x = uint64(h.Order.Uint16(raw[2*i:]))
		case 4:
			x = uint64(h.Order.Uint32(raw[4*i:]))
		default:
			x = h.Order.Uint64(raw[8*i:])
		}
		dst[i] = int64(x)
		if shift := 64 - 8*h.Size; h.Kind == 'i' {
			dst[i] = int64(x<<shift) >> shift // the sign
		}
	}
}

// Float32s decodes len(dst) floating-point numbers from raw. It returns how many finite
// numbers were out of the range of float32 and became infinite.
func (h *Header) Float32s(dst []float32, raw []byte) (overflows int) {
	switch {
	case h.Kind == 'w': // the upper half of f4
		for i := range dst {
			dst[i] = math.Float32frombits(uint32(h.Order.Uint16(raw[2*i:])) << 16)
		}
	case h.Size == 2:
		for i := range dst {
			dst[i] = float16.Frombits(h.Order.Uint16(raw[2*i:])).Float32()
		}
	case h.Size == 4:
		for i := range dst {
			dst[i] = math.Float32frombits(h.Order.Uint32(raw[4*i:]))
		}
	default:
		for i := range dst {
			x := math.Float64frombits(h.Order.Uint64(raw[8*i:]))
			dst[i] = float32(x)
			if math.IsInf(float64(dst[i]), 0) && !math.IsInf(x, 0) {
				overflows++
			}
		}
	}
	return overflows
}

// maxHeader is far more than the header of a plain array takes (numpy itself reads at most
// 10,000 bytes). It keeps a wrong header length from costing memory.
const maxHeader = 64 << 10

// ReadHeader reads the header of a file of floating-point numbers or bools, or with ints of
// integers. size is the size of the file. Its errors describe what is wrong with the file:
// kernels.ErrDType for elements of another type, kernels.ErrFile for all else and for errors of r,
// which it wraps too.
func ReadHeader(r io.ReaderAt, size int64, ints bool) (Header, error) {
	h, err := readHeader(r, max(size, 0), ints)
	if !errors.Is(err, kernels.ErrDType) {
		err = op.As(kernels.ErrFile, err)
	}
	return h, err
}

func readHeader(r io.ReaderAt, size int64, ints bool) (h Header, err error) {
	// "\x93NUMPY", major, minor, then the length of the header: 2 bytes in version 1,
	// 4 in versions 2 and 3.
	var lead [12]byte
	got, err := r.ReadAt(lead[:min(size, int64(len(lead)))], 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return h, err
	}
	const magic = "\x93NUMPY"
	if n := min(got, len(magic)); n == 0 || string(lead[:n]) != magic[:n] {
		return h, errors.New("not a .npy file: it does not start with \\x93NUMPY")
	}
	if got < len(lead) {
		return h, fmt.Errorf("truncated: it ends after %d bytes, inside the .npy header", got)
	}
	var length, at int64
	switch lead[6] {
	case 1:
		length, at = int64(binary.LittleEndian.Uint16(lead[8:])), 10
	case 2, 3:
		length, at = int64(binary.LittleEndian.Uint32(lead[8:])), 12
	default:
		return h, fmt.Errorf(".npy version %d.%d, versions 1 to 3 are read", lead[6], lead[7])
	}
	if length > maxHeader {
		return h, fmt.Errorf("the .npy header is %d bytes long, at most %d are read", length, maxHeader)
	}
	if at+length > size {
		return h, fmt.Errorf("truncated: the .npy header ends at byte %d, the file at %d", at+length, size)
	}
	text := make([]byte, length)
	if n, err := r.ReadAt(text, at); n < len(text) {
		return h, err
	}
	if err := h.parse(string(text), ints); err != nil {
		return h, err
	}
	h.Start = at + length
	want, have := int64(h.Count)*int64(h.Size), size-h.Start
	switch {
	case have < want:
		return h, fmt.Errorf("truncated: shape %v of %s needs %d bytes of data, the file has %d", h.Shape, h.TypeName(), want, have)
	case have > want:
		return h, fmt.Errorf("shape %v of %s needs %d bytes of data, the file has %d: they must agree", h.Shape, h.TypeName(), want, have)
	}
	return h, nil
}

// Open reads the header of a file of the given size from r and returns it with a reader of
// the data. Errors are those of ReadHeader.
func Open(r io.Reader, size int64) (Header, io.Reader, error) {
	const most = 12 + maxHeader
	b := bufio.NewReaderSize(r, most)
	lead, err := b.Peek(int(min(max(size, 0), most)))
	if err != nil && !errors.Is(err, io.EOF) {
		return Header{}, nil, op.As(kernels.ErrFile, err)
	}
	h, err := ReadHeader(bytes.NewReader(lead), size, false)
	if err != nil {
		return h, nil, err
	}
	_, err = b.Discard(int(h.Start))
	return h, b, op.As(kernels.ErrFile, err)
}

// trailing is a comma at the end of a dict or a tuple, and the L of a length by Python 2.
var trailing = regexp.MustCompile(`,\s*([\]}])|\b(\d+)L\b`)

type dict struct {
	Descr   any   `json:"descr"`
	Fortran *bool `json:"fortran_order"`
	Shape   []int `json:"shape"`
}

// typeName is numpy's name of a type: a byte order, a letter and the bytes of an element. V2 is bf16.
var typeName = regexp.MustCompile(`^([<>=|]?)(f[248]|[iu][1248]|b1|\?|V2)$`)

// setType sets Kind, Size and Order. As in numpy all byte orders but < and > are the machine's. It
// reports whether the name is one of a type that is read.
func (h *Header) setType(name string) bool {
	m := typeName.FindStringSubmatch(name)
	if m == nil {
		return false
	}
	order, kind := m[1], cmp.Or(map[string]string{"?": "b1", "V2": "w2"}[m[2]], m[2])
	h.Kind, h.Size, h.Order = kind[0], int(kind[1]-'0'), binary.LittleEndian
	if bigEndian := binary.NativeEndian.Uint16([]byte{1, 0}) != 1; order == ">" || order != "<" && bigEndian {
		h.Order = binary.BigEndian
	}
	return true
}

// parse reads the dict of a header, {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }, as
// JSON. The descr of records is a list.
func (h *Header) parse(text string, ints bool) error {
	must := "f2, f4 or f8 numbers or bf16 (bool for a mask)"
	if ints {
		must = "integers, i1 to i8 or u1 to u8"
	}
	text = strings.NewReplacer("'", `"`, "(", "[", ")", "]", "True", "true", "False", "false").Replace(text)
	var dict dict
	if err := json.Unmarshal([]byte(trailing.ReplaceAllString(text, "$1$2")), &dict); err != nil {
		return fmt.Errorf("malformed .npy header: %w", err)
	}
	descr, named := dict.Descr.(string)
	switch {
	case dict.Descr == nil || dict.Fortran == nil || dict.Shape == nil:
		return errors.New("malformed .npy header: it must have descr, fortran_order and shape")
	case !named:
		return op.As(kernels.ErrDType, fmt.Errorf("elements are records, they must be %s", must))
	case !h.setType(descr) || (h.Kind == 'i' || h.Kind == 'u') != ints:
		return op.As(kernels.ErrDType, fmt.Errorf("elements are %q, they must be %s", descr, must))
	}
	h.Fortran = *dict.Fortran
	return h.SetShape(dict.Shape)
}

// SetShape sets Shape and Count. It returns kernels.ErrShape for a negative length, and for a shape
// whose bytes no integer counts.
func (h *Header) SetShape(shape []int) error {
	h.Shape, h.Count = shape, 1
	for _, l := range h.Shape {
		switch {
		case l < 0:
			return op.As(kernels.ErrShape, fmt.Errorf("shape %v: every length must be at least 0", h.Shape))
		case h.Count > math.MaxInt/16/max(l, 1):
			return op.As(kernels.ErrShape, fmt.Errorf("shape %v is larger than any file", h.Shape))
		}
		h.Count *= l
	}
	return nil
}

// chunk is the number of elements that are converted at a time: enough to hide the system
// calls, and within the second-level cache.
const chunk = 64 << 10

// Read reads the data of an array from r and returns it in C order. decode converts the bytes of
// a chunk, such as [Header.Float32s]. It returns kernels.ErrMemory when there is not enough memory,
// and kernels.ErrFile with the error of r.
func Read[T any](r io.Reader, h Header, decode func(dst []T, raw []byte)) ([]T, error) {
	data, err := kernels.Make[T](h.Count)
	if err != nil {
		return nil, err
	}
	buf := make([]byte, min(chunk, h.Count)*h.Size)
	var next func() int
	var stored []T // a chunk in Fortran order
	if h.Fortran {
		next, stored = h.places(), make([]T, min(chunk, h.Count))
	}
	for part := range slices.Chunk(data, chunk) {
		raw := buf[:len(part)*h.Size]
		if _, err := io.ReadFull(r, raw); err != nil {
			return nil, op.As(kernels.ErrFile, err)
		}
		if !h.Fortran {
			decode(part, raw)
			continue
		}
		stored = stored[:len(part)]
		decode(stored, raw)
		for _, x := range stored {
			data[next()] = x
		}
	}
	return data, nil
}

// places returns a function that returns the place in C order of each element in turn, in Fortran
// order.
func (h *Header) places() func() int {
	index, strides, at := make([]int, len(h.Shape)), make([]int, len(h.Shape)), 0
	for i, stride := len(h.Shape)-1, 1; i >= 0; i-- {
		strides[i] = stride
		stride *= h.Shape[i]
	}
	return func() int {
		place := at
		for i, l := range h.Shape {
			index[i]++
			at += strides[i]
			if index[i] < l {
				break
			}
			at -= l * strides[i]
			index[i] = 0
		}
		return place
	}
}

// Write writes a version 1.0 file of an array in C order, little endian. descr is numpy's
// name of the type with its byte order, such as "<f4", and data has its elements; the header alone is
// written for nil. It returns kernels.ErrDType for a type that the bytes of data would not have,
// kernels.ErrShape for a shape of another number of elements, and the errors of w.
func Write[T any](w io.Writer, descr string, shape []int, data []T) error {
	var h Header
	switch err := h.SetShape(shape); {
	case !h.setType(descr) || h.Size > 1 && h.Order != binary.LittleEndian:
		return fmt.Errorf("npy: descr is %q, it must be that of a little-endian type, such as <f4: %w", descr, kernels.ErrDType)
	case data != nil && binary.Size(make([]T, 1)) != h.Size:
		return fmt.Errorf("npy: descr is %q, elements of the data are %T: %w", descr, *new(T), kernels.ErrDType)
	case err != nil:
		return fmt.Errorf("npy: %w", err)
	case data != nil && len(data) != h.Count:
		return fmt.Errorf("npy: shape %v has %d elements, the data %d: %w", shape, h.Count, len(data), kernels.ErrShape)
	}
	buf := bufio.NewWriterSize(w, 1<<20)
	if _, err := buf.WriteString(head(descr, shape)); err != nil {
		return err
	}
	for part := range slices.Chunk(data, chunk) {
		if err := binary.Write(buf, binary.LittleEndian, part); err != nil {
			return err
		}
	}
	return buf.Flush()
}

// head returns the header of an array, padded as numpy does so that the data starts at a
// multiple of 64.
func head(descr string, shape []int) string {
	tuple := strings.Trim(strings.Join(strings.Fields(fmt.Sprint(shape)), ", "), "[]")
	if len(shape) == 1 {
		tuple += ","
	}
	dict := fmt.Sprintf("{'descr': '%s', 'fortran_order': False, 'shape': (%s), }", descr, tuple)
	const lead = 10 // magic, version, length
	pad := (64 - (lead+len(dict)+1)%64) % 64
	dict += strings.Repeat(" ", pad) + "\n"
	return "\x93NUMPY\x01\x00" + string(binary.LittleEndian.AppendUint16(nil, uint16(len(dict)))) + dict
}
