package shaders

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

func TestSpecialiseRewritesTheHead(t *testing.T) {
	before, err := RoPE.Specialise(nil)
	if err != nil {
		t.Fatal(err)
	}
	after, err := RoPE.Specialise(map[string]uint32{"INPLACE": 10})
	if err != nil {
		t.Fatal(err)
	}
	if want := strings.Replace(before, "const INPLACE: u32 = 0u;", "const INPLACE: u32 = 10u;", 1); after != want || after == before {
		t.Errorf("got\n%s", after)
	}
}

// Only variants that read pages bind their table and use it.
func TestPagesComeWithTheirTable(t *testing.T) {
	named := regexp.MustCompile(`\btable\b[^_]`)
	for _, k := range []Kernel{Attention, Flash, Decode} {
		for paged := range uint32(2) {
			src, err := k.Specialise(map[string]uint32{"PAGED": paged})
			if err != nil {
				t.Fatal(err)
			}
			code := regexp.MustCompile(`//.*`).ReplaceAllString(src, "")
			if n := len(named.FindAllString(code, -1)); n != 3*int(paged) {
				t.Errorf("%s with PAGED = %d names the table %d times", k.Name, paged, n)
			}
			want := strings.Count(k.Bindings, "r") + strings.Count(k.Bindings, "w") + int(paged)
			if last := fmt.Sprintf("@binding(%d)", want); !strings.Contains(code, last) || strings.Count(code, "@binding") != want+1 {
				t.Errorf("%s with PAGED = %d: the last binding is not %s", k.Name, paged, last)
			}
		}
	}
}

func TestSpecialiseNamesAnUnknownConstant(t *testing.T) {
	_, err := Matmul.Specialise(map[string]uint32{"DVB": 1})
	if err == nil || !strings.Contains(err.Error(), "DVB") || !strings.Contains(err.Error(), "SKIP") {
		t.Errorf("got %v", err)
	}
}

// Every binding of a variant is in Bindings, in order, with its kind.
func TestBindingsMatchTheFile(t *testing.T) {
	binding := regexp.MustCompile(`@group\(0\) @binding\((\d+)\) var<([a-z_, ]+)>`)
	letter := map[string]string{"storage, read": "r", "storage, read_write": "w", "uniform": "u"}
	for _, k := range all {
		src, err := k.Specialise(nil)
		if err != nil {
			t.Fatal(err)
		}
		got := ""
		for i, m := range binding.FindAllStringSubmatch(src, -1) {
			if m[1] != fmt.Sprint(i) {
				t.Errorf("%s: binding %s stands at %d", k.Name, m[1], i)
			}
			got += letter[m[2]]
		}
		if got != k.Bindings {
			t.Errorf("%s: bindings are %s, Bindings has %s", k.Name, got, k.Bindings)
		}
	}
}

// WorkgroupMemory and the head comment both state the sum of the declarations.
func TestWorkgroupMemory(t *testing.T) {
	decl := regexp.MustCompile(`var<workgroup> \w+: (?:(?:array<)+(vec4<f32>|vec4<u32>|vec2<f32>|f32|u32), (.+)>|(atomic<u32>));`)
	size := map[string]int{"vec4<f32>": 16, "vec4<u32>": 16, "vec2<f32>": 8, "f32": 4, "u32": 4, "": 4}
	for _, k := range all {
		sum := 0
		for _, m := range decl.FindAllStringSubmatch(k.Source, -1) {
			bytes := size[m[1]]
			for length := range strings.SplitSeq(m[2], ">, ") {
				if length == "" {
					continue // an atomic
				}
				if c, ok := k.Constants()[length]; ok {
					length = c
				}
				n, err := strconv.Atoi(length)
				if err != nil {
					t.Errorf("%s: length %s of %q: %v", k.Name, length, m[0], err)
				}
				bytes *= n
			}
			sum += bytes
		}
		if sum != k.WorkgroupMemory {
			t.Errorf("%s: declares %d bytes, WorkgroupMemory is %d", k.Name, sum, k.WorkgroupMemory)
		}
		stated := strings.ReplaceAll(k.Source, ",", "")
		if sum > 0 && !strings.Contains(stated, fmt.Sprintf("%d bytes", sum)) {
			t.Errorf("%s: the head comment does not state %d bytes", k.Name, sum)
		}
	}
}

// A name has one declaration: what common declares, no kernel declares again, and no
// function stands in two kernels.
func TestNoFunctionTwice(t *testing.T) {
	where := map[string]string{}
	for _, d := range prelude() {
		if have, ok := where[d.name]; ok {
			t.Errorf("%s declares %s again", have, d.name)
		}
		where[d.name] = "common"
	}
	if len(where) < 40 {
		t.Errorf("common has %d declarations only", len(where))
	}
	body := map[string]string{}
	for _, k := range all {
		for _, m := range declared.FindAllStringSubmatch(k.Source, -1) {
			if name := m[1] + m[2]; where[name] != "" {
				t.Errorf("%s declares %s, which common has", k.Name, name)
			}
			if have, ok := body[m[0]]; ok && m[1] != "" {
				t.Errorf("%s and %s both have %s", have, k.Name, m[1])
			}
			body[m[0]] = k.Name
		}
	}
}

// params.go is what the generator makes of the WGSL.
func TestParamsAreCurrent(t *testing.T) {
	if testing.Short() {
		t.Skip("runs the go command")
	}
	have, err := os.ReadFile("params.go")
	if err != nil {
		t.Fatal(err)
	}
	want, err := exec.Command("go", "run", "./_generate", "-print").Output()
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(have, want) {
		t.Error("params.go is out of date: run go generate ./shaders")
	}
}

// The encoder writes each field at its place in the WGSL structure, in its own type.
func TestEncoding(t *testing.T) {
	p := AttentionParams{Total: 7, Scale: 0.5, Lo: -3, Seed0: 1<<32 - 1, Relative: Strides{Base: 1, D: 5}}
	p.KLen[63], p.Slopes[0], p.Sinks[63] = -9, 2, 4
	p.SetRange(5, 6)
	b := p.Append(make([]byte, 3))[3:]
	if len(b) != p.Size() {
		t.Fatalf("%d bytes, Size is %d", len(b), p.Size())
	}
	const strides, tables = 44, 44 + 10*8
	want := map[int]uint32{0: 5, 1: 6, 18: math.Float32bits(0.5), 21: 1<<32 - 3, 32: 1<<32 - 1, strides + 9*8: 1, strides + 9*8 + 4: 5,
		tables + 63: 1<<32 - 9, tables + 64: math.Float32bits(2), tables + 191: math.Float32bits(4)}
	for i := range len(b) / 4 {
		if got := binary.LittleEndian.Uint32(b[4*i:]); got != want[i] {
			t.Errorf("word %d is %#x, want %#x", i, got, want[i])
		}
	}
	if n := testing.AllocsPerRun(10, func() { b = p.Append(b[:0]) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
