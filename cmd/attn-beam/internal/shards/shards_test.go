package shards

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/apache/beam/sdks/v2/go/pkg/beam/io/filesystem"
	"github.com/apache/beam/sdks/v2/go/pkg/beam/io/filesystem/memfs"

	"github.com/seed90331342/attn/cmd/attn-beam/internal/cut"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
	"github.com/seed90331342/attn/kernels/npy"
)

// folders are a local folder and one in memory, whose readers cannot seek.
func folders(t *testing.T) []string {
	return []string{t.TempDir(), "memfs://" + strings.ReplaceAll(t.Name(), "/", "-")}
}

// value is the element at a place of the tensors of this test, exact in f2.
func value(b, h, i, c int) float32 { return float32(b*512 + h*128 + i*4 + c) }

// write writes rows of a tensor of 2 batches, 3 heads and 4 elements.
func write(t *testing.T, uri, elements string, rows cut.Span) {
	t.Helper()
	var data []float32
	for b := range 2 {
		for h := range 3 {
			for i := rows.Lo; i < rows.Hi; i++ {
				for c := range 4 {
					data = append(data, value(b, h, i, c))
				}
			}
		}
	}
	must.Do(t, WriteTensor(t.Context(), uri, elements, []int{2, 3, rows.Len(), 4}, data))
}

// overJSON returns a as a worker gets it.
func overJSON(t *testing.T, a *Array) *Array {
	t.Helper()
	own := new(Array)
	must.Do(t, json.Unmarshal(must.Get(json.Marshal(a))(t), own))
	return own
}

// TestRead reads all ranges of rows of all heads from shards of different lengths.
func TestRead(t *testing.T) {
	for _, dir := range folders(t) {
		for _, elements := range []string{"f2", "f4"} {
			for n, rows := range []cut.Span{{Lo: 0, Hi: 3}, {Lo: 3, Hi: 3}, {Lo: 3, Hi: 4}, {Lo: 4, Hi: 9}} {
				write(t, fmt.Sprintf("%s/%s/k-%d.npy", dir, elements, 8+n), elements, rows) // 8 to 11
			}
			a := must.Get(Open(t.Context(), "k", dir+"/"+elements+"/k-*.npy"))(t)
			if a.Shape != [4]int{2, 3, 9, 4} || a.Type != elements || len(a.Shards) != 4 || a.Bytes(9) != int64(9*4*a.size()) {
				t.Fatalf("%+v", a)
			}
			a = overJSON(t, a)
			for b := range 2 {
				for lo := range 9 {
					for hi := lo; hi <= 9; hi++ {
						heads := cut.Span{Lo: hi % 3, Hi: hi%3 + 1 + lo%(3-hi%3)}
						got := make([]float32, heads.Len()*(hi-lo)*4)
						must.Do(t, a.Read(t.Context(), got, b, heads, cut.Span{Lo: lo, Hi: hi}))
						for n, x := range got {
							if c, i, h := n%4, n/4%(hi-lo), n/4/(hi-lo); x != value(b, heads.Lo+h, lo+i, c) {
								t.Fatalf("%s, heads %v, rows %d to %d: element %d is %v", dir, heads, lo, hi, n, x)
							}
						}
					}
				}
			}
			must.Fail(t, "7 numbers for 8", a.Read(t.Context(), make([]float32, 7), 0, cut.Span{Hi: 1}, cut.Span{Hi: 2}), kernels.ErrShape)
		}
	}
}

// TestForeignFiles: big-endian elements, and files with fewer axes.
func TestForeignFiles(t *testing.T) {
	ctx, dir := t.Context(), t.TempDir()
	var file bytes.Buffer
	must.Do(t, npy.Write(&file, "<f4", []int{3, 2}, []float32{1, 2, 3, 4, 5, 6}))
	swapped := bytes.Replace(file.Bytes(), []byte("<f4"), []byte(">f4"), 1)
	data := swapped[len(swapped)-24:]
	for i := 0; i < 24; i += 4 {
		binary.BigEndian.PutUint32(data[i:], math.Float32bits(float32(i/4+1)))
	}
	for name, content := range map[string][]byte{"a.npy": file.Bytes(), "b.npy": swapped} {
		must.Do(t, os.WriteFile(filepath.Join(dir, name), content, 0o644))
	}
	a, err := Open(ctx, "q", dir+"/b.npy,"+dir+"/a.npy")
	if err != nil || a.Shape != [4]int{1, 1, 6, 2} {
		t.Fatalf("%+v, %v", a, err)
	}
	got, want := make([]float32, 12), []float32{1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6}
	if err := overJSON(t, a).Read(ctx, got, 0, cut.Span{Hi: 1}, cut.Span{Hi: 6}); err != nil || !slices.Equal(got, want) {
		t.Errorf("%v, %v", got, err)
	}
	must.Do(t, a.Gather(ctx, dir+"/all.npy", []int{6, 2}))
	if got, err = ReadTensor(ctx, dir+"/all.npy", "f4", []int{6, 2}); err != nil || !slices.Equal(got, want) {
		t.Errorf("gathered: %v, %v", got, err)
	}
	if a, err = Open(ctx, "k", write3(t, dir)); err != nil || a.Shape != [4]int{2, 1, 3, 1} {
		t.Errorf("[B, rows, D]: %+v, %v", a, err)
	}
}

