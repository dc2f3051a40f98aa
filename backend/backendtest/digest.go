package backendtest

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"math"
	"os"
	"strings"
	"testing"
)

var updateDigests = flag.Bool("update-digests", false, "write the digests of output bits instead of comparing them")

// digests holds output bits to the ones recorded in a file of "digest case" lines. It shows
// that a change meant to keep results keeps them to the bit. The zero value, for backends
// without a file, compares nothing.
type digests struct {
	file  string
	want  map[string]string // nil when nothing is recorded for this device
	lines strings.Builder
	seen  int
}

func readDigests(t *testing.T, file string) *digests {
	d := &digests{file: file}
	if file == "" || *updateDigests {
		return d
	}
	raw, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return d
	}
	if err != nil {
		t.Fatal(err)
	}
	d.want = make(map[string]string)
	for line := range strings.Lines(string(raw)) {
		sum, name, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
		d.want[name] = sum
	}
	return d
}

// see compares the bits of one answer.
func (d *digests) see(t testing.TB, c Case, how how, a answer) {
	t.Helper()
	if d.file == "" {
		return
	}
	name, sum := fmt.Sprintf("%s, weights %v", c.Name, how == staged), a.digest()
	fmt.Fprintf(&d.lines, "%s %s\n", sum, name)
	d.seen++
	switch want, ok := d.want[name]; {
	case d.want == nil:
	case !ok:
		t.Errorf("%s has no digest for %q: run the test with -update-digests", d.file, name)
	case sum != want:
		t.Errorf("the output bits changed: digest %s, recorded %s", sum, want)
	}
}

// finish writes the file with -update-digests; otherwise it reports whether anything was compared.
func (d *digests) finish(t *testing.T) {
	switch {
	case *updateDigests:
		noError(t, os.WriteFile(d.file, []byte(d.lines.String()), 0o644))
	case d.want == nil:
		t.Skipf("no digests are recorded for this device: -update-digests writes %s", d.file)
	default:
		t.Logf("%d of %d recorded digests compared", d.seen, len(d.want))
	}
}

// digest returns the first 64 bits of the SHA-256 of all outputs; all NaN count as one.
func (a answer) digest() string {
	h := sha256.New()
	var word [4]byte
	for _, part := range [][]float32{a.o, a.lse, a.weights} {
		for _, x := range part {
			bits := math.Float32bits(x)
			if x != x {
				bits = 0x7fc00000
			}
			binary.LittleEndian.PutUint32(word[:], bits)
			h.Write(word[:])
		}
	}
	return fmt.Sprintf("%x", h.Sum(nil)[:8])
}
