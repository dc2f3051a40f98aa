package tune

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/seed90331342/attn/kernels"
)

// simulation holds the inputs of a simulator of NVIDIA GPUs: the arguments of the kernel in
// CUDA, and the workgroup to simulate with the work that it has to do.
type simulation struct {
	Sizes   []uint64 `json:"sizes"`   // bytes of each binding, 0 for the uniform
	Strides []uint64 `json:"strides"` // bytes of an element of each binding
	Data    []string `json:"data"`    // type of the elements of each binding
	Params  []uint32 `json:"params"`  // words of the uniform
	// Args are the kernel's arguments in order: a binding, "p" for the uniform, or "s" and
	// the bindings whose numbers of elements follow each other.
	Args   []string `json:"args"`
	Total  int      `json:"total"`  // workgroups
	Group  int      `json:"group"`  // of them the one to simulate
	Useful float64  `json:"useful"` // multiply-adds that its results take
	Bytes  float64  `json:"bytes"`  // that it reads: of keys and values for decoding, of scores for softmax
	// A Rows above 0 stands for a call without options but causal, of whose first head the
	// workgroup computes the rows from First on: of the output, or of a gradient. For
	// decoding they are the keys of its split, and the row is the first.
	First int `json:"first,omitempty"`
	Rows  int `json:"rows,omitempty"`
}

// simulate sets e's simulation and returns the kernel in CUDA, or "" for kernels without
// multiply-adds to count and for the plain kernel.
func (e *emitted) simulate() (string, error) {
	if !slices.Contains([]string{"flash", "decode", "matmul", "softmax", "gradient"}, e.Kernel) {
		return "", nil
	}
	metal, err := e.Metal()
	if err != nil {
		return "", err
	}
	types := map[string]string{"q": e.Call.DType, "g": e.Call.DType, "o": e.Call.DType, "k": e.Call.KVDType, "v": e.Call.KVDType, "mask": "bool"}
	switch stage, _, _ := strings.Cut(e.Variant, " "); stage {
	case "qk":
		types["a"], types["w"], types["o"] = e.Call.DType, e.Call.KVDType, "f32"
	case "pv":
		types["w"] = e.Call.KVDType
	}
	x := &simulation{Params: e.Uniform, Total: e.Groups}
	e.simulation = x
	for _, b := range e.Bindings {
		dtype, size := types[b.Name], b.Bytes
		if dtype == "" {
			dtype = "f32"
		}
		if b.Kind == "uniform" {
			size = 0
		}
		x.Sizes, x.Strides, x.Data = append(x.Sizes, size), append(x.Strides, 4), append(x.Data, dtype)
	}
	for _, m := range regexp.MustCompile(`@binding\((\d+)\) var<[^>]*> \w+: array<vec(\d)<`).FindAllStringSubmatch(e.WGSL, -1) {
		n, _ := strconv.Atoi(m[1])
		x.Strides[n] *= uint64(m[2][0] - '0')
	}
	_, arguments, _ := strings.Cut(metal, "kernel void")
	for _, m := range regexp.MustCompile(`(?m)^, (?:device|constant) \w+(?: const)?& (\w+) *(?:\[\[buffer\((\d+)\)\]\])?`).FindAllStringSubmatch(arguments, -1) {
		arg := m[2]
		switch m[1] {
		case "p":
			arg = "p"
		case "_buffer_sizes":
			arg = "s"
			for _, n := range regexp.MustCompile(`(?m)^    uint size(\d+);$`).FindAllStringSubmatch(metal, -1) {
				arg += " " + n[1]
			}
		}
		x.Args = append(x.Args, arg)
	}
	e.work()
	return e.cuda(metal), nil
}

