// Package tunefile keeps the choices of package tune in a file, for later processes.
//
// The file is a cache in JSON that starts with its format. A file that is damaged, of another
// program or of a newer version counts as none, and an error names the reason; only a damaged
// one is replaced or removed. Its contents change how fast calls are, never their results:
// readers look up names in it and run nothing of it.
package tunefile

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/seed90331342/attn/backend"
)

// Errors of Read, Put and Clear in addition to those of the file system.
var (
	// ErrForeign reports something else than a tuning file, which is not changed.
	ErrForeign = errors.New("not a tuning file of attn")
	// ErrDamaged reports a file that starts as a tuning file and is damaged.
	ErrDamaged = errors.New("a damaged tuning file")
	// ErrNewer reports a file of a newer version of attn, which is not changed.
	ErrNewer = errors.New("a newer version of attn wrote this tuning file")
)

// Device identifies what times depend on in addition to the kernel.
type Device struct {
	Adapter  string `json:"adapter"`
	Driver   string `json:"driver"`
	Provider string `json:"provider"`
	Limits   string `json:"limits"` // with which the device was opened: names and values
}

// NewDevice returns the device that info describes.
func NewDevice(info backend.Info) Device {
	limits := make([]string, len(info.Limits))
	for i, l := range info.Limits {
		limits[i] = fmt.Sprintf("%s %d", l.Name, l.Value)
	}
	return Device{clean(info.Device), clean(info.Driver), clean(info.Provider), clean(strings.Join(limits, ", "))}
}

// Class identifies calls that share a choice.
type Class struct {
	DType    string `json:"dtype"`
	Dim      int    `json:"dim"`
	ValueDim int    `json:"value_dim"`
	// Features are properties of the call that change the kernel's loops, such as
	// mask and scalar.
	Features string `json:"features,omitempty"`
	Rows     int    `json:"rows"`   // the most query rows of all heads; 0 is no bound
	Source   string `json:"source"` // a hash of the kernel and of its variants' constants
}

// Trial is the result of measuring a variant.
type Trial struct {
	Variant string  `json:"variant"`
	Seconds float64 `json:"seconds,omitempty"` // the median time of a call; 0 if it failed
	Failed  string  `json:"failed,omitempty"`  // why there is no time
}

// Entry is the choice for a class on a device.
type Entry struct {
	Device Device    `json:"device"`
	Class  Class     `json:"class"`
	When   time.Time `json:"when"`
	// Best is the chosen variant, one of Trials. It is "" while they are under way, when the
	// process did not survive them, and when nothing ran.
	Best string `json:"best,omitempty"`
	Code string `json:"code,omitempty"` // a hash of Best's source as it is compiled
	// FLOPs are the operations of the call that was timed. Peak is the device's
	// operations a second in multiply-adds alone, 0 if it was not measured.
	FLOPs  float64 `json:"flops,omitempty"`
	Peak   float64 `json:"peak,omitempty"`
	Trials []Trial `json:"trials"`
}

// Trial returns the trial of a variant, or nil.
func (e *Entry) Trial(variant string) *Trial {
	i := slices.IndexFunc(e.Trials, func(t Trial) bool { return t.Variant == variant })
	if i < 0 {
		return nil
	}
	return &e.Trials[i]
}

// Keep adds those of the earlier trials whose variants have none.
func (e *Entry) Keep(earlier []Trial) {
	for _, t := range earlier {
		if e.Trial(t.Variant) == nil {
			e.Trials = append(e.Trials, t)
		}
	}
}

// Failed returns the variants whose trials failed.
func (e *Entry) Failed() (names []string) {
	for _, t := range e.Trials {
		if t.Failed != "" {
			names = append(names, t.Variant)
		}
	}
	return names
}

const (
	format  = "attn tuning"
	version = 1
	// maxKept bounds the entries, of about 1 KiB each, before they are indented: more
	// classes than a few devices have. maxBytes bounds the file that is read.
	maxKept   = 1 << 20
	maxBytes  = 4 << 20
	maxText   = 300
	maxTrials = 100
)

type file struct {
	Format  string            `json:"format"`
	Version int               `json:"version"`
	Entries []json.RawMessage `json:"entries"`
}

// Path returns the default path of the file: attn/tuning.json in the user's cache
// folder. It returns an error where the system names no such folder.
func Path() (string, error) {
	dir, err := os.UserCacheDir()
	return filepath.Join(dir, "attn", "tuning.json"), err
}

// start is the start of a tuning file.
var start = regexp.MustCompile(`^\s*\{\s*"format"\s*:\s*"` + format + `"`)

