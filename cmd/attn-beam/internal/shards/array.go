// Package shards reads and writes tensors that lie in several .npy files, through the file
// systems of Beam:
//
//	k, err := shards.Open(ctx, "k", "gs://bucket/k-*.npy") // headers are read and checked
//	...
//	err = k.Read(ctx, dst, batch, heads, rows)             // on a worker, where they are needed
//
// An [Array] holds URIs and lengths, no data, and travels to workers as JSON. A worker seeks
// where the file system can: local files. The readers of gs:// and s3:// are streams, which
// start at the beginning of a shard, and what lies before a range is read and dropped: a
// shard of one head and 32,768 rows wastes nothing, one of 8 heads half of what is read.
//
// Files that are written appear complete or not at all. Programs import the file systems
// that they use; local files are always there.
package shards

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"
	"strings"
	"sync"
	"unicode"

	"github.com/apache/beam/sdks/v2/go/pkg/beam/io/filesystem"
	_ "github.com/apache/beam/sdks/v2/go/pkg/beam/io/filesystem/local" // the default

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/backend/atomicfile"
	"github.com/seed90331342/attn/cmd/attn-beam/internal/cut"
	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/npy"
)

// Array is a tensor [batch, heads, rows, elements] in shards.
type Array struct {
	// Name is used in errors: "k".
	Name string
	// Type is numpy's name of the elements, f2 or f4.
	Type  string
	Shape [4]int
	// Shards hold every row of every head once, in the order of batches, heads and rows.
	Shards []Shard
}

// Shard is a file and the part of a tensor that it holds.
type Shard struct {
	URI                string
	Batch, Heads, Rows cut.Range
	// Start is the offset of the data in the file. Open and Check set it.
	Start int64 `json:",omitempty"`
	// BigEndian is the order of the bytes of an element.
	BigEndian bool `json:",omitempty"`
}

// Open reads and checks the headers of all shards of an input. uris are URIs or globs,
// separated by commas, of .npy files of f2 or f4 elements: [B, H, rows, D], [B, rows, D] or
// [rows, D]. They are concatenated along the rows, in the order of uris; the matches of a
// glob are in the order of their names, where numbers count as such: k-2.npy is before
// k-10.npy. The URI of a manifest, which ends in .json, stands for the tensor that the
// manifest calls o.
//
// Errors name the shard. They wrap ErrShape, ErrDType or the error of the file system.
func Open(ctx context.Context, name, uris string) (*Array, error) {
	if strings.HasSuffix(uris, ".json") {
		m, err := ReadManifest(ctx, uris)
		if err != nil {
			return nil, err
		}
		a := m.Outputs["o"]
		if a == nil {
			return nil, fmt.Errorf("%s: the manifest %s has no output o: %w", name, uris, backend.ErrShape)
		}
		a.Name = name
		return a, a.Check(ctx)
	}
	files, err := expand(ctx, name, uris)
	if err != nil {
		return nil, err
	}
	a := &Array{Name: name}
	headers, failures := make([]npy.Header, len(files)), make([]error, len(files))
	together(len(files), func(n int) { headers[n], failures[n] = header(ctx, files[n]) })
	for n, uri := range files {
		h, err := headers[n], failures[n]
		if err != nil {
			return nil, a.wrong(uri, err)
		}
		shape, err := fourAxes(h.Shape)
		if err != nil {
			return nil, a.wrong(uri, err)
		}
		if n == 0 {
			a.Type, a.Shape = h.TypeName(), shape
			a.Shape[backend.Seq] = 0
		}
		if h.TypeName() != a.Type {
			return nil, a.wrong(uri, fmt.Errorf("elements are %s, those of %s are %s: convert one of them: %w", h.TypeName(), files[0], a.Type, backend.ErrDType))
		}
		first, rows := a.Shape[backend.Seq], shape[backend.Seq]
		if shape[backend.Seq] = first; shape != a.Shape {
			shape[backend.Seq] = rows
			return nil, a.wrong(uri, fmt.Errorf("shape %v, that of %s is %v: shards differ only in the number of rows, the third length: %w", shape, files[0], a.first(), backend.ErrShape))
		}
		a.Shape[backend.Seq] += rows
		a.Shards = append(a.Shards, Shard{uri, cut.Range{Hi: shape[0]}, cut.Range{Hi: shape[1]}, cut.Range{Lo: first, Hi: first + rows}, h.Start, h.Order == binary.BigEndian})
	}
	return a, nil
}

