package main

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"strconv"
	"strings"

	"github.com/seed90331342/attn/backend"
)

// npyFile is a .npy file whose header was read and whose size was checked
// against it, so that the data can be read without another surprise. The format
// is numpy/lib/format.py's: magic, version, header length, a Python dict as
// text, the data.
type npyFile struct {
	name  string // what errors call it
	path  string
	kind  byte // 'f' or 'b', numpy's letter
	size  int  // bytes an element
	order binary.ByteOrder
	shape []int
	start int64 // where the data begins
	count int   // elements
}

// maxHeader is far above what a plain array's header takes (numpy refuses to
// read more than 10,000 bytes itself), and keeps a header length that lies from
// costing memory.
const maxHeader = 64 << 10

// openNPY reads and checks the header of a file of floating point numbers, or
// also of bools where the caller takes them. name is what the command line
// calls it.
func openNPY(name, path string, bools bool) (*npyFile, error) {
	n := &npyFile{name: name, path: path}
	if err := n.readHeader(); err != nil {
		var pe *os.PathError
		if errors.As(err, &pe) {
			err = pe.Err // the path is in the text already
		}
		return nil, fmt.Errorf("--%s %s: %w", name, path, err)
	}
	if n.kind == 'b' && !bools {
		return nil, fmt.Errorf("--%s %s: elements are bool, they must be f2, f4 or f8", name, path)
	}
	return n, nil
}

func (n *npyFile) readHeader() error {
	f, err := os.Open(n.path)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() {
		return errors.New("not a regular file")
	}
	// "\x93NUMPY", major, minor, then the header's length: 2 bytes in version
	// 1, 4 in versions 2 and 3.
	var lead [12]byte
	got, err := io.ReadFull(f, lead[:])
	if err != nil && !errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, io.EOF) {
		return err
	}
	if magic := "\x93NUMPY"; !bytes.HasPrefix(lead[:got], []byte(magic)) {
		if got > 0 && strings.HasPrefix(magic, string(lead[:got])) {
			return fmt.Errorf("truncated: it ends after %d bytes, inside the .npy header", got)
		}
		return errors.New("not a .npy file: it does not start with \\x93NUMPY")
	}
	if got < len(lead) {
		return fmt.Errorf("truncated: it ends after %d bytes, inside the .npy header", got)
	}
	var length, at int64
	switch lead[6] {
	case 1:
		length, at = int64(binary.LittleEndian.Uint16(lead[8:])), 10
	case 2, 3:
		length, at = int64(binary.LittleEndian.Uint32(lead[8:])), 12
	default:
		return fmt.Errorf(".npy version %d.%d, versions 1 to 3 are read", lead[6], lead[7])
	}
	if length > maxHeader {
		return fmt.Errorf("the .npy header says that it is %d bytes long, at most %d are read", length, maxHeader)
	}
	if at+length > info.Size() {
		return fmt.Errorf("truncated: the .npy header ends at byte %d, the file at %d", at+length, info.Size())
	}
	text := make([]byte, length)
	if _, err := f.ReadAt(text, at); err != nil {
		return err
	}
	if err := n.parse(string(text)); err != nil {
		return err
	}
	n.start = at + length
	want, have := int64(n.count)*int64(n.size), info.Size()-n.start
	switch {
	case have < want:
		return fmt.Errorf("truncated: shape %v of %s needs %d bytes of data, the file has %d", n.shape, n.typeName(), want, have)
	case have > want:
		return fmt.Errorf("shape %v of %s needs %d bytes of data, the file has %d: they must agree", n.shape, n.typeName(), want, have)
	}
	return nil
}

