// Package shards reads and writes tensors that lie in several .npy files, through the file systems of Beam:
//
//	k, err := shards.Open(ctx, "k", "gs://bucket/k-*.npy") // headers are read and checked
//	...
//	err = k.Read(ctx, dst, batch, heads, rows)             // on a worker, where they are needed
//
// An [Array] holds URIs and lengths, no data, and travels to workers as JSON. A worker seeks where the file system can:
// local files. The readers of gs:// and s3:// are streams, which start at the beginning of a shard, and what lies
// before a range is read and dropped: of a shard with 8 heads, 3.5 on average to read one.
//
// Files that are written appear complete or not at all. Programs import the file systems
// that they use; local files are always there.
package shards

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strings"

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
	Batch, Heads, Rows cut.Span
	// Start is the offset of the data in the file. Open and Check set it.
	Start int64 `json:",omitempty"`
	// BigEndian is the order of the bytes of an element.
	BigEndian bool `json:",omitempty"`
}

// Open reads and checks the headers of all shards of an input. uris are URIs or globs, separated by commas, of .npy
// files of f2 or f4 elements: [B, H, rows, D], [B, rows, D] or [rows, D]. They are concatenated along the rows, in the
// order of uris; the matches of a glob are in the order of their names, where numbers count as such: k-2.npy is before
// k-10.npy. The URI of a manifest, which ends in .json, stands for the tensor that the manifest calls o.
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
			return nil, fmt.Errorf("%s: the manifest %s has no output o: %w", name, uris, kernels.ErrShape)
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
			a.Shape[kernels.Seq] = 0
		}
		if h.TypeName() != a.Type {
			return nil, a.wrong(uri, fmt.Errorf("elements are %s, those of %s are %s: convert one of them: %w", h.TypeName(), files[0], a.Type, kernels.ErrDType))
		}
		first, rows := a.Shape[kernels.Seq], shape[kernels.Seq]
		if shape[kernels.Seq] = first; shape != a.Shape {
			shape[kernels.Seq] = rows
			return nil, a.wrong(uri, fmt.Errorf("shape %v, that of %s is %v: shards differ only in the number of rows, the third length: %w", shape, files[0], a.first(), kernels.ErrShape))
		}
		a.Shape[kernels.Seq] += rows
		a.Shards = append(a.Shards, Shard{uri, cut.Span{Hi: shape[0]}, cut.Span{Hi: shape[1]}, cut.Span{Lo: first, Hi: first + rows}, h.Start, h.Order == binary.BigEndian})
	}
	return a, nil
}

// first is the shape of the first shard.
func (a *Array) first() [4]int {
	shape := a.Shape
	shape[kernels.Seq] = a.Shards[0].Rows.Hi
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
	return four, fmt.Errorf("shape %v, it must be [B, H, rows, D], [B, rows, D] or [rows, D]: %w", shape, kernels.ErrShape)
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

// Unfinished returns the indices of the shards that have to be written: those that are missing or not what a describes.
func (a *Array) Unfinished(ctx context.Context) (all []int, err error) {
	for n, err := range a.check(ctx) {
		switch {
		case err == nil:
		case errors.Is(err, fs.ErrNotExist) || errors.Is(err, kernels.ErrShape) || errors.Is(err, kernels.ErrDType):
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
			want := [4]int{s.Batch.Len(), s.Heads.Len(), s.Rows.Len(), a.Shape[kernels.Dim]}
			if shape, wrong := fourAxes(h.Shape); wrong != nil || shape != want || h.TypeName() != a.Type {
				err = fmt.Errorf("%s of shape %v, it must be %s of shape %v: write it again: %w", h.TypeName(), h.Shape, a.Type, want, kernels.ErrShape)
			}
		}
		s.Start, s.BigEndian, failures[n] = h.Start, h.Order == binary.BigEndian, err
	})
	return failures
}

// covered reports rows of the array that no shard holds, or that two hold.
func (a *Array) covered() error {
	for b := range a.Shape[0] {
		for h := range a.Shape[1] {
			if err := a.overlaps(b, h, cut.Span{Hi: a.Shape[2]}, func(*Shard, cut.Span) error { return nil }); err != nil {
				return err
			}
		}
	}
	return nil
}

