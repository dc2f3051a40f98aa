package safetensors

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// file returns a file of a header and data, which may contradict each other.
func file(header string, data ...byte) []byte {
	return append(append(binary.LittleEndian.AppendUint64(nil, uint64(len(header))), header...), data...)
}

// entry is the JSON of a tensor.
func entry(name, dtype, shape string, begin, end int) string {
	return fmt.Sprintf(`"%s":{"dtype":"%s","shape":%s,"data_offsets":[%d,%d]}`, name, dtype, shape, begin, end)
}

// example has a tensor of each kind that is read, in an order that is not that of the data.
func example() []byte {
	return file(`{"__metadata__":{"format":"pt"},`+entry("b", "BF16", "[2]", 8, 12)+","+entry("a", "F32", "[2,1]", 0, 8)+","+
		entry("c", "BOOL", "[]", 12, 13)+","+entry("ü", "I16", "[0,3]", 13, 13)+","+entry("e", "F8_E4M3", "[1]", 13, 14)+`}   `,
		0, 0, 0x80, 0x3f, 0, 0, 0x20, 0xc0, // 1, -2.5
		0x80, 0x3f, 0x20, 0xc0, // 1, -2.5
		1, 0x38)
}

// TestReadHeader reads the tensors of example.
func TestReadHeader(t *testing.T) {
	content := example()
	h := must.Get(ReadHeader(bytes.NewReader(content), int64(len(content))))(t)
	if got := h.List(""); got != `["a" "b" "c" "e" "ü"]` {
		t.Errorf("names: %s", got)
	}
	for _, c := range []struct {
		name, dtype string
		shape       []int
		raw         []byte
	}{
		{"a", "f4", []int{2, 1}, content[len(content)-14:][:8]},
		{"b", "bf16", []int{2}, content[len(content)-6:][:4]},
		{"c", "bool", []int{}, []byte{1}},
		{"ü", "i2", []int{0, 3}, []byte{}},
	} {
		x, err := h.Tensor(c.name)
		if err != nil || x.TypeName() != c.dtype || !slices.Equal(x.Shape, c.shape) || !bytes.Equal(content[x.Start:][:x.Count*x.Size], c.raw) {
			t.Errorf("%s: %+v, %v", c.name, x, err)
		}
		if x.Kind != 'f' && x.Kind != 'w' {
			continue
		}
		got := make([]float32, 2)
		if x.Float32s(got, c.raw); !slices.Equal(got, []float32{1, -2.5}) {
			t.Errorf("%s: %v", c.name, got)
		}
	}
	for name, text := range map[string]string{
		"e": `tensor "e" is F8_E4M3, which is not read: convert it to F32, F16 or BF16`,
		"x": `there is no tensor "x", the file has ["a" "b" "c" "e" "ü"]`,
	} {
		if _, err := h.Tensor(name); err == nil || err.Error() != text {
			t.Errorf("%s: error is %v, should be %q", name, err, text)
		}
	}
	var many []string
	for i := range 30 {
		many = append(many, entry(fmt.Sprintf("layer.%02d", i), "U8", "[1]", i, i+1))
	}
	content = file("{"+strings.Join(many, ",")+"}", make([]byte, 30)...)
	h = must.Get(ReadHeader(bytes.NewReader(content), int64(len(content))))(t)
	if _, err := h.Tensor("layer"); err == nil || !strings.HasSuffix(err.Error(), `"layer.19"] and 10 more`) {
		t.Errorf("error is %v", err)
	}
	if h.List("layer.1") != `["layer.10" "layer.11" "layer.12" "layer.13" "layer.14" "layer.15" "layer.16" "layer.17" "layer.18" "layer.19"]` || h.List("x") != "none" || h.List("layer.29", "layer.29") != "none" {
		t.Errorf("names with a prefix: %s, %s, %s", h.List("layer.1"), h.List("x"), h.List("layer.29", "layer.29"))
	}
}

