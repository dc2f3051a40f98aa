package kernels

import (
	"archive/zip"
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels/npy"
)

// archiveSuffix tells an archive of arrays, as numpy.savez writes it, from a folder
// with one file for each.
const archiveSuffix = ".npz"

// LoadWeights reads the weights of a layer from path: an .npz archive, or a folder of
// .npy files. The arrays are named wq, wk, wv, wo and, with Bias, bq, bk, bv, bo; a
// weight has the axes (rows, columns) as in [MultiHeadWeights], a bias one. They are
// f2, f4 or f8 in C order. Other arrays are passed over.
//
// Errors: ErrFile for a file that is damaged or lacks an array, ErrShape and ErrDType
// for an array that is not as c says, ErrOption for the config, and those of the file
// system.
func (c MultiHeadConfig) LoadWeights(path string) (MultiHeadWeights, error) {
	w, err := c.loadWeights(path)
	if err != nil {
		return MultiHeadWeights{}, fmt.Errorf("weights of %s: %w", path, err)
	}
	return w, nil
}

func (c MultiHeadConfig) loadWeights(path string) (w MultiHeadWeights, err error) {
	if c, err = c.filled(); err != nil {
		return w, err
	}
	var files fs.FS
	if strings.HasSuffix(path, archiveSuffix) {
		archive, err := zip.OpenReader(path)
		if err != nil {
			if errors.As(err, new(*fs.PathError)) {
				return w, err
			}
			return w, fmt.Errorf("not an .npz archive: %w: %w", err, backend.ErrFile)
		}
		defer archive.Close()
		files = archive
	} else {
		if _, err := os.ReadDir(path); err != nil {
			return w, err
		}
		files = os.DirFS(path)
	}
	for _, p := range w.named() {
		name := p.name + ".npy"
		f, err := files.Open(name)
		switch missing := errors.Is(err, fs.ErrNotExist); {
		case missing && p.bias && !c.Bias:
			continue
		case missing:
			return w, fmt.Errorf("there is no %s: %w: %w", name, err, backend.ErrFile)
		case err != nil:
			return w, err
		case p.bias && !c.Bias:
			f.Close()
			return w, fmt.Errorf("there is a %s, but the config has no Bias: %w", name, backend.ErrShape)
		}
		*p.t, err = readWeight(f, c.shapeOf(p.name), p.bias)
		f.Close()
		if err != nil {
			return w, fmt.Errorf("%s: %w", name, err)
		}
	}
	return w, nil
}

// readWeight reads an array of the given shape, of one axis for a bias, else of two.
func readWeight(f fs.File, shape backend.Shape, bias bool) (backend.Tensor, error) {
	info, err := f.Stat()
	if err != nil {
		return backend.Tensor{}, err
	}
	if !info.Mode().IsRegular() {
		return backend.Tensor{}, fmt.Errorf("not a regular file: %w", backend.ErrFile)
	}
	h, r, err := npy.Open(f, info.Size())
	if err != nil {
		return backend.Tensor{}, fmt.Errorf("%w: %w", err, backend.ErrFile)
	}
	if want := axes(shape, bias); !slices.Equal(h.Shape, want) {
		return backend.Tensor{}, fmt.Errorf("shape is %v, the config asks for %v (PyTorch's Linear keeps the transpose): %w", h.Shape, want, backend.ErrShape)
	}
	if h.Kind != 'f' {
		return backend.Tensor{}, fmt.Errorf("elements are %s, they must be f2, f4 or f8: %w", h.TypeName(), backend.ErrDType)
	}
	data := make([]float32, h.Count)
	raw := make([]byte, min(h.Count, weightChunk)*h.Size)
	for at := 0; at < h.Count; at += weightChunk {
		part := data[at:min(at+weightChunk, h.Count)]
		if _, err := io.ReadFull(r, raw[:len(part)*h.Size]); err != nil {
			return backend.Tensor{}, fmt.Errorf("%w: %w", err, backend.ErrFile)
		}
		if n := h.Float32s(part, raw); n > 0 {
			return backend.Tensor{}, fmt.Errorf("%d or more numbers are beyond float32: %w", n, backend.ErrDType)
		}
	}
	// Archives have a checksum after the data.
	if _, err := io.Copy(io.Discard, r); err != nil {
		return backend.Tensor{}, fmt.Errorf("%w: %w", err, backend.ErrFile)
	}
	return backend.HostF32(data, shape)
}

