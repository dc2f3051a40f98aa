package nn_test

import (
	"archive/zip"
	"bytes"
	"testing"

	"github.com/seed90331342/attn/kernels/internal/must"
	"github.com/seed90331342/attn/kernels/nn"
)

// FuzzWeights reads arbitrary .npz archives: the result is an error, or weights that are written
// and read again.
func FuzzWeights(f *testing.F) {
	w, err := small.Initialise(nn.Initialiser{Seed: 1})
	if err != nil {
		f.Fatal(err)
	}
	var stored bytes.Buffer
	if err := w.WriteNPZ(&stored); err != nil {
		f.Fatal(err)
	}
	f.Add(stored.Bytes())
	archive, err := zip.NewReader(bytes.NewReader(stored.Bytes()), int64(stored.Len()))
	if err != nil {
		f.Fatal(err)
	}
	// As numpy.savez_compressed writes it.
	var compressed bytes.Buffer
	z := zip.NewWriter(&compressed)
	for _, entry := range archive.File {
		to, err := z.Create(entry.Name)
		if err != nil {
			f.Fatal(err)
		}
		from, err := entry.Open()
		if err != nil {
			f.Fatal(err)
		}
		var content bytes.Buffer
		if _, err := content.ReadFrom(from); err != nil {
			f.Fatal(err)
		}
		if _, err := to.Write(content.Bytes()); err != nil {
			f.Fatal(err)
		}
	}
	if err := z.Close(); err != nil {
		f.Fatal(err)
	}
	f.Add(compressed.Bytes())
	f.Fuzz(func(t *testing.T, content []byte) {
		archive, err := zip.NewReader(bytes.NewReader(content), int64(len(content)))
		if err != nil {
			return
		}
		w, err := small.LoadWeights(archive)
		if err != nil {
			return // of package nn, or of the archive
		}
		var again bytes.Buffer
		must.Do(t, w.WriteNPZ(&again))
		archive = must.Get(zip.NewReader(bytes.NewReader(again.Bytes()), int64(again.Len())))(t)
		if _, err := small.LoadWeights(archive); err != nil {
			t.Fatal(err)
		}
	})
}
