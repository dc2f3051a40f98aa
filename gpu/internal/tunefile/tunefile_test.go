package tunefile

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// entry returns an entry like those of a tuner, for a class with number n.
func entry(n int) Entry {
	return Entry{
		Device: Device{"llvmpipe (LLVM 19)", "Vulkan llvmpipe", "go-webgpu 0.17.1", "workgroup memory bytes 32768"},
		Class:  Class{In: "f32", KV: "f16", Dim: 64, ValueDim: 64, Pairs: Pairs{Mask: true}, Scalar: true, Rows: 256 + n, Source: "5f1c"},
		When:   time.Date(2026, 5, 1, 12, 0, n, 0, time.UTC),
		Best:   "M", Code: "77aa", FLOPs: 1e9, Peak: 1e11,
		Trials: []Trial{{Variant: "L", Seconds: 2e-3}, {Variant: "M", Seconds: 1e-3}, {Variant: "L48", Failed: "lost the device"}},
	}
}

func temp(t testing.TB) string { return filepath.Join(t.TempDir(), "attn", "tuning.json") }

func TestPutAndRead(t *testing.T) {
	path := temp(t)
	if got, err := Read(path); got != nil || err != nil {
		t.Errorf("without a file: %v, %v", got, err)
	}
	want := []Entry{entry(2), entry(1)} // the newest first
	again := entry(2)
	again.Best = "L"
	for _, e := range []Entry{entry(1), again, entry(2)} {
		must.Do(t, Put(path, e))
	}
	got, err := Read(path)
	if err != nil || !cmp.Equal(got, want) {
		t.Errorf("%v\n%s", err, cmp.Diff(want, got))
	}
	if e := Find(got, want[1].Device, want[1].Class); e == nil || e.Best != "M" || e.Trial("L").Seconds != 2e-3 || e.Trial("S") != nil {
		t.Errorf("found %+v", e)
	}
	for _, change := range []func(e *Entry){
		func(e *Entry) { e.Device.Adapter = "another" },
		func(e *Entry) { e.Device.Driver = "another" },
		func(e *Entry) { e.Device.Provider = "another" },
		func(e *Entry) { e.Device.Limits = "others" },
		func(e *Entry) { e.Class.In = "f16" },
		func(e *Entry) { e.Class.KV = "f32" },
		func(e *Entry) { e.Class.Dim = 80 },
		func(e *Entry) { e.Class.ValueDim = 32 },
		func(e *Entry) { e.Class.Scalar = false },
		func(e *Entry) { e.Class.Pairs.Bias = true },
		func(e *Entry) { e.Class.Rows = 0 },
		func(e *Entry) { e.Class.Source = "another" },
	} {
		other := entry(1)
		change(&other)
		if e := Find(got, other.Device, other.Class); e != nil {
			t.Errorf("%+v of %+v is taken for %+v", e.Class, e.Device, other)
		}
	}
	names, err := os.ReadDir(filepath.Dir(path))
	if err != nil || len(names) != 1 {
		t.Errorf("the folder holds %v, %v", names, err)
	}
	if n, err := Clear(path); n != 2 || err != nil {
		t.Errorf("cleared %d, %v", n, err)
	}
	if n, err := Clear(path); n != 0 || err != nil {
		t.Errorf("cleared %d of nothing, %v", n, err)
	}
}

// Names of drivers may contain any bytes, and their entries are found again.
func TestOddNames(t *testing.T) {
	path := temp(t)
	e := entry(1)
	e.Device = DeviceOf(backend.Info{Device: "GPU", Driver: "line\nbreak \x1b[31m \xff " + strings.Repeat("ä", 1000), Provider: "provider"})
	e.Trials[2] = Failure("L48", errors.New("shader:\n\t1 | fn main()\xff"+strings.Repeat("ä", 1000)))
	must.Do(t, Put(path, e))
	got, err := Read(path)
	if err != nil || len(got) != 1 || Find(got, e.Device, e.Class) == nil || len(got[0].Trials[2].Failed) > 700 {
		t.Errorf("%+v, %v", got, err)
	}
}