// weightChunk is how many elements are converted at a time: 256 KiB of f4.
const weightChunk = 64 << 10

// axes returns the shape of an array in a file.
func axes(shape backend.Shape, bias bool) []int {
	if bias {
		return shape[backend.Dim:]
	}
	return shape[backend.Seq:]
}

// Save writes w to path, as [MultiHeadConfig.LoadWeights] reads it and NumPy does: to
// an .npz archive, or into a folder, which is made unless it is there, one .npy file
// for each. Every file is written beside its place and renamed once all are complete,
// so that who reads it meanwhile, or after a crash, finds the old one or the new.
//
// Errors: ErrShape, ErrDType and ErrReleased for weights that are not as in
// [MultiHeadWeights], and those of the file system.
func (w MultiHeadWeights) Save(path string) error {
	if err := w.save(path); err != nil {
		return fmt.Errorf("weights to %s: %w", path, err)
	}
	return nil
}

func (w MultiHeadWeights) save(path string) (err error) {
	var have []weight
	for _, p := range w.named() {
		if p.t.IsZero() {
			continue
		}
		if !p.t.IsContiguous() {
			return fmt.Errorf("%s has strides %v, weights must be contiguous: %w", p.name, p.t.Strides(), backend.ErrShape)
		}
		if _, err := p.t.Float32s(); err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
		have = append(have, p)
	}
	var set replacements
	defer func() { err = errors.Join(err, set.discard()) }()
	if strings.HasSuffix(path, archiveSuffix) {
		err := set.add(path, func(f io.Writer) error {
			z := zip.NewWriter(f)
			for _, p := range have {
				e, err := z.CreateHeader(&zip.FileHeader{Name: p.name + ".npy", Method: zip.Store})
				if err == nil {
					err = p.write(e)
				}
				if err != nil {
					return err
				}
			}
			return z.Close()
		})
		if err != nil {
			return err
		}
		return set.commit()
	}
	if err := os.MkdirAll(path, 0o777); err != nil {
		return err
	}
	for _, p := range have {
		if err := set.add(filepath.Join(path, p.name+".npy"), p.write); err != nil {
			return err
		}
	}
	return set.commit()
}

// write writes a weight as a .npy file.
func (p weight) write(f io.Writer) error {
	data, err := p.t.Float32s()
	if err != nil {
		return err
	}
	b := bufio.NewWriterSize(f, 4*weightChunk)
	if _, err := b.WriteString(npy.Head("<f4", axes(p.t.Shape(), p.bias))); err != nil {
		return err
	}
	var word [4]byte
	for _, x := range data[:p.t.Shape().Elements()] {
		binary.LittleEndian.PutUint32(word[:], math.Float32bits(x))
		if _, err := b.Write(word[:]); err != nil {
			return err
		}
	}
	return b.Flush()
}

// replacements are files that are complete, beside those that they will replace.
type replacements []struct{ temp, path string }

// add writes a file beside path, with the permissions of what is there.
func (s *replacements) add(path string, content func(io.Writer) error) error {
	if link, err := filepath.EvalSymlinks(path); err == nil {
		path = link
	}
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	*s = append(*s, struct{ temp, path string }{f.Name(), path})
	err = content(f)
	if err == nil {
		mode := fs.FileMode(0o644)
		if info, statErr := os.Stat(path); statErr == nil {
			mode = info.Mode().Perm()
		}
		err = f.Chmod(mode)
	}
	if err == nil {
		err = f.Sync() // so that a crash of the machine leaves the old or the new
	}
	return errors.Join(err, f.Close())
}

// commit renames them.
func (s *replacements) commit() error {
	for len(*s) > 0 {
		if err := os.Rename((*s)[0].temp, (*s)[0].path); err != nil {
			return err
		}
		*s = (*s)[1:]
	}
	return nil
}

// discard removes those that were not renamed.
func (s *replacements) discard() (err error) {
	for _, f := range *s {
		err = errors.Join(err, os.Remove(f.temp))
	}
	return err
}
