package npy

import (
	"bytes"
	"encoding/binary"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/sbinet/npyio/npy"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// FuzzNPY reads arbitrary files: the data agrees with the header, and numbers that were read
// and written are read again.
func FuzzNPY(f *testing.F) {
	var other bytes.Buffer
	must.Do(f, npy.Write(&other, []float64{1, -2.5, math.Inf(1)}))
	f.Add(other.Bytes(), false)
	file := func(descr, data string, shape ...int) []byte { return []byte(head(descr, shape) + data) }
	f.Add(file("<f4", strings.Repeat("\x00\x00\x80\x3f", 6), 1, 2, 3), false)
	f.Add(file(">f2", "\x3c\x00\x7c\x00", 2), false)
	f.Add(file("|b1", "\x00\x01\x02", 3), false)
	f.Add(file("=V2", "\x80\x3f", 1), false)
	f.Add(file("<i8", strings.Repeat("\xff", 16), 2, 1), true)
	f.Add(file("|u1", "\x00\xff", 2), true)
	f.Add([]byte("\x93NUMPY\x02\x00\x40\x00\x00\x00{'descr': [('a', '<f4')], 'fortran_order': True, 'shape': (3L,), }"), false)
	f.Add(file("<f4", "", 2, 0, 4), false)
	f.Add([]byte("\x93NUMPY\x03\x00\x04\x00\x00\x00{}()"), false)
	f.Fuzz(func(t *testing.T, content []byte, ints bool) {
		h, err := ReadHeader(bytes.NewReader(content), int64(len(content)), ints)
		if err != nil {
			return
		}
		n := 1
		for _, l := range h.Shape {
			n *= l
		}
		if n != h.Count || int(h.Start)+h.Count*h.Size != len(content) {
			t.Fatalf("shape %v, %d elements of %d bytes from byte %d of %d", h.Shape, h.Count, h.Size, h.Start, len(content))
		}
		if h.Count == 0 {
			return
		}
		raw := bytes.NewReader(content[h.Start:])
		switch h.Kind {
		case 'f':
			h2, r, err := Open(bytes.NewReader(content), int64(len(content)))
			if err != nil || h2.Start != h.Start || h2.Count != h.Count {
				t.Fatalf("opened as %+v, %v, should be %+v", h2, err, h)
			}
			data := must.Get(Read(r, h, func(dst []float32, raw []byte) { h.Float32s(dst, raw) }))(t)
			var again bytes.Buffer
			must.Do(t, Write(&again, "<f4", h.Shape, data))
			h3, r, err := Open(&again, int64(again.Len()))
			if err != nil || !slices.Equal(h3.Shape, h.Shape) {
				t.Fatalf("shape %v is written as %v, %v", h.Shape, h3.Shape, err)
			}
			back, err := Read(r, h3, func(dst []float32, raw []byte) { h3.Float32s(dst, raw) })
			if err != nil || !slices.EqualFunc(back, data, func(x, y float32) bool { return math.Float32bits(x) == math.Float32bits(y) }) {
				t.Fatalf("%v is written as %v, %v", data, back, err)
			}
		case 'i', 'u':
			data := must.Get(Read(raw, h, h.Int64s))(t)
			if last := data[len(data)-1]; h.Size == 1 && h.Kind == 'u' && last != int64(content[len(content)-1]) ||
				h.Size == 8 && uint64(last) != h.Order.Uint64(content[len(content)-8:]) ||
				h.Size == 4 && h.Order == binary.ByteOrder(binary.LittleEndian) && h.Kind == 'i' && last != int64(int32(binary.LittleEndian.Uint32(content[len(content)-4:]))) {
				t.Fatalf("the last of %v of %s", data, h.TypeName())
			}
		}
	})
}
