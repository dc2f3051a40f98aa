// Package must stops a test at an error that it does not expect.
package must

// TB is a testing.TB or a rapid.T.
type TB interface {
	Helper()
	Fatal(...any)
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
