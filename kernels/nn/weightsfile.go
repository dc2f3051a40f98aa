package nn

import (
	"archive/zip"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"

	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/internal/op"
	"github.com/seed90331342/attn/kernels/npy"
)

// LoadWeights reads the weights of a layer from the .npy files in files: a folder by
// [os.DirFS], or an .npz archive by [zip.OpenReader]. The arrays are named wq, wk, wv, wo
// and, with Bias, bq, bk, bv, bo. A weight has the axes (rows, columns) of
// [MultiHeadWeights], a bias has one axis. Elements are f2, f4 or f8 in C order. Other
// files are ignored.
//
// Errors: ErrFile for a file that is damaged or missing, ErrShape and ErrDType for an
// array that does not match c, ErrOption for the config, ErrMemory, and
// those of files.
func (c MultiHeadConfig) LoadWeights(files fs.FS) (w MultiHeadWeights, err error) {
	defer op.Annotate(&err, "weights")
	if c, err = c.withDefaults(); err != nil {
		return w, err
	}
	if files == nil {
		return w, fmt.Errorf("there are no files, give a folder with os.DirFS: %w", kernels.ErrOption)
	}
	for _, p := range w.named() {
		name := p.name + ".npy"
		// Opening a pipe of a folder would wait for a writer.
		info, err := fs.Stat(files, name)
		if err == nil && !info.Mode().IsRegular() {
			return w, fmt.Errorf("%s: not a regular file: %w", name, kernels.ErrFile)
		}
		var f fs.File
		if err == nil {
			f, err = files.Open(name)
		}
		switch missing := errors.Is(err, fs.ErrNotExist); {
		case missing && p.bias && !c.Bias:
			continue
		case missing:
			return w, fmt.Errorf("there is no %s: %w: %w", name, err, kernels.ErrFile)
		case err != nil:
			return w, err
		case p.bias && !c.Bias:
			f.Close()
			return w, fmt.Errorf("there is a %s, but the config has no Bias: %w", name, kernels.ErrShape)
		}
		*p.t, err = readWeight(f, info.Size(), c.shapeOf(p.name), p.bias)
		f.Close()
		if err != nil {
			return w, fmt.Errorf("%s: %w", name, err)
		}
	}
	return w, nil
}

// readWeight reads an array of the given shape from a file of the given size, which has one axis for a bias, else two.
func readWeight(f io.Reader, size int64, shape kernels.Shape, bias bool) (kernels.Tensor, error) {
	h, r, err := npy.Open(f, size)
	if err != nil {
		return kernels.Tensor{}, fmt.Errorf("%w: %w", err, kernels.ErrFile)
	}
	if want := axes(shape, bias); !slices.Equal(h.Shape, want) {
		return kernels.Tensor{}, fmt.Errorf("shape is %v, for the config it must be %v (PyTorch's Linear stores the transpose): %w", h.Shape, want, kernels.ErrShape)
	}
	if h.Kind != 'f' {
		return kernels.Tensor{}, fmt.Errorf("elements are %s, they must be f2, f4 or f8: %w", h.TypeName(), kernels.ErrDType)
	}
	overflows := 0
	data, err := npy.Read(r, h, func(dst []float32, raw []byte) { overflows += h.Float32s(dst, raw) })
	if errors.Is(err, kernels.ErrMemory) {
		return kernels.Tensor{}, err
	}
	if err != nil {
		return kernels.Tensor{}, fmt.Errorf("%w: %w", err, kernels.ErrFile)
	}
	if overflows > 0 {
		return kernels.Tensor{}, fmt.Errorf("numbers out of the range of float32: %d: %w", overflows, kernels.ErrDType)
	}
	// An archive verifies its checksum at the end of the file.
	if _, err := io.Copy(io.Discard, r); err != nil {
		return kernels.Tensor{}, fmt.Errorf("%w: %w", err, kernels.ErrFile)
	}
	return kernels.HostF32(data, shape)
}

// axes returns the shape of an array in a file.
func axes(shape kernels.Shape, bias bool) []int {
	if bias {
		return shape[kernels.Dim:]
	}
	return shape[kernels.Seq:]
}

// WriteNPZ writes w to an .npz archive, as numpy.savez does and
// [MultiHeadConfig.LoadWeights] reads.
//
// Errors: ErrShape, ErrDType and ErrReleased for weights that are not as in
// [MultiHeadWeights], found before anything is written, and those of to.
func (w MultiHeadWeights) WriteNPZ(to io.Writer) (err error) {
	defer op.Annotate(&err, "weights")
	if to == nil {
		return fmt.Errorf("the writer is nil, give a file: %w", kernels.ErrOption)
	}
	var data [8][]float32
	for i, p := range w.named() {
		if p.t.IsZero() {
			continue
		}
		if !p.t.IsContiguous() {
			return fmt.Errorf("%s has strides %v, weights must be contiguous: %w", p.name, p.t.Strides(), kernels.ErrShape)
		}
		all, err := p.t.Float32s()
		if err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
		data[i] = all[:p.t.Shape().Elements()]
	}
	archive := zip.NewWriter(to)
	for i, p := range w.named() {
		if data[i] == nil {
			continue
		}
		f, err := archive.CreateHeader(&zip.FileHeader{Name: p.name + ".npy", Method: zip.Store})
		if err != nil {
			return err
		}
		if err := npy.Write(f, "<f4", axes(p.t.Shape(), p.bias), data[i]); err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
	}
	return archive.Close()
}