// parse reads the dict: {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }.
func (n *npyFile) parse(text string) error {
	d, err := parsePyDict(text)
	if err != nil {
		return fmt.Errorf("malformed .npy header: %w", err)
	}
	for _, key := range []string{"descr", "fortran_order", "shape"} {
		if _, ok := d[key]; !ok {
			return fmt.Errorf("malformed .npy header: it has no %q", key)
		}
	}
	descr, ok := d["descr"].(string)
	if !ok {
		return errors.New("elements are records, they must be f2, f4 or f8 numbers (bool for a mask)")
	}
	switch descr {
	case "<f2", "<f4", "<f8", ">f2", ">f4", ">f8", "|b1":
	default:
		return fmt.Errorf("elements are %q, they must be f2, f4 or f8 numbers (bool for a mask)", descr)
	}
	n.order = binary.ByteOrder(binary.LittleEndian)
	if descr[0] == '>' {
		n.order = binary.BigEndian
	}
	n.kind, n.size = descr[1], int(descr[2]-'0')
	fortran, ok := d["fortran_order"].(bool)
	if !ok {
		return errors.New("malformed .npy header: fortran_order is neither True nor False")
	}
	if n.shape, ok = d["shape"].([]int); !ok {
		return errors.New("malformed .npy header: the shape is not a tuple of whole numbers")
	}
	if fortran {
		return errors.New("stored in Fortran order, it must be in C order (numpy.ascontiguousarray before saving)")
	}
	n.count = 1
	for _, l := range n.shape {
		switch {
		case l < 1:
			return fmt.Errorf("shape %v: every length must be at least 1", n.shape)
		case n.count > math.MaxInt/16/l:
			return fmt.Errorf("shape %v is larger than any file", n.shape)
		}
		n.count *= l
	}
	return nil
}

// typeName is numpy's short name without the byte order.
func (n *npyFile) typeName() string {
	if n.kind == 'b' {
		return "bool"
	}
	return "f" + strconv.Itoa(n.size)
}

// dtype is the type that the elements have in memory unless asked otherwise: the
// file's, and f32 for f8.
func (n *npyFile) dtype() backend.DType {
	switch {
	case n.kind == 'b':
		return backend.Bool
	case n.size == 2:
		return backend.F16
	}
	return backend.F32
}

// parsePyDict reads the Python literals that a .npy header holds: a dict from
// strings to strings, bools, tuples of integers, and lists (which come back as
// nil: records, which nobody here reads).
func parsePyDict(text string) (map[string]any, error) {
	p := pyParser{rest: text}
	if !p.take('{') {
		return nil, errors.New("it is not a dict")
	}
	d := map[string]any{}
	for !p.take('}') {
		key, err := p.value()
		if err != nil {
			return nil, err
		}
		name, ok := key.(string)
		if !ok || !p.take(':') {
			return nil, errors.New("it is not a dict of strings")
		}
		if d[name], err = p.value(); err != nil {
			return nil, err
		}
		if !p.take(',') && !p.peek('}') {
			return nil, errors.New("the dict does not end")
		}
	}
	if strings.TrimSpace(p.rest) != "" {
		return nil, errors.New("something follows the dict")
	}
	return d, nil
}

type pyParser struct{ rest string }

func (p *pyParser) skipSpace() { p.rest = strings.TrimLeft(p.rest, " \t\r\n") }

func (p *pyParser) peek(c byte) bool {
	p.skipSpace()
	return p.rest != "" && p.rest[0] == c
}

func (p *pyParser) take(c byte) bool {
	ok := p.peek(c)
	if ok {
		p.rest = p.rest[1:]
	}
	return ok
}

func (p *pyParser) value() (any, error) {
	switch {
	case p.take('\''):
		return p.until('\'')
	case p.take('"'):
		return p.until('"')
	case p.peek('['):
		// Records: find the end of the list, whatever is in it.
		depth := 0
		for i, c := range p.rest {
			switch c {
			case '[':
				depth++
			case ']':
				depth--
			}
			if depth == 0 {
				p.rest = p.rest[i+1:]
				return nil, nil
			}
		}
		return nil, errors.New("a list does not end")
	case p.take('('):
		shape := []int{}
		for !p.take(')') {
			word := p.word()
			l, err := strconv.Atoi(strings.TrimSuffix(word, "L")) // Python 2 wrote 3L
			if err != nil {
				return nil, fmt.Errorf("%q in a tuple is not a whole number", word)
			}
			shape = append(shape, l)
			if !p.take(',') && !p.peek(')') {
				return nil, errors.New("a tuple does not end")
			}
		}
		return shape, nil
	}
	switch word := p.word(); word {
	case "True":
		return true, nil
	case "False":
		return false, nil
	default:
		return nil, fmt.Errorf("%q is not understood", word)
	}
}

func (p *pyParser) until(quote byte) (string, error) {
	s, rest, ok := strings.Cut(p.rest, string(quote))
	if !ok {
		return "", errors.New("a string does not end")
	}
	p.rest = rest
	return s, nil
}

// word takes what comes before the next separator.
func (p *pyParser) word() string {
	p.skipSpace()
	end := strings.IndexAny(p.rest, " \t\r\n,:(){}[]'\"")
	if end < 0 {
		end = len(p.rest)
	}
	w := p.rest[:end]
	p.rest = p.rest[end:]
	return w
}
