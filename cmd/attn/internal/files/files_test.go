package files

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/seed90331342/attn/cmd/attn/internal/cli/clitest"
)

func contents(s string) func(io.Writer) error {
	return func(w io.Writer) error {
		_, err := io.WriteString(w, s)
		return err
	}
}

func wantContent(t *testing.T, path, want string) {
	t.Helper()
	if b, err := os.ReadFile(path); err != nil || string(b) != want {
		t.Errorf("%s holds %q, %v, should hold %q", filepath.Base(path), b, err, want)
	}
}

// TestOutputsAppearTogether replaces one file and creates another: both appear with
// Commit, and nothing before it.
func TestOutputsAppearTogether(t *testing.T) {
	dir := t.TempDir()
	a, b := clitest.WriteFile(t, dir, "a", []byte("old")), filepath.Join(dir, "b")
	if err := os.Chmod(a, 0o640); err != nil {
		t.Fatal(err)
	}
	var o Set
	for flag, path := range map[string]string{"a": a, "b": b} {
		if err := o.Add(flag, path); err != nil {
			t.Fatal(err)
		}
	}
	if got := clitest.Files(t, dir); !slices.Equal(got, []string{"a"}) {
		t.Errorf("the folder holds %v before anything is written", got)
	}
	for _, flag := range []string{"a", "b"} {
		if err := o.Write(flag, contents("new "+flag)); err != nil {
			t.Fatal(err)
		}
	}
	wantContent(t, a, "old")
	if _, err := os.Stat(b); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("b is there before commit: %v", err)
	}
	if err := o.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	o.Discard()
	wantContent(t, a, "new a")
	wantContent(t, b, "new b")
	if got := clitest.Files(t, dir); !slices.Equal(got, []string{"a", "b"}) {
		t.Errorf("the folder holds %v", got)
	}
	if info, err := os.Stat(a); err != nil || runtime.GOOS != "windows" && info.Mode().Perm() != 0o640 {
		t.Errorf("a has mode %v, %v: it should keep its own", info.Mode(), err)
	}
}

// TestOutputsThatFail: no file is left when writing fails, or when a file cannot be
// renamed after another one was.
func TestOutputsThatFail(t *testing.T) {
	dir := t.TempDir()
	a, b := filepath.Join(dir, "a"), filepath.Join(dir, "b")
	var o Set
	if err := errors.Join(o.Add("a", a), o.Add("b", b), o.Write("a", contents("new"))); err != nil {
		t.Fatal(err)
	}
	err := o.Write("b", func(io.Writer) error { return errors.New("no space left") })
	if err == nil || !strings.Contains(err.Error(), "--b "+b+": no space left") {
		t.Errorf("write: %v", err)
	}
	o.Discard()
	if got := clitest.Files(t, dir); len(got) != 0 {
		t.Errorf("the folder holds %v", got)
	}

	o = Set{}
	if err := errors.Join(o.Add("a", a), o.Add("b", b), o.Write("a", contents("new")), o.Write("b", contents("new"))); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(b, 0o755); err != nil { // in the way of the rename
		t.Fatal(err)
	}
	if err := o.Commit(t.Context()); err == nil || !strings.Contains(err.Error(), "--b "+b) {
		t.Errorf("commit: %v", err)
	}
	o.Discard()
	if got := clitest.Files(t, dir); !slices.Equal(got, []string{"b"}) {
		t.Errorf("the folder holds %v", got)
	}
}

// TestOutputsFollowLinks replaces the target of a symbolic link, not the link.
func TestOutputsFollowLinks(t *testing.T) {
	dir := t.TempDir()
	target, link := clitest.WriteFile(t, dir, "target", []byte("old")), filepath.Join(dir, "link")
	if err := os.Symlink(target, link); err != nil {
		t.Skip(err)
	}
	var o Set
	if err := errors.Join(o.Add("out", link), o.Write("out", contents("new")), o.Commit(t.Context())); err != nil {
		t.Fatal(err)
	}
	wantContent(t, target, "new")
	if info, err := os.Lstat(link); err != nil || info.Mode()&os.ModeSymlink == 0 {
		t.Errorf("the link became %v, %v", info.Mode(), err)
	}
}