// overlaps calls f for each shard with some of the rows of a head, in order.
func (a *Array) overlaps(b, h int, rows cut.Span, f func(s *Shard, part cut.Span) error) error {
	at := rows.Lo
	for i := range a.Shards {
		s := &a.Shards[i]
		if b < s.Batch.Lo || b >= s.Batch.Hi || h < s.Heads.Lo || h >= s.Heads.Hi || s.Rows.Hi <= rows.Lo || s.Rows.Lo >= rows.Hi || s.Rows.Len() == 0 {
			continue
		}
		if max(s.Rows.Lo, rows.Lo) != at {
			return a.wrong(s.URI, fmt.Errorf("it begins at row %d of head %d of batch %d, row %d is next: each row must be in one shard: %w", s.Rows.Lo, h, b, at, kernels.ErrShape))
		}
		part := cut.Span{Lo: at, Hi: min(s.Rows.Hi, rows.Hi)}
		if err := f(s, part); err != nil {
			return err
		}
		at = part.Hi
	}
	if at < rows.Hi {
		return fmt.Errorf("%s: rows %d to %d of head %d of batch %d are in no shard: %w", a.Name, at, rows.Hi-1, h, b, kernels.ErrShape)
	}
	return nil
}

// piece is some rows of a head that lie in one shard.
type piece struct {
	batch, head int
	rows        cut.Span
	take        func(raw []byte) error // takes the bytes of the rows, whole elements at a time
}

// read reads pieces of a shard, which are in the order of the file.
func (a *Array) read(ctx context.Context, s *Shard, pieces []piece) error {
	r, _, err := open(ctx, s.URI)
	if err != nil {
		return a.wrong(s.URI, err)
	}
	at := int64(0)
	for _, p := range pieces {
		before := ((p.batch-s.Batch.Lo)*s.Heads.Len()+p.head-s.Heads.Lo)*s.Rows.Len() + p.rows.Lo - s.Rows.Lo
		start := s.Start + a.Bytes(before)
		if err = r.skip(start - at); err == nil {
			err = takeAll(r, a.Bytes(p.rows.Len()), p.take)
		}
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			err = fmt.Errorf("it ends before or in rows %d to %d of head %d of batch %d, it was changed after the job began: start again: %w", p.rows.Lo, p.rows.Hi-1, p.head, p.batch, kernels.ErrShape)
		}
		if at = start + a.Bytes(p.rows.Len()); err != nil {
			break
		}
	}
	if err = errors.Join(err, r.Close()); err != nil {
		return a.wrong(s.URI, err)
	}
	return nil
}

// takeAll calls take for the next n bytes of r, up to a megabyte at a time.
func takeAll(r io.Reader, n int64, take func([]byte) error) error {
	buf := make([]byte, min(n, 1<<20))
	for ; n > 0; n -= int64(len(buf)) {
		buf = buf[:min(n, int64(len(buf)))]
		if _, err := io.ReadFull(r, buf); err != nil {
			return err
		}
		if err := take(buf); err != nil {
			return err
		}
	}
	return nil
}

// size is the number of bytes of an element.
func (a *Array) size() int { return int(a.Type[1] - '0') }

// Read reads rows of the heads of a batch to dst, [heads, rows, elements]. It opens each shard once.
func (a *Array) Read(ctx context.Context, dst []float32, batch int, heads, rows cut.Span) error {
	if n := heads.Len() * rows.Len() * a.Shape[3]; len(dst) != n || batch >= a.Shape[0] || heads.Hi > a.Shape[1] || rows.Hi > a.Shape[2] {
		return fmt.Errorf("%s: batch %d, heads %v and rows %v of shape %v into %d numbers: %w", a.Name, batch, heads, rows, a.Shape, len(dst), kernels.ErrShape)
	}
	var order []*Shard
	pieces := map[*Shard][]piece{}
	for h := heads.Lo; h < heads.Hi; h++ {
		err := a.overlaps(batch, h, rows, func(s *Shard, part cut.Span) error {
			code, to := s.code(a), dst[:part.Len()*a.Shape[3]]
			dst = dst[len(to):]
			if pieces[s] == nil {
				order = append(order, s)
			}
			pieces[s] = append(pieces[s], piece{batch, h, part, func(raw []byte) error {
				n := len(raw) / code.Size
				code.Float32s(to[:n], raw)
				to = to[n:]
				return nil
			}})
			return nil
		})
		if err != nil {
			return err
		}
	}
	for _, s := range order {
		if err := a.read(ctx, s, pieces[s]); err != nil {
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
	tensors := make([]kernels.Tensor, 3)
	for i, a := range []*Array{q, k, v} {
		one, err := kernels.HostF32(make([]float32, 1), kernels.Shape{1, 1, 1, 1})
		if a.Type == "f2" {
			one, err = kernels.Host(make([]uint16, 1), kernels.F16, kernels.Shape{1, 1, 1, 1})
		}
		if err == nil {
			tensors[i], err = one.Broadcast(kernels.Shape(a.Shape))
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