// A damaged file counts as none, and is replaced or removed. Files of others stay as they are.
func TestFilesThatAreNotOurs(t *testing.T) {
	good := temp(t)
	for i := range 2 {
		must.Do(t, Put(good, entry(i)))
	}
	whole := must.Get(os.ReadFile(good))(t)
	with := func(old, new string) []byte { return bytes.Replace(whole, []byte(old), []byte(new), 1) }
	for _, c := range []struct {
		name string
		data []byte
		is   error
	}{
		{"empty", nil, errForeign},
		{"cut short", whole[:len(whole)/2], errDamaged},
		{"no JSON", []byte("\x7fELF"), errForeign},
		{"JSON of somebody else", []byte(`{"name": "left-pad", "version": 1}`), errForeign},
		{"a list", []byte(`[]`), errForeign},
		{"no version", with(`"version": 2`, `"version": 0`), errDamaged},
		{"a newer version", with(`"version": 2`, `"version": 3`), errDamaged},
		{"a field that we do not know", with(`"version": 2`, `"version": 2, "more": {}`), errDamaged},
		{"entries that are none", []byte(`{"format": "attn tuning", "version": 2, "entries": 3}`), errDamaged},
		{"an entry of another kind", with(`"dim": 64`, `"dim": "64"`), errDamaged},
		{"an infinite time", with(`0.002`, `1e999`), errDamaged},
		{"a negative time", with(`0.002`, `-0.002`), errDamaged},
		{"a best that was not tried", with(`"best": "M"`, `"best": "X"`), errDamaged},
		{"a best that failed", with(`"best": "M"`, `"best": "L48"`), errDamaged},
		{"too large", with(`"failed": "`, `"failed": "`+strings.Repeat("x", maxBytes)), errDamaged},
	} {
		path := temp(t)
		must.Do(t, os.MkdirAll(filepath.Dir(path), 0o700))
		must.Do(t, os.WriteFile(path, c.data, 0o600))
		if got, err := Read(path); !errors.Is(err, c.is) || len(got) > 0 || !strings.Contains(fmt.Sprint(err), path) {
			t.Errorf("%s: %d entries, %v", c.name, len(got), err)
		}
		put := Put(path, entry(7))
		if c.is == errForeign {
			if _, err := Clear(path); !errors.Is(put, c.is) || !errors.Is(err, c.is) {
				t.Errorf("%s: put: %v, clear: %v", c.name, put, err)
			}
			if now, err := os.ReadFile(path); err != nil || !bytes.Equal(now, c.data) {
				t.Errorf("%s: the file is %.99q now, %v", c.name, now, err)
			}
			continue
		}
		if got, err := Read(path); put != nil || err != nil || len(got) != 1 {
			t.Errorf("%s: %d entries after put, %v, %v", c.name, len(got), put, err)
		}
		must.Do(t, os.WriteFile(path, c.data, 0o600))
		if _, err := Clear(path); err != nil {
			t.Errorf("%s: clear: %v", c.name, err)
		}
	}
}

// A link stays: Put replaces the file behind it, with its permissions, and Clear removes that file.
func TestLink(t *testing.T) {
	path := temp(t)
	link := filepath.Join(t.TempDir(), "link")
	must.Do(t, Put(path, entry(1)))
	if err := errors.Join(os.Chmod(path, 0o640), os.Symlink(path, link)); err != nil {
		t.Skip(err)
	}
	must.Do(t, Put(link, entry(2)))
	if got, err := Read(path); err != nil || len(got) != 2 {
		t.Errorf("behind the link: %v, %v", got, err)
	}
	if info, err := os.Stat(path); err != nil || runtime.GOOS != "windows" && info.Mode().Perm() != 0o640 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	if n, err := Clear(link); n != 2 || err != nil {
		t.Errorf("%d entries removed, %v", n, err)
	}
	must.Get(os.Lstat(link))(t)
	must.Fail(t, "the file is still there", must.Err(os.Stat(path)), os.ErrNotExist)
}

