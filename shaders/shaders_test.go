package shaders

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// Only variants that read pages bind their table, last, and use it.
func TestPagesComeWithTheirTable(t *testing.T) {
	flash, decode := flash64, decode64
	flash.Paged, decode.Paged = true, true
	for _, v := range [][2]Variant{{Attention{DVB: 2}, Attention{DVB: 2, Paged: true}}, {flash64, flash}, {decode64, decode}} {
		for paged := range 2 {
			src, err := Render(v[paged])
			last := fmt.Sprintf("@binding(%d) var<storage, read> table:", len(Describe(v[0]).Bindings))
			if uses := strings.Count(src, "table["); err != nil || uses != 2*paged || strings.Count(src, last) != paged {
				t.Errorf("%s uses the table %d times, %v", Key(v[paged]), uses, err)
			}
		}
	}
}

// What Describe returns was once computed by hand.
func TestDescribe(t *testing.T) {
	want := map[string]Kernel{
		"attention": {"rrrrrwwwu", 8448, 64, nil}, "flash": {"rrrrrwwwu", 13700, 128, nil}, "matrix": {"rrrrrwwwu", 39968, 256, nil}, "matrixpeak": {"wu", 1792, 64, nil}, "decode": {"rrrrrwu", 5448, 64, nil},
		"splitmerge": {"rwwu", 2112, 128, nil}, "matmul": {"rrrwwu", 13184, 128, nil}, "matrixproduct": {"rrrwwu", 19456, 128, nil}, "softmax": {"rrwwwu", 4352, 64, nil},
		"merge": {"rrwwu", 0, 64, nil}, "rope": {"rrrwu", 0, 64, nil}, "normgate": {"rrrwwu", 512, 64, nil}, "linear": {"rrrrrrwwu", 14464, 128, nil}, "matrixlinear": {"rrrrrrwwu", 32708, 128, nil}, "conv": {"rrrrwu", 0, 64, nil}, "convert": {"rwu", 256, 64, nil}, "delta": {"rrrrwwu", 512, 64, nil}, "index": {"wrrwu", 4672, 64, nil}, "lists": {"rrwu", 256, 64, nil},
		"gradient": {"rrrrrrrwu", 9096, 128, nil}, "matrixgradient": {"rrrrrrrwu", 23444, 128, nil}, "reduce": {"rwu", 256, 64, nil}, "peak": {"wu", 0, 64, nil},
		"read": {"rrrrwu", 0, 64, nil}, "exponentials": {"rw", 0, 64, nil},
	}
	for _, v := range plain() {
		got, w := Describe(v), want[v.Name()]
		if got.Bindings != w.Bindings || got.WorkgroupMemory != w.WorkgroupMemory || got.Threads != w.Threads {
			t.Errorf("%s has %+v, should be %+v", v.Name(), got, w)
		}
	}
}

// params.go is what the generator makes of the WGSL.
func TestParamsAreCurrent(t *testing.T) {
	have := must.Get(os.ReadFile("params.go"))(t)
	want := must.Get(exec.Command("go", "run", "./_generate", "-print").Output())(t)
	if !bytes.Equal(have, want) {
		t.Error("params.go is out of date: run go generate ./shaders")
	}
}

// The encoder writes each field at its place in the WGSL structure, in its own type.
func TestEncoding(t *testing.T) {
	p := AttentionParams{Total: 7, Scale: 0.5, Lo: -3, Seed0: 1<<32 - 1, Relative: Strides{Base: 1, D: 5}}
	p.KLen[63], p.Offsets[0], p.Slopes[0], p.Sinks[63] = -9, -8, 2, 4
	p.SetRange(5, 6)
	b := p.Append(make([]byte, 3))[3:]
	if len(b) != p.Size() {
		t.Fatalf("%d bytes, Size is %d", len(b), p.Size())
	}
	const strides, tables = 52, 52 + 10*8
	want := map[int]uint32{0: 5, 1: 6, 18: math.Float32bits(0.5), 21: 1<<32 - 3, 32: 1<<32 - 1, strides + 9*8: 1, strides + 9*8 + 4: 5,
		tables + 63: 1<<32 - 9, tables + 64: 1<<32 - 8, tables + 128: math.Float32bits(2), tables + 255: math.Float32bits(4)}
	for i := range len(b) / 4 {
		if got := binary.LittleEndian.Uint32(b[4*i:]); got != want[i] {
			t.Errorf("word %d is %#x, want %#x", i, got, want[i])
		}
	}
	if n := testing.AllocsPerRun(10, func() { b = p.Append(b[:0]) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func noError(t testing.TB, err error) {
	t.Helper()
	must.Do(t, err)
}
