package atomicfile

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// simulated is a disk that crashes. Its operations run in a folder of the real file system
// and are recorded. After a crash, rebuild makes the folder what a real disk may hold:
// each folder keeps the names that were synchronised, and as many later changes, in their
// order, as the test chooses; each file keeps the content that was synchronised, or all.
type simulated struct {
	ops     []operation
	crashAt int // the operation that crashes, from 0; negative for none
	failAt  int // the operation that fails
	noLinks bool
}

type operation struct {
	kind         string // create, link, rename, remove, sync folder
	path, second string
	file         *content
}

type content struct {
	path         string
	data         []byte
	synchronised int
	time         time.Time
	sim          *simulated
	os           *os.File
}

var (
	errCrash = errors.New("crash")
	errFault = errors.New("fault")
)

func newSimulated() *simulated { return &simulated{crashAt: -1, failAt: -1} }

// step records an operation that do runs.
func (d *simulated) step(op operation, do func() error) error {
	n := len(d.ops)
	if n == d.crashAt {
		panic(errCrash)
	}
	d.ops = append(d.ops, op)
	if n == d.failAt {
		d.ops[n].kind = "failed"
		return errFault
	}
	err := do()
	if err != nil {
		d.ops[n].kind = "failed"
	}
	return err
}

func (d *simulated) Create(path string) (file, error) {
	c := &content{path: path, sim: d}
	err := d.step(operation{"create", path, "", c}, func() (err error) {
		c.os, err = os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
		return err
	})
	return c, err
}

func (c *content) Write(p []byte) (n int, err error) {
	err = c.sim.step(operation{kind: "write"}, func() (err error) {
		c.data = append(c.data, p...)
		n, err = c.os.Write(p)
		return err
	})
	return n, err
}

func (c *content) Sync() error {
	return c.sim.step(operation{kind: "sync"}, func() error {
		c.synchronised = len(c.data)
		return nil
	})
}

func (c *content) Close() error {
	if info, err := c.os.Stat(); err == nil {
		c.time = info.ModTime()
	}
	return c.os.Close()
}

func (d *simulated) Link(path, second string) error {
	return d.step(operation{"link", path, second, nil}, func() error {
		if d.noLinks {
			return errors.ErrUnsupported
		}
		return os.Link(path, second)
	})
}

func (d *simulated) Rename(path, target string) error {
	return d.step(operation{"rename", path, target, nil}, func() error { return os.Rename(path, target) })
}

func (d *simulated) Remove(path string) error {
	return d.step(operation{"remove", path, "", nil}, func() error { return os.Remove(path) })
}

func (d *simulated) SyncDir(path string) error {
	return d.step(operation{"sync folder", path, "", nil}, func() error { return nil })
}

func (d *simulated) Inherit(path string, from fs.FileInfo) error {
	return d.step(operation{kind: "inherit"}, func() error { return nil })
}

// kept returns, for each folder, the number of changed names that a crash may leave: at
// least those that were synchronised, at most all.
func (d *simulated) kept() (least, all map[string]int) {
	least, all = map[string]int{}, map[string]int{}
	for _, op := range d.ops {
		switch op.kind {
		case "create", "link", "rename", "remove":
			all[filepath.Dir(op.path)]++
		case "sync folder":
			least[op.path] = all[op.path]
		}
	}
	return least, all
}

