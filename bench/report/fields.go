package report

import (
	"fmt"
	"reflect"
	"strings"
)

// leaves calls visit with each number, text and flag of v and its path in the JSON form:
// "memory.operands", "rounds[2].times_s[0]". A pointer to one is visited as the pointer.
func leaves(v reflect.Value, path string, visit func(path string, leaf reflect.Value)) {
	switch {
	case v.Kind() == reflect.Struct:
		for i := range v.NumField() {
			name, _, _ := strings.Cut(v.Type().Field(i).Tag.Get("json"), ",")
			leaves(v.Field(i), strings.TrimPrefix(path+"."+name, "."), visit)
		}
	case v.Kind() == reflect.Slice:
		for i := range v.Len() {
			leaves(v.Index(i), fmt.Sprintf("%s[%d]", path, i), visit)
		}
	case v.Kind() == reflect.Pointer && v.Type().Elem().Kind() == reflect.Struct:
		if !v.IsNil() {
			leaves(v.Elem(), path, visit)
		}
	default:
		visit(path, v)
	}
}
