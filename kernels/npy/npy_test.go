package npy

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/sbinet/npyio/npy"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
	"gonum.org/v1/gonum/mat"
)

// TestOpenReadsOtherWriters reads files that npyio writes.
func TestOpenReadsOtherWriters(t *testing.T) {
	for _, c := range []struct {
		name  string
		data  any
		shape []int
		size  int
		want  []float32
		over  int
	}{
		{"f4", []float32{1, -2.5, 3}, []int{3}, 4, []float32{1, -2.5, 3}, 0},
		{"f8", []float64{1, -2.5, 1e300, math.Inf(-1)}, []int{4}, 8, []float32{1, -2.5, float32(math.Inf(1)), float32(math.Inf(-1))}, 1},
		{"a matrix", mat.NewDense(2, 2, []float64{1, 2, 3, 4}), []int{2, 2}, 8, []float32{1, 2, 3, 4}, 0},
	} {
		var file bytes.Buffer
		must.Do(t, npy.Write(&file, c.data))
		h, r, err := Open(&file, int64(file.Len()))
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		raw, err := io.ReadAll(r)
		if err != nil || len(raw) != h.Count*h.Size || h.Size != c.size || !slices.Equal(h.Shape, c.shape) {
			t.Errorf("%s: %+v and %d bytes, %v", c.name, h, len(raw), err)
			continue
		}
		got := make([]float32, h.Count)
		if over := h.Float32s(got, raw); over != c.over || !slices.Equal(got, c.want) {
			t.Errorf("%s: %v and %d out of range, should be %v and %d", c.name, got, over, c.want, c.over)
		}
	}
}

// TestWriteIsReadByOthers reads our files with npyio.
func TestWriteIsReadByOthers(t *testing.T) {
	for _, shape := range [][]int{{6}, {2, 3}, {1, 3, 2}} {
		want := []float32{1, 2, 3, 4, 5, 6}
		var file bytes.Buffer
		must.Do(t, Write(&file, "<f4", shape, want))
		if start := file.Len() - 4*len(want); start%64 != 0 {
			t.Errorf("%v: the data starts at byte %d", shape, start)
		}
		r := must.Get(npy.NewReader(&file))(t)
		var got []float32
		if err := r.Read(&got); err != nil || !slices.Equal(got, want) || !slices.Equal(r.Header.Descr.Shape, shape) {
			t.Errorf("%v: read as %v %v, %v", shape, r.Header.Descr.Shape, got, err)
		}
	}
}

// TestOpenRefuses opens damaged files.
func TestOpenRefuses(t *testing.T) {
	whole := head("<f4", []int{1}) + "\x00\x00\x80\x3f"
	for _, c := range []struct {
		name     string
		text     string
		size     int64
		contains string
	}{
		{"empty", "", 0, "not a .npy file"},
		{"another format", "PK\x03\x04 and so on", 16, "not a .npy file"},
		{"magic cut", whole[:4], 4, "truncated: it ends after 4 bytes"},
		{"header cut", whole[:40], 40, "truncated: the .npy header ends at byte 128"},
		{"data cut", whole[:len(whole)-1], int64(len(whole) - 1), "truncated: shape [1] of f4 needs 4 bytes of data"},
		{"too much", whole + "x", int64(len(whole) + 1), "they must agree"},
		{"shorter than its size", whole[:40], int64(len(whole)), "EOF"},
	} {
		if _, _, err := Open(strings.NewReader(c.text), c.size); err == nil || !strings.Contains(err.Error(), c.contains) {
			t.Errorf("%s: error is %v, should contain %q", c.name, err, c.contains)
		} else if !errors.Is(err, kernels.ErrFile) {
			t.Errorf("%s: %v is not ErrFile", c.name, err)
		}
	}
}