// TestReadHeaderRefuses reads damaged files.
func TestReadHeaderRefuses(t *testing.T) {
	a := entry("a", "F32", "[2]", 0, 8)
	for _, c := range []struct {
		name    string
		content []byte
		want    string
	}{
		{"empty", nil, "truncated: it ends after 0 bytes"},
		{"seven bytes", make([]byte, 7), "truncated: it ends after 7 bytes, inside the length of the .safetensors header"},
		{"text", []byte("1.0 2.0 3.0 4.0"), "not a .safetensors file, or a damaged one: its header is 2319404600919076401 bytes long, at most 100000000 are read"},
		{"a header of 2^64-1 bytes", bytes.Repeat([]byte{0xff}, 16), "at most 100000000 are read"},
		{"a header above the limit", append(binary.LittleEndian.AppendUint64(nil, maxHeader+1), make([]byte, 16)...), "at most 100000000 are read"},
		{"a header beyond the file", file("{" + a + "}")[:40], "truncated: the .safetensors header ends at byte 62, the file at 40"},
		{"no header", file(""), "malformed .safetensors header: it does not start with {"},
		{"a space first", file(" {}"), "it does not start with {"},
		{"a list", file("[]"), "it does not start with {"},
		{"no end", file("{" + a), "malformed .safetensors header: unexpected end of JSON input"},
		{"no end of a string", file(`{"a`), "unexpected end of JSON input"},
		{"not JSON", file("{" + a + "]"), "invalid character ']'"},
		{"a comma at the end", file("{"+a+",}", make([]byte, 8)...), "invalid character '}'"},
		{"a name that is a number", file("{1:2}"), "invalid character '1'"},
		{"more after the end", file("{}{}"), "invalid character '{' after top-level value"},
		{"a zero after the end", file("{}\x00"), "after top-level value"},
		{"not UTF-8", file("{" + strings.Replace(a, "a", "\xff", 1) + "}"), "it is not UTF-8"},
		{"metadata that is a list", file(`{"__metadata__":[]}`), "__metadata__ is not an object of strings"},
		{"metadata of numbers", file(`{"__metadata__":{"n":1}}`), "__metadata__ is not an object of strings"},
		{"a tensor that is a number", file(`{"a":1}`), `tensor "a": it is not an object`},
		{"a name twice", file("{"+a+","+a+"}", make([]byte, 8)...), `"a" is there twice`},
		{"a name twice, once escaped", file("{"+a+","+strings.Replace(a, `"a"`, `"\u0061"`, 1)+"}", make([]byte, 8)...), `"a" is there twice`},
		{"a key twice", file(`{"a":{"dtype":"F32","dtype":"F16","shape":[2],"data_offsets":[0,8]}}`, make([]byte, 8)...), `tensor "a": "dtype" is there twice`},
		{"no type", file(`{"a":{"shape":[2],"data_offsets":[0,8]}}`, make([]byte, 8)...), `tensor "a": it must have a dtype, a shape and two data_offsets`},
		{"no shape", file(`{"a":{"dtype":"F32","shape":null,"data_offsets":[0,8]}}`, make([]byte, 8)...), "it must have a dtype, a shape and two data_offsets"},
		{"three offsets", file(`{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8,8]}}`, make([]byte, 8)...), "it must have a dtype, a shape and two data_offsets"},
		{"keys in capitals", file(`{"a":{"DType":"F32","Shape":[2],"data_offsets":[0,8]}}`, make([]byte, 8)...), "it must have a dtype, a shape and two data_offsets"},
		{"a type that is a number", file(`{"a":{"dtype":32,"shape":[2],"data_offsets":[0,8]}}`), `dtype is "32", it must be a string`},
		{"a length that is a fraction", file("{" + entry("a", "F32", "[2.5]", 0, 8) + "}"), `shape is "[2.5]", it must be lengths of at most 63 bits`},
		{"a length of 64 bits", file("{" + entry("a", "F32", "[18446744073709551615]", 0, 8) + "}"), "it must be lengths of at most 63 bits"},
		{"a negative length", file("{"+entry("a", "F32", "[-2]", 0, 8)+"}", make([]byte, 8)...), "shape [-2]: every length must be at least 0"},
		{"two negative lengths", file("{"+entry("a", "F32", "[-2,-1]", 0, 8)+"}", make([]byte, 8)...), "shape [-2 -1]: every length must be at least 0"},
		{"a product beyond 64 bits", file("{"+entry("a", "F32", "[4294967296,4294967296,2]", 0, 8)+"}", make([]byte, 8)...), "shape [4294967296 4294967296 2] is larger than any file"},
		{"bytes beyond 64 bits", file("{" + entry("a", "F64", "[2305843009213693952]", 0, 0) + "}"), "shape [2305843009213693952] is larger than any file"},
		{"offsets that are strings", file(`{"a":{"dtype":"F32","shape":[2],"data_offsets":["0","8"]}}`), "it must be two numbers of at most 63 bits"},
		{"an offset of 64 bits", file(`{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,9223372036854775808]}}`), "it must be two numbers of at most 63 bits"},
		{"an offset that overflows", file("{" + entry("a", "Q4", "[2]", 0, math.MaxInt64) + "}"), "data_offsets are [0 9223372036854775807], they must ascend from 0"},
		{"a negative offset", file("{"+entry("a", "F32", "[2]", -8, 0)+"}", make([]byte, 8)...), "data_offsets are [-8 0], they must ascend from 0"},
		{"offsets that descend", file("{"+entry("a", "F32", "[2]", 8, 0)+"}", make([]byte, 8)...), "data_offsets are [8 0], they must ascend from 0"},
		{"too few bytes", file("{"+entry("a", "F32", "[2]", 0, 4)+"}", make([]byte, 4)...), "shape [2] of F32 needs 8 bytes, data_offsets [0 4] have 4"},
		{"too many bytes of 4 bits", file("{"+entry("a", "F4", "[3]", 0, 3)+"}", make([]byte, 3)...), "shape [3] of F4 needs 2 bytes, data_offsets [0 3] have 3"},
		{"truncated data", file("{"+a+"}", make([]byte, 7)...), `truncated: tensor "a" ends at byte 70, the file at 69`},
		{"data after the tensors", file("{"+a+"}", make([]byte, 9)...), `tensor "a" ends at byte 70, the file at 71: they must agree`},
		{"data without tensors", file("{}", 0), "the header ends at byte 10, the file at 11: they must agree"},
		{"a gap", file("{"+a+","+entry("b", "U8", "[1]", 9, 10)+"}", make([]byte, 10)...), `tensor "b" starts at byte 124, tensor "a" ends at byte 123: there must be no gaps`},
		{"an overlap", file("{"+a+","+entry("b", "U8", "[2]", 7, 9)+"}", make([]byte, 9)...), `tensor "b" starts at byte 121, before the end of tensor "a" at byte 122: tensors must not overlap`},
		{"the same bytes twice", file("{"+a+","+entry("b", "F32", "[2]", 0, 8)+"}", make([]byte, 8)...), "tensors must not overlap"},
		{"an unknown type with a gap", file("{"+entry("a", "Q4", "[2]", 1, 2)+"}", make([]byte, 2)...), `tensor "a" starts at byte 62, the header ends at byte 61: there must be no gaps`},
		{"a deep nest", file(`{"a":{"x":` + strings.Repeat("[", 20000) + `}}`), "exceeded max depth"},
	} {
		must.Fail(t, c.name, must.Err(ReadHeader(bytes.NewReader(c.content), int64(len(c.content)))), kernels.ErrFile, c.want)
	}
	// A file that shrinks, and memory that runs out.
	content := example()
	for _, n := range []int{3, 20} {
		must.Fail(t, fmt.Sprintf("%d of %d bytes", n, len(content)), must.Err(ReadHeader(bytes.NewReader(content[:n]), int64(len(content)))), io.EOF)
	}
	defer backend.FailMemory(1)()
	must.Fail(t, "no memory", must.Err(ReadHeader(bytes.NewReader(content), int64(len(content)))), backend.ErrMemory)
}

