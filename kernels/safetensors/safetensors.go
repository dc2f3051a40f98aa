// Package safetensors reads the headers of .safetensors files, after the format's
// description (https://github.com/huggingface/safetensors):
//
//	8 bytes    n, the length of the header, little endian
//	n bytes    the header, JSON: {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}
//	the rest   the data of the tensors, little endian, in C order, without gaps
//
// Offsets count from the end of the header. The name __metadata__ is reserved for strings of
// any content, which are ignored. A header agrees with the size of its file, so that reading
// a tensor cannot fail halfway for lack of it.
package safetensors

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/internal/op"
	"github.com/seed90331342/attn/kernels/npy"
)

// Header has the tensors of a file.
type Header struct {
	tensors map[string]tensor
}

type tensor struct {
	npy.Header        // without Kind for a type that is not read
	dtype      string // the format's name of the type
	end        int64  // of the data in the file
}

// types are the format's types: numpy's letter, 0 if they are not read, and the bits of an element.
var types = map[string]struct {
	kind byte
	bits int
}{
	"F64": {'f', 64}, "F32": {'f', 32}, "F16": {'f', 16}, "BF16": {'w', 16}, "BOOL": {'b', 8},
	"I64": {'i', 64}, "I32": {'i', 32}, "I16": {'i', 16}, "I8": {'i', 8},
	"U64": {'u', 64}, "U32": {'u', 32}, "U16": {'u', 16}, "U8": {'u', 8},
	"F8_E4M3": {0, 8}, "F8_E5M2": {0, 8}, "F8_E8M0": {0, 8}, "F6_E2M3": {0, 6}, "F6_E3M2": {0, 6}, "F4": {0, 4}, "C64": {0, 64},
}

// maxHeader is the format's limit.
const maxHeader = 100_000_000

// ReadHeader reads the header of a file of the given size. Its errors describe what is wrong
// with the file: kernels.ErrMemory, or kernels.ErrFile, also for errors of r, which it wraps too.
func ReadHeader(r io.ReaderAt, size int64) (*Header, error) {
	h, err := readHeader(r, size)
	if !errors.Is(err, kernels.ErrMemory) {
		err = op.As(kernels.ErrFile, err)
	}
	return h, err
}

func readHeader(r io.ReaderAt, size int64) (*Header, error) {
	var lead [8]byte
	if size < int64(len(lead)) {
		return nil, fmt.Errorf("truncated: it ends after %d bytes, inside the length of the .safetensors header", size)
	}
	if n, err := r.ReadAt(lead[:], 0); n < len(lead) {
		return nil, err
	}
	length, start := binary.LittleEndian.Uint64(lead[:]), int64(len(lead))
	switch {
	case length > maxHeader:
		return nil, fmt.Errorf("not a .safetensors file, or a damaged one: its header is %d bytes long, at most %d are read", length, maxHeader)
	case start+int64(length) > size:
		return nil, fmt.Errorf("truncated: the .safetensors header ends at byte %d, the file at %d", start+int64(length), size)
	}
	// Small entries take 20 times the memory of their text while they are read.
	if err := kernels.CheckMemory(24 * int64(length)); err != nil {
		return nil, err
	}
	text := make([]byte, length)
	if n, err := r.ReadAt(text, start); n < len(text) {
		return nil, err
	}
	start += int64(length)
	h := &Header{map[string]tensor{}}
	if err := h.parse(text, start); err != nil {
		return nil, fmt.Errorf("malformed .safetensors header: %w", err)
	}
	return h, h.place(start, size)
}

// parse reads the JSON of a header whose data starts at a byte of the file.
func (h *Header) parse(text []byte, start int64) error {
	if !bytes.HasPrefix(text, []byte("{")) {
		return errors.New("it does not start with {")
	}
	if !utf8.Valid(text) { // otherwise names could become equal
		return errors.New("it is not UTF-8")
	}
	entries, err := members(text)
	if err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(entries)) {
		if name == "__metadata__" {
			if json.Unmarshal(entries[name], new(map[string]string)) != nil {
				return errors.New("__metadata__ is not an object of strings")
			}
			continue
		}
		t := tensor{Header: npy.Header{Order: binary.LittleEndian}}
		if err := t.parse(entries[name], start); err != nil {
			return fmt.Errorf("tensor %.200q: %w", name, err)
		}
		h.tensors[name] = t
	}
	return nil
}

// members returns the members of a JSON object. It refuses two of one name, of which
// encoding/json takes the last.
func members(text []byte) (m map[string]json.RawMessage, err error) {
	if !bytes.HasPrefix(text, []byte("{")) {
		return nil, errors.New("it is not an object")
	}
	if err := json.Unmarshal(text, &m); err != nil {
		return nil, err
	}
	d, seen := json.NewDecoder(bytes.NewReader(text)), map[json.Token]bool{}
	for _, err = d.Token(); err == nil && d.More(); err = d.Decode(new(json.RawMessage)) {
		name, _ := d.Token() // the text is valid
		if seen[name] {
			return nil, fmt.Errorf("%.200q is there twice", name)
		}
		seen[name] = true
	}
	return m, err
}

