package must_test

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"testing"

	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// recorder is a test that keeps its failures.
type recorder []string

func (r *recorder) Helper() {}

func (r *recorder) Errorf(format string, args ...any) { *r = append(*r, fmt.Sprintf(format, args...)) }

func (r *recorder) Fatal(args ...any) { *r = append(*r, "fatal: "+fmt.Sprint(args...)) }

// TestMust: an error other than the expected one fails a test, and so does an error that is missing.
func TestMust(t *testing.T) {
	var got recorder
	wrapped := fmt.Errorf("reading q: %w", io.EOF)
	if x := must.Get(3, nil)(&got); x != 3 {
		t.Errorf("Get returns %d, should return 3", x)
	}
	must.Do(&got, nil)
	must.Pass(&got, "right", nil)
	must.Fail(&got, "right", must.Err(0, wrapped), io.EOF, "reading", "q")
	must.Fail(&got, "no error", nil, nil)
	must.Get(0, io.EOF)(&got)
	must.Do(must.In(&got, "row %d", 3), io.EOF)
	must.Pass(&got, "wrong", io.EOF)
	must.Fail(&got, "none", nil, io.EOF, "reading")
	must.Fail(&got, "other", wrapped, errors.ErrUnsupported)
	must.Fail(&got, "text", wrapped, io.EOF, "q", "writing")
	if want := []string{"fatal: EOF", "fatal: row 3: EOF", "wrong: error is EOF", "none: error is <nil>, should be EOF", "other: error is reading q: EOF, should be unsupported operation",
		`text: error is reading q: EOF, should contain "writing"`}; !slices.Equal(got, want) {
		t.Errorf("failures are\n%q, should be\n%q", got, want)
	}
}
