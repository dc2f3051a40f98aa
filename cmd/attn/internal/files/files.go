// Package files writes the output files of a command: all of them, or none.
package files

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/seed90331342/attn/backend/atomicfile"
)

// Set is a set of output files. They appear together once all of them are
// complete. The zero value is an empty set.
type Set struct{ outputs []*output }

type output struct {
	flag   string // for errors
	path   string // as given
	target string // what the file replaces
	file   *atomicfile.File
	done   bool
}

// Add announces the file of a flag and checks that it can be written, which is
// best known before a long computation. An empty path adds nothing.
func (s *Set) Add(flag, path string) error {
	if path == "" {
		return nil
	}
	o := &output{flag: flag, path: path, target: atomicfile.Target(path)}
	if err := s.check(o); err != nil {
		return fmt.Errorf("--%s %s: %w", flag, path, err)
	}
	s.outputs = append(s.outputs, o)
	return nil
}

func (s *Set) check(o *output) error {
	folder := filepath.Dir(o.target)
	switch info, err := os.Stat(folder); {
	case errors.Is(err, os.ErrNotExist):
		return fmt.Errorf("the folder %s does not exist", folder)
	case err != nil:
		return fmt.Errorf("the folder %s: %w", folder, Reason(err))
	case !info.IsDir():
		return fmt.Errorf("%s is not a folder", folder)
	}
	if info, err := os.Stat(o.target); err == nil && !info.Mode().IsRegular() {
		return errors.New("it exists and is not a regular file")
	}
	for _, other := range s.outputs {
		a, errA := filepath.Abs(o.target)
		b, errB := filepath.Abs(other.target)
		if errA == nil && errB == nil && a == b {
			return fmt.Errorf("--%s names the same file", other.flag)
		}
	}
	probe, err := atomicfile.Create(o.target)
	if err != nil {
		return fmt.Errorf("cannot write in the folder %s: %w", folder, Reason(err))
	}
	probe.Discard()
	return nil
}

// Empty reports whether no file was added.
func (s *Set) Empty() bool { return len(s.outputs) == 0 }

// Write writes the file of flag. Without one it does nothing.
func (s *Set) Write(flag string, content func(io.Writer) error) error {
	for _, o := range s.outputs {
		if o.flag != flag {
			continue
		}
		if err := o.write(content); err != nil && !errors.Is(err, context.Canceled) {
			return fmt.Errorf("--%s %s: %w", o.flag, o.path, Reason(err))
		} else if err != nil {
			return err
		}
	}
	return nil
}

func (o *output) write(content func(io.Writer) error) (err error) {
	if o.file, err = atomicfile.Create(o.target); err != nil {
		return err
	}
	if err := content(o.file); err != nil {
		return err
	}
	return o.file.Finish()
}

// Commit makes the files visible. When one of them cannot be, it removes the others.
func (s *Set) Commit(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	for _, o := range s.outputs {
		if o.file == nil {
			continue
		}
		if err := o.file.Commit(); err != nil {
			for _, other := range s.outputs {
				if other.done {
					os.Remove(other.target)
				}
			}
			return fmt.Errorf("--%s %s: %w", o.flag, o.path, Reason(err))
		}
		o.done = true
	}
	return nil
}

// Discard removes what was written and not committed.
func (s *Set) Discard() {
	for _, o := range s.outputs {
		if o.file != nil {
			o.file.Discard()
		}
	}
}

// Reason returns the cause of a file system error without the path.
func Reason(err error) error {
	var path *os.PathError
	var link *os.LinkError
	switch {
	case errors.As(err, &path):
		return path.Err
	case errors.As(err, &link):
		return link.Err
	}
	return err
}
