package atomicfile

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"runtime"
	"syscall"
)

// disk is what this package changes on a file system. Tests simulate one that crashes.
type disk interface {
	Create(path string) (file, error) // fails for a file that exists
	Link(path, second string) error   // fails for a second that exists
	Rename(path, target string) error // replaces target
	Remove(path string) error
	SyncDir(path string) error                   // writes the names in a folder to the disk
	Inherit(path string, from fs.FileInfo) error // gives path the permissions and owner
}

type file interface {
	io.WriteCloser
	Sync() error
}

type realDisk struct{}

func (realDisk) Link(path, second string) error   { return os.Link(path, second) }
func (realDisk) Rename(path, target string) error { return os.Rename(path, target) }
func (realDisk) Remove(path string) error         { return os.Remove(path) }

// Create gives the file the permissions of any new file, unlike os.CreateTemp.
func (realDisk) Create(path string) (file, error) {
	return os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
}

// SyncDir does nothing where folders cannot be opened or synchronised.
func (realDisk) SyncDir(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return nil
	}
	defer f.Close()
	err = f.Sync()
	if runtime.GOOS == "windows" || errors.Is(err, syscall.EINVAL) || errors.Is(err, errors.ErrUnsupported) {
		return nil
	}
	return err
}

// Inherit changes the owner only if this user may.
func (realDisk) Inherit(path string, from fs.FileInfo) error {
	chown(path, from)
	return os.Chmod(path, from.Mode().Perm())
}

// stream writes content to a pipe or a device. It returns when ctx ends, even while it
// waits for a reader; that wait then ends with the process.
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