// first is the shape of the first shard.
func (a *Array) first() [4]int {
	shape := a.Shape
	shape[backend.Seq] = a.Shards[0].Rows.Hi
	return shape
}

// wrong returns err with the names of the input and of a shard.
func (a *Array) wrong(uri string, err error) error {
	return fmt.Errorf("%s: shard %s: %w", a.Name, uri, err)
}

// fourAxes adds the leading axes that a shape lacks.
func fourAxes(shape []int) (four [4]int, err error) {
	switch len(shape) {
	case 2:
		return [4]int{1, 1, shape[0], shape[1]}, nil
	case 3:
		return [4]int{shape[0], 1, shape[1], shape[2]}, nil
	case 4:
		return [4]int(shape), nil
	}
	return four, fmt.Errorf("shape %v, it must be [B, H, rows, D], [B, rows, D] or [rows, D]: %w", shape, backend.ErrShape)
}

// expand returns the files of a list of URIs and globs.
func expand(ctx context.Context, name, uris string) (files []string, err error) {
	for _, uri := range strings.Split(uris, ",") {
		if !strings.ContainsAny(uri, "*?[") {
			if uri == "" {
				return nil, fmt.Errorf("%s: %q has an empty URI, give the URI of a .npy file: %w", name, uris, backend.ErrOption)
			}
			files = append(files, uri)
			continue
		}
		system, err := filesystem.New(ctx, uri)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		matches, err := system.List(ctx, uri)
		if err = errors.Join(err, system.Close()); err != nil {
			return nil, fmt.Errorf("%s: %s: %w", name, uri, err)
		}
		if len(matches) == 0 {
			return nil, fmt.Errorf("%s: no file matches %s: %w", name, uri, fs.ErrNotExist)
		}
		slices.SortFunc(matches, byNumber)
		files = append(files, matches...)
	}
	return files, nil
}

// byNumber compares names, where a run of digits counts as a number.
func byNumber(a, b string) int {
	x, y := a, b
	for x != "" && y != "" {
		i, j := digits(x), digits(y)
		if i == 0 || j == 0 {
			if x[0] != y[0] {
				return cmp.Compare(x[0], y[0])
			}
			x, y = x[1:], y[1:]
			continue
		}
		m, n := strings.TrimLeft(x[:i], "0"), strings.TrimLeft(y[:j], "0")
		if c := cmp.Or(cmp.Compare(len(m), len(n)), cmp.Compare(m, n)); c != 0 {
			return c
		}
		x, y = x[i:], y[j:]
	}
	return cmp.Or(cmp.Compare(len(x), len(y)), cmp.Compare(a, b))
}

// digits returns the number of digits that s begins with.
func digits(s string) int {
	return len(s) - len(strings.TrimLeftFunc(s, func(r rune) bool { return r < 128 && unicode.IsDigit(r) }))
}

// header reads the header of a file and checks its size and elements.
func header(ctx context.Context, uri string) (h npy.Header, err error) {
	r, size, err := open(ctx, uri)
	if err != nil {
		return h, err
	}
	if h, _, err = npy.Open(r, size); err != nil {
		err = fmt.Errorf("%w: %w", err, backend.ErrShape)
	} else if h.Kind != 'f' || h.Size > 4 {
		err = fmt.Errorf("elements are %s, they must be f2 or f4: convert them (numpy's astype): %w", h.TypeName(), backend.ErrDType)
	}
	return h, errors.Join(err, r.Close())
}

// file is an open file and its file system.
type file struct {
	io.ReadCloser
	system filesystem.Interface
}

func (f file) Close() error { return errors.Join(f.ReadCloser.Close(), f.system.Close()) }

