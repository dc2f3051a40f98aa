package atomicfile

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
)

// TestMain runs the tests, or a process of TestKill.
func TestMain(m *testing.M) {
	if dir := os.Getenv("ATTN_TEST_KILL"); dir != "" {
		if _, err := scenarios(dir)[4].run(context.Background(), pausing{}); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// pausing is the real disk. It waits for a line of standard input before each operation.
type pausing struct{ realDisk }

func pause() {
	fmt.Println("next")
	var b [1]byte
	_, _ = os.Stdin.Read(b[:])
}

func (d pausing) Create(path string) (file, error) { pause(); return d.realDisk.Create(path) }
func (d pausing) Link(path, second string) error   { pause(); return d.realDisk.Link(path, second) }
func (d pausing) Rename(path, target string) error { pause(); return d.realDisk.Rename(path, target) }
func (d pausing) Remove(path string) error         { pause(); return d.realDisk.Remove(path) }
func (d pausing) SyncDir(path string) error        { pause(); return d.realDisk.SyncDir(path) }

// TestKill kills a process before each operation on two files in two folders. While it
// lives, another run leaves its hidden files alone; then the next run leaves old or new
// files and no hidden ones.
func TestKill(t *testing.T) {
	dir := memory(t)
	c := scenarios(dir)[4]
	for at := 0; ; at++ {
		write(t, c.start())
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), "ATTN_TEST_KILL="+dir)
		cmd.Stderr = os.Stderr
		in, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewScanner(out)
		for n := 0; lines.Scan() && n < at; n++ {
			if _, err := io.WriteString(in, "\n"); err != nil {
				t.Fatal(err)
			}
		}
		before := append(hidden(t, c.paths[0]), hidden(t, c.paths[1])...)
		for _, path := range c.paths {
			recovered(t, newSimulated(), path)
		}
		// Of a set that is committed, any process may remove what is left.
		after := append(hidden(t, c.paths[0]), hidden(t, c.paths[1])...)
		journal := slices.ContainsFunc(before, func(path string) bool { return strings.HasSuffix(path, journalSuffix) })
		if committed := slices.Equal(read(t, c.paths), c.new()) && !journal; !committed && !slices.Equal(before, after) {
			t.Fatalf("at %d of a living process, %v became %v", at, before, after)
		}
		_ = cmd.Process.Kill() // it may have ended
		in.Close()
		err = cmd.Wait()
		c.check(t, fmt.Sprintf("killed at %d", at), err == nil)
		if err == nil {
			if at < 20 {
				t.Errorf("the process had %d operations only", at)
			}
			return
		}
	}
}

// cleaned is a disk on which another process removes the first owner file, which it took for
// a leftover, before it is locked.
type cleaned struct {
	realDisk
	once sync.Once
}

func (d *cleaned) Create(path string) (f file, err error) {
	f, err = d.realDisk.Create(path)
	d.once.Do(func() { err = errors.Join(err, os.Remove(path)) })
	return f, err
}

// TestOwnerRemoved: a set whose owner file was removed makes another one.
func TestOwnerRemoved(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a")
	s := Set{disk: &cleaned{}}
	if err := errors.Join(s.Add("a", path), s.Write(t.Context(), "a", put("new")), s.Commit(t.Context())); err != nil {
		t.Fatal(err)
	}
	s.Discard()
	wantFile(t, path, "new")
	if names := hidden(t, path); len(names) > 0 {
		t.Errorf("left behind: %v", names)
	}
}

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
	if err := os.WriteFile(target, []byte("old"), 0o640); err != nil {
		t.Fatal(err)
	}
	return dir, target
}

func wantFile(t *testing.T, path, want string) {
	t.Helper()
	if text, err := os.ReadFile(path); err != nil || string(text) != want {
		t.Errorf("%s holds %q, %v, should hold %q", path, text, err, want)
	}
}

// TestTogether replaces one file, with its permissions, and creates another: both appear
// with Commit.
func TestTogether(t *testing.T) {
	dir, a := oldFile(t)
	b := filepath.Join(dir, "b")
	var s Set
	if err := errors.Join(s.Add("a", a), s.Add("b", b), s.Add("none", "")); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(s.Write(t.Context(), "a", put("new a")), s.Write(t.Context(), "b", put("new b")), s.Write(t.Context(), "none", nil)); err != nil {
		t.Fatal(err)
	}
	wantFile(t, a, "old")
	if !missing(b) {
		t.Error("b is there before Commit")
	}
	if err := s.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.Discard()
	wantFile(t, a, "new a")
	wantFile(t, b, "new b")
	if info, err := os.Stat(a); err != nil || runtime.GOOS != "windows" && info.Mode().Perm() != 0o640 {
		t.Errorf("a has mode %v, %v: it should keep its own", info.Mode(), err)
	}
	if names := hidden(t, a); len(names) > 0 {
		t.Errorf("left behind: %v", names)
	}
}