// work chooses the workgroup to simulate, one with average work, and sets its work.
func (e *emitted) work() {
	x, c := e.simulation, &e.Call
	heads, rows, keys, dim := c.Q[kernels.Heads], c.Q[kernels.Seq], c.K[kernels.Seq], c.Q[kernels.Dim]
	x.Group = x.Total / 2
	perGroup := func(n int) float64 { return float64(n) / float64(x.Total) }
	// from sets which rows, or keys, of n the workgroup computes.
	from := func(first, most, n int) {
		if !c.Mask && !c.Bias && !c.ALiBi && !c.Softcap {
			x.First, x.Rows = first, min(most, n-first)
		}
	}
	switch e.Kernel {
	case "matmul":
		x.Useful = perGroup(heads * rows * keys * dim)
	case "softmax":
		x.Group = rows / 2 // of the first head
		x.Bytes = float64(4 * c.pairs(x.Group, 1, false))
	case "decode":
		x.Useful, x.Bytes = perGroup(heads*rows*keys*2*dim), perGroup(int(e.Bindings[1].Bytes+e.Bindings[2].Bytes)) // k and v
		// decode.wgsl computes all splits of a key head before the next head.
		split, splits := int(e.Constants["SPLIT"]), x.Total/c.K[kernels.Heads]
		if rows*heads/c.K[kernels.Heads] <= int(e.Constants["ROWS"]) {
			x.Group = splits / 2
			from(x.Group*split, split, keys)
		}
	case "flash":
		height := int(e.Constants["TY"] * e.Constants["ROWS"])
		blocks := x.Total / heads
		// flash.wgsl computes a block of all heads before the next: the last block first
		// if the call is causal, else from the middle outwards.
		block, n := min(keys/2/height, blocks-1), 0
		if block > 0 && block < blocks-1 {
			block, n = block+1, 1
		}
		if c.Causal {
			n = (blocks - 1) / 2
			block = blocks - 1 - n
		}
		x.Group = n * heads
		x.Useful = float64(2 * dim * c.pairs(block*height, height, false))
		from(block*height, height, rows)
	case "gradient":
		// gradient.wgsl computes the columns of a block in parts, and a block of all heads before
		// the next: the last block of rows first.
		byKeys, height, owners, n := e.Constants["KEYS"] == 1, int(e.Constants["OWNED"]), heads, rows
		if byKeys {
			owners, n = c.K[kernels.Heads], keys
		}
		blocks := (n + height - 1) / height
		parts := x.Total / owners / blocks
		block := blocks / 2
		x.Group = block * owners * parts
		if !byKeys {
			block = blocks - 1 - block
		}
		products := []int{4, 3}[e.Constants["OF"]]
		x.Useful = float64(products*dim*c.pairs(block*height, height, byKeys)*heads/owners) / float64(parts)
		from(block*height, height, n)
	}
}

// pairs returns how many pairs of a row and a visible key there are in a head for n rows, or keys, from first on.
func (c *emittedCall) pairs(first, n int, byKeys bool) (pairs int) {
	rows, keys := c.Q[kernels.Seq], c.K[kernels.Seq]
	length, others := rows, keys
	if byKeys {
		length, others = keys, rows
	}
	for i := first; i < min(first+n, length); i++ {
		switch {
		case !c.Causal:
			pairs += others
		case byKeys:
			pairs += rows - max(i-(keys-rows), 0)
		default:
			pairs += i + 1 + keys - rows
		}
	}
	return pairs
}

// cuda returns the kernel in CUDA: Metal as gogpu's compiler writes it, with the substitutions
// that a header with Metal's types and functions cannot make.
func (e *emitted) cuda(metal string) string {
	for _, r := range []struct{ from, to string }{
		{`#include.*\n|using metal::.*\n`, ``},
		{`(\W\d+\.\d+)(\W)`, `${1}f${2}`}, // literals are float
		// go-webgpu's compiler does not clamp before it converts.
		{`(metal::int4 naga_f2i32\(metal::float4 value\) \{\n.*\n)`, "metal::int4 naga_f2i32(metal::float4 value) {\n    return static_cast<metal::int4>(value);\n"},
		// Checks of bounds count elements, as drivers do.
		{`1 \+ \(_buffer_sizes\.(\w+) - 0 - \d+\) / \d+`, `_buffer_sizes.$1`},
		{`uint\((\w+)\) < 4 && uint\((\w+)\) < (_buffer_sizes\.\w+) \? (\w+)\[\w+\]\[\w+\] : DefaultConstructible\(\)`, `metal::robust($4, $2, $1, $3)`},
		{`uint\((\w+)\) < (_buffer_sizes\.\w+) \? (\w+)\[\w+\] : DefaultConstructible\(\)`, `metal::robust($3, $1, $2)`},
		{`\.([xyzw]{2,3})\b`, `.$1()`},
		// The kernel and its arguments.
		{`\s*\[\[[^\]]*\]\]`, ``},
		{`(?m)^kernel void main_\(`, fmt.Sprintf(`extern "C" __global__ __attribute__((launch_bounds(%d))) void main_(`, e.Threads)},
		{`(?m)^[ ,]*(metal::uint3 groups?|uint t)\n`, ``},
		{`(?m)^, device (\w+) const& (\w+)$`, `, device $1 const& __restrict__ $2`},
		{`(?m)^, constant (\w+)& (\w+) *$`, `, const $1 $2`},
		{`(void main_\(\n), `, `$1  `},
		{`(?m)(^extern "C"[^{]*\{)`, "$1\n    uint t = verdict_thread();\n    metal::uint3 group = verdict_group(), groups = verdict_groups();"},
		// Everything else is inlined.
		{`(?m)^constant (\w+ \w+ =)`, `constexpr $1`},
		{`(?m)^((?:metal::)?\w+ \w+\()`, `INLINE $1`},
		{`\bconstant\b`, `const`},
		{`operator T\(\)`, `INLINE operator T()`},
	} {
		metal = regexp.MustCompile(r.from).ReplaceAllString(metal, r.to)
	}
	return metal
}
