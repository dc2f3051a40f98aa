package kernels_test

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	npyio "github.com/sbinet/npyio/npy"
	"github.com/sbinet/npyio/npz"
	"gonum.org/v1/gonum/mat"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/npy"
)

// small is a layer whose weights all have other shapes.
var small = kernels.MultiHeadConfig{Model: 6, Memory: 4, Heads: 2, ValueDim: 5, Bias: true}

// fresh returns drawn weights with biases that are not 0.
func fresh(t *testing.T, seed uint64) kernels.MultiHeadWeights {
	t.Helper()
	w, err := small.Initialise(kernels.Initialiser{Seed: seed})
	if err != nil {
		t.Fatal(err)
	}
	for i, b := range numbers(t, w)[4:] {
		for j := range b {
			b[j] = float32(100*i + j)
		}
	}
	return w
}

// numbers returns the memory of the weights, nil for those that are not there.
func numbers(t *testing.T, w kernels.MultiHeadWeights) (all [][]float32) {
	t.Helper()
	for _, x := range []backend.Tensor{w.Wq, w.Wk, w.Wv, w.Wo, w.Bq, w.Bk, w.Bv, w.Bo} {
		var data []float32
		if !x.IsZero() {
			var err error
			if data, err = x.Float32s(); err != nil {
				t.Fatal(err)
			}
		}
		all = append(all, data)
	}
	return all
}

func same(a, b [][]float32) bool {
	return slices.EqualFunc(a, b, func(x, y []float32) bool { return slices.Equal(x, y) })
}

// files lists a folder.
func files(t *testing.T, dir string) (names []string) {
	t.Helper()
	list, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range list {
		names = append(names, f.Name())
	}
	return names
}

// TestWeightsComeBack: what was saved is loaded, in both forms, over what was there
// before, with its permissions, and nothing else stays.
func TestWeightsComeBack(t *testing.T) {
	arrays := []string{"bk.npy", "bo.npy", "bq.npy", "bv.npy", "wk.npy", "wo.npy", "wq.npy", "wv.npy"}
	for _, c := range []struct {
		name, file string // file is one that is looked at
		left       []string
	}{
		{"layer.npz", "layer.npz", []string{"layer.npz"}},
		{"layer", "layer/wq.npy", []string{"layer"}},
	} {
		dir := t.TempDir()
		path := filepath.Join(dir, c.name)
		if err := fresh(t, 1).Save(path); err != nil {
			t.Fatal(err)
		}
		if info, err := os.Stat(filepath.Join(dir, c.file)); err != nil || info.Mode().Perm() != 0o644 {
			t.Errorf("%s: a new file has mode %v, %v", c.name, info.Mode(), err)
		}
		if err := os.Chmod(filepath.Join(dir, c.file), 0o600); err != nil {
			t.Fatal(err)
		}
		w := fresh(t, 2)
		if err := w.Save(path); err != nil {
			t.Fatal(err)
		}
		got, err := small.LoadWeights(path)
		if err != nil || !same(numbers(t, got), numbers(t, w)) || got.Wv.Shape() != (backend.Shape{1, 1, 4, 10}) || got.Bv.Shape() != (backend.Shape{1, 1, 1, 10}) {
			t.Errorf("%s: loaded %v, %v", c.name, got, err)
		}
		if info, err := os.Stat(filepath.Join(dir, c.file)); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: the file has mode %v, %v", c.name, info.Mode(), err)
		}
		if names := files(t, dir); !slices.Equal(names, c.left) {
			t.Errorf("%s: the folder has %v", c.name, names)
		}
		if c.name == "layer" && !slices.Equal(files(t, path), arrays) {
			t.Errorf("the layer's folder has %v", files(t, path))
		}
	}
}

// TestWeightsOfOthers: npyio reads what we save, and what it saves is loaded, f8 too.
func TestWeightsOfOthers(t *testing.T) {
	dir := t.TempDir()
	w := fresh(t, 3)
	if err := w.Save(filepath.Join(dir, "ours.npz")); err != nil {
		t.Fatal(err)
	}
	r, err := npz.Open(filepath.Join(dir, "ours.npz"))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
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
	if err := npz.Write(filepath.Join(dir, "theirs.npz"), theirs); err != nil {
		t.Fatal(err)
	}
	if got, err := small.LoadWeights(filepath.Join(dir, "theirs.npz")); err != nil || !same(numbers(t, got), all) {
		t.Errorf("loaded %v, %v", got, err)
	}
}

