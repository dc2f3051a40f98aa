// Package atomicfile writes files that appear complete or not at all:
//
//	f, err := atomicfile.Create(path)
//	...
//	defer f.Discard()
//	fmt.Fprintln(f, "content")
//	err = f.Finish() // written and closed, not visible yet
//	...
//	err = f.Commit() // visible at path
//
// Until Commit the content lies in a hidden file in the same folder.
package atomicfile

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
)

// File is a file that Commit moves to its path.
type File struct {
	*os.File
	target string
}

// Target returns the file that Create(path) replaces: path, with symbolic links
// followed.
func Target(path string) string {
	if target, err := filepath.EvalSymlinks(path); err == nil {
		return target
	}
	return path
}

// Create opens a hidden file in the folder of path. Unlike a file of
// os.CreateTemp, it has the permissions of any new file.
func Create(path string) (*File, error) {
	target := Target(path)
	temp := fmt.Sprintf(".%s.attn-%016x", filepath.Base(target), rand.Uint64())
	f, err := os.OpenFile(filepath.Join(filepath.Dir(target), temp), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
	if err != nil {
		return nil, err
	}
	return &File{f, target}, nil
}

// Write creates, fills and commits a file.
func Write(path string, content func(io.Writer) error) error {
	f, err := Create(path)
	if err != nil {
		return err
	}
	defer f.Discard()
	if err := content(f); err != nil {
		return err
	}
	if err := f.Finish(); err != nil {
		return err
	}
	return f.Commit()
}

// Finish flushes the content to the disk and closes the file. A file that it
// replaces passes its permissions on.
func (f *File) Finish() error {
	var err error
	if info, statErr := os.Stat(f.target); statErr == nil {
		err = f.Chmod(info.Mode().Perm())
	}
	if err == nil {
		err = f.Sync() // else a crash of the machine could leave the name without the content
	}
	return errors.Join(err, f.Close())
}

// Commit moves the file to its path.
func (f *File) Commit() error { return os.Rename(f.Name(), f.target) }

// Discard closes and removes the file. After Commit it does nothing.
func (f *File) Discard() {
	f.Close()
	os.Remove(f.Name())
}
