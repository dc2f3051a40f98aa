// Package atomicfile writes all files of attn: a file, or a set of files, that appears
// complete or not at all:
//
//	var set atomicfile.Set
//	defer set.Discard()
//	err := set.Add("--out", path) // checks that path can be written
//	...
//	err = set.Write(ctx, "--out", content)
//	...
//	err = set.Commit(ctx) // all files of the set are visible now
//
// A regular file is replaced, with its permissions and, where the system permits it, its
// owner. A symbolic link stays and its target is replaced. A pipe or a character device
// is written to, which cannot be undone. Anything else is refused, and so are two
// outputs that are one file.
//
// Until Commit the content lies in hidden files next to the outputs, .attn- and 16
// hexadecimal digits, one of which is locked while the process lives.
//
//   - After an error of Add, Write or Commit, every file has its old content. (A single
//     file may have its new content if its folder could not be synchronised.)
//   - After a crash of the process or of the machine, a single file has its old or its
//     new content. The files of a set may be mixed until the next Add in one of their
//     folders, which restores the old content of all, except of files that were changed
//     since. Add also removes the hidden files of processes that have ended.
//   - Once Commit has returned nil, all files keep their new content.
//
// The guarantee for crashes of the machine needs a file system that keeps the order of
// changes to a folder, as ext4, XFS, Btrfs, APFS and NTFS do, and a disk that does not lose
// what it has confirmed. Folders are not synchronised on Windows. Network file systems may
// lack locks across machines: let one machine at a time write into a folder. Systems
// without flock, apart from Windows, recover nothing. Access control lists, extended
// attributes and other hard links to a replaced file do not follow it.
package atomicfile

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Set is a set of output files that appear together. The zero value is an empty set.
type Set struct {
	disk    disk // nil for the real one
	folders []*folder
	outputs []*output
}

// folder is a folder of outputs.
type folder struct {
	path   string
	info   fs.FileInfo
	prefix string    // of the hidden files, the path of the owner file
	lock   io.Closer // of the owner file
}

type output struct {
	name, path string // as given
	info       fs.FileInfo
	stream     bool
	written    bool
	file       file  // unset for a stream, as is entry
	entry      entry // where the file goes
}

// failed returns an error about the output.
func (o *output) failed(err error) error {
	return fmt.Errorf("%s: %w", strings.TrimSpace(o.name+" "+o.path), Reason(err))
}

// Add announces the file of an output and checks that it can be written, which is best
// known before a long computation. name identifies the output in errors, a flag for
// example. An empty path adds nothing.
func (s *Set) Add(name, path string) error {
	if path == "" {
		return nil
	}
	if s.disk == nil {
		s.disk = realDisk{}
	}
	o := &output{name: name, path: path}
	if err := s.add(o); err != nil {
		return o.failed(err)
	}
	s.outputs = append(s.outputs, o)
	return nil
}

func (s *Set) add(o *output) error {
	dir, base, info, err := resolve(o.path)
	if err != nil {
		return err
	}
	o.info, o.stream = info, isStream(info)
	switch {
	case info == nil:
	case !info.Mode().IsRegular() && !o.stream:
		return errors.New("it exists and is not a regular file, a pipe or a character device")
	case info.Mode()&fs.ModeDevice == 0:
		for _, other := range s.outputs {
			if other.info != nil && os.SameFile(info, other.info) {
				return fmt.Errorf("%s names the same file", other.name)
			}
		}
	}
	if o.stream {
		return nil
	}
	f, err := s.open(dir)
	if err != nil {
		return err
	}
	o.entry = entry{Prefix: f.prefix, Base: base}
	// The names of hidden files end as those of the outputs do: they collide where the
	// file system takes two names for one, as in O.npy and o.npy.
	if o.file, err = s.disk.Create(o.entry.content()); errors.Is(err, fs.ErrExist) {
		i := slices.IndexFunc(s.outputs, func(other *output) bool {
			return other.entry.Prefix == f.prefix && strings.EqualFold(other.entry.Base, base)
		})
		return fmt.Errorf("%s names the same file", s.outputs[max(i, 0)].name)
	}
	if err == nil && info != nil {
		if err = s.disk.Inherit(o.entry.content(), info); err != nil {
			o.file.Close()
		}
	}
	return err
}