func write3(t *testing.T, dir string) string {
	must.Do(t, WriteTensor(t.Context(), dir+"/c.npy", "f4", []int{2, 3, 1}, make([]float32, 6)))
	return dir + "/c.npy"
}

// TestBadShards: each error names the input, the shard, what is wrong and the remedy.
func TestBadShards(t *testing.T) {
	for _, dir := range folders(t) {
		at := func(name string) string { return dir + "/" + name }
		for n, rows := range []cut.Span{{Lo: 0, Hi: 3}, {Lo: 3, Hi: 5}} {
			write(t, at(fmt.Sprintf("good-%d.npy", n)), "f4", rows)
		}
		write(t, at("half.npy"), "f2", cut.Span{Hi: 2})
		tensor := func(name, elements string, shape ...int) {
			n := 1
			for _, l := range shape {
				n *= l
			}
			must.Do(t, WriteTensor(t.Context(), at(name), elements, shape, make([]float32, n)))
		}
		tensor("heads.npy", "f4", 2, 4, 3, 4)
		tensor("dim.npy", "f4", 2, 3, 3, 5)
		tensor("five.npy", "f4", 1, 2, 3, 3, 5)
		raw := func(name string, change func(content []byte) []byte) {
			t.Helper()
			whole := readAll(t, at("good-0.npy"))
			must.Do(t, Write(t.Context(), at(name), func(w io.Writer) error { _, err := w.Write(change(whole)); return err }))
		}
		raw("truncated.npy", func(b []byte) []byte { return b[:len(b)-5] })
		raw("long.npy", func(b []byte) []byte { return append(b, 0) })
		raw("empty.npy", func([]byte) []byte { return nil })
		raw("double.npy", func(b []byte) []byte {
			return append(bytes.Replace(b, []byte("<f4"), []byte("<f8"), 1), b[128:]...)
		})
		for _, c := range []struct {
			uris string
			is   error
			want []string
		}{
			{at("good-0.npy,") + at("good-7.npy"), fs.ErrNotExist, []string{at("good-7.npy"), "the file is missing, write it or correct the URI"}},
			{at("none-*.npy"), fs.ErrNotExist, []string{"no file matches " + at("none-*.npy")}},
			{at("good-0.npy,") + at("truncated.npy"), kernels.ErrShape, []string{at("truncated.npy"), "truncated: shape [2 3 3 4] of f4 needs 288 bytes of data, the file has 283"}},
			{at("long.npy"), kernels.ErrShape, []string{at("long.npy"), "needs 288 bytes of data, the file has 289"}},
			{at("empty.npy"), kernels.ErrShape, []string{at("empty.npy"), "not a .npy file"}},
			{at("double.npy"), kernels.ErrDType, []string{at("double.npy"), "elements are f8, they must be f2 or f4: convert them"}},
			{at("good-*.npy,") + at("half.npy"), kernels.ErrDType, []string{at("half.npy"), "elements are f2, those of " + at("good-0.npy") + " are f4: convert one of them"}},
			{at("good-*.npy,") + at("heads.npy"), kernels.ErrShape, []string{at("heads.npy"), "shape [2 4 3 4], that of " + at("good-0.npy") + " is [2 3 3 4]: shards differ only in the number of rows"}},
			{at("good-*.npy,") + at("dim.npy"), kernels.ErrShape, []string{at("dim.npy"), "shape [2 3 3 5]"}},
			{at("five.npy"), kernels.ErrShape, []string{at("five.npy"), "shape [1 2 3 3 5], it must be [B, H, rows, D]"}},
			{at("good-0.npy,"), kernels.ErrOption, []string{"has an empty URI"}},
			{"nowhere://x.npy", nil, []string{"nowhere://x.npy", "not registered"}},
		} {
			_, err := Open(t.Context(), "k", c.uris)
			for _, want := range append(c.want, "k: ") {
				if err == nil || !strings.Contains(err.Error(), want) || c.is != nil && !errors.Is(err, c.is) {
					t.Errorf("%s: error %v, want %v with %q", c.uris, err, c.is, want)
				}
			}
		}
		// A shard that changes after it was checked.
		a := must.Get(Open(t.Context(), "k", at("good-*.npy")))(t)
		raw("good-1.npy", func(b []byte) []byte { return b[:200] })
		must.Fail(t, "Read of the changed shard", a.Read(t.Context(), make([]float32, 20), 1, cut.Span{Lo: 1, Hi: 2}, cut.Span{Hi: 5}), kernels.ErrShape, "k: shard "+at("good-1.npy")+": it ends before or in rows 3 to 4 of head 1 of batch 1")
		must.Fail(t, "Check of the changed shard", a.Check(t.Context()), kernels.ErrShape, "shard "+at("good-1.npy"))
	}
}

