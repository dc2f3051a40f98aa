package shaders

import "testing"

// Variants calls f with a name and the source of every variant that TestKernelsCompile compiles.
func Variants(t *testing.T, f func(name, src string)) {
	t.Helper()
	variants(func(v Variant, _ int) {
		src, err := Render(v)
		if err != nil {
			t.Fatal(err)
		}
		f(v.Name(), src)
	})
}