// open returns the folder at path after recovery of what ended processes left there.
func (s *Set) open(path string) (*folder, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("the folder %s: %w", path, Reason(err))
	}
	for _, f := range s.folders {
		if os.SameFile(f.info, info) {
			return f, nil
		}
	}
	recoverFolder(s.disk, path)
	f := &folder{path: path, info: info}
	text := header
	if len(s.folders) > 0 {
		text += s.folders[0].prefix
	}
	for range 100 {
		f.prefix = filepath.Join(path, fmt.Sprintf(".attn-%016x", rand.Uint64()))
		if err = writeFile(s.disk, f.prefix, text+"\n"); err != nil {
			break
		}
		if f.lock, err = lock(f.prefix); err != nil {
			continue // another process takes it for a leftover
		}
		if _, err = os.Lstat(f.prefix); err == nil {
			s.folders = append(s.folders, f)
			return f, nil
		}
		f.lock.Close()
	}
	return nil, fmt.Errorf("cannot write in the folder %s: %w", path, Reason(err))
}

// Empty reports whether no output was added.
func (s *Set) Empty() bool { return len(s.outputs) == 0 }

// Write writes the content of an output. Without that output it does nothing.
func (s *Set) Write(ctx context.Context, name string, content func(io.Writer) error) (err error) {
	for _, o := range s.outputs {
		if o.name != name {
			continue
		}
		if o.stream {
			err = stream(ctx, o.path, content)
		} else if err = content(o.file); err == nil {
			// Without Sync a crash of the machine could leave the name without the content.
			err = errors.Join(o.file.Sync(), o.file.Close())
		}
		if err != nil {
			return o.failed(err)
		}
		o.written = true
	}
	return nil
}

// Commit makes the outputs visible that were written. When one of them cannot be, all
// keep their old content.
func (s *Set) Commit(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	var j journal
	var outputs []*output
	for _, o := range s.outputs {
		if !o.written || o.stream {
			continue
		}
		if err := o.entry.prepare(); err != nil {
			return o.failed(err)
		}
		outputs, j.Outputs = append(outputs, o), append(j.Outputs, o.entry)
	}
	if len(outputs) == 0 {
		return nil
	}
	several := len(outputs) > 1 // otherwise the rename replaces all or nothing
	if several {
		if err := s.begin(j); err != nil {
			return outputs[0].failed(err)
		}
	}
	var err error
	for i, e := range j.Outputs {
		if err = e.place(s.disk, several); err != nil {
			err = outputs[i].failed(err)
			break
		}
	}
	if err == nil {
		err = s.sync()
	}
	if err == nil && several {
		first := s.folders[0]
		err = s.disk.Remove(first.prefix + journalSuffix) // the set is committed
		if err == nil {
			err = s.disk.SyncDir(first.path)
		}
	}
	if err != nil && several {
		if failed := errors.Join(j.restore(s.disk), rollback(s.disk, s.folders[0].prefix)); failed != nil {
			for _, f := range s.folders {
				f.lock.Close()
			}
			s.folders = nil // Discard must leave the copies
			err = fmt.Errorf("%w; the old content could not be restored and lies in %s: %w", err, j.Outputs[0].backup(), failed)
		}
	}
	return err
}

