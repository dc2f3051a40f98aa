package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
)

// outputs is a set of files that appear together once all of them are complete,
// or not at all: each is written beside its target, in the same folder so that
// a rename suffices, and renamed by commit.
type outputs struct {
	files []*output
}

type output struct {
	flag    string // what errors call it
	path    string // as given
	target  string // with symbolic links followed: what the rename replaces
	temp    string // "" until written
	renamed bool
}

// add checks that a file can be written at path, before anything is computed.
func (o *outputs) add(flag, path string) error {
	f := &output{flag: flag, path: path, target: path}
	problem := func(format string, args ...any) error {
		return fmt.Errorf("--%s %s: %w", flag, path, fmt.Errorf(format, args...))
	}
	if link, err := filepath.EvalSymlinks(path); err == nil {
		f.target = link
	}
	folder := filepath.Dir(f.target)
	switch info, err := os.Stat(folder); {
	case errors.Is(err, os.ErrNotExist):
		return problem("the folder %s does not exist", folder)
	case err != nil:
		return problem("the folder %s: %w", folder, reason(err))
	case !info.IsDir():
		return problem("%s is not a folder", folder)
	}
	if info, err := os.Stat(f.target); err == nil && !info.Mode().IsRegular() {
		return problem("it exists and is not a regular file")
	}
	for _, other := range o.files {
		if sameFile(f.target, other.target) {
			return problem("--%s names the same file", other.flag)
		}
	}
	probe, err := createBeside(f.target)
	if err != nil {
		return problem("cannot write in the folder %s: %w", folder, reason(err))
	}
	probe.Close()
	if err := os.Remove(probe.Name()); err != nil {
		return problem("%w", reason(err))
	}
	o.files = append(o.files, f)
	return nil
}

// createBeside opens a new file in target's folder: hidden, told from others by
// what it will become, and unlike os.CreateTemp's with the permissions that any
// new file gets.
func createBeside(target string) (*os.File, error) {
	name := fmt.Sprintf(".%s.attn-%016x", filepath.Base(target), rand.Uint64())
	return os.OpenFile(filepath.Join(filepath.Dir(target), name), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
}

// sameFile compares paths before the files exist.
func sameFile(a, b string) bool {
	aa, errA := filepath.Abs(a)
	bb, errB := filepath.Abs(b)
	return errA == nil && errB == nil && aa == bb
}

// reason strips the path from a file system error, where the text around it
// has it already.
func reason(err error) error {
	var pe *os.PathError
	if errors.As(err, &pe) {
		return pe.Err
	}
	return err
}

// has reports whether a file was added for flag.
func (o *outputs) has(flag string) bool {
	return slices.ContainsFunc(o.files, func(f *output) bool { return f.flag == flag })
}

// write fills the file that was added for flag.
func (o *outputs) write(flag string, content func(io.Writer) error) error {
	for _, f := range o.files {
		if f.flag == flag {
			if err := f.write(content); err != nil {
				if errors.Is(err, context.Canceled) {
					return err
				}
				return fmt.Errorf("--%s %s: %w", f.flag, f.path, reason(err))
			}
			return nil
		}
	}
	return fmt.Errorf("--%s was not announced as an output", flag)
}

func (f *output) write(content func(io.Writer) error) error {
	w, err := createBeside(f.target)
	if err != nil {
		return err
	}
	f.temp = w.Name()
	if err := content(w); err != nil {
		w.Close()
		return err
	}
	// What is replaced hands its permissions on.
	if info, err := os.Stat(f.target); err == nil {
		if err := w.Chmod(info.Mode().Perm()); err != nil {
			w.Close()
			return err
		}
	}
	// Sync, so that a crash of the machine cannot leave the name without the
	// content.
	if err := w.Sync(); err != nil {
		w.Close()
		return err
	}
	return w.Close()
}

// commit renames every file to its target. When one cannot be renamed those
// before it are removed again, so that no incomplete set stays.
func (o *outputs) commit(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	for _, f := range o.files {
		if f.temp == "" {
			continue
		}
		if err := os.Rename(f.temp, f.target); err != nil {
			for _, done := range o.files {
				if done.renamed {
					os.Remove(done.target)
				}
			}
			var le *os.LinkError
			if errors.As(err, &le) {
				err = le.Err
			}
			return fmt.Errorf("--%s %s: %w", f.flag, f.path, err)
		}
		f.temp, f.renamed = "", true
	}
	return nil
}

// discard removes what was written and not committed; after commit there is
// nothing. It is for a defer.
func (o *outputs) discard() {
	for _, f := range o.files {
		if f.temp != "" {
			os.Remove(f.temp)
			f.temp = ""
		}
	}
}
