package backendtest

import (
	"bufio"
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

	"github.com/seed90331342/attn/backend"
)

var updateDigests = flag.Bool("update-digests", false, "write the digests of output bits instead of comparing them")

// Digest holds the output bits of every named case, every pair of options and every cache
// layout, fused and in stages, to the digests in file. A backend keeps a file for each path
// whose bits do not depend on the machine. With -update-digests it writes the file.
func Digest(t *testing.T, be backend.Backend, file string) {
	var cases []Case
	for _, list := range [][]Case{Cases(), Pairs(), cacheCases(), cachePairs()} {
		cases = append(cases, list...)
	}
	got := make(map[string]string)
	var lines strings.Builder
	for _, c := range cases {
		b := c.build()
		on := b.on(t, be)
		for _, weights := range []bool{false, true} {
			if weights && (c.PageSize > 0 || c.keyType() == backend.Q8) {
				continue // the stages take neither
			}
			name := fmt.Sprintf("%s, weights %v", c.Name, weights)
			if _, twice := got[name]; twice {
				t.Fatalf("two cases are named %q", name)
			}
			got[name] = on.mustRun(t, weights).digest()
			fmt.Fprintf(&lines, "%s %s\n", got[name], name)
		}
		on.release()
	}
	if *updateDigests {
		if err := os.WriteFile(file, []byte(lines.String()), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	f, err := os.Open(file)
	if errors.Is(err, fs.ErrNotExist) {
		t.Skipf("nothing is recorded for this device: -update-digests writes %s", file)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	compared := 0
	for s := bufio.NewScanner(f); s.Scan(); {
		want, name, _ := strings.Cut(s.Text(), " ")
		switch sum, ok := got[name]; {
		case !ok:
			t.Errorf("%s: the case is gone", name)
		case sum != want:
			t.Errorf("%s: the output bits changed", name)
		}
		compared++
	}
	if compared != len(got) {
		t.Errorf("%s has %d digests, there are %d results: run with -update-digests", file, compared, len(got))
	}
}

// digest returns the first 64 bits of the SHA-256 of all outputs, every NaN counting as one.
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