// open opens a file for reading and returns its size.
func open(ctx context.Context, uri string) (f file, size int64, err error) {
	system, err := filesystem.New(ctx, uri)
	if err != nil {
		return f, 0, err
	}
	r, err := system.OpenRead(ctx, uri)
	if err != nil {
		return f, 0, errors.Join(reason(uri, err), system.Close())
	}
	f = file{r, system}
	if s, ok := r.(io.Seeker); ok {
		if size, err = s.Seek(0, io.SeekEnd); err == nil {
			_, err = s.Seek(0, io.SeekStart)
		}
	} else {
		size, err = system.Size(ctx, uri)
	}
	if err != nil {
		return f, 0, errors.Join(reason(uri, err), f.Close())
	}
	return f, size, nil
}

// reason returns err without the name of the file, and with advice for a missing one.
func reason(uri string, err error) error {
	if err = atomicfile.Reason(err); errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("the file is missing, write it or correct the URI: %w", err)
	}
	return err
}

// skip moves f forward by n bytes.
func (f file) skip(n int64) error {
	if s, ok := f.ReadCloser.(io.Seeker); ok {
		_, err := s.Seek(n, io.SeekCurrent)
		return err
	}
	_, err := io.CopyN(io.Discard, f, n)
	return err
}

// Check reads the headers of all shards again and compares them with a. It finds shards that
// are missing, truncated or other ones than they were.
func (a *Array) Check(ctx context.Context) error {
	for n, err := range a.check(ctx) {
		if err != nil {
			return a.wrong(a.Shards[n].URI, err)
		}
	}
	return a.covered()
}

// Unfinished returns the indices of the shards that have to be written: those that are missing
// or not what a describes.
func (a *Array) Unfinished(ctx context.Context) (all []int, err error) {
	for n, err := range a.check(ctx) {
		switch {
		case err == nil:
		case errors.Is(err, fs.ErrNotExist) || errors.Is(err, backend.ErrShape) || errors.Is(err, backend.ErrDType):
			all = append(all, n)
		default:
			return nil, a.wrong(a.Shards[n].URI, err)
		}
	}
	return all, nil
}

// check returns what is wrong with each shard, and notes where the data of the others are.
func (a *Array) check(ctx context.Context) []error {
	failures := make([]error, len(a.Shards))
	together(len(a.Shards), func(n int) {
		s := &a.Shards[n]
		h, err := header(ctx, s.URI)
		if err == nil {
			want := [4]int{s.Batch.Len(), s.Heads.Len(), s.Rows.Len(), a.Shape[backend.Dim]}
			if shape, wrong := fourAxes(h.Shape); wrong != nil || shape != want || h.TypeName() != a.Type {
				err = fmt.Errorf("%s of shape %v, it must be %s of shape %v: write it again: %w", h.TypeName(), h.Shape, a.Type, want, backend.ErrShape)
			}
		}
		s.Start, s.BigEndian, failures[n] = h.Start, h.Order == binary.BigEndian, err
	})
	return failures
}

// together calls f for 0 to n-1, 32 at a time: remote file systems take long to answer, and
// answer many requests at once.
func together(n int, f func(i int)) {
	var wait sync.WaitGroup
	for first := range min(n, 32) {
		wait.Go(func() {
			for i := first; i < n; i += 32 {
				f(i)
			}
		})
	}
	wait.Wait()
}

// covered reports rows of the array that no shard holds, or that two hold.
func (a *Array) covered() error {
	for b := range a.Shape[0] {
		for h := range a.Shape[1] {
			if err := a.overlaps(b, h, cut.Range{Hi: a.Shape[2]}, func(*Shard, cut.Range) error { return nil }); err != nil {
				return err
			}
		}
	}
	return nil
}

// overlaps calls f for each shard with some of the rows of a head, in order.
func (a *Array) overlaps(b, h int, rows cut.Range, f func(s *Shard, part cut.Range) error) error {
	at := rows.Lo
	for i := range a.Shards {
		s := &a.Shards[i]
		if b < s.Batch.Lo || b >= s.Batch.Hi || h < s.Heads.Lo || h >= s.Heads.Hi || s.Rows.Hi <= rows.Lo || s.Rows.Lo >= rows.Hi || s.Rows.Len() == 0 {
			continue
		}
		if max(s.Rows.Lo, rows.Lo) != at {
			return a.wrong(s.URI, fmt.Errorf("it begins at row %d of head %d of batch %d, row %d is next: each row must be in one shard: %w", s.Rows.Lo, h, b, at, backend.ErrShape))
		}
		part := cut.Range{Lo: at, Hi: min(s.Rows.Hi, rows.Hi)}
		if err := f(s, part); err != nil {
			return err
		}
		at = part.Hi
	}
	if at < rows.Hi {
		return fmt.Errorf("%s: rows %d to %d of head %d of batch %d are in no shard: %w", a.Name, at, rows.Hi-1, h, b, backend.ErrShape)
	}
	return nil
}