func TestLoadWeightsRefuses(t *testing.T) {
	dir := t.TempDir()
	write := func(name string, data []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, data, 0o644); err != nil {
			t.Fatal(err)
		}
		return path
	}
	w := fresh(t, 1)
	if err := w.Save(filepath.Join(dir, "good.npz")); err != nil {
		t.Fatal(err)
	}
	archive, err := os.ReadFile(filepath.Join(dir, "good.npz"))
	if err != nil {
		t.Fatal(err)
	}
	flipped := slices.Clone(archive)
	at := bytes.Index(flipped, []byte("\x93NUMPY")) + 128 + 9 // in the data of wq
	flipped[at] ^= 1
	none := small
	none.Bias = false
	wide := small
	wide.Memory = 5
	// with returns a folder of good weights of which one file holds data.
	with := func(name string, data []byte) string {
		folder := filepath.Join(dir, strings.ReplaceAll(t.Name(), "/", "_")+name+string(rune('a'+len(files(t, dir)))))
		if err := w.Save(folder); err != nil {
			t.Fatal(err)
		}
		if err := os.Remove(filepath.Join(folder, name)); err != nil {
			t.Fatal(err)
		}
		if data != nil {
			if err := os.WriteFile(filepath.Join(folder, name), data, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		return folder
	}
	array := func(x any) []byte {
		var b bytes.Buffer
		if err := npyio.Write(&b, x); err != nil {
			t.Fatal(err)
		}
		return b.Bytes()
	}
	inside := with("wq.npy", nil)
	if err := os.Mkdir(filepath.Join(inside, "wq.npy"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name   string
		config kernels.MultiHeadConfig
		path   string
		want   error
		says   string
	}{
		{"config", kernels.MultiHeadConfig{}, filepath.Join(dir, "good.npz"), backend.ErrOption, "Model is 0"},
		{"no archive", small, filepath.Join(dir, "none.npz"), fs.ErrNotExist, "none.npz"},
		{"no folder", small, filepath.Join(dir, "none"), fs.ErrNotExist, "none"},
		{"no zip", small, write("text.npz", []byte("weights")), backend.ErrFile, "not an .npz archive"},
		{"archive cut", small, write("cut.npz", archive[:len(archive)-30]), backend.ErrFile, "not an .npz archive"},
		{"a bit flipped", small, write("flipped.npz", flipped), backend.ErrFile, "wq.npy: zip: checksum error"},
		{"an array missing", small, with("wo.npy", nil), backend.ErrFile, "there is no wo.npy"},
		{"a bias missing", small, with("bk.npy", nil), backend.ErrFile, "there is no bk.npy"},
		{"biases too many", none, filepath.Join(dir, "good.npz"), backend.ErrShape, "there is a bq.npy, but the config has no Bias"},
		{"shape", wide, filepath.Join(dir, "good.npz"), backend.ErrShape, "wk.npy: shape is [4 6], the config asks for [5 6]"},
		{"axes", small, with("bq.npy", array(mat.NewDense(1, 6, nil))), backend.ErrShape, "bq.npy: shape is [1 6], the config asks for [6]"},
		{"type", small, with("bq.npy", array(make([]bool, 6))), backend.ErrDType, "bq.npy: elements are bool"},
		{"integers", small, with("bq.npy", array(make([]int32, 6))), backend.ErrFile, "bq.npy: elements are \"<i4\""},
		{"beyond float32", small, with("bq.npy", array([]float64{0, 1, 2, 3, 4, 1e200})), backend.ErrDType, "bq.npy: 1 or more numbers are beyond float32"},
		{"truncated", small, with("bq.npy", array(make([]float32, 6))[:90]), backend.ErrFile, "bq.npy: truncated"},
		{"text", small, with("bq.npy", []byte("0 0 0 0 0 0")), backend.ErrFile, "bq.npy: not a .npy file"},
		{"larger than memory", small, with("bq.npy", []byte(npy.Head("<f4", []int{1 << 40}))), backend.ErrFile, "bq.npy: truncated"},
		{"a folder", small, inside, backend.ErrFile, "wq.npy: not a regular file"},
	} {
		if _, err := c.config.LoadWeights(c.path); !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: error is %v, should be %v and say %q", c.name, err, c.want, c.says)
		}
	}
}

// TestSaveRefuses: when saving fails, what was there stays and nothing else does.
func TestSaveRefuses(t *testing.T) {
	dir := t.TempDir()
	w := fresh(t, 1)
	archive := filepath.Join(dir, "layer.npz")
	if err := w.Save(archive); err != nil {
		t.Fatal(err)
	}
	released, turned := fresh(t, 2), fresh(t, 3)
	released.Wo.Release()
	var err error
	if turned.Wv, err = turned.Wv.Swap(backend.Seq, backend.Dim); err != nil {
		t.Fatal(err)
	}
	half := fresh(t, 4)
	if half.Bq, err = backend.AllocHost(backend.F16, half.Bq.Shape()); err != nil {
		t.Fatal(err)
	}
	blocked := filepath.Join(dir, "blocked")
	if err := os.MkdirAll(filepath.Join(blocked, "wv.npy", "x"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name string
		w    kernels.MultiHeadWeights
		path string
		want error // nil: any
		says string
	}{
		{"released", released, archive, backend.ErrReleased, "wo"},
		{"strides", turned, archive, backend.ErrShape, "wv has strides"},
		{"type", half, archive, backend.ErrDType, "bq: tensor is f16"},
		{"no folder", w, filepath.Join(dir, "none", "layer.npz"), fs.ErrNotExist, "layer.npz"},
		{"a file in the way", w, filepath.Join(archive, "layer"), nil, "layer.npz"},
		{"a folder in the way", w, blocked, nil, "wv.npy"},
	} {
		err := c.w.Save(c.path)
		if err == nil || c.want != nil && !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: error is %v, should be %v and say %q", c.name, err, c.want, c.says)
		}
	}
	if got, err := small.LoadWeights(archive); err != nil || !same(numbers(t, got), numbers(t, w)) {
		t.Errorf("what was there is now %v, %v", got, err)
	}
	if names := files(t, dir); !slices.Equal(names, []string{"blocked", "layer.npz"}) {
		t.Errorf("the folder has %v", names)
	}
	for _, name := range files(t, blocked) {
		if strings.HasPrefix(name, ".") {
			t.Errorf("%s was left", name)
		}
	}
}
