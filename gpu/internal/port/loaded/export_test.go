package loaded

import "reflect"

// Functions returns the names of the functions that a library must have.
func Functions() (names []string) {
	for _, f := range reflect.VisibleFields(reflect.TypeFor[functions]()) {
		names = append(names, "wgpu"+f.Name)
	}
	return names
}