// raw reads rows of a head from a shard and calls f with pieces of whole elements.
func (a *Array) raw(ctx context.Context, s *Shard, b, h int, rows cut.Range, f func(raw []byte) error) error {
	r, _, err := open(ctx, s.URI)
	if err != nil {
		return a.wrong(s.URI, err)
	}
	row := int64(a.Shape[3] * a.size())
	before := int64((b-s.Batch.Lo)*s.Heads.Len()+h-s.Heads.Lo)*int64(s.Rows.Len()) + int64(rows.Lo-s.Rows.Lo)
	err = r.skip(s.Start + before*row)
	left := int64(rows.Len()) * row
	buf := make([]byte, min(left, 1<<20))
	for err == nil && left > 0 {
		piece := buf[:min(left, int64(len(buf)))]
		if _, err = io.ReadFull(r, piece); err == nil {
			err = f(piece)
		}
		left -= int64(len(piece))
	}
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		err = fmt.Errorf("it ends before or in rows %d to %d of head %d of batch %d, it was changed after the job began: start again: %w", rows.Lo, rows.Hi-1, h, b, backend.ErrShape)
	}
	if err = errors.Join(err, r.Close()); err != nil {
		return a.wrong(s.URI, err)
	}
	return nil
}

// size is the number of bytes of an element.
func (a *Array) size() int { return int(a.Type[1] - '0') }

// Read reads rows of the heads of a batch to dst, [heads, rows, elements].
func (a *Array) Read(ctx context.Context, dst []float32, batch int, heads, rows cut.Range) error {
	if n := heads.Len() * rows.Len() * a.Shape[3]; len(dst) != n || batch >= a.Shape[0] || heads.Hi > a.Shape[1] || rows.Hi > a.Shape[2] {
		return fmt.Errorf("%s: batch %d, heads %v and rows %v of shape %v into %d numbers: %w", a.Name, batch, heads, rows, a.Shape, len(dst), backend.ErrShape)
	}
	for h := heads.Lo; h < heads.Hi; h++ {
		err := a.overlaps(batch, h, rows, func(s *Shard, part cut.Range) error {
			code := s.code(a)
			return a.raw(ctx, s, batch, h, part, func(raw []byte) error {
				n := len(raw) / code.Size
				code.Float32s(dst[:n], raw)
				dst = dst[n:]
				return nil
			})
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// code decodes the elements of s.
func (s *Shard) code(a *Array) npy.Header {
	h := npy.Header{Kind: 'f', Size: a.size(), Order: binary.LittleEndian}
	if s.BigEndian {
		h.Order = binary.BigEndian
	}
	return h
}

// Bytes returns the bytes of n rows.
func (a *Array) Bytes(n int) int64 { return int64(n) * int64(a.Shape[3]) * int64(a.size()) }

// Dims returns the lengths of a call of q, k and v with the options o. It validates all of
// them as kernels.Device.Prepare does, without data.
func Dims(q, k, v *Array, o kernels.Options) (kernels.Dims, error) {
	tensors := make([]backend.Tensor, 3)
	for i, a := range []*Array{q, k, v} {
		one, err := backend.HostF32(make([]float32, 1), backend.Shape{1, 1, 1, 1})
		if a.Type == "f2" {
			one, err = backend.HostBits(make([]uint16, 1), backend.F16, backend.Shape{1, 1, 1, 1})
		}
		if err == nil {
			tensors[i], err = one.Broadcast(backend.Shape(a.Shape))
		}
		if err != nil {
			return kernels.Dims{}, fmt.Errorf("%s: %w", a.Name, err)
		}
	}
	dev := kernels.NewDevice(cpu.New(cpu.Options{}))
	defer dev.Close()
	call, err := dev.Prepare(tensors[0], tensors[1], tensors[2], o)
	if err != nil {
		return kernels.Dims{}, err
	}
	return call.Dims(), nil
}
