package shaders

import (
	"math/bits"
	"regexp"
	"strings"
	"testing"

	"github.com/gogpu/naga"

	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// fixed are the kernels with one variant.
var fixed = []Fixed{Merge, Conv, Index, Lists, Delta, Reduce, Peak, Read, Exponentials}

// Tiles of package gpu for head size 64.
var (
	flash64    = Flash{TX: 8, TY: 16, RV: 2, KT: 8, CV: 2, VP: 1, QD: 4, JJ: 2, ER: 4, Split: 256}
	matrix64   = Matrix{In: F16, KV: F16, M: 16, N: 16, K: 16, Lanes: 32, TY: 8, Keys: 32, Depth: 64, Columns: 64}
	decode64   = Decode{Rows: 4, Split: 256, BC: 64, TX: 8, Stages: 4, Quads: 16, Sides: 1, Ahead: 16}
	merge64    = SplitMerge{Split: 256, TX: 8, Quads: 16}
	matmulL    = Matmul{TX: 8, TY: 16, Rows: 8, CV: 2, QD: 4}
	product16  = MatrixProduct{M: 16, N: 16, K: 16, Lanes: 32, SY: 2, SX: 2, RM: 2, CN: 2, Depth: 32}
	matrixDKV  = MatrixGradient{In: F16, KV: F16, DO: F16, M: 16, N: 16, K: 16, Lanes: 32, TY: 4, Others: 16, Depth: 64, Columns: 64, Paired: true}
	linear16   = MatrixLinear{Rows: 4, Low: true, M: 16, N: 16, K: 16, Lanes: 32}
	gradient64 = Gradient{TX: 16, TY: 8, QD: 4, Paired: true}
)

// with returns f with all options of a call.
func (f Flash) with(o Option) Flash {
	f.Masks, f.Blocked, f.Biases, f.Sloped, f.Capped, f.Drops = o, o, o, o, o, o
	return f
}

// plain returns one variant of each kernel.
func plain() []Variant {
	decode, matmul, matrix := decode64, matmulL, matrix64
	decode.Wide, decode.Extra, matmul.Skip, matrix.Paired = true, true, true, true
	list := []Variant{Attention{DVB: 2}, flash64.with(Flagged), matrix, MatrixPeak{16, 8, 16, 32}, decode, merge64, matmul, product16, Softmax{Held: true, Row: 1024}, gradient64, matrixDKV, RoPE{}, NormGate{}, Linear{Rows: 4}, linear16, Convert{}}
	for _, k := range fixed {
		list = append(list, k)
	}
	return list
}

func pick[T any](on bool, yes, no T) T {
	if on {
		return yes
	}
	return no
}

// variants calls f with the variants that package gpu makes by the options and types of a call and by
// the device, and how many of their fields are not the first value.
func variants(f func(v Variant, departures int)) {
	own := func(v Variant, exp2 bool) Variant { return pick(exp2, Variant(OwnExp2{v}), v) }
	each := func(flags int, types []Type, f func(on func(flag int) bool, dtype Type, departures int)) {
		for set := range 1 << flags {
			for i, dtype := range types {
				f(func(flag int) bool { return set>>flag&1 == 1 }, dtype, bits.OnesCount(uint(set))+min(i, 1))
			}
		}
	}
	type flags = func(flag int) bool
	both := func(on, crossed bool) Both { return pick(on, pick(crossed, Crossed, Apart), Neither) }
	each(3, []Type{F32, F16, Q8, Q4, F8}, func(on flags, kv Type, n int) {
		f(own(Attention{In: pick(on(2), BF16, F32), KV: kv, Paged: on(0), Listed: on(1), Both: pick(on(1), Apart, Neither), Low: kv == F16 && on(2), DVB: 2}, on(1)), n)
	})
	each(6, []Type{F32, BF16, Q8, Q4, F8}, func(on flags, kv Type, n int) {
		v := flash64.with(pick(on(5), Absent, pick(on(2), Present, Flagged)))
		v.In, v.KV, v.Paged, v.Both, v.Out16, v.Vec = pick(on(4), F16, F32), kv, on(0), both(on(1), on(0)), on(2), on(3)
		v.Listed, v.Packed = on(1) && on(2), on(4) && !on(1)
		v.Full, v.Ahead, v.Low = v.Vec && v.Out16, v.Out16, v.Out16 && kv == BF16
		f(own(v, v.Out16), n)
		if v.Ahead = false; n < 2 {
			v.Expand, v.TY, v.QD, v.JJ, v.ER = Registers, 4, 0, 8, 8
			f(own(v, on(3)), n)
		}
	})
	each(6, []Type{F16, BF16, F32, F8}, func(on flags, of Type, n int) {
		v := matrix64
		v.In, v.KV = pick(of == F8, pick(on(4), F16, BF16), of), of
		v.Paged, v.Listed, v.Packed, v.Both, v.Out16, v.Ahead, v.Paired = on(0), on(0) && on(1), on(4) && !on(1), both(on(1), on(0)), on(2), on(4), on(1) || on(2)
		if on(3) {
			v.Vec = 1 + n/8%2*min(int(of), 1)*pick(of == F8, 0, 1)
		}
		v.Full = v.Vec > 0 && v.Out16
		switch { // the shapes of NVIDIA, of Intel and of Mesa's software driver
		case on(5) && on(3):
			v.M, v.K, v.Depth, v.Columns, v.Keys = 8, 16, 80, 96, 16
		case on(5) && on(4):
			v.N, v.TY = 8, 4
		case on(5):
			v.M, v.N, v.K, v.Lanes, v.Keys = 8, 8, 8, 8, 8
		}
		f(own(v, on(1)), n)
	})
	each(5, []Type{F16, BF16, F8}, func(on flags, of Type, n int) {
		v := matrix64
		v.In, v.KV, v.TY, v.Split = pick(of == F8, pick(on(2), F16, BF16), of), of, 1, 256
		v.Paged, v.Listed, v.Both, v.Ahead, v.Paired = on(0), on(0) && on(1), both(on(1), on(0)), on(2), on(1) || on(2)
		v.Vec = pick(on(3), pick(of == F8, 1, 2), 0)
		if v.Full = on(3); on(4) {
			v.M, v.N, v.K, v.Lanes, v.Keys = 8, 8, 8, 8, 8
		}
		f(own(v, on(1)), n)
	})
	each(6, []Type{F32, BF16, Q8, Q4, F8}, func(on flags, kv Type, n int) {
		v := decode64
		v.In, v.KV, v.Paged, v.Both, v.Wide, v.Full, v.Extra = pick(on(5), F16, F32), kv, on(0), both(on(1), on(0)), on(2) && kv < Q8, on(3), on(4)
		v.Low, v.Listed = kv == BF16 && on(5), on(1) && on(4)
		f(own(v, on(1)), n)
	})
	each(6, []Type{F32}, func(on flags, _ Type, n int) {
		v := matmulL
		v.A, v.W, v.AVec, v.WVec, v.Along, v.Skip = pick(on(4), F16, F32), pick(on(5), BF16, F32), on(0), on(1), on(2), on(3)
		v.Full, v.OVec = v.AVec && v.WVec && v.Skip, v.AVec
		f(v, n)
	})
	each(6, []Type{F32}, func(on flags, _ Type, n int) {
		v := product16
		v.AVec, v.WVec, v.Along, v.OVec = on(0), on(1), on(2), on(3)
		v.Full = v.AVec && v.WVec && v.OVec
		switch { // the shapes of NVIDIA, of Intel and of Mesa's software driver
		case on(5) && on(4):
			v.M, v.Lanes, v.RM = 8, 16, 4
		case on(5):
			v.N, v.CN = 8, 4
		case on(4):
			v.M, v.N, v.K, v.Lanes, v.RM, v.CN, v.Depth = 8, 8, 8, 8, 1, 1, 8
		}
		f(v, n)
	})
	each(5, []Type{F32}, func(on flags, _ Type, n int) {
		v := gradient64
		v.Expand, v.In, v.Both = pick(on(4), Full, Registers), pick(on(3), F16, F32), both(on(0), on(1))
		v.Of = pick(on(2), pick(on(1), DS, DQ), DKV)
		if v.Of == DS {
			n-- // one field, set by two flags
		}
		f(v, n)
	})
	each(3, []Type{F16, BF16}, func(on flags, of Type, n int) {
		v := matrixDKV
		v.In, v.KV, v.DO = of, of, of
		v.Vec, v.Full, v.Paired, v.Of, v.N = on(0), on(0), on(1), pick(on(2), DQ, DKV), pick(on(1), 8, 16)
		f(own(v, on(2)), n)
	})
	each(3, []Type{F32}, func(on flags, _ Type, n int) {
		f(own(Softmax{Row: 1024, Both: both(on(0), on(1)), Held: on(1)}, on(2)), n)
	})
	each(1, []Type{F32}, func(on flags, _ Type, n int) {
		f(own(merge64, on(0)), n)
		f(own(Merge, on(0)), n)
		f(own(Conv, on(0)), n)
		f(RoPE{on(0)}, n)
		f(own(NormGate{on(0)}, on(0)), n)
		f(own(Linear{Rows: pick(on(0), 32, 1)}, on(0)), n)
		f(own(Linear{pick(on(0), 8, 1), true}, on(0)), n)
		f(own(MatrixLinear{pick(on(0), 4, 1), on(0), pick(on(0), 8, 16), 8, pick(on(0), 8, 16), pick(on(0), 8, 32)}, on(0)), n)
		f(MatrixPeak{8, pick(on(0), 8, 16), pick(on(0), 8, 16), pick(on(0), 8, 32)}, n)
		f(Convert{pick(on(0), Q8, F32)}, n)
		f(Convert{pick(on(0), Q4, F32)}, n)
		f(Convert{pick(on(0), F8, F32)}, n)
	})
	for _, k := range fixed {
		f(k, 0)
	}
}

// Rendered calls f with a name and the WGSL of every variant, with -short of every option and of every second pair.
func Rendered(t *testing.T, f func(name, src string)) {
	pairs := 0
	variants(func(v Variant, departures int) {
		if departures == 2 {
			pairs++
		}
		if testing.Short() && (departures > 2 || departures == 2 && pairs%2 > 0) {
			return
		}
		src := must.Get(Render(v))(t)
		f(v.Name(), src)
	})
}

// TestKernelsCompile compiles every variant with the compiler of the pure Go provider, and checks that
// each function of common that a variant contains is called.
func TestKernelsCompile(t *testing.T) {
	function := regexp.MustCompile(`(?m)^fn (\w+)\(`)
	isShared := map[string]bool{}
	for _, d := range sources()["common"].decls {
		isShared[d.name] = true
	}
	count := map[string]int{}
	Rendered(t, func(name, src string) {
		count[name]++
		if _, err := naga.Compile(src); err != nil && !strings.HasPrefix(name, "matrix") { // which Tint alone compiles
			t.Errorf("%s, variant %d: %v", name, count[name], err)
		}
		used := map[string]int{}
		for _, word := range word.FindAllString(src, -1) {
			used[word]++
		}
		for _, m := range function.FindAllStringSubmatch(src, -1) {
			if isShared[m[1]] && used[m[1]] < 2 {
				t.Errorf("%s, variant %d: %s is not used", name, count[name], m[1])
			}
		}
	})
	t.Logf("variants: %v", count)
	if n := len(sources()); n-1 != len(count) { // common is one of the sources
		t.Errorf("%d files, %d kernels", n, len(count))
	}
}