// Read returns the entries of a file, none when it does not exist. It returns ErrDamaged
// together with the undamaged entries when others are damaged.
func Read(path string) ([]Entry, error) {
	info, err := os.Stat(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() { // opening a pipe would block
		return nil, fmt.Errorf("%s is not a regular file: %w", path, ErrForeign)
	}
	if info.Size() > maxBytes {
		return nil, fmt.Errorf("%s has more than %d bytes: %w", path, maxBytes, ErrForeign)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	entries, err := parse(data)
	if err != nil {
		err = fmt.Errorf("%s: %w", path, err)
	}
	return entries, err
}

func parse(data []byte) ([]Entry, error) {
	if !start.Match(data) {
		return nil, fmt.Errorf("it does not start with the format %q: %w", format, ErrForeign)
	}
	var f file
	err := json.Unmarshal(data, &f)
	switch {
	case f.Format == format && f.Version > version: // its entries may have another type
		return nil, fmt.Errorf("version %d, this is %d: %w", f.Version, version, ErrNewer)
	case err != nil:
		return nil, fmt.Errorf("%w: %w", ErrDamaged, err)
	case f.Format != format || f.Version < 1:
		return nil, fmt.Errorf("format %.40q, version %d: %w", f.Format, f.Version, ErrDamaged)
	}
	var entries []Entry
	for _, raw := range f.Entries {
		var e Entry
		if err := json.Unmarshal(raw, &e); err == nil && e.valid() {
			entries = append(entries, e)
		}
	}
	if damaged := len(f.Entries) - len(entries); damaged > 0 {
		return entries, fmt.Errorf("%d of %d entries: %w", damaged, len(f.Entries), ErrDamaged)
	}
	return entries, nil
}

// valid reports whether Put can have written an entry.
func (e *Entry) valid() bool {
	texts := []string{
		e.Device.Adapter, e.Device.Driver, e.Device.Provider, e.Device.Limits,
		e.Class.DType, e.Class.Features, e.Class.Source, e.Best, e.Code,
	}
	numbers := []float64{float64(e.Class.Dim), float64(e.Class.ValueDim), float64(e.Class.Rows), e.FLOPs, e.Peak}
	seen := map[string]bool{}
	for _, t := range e.Trials {
		texts = append(texts, t.Variant, t.Failed)
		numbers = append(numbers, t.Seconds)
		if t.Variant == "" || seen[t.Variant] || (t.Seconds > 0) == (t.Failed != "") {
			return false
		}
		seen[t.Variant] = true
	}
	best := e.Trial(e.Best)
	return len(e.Trials) <= maxTrials && e.Class.Source != "" &&
		(e.Best == "" || best != nil && best.Failed == "") &&
		!slices.ContainsFunc(texts, func(s string) bool { return len(s) > maxText || strings.ContainsFunc(s, unprintable) }) &&
		!slices.ContainsFunc(numbers, func(x float64) bool { return !(x >= 0) || math.IsInf(x, 0) })
}

// unprintable runes could harm a terminal.
func unprintable(r rune) bool { return !unicode.IsPrint(r) || r == unicode.ReplacementChar }

// clean makes a text of a driver fit for the file.
func clean(s string) string {
	s = strings.Map(func(r rune) rune {
		if unprintable(r) {
			return ' '
		}
		return r
	}, s)
	if len(s) > maxText {
		s = strings.ToValidUTF8(s[:maxText], "")
	}
	return s
}

// Find returns the entry of a class on a device, or nil.
func Find(entries []Entry, d Device, c Class) *Entry {
	i := slices.IndexFunc(entries, func(e Entry) bool { return e.Device == d && e.Class == c })
	if i < 0 {
		return nil
	}
	return &entries[i]
}

// With returns entries with e in place of the entry for the same class and device.
func With(entries []Entry, e Entry) []Entry {
	if old := Find(entries, e.Device, e.Class); old != nil {
		*old = e
		return entries
	}
	return append(entries, e)
}

// Put writes e into the file at path, in place of the entry for the same class and
// device, and drops the oldest entries when there are too many. It replaces a damaged
// file and returns ErrForeign or ErrNewer for others, which it leaves. The file is replaced as a whole; of two
// processes that put at the same time, one may lose its entry.
func Put(path string, e Entry) error {
	e.Trials = slices.Clone(e.Trials)
	for i := range e.Trials {
		e.Trials[i].Failed = clean(e.Trials[i].Failed)
	}
	if !e.valid() {
		return fmt.Errorf("a tuning entry that could not be read again: %+v", e)
	}
	entries, err := Read(path)
	if err != nil && !errors.Is(err, ErrDamaged) {
		return err
	}
	entries = With(entries, e)
	slices.SortStableFunc(entries, func(a, b Entry) int { return b.When.Compare(a.When) })
	f := file{Format: format, Version: version, Entries: []json.RawMessage{}}
	kept := 0
	for _, e := range entries {
		raw, err := json.Marshal(e)
		if err != nil {
			return err
		}
		if kept += len(raw); kept > maxKept {
			break
		}
		f.Entries = append(f.Entries, raw)
	}
	data, err := json.MarshalIndent(f, "", "  ")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil { // the mode of cache folders
		return err
	}
	return replace(path, append(data, '\n'))
}

// replace gives the file its new content, all or nothing. A new file belongs to the user alone.
func replace(path string, data []byte) error {
	path = target(path)
	f, err := os.CreateTemp(filepath.Dir(path), ".attn-")
	if err != nil {
		return err
	}
	if info, old := os.Stat(path); old == nil {
		err = f.Chmod(info.Mode().Perm())
	}
	if err == nil {
		_, err = f.Write(data)
	}
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if dir, open := os.Open(filepath.Dir(path)); open == nil {
		_ = dir.Sync() // the name, too, outlives a trial that stops the machine; not every system can
		_ = dir.Close()
	}
	if err != nil {
		_ = os.Remove(f.Name())
	}
	return err
}

// target follows the symbolic links of a path that exists.
func target(path string) string {
	if to, err := filepath.EvalSymlinks(path); err == nil {
		return to
	}
	return path
}

// Clear removes the file and returns the number of its entries. It returns ErrForeign or
// ErrNewer for other files, which it leaves.
func Clear(path string) (n int, err error) {
	entries, err := Read(path)
	if err != nil && !errors.Is(err, ErrDamaged) {
		return 0, err
	}
	if err = os.Remove(target(path)); errors.Is(err, os.ErrNotExist) {
		err = nil
	}
	return len(entries), err
}
