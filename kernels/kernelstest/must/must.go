// Package must checks the errors of calls in tests.
package must

import (
	"errors"
	"fmt"
	"strings"
)

// TB is a testing.TB or a rapid.T.
type TB interface {
	Helper()
	Fatal(...any)
}

// In returns t with a text before what stops the test: must.Do(must.In(t, "row %d", i), err).
func In(t TB, format string, args ...any) TB { return in{t, format, args} }

type in struct {
	TB
	format string
	args   []any
}

func (x in) Fatal(args ...any) {
	x.Helper()
	x.TB.Fatal(fmt.Sprintf(x.format, x.args...) + ": " + fmt.Sprint(args...))
}

// Reporter is a TB that goes on after a failure.
type Reporter interface {
	Helper()
	Errorf(format string, args ...any)
}

// Get returns a function that returns x, or stops the test at err: must.Get(os.Open(name))(t).
func Get[T any](x T, err error) func(t TB) T {
	return func(t TB) T {
		t.Helper()
		Do(t, err)
		return x
	}
}

// Do stops the test at err.
func Do(t TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Pass fails the test at err, of what was called.
func Pass(t Reporter, what string, err error) {
	t.Helper()
	if err != nil {
		t.Errorf("%s: error is %v", what, err)
	}
}

// Fail fails the test unless err, of what was called, is want and contains each text.
func Fail(t Reporter, what string, err, want error, texts ...string) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("%s: error is %v, should be %v", what, err, want)
		return
	}
	for _, text := range texts {
		if !strings.Contains(err.Error(), text) {
			t.Errorf("%s: error is %v, should contain %q", what, err, text)
		}
	}
}

// Err returns the error of a call that returns a value too.
func Err[T any](_ T, err error) error { return err }
