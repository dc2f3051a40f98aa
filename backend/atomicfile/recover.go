package atomicfile

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// The hidden files of a set in a folder share a prefix:
//
//	.attn-ID           the owner file: header, then the owner file of the set's first
//	                   folder in the others; locked while the process lives
//	.attn-ID-new-NAME  the content of the output NAME
//	.attn-ID-old-NAME  the file that it replaces, while a set of several files is committed
//	.attn-ID-journal   the outputs, in the first folder, while the set is committed
//
// The set is committed once the journal is gone. Before that, rollback restores the old
// files. The owner file is removed last: without it the others would not be recognised.
const (
	header        = "attn: owner of output files that are not complete. The next run that writes here removes them.\n"
	newInfix      = "-new-"
	oldInfix      = "-old-"
	journalSuffix = "-journal"
)

var ownerName = regexp.MustCompile(`^\.attn-[0-9a-f]{16}$`)

type journal struct{ Outputs []entry }

// String returns the JSON that rollback reads.
func (j journal) String() string {
	text, _ := json.Marshal(j) // cannot fail for these types
	return string(text)
}

// entry is an output.
type entry struct {
	Prefix, Base string
	Existed      bool
	Size, Time   int64 // of the new file, to recognise it
}

func (e entry) target() string  { return filepath.Join(filepath.Dir(e.Prefix), e.Base) }
func (e entry) content() string { return e.Prefix + newInfix + e.Base }
func (e entry) backup() string  { return e.Prefix + oldInfix + e.Base }

// prepare completes the entry before it is placed.
func (e *entry) prepare() error {
	old, err := os.Lstat(e.target())
	e.Existed = err == nil
	switch {
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return err
	case err == nil && !old.Mode().IsRegular():
		return errors.New("it is no longer a regular file")
	}
	info, err := os.Lstat(e.content())
	if err == nil {
		e.Size, e.Time = info.Size(), info.ModTime().UnixNano()
	}
	return err
}

// place moves the new file to its target, and the old one to its backup if keep is set and
// it could not be linked.
func (e entry) place(d disk, keep bool) error {
	if keep && e.Existed && missing(e.backup()) {
		if err := d.Rename(e.target(), e.backup()); err != nil {
			return err
		}
	}
	return d.Rename(e.content(), e.target())
}

// restore undoes place, unless another program has changed the file since. It may run
// again after a crash.
func (e entry) restore(d disk) error {
	info, err := os.Lstat(e.target())
	placed := err == nil && missing(e.content()) && info.Size() == e.Size && info.ModTime().UnixNano() == e.Time
	switch {
	case e.Existed && (placed || errors.Is(err, fs.ErrNotExist)) && !missing(e.backup()):
		err = d.Rename(e.backup(), e.target())
	case !e.Existed && placed:
		err = d.Remove(e.target())
	default:
		return nil
	}
	return errors.Join(err, d.SyncDir(filepath.Dir(e.Prefix)))
}

func missing(path string) bool {
	_, err := os.Lstat(path)
	return errors.Is(err, fs.ErrNotExist)
}

// recoverFolder restores and removes what ended processes left in a folder. What it cannot
// remove is hidden, and a later run tries again.
func recoverFolder(d disk, path string) {
	entries, _ := os.ReadDir(path)
	for _, e := range entries {
		if ownerName.MatchString(e.Name()) {
			_ = recoverSet(d, filepath.Join(path, e.Name()))
		}
	}
}

// recoverSet restores the outputs of a set and removes its hidden files with a prefix. It
// returns an error if the process of the set lives.
func recoverSet(d disk, prefix string) error {
	first, owner, err := lockOwner(prefix)
	if err != nil {
		return err
	}
	defer owner.Close()
	if first == "" {
		err = rollback(d, prefix)
	} else if err = recoverSet(d, first); missing(first) && !missing(filepath.Dir(first)) {
		err = nil // complete, as the owner file of the first folder goes last
	}
	if err != nil {
		return err
	}
	clean(d, prefix) // under the lock: a process that has just made the file fails to lock it
	return nil
}

// lockOwner locks an owner file and returns the path in it, "" in the first folder.
func lockOwner(path string) (first string, owner io.Closer, err error) {
	if err := checkOwn(path); err != nil || !ownerName.MatchString(filepath.Base(path)) {
		return "", nil, fmt.Errorf("%s is not an owner file: %w", path, err)
	}
	f, err := lock(path)
	if err != nil {
		return "", nil, err
	}
	text, err := io.ReadAll(io.LimitReader(f, 64<<10))
	first, ours := strings.CutPrefix(string(text), header)
	if err == nil && !ours && len(text) > 0 { // empty if its process ended before it wrote the header
		err = fmt.Errorf("%s has another header", path)
	}
	if err != nil {
		f.Close()
		return "", nil, err
	}
	return strings.TrimSuffix(first, "\n"), f, nil
}

// checkOwn refuses files of other users, which could misuse the rights of this one.
func checkOwn(path string) error {
	info, err := os.Lstat(path)
	if err == nil && (!info.Mode().IsRegular() || !isOwn(info)) {
		err = fmt.Errorf("%s is not a file of this user", path)
	}
	return err
}

// rollback restores the old files of the set with the given first prefix, if it has a
// journal, and removes the journal.
func rollback(d disk, prefix string) error {
	path := prefix + journalSuffix
	if missing(path) {
		return nil
	}
	if err := checkOwn(path); err != nil {
		return err
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	var j journal
	if json.Unmarshal(text, &j) == nil { // else the crash came before the first rename
		if err := j.restore(d); err != nil {
			return err
		}
	}
	return errors.Join(d.Remove(path), d.SyncDir(filepath.Dir(path)))
}

func (j journal) restore(d disk) error {
	for _, e := range j.Outputs {
		if missing(e.Prefix) {
			return fmt.Errorf("%s was moved", e.Prefix)
		}
		if err := e.restore(d); err != nil {
			return err
		}
	}
	return nil
}

// clean removes hidden files.
func clean(d disk, prefix string) {
	entries, _ := os.ReadDir(filepath.Dir(prefix))
	for _, e := range entries {
		path := filepath.Join(filepath.Dir(prefix), e.Name())
		if rest, ok := strings.CutPrefix(path, prefix); ok && (strings.HasPrefix(rest, newInfix) || strings.HasPrefix(rest, oldInfix) || rest == journalSuffix) {
			if err := d.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return // a later run tries again
			}
		}
	}
	_ = d.Remove(prefix)
}

func writeFile(d disk, path, text string) error {
	f, err := d.Create(path)
	if err != nil {
		return err
	}
	_, err = io.WriteString(f, text)
	return errors.Join(err, f.Sync(), f.Close())
}
