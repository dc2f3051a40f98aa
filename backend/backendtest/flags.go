package backendtest

import (
	"flag"
	"fmt"
	"testing"
)

// setFlag sets a flag of the test binary until t ends, because rapid has no other way to set
// the number of checks. A value from the command line has precedence.
func setFlag(t *testing.T, name, value string) error {
	f := flag.Lookup(name)
	if f == nil {
		return fmt.Errorf("no flag %s", name)
	}
	given := false
	flag.Visit(func(v *flag.Flag) { given = given || v.Name == name })
	if given {
		return nil
	}
	old := f.Value.String()
	t.Cleanup(func() { _ = f.Value.Set(old) })
	return f.Value.Set(value)
}
