package wgsl

import (
	"encoding/binary"
	"testing"

	"github.com/gogpu/naga"

	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// SPIR-V numbers, from its specification, unified1.
const (
	opLoad        = 61
	opAccessChain = 65
)

const oneRead = `
var<workgroup> w: array<vec4<f32>, 4>;
@group(0) @binding(0) var<storage, read_write> out: array<f32>;
@compute @workgroup_size(4) fn main(@builtin(local_invocation_index) i: u32) {
	w[i] = vec4<f32>(f32(i));
	workgroupBarrier();
	let v = w[3u - i];
	out[i] = v.x + v.y + v.z + v.w;
}`

// groupAccesses counts the loads from arrays in workgroup memory, and the stores that clear
// a whole array.
func groupAccesses(t *testing.T, wgsl string) (reads, clears int) {
	t.Helper()
	code := must.Get(naga.Compile(wgsl))(t)
	null, group, inside := map[uint32]bool{}, map[uint32]bool{}, map[uint32]bool{}
	for at := 4 * spirvHeader; at < len(code); {
		n := int(binary.LittleEndian.Uint32(code[at:]) >> 16)
		word := func(i int) uint32 { return binary.LittleEndian.Uint32(code[at+4*i:]) }
		switch word(0) & 0xffff {
		case opConstantNull:
			null[word(2)] = true
		case opVariable:
			group[word(2)] = word(3) == storageClassGroup
		case opAccessChain:
			inside[word(2)] = group[word(3)] || inside[word(3)]
		case opLoad:
			if inside[word(3)] {
				reads++
			}
		case opStore:
			if group[word(1)] && null[word(2)] {
				clears++
			}
		}
		at += 4 * n
	}
	return reads, clears
}

// TestUpstreamCompiler fails when a later version of gogpu/naga no longer has a defect that this
// package works around.
func TestUpstreamCompiler(t *testing.T) {
	reads, clears := groupAccesses(t, oneRead)
	if once, _ := groupAccesses(t, Mended(oneRead)); reads <= once {
		t.Error("the compiler reads a let once now: replace no let in Mended")
	}
	if clears == 0 {
		t.Error("the compiler clears no workgroup memory now: remove the loop of SPIRV and this test")
	}
}

// TestVariablesBeginAtZero checks that a variable without a value is stored to before it is read, and
// fails when a later version of gogpu/naga sees to that.
func TestVariablesBeginAtZero(t *testing.T) {
	const src = "fn f() -> u32 { var v: u32; return v; } @compute @workgroup_size(1) fn main() { _ = f(); }"
	var stores [2]int
	for i, src := range []string{src, Mended(src)} {
		code := must.Get(naga.Compile(src))(t)
		for at := 4 * spirvHeader; at < len(code); at += 4 * int(binary.LittleEndian.Uint16(code[at+2:])) {
			op := binary.LittleEndian.Uint16(code[at:])
			if op == opStore || op == opVariable && code[at+2] > 4 { // the latter has a value
				stores[i]++
			}
		}
	}
	if stores != [2]int{0, 1} {
		t.Errorf("values given to a variable: %d by the compiler, %d with Mended, want 0 and 1", stores[0], stores[1])
	}
}

// TestRoundsToEven checks that a half is rounded as WGSL demands, not to either integer.
func TestRoundsToEven(t *testing.T) {
	words := must.Get(SPIRV("@compute @workgroup_size(1) fn main(@builtin(workgroup_id) w: vec3<u32>) { let x = round(f32(w.x) * 0.5); }"))(t)
	for i := spirvHeader; i < len(words); i += int(words[i] >> 16) {
		if words[i]&0xffff == opExtInst {
			if words[i+4] != extRoundEven {
				t.Errorf("round is instruction %d, want %d", words[i+4], extRoundEven)
			}
			return
		}
	}
	t.Error("the compiler removed round")
}
