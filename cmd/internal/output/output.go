// Package output writes the output files of commands. A file is replaced as a whole or not at all:
//
//	var set output.Set
//	defer set.Discard()
//	err := set.Add("--out", path) // checks that path can be written
//	...
//	err = set.Write(ctx, "--out", content)
//	...
//	err = set.Commit(ctx) // the files have their new content
//
// Write puts the content of a regular file into a temporary file next to it, whose name starts with
// .attn-, and synchronises it with the disk. Commit renames the temporary files one after the other. The
// new file has the permissions of the old one. A symbolic link stays and its target is replaced.
//
// A pipe or a character device is written in place by Write. Anything else is refused, and so are two
// outputs that are one file, as wrong usage.
//
// Each file has its old or its whole new content after an error and after a crash, on file systems that keep the order
// of changes to a folder, as ext4, XFS, Btrfs, APFS and NTFS do. A set is no transaction: when Commit fails, the files
// before the one in the error are new. A process that is killed leaves its temporary files behind.
package output

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"

	"github.com/seed90331342/attn/cmd/internal/flags"
)

// Set is a set of output files. The zero value is an empty set.
type Set struct {
	prefix  string // of the names of the temporary files
	outputs []*file
}

type file struct {
	name, path string      // as given
	target     string      // path after its symbolic links
	info       fs.FileInfo // of the file that exists, or nil
	temporary  *os.File    // nil for a pipe or a device
	written    bool
}

// Add announces an output and checks that it can be written, which is best known before a long
// computation. name identifies the output in errors, a flag for example. An empty path adds nothing.
func (s *Set) Add(name, path string) error {
	if path == "" {
		return nil
	}
	f := &file{name: name, path: path}
	if err := s.add(f); err != nil {
		return f.failed(err)
	}
	s.outputs = append(s.outputs, f)
	return nil
}

func (s *Set) add(f *file) (err error) {
	if f.target, f.info, err = follow(f.path); err != nil {
		return err
	}
	dir, base := filepath.Split(f.target)
	stream := isStream(f.info)
	switch {
	case f.info != nil && !f.info.Mode().IsRegular() && !stream:
		return errors.New("it exists and is not a regular file, a pipe or a character device")
	case base == "":
		return errors.New("it is the path of a folder, not of a file")
	case f.info != nil && f.info.Mode()&fs.ModeDevice == 0:
		for _, other := range s.outputs {
			if other.info != nil && os.SameFile(f.info, other.info) {
				return flags.Usagef("%s names the same file", other.name)
			}
		}
	}
	if stream {
		return nil
	}
	if s.prefix == "" {
		s.prefix = fmt.Sprintf(".attn-%016x-", rand.Uint64())
	}
	// Two names of one new file collide here, also those that only the file system takes for one.
	name := dir + s.prefix + base
	f.temporary, err = os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
	switch {
	case errors.Is(err, fs.ErrExist):
		for _, other := range s.outputs {
			if strings.EqualFold(filepath.Base(other.target), base) {
				return flags.Usagef("%s names the same file", other.name)
			}
		}
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("the folder %s does not exist", filepath.Clean(dir))
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("cannot write in the folder %s: %w", filepath.Clean(dir), Reason(err))
	}
	if err == nil && f.info != nil {
		if err = f.temporary.Chmod(f.info.Mode().Perm()); err != nil {
			f.discard()
		}
	}
	return err
}

// follow resolves the symbolic links of a path. It returns the path of the file and its information,
// which is nil for a new file.
func follow(path string) (string, fs.FileInfo, error) {
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		// Another program may have written the file since then.
		if link, err := os.Lstat(path); err == nil && link.Mode()&fs.ModeSymlink != 0 {
			return path, nil, errors.New("it is a link to a file that does not exist")
		}
		return path, nil, nil
	case err != nil || !info.Mode().IsRegular(): // the links of /dev/stdout may end in no path
		return path, info, err
	}
	path, err = filepath.EvalSymlinks(path)
	return path, info, err
}

// Write writes the content of an output. Without that output it does nothing.
func (s *Set) Write(ctx context.Context, name string, content func(io.Writer) error) error {
	for _, f := range s.outputs {
		if f.name != name {
			continue
		}
		var err error
		if f.temporary == nil {
			err = stream(ctx, f.path, content)
		} else if err = content(f.temporary); err == nil {
			// Without Sync a crash of the machine could leave the name without the content.
			err = errors.Join(f.temporary.Sync(), f.temporary.Close())
		}
		if err != nil {
			return f.failed(err)
		}
		f.written = true
	}
	return nil
}

// Commit gives the files that were written their new content.
func (s *Set) Commit(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	for _, f := range s.outputs {
		if !f.written || f.temporary == nil {
			continue
		}
		var err error
		if info, missing := os.Lstat(f.target); missing == nil && !info.Mode().IsRegular() {
			err = errors.New("it is no longer a regular file")
		}
		if err == nil {
			err = os.Rename(f.temporary.Name(), f.target)
		}
		if err != nil {
			return f.failed(err)
		}
		f.temporary = nil
	}
	return nil
}

// Discard removes what was not committed.
func (s *Set) Discard() {
	for _, f := range s.outputs {
		f.discard()
	}
	*s = Set{}
}

func (f *file) discard() {
	if f.temporary != nil {
		f.temporary.Close() // fails after Write
		_ = os.Remove(f.temporary.Name())
	}
}

// failed returns an error about the output.
func (f *file) failed(err error) error {
	return fmt.Errorf("%s: %w", strings.TrimSpace(f.name+" "+f.path), Reason(err))
}

// Write creates or replaces one file. ctx ends the wait for the reader of a pipe, nothing else: a report of
// what was done before can be written after it has ended.
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

// IsStream reports whether path is a pipe or a character device, which are written in place.
func IsStream(path string) bool {
	info, err := os.Stat(path)
	return err == nil && isStream(info)
}

func isStream(info fs.FileInfo) bool {
	const device = fs.ModeDevice | fs.ModeCharDevice
	return info != nil && (info.Mode()&fs.ModeNamedPipe != 0 || info.Mode()&device == device)
}

// stream writes content to a pipe or a device. It returns when ctx ends, even while it waits for a reader;
// that wait then ends with the process.
func stream(ctx context.Context, path string, content func(io.Writer) error) error {
	r, w := io.Pipe()
	done := make(chan error, 1)
	go func() {
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		if err == nil {
			_, err = io.Copy(f, r)
			err = errors.Join(err, f.Close())
		}
		r.CloseWithError(err)
		done <- err
	}()
	defer context.AfterFunc(ctx, func() { r.CloseWithError(context.Cause(ctx)) })()
	err := content(w)
	w.CloseWithError(err)
	if err != nil {
		return err
	}
	select {
	case err = <-done:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
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