// parse reads the entry of a tensor in a file whose data starts at a byte. Keys that the
// format does not define are ignored.
func (t *tensor) parse(text json.RawMessage, start int64) error {
	entry, err := members(text) // a struct would accept keys in capitals
	if err != nil {
		return err
	}
	var shape []int
	var offsets []int64
	for _, field := range []struct {
		key  string
		to   any
		must string
	}{{"dtype", &t.dtype, "a string"}, {"shape", &shape, "lengths of at most 63 bits"}, {"data_offsets", &offsets, "two numbers of at most 63 bits"}} {
		if value, ok := entry[field.key]; ok && json.Unmarshal(value, field.to) != nil {
			return fmt.Errorf("%s is %.40q, it must be %s", field.key, value, field.must)
		}
	}
	if t.dtype == "" || shape == nil || len(offsets) != 2 {
		return errors.New("it must have a dtype, a shape and two data_offsets")
	}
	if err := t.SetShape(shape); err != nil {
		return err
	}
	if offsets[0] < 0 || offsets[1] < offsets[0] || offsets[1] > math.MaxInt64-start {
		return fmt.Errorf("data_offsets are %v, they must ascend from 0", offsets)
	}
	t.Start, t.end = start+offsets[0], start+offsets[1]
	if known, ok := types[t.dtype]; ok {
		t.Kind, t.Size = known.kind, known.bits/8
		want, have := (int64(t.Count)*int64(known.bits)+7)/8, offsets[1]-offsets[0]
		if want != have {
			return fmt.Errorf("shape %v of %s needs %d bytes, data_offsets %v have %d", shape, t.dtype, want, offsets, have)
		}
	}
	return nil
}

// place checks that the tensors fill the file from start to size, one after the other.
func (h *Header) place(start, size int64) error {
	names := slices.SortedFunc(maps.Keys(h.tensors), func(a, b string) int {
		x, y := h.tensors[a], h.tensors[b]
		return cmp.Or(cmp.Compare(x.Start, y.Start), cmp.Compare(x.end, y.end), cmp.Compare(a, b))
	})
	at, last := start, "" // the header
	before := func() string {
		if at == start {
			return "the header"
		}
		return fmt.Sprintf("tensor %.200q", last)
	}
	for _, name := range names {
		t := h.tensors[name]
		switch {
		case t.end > size:
			return fmt.Errorf("truncated: tensor %.200q ends at byte %d, the file at %d", name, t.end, size)
		case t.Start < at:
			return fmt.Errorf("tensor %.200q starts at byte %d, before the end of %s at byte %d: tensors must not overlap", name, t.Start, before(), at)
		case t.Start > at:
			return fmt.Errorf("tensor %.200q starts at byte %d, %s ends at byte %d: there must be no gaps", name, t.Start, before(), at)
		}
		at, last = t.end, name
	}
	if at < size {
		return fmt.Errorf("%s ends at byte %d, the file at %d: they must agree", before(), at, size)
	}
	return nil
}

// Tensor returns where and how the data of a tensor is stored. It returns kernels.ErrFile with the
// names that exist if there is no such tensor, and kernels.ErrDType for types that are not read: F4, F6,
// F8 and complex numbers.
func (h *Header) Tensor(name string) (npy.Header, error) {
	t, ok := h.tensors[name]
	switch {
	case !ok:
		return t.Header, op.As(kernels.ErrFile, fmt.Errorf("there is no tensor %q, the file has %s", name, h.List("")))
	case t.Kind == 0:
		return t.Header, op.As(kernels.ErrDType, fmt.Errorf("tensor %q is %.20s, which is not read: convert it to F32, F16 or BF16", name, t.dtype))
	}
	return t.Header, nil
}

// Has reports whether there is a tensor of that name.
func (h *Header) Has(name string) bool {
	_, ok := h.tensors[name]
	return ok
}

// List returns the sorted names that begin with prefix, for an error: at most 20 of them, and none
// of the names in except. Without names it returns "none".
func (h *Header) List(prefix string, except ...string) string {
	const most = 20
	names := slices.DeleteFunc(slices.Sorted(maps.Keys(h.tensors)), func(name string) bool {
		return !strings.HasPrefix(name, prefix) || slices.Contains(except, name)
	})
	switch n := len(names); {
	case n == 0:
		return "none"
	case n > most:
		return fmt.Sprintf("%.80q and %d more", names[:most], n-most)
	}
	return fmt.Sprintf("%.80q", names)
}