// FuzzHeader reads arbitrary files: each tensor lies in the file, has the bytes of its shape and no byte of another.
func FuzzHeader(f *testing.F) {
	f.Add(example())
	f.Add(file("{}"))
	f.Add(file("{"+entry("x", "F16", "[3,2]", 0, 12)+","+entry("y", "F4", "[3]", 12, 14)+"}", make([]byte, 14)...))
	f.Add(file(`{"__metadata__":{},`+entry("x", "F64", "[1,1,1,1,1]", 0, 8)+"}", make([]byte, 8)...))
	f.Add(file("{" + entry("x", "U8", "[4611686018427387904,0]", 0, 0) + "}"))
	f.Add(append(binary.LittleEndian.AppendUint64(nil, math.MaxUint64), "{}"...))
	f.Fuzz(func(t *testing.T, content []byte) {
		h, err := ReadHeader(bytes.NewReader(content), int64(len(content)))
		if err != nil {
			return
		}
		owner := make([]string, len(content))
		for name := range h.tensors {
			x, err := h.Tensor(name)
			if err != nil {
				continue
			}
			n := 1
			for _, l := range x.Shape {
				n *= l
			}
			if n != x.Count {
				t.Fatalf("%q: shape %v has %d elements, not %d", name, x.Shape, n, x.Count)
			}
			for at := range x.Count * x.Size {
				if other := &owner[int(x.Start)+at]; *other != "" {
					t.Fatalf("byte %d is of %q and %q", int(x.Start)+at, name, *other)
				} else {
					*other = "tensor " + name
				}
			}
		}
	})
}