// TestHeadersOfOtherWriters parses dicts in the forms that numpy accepts, and refuses others.
func TestHeadersOfOtherWriters(t *testing.T) {
	for _, c := range []struct {
		dict     string
		shape    []int
		contains string
	}{
		{"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }", []int{2, 3}, ""},
		{`{"shape":(3L,),"fortran_order":False,"descr":"<f4"}`, []int{3}, ""},
		{"{'shape': (2L, 3L), 'fortran_order': False, 'descr': '<f4', 'more': [1, [2]]}", []int{2, 3}, ""},
		{"{'descr': '<f4',\n 'fortran_order': False, 'shape': ()}\n", nil, ""},
		{"[1, 2, 3]", nil, "cannot unmarshal array into Go value of type npy.dict"},
		{"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3", nil, "unexpected end"},
		{"{'descr': '<f4', 'fortran_order': False, 'shape': (2, x), }", nil, "invalid character 'x'"},
		{"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), } trailing", nil, "invalid character 't' after top-level value"},
		{"{'descr': '<f4', 'fortran_order': False, 'shape': (2 3)}", nil, "invalid character '3' after array element"},
		{"{'descr': '<f4', 'fortran_order': False, 'shape': (9999999999999999999999,)}", nil, "cannot unmarshal number 9999999999999999999999"},
		{"{'descr': '<f4', 'fortran_order': False}", nil, "it must have descr, fortran_order and shape"},
		{"{'descr': '<f4', 'fortran_order': 'no', 'shape': (2,)}", nil, "of type bool"},
		{"{'descr': [('x', '<f4'), ('y', '<f4')], 'fortran_order': False, 'shape': (2,)}", nil, "elements are records"},
	} {
		var h Header
		err := h.parse(c.dict, false)
		switch {
		case c.contains == "" && (err != nil || !slices.Equal(h.Shape, c.shape)):
			t.Errorf("%s: shape %v, %v, should be %v", c.dict, h.Shape, err, c.shape)
		case c.contains != "" && (err == nil || !strings.Contains(err.Error(), c.contains)):
			t.Errorf("%s: error is %v, should contain %q", c.dict, err, c.contains)
		}
	}
}

// TestTypes reads the number 1 in each spelling of its type: a byte order but < and > is the
// machine's, as in numpy, and ml_dtypes writes bf16 as V2. Other types are refused.
func TestTypes(t *testing.T) {
	native := "<"
	if binary.NativeEndian.Uint16([]byte{1, 0}) != 1 {
		native = ">"
	}
	for _, c := range []struct{ name, is, big string }{
		{"f2", "f2", "\x3c\x00"}, {"f4", "f4", "\x3f\x80\x00\x00"}, {"f8", "f8", "\x3f\xf0\x00\x00\x00\x00\x00\x00"},
		{"V2", "bf16", "\x3f\x80"}, {"b1", "bool", "\x01"}, {"?", "bool", "\x01"}, {"i1", "i1", "\x01"}, {"u1", "u1", "\x01"},
		{"u2", "u2", "\x00\x01"}, {"i4", "i4", "\x00\x00\x00\x01"}, {"i8", "i8", "\x00\x00\x00\x00\x00\x00\x00\x01"},
		{"V1", "", ""}, {"V4", "", ""}, {"c8", "", ""}, {"f1", "", ""}, {"f16", "", ""}, {"f40", "", ""}, {"b2", "", ""}, {"u3", "", ""}, {"U2", "", ""}, {"O", "", ""},
	} {
		for _, order := range []string{"<", ">", "=", "|", ""} {
			data := []byte(c.big)
			if order == "<" || order != ">" && native == "<" {
				slices.Reverse(data)
			}
			file, ints := head(order+c.name, []int{1})+string(data), c.is != "" && strings.Contains("iu", c.is[:1])
			h, err := ReadHeader(strings.NewReader(file), int64(len(file)), ints)
			if _, other := ReadHeader(strings.NewReader(file), int64(len(file)), !ints); c.is != "" && !errors.Is(other, kernels.ErrDType) {
				t.Errorf("%s%s with ints %v: %v", order, c.name, !ints, other)
			}
			switch {
			case c.is == "" && !errors.Is(err, kernels.ErrDType):
				t.Errorf("%s%s is read as %s, %v", order, c.name, h.TypeName(), err)
			case c.is == "":
			case err != nil || h.TypeName() != c.is:
				t.Errorf("%s%s is read as %s, %v; want %s", order, c.name, h.TypeName(), err, c.is)
			default:
				var f [1]float32
				var i [1]int64
				if h.Kind == 'f' || h.Kind == 'w' {
					h.Float32s(f[:], data)
				} else {
					h.Int64s(i[:], data)
				}
				if f[0]+float32(i[0]) != 1 {
					t.Errorf("%s%s is read as %v", order, c.name, f[0]+float32(i[0]))
				}
			}
		}
	}
}

