package shaders

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

func TestSpecialiseRewritesTheHead(t *testing.T) {
	got, err := RoPE.Specialise(map[string]uint32{"INPLACE": 10})
	if err != nil {
		t.Fatal(err)
	}
	if want := "const INPLACE: u32 = 10u;"; !strings.Contains(got, want) {
		t.Errorf("no line %q", want)
	}
	if len(got) != len(RoPE.Source)+1 { // 0 became 10
		t.Errorf("something else changed: %d bytes, were %d", len(got), len(RoPE.Source))
	}
}

// A table of pages is bound by the variants that read it, and named in no other.
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

func TestSpecialiseWithoutValuesIsTheFile(t *testing.T) {
	for _, k := range All() {
		if got, err := k.Specialise(nil); err != nil || got != k.Source {
			t.Errorf("%s: changed, %v", k.Name, err)
		}
	}
}

// Every binding in the file is in Bindings, in order, with its kind.
func TestBindingsMatchTheFile(t *testing.T) {
	binding := regexp.MustCompile(`@group\(0\) @binding\((\d+)\) var<([a-z_, ]+)>`)
	letter := map[string]string{"storage, read": "r", "storage, read_write": "w", "uniform": "u"}
	for _, k := range All() {
		got := ""
		for i, m := range binding.FindAllStringSubmatch(k.Source, -1) {
			if m[1] != fmt.Sprint(i) {
				t.Errorf("%s: binding %s stands at %d", k.Name, m[1], i)
			}
			got += letter[m[2]]
		}
		for constant, more := range map[string]string{"PAGED": "r", "BOTH": "rr"} {
			if _, ok := k.Constants()[constant]; ok {
				got = strings.TrimSuffix(got, more)
			}
		}
		if got != k.Bindings {
			t.Errorf("%s: bindings are %s, Bindings says %s", k.Name, got, k.Bindings)
		}
	}
}

// Workgroup memory is what the declarations add up to and what the head comment
// says.
func TestWorkgroupMemory(t *testing.T) {
	decl := regexp.MustCompile(`var<workgroup> \w+: ((?:array<)+)(vec4<f32>|vec4<u32>|f32|u32), (.+)>;`)
	size := map[string]int{"vec4<f32>": 16, "vec4<u32>": 16, "f32": 4, "u32": 4}
	for _, k := range All() {
		sum := 0
		for _, m := range decl.FindAllStringSubmatch(k.Source, -1) {
			bytes := size[m[2]]
			for _, length := range strings.Split(m[3], ">, ") {
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
			t.Errorf("%s: declares %d bytes, WorkgroupMemory says %d", k.Name, sum, k.WorkgroupMemory)
		}
		said := strings.ReplaceAll(k.Source, ",", "")
		if sum > 0 && !strings.Contains(said, fmt.Sprintf("%d bytes", sum)) {
			t.Errorf("%s: the head comment does not say %d bytes", k.Name, sum)
		}
	}
}

// WGSL has no include, so functions that several files need stand in each: the
// same name must mean the same text. Those that name a binding differ.
func TestSharedFunctionsAreTheSame(t *testing.T) {
	fn := regexp.MustCompile(`(?ms)^fn (is_nan|exp2_acc|exp2_down|tanh_acc|log_acc|decode|encode16)\(.*?^}`)
	first := map[string]string{}
	for _, k := range All() {
		for _, m := range fn.FindAllStringSubmatch(k.Source, -1) {
			if have, ok := first[m[1]]; ok && have != m[0] {
				t.Errorf("%s in %s is not what it is elsewhere", m[1], k.Name)
			}
			first[m[1]] = m[0]
		}
	}
	if len(first) != 7 {
		t.Errorf("found %d shared functions", len(first))
	}
}
