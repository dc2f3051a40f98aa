package atomicfile

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
)

// TestRecoveryLeavesChanges: recovery overwrites or removes no file that was changed after
// the crash.
func TestRecoveryLeavesChanges(t *testing.T) {
	for _, c := range scenarios(memory(t))[2:] {
		t.Run(c.name, func(t *testing.T) {
			for at := 0; ; at++ {
				write(t, c.start())
				d := newSimulated()
				d.crashAt, d.noLinks = at, c.noLinks
				if _, err := c.run(t.Context(), d); err == nil {
					return
				}
				for _, path := range c.paths {
					if err := os.WriteFile(path, []byte("a user's"), 0o644); err != nil {
						t.Fatal(err)
					}
				}
				recovered(t, newSimulated(), c.paths[0])
				for i, text := range read(t, c.paths) {
					// A write through a hard link reaches the backup too, which is the same file.
					if text != "a user's" {
						t.Fatalf("crash at %d of\n%v\n%s holds %q", at, d, c.paths[i], text)
					}
				}
			}
		})
	}
}

// TestStrangersStay: recovery removes nothing that is not certain to be of attn.
func TestStrangersStay(t *testing.T) {
	dir := t.TempDir()
	id := filepath.Join(dir, ".attn-0123456789abcdef")
	files := map[string]string{
		id:                                 "a user's notes",
		id + "-new-x":                      "more",
		id + "-journal":                    "{}",
		id[:len(id)-1] + "0" + "-new-y":    header, // without an owner
		filepath.Join(dir, ".attn-012345"): header,
		filepath.Join(dir, "x"):            "x",
	}
	write(t, files)
	recovered(t, newSimulated(), filepath.Join(dir, "x"))
	for path, want := range files {
		if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, []byte(want)) {
			t.Errorf("%s: %q, %v", path, got, err)
		}
	}
}