func readAll(t *testing.T, uri string) []byte {
	t.Helper()
	r, _, err := open(t.Context(), uri)
	must.Do(t, err)
	defer r.Close()
	return must.Get(io.ReadAll(r))(t)
}

// TestOutput writes the blocks of a cut, with a pause in the middle, and joins them.
func TestOutput(t *testing.T) {
	for _, dir := range folders(t) {
		d := kernels.Dims{Batch: 2, Heads: 6, KVHeads: 3, SeqQ: 9, SeqK: 5, Dim: 4, ValueDim: 2}
		x := must.Get(cut.New(d, kernels.Options{Causal: true}, cut.Config{Rows: 4}))(t)
		a := Output("o", "f2", x, d.ValueDim, func(b *cut.Block) string { return fmt.Sprintf("%s/out/o-%d.npy", dir, b.ID) })
		var want []float32
		for i := range 2 * 6 * 9 * 2 {
			want = append(want, float32(i))
		}
		for n, b := range x.Blocks {
			if n == len(x.Blocks)/2 {
				// What is there of another job, or half written, is not finished.
				must.Do(t, WriteTensor(t.Context(), a.Shards[b.ID].URI, "f4", []int{1, 2, b.Rows.Len(), 2}, make([]float32, 4*b.Rows.Len())))
				must.Do(t, Write(t.Context(), a.Shards[x.Blocks[n+1].ID].URI, func(w io.Writer) error { _, err := io.WriteString(w, "\x93NUM"); return err }))
				checkUnfinished(t, a, x.Blocks[n:])
			}
			s := a.Shards[b.ID]
			var data []float32
			for h := s.Heads.Lo; h < s.Heads.Hi; h++ {
				data = append(data, want[((b.Batch*6+h)*9+s.Rows.Lo)*2:((b.Batch*6+h)*9+s.Rows.Hi)*2]...)
			}
			must.Do(t, WriteTensor(t.Context(), s.URI, a.Type, []int{1, 2, b.Rows.Len(), 2}, data))
		}
		checkUnfinished(t, a, nil)
		m := Manifest{Options: json.RawMessage(`{"Causal":true}`), Config: x.Config, Outputs: map[string]*Array{"o": a}}
		must.Do(t, WriteManifest(t.Context(), dir+"/out/manifest.json", m))
		if text := string(readAll(t, dir+"/out/manifest.json")); strings.Contains(text, dir) {
			t.Errorf("the manifest names its own folder, %s:\n%s", dir, text)
		}
		if m, err := ReadManifest(t.Context(), dir+"/out/manifest.json"); err != nil || m.Config != x.Config {
			t.Fatalf("%+v, %v", m, err)
		}
		a = must.Get(Open(t.Context(), "q", dir+"/out/manifest.json"))(t)
		must.Do(t, a.Gather(t.Context(), dir+"/o.npy", a.Shape[:]))
		if got, err := ReadTensor(t.Context(), dir+"/o.npy", "f2", []int{2, 6, 9, 2}); err != nil || !slices.Equal(got, want) {
			t.Errorf("gathered %v, %v", got, err)
		}
		a.Shards = slices.Delete(a.Shards, 3, 4)
		must.Fail(t, "without a shard", a.Check(t.Context()), kernels.ErrShape, "row")
	}
}

func checkUnfinished(t *testing.T, a *Array, blocks []cut.Block) {
	t.Helper()
	var want []int
	for _, b := range blocks {
		want = append(want, b.ID)
	}
	slices.Sort(want)
	if got, err := a.Unfinished(t.Context()); err != nil || !slices.Equal(got, want) {
		t.Errorf("unfinished: %v, want %v (%v)", got, want, err)
	}
}

