// Package tuned keeps what was measured of kernel variants in a file, so that a
// machine measures once and not in each process:
//
//	entries, err := tuned.Read(path)  // at the start
//	err = tuned.Put(path, entry)      // after a measurement
//
// The file is JSON in the user's cache folder. It is a cache and no more: one that
// is damaged, is something else, or comes from a newer version is as good as none,
// and an error says which. What it holds changes how fast a call is, never its
// result; readers look up names in it and run nothing that is not theirs.
package tuned

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
	"unicode"
)

// Errors of Read and Put beside those of the file system.
var (
	// ErrForeign reports a file that is damaged or is something else.
	ErrForeign = errors.New("not a tuning file, or a damaged one")
	// ErrNewer reports a file of a newer version of attn. It is left alone.
	ErrNewer = errors.New("a newer version of attn wrote this tuning file")
)

// Device is what times depend on beside the kernel, as [NewDevice] makes it.
type Device struct {
	Adapter  string `json:"adapter"`
	Driver   string `json:"driver"`
	Provider string `json:"provider"`
	// Limits are those that the device was opened with, by name and value.
	Limits string `json:"limits"`
}

// NewDevice returns a Device with what drivers say made fit for the file.
func NewDevice(adapter, driver, provider, limits string) Device {
	return Device{clean(adapter), clean(driver), clean(provider), clean(limits)}
}

// Class is the calls that share a choice.
type Class struct {
	DType    string `json:"dtype"`
	Dim      int    `json:"dim"`
	ValueDim int    `json:"value_dim"`
	// Features are what changes the kernel's loops: "paired", "scalar".
	Features string `json:"features,omitempty"`
	// Rows is the most query rows of all heads together; 0 is no bound.
	Rows int `json:"rows"`
	// Source is a hash of the kernel as it stands and of all variants' constants.
	Source string `json:"source"`
}

// Trial is what became of a variant.
type Trial struct {
	Variant string `json:"variant"`
	// Seconds is the median time of a call of the class's shape, 0 when Failed
	// says why there is none.
	Seconds float64 `json:"seconds,omitempty"`
	Failed  string  `json:"failed,omitempty"`
}

// Entry is the choice for a class on a device.
type Entry struct {
	Device Device    `json:"device"`
	Class  Class     `json:"class"`
	When   time.Time `json:"when"`
	// Best is the variant to take, one of Trials; "" while they are under way, or
	// after a process that did not live to their end.
	Best string `json:"best,omitempty"`
	// Code is a hash of the source that is Best's, with its constants and unrolled.
	Code string `json:"code,omitempty"`
	// FLOPs are the operations of the call that was timed, Peak those that the
	// device does in a second in multiply-adds alone, 0 when it was not measured.
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

const (
	format  = "attn tuning"
	version = 1
	// maxKept bounds the entries, at about 1 KiB each for more classes than a few
	// devices have, before they are indented; maxBytes bounds what is read.
	maxKept   = 1 << 20
	maxBytes  = 4 << 20
	maxText   = 300
	maxTrials = 100
)

// file is the file.
type file struct {
	Format  string            `json:"format"`
	Version int               `json:"version"`
	Entries []json.RawMessage `json:"entries"`
}

// Path returns where the file is by default: attn/tuning.json in the user's cache
// folder. It returns an error where the system does not say which that is.
func Path() (string, error) {
	dir, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	return filepath.Join(dir, "attn", "tuning.json"), nil
}

// Read returns the entries of a file, none when there is no file. ErrForeign and
// ErrNewer as they say. Entries that are damaged in a file that is not are left
// out; then the error is ErrForeign beside those that are whole.
func Read(path string) ([]Entry, error) {
	info, err := os.Stat(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() { // to open a pipe would wait
		return nil, fmt.Errorf("%s is no regular file: %w", path, ErrForeign)
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxBytes+1))
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
	if len(data) > maxBytes {
		return nil, fmt.Errorf("more than %d bytes: %w", maxBytes, ErrForeign)
	}
	var head struct {
		Format  string `json:"format"`
		Version int    `json:"version"`
	}
	if err := json.Unmarshal(data, &head); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrForeign, err)
	}
	switch {
	case head.Format != format || head.Version < 1:
		return nil, fmt.Errorf("format %.40q, version %d: %w", head.Format, head.Version, ErrForeign)
	case head.Version > version:
		return nil, fmt.Errorf("version %d, this is %d: %w", head.Version, version, ErrNewer)
	}
	var f file
	if err := json.Unmarshal(data, &f); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrForeign, err)
	}
	var entries []Entry
	damaged := 0
	for _, raw := range f.Entries {
		var e Entry
		if err := json.Unmarshal(raw, &e); err != nil || !e.whole() {
			damaged++
			continue
		}
		entries = append(entries, e)
	}
	if damaged > 0 {
		return entries, fmt.Errorf("%d of %d entries: %w", damaged, len(f.Entries), ErrForeign)
	}
	return entries, nil
}

