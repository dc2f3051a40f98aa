package wgsl

import (
	"encoding/binary"
	"testing"

	"github.com/gogpu/naga"
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
	code, err := naga.Compile(wgsl)
	if err != nil {
		t.Fatal(err)
	}
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
	if once, _ := groupAccesses(t, LetsToVars(oneRead)); reads <= once {
		t.Error("the compiler reads a let once now: remove LetsToVars and this test")
	}
	if clears == 0 {
		t.Error("the compiler clears no workgroup memory now: remove the loop of SPIRV and this test")
	}
}