func TestPlacesThatTakeNoFile(t *testing.T) {
	folder := t.TempDir()
	if _, err := Read(folder); err == nil {
		t.Error("a folder was read")
	}
	if err := Put(folder, entry(1)); err == nil {
		t.Error("put in place of a folder")
	}
	if _, err := Clear(folder); err == nil {
		t.Error("an empty folder was cleared")
	}
	if _, err := os.Stat(os.DevNull); err == nil {
		must.Fail(t, "put into a device", Put(os.DevNull, entry(1)), errForeign)
	}
	file := filepath.Join(folder, "file")
	must.Do(t, os.WriteFile(file, nil, 0o600))
	if err := Put(filepath.Join(file, "tuning.json"), entry(1)); err == nil {
		t.Error("put below a file")
	}
	if names, err := os.ReadDir(folder); err != nil || len(names) != 1 {
		t.Errorf("left behind: %v, %v", names, err)
	}
}

// Concurrent writers may lose entries, but never the file. Readers always see a complete one.
func TestManyWriters(t *testing.T) {
	path := temp(t)
	const writers, each = 4, 6
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			for i := range each {
				if err := Put(path, entry(w*each+i)); err != nil && runtime.GOOS != "windows" {
					t.Error(err) // Windows renames over no file that is open
				}
				if got, err := Read(path); err != nil || len(got) == 0 {
					t.Errorf("%d entries, %v", len(got), err)
				}
			}
		})
	}
	wg.Wait()
	if names, err := os.ReadDir(filepath.Dir(path)); err != nil || len(names) != 1 {
		t.Errorf("left behind: %v, %v", names, err)
	}
}

// The file keeps its bound and drops the oldest entries.
func TestBound(t *testing.T) {
	path := temp(t)
	var list []Entry
	for i := range maxEntries {
		list = append(list, entry(i+1))
	}
	must.Do(t, os.MkdirAll(filepath.Dir(path), 0o700))
	data, err := json.MarshalIndent(file{"attn tuning", version, list}, "", "  ")
	must.Do(t, errors.Join(err, os.WriteFile(path, data, 0o600)))
	must.Do(t, Put(path, entry(maxEntries+1)))
	got, err := Read(path)
	if err != nil || len(got) != maxEntries || got[0].Class.Rows != 256+maxEntries+1 || got[maxEntries-1].Class.Rows != 256+2 {
		t.Errorf("%d entries, %v", len(got), err)
	}
}

// The entries of any file can be written and read again without a change.
func FuzzParse(f *testing.F) {
	path := temp(f)
	must.Do(f, Put(path, entry(1)))
	data := must.Get(os.ReadFile(path))(f)
	f.Add(data)
	f.Add(data[:len(data)-9])
	f.Add(bytes.Replace(data, []byte("64"), []byte("1e400"), 1))
	f.Add([]byte(`{"format": "attn tuning", "version": 2, "entries": [null, {}, {"class": {"source": "x"}}]}`))
	f.Add([]byte(`{"format": "attn tuning", "version": 9}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		entries, err := parse(data)
		if err != nil && !errors.Is(err, errForeign) && !errors.Is(err, errDamaged) {
			t.Fatalf("an error of another kind: %v", err)
		}
		for _, e := range entries {
			path := filepath.Join(t.TempDir(), "tuning.json")
			must.Do(t, Put(path, e))
			got, err := Read(path)
			if err != nil || len(got) != 1 || !got[0].When.Equal(e.When) || Find(got, e.Device, e.Class) == nil {
				t.Fatalf("%+v came back as %+v, %v", e, got, err)
			}
		}
	})
}
