package nn_test

import (
	"archive/zip"
	"bytes"
	"errors"
	"io"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/fstest"

	npyio "github.com/sbinet/npyio/npy"
	"github.com/sbinet/npyio/npz"
	"gonum.org/v1/gonum/mat"

	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/internal/must"
	"github.com/seed90331342/attn/kernels/nn"
	"github.com/seed90331342/attn/kernels/npy"
)

// small is a layer whose weights all have different shapes.
var small = nn.MultiHeadConfig{Model: 6, Memory: 4, Heads: 2, ValueDim: 5, Bias: true}

// fresh returns new weights with biases that are not 0.
func fresh(t *testing.T, seed uint64) nn.MultiHeadWeights {
	t.Helper()
	w := must.Get(small.Initialise(nn.Initialiser{Seed: seed}))(t)
	for i, b := range numbers(t, w)[4:] {
		for j := range b {
			b[j] = float32(100*i + j)
		}
	}
	return w
}

// numbers returns the elements of the weights, nil for those that are absent.
func numbers(t *testing.T, w nn.MultiHeadWeights) (all [][]float32) {
	t.Helper()
	for _, x := range []kernels.Tensor{w.Wq, w.Wk, w.Wv, w.Wo, w.Bq, w.Bk, w.Bv, w.Bo} {
		var data []float32
		if !x.IsZero() {
			data = must.Get(x.Float32s())(t)
		}
		all = append(all, data)
	}
	return all
}

func same(a, b [][]float32) bool {
	return slices.EqualFunc(a, b, func(x, y []float32) bool { return slices.Equal(x, y) })
}

// archived returns the archive of w.
func archived(t *testing.T, w nn.MultiHeadWeights) []byte {
	t.Helper()
	var b bytes.Buffer
	must.Do(t, w.WriteNPZ(&b))
	return b.Bytes()
}

// unzip returns the files of an archive.
func unzip(t *testing.T, archive []byte) *zip.Reader {
	t.Helper()
	return must.Get(zip.NewReader(bytes.NewReader(archive), int64(len(archive))))(t)
}

// folder returns the files of an archive as a folder has them.
func folder(t *testing.T, archive []byte) fstest.MapFS {
	t.Helper()
	files, z := fstest.MapFS{}, unzip(t, archive)
	for _, f := range z.File {
		data := must.Get(fs.ReadFile(z, f.Name))(t)
		files[f.Name] = &fstest.MapFile{Data: data}
	}
	return files
}

// TestWeightsRoundTrip writes weights and loads them from the archive and from a folder
// with its files.
func TestWeightsRoundTrip(t *testing.T) {
	w := fresh(t, 1)
	archive := archived(t, w)
	names := slices.Sorted(maps.Keys(folder(t, archive)))
	if want := []string{"bk.npy", "bo.npy", "bq.npy", "bv.npy", "wk.npy", "wo.npy", "wq.npy", "wv.npy"}; !slices.Equal(names, want) {
		t.Errorf("the archive has %v", names)
	}
	for name, files := range map[string]fs.FS{"archive": unzip(t, archive), "folder": folder(t, archive)} {
		got, err := small.LoadWeights(files)
		if err != nil || !same(numbers(t, got), numbers(t, w)) || got.Wv.Shape() != (kernels.Shape{1, 1, 4, 10}) || got.Bv.Shape() != (kernels.Shape{1, 1, 1, 10}) {
			t.Errorf("%s: loaded %v, %v", name, got, err)
		}
	}
}

// TestWeightsOfOthers: npyio reads our archives, and we load the archives that it writes,
// also those of f8.
func TestWeightsOfOthers(t *testing.T) {
	w := fresh(t, 3)
	archive := archived(t, w)
	r := must.Get(npz.NewReader(bytes.NewReader(archive), int64(len(archive))))(t)
	all := numbers(t, w)
	theirs := map[string]any{}
	for i, name := range []string{"wq", "wk", "wv", "wo", "bq", "bk", "bv", "bo"} {
		var got []float32
		if err := r.Read(name+".npy", &got); err != nil || !slices.Equal(got, all[i]) {
			t.Errorf("%s: npyio reads %v, %v", name, got, err)
		}
		shape := r.Header(name + ".npy").Descr.Shape
		wide := make([]float64, len(got))
		for i, x := range got {
			wide[i] = float64(x)
		}
		if len(shape) == 2 {
			theirs[name+".npy"] = mat.NewDense(shape[0], shape[1], wide)
		} else {
			theirs[name+".npy"] = got
		}
	}
	path := filepath.Join(t.TempDir(), "theirs.npz")
	must.Do(t, npz.Write(path, theirs))
	files := must.Get(zip.OpenReader(path))(t)
	defer files.Close()
	if got, err := small.LoadWeights(files); err != nil || !same(numbers(t, got), all) {
		t.Errorf("loaded %v, %v", got, err)
	}
}

