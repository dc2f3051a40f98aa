package output

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"

	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

func put(text string) func(io.Writer) error {
	return func(w io.Writer) error {
		_, err := io.WriteString(w, text)
		return err
	}
}

// oldFile returns a folder with the file "target", which contains "old".
func oldFile(t *testing.T) (dir, target string) {
	t.Helper()
	dir = t.TempDir()
	target = filepath.Join(dir, "target")
	must.Do(t, os.WriteFile(target, []byte("old"), 0o640))
	return dir, target
}

func wantFile(t *testing.T, path, want string) {
	t.Helper()
	if text, err := os.ReadFile(path); err != nil || string(text) != want {
		t.Errorf("%s holds %q, %v, should hold %q", path, text, err, want)
	}
}

// wantClean checks that no temporary file is left.
func wantClean(t *testing.T, dir string) {
	t.Helper()
	if names, err := filepath.Glob(filepath.Join(dir, ".*")); err != nil || len(names) > 0 {
		t.Errorf("left behind: %v, %v", names, err)
	}
}

func missing(path string) bool {
	_, err := os.Lstat(path)
	return errors.Is(err, fs.ErrNotExist)
}

// TestSet replaces one file, with its permissions, and creates another: both have their new content after Commit.
func TestSet(t *testing.T) {
	dir, a := oldFile(t)
	b := filepath.Join(dir, "b")
	var s Set
	must.Do(t, errors.Join(s.Add("a", a), s.Add("b", b), s.Add("none", "")))
	must.Do(t, errors.Join(s.Write(t.Context(), "a", put("new a")), s.Write(t.Context(), "b", put("new b")), s.Write(t.Context(), "none", nil)))
	wantFile(t, a, "old")
	if !missing(b) {
		t.Error("b is there before Commit")
	}
	must.Do(t, s.Commit(t.Context()))
	s.Discard()
	wantFile(t, a, "new a")
	wantFile(t, b, "new b")
	if info, err := os.Stat(a); err != nil || runtime.GOOS != "windows" && info.Mode().Perm() != 0o640 {
		t.Errorf("a has mode %v, %v: it should keep its own", info.Mode(), err)
	}
	wantClean(t, dir)
}

// TestFailures: a file keeps its old content, and nothing is left, when its content fails, when it cannot be
// synchronised, when the context ends, and when it cannot be placed.
func TestFailures(t *testing.T) {
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for _, c := range []struct {
		name, want string
		commit     context.Context
		content    func(path string, w io.Writer) error
	}{
		{"no space left", "--a FILE: no space left", t.Context(), func(_ string, w io.Writer) error {
			return errors.Join(put("half")(w), errors.New("no space left"))
		}},
		{"synchronisation", "--a FILE: ", t.Context(), func(_ string, w io.Writer) error {
			return errors.Join(put("whole")(w), w.(*os.File).Close())
		}},
		{"cancelled", "context canceled", ended, func(_ string, w io.Writer) error { return put("whole")(w) }},
		{"a folder in the way", "--a FILE: ", t.Context(), func(path string, w io.Writer) error {
			return errors.Join(os.Rename(path, path+"-moved"), os.Mkdir(path, 0o755), put("whole")(w))
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir, a := oldFile(t)
			b := filepath.Join(dir, "b")
			var s Set
			err := errors.Join(s.Add("--a", a), s.Add("--b", b))
			if err == nil {
				err = s.Write(t.Context(), "--a", func(w io.Writer) error { return c.content(a, w) })
			}
			if err == nil {
				err = errors.Join(s.Write(t.Context(), "--b", put("whole")), s.Commit(c.commit))
			}
			if err == nil || !strings.Contains(strings.ReplaceAll(err.Error(), a, "FILE"), c.want) {
				t.Errorf("%v, should contain %q", err, c.want)
			}
			s.Discard()
			if moved := a + "-moved"; !missing(moved) {
				a = moved
			}
			wantFile(t, a, "old")
			if !missing(b) {
				t.Error("the output after the one that failed is new")
			}
			wantClean(t, dir)
		})
	}
}

// TestLinks: links stay and their targets are replaced, also through two links and out of another folder.
// A link without a target is refused.
func TestLinks(t *testing.T) {
	dir, target := oldFile(t)
	other := t.TempDir()
	for _, l := range []struct{ link, to, target string }{
		{filepath.Join(dir, "absolute"), target, target},
		{filepath.Join(dir, "relative"), "target", target},
		{filepath.Join(dir, "second"), "relative", target},
		{filepath.Join(other, "elsewhere"), target, target},
	} {
		if err := os.Symlink(l.to, l.link); err != nil {
			t.Skip(err)
		}
		must.Do(t, Write(t.Context(), l.link, put(l.link)))
		wantFile(t, l.target, l.link)
		if to, err := os.Readlink(l.link); err != nil || to != l.to {
			t.Errorf("the link %s became %q, %v", l.link, to, err)
		}
	}
	// ".." is that of the target of a link to a folder.
	sub := filepath.Join(other, "sub")
	must.Do(t, errors.Join(os.Mkdir(sub, 0o755), os.Symlink(sub, filepath.Join(dir, "sub"))))
	must.Do(t, Write(t.Context(), dir+"/sub/../up", put("up")))
	wantFile(t, filepath.Join(other, "up"), "up")
	for _, to := range []string{"loop", "absent"} {
		link := filepath.Join(dir, "loop")
		must.Do(t, os.Symlink(to, link))
		if err := Write(t.Context(), link, put("x")); err == nil || !missing(filepath.Join(dir, "absent")) {
			t.Errorf("a link to %s was written", to)
		}
		must.Do(t, os.Remove(link))
	}
}