// begin writes the journal once the old files have second names.
func (s *Set) begin(j journal) error {
	for _, e := range j.Outputs {
		if !e.Existed {
			continue
		}
		// Link fails for a file that another process replaces at this moment. Where there
		// are no hard links, place moves the file.
		for range 100 {
			if err := s.disk.Link(e.target(), e.backup()); !errors.Is(err, fs.ErrNotExist) {
				break
			}
		}
	}
	if err := s.sync(); err != nil {
		return err
	}
	if err := writeFile(s.disk, s.folders[0].prefix+journalSuffix, j.String()); err != nil {
		return err
	}
	return s.disk.SyncDir(s.folders[0].path)
}

func (s *Set) sync() (err error) {
	for _, f := range s.folders {
		err = errors.Join(err, s.disk.SyncDir(f.path))
	}
	return err
}

// Discard removes what was written and not committed.
func (s *Set) Discard() {
	for _, o := range s.outputs {
		if o.file != nil {
			o.file.Close()
		}
	}
	for i := len(s.folders) - 1; i >= 0; i-- { // the folder of the journal last
		clean(s.disk, s.folders[i].prefix)
		s.folders[i].lock.Close()
	}
	*s = Set{disk: s.disk}
}

// Write creates or replaces one file. ctx ends the wait for the reader of a pipe, nothing
// else: a report of what was done before can be written after it has ended.
func Write(ctx context.Context, path string, content func(io.Writer) error) error {
	var s Set
	defer s.Discard()
	if err := s.Add("", path); err != nil {
		return err
	}
	if err := s.Write(ctx, "", content); err != nil {
		return err
	}
	return s.Commit(context.WithoutCancel(ctx))
}

// Remove removes a regular file. Of a symbolic link, it removes the target.
func Remove(path string) error {
	dir, base, _, err := resolve(path)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return os.Remove(filepath.Join(dir, base)) // fails without a name, as for a folder
}

// IsStream reports whether path is a pipe or a character device, which Write appends to.
func IsStream(path string) bool {
	info, err := os.Stat(path)
	return err == nil && isStream(info)
}

func isStream(info fs.FileInfo) bool {
	const device = fs.ModeDevice | fs.ModeCharDevice
	return info != nil && (info.Mode()&fs.ModeNamedPipe != 0 || info.Mode()&device == device)
}

// resolve follows symbolic links, also one without a target. It returns the absolute
// path of the folder, the name of the file in it, and its info, nil if there is none.
func resolve(path string) (dir, base string, info fs.FileInfo, err error) {
	// The links of /dev/stdout end in no path.
	if info, err := os.Stat(path); err == nil && !info.Mode().IsRegular() {
		return "", "", info, nil
	}
	for range 40 {
		dir, base = filepath.Split(path)
		if base == "" || base == "." || base == ".." {
			return "", "", nil, errors.New("it is the path of a folder, not of a file")
		}
		if dir == "" {
			dir = "."
		}
		real, err := filepath.EvalSymlinks(dir)
		if err == nil {
			real, err = filepath.Abs(real)
		}
		if errors.Is(err, fs.ErrNotExist) {
			return "", "", nil, fmt.Errorf("the folder %s does not exist", filepath.Clean(dir))
		}
		if err != nil {
			return "", "", nil, fmt.Errorf("the folder %s: %w", filepath.Clean(dir), Reason(err))
		}
		info, err := os.Lstat(filepath.Join(real, base))
		if errors.Is(err, fs.ErrNotExist) {
			return real, base, nil, nil
		}
		if err != nil || info.Mode()&fs.ModeSymlink == 0 {
			return real, base, info, err
		}
		if path, err = os.Readlink(filepath.Join(real, base)); err != nil {
			return "", "", nil, err
		}
		if !filepath.IsAbs(path) {
			path = real + string(filepath.Separator) + path // Join would drop links before ".."
		}
	}
	return "", "", nil, errors.New("too many symbolic links")
}

// Reason returns the cause of a file system error without the path.
func Reason(err error) error {
	if e, ok := errors.AsType[*os.PathError](err); ok {
		return e.Err
	}
	if e, ok := errors.AsType[*os.LinkError](err); ok {
		return e.Err
	}
	return err
}