func TestLoadWeightsRefuses(t *testing.T) {
	archive := archived(t, fresh(t, 1))
	good := folder(t, archive)
	flipped := slices.Clone(archive)
	at := bytes.Index(flipped, []byte("\x93NUMPY")) + 128 + 9 // in the data of wq
	flipped[at] ^= 1
	none := small
	none.Bias = false
	wide := small
	wide.Memory = 5
	// with returns the good files with other data in one of them, or without it.
	with := func(name string, data []byte) fs.FS {
		files := maps.Clone(good)
		delete(files, name)
		if data != nil {
			files[name] = &fstest.MapFile{Data: data}
		}
		return files
	}
	array := func(x any) []byte {
		var b bytes.Buffer
		must.Do(t, npyio.Write(&b, x))
		return b.Bytes()
	}
	inside := maps.Clone(good)
	var large bytes.Buffer
	must.Do(t, npy.Write(&large, "<f4", []int{1 << 40}, []float32{}))
	inside["wq.npy"] = &fstest.MapFile{Mode: fs.ModeDir}
	for _, c := range []struct {
		name   string
		config nn.MultiHeadConfig
		files  fs.FS
		want   error
		text   string
	}{
		{"config", nn.MultiHeadConfig{}, good, kernels.ErrOption, "Model is 0"},
		{"no files", small, fstest.MapFS{}, kernels.ErrFile, "there is no wq.npy"},
		{"a bit flipped", small, unzip(t, flipped), kernels.ErrFile, "wq.npy: zip: checksum error"},
		{"an array missing", small, with("wo.npy", nil), kernels.ErrFile, "there is no wo.npy"},
		{"a bias missing", small, with("bk.npy", nil), kernels.ErrFile, "there is no bk.npy"},
		{"biases too many", none, good, kernels.ErrShape, "there is a bq.npy, but the config has no Bias"},
		{"shape", wide, good, kernels.ErrShape, "wk.npy: shape is [4 6], for the config it must be [5 6]"},
		{"axes", small, with("bq.npy", array(mat.NewDense(1, 6, nil))), kernels.ErrShape, "bq.npy: shape is [1 6], for the config it must be [6]"},
		{"type", small, with("bq.npy", array(make([]bool, 6))), kernels.ErrDType, "bq.npy: elements are bool"},
		{"integers", small, with("bq.npy", array(make([]int32, 6))), kernels.ErrFile, "bq.npy: elements are \"<i4\""},
		{"beyond float32", small, with("bq.npy", array([]float64{0, 1, 2, 3, 4, 1e200})), kernels.ErrDType, "bq.npy: numbers out of the range of float32: 1"},
		{"truncated", small, with("bq.npy", array(make([]float32, 6))[:90]), kernels.ErrFile, "bq.npy: truncated"},
		{"text", small, with("bq.npy", []byte("0 0 0 0 0 0")), kernels.ErrFile, "bq.npy: not a .npy file"},
		{"larger than memory", small, with("bq.npy", large.Bytes()), kernels.ErrFile, "bq.npy: truncated"},
		{"a folder", small, inside, kernels.ErrFile, "wq.npy: not a regular file"},
	} {
		if _, err := c.config.LoadWeights(c.files); !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: error is %v, should be %v and contain %q", c.name, err, c.want, c.text)
		}
	}
}

// full is a file that has room for n bytes.
type full struct{ n int }

func (f *full) Write(p []byte) (int, error) {
	if f.n -= len(p); f.n < 0 {
		return 0, io.ErrShortWrite
	}
	return len(p), nil
}

// TestWriteRefuses: wrong weights are found before anything is written, and errors of the
// writer are returned.
func TestWriteRefuses(t *testing.T) {
	released, turned, half := fresh(t, 2), fresh(t, 3), fresh(t, 4)
	released.Wo.Release()
	turned.Wv = must.Get(turned.Wv.Swap(kernels.Seq, kernels.Dim))(t)
	half.Bq = must.Get(kernels.AllocHost(kernels.F16, half.Bq.Shape()))(t)
	for _, c := range []struct {
		name string
		w    nn.MultiHeadWeights
		want error
		text string
	}{
		{"released", released, kernels.ErrReleased, "wo"},
		{"strides", turned, kernels.ErrShape, "wv has strides"},
		{"type", half, kernels.ErrDType, "bq: tensor is f16"},
	} {
		var b bytes.Buffer
		if err := c.w.WriteNPZ(&b); !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.text) || b.Len() > 0 {
			t.Errorf("%s: error is %v after %d bytes, should be %v and contain %q", c.name, err, b.Len(), c.want, c.text)
		}
	}
	w := fresh(t, 1)
	size := len(archived(t, w))
	for _, n := range []int{0, 1, size / 2, size - 1} {
		if err := w.WriteNPZ(&full{n}); !errors.Is(err, io.ErrShortWrite) {
			t.Errorf("room for %d of %d bytes: error is %v", n, size, err)
		}
	}
	if err := w.WriteNPZ(&full{size}); err != nil {
		t.Errorf("room for all %d bytes: %v", size, err)
	}
}
