package shards

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/apache/beam/sdks/v2/go/pkg/beam/io/filesystem"
	"github.com/x448/float16"

	"github.com/seed90331342/attn/cmd/attn-beam/internal/cut"
	"github.com/seed90331342/attn/cmd/internal/output"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/npy"
)

// Write creates or replaces a file, which has its old or its new content at any time, whenever the process ends. Two
// workers may write the same file. Folders of local files are created.
//
// On file systems other than the local one, the content goes to a file named as uri, with .attn- and 26 letters and
// digits at the end, which is then renamed. A worker that is killed leaves that file behind.
func Write(ctx context.Context, uri string, content func(io.Writer) error) error {
	if !strings.Contains(uri, "://") {
		if err := os.MkdirAll(filepath.Dir(uri), 0o755); err != nil {
			return fmt.Errorf("%s: %w", uri, output.Reason(err))
		}
		return output.Write(ctx, uri, content)
	}
	system, err := filesystem.New(ctx, uri)
	if err != nil {
		return err
	}
	hidden := uri + ".attn-" + rand.Text()
	err = writeHidden(ctx, system, hidden, content)
	if err == nil {
		err = filesystem.Rename(ctx, system, hidden, uri)
	} else if r, ok := system.(filesystem.Remover); ok {
		err = errors.Join(err, r.Remove(context.WithoutCancel(ctx), hidden))
	}
	if err = errors.Join(err, system.Close()); err != nil {
		return fmt.Errorf("%s: %w", uri, err)
	}
	return nil
}

// writeHidden writes the file that Write renames.
func writeHidden(ctx context.Context, system filesystem.Interface, hidden string, content func(io.Writer) error) error {
	w, err := system.OpenWrite(ctx, hidden)
	if err != nil {
		return err
	}
	return errors.Join(content(w), w.Close())
}

// WriteTensor writes a .npy file of elements f2 or f4. Numbers of f2 are rounded to nearest.
func WriteTensor(ctx context.Context, uri, elements string, shape []int, data []float32) error {
	return Write(ctx, uri, func(w io.Writer) error {
		if elements == "f4" {
			return npy.Write(w, "<f4", shape, data)
		}
		half := make([]uint16, len(data))
		for i, x := range data {
			half[i] = float16.Fromfloat32(x).Bits()
		}
		return npy.Write(w, "<f2", shape, half)
	})
}

// ReadTensor reads a .npy file that WriteTensor wrote with these elements and this shape. Any
// other file is an error, fs.ErrNotExist if there is none.
func ReadTensor(ctx context.Context, uri, elements string, shape []int) (data []float32, err error) {
	r, size, err := open(ctx, uri)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", uri, err)
	}
	defer func() {
		if err = errors.Join(err, r.Close()); err != nil {
			data, err = nil, fmt.Errorf("%s: %w", uri, err)
		}
	}()
	h, from, err := npy.Open(r, size)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", err, kernels.ErrShape)
	}
	if h.TypeName() != elements || !slices.Equal(h.Shape, shape) {
		return nil, fmt.Errorf("%s of shape %v, it must be %s of shape %v: %w", h.TypeName(), h.Shape, elements, shape, kernels.ErrShape)
	}
	return npy.Read(from, h, func(dst []float32, raw []byte) { h.Float32s(dst, raw) })
}

// Manifest describes a job: its inputs, options, cut and outputs.
type Manifest struct {
	Inputs map[string]*Array
	// Options are those of the call, in the form of the program.
	Options json.RawMessage
	Config  cut.Config
	// Outputs are the tensors of the results: o and, if it was requested, lse, of shape
	// [B, H, rows, 1]. The URIs of their shards are relative to the manifest.
	Outputs map[string]*Array `json:",omitempty"`
}

// WriteManifest writes m as JSON. The shards of its outputs lie in the folder of uri.
func WriteManifest(ctx context.Context, uri string, m Manifest) error {
	outputs := m.Outputs
	m.Outputs = map[string]*Array{}
	for name, a := range outputs {
		own := *a
		own.Shards = slices.Clone(a.Shards)
		for i := range own.Shards {
			own.Shards[i].URI = strings.TrimPrefix(own.Shards[i].URI, folder(uri))
		}
		m.Outputs[name] = &own
	}
	text, err := json.MarshalIndent(m, "", "\t")
	if err != nil {
		return fmt.Errorf("%s: %w", uri, err)
	}
	return Write(ctx, uri, func(w io.Writer) error {
		_, err := w.Write(append(text, '\n'))
		return err
	})
}

// ReadManifest reads what WriteManifest wrote.
func ReadManifest(ctx context.Context, uri string) (m Manifest, err error) {
	r, _, err := open(ctx, uri)
	if err != nil {
		return m, fmt.Errorf("%s: %w", uri, err)
	}
	text, err := io.ReadAll(r)
	if err = errors.Join(err, r.Close()); err == nil {
		err = json.Unmarshal(text, &m)
	}
	if err != nil {
		return m, fmt.Errorf("%s: not a manifest: %w", uri, err)
	}
	for _, a := range m.Outputs {
		for i := range a.Shards {
			a.Shards[i].URI = folder(uri) + a.Shards[i].URI
		}
	}
	return m, nil
}

// folder returns uri up to its last slash.
func folder(uri string) string { return uri[:strings.LastIndexByte(filepath.ToSlash(uri), '/')+1] }

// Output returns the array of an output, whose shards are the blocks of x. uri names the
// file of a block. Shard n is that of the block with ID n.
func Output(name, elements string, x *cut.Cut, dim int, uri func(b *cut.Block) string) *Array {
	a := &Array{Name: name, Type: elements, Shape: [4]int{x.Dims.Batch, x.Dims.Heads, x.Dims.SeqQ, dim}, Shards: make([]Shard, len(x.Blocks))}
	for i := range x.Blocks {
		b := &x.Blocks[i]
		a.Shards[b.ID] = Shard{URI: uri(b), Batch: cut.Span{Lo: b.Batch, Hi: b.Batch + 1}, Heads: b.Heads, Rows: b.Rows}
	}
	return a
}

// Gather writes the array as one .npy file of the given shape, which has the same number of
// elements. The memory that it takes does not depend on the size of the array.
func (a *Array) Gather(ctx context.Context, uri string, shape []int) error {
	if err := a.Check(ctx); err != nil {
		return err
	}
	return Write(ctx, uri, func(w io.Writer) error {
		out := bufio.NewWriterSize(w, 1<<20)
		if err := npy.Write[byte](out, "<"+a.Type, shape, nil); err != nil { // the header alone
			return err
		}
		for b := range a.Shape[0] {
			for h := range a.Shape[1] {
				err := a.overlaps(b, h, cut.Span{Hi: a.Shape[2]}, func(s *Shard, part cut.Span) error {
					return a.read(ctx, s, []piece{{b, h, part, func(raw []byte) error {
						if s.BigEndian {
							for i := 0; i < len(raw); i += a.size() {
								slices.Reverse(raw[i : i+a.size()])
							}
						}
						_, err := out.Write(raw)
						return err
					}}})
				})
				if err != nil {
					return err
				}
			}
		}
		return out.Flush()
	})
}
