package shaders

import "testing"

// Variants calls f with a name and the source of every kernel that TestKernelsCompile compiles.
func Variants(t *testing.T, f func(name, src string)) {
	t.Helper()
	for _, k := range all {
		variants(t, k, func(_ map[string]uint32, src string) { f(k.Name, src) })
	}
}
