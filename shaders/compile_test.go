package shaders

import (
	"math/bits"
	"regexp"
	"testing"

	"github.com/gogpu/naga"
)

// fixed are the kernels with one variant.
var fixed = []Fixed{Merge, Delta, Reduce, Peak, Copy, Read, Banks, Exponentials}

// Tiles of package gpu for head size 64.
var (
	flash64    = Flash{TX: 8, TY: 16, RV: 2, KT: 8, CV: 2, VP: 1, QD: 4, JJ: 2, ER: 4, Split: 256}
	decode64   = Decode{Rows: 4, Split: 256, BC: 64, TX: 8, Chunks: 4, Quads: 16, Sides: 1, Ahead: 16}
	merge64    = SplitMerge{Split: 256, TX: 8, Quads: 16}
	matmulL    = Matmul{TX: 8, TY: 16, Rows: 8, CV: 2, QD: 4}
	gradient64 = Gradient{TX: 8, TY: 16, QD: 4, JJ: 2, Paired: true}
)

// plain returns one variant of each kernel.
func plain() []Variant {
	flash := flash64
	flash.Masks, flash.Blocked, flash.Biases, flash.Sloped, flash.Capped, flash.Drops = Flagged, Flagged, Flagged, Flagged, Flagged, Flagged
	decode, matmul := decode64, matmulL
	decode.Wide, decode.Extra, matmul.Skip = true, true, true
	list := []Variant{Attention{DVB: 2}, flash, decode, merge64, matmul, Softmax{Held: true, Row: 1024}, gradient64, RoPE{}, Convert{}}
	for _, k := range fixed {
		list = append(list, k)
	}
	return list
}

// variants calls f with the variants that package gpu makes by the options and types of a call and by
// the device, and how many of their fields are not the first value.
func variants(f func(v Variant, departures int)) {
	own := func(v Variant, exp2 bool) Variant {
		if exp2 {
			return OwnExp2{v}
		}
		return v
	}
	each := func(flags int, types []Type, f func(on func(flag int) bool, dtype Type, departures int)) {
		for set := range 1 << flags {
			for i, dtype := range types {
				f(func(flag int) bool { return set>>flag&1 == 1 }, dtype, bits.OnesCount(uint(set))+min(i, 1))
			}
		}
	}
	type flags = func(flag int) bool
	each(3, []Type{F32, F16, Q8}, func(on flags, kv Type, n int) {
		v := Attention{Expand: Registers, KV: kv, Paged: on(0), Both: on(1), DVB: 2}
		if on(2) {
			v.In = BF16
		}
		f(own(v, v.Both), n)
	})
	each(6, []Type{F32, BF16, Q8}, func(on flags, kv Type, n int) {
		v := flash64
		v.KV, v.Paged, v.Both, v.Out16, v.Vec = kv, on(0), on(1), on(2), on(3)
		v.Full, v.Ahead = v.Vec && v.Out16, v.Out16
		if on(4) {
			v.In = F16
		}
		if !on(5) {
			option := Flagged
			if v.Out16 {
				option = Present
			}
			v.Masks, v.Blocked, v.Biases, v.Sloped, v.Capped, v.Drops = option, option, option, option, option, option
		}
		f(own(v, v.Out16), n)
	})
	each(6, []Type{F32, BF16, Q8}, func(on flags, kv Type, n int) {
		v := decode64
		v.KV, v.Paged, v.Both, v.Wide, v.Full, v.Extra = kv, on(0), on(1), on(2) && kv != Q8, on(3), on(4)
		if on(5) {
			v.In = F16
		}
		f(own(v, v.Both), n)
	})
	each(6, []Type{F32}, func(on flags, _ Type, n int) {
		v := matmulL
		v.AVec, v.WVec, v.Along, v.Skip = on(0), on(1), on(2), on(3)
		v.Full, v.OVec = v.AVec && v.WVec && v.Skip, v.AVec
		if on(4) {
			v.A = F16
		}
		if on(5) {
			v.W = BF16
		}
		f(v, n)
	})
	each(5, []Type{F32}, func(on flags, _ Type, n int) {
		v := gradient64
		v.Both = on(0)
		if on(1) {
			v.Of += DK
		}
		if on(2) {
			v.Of += DQ
		}
		if on(3) {
			v.In = F16
		}
		if on(4) {
			v.Expand = Full
		}
		f(v, n)
	})
	each(4, []Type{F32}, func(on flags, _ Type, n int) {
		v := Softmax{Row: 1024, Both: on(0), Held: on(1)}
		if on(2) {
			v.Expand = Registers
		}
		f(own(v, on(3)), n)
	})
	each(2, []Type{F32}, func(on flags, _ Type, n int) {
		v := merge64
		if on(0) {
			v.Expand = Full
		}
		f(own(v, on(1)), n)
	})
	each(1, []Type{F32}, func(on flags, _ Type, n int) {
		f(own(Merge, on(0)), n)
		f(RoPE{on(0)}, n)
		f(Convert{on(0)}, n)
	})
	for _, k := range fixed {
		f(k, 0)
	}
}

// TestKernelsCompile compiles every variant with the compiler of the pure Go provider, and checks that
// each function of common that a variant contains is called.
func TestKernelsCompile(t *testing.T) {
	function := regexp.MustCompile(`(?m)^fn (\w+)\(`)
	isShared := map[string]bool{}
	for _, d := range library().decls {
		isShared[d.name] = true
	}
	count := map[string]int{}
	variants(func(v Variant, _ int) {
		count[v.Name()]++
		src, err := Render(v)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := naga.Compile(src); err != nil {
			t.Errorf("%s: %v", Key(v), err)
		}
		used := map[string]int{}
		for _, name := range names(src) {
			used[name]++
		}
		for _, m := range function.FindAllStringSubmatch(src, -1) {
			if isShared[m[1]] && used[m[1]] < 2 {
				t.Errorf("%s: %s is not used", Key(v), m[1])
			}
		}
	})
	t.Logf("variants: %v", count)
	if n := len(sources()); n-1 != len(count) { // common is one of the sources
		t.Errorf("%d files, %d kernels", n, len(count))
	}
}