// whole reports whether an entry can be what Put wrote.
func (e *Entry) whole() bool {
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
	for _, s := range texts {
		if len(s) > maxText || strings.ContainsFunc(s, unprintable) {
			return false
		}
	}
	for _, x := range numbers {
		if x < 0 || math.IsNaN(x) || math.IsInf(x, 0) {
			return false
		}
	}
	if best := e.Trial(e.Best); e.Best != "" && (best == nil || best.Failed != "") {
		return false
	}
	return len(e.Trials) <= maxTrials && e.Class.Source != ""
}

// unprintable runes would reach a terminal, where they can do harm.
func unprintable(r rune) bool { return !unicode.IsPrint(r) || r == unicode.ReplacementChar }

// Find returns the entry of a class on a device, or nil.
func Find(entries []Entry, d Device, c Class) *Entry {
	i := slices.IndexFunc(entries, func(e Entry) bool { return e.Device == d && e.Class == c })
	if i < 0 {
		return nil
	}
	return &entries[i]
}

// Put writes e into the file at path, in place of what the file has for the same
// class and device; the oldest go when there are too many. A file that is not there
// or is damaged is begun anew, one that is newer is left alone (ErrNewer). The file
// is always whole: it is written beside itself and renamed. Of two processes that
// put at the same time one entry may be lost.
func Put(path string, e Entry) error {
	e.Trials = slices.Clone(e.Trials)
	for i := range e.Trials {
		e.Trials[i].Failed = clean(e.Trials[i].Failed)
	}
	if !e.whole() {
		return fmt.Errorf("a tuning entry that could not be read again: %+v", e)
	}
	return rewrite(path, func(old []Entry) []Entry {
		old = slices.DeleteFunc(old, func(o Entry) bool { return o.Device == e.Device && o.Class == e.Class })
		return append(old, e)
	})
}

// Clear removes the file, whatever it holds, and returns how many entries that
// were. ErrNewer as for Put.
func Clear(path string) (n int, err error) {
	entries, err := Read(path)
	if errors.Is(err, ErrNewer) {
		return 0, err
	}
	if err = os.Remove(path); errors.Is(err, os.ErrNotExist) {
		err = nil
	}
	return len(entries), err
}

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

func rewrite(path string, change func([]Entry) []Entry) error {
	old, err := Read(path)
	if err != nil && !errors.Is(err, ErrForeign) {
		return err
	}
	entries := change(old)
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
	return replace(path, append(data, '\n'))
}

// replace writes a file beside path and renames it.
func replace(path string, data []byte) error {
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o700); err != nil { // as cache folders are made
		return err
	}
	tmp, err := os.CreateTemp(dir, "."+filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	_, err = tmp.Write(data)
	if err == nil {
		err = tmp.Sync() // so that a crash of the machine leaves the old or the new
	}
	err = errors.Join(err, tmp.Close())
	if err == nil {
		err = os.Rename(tmp.Name(), path)
	}
	if err != nil {
		os.Remove(tmp.Name())
	}
	return err
}
