// Package tunefile keeps choices of variants for later processes, in a file. It is a cache in JSON. Its contents change
// how fast calls are, never their results: readers look up names in it and run nothing of it.
package tunefile

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/seed90331342/attn/backend"
)

// Errors of files in addition to those of the file system.
var (
	// errForeign reports something else than a tuning file, which is not changed.
	errForeign = errors.New("not a tuning file of attn")
	// errDamaged reports a tuning file that is damaged or of another version, and is replaced.
	errDamaged = errors.New("a damaged tuning file, or one of another version")
)

// Device identifies what times depend on in addition to the kernel.
type Device struct {
	Adapter  string `json:"adapter"`
	Driver   string `json:"driver"`
	Provider string `json:"provider"`
	Limits   string `json:"limits"` // with which the device was opened: names and values
}

// DeviceOf returns the device that info describes. JSON keeps valid UTF-8 alone.
func DeviceOf(info backend.Info) Device {
	limits := make([]string, len(info.Limits))
	for i, l := range info.Limits {
		limits[i] = fmt.Sprintf("%s %d", l.Name, l.Value)
	}
	valid := func(s string) string { return strings.ToValidUTF8(s, " ") }
	return Device{valid(info.Device), valid(info.Driver), valid(info.Provider), valid(strings.Join(limits, ", "))}
}

// Class is what calls that share a choice have in common: the constants of their kernel and the size of their grid. The
// number of keys is not part of it, because a workgroup takes the tiles of keys one after the other with any variant.
type Class struct {
	In       string `json:"dtype"`
	KV       string `json:"kv"` // dtype of keys and values
	Dim      int    `json:"dim"`
	ValueDim int    `json:"value_dim"`
	Rows     int    `json:"rows"`  // the most query rows of all heads; 0 is no bound
	Pairs    Pairs  `json:"pairs"` // of the calls that are measured
	Scalar   bool   `json:"scalar,omitempty"`
	Half     bool   `json:"half,omitempty"`
	Short    bool   `json:"short,omitempty"` // at most shortRows a head, so that large tiles are partly empty
	Partial  bool   `json:"partial,omitempty"`
	// Source is a hash of the kernel and of its variants' constants, "" until it is needed.
	Source string `json:"source"`
}

// String describes c for a reader.
func (c Class) String() string {
	rows := "more rows"
	if c.Rows > 0 {
		rows = fmt.Sprintf("up to %d rows", c.Rows)
	}
	text := fmt.Sprintf("%s · D=%d Dv=%d · %s", c.In, c.Dim, c.ValueDim, rows)
	features := []string{}
	for _, f := range []struct {
		on   bool
		name string
	}{
		{c.KV != c.In, "kv-" + c.KV}, {c.Pairs.Mask, "mask"}, {c.Pairs.Bias, "bias"}, {c.Pairs.Slopes, "alibi"}, {c.Pairs.Softcap, "softcap"},
		{c.Pairs.Dropout, "dropout"}, {c.Scalar, "scalar"}, {c.Half, "half-out"}, {c.Short, "short"}, {c.Partial, "partial"},
	} {
		if f.on {
			features = append(features, f.name)
		}
	}
	if len(features) > 0 {
		text += " · " + strings.Join(features, " ")
	}
	return text
}

// Pairs are the options of a call that apply to each pair of a row and a key.
type Pairs struct {
	Mask, Blocks     bool
	Bias             bool // float32, and no relative bias
	OtherBias        bool // any other bias
	Slopes           bool
	Softcap, Dropout bool
}

// Trial is the result of measuring a variant.
type Trial struct {
	Variant string  `json:"variant"`
	Seconds float64 `json:"seconds,omitempty"` // the median time of a call; 0 if it failed
	Failed  string  `json:"failed,omitempty"`  // why there is no time
}

// Failure returns the trial of a variant that failed.
func Failure(variant string, err error) Trial {
	return Trial{Variant: variant, Failed: fmt.Sprintf("%.300s", err.Error())} // compilers write pages
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

// valid reports whether each trial has a time or a failure, and Best a time.
func (e *Entry) valid() bool {
	for _, t := range e.Trials {
		if (t.Seconds > 0) == (t.Failed != "") {
			return false
		}
	}
	best := e.Trial(e.Best)
	return e.Best == "" || best != nil && best.Failed == ""
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

// start is the start of a tuning file.
var start = regexp.MustCompile(`^\s*\{\s*"format"\s*:\s*"attn tuning"`)

const (
	version = 2
	// maxEntries bounds what is kept, of about 1 KiB each: more classes than a few devices
	// have. maxBytes bounds what is read.
	maxEntries = 500
	maxBytes   = 16 << 20
)

type file struct {
	Format  string  `json:"format"`
	Version int     `json:"version"`
	Entries []Entry `json:"entries"`
}

// Path returns the default path of the file: attn/tuning.json in the user's cache
// folder. It returns an error where the system names no such folder.
func Path() (string, error) {
	dir, err := os.UserCacheDir()
	return filepath.Join(dir, "attn", "tuning.json"), err
}

// Read returns the entries of a file, none when it does not exist.
func Read(path string) ([]Entry, error) {
	f, err := os.Open(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxBytes))
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
		return nil, errForeign
	}
	var f file
	d := json.NewDecoder(bytes.NewReader(data))
	d.DisallowUnknownFields()
	if err := d.Decode(&f); err != nil {
		return nil, fmt.Errorf("%w: %w", errDamaged, err)
	}
	if f.Version != version || slices.ContainsFunc(f.Entries, func(e Entry) bool { return !e.valid() }) {
		return nil, errDamaged
	}
	return f.Entries, nil
}

// Put writes e into the file at path, in place of the entry for the same class and device, and drops the oldest entries
// when there are too many. It leaves a file that is no tuning file, with an error. The file is replaced as a whole; of
// two processes that put at the same time, one may lose its entry.
func Put(path string, e Entry) error {
	entries, err := Read(path)
	if err != nil && !errors.Is(err, errDamaged) {
		return err
	}
	entries = With(entries, e)
	slices.SortStableFunc(entries, func(a, b Entry) int { return b.When.Compare(a.When) })
	data, err := json.MarshalIndent(file{"attn tuning", version, entries[:min(len(entries), maxEntries)]}, "", "  ")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil { // the mode of cache folders
		return err
	}
	return replace(target(path), data)
}

// replace gives the file its new content, all or nothing. A new file belongs to the user alone.
func replace(path string, data []byte) error {
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
	// The content outlives a trial that stops the machine.
	if err = errors.Join(err, f.Sync(), f.Close()); err == nil {
		err = os.Rename(f.Name(), path)
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

// Clear removes the file and returns the number of its entries. It leaves a file that is no tuning file, with an error.
func Clear(path string) (n int, err error) {
	entries, err := Read(path)
	if err != nil && !errors.Is(err, errDamaged) {
		return 0, err
	}
	if err = os.Remove(target(path)); errors.Is(err, os.ErrNotExist) {
		err = nil
	}
	return len(entries), err
}