// TestOneFileTwice refuses two outputs that are one file.
func TestOneFileTwice(t *testing.T) {
	dir, target := oldFile(t)
	if err := errors.Join(
		os.Symlink(target, filepath.Join(dir, "link")), os.Link(target, filepath.Join(dir, "hard")),
		os.Symlink(dir, filepath.Join(dir, "folder")),
	); err != nil {
		t.Skip(err)
	}
	for _, c := range [][2]string{
		{"target", "target"}, {"target", "link"}, {"target", "hard"}, {"link", "hard"}, {"target", "folder/target"},
		{"target", "./folder/../" + filepath.Base(dir) + "/target"},
		{"new", "new"}, {"new", "./new"}, {"folder/new", "new"}, {"folder/folder/new", "folder/new"},
	} {
		var s Set
		must.Do(t, s.Add("--a", dir+"/"+c[0]))
		if err := s.Add("--b", dir+"/"+c[1]); err == nil || !strings.Contains(err.Error(), "--a names the same file") {
			t.Errorf("%v: %v", c, err)
		}
		s.Discard()
	}
	wantFile(t, target, "old")
	wantClean(t, dir)
}

// TestRefused lists paths that take no file, with their errors.
func TestRefused(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("other errors")
	}
	dir, target := oldFile(t)
	for path, want := range map[string]string{
		dir:                                  "it exists and is not a regular file",
		dir + "/":                            "it exists and is not a regular file",
		dir + "/none/":                       "it is the path of a folder",
		dir + "/none/o.npy":                  "the folder " + dir + "/none does not exist",
		target + "/o.npy":                    "not a ",
		dir + "/.":                           "it exists and is not a regular file",
		dir + "/\x00":                        "invalid argument",
		dir + "/none/../o":                   "the folder " + dir + " does not exist", // as the system takes it
		dir + "/" + strings.Repeat("x", 300): "file name too long",
	} {
		if err := Write(t.Context(), path, put("x")); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.300q: %v", path, err)
		}
	}
	if names, err := os.ReadDir(dir); err != nil || len(names) != 1 {
		t.Errorf("left behind: %v, %v", names, err)
	}
}

// TestManyWriters writes the same and other files of a folder at the same time. Each file holds the content
// of one of its writers, and nothing is left.
func TestManyWriters(t *testing.T) {
	dir := t.TempDir()
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			for i := range 10 {
				var s Set
				err := errors.Join(s.Add("a", filepath.Join(dir, "a")), s.Add("b", filepath.Join(dir, fmt.Sprint("b", w))))
				for _, name := range []string{"a", "b"} {
					err = errors.Join(err, s.Write(t.Context(), name, put(fmt.Sprint("whole ", w, i))))
				}
				if err = errors.Join(err, s.Commit(t.Context())); err != nil && runtime.GOOS != "windows" {
					t.Error(err) // Windows replaces no file that is open
				}
				s.Discard()
			}
		})
	}
	wg.Wait()
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 9 && runtime.GOOS != "windows" {
		t.Errorf("the folder holds %v, %v", entries, err)
	}
	for _, e := range entries {
		if text, err := os.ReadFile(filepath.Join(dir, e.Name())); err != nil || !strings.HasPrefix(string(text), "whole ") {
			t.Errorf("%s holds %q, %v", e.Name(), text, err)
		}
	}
}

// TestAppearing follows the paths of files that appear meanwhile: none is a broken link.
func TestAppearing(t *testing.T) {
	dir := t.TempDir()
	for i := range 300 {
		path, written := filepath.Join(dir, fmt.Sprint(i)), make(chan error, 1)
		go func() { written <- os.WriteFile(path, nil, 0o600) }()
		for missing(path) {
			_, _, err := follow(path)
			must.Do(t, err)
		}
		must.Do(t, <-written)
	}
}

// TestDevices: devices are written to and stay devices.
func TestDevices(t *testing.T) {
	device, err := os.Lstat(os.DevNull)
	if err != nil || device.Mode()&fs.ModeDevice == 0 {
		t.Skip("there is no null device")
	}
	if !IsStream(os.DevNull) {
		t.Errorf("%s is no stream", os.DevNull)
	}
	var s Set
	must.Do(t, errors.Join(s.Add("a", os.DevNull), s.Add("b", os.DevNull), s.Write(t.Context(), "a", put("x")), s.Commit(t.Context())))
	s.Discard()
	if info, err := os.Lstat(os.DevNull); err != nil || info.Mode() != device.Mode() {
		t.Fatalf("%s became %v, %v", os.DevNull, info.Mode(), err)
	}
	if missing("/dev/full") {
		t.Skip("there is no full device")
	}
	if err := Write(t.Context(), "/dev/full", put("x")); err == nil || !strings.Contains(err.Error(), "/dev/full: no space left") {
		t.Errorf("a full device: %v", err)
	}
}