// TestWriteRefuses: a file whose header contradicts its data is not written.
func TestWriteRefuses(t *testing.T) {
	for _, c := range []struct {
		descr string
		shape []int
		want  error
	}{
		{">f4", []int{2}, kernels.ErrDType}, {"<f8", []int{2}, kernels.ErrDType}, {"<c8", []int{2}, kernels.ErrDType}, {"', }", []int{2}, kernels.ErrDType},
		{"<f4", []int{3}, kernels.ErrShape}, {"<f4", []int{-1, -2}, kernels.ErrShape}, {"<f4", []int{1 << 40, 1 << 40}, kernels.ErrShape},
	} {
		var file bytes.Buffer
		if err := Write(&file, c.descr, c.shape, []float32{1, 2}); !errors.Is(err, c.want) || file.Len() > 0 {
			t.Errorf("%s %v: %d bytes, %v, want %v", c.descr, c.shape, file.Len(), err, c.want)
		}
	}
}

// TestFortran reads arrays in Fortran order, whose first axis varies fastest, as C order.
func TestFortran(t *testing.T) {
	for _, c := range []struct {
		shape        string
		stored, want []byte
	}{
		{"()", []byte{7}, []byte{7}},
		{"(3,)", []byte{1, 2, 3}, []byte{1, 2, 3}},
		{"(2, 3)", []byte{1, 4, 2, 5, 3, 6}, []byte{1, 2, 3, 4, 5, 6}},
		{"(2, 1, 3)", []byte{1, 4, 2, 5, 3, 6}, []byte{1, 2, 3, 4, 5, 6}},
		{"(2, 2, 2)", []byte{1, 5, 3, 7, 2, 6, 4, 8}, []byte{1, 2, 3, 4, 5, 6, 7, 8}},
		{"(2, 0)", nil, nil},
	} {
		var h Header
		must.Do(t, h.parse("{'descr': '|u1', 'fortran_order': True, 'shape': "+c.shape+", }", true))
		got, err := Read(bytes.NewReader(c.stored), h, func(dst, raw []byte) { copy(dst, raw) })
		if err != nil || !slices.Equal(got, c.want) {
			t.Errorf("%s: %v, %v, want %v", c.shape, got, err, c.want)
		}
	}
	// More than one chunk.
	h := Header{Kind: 'u', Size: 1, Fortran: true}
	must.Do(t, h.SetShape([]int{3, chunk}))
	stored := make([]byte, h.Count)
	for i := range stored {
		stored[i] = byte(i%3*7 + i/3)
	}
	got := must.Get(Read(bytes.NewReader(stored), h, func(dst, raw []byte) { copy(dst, raw) }))(t)
	for i, x := range got {
		if x != byte(i/chunk*7+i%chunk) {
			t.Fatalf("element %d is %d", i, x)
		}
	}
}

// TestMap maps bytes on both sides of a page's edge.
func TestMap(t *testing.T) {
	page := os.Getpagesize()
	content := make([]byte, 3*page)
	for i := range content {
		content[i] = byte(i * 7 / 5)
	}
	path := filepath.Join(t.TempDir(), "x")
	must.Do(t, os.WriteFile(path, content, 0o600))
	f := must.Get(os.Open(path))(t)
	defer f.Close()
	for _, c := range [][2]int{{0, 1}, {0, 3 * page}, {1, page}, {page - 1, 2}, {page, page}, {2*page + 3, page - 3}} {
		got, unmap, err := (&Header{Start: int64(c[0]), Count: c[1], Size: 1}).Map(f)
		if errors.Is(err, errors.ErrUnsupported) {
			t.Skip("this system maps no files")
		}
		must.Do(t, err)
		if !bytes.Equal(got, content[c[0]:c[0]+c[1]]) {
			t.Errorf("bytes %d to %d differ", c[0], c[0]+c[1])
		}
		unmap()
	}
}