// TestWriteFails: after an error there is neither a new file nor a hidden one.
func TestWriteFails(t *testing.T) {
	for _, dir := range folders(t) {
		broken := errors.New("broken")
		if err := Write(t.Context(), dir+"/new.npy", func(w io.Writer) error {
			_, err := w.Write(make([]byte, 100))
			return errors.Join(err, broken)
		}); !errors.Is(err, broken) {
			t.Errorf("error %v", err)
		}
		system := must.Get(filesystem.New(t.Context(), dir))(t)
		for _, pattern := range []string{dir + "/*", dir + "/.*"} {
			if left, err := system.List(t.Context(), pattern); err != nil || len(left) > 0 {
				t.Errorf("left behind: %v, %v", left, err)
			}
		}
	}
	memfs.Write("memfs://old/half.npy", []byte("\x93NUM"))
	if _, err := ReadTensor(context.Background(), "memfs://old/half.npy", "f4", []int{1}); err == nil || !strings.Contains(err.Error(), "truncated") {
		t.Errorf("half a file: %v", err)
	}
	must.Fail(t, "no file", must.Err(ReadTensor(context.Background(), "memfs://old/none.npy", "f4", []int{1})), fs.ErrNotExist)
}

// TestDims: lengths that do not fit together are refused before work begins.
func TestDims(t *testing.T) {
	array := func(name, elements string, shape ...int) *Array {
		return &Array{Name: name, Type: elements, Shape: [4]int(shape)}
	}
	q, k, v := array("q", "f2", 1, 8, 100_000_000, 64), array("k", "f2", 1, 2, 90_000_000, 64), array("v", "f2", 1, 2, 90_000_000, 32)
	d, err := Dims(q, k, v, kernels.Options{Causal: true})
	if want := (kernels.Dims{Batch: 1, Heads: 8, KVHeads: 2, SeqQ: 100_000_000, SeqK: 90_000_000, Dim: 64, ValueDim: 32}); err != nil || d != want {
		t.Errorf("%+v, want %+v (%v)", d, want, err)
	}
	for _, c := range []struct {
		k, v *Array
		o    kernels.Options
		is   error
		want string
	}{
		{array("k", "f2", 1, 2, 9, 32), v, kernels.Options{}, kernels.ErrShape, "head size"},
		{array("k", "f2", 1, 2, 9, 64), v, kernels.Options{}, kernels.ErrShape, "same heads and keys"},
		{array("k", "f2", 1, 3, 9, 64), array("v", "f2", 1, 3, 9, 64), kernels.Options{}, kernels.ErrShape, "must divide"},
		{array("k", "f4", 1, 2, 90_000_000, 64), v, kernels.Options{}, kernels.ErrDType, "must have one dtype"},
		{k, v, kernels.Options{KLen: []int{1, 2}}, kernels.ErrShape, "klen has 2 elements, it must have 1"},
	} {
		if _, err := Dims(q, c.k, c.v, c.o); !errors.Is(err, c.is) || !strings.Contains(fmt.Sprint(err), c.want) {
			t.Errorf("error %v, want %v with %q", err, c.is, c.want)
		}
	}
}

// TestByNumber: the order of the matches of a glob.
func TestByNumber(t *testing.T) {
	want := []string{"a", "k-2.npy", "k-9.npy", "k-10.npy", "k-10b.npy", "k-011.npy", "k-11.npy", "k-20-3.npy", "k-20-10.npy", "k-100000000000000000000.npy", "l"}
	got := slices.Clone(want)
	slices.Sort(got)
	slices.SortFunc(got, byNumber)
	if !slices.Equal(got, want) {
		t.Errorf("order %q", got)
	}
}

// TestWriteTwice: workers that write the same file at once, as engines may let them, leave it whole at any time.
func TestWriteTwice(t *testing.T) {
	for _, dir := range folders(t) {
		data := make([]float32, 5000)
		for i := range data {
			data[i] = float32(i)
		}
		uri := dir + "/o.npy"
		var wait sync.WaitGroup
		for range 8 {
			wait.Go(func() {
				for range 5 {
					if err := WriteTensor(t.Context(), uri, "f4", []int{5000}, data); err != nil {
						t.Error(err)
					}
					if got, err := ReadTensor(t.Context(), uri, "f4", []int{5000}); err != nil || !slices.Equal(got, data) {
						t.Errorf("%d numbers, %v", len(got), err)
					}
				}
			})
		}
		wait.Wait()
	}
}