// TestFailures: files keep their old content, and nothing is left, when writing fails, when
// the context ends, and when the second file cannot be placed.
func TestFailures(t *testing.T) {
	full := errors.New("no space left")
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for _, c := range []struct {
		name, want string
		do         func(s *Set, b string) error
	}{
		{"write", "--b BASE: no space left", func(s *Set, b string) error {
			return s.Write(t.Context(), "--b", func(io.Writer) error { return full })
		}},
		{"cancelled", "context canceled", func(s *Set, b string) error { return s.Commit(ended) }},
		{"a folder in the way", "--b BASE: it is no longer a regular file", func(s *Set, b string) error {
			return errors.Join(s.Write(t.Context(), "--b", put("new")), os.Mkdir(b, 0o755), s.Commit(t.Context()))
		}},
	} {
		dir, a := oldFile(t)
		b := filepath.Join(dir, "b")
		var s Set
		if err := errors.Join(s.Add("--a", a), s.Add("--b", b), s.Write(t.Context(), "--a", put("new"))); err != nil {
			t.Fatal(err)
		}
		if err := c.do(&s, b); err == nil || !strings.Contains(strings.ReplaceAll(err.Error(), b, "BASE"), c.want) {
			t.Errorf("%s: %v", c.name, err)
		}
		s.Discard()
		wantFile(t, a, "old")
		if names := hidden(t, a); len(names) > 0 {
			t.Errorf("%s: left behind: %v", c.name, names)
		}
	}
}

// TestLinks: links stay and their targets are replaced, also through two links, out of
// another folder, and where the target does not exist.
func TestLinks(t *testing.T) {
	dir, target := oldFile(t)
	other := t.TempDir()
	absentTarget := filepath.Join(dir, "absent")
	for _, l := range []struct{ link, to, target string }{
		{filepath.Join(dir, "absolute"), target, target},
		{filepath.Join(dir, "relative"), "target", target},
		{filepath.Join(dir, "second"), "relative", target},
		{filepath.Join(other, "elsewhere"), target, target},
		{filepath.Join(other, "dangling"), absentTarget, absentTarget},
	} {
		if err := os.Symlink(l.to, l.link); err != nil {
			t.Skip(err)
		}
		if err := Write(t.Context(), l.link, put(l.link)); err != nil {
			t.Fatal(err)
		}
		wantFile(t, l.target, l.link)
		if to, err := os.Readlink(l.link); err != nil || to != l.to {
			t.Errorf("the link %s became %q, %v", l.link, to, err)
		}
	}
	// ".." is that of the target of a link to a folder.
	if err := errors.Join(os.Mkdir(filepath.Join(other, "sub"), 0o755), os.Symlink(filepath.Join(other, "sub"), filepath.Join(dir, "sub"))); err != nil {
		t.Fatal(err)
	}
	if err := Write(t.Context(), dir+"/sub/../up", put("up")); err != nil {
		t.Fatal(err)
	}
	wantFile(t, filepath.Join(other, "up"), "up")
	loop := filepath.Join(dir, "loop")
	if err := os.Symlink("loop", loop); err != nil {
		t.Fatal(err)
	}
	if err := Write(t.Context(), loop, put("x")); err == nil {
		t.Error("a link to itself was written")
	}
	if err := Remove(filepath.Join(dir, "second")); err != nil {
		t.Fatal(err)
	}
	if !missing(target) || missing(filepath.Join(dir, "second")) {
		t.Error("Remove removed the link, not its target")
	}
	if err := Remove(dir); err == nil {
		t.Error("Remove removed a folder")
	}
}

// TestOneFileTwice refuses two outputs that are one file.
func TestOneFileTwice(t *testing.T) {
	dir, target := oldFile(t)
	if err := errors.Join(
		os.Symlink(target, filepath.Join(dir, "link")), os.Link(target, filepath.Join(dir, "hard")),
		os.Symlink(filepath.Join(dir, "new"), filepath.Join(dir, "dangling")), os.Symlink(dir, filepath.Join(dir, "folder")),
	); err != nil {
		t.Skip(err)
	}
	for _, c := range [][2]string{
		{"target", "target"}, {"target", "link"}, {"target", "hard"}, {"link", "hard"}, {"target", "folder/target"}, {"target", "./folder/../" + filepath.Base(dir) + "/target"},
		{"new", "new"}, {"new", "./new"}, {"new", "dangling"}, {"folder/new", "new"}, {"folder/folder/new", "folder/dangling"},
	} {
		var s Set
		if err := s.Add("--a", dir+"/"+c[0]); err != nil {
			t.Fatal(err)
		}
		if err := s.Add("--b", dir+"/"+c[1]); err == nil || !strings.Contains(err.Error(), "names the same file") {
			t.Errorf("%v: %v", c, err)
		}
		s.Discard()
	}
	wantFile(t, target, "old")
	if names := hidden(t, target); len(names) > 0 {
		t.Errorf("left behind: %v", names)
	}
}

// TestRefused lists paths that take no file, with their errors.
func TestRefused(t *testing.T) {
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
		if runtime.GOOS == "windows" {
			t.Skip("other errors")
		}
		if err := Write(t.Context(), path, put("x")); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.300q: %v", path, err)
		}
	}
	if names, err := os.ReadDir(dir); err != nil || len(names) != 1 {
		t.Errorf("left behind: %v, %v", names, err)
	}
}

// TestManyWriters writes the same and other files of a folder at the same time. Each file
// holds the content of one of its writers, and nothing is left.
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
	if err := errors.Join(s.Add("a", os.DevNull), s.Add("b", os.DevNull), s.Write(t.Context(), "a", put("x")), s.Commit(t.Context())); err != nil {
		t.Error(err)
	}
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
