package onnxfile

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// TestGenerated compares the messages and fields of onnx.pb.go with those of onnx.proto, so
// that it fails when one was changed without the other.
func TestGenerated(t *testing.T) {
	schema := must.Get(os.ReadFile("onnx.proto"))(t)
	var want []string
	message := ""
	messageLine := regexp.MustCompile(`^message (\w+) {`)
	fieldLine := regexp.MustCompile(`^  (?:(repeated|optional) )?(\w+) (\w+) = (\d+);`)
	for line := range strings.Lines(string(schema)) {
		if m := messageLine.FindStringSubmatch(line); m != nil {
			message = m[1]
			want = append(want, message)
		}
		if f := fieldLine.FindStringSubmatch(line); f != nil {
			want = append(want, fmt.Sprintf("%s.%s: %t %s = %s", message, f[3], f[1] == "repeated", f[2], f[4]))
		}
	}
	var got []string
	for _, m := range all(File_onnx_proto.Messages()) {
		got = append(got, string(m.Name()))
		for _, f := range all(m.Fields()) {
			kind := f.Kind().String()
			switch f.Kind() {
			case protoreflect.MessageKind:
				kind = string(f.Message().Name())
			case protoreflect.EnumKind:
				kind = string(f.Enum().Name())
			}
			got = append(got, fmt.Sprintf("%s.%s: %t %s = %d", m.Name(), f.Name(), f.IsList(), kind, f.Number()))
		}
	}
	slices.Sort(want)
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("onnx.pb.go has\n%s\nonnx.proto has\n%s\nrun go generate", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// all returns the elements of a descriptor's list.
func all[T any](list interface {
	Len() int
	Get(int) T
}) []T {
	var elements []T
	for i := range list.Len() {
		elements = append(elements, list.Get(i))
	}
	return elements
}
