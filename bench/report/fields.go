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

// figures returns the fields of m, without those of its plan and its rounds, by their JSON
// names, and the order of the names. Those of nested structs are joined: "memory_operands".
func (m *Measurement) figures() (names []string, values map[string]any) {
	row := *m
	row.Plan, row.Rounds = nil, nil
	values = map[string]any{}
	add := func(name string, value any) { names, values[name] = append(names, name), value }
	leaves(reflect.ValueOf(row), "", func(path string, leaf reflect.Value) {
		if path == "provider" { // it belongs to the device
			return
		}
		add(strings.ReplaceAll(path, ".", "_"), leaf.Interface())
	})
	add("spread_percent", m.spread())
	add("memory_counted", m.Memory.Counted())
	return names, values
}