// rebuild makes of the folders what they are after a crash that kept the given changes.
func (d *simulated) rebuild(t *testing.T, keep map[string]int, unsynchronised bool) {
	t.Helper()
	done := map[string]int{}
	for _, op := range d.ops {
		dir := filepath.Dir(op.path)
		switch op.kind {
		case "create", "link", "rename", "remove":
			if done[dir]++; done[dir] > keep[dir] {
				continue
			}
		}
		var err error
		switch op.kind {
		case "create":
			data := op.file.data
			if !unsynchronised {
				data = data[:op.file.synchronised]
			}
			if err = os.WriteFile(op.path, data, 0o666); err == nil && !op.file.time.IsZero() {
				err = os.Chtimes(op.path, time.Time{}, op.file.time)
			}
		case "link":
			err = os.Link(op.path, op.second)
		case "rename":
			err = os.Rename(op.path, op.second)
		case "remove":
			err = os.Remove(op.path)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// memory returns a folder in memory where the system has one: on a disk, thousands of
// states take minutes.
func memory(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "attn-crash-")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// write makes folders that contain these files only.
func write(t *testing.T, files map[string]string) {
	t.Helper()
	for path := range files {
		if err := errors.Join(os.RemoveAll(filepath.Dir(path)), os.MkdirAll(filepath.Dir(path), 0o755)); err != nil {
			t.Fatal(err)
		}
	}
	for path, text := range files {
		if text == absent {
			continue
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// read returns the content of files.
func read(t *testing.T, paths []string) (texts []string) {
	t.Helper()
	for _, path := range paths {
		text, err := os.ReadFile(path)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			text = []byte(absent)
		case err != nil:
			t.Fatal(err)
		}
		texts = append(texts, string(text))
	}
	return texts
}

const absent = "(absent)"

// hidden returns the hidden files in the folder of a file.
func hidden(t *testing.T, path string) []string {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(filepath.Dir(path), ".*"))
	if err != nil {
		t.Fatal(err)
	}
	return names
}

// scenario is a run that writes files.
type scenario struct {
	name    string
	paths   []string
	old     []string // content before the run
	noLinks bool
}

func scenarios(dir string) []scenario {
	const a, b, far = "1/a", "1/b", "2/b"
	all := []scenario{
		{"a file", []string{a}, []string{"old"}, false},
		{"a new file", []string{a}, []string{absent}, false},
		{"two files", []string{a, b}, []string{"old", "was"}, false},
		{"an old and a new file", []string{a, b}, []string{"old", absent}, false},
		{"two folders", []string{a, far}, []string{"old", "was"}, false},
		{"two folders, one new file", []string{a, far}, []string{absent, "was"}, false},
		{"without hard links", []string{a, far}, []string{"old", "was"}, true},
	}
	for n, c := range all { // each in a folder of its own
		for i, path := range c.paths {
			c.paths[i] = filepath.Join(dir, fmt.Sprint(n), filepath.FromSlash(path))
		}
	}
	return all
}

func (c scenario) start() map[string]string {
	start := map[string]string{}
	for i, path := range c.paths {
		start[path] = c.old[i]
	}
	return start
}

func (c scenario) new() (texts []string) {
	for i := range c.paths {
		texts = append(texts, fmt.Sprintf("new content %d", i))
	}
	return texts
}

// run writes the files on a disk. committed reports whether Commit returned nil before
// the crash, if there was one.
func (c scenario) run(ctx context.Context, d disk) (committed bool, err error) {
	set := Set{disk: d}
	defer func() {
		for _, f := range set.folders { // an ended process has no locks
			f.lock.Close()
		}
		if bug := recover(); bug != nil && bug != errCrash {
			panic(bug)
		} else if bug != nil {
			err = errCrash
		}
	}()
	for i, path := range c.paths {
		if err == nil {
			err = set.Add(fmt.Sprint(i), path)
		}
	}
	for i, text := range c.new() {
		if err == nil {
			err = set.Write(ctx, fmt.Sprint(i), func(w io.Writer) error {
				_, err := io.WriteString(w, text)
				return err
			})
		}
	}
	if err == nil {
		err = set.Commit(ctx)
		committed = err == nil
	}
	set.Discard()
	return committed, err
}

// recovered adds and discards an output next to a file, as the next run does. It returns
// false if that crashes.
func recovered(t *testing.T, d disk, path string) (whole bool) {
	t.Helper()
	set := Set{disk: d}
	defer func() {
		if bug := recover(); bug != nil {
			if bug != errCrash {
				panic(bug)
			}
			for _, f := range set.folders {
				f.lock.Close()
			}
		}
	}()
	if err := set.Add("next", filepath.Join(filepath.Dir(path), "next")); err != nil {
		t.Fatal(err)
	}
	set.Discard()
	return true
}

// check recovers from each folder and checks that the files are all old or all new.
func (c scenario) check(t *testing.T, what string, committed bool) {
	t.Helper()
	recovered(t, newSimulated(), c.paths[len(c.paths)-1])
	got := read(t, c.paths)
	if !slices.Equal(got, c.new()) && (committed || !slices.Equal(got, c.old)) {
		t.Fatalf("%s: after recovery the files hold %q (committed: %v)", what, got, committed)
	}
	for _, path := range c.paths {
		recovered(t, newSimulated(), path)
		if names := hidden(t, path); len(names) > 0 {
			t.Fatalf("%s: hidden files are left: %v", what, names)
		}
	}
	if again := read(t, c.paths); !slices.Equal(again, got) {
		t.Fatalf("%s: a second recovery makes %q of %q", what, again, got)
	}
}

// TestCrash crashes before every operation, keeps every number of changes that were not
// synchronised, and recovers: old or new content, whole sets. The recovery crashes too.
func TestCrash(t *testing.T) {
	for _, c := range scenarios(memory(t)) {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			states := 0
			for at := 0; ; at++ {
				write(t, c.start())
				d := newSimulated()
				d.crashAt, d.noLinks = at, c.noLinks
				committed, err := c.run(t.Context(), d)
				if err != nil && err != errCrash {
					t.Fatal(err)
				}
				least, all := d.kept()
				folders := slices.Sorted(maps.Keys(all))
				each(folders, least, all, func(keep map[string]int) {
					for _, unsynchronised := range []bool{false, true} {
						states++
						what := fmt.Sprintf("crash at %d of\n%v\nthat keeps %v, content that was not synchronised: %v", at, d, keep, unsynchronised)
						rebuild := func() {
							write(t, c.start())
							d.rebuild(t, keep, unsynchronised)
						}
						rebuild()
						for i, text := range read(t, c.paths) { // each file is whole before recovery too
							if text != c.old[i] && text != c.new()[i] && !(c.noLinks && text == absent) {
								t.Fatalf("%s: %s holds %q", what, c.paths[i], text)
							}
						}
						c.check(t, what, committed)
						if extreme := maps.Equal(keep, all) || maps.Equal(keep, least); !extreme || !unsynchronised {
							continue
						}
						for then, ended := 0, 0; ended < len(c.paths); then++ {
							rebuild()
							again := &simulated{crashAt: then / len(c.paths), failAt: -1}
							if recovered(t, again, c.paths[then%len(c.paths)]) {
								ended++
							}
							least, all := again.kept()
							changed := slices.Sorted(maps.Keys(all))
							for some := range 1 << len(changed) { // all or the least of each folder
								keep := maps.Clone(all)
								for i, name := range changed {
									if some>>i&1 > 0 {
										keep[name] = least[name]
									}
								}
								rebuild()
								again.rebuild(t, keep, true)
								c.check(t, fmt.Sprintf("%s, and a crash at %d of its recovery\n%v\nthat keeps %v", what, then, again, keep), committed)
								states++
							}
						}
					}
				})
				if err == nil {
					t.Logf("%d operations, %d states", at, states)
					return
				}
			}
		})
	}
}

// each calls f with all combinations of the numbers least to all.
func each(folders []string, least, all map[string]int, f func(map[string]int)) {
	if len(folders) == 0 {
		f(map[string]int{})
		return
	}
	name := folders[0]
	for n := least[name]; n <= all[name]; n++ {
		each(folders[1:], least, all, func(keep map[string]int) {
			keep[name] = n
			f(keep)
		})
	}
}

// String lists the operations.
func (d *simulated) String() string {
	var lines []string
	for _, op := range d.ops {
		lines = append(lines, strings.TrimSpace(fmt.Sprint(op.kind, " ", op.path, " ", op.second)))
	}
	return strings.Join(lines, "\n")
}

// TestFault fails every operation in turn, as a full or a broken disk does: Commit returns
// nil with all files new, or an error with all files old.
func TestFault(t *testing.T) {
	for _, c := range scenarios(memory(t)) {
		t.Run(c.name, func(t *testing.T) {
			for at := 0; ; at++ {
				write(t, c.start())
				d := newSimulated()
				d.failAt, d.noLinks = at, c.noLinks
				committed, err := c.run(t.Context(), d)
				what := fmt.Sprintf("fault at %d of\n%v", at, d)
				want := c.old
				if committed || len(c.paths) == 1 && at < len(d.ops) && d.ops[at].path == filepath.Dir(c.paths[0]) {
					want = c.new()
				}
				if got := read(t, c.paths); !slices.Equal(got, want) {
					t.Fatalf("%s: %v, the files hold %q", what, err, got)
				}
				c.check(t, what, committed)
				if at >= len(d.ops) {
					if err != nil {
						t.Fatal(err)
					}
					return
				}
			}
		})
	}
}
