package backend

import (
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

func TestQuantise(t *testing.T) {
	inf, nan := float32(math.Inf(1)), float32(math.NaN())
	read := func(row ...float32) []float32 {
		data := make([]byte, Q8.Row(len(row)))
		Q8.Quantise(data, row)
		got := make([]float32, len(row))
		Q8.Dequantise(got, data)
		return got
	}
	for _, c := range []struct {
		name      string
		row, want []float32
	}{
		{"integers of a scale of 1 stay", []float32{127, -127, 1, -3, 0, 64}, []float32{127, -127, 1, -3, 0, 64}},
		{"halves go to the even neighbour", []float32{127, 0.5, 1.5, -0.5, -2.5, 126.5}, []float32{127, 0, 2, 0, -2, 126}},
		// 1.1818405 and 1.9697343 over the scale are below 1.5 and above 2.5, but their
		// products with 1/scale round to these halves.
		{"halves are those of float32 products", []float32{100.0625, 1.1818405, 1.9697343, 0}, []float32{100.0625, 2 * 100.0625 / 127, 2 * 100.0625 / 127, 0}},
		{"the largest has the scale, whatever its sign", []float32{-254, 3, 5, 0}, []float32{-254, 4, 4, 0}},
		{"nothing but zeros", []float32{0, 0, 0, 0}, []float32{0, 0, 0, 0}},
		{"too small for a scale", []float32{0x1p-120, 0, 0, -0x1p-149}, []float32{0, 0, 0, 0}},
		{"a NaN takes its row", []float32{1, nan, 2, 3}, []float32{nan, nan, nan, nan}},
		{"so does an Inf", []float32{1, 2, -inf, 3}, []float32{nan, nan, nan, nan}},
	} {
		for i, x := range read(c.row...) {
			if w := c.want[i]; math.Abs(float64(x-w)) > 1e-5 || (x == x) != (w == w) {
				t.Errorf("%s: element %d is %v, should be %v", c.name, i, x, w)
			}
		}
	}
	rng := rand.New(rand.NewPCG(1, 0))
	for range 1000 {
		row := make([]float32, 64)
		var most float64
		for i := range row {
			row[i] = float32(rng.NormFloat64() * math.Exp2(200*rng.Float64()-100))
			most = max(most, math.Abs(float64(row[i])))
		}
		for i, x := range read(row...) {
			if off := math.Abs(float64(x) - float64(row[i])); off > most/254*(1+1e-5) {
				t.Fatalf("%v became %v, off by %v: more than half a step of a row with %v", row[i], x, off, most)
			}
		}
	}
}

// TestQuantiseQ4 compares blocks with bytes worked out by hand from ggml's block_q4_0.
func TestQuantiseQ4(t *testing.T) {
	inf, nan := float32(math.Inf(1)), float32(math.NaN())
	all := func(n byte) string { return strings.Repeat(string([]byte{n}), 16) }
	for _, c := range []struct {
		name  string
		row   map[int]float32 // the elements that are not 0
		bytes string          // scale, then element 16+i and element i in byte i
		want  map[int]float32
	}{
		{"zeros", nil, "\x00\x00" + all(0x88), nil},
		// d = -4/-8 = 0.5 = 0x3800; -4/d = -8 becomes 0, 3.5/d = 7 becomes 15, 1/d = 2 becomes 10.
		{"a negative maximum", map[int]float32{0: -4, 16: 3.5, 15: 1, 31: -0.5}, "\x00\x38\xf0" + all(0x88)[1:15] + "\x7a", map[int]float32{0: -4, 16: 3.5, 15: 1, 31: -0.5}},
		// d = -0.5 = 0xb800; -4/d = 8 becomes 16, of which 15 remains: -3.5.
		{"a positive maximum first", map[int]float32{1: 4, 17: -4}, "\x00\xb8\x88\xf0" + all(0x88)[2:], map[int]float32{1: 4, 17: -3.5}},
		// d = 1: 0.5+8.5 = 9, -0.5+8.5 = 8, 0.4375+8.5 = 8.9375, -1.5+8.5 = 7.
		{"halves go up", map[int]float32{0: -8, 1: 0.5, 2: -0.5, 3: 0.4375, 4: -1.5}, "\x00\x3c\x80\x89\x88\x88\x87" + all(0x88)[5:], map[int]float32{0: -8, 1: 1, 4: -1}},
		// d = 0.1 is rounded to 0x2e66 = 0.0999755859375 after the quotients.
		{"the scale is rounded", map[int]float32{0: -0.8, 1: 0.1}, "\x66\x2e\x80\x89" + all(0x88)[2:], map[int]float32{0: -0.7998046875, 1: 0.0999755859375}},
		{"the smallest scale", map[int]float32{0: -0x1p-21, 1: 0x1p-24}, "\x01\x00\x80\x89" + all(0x88)[2:], map[int]float32{0: -0x1p-21, 1: 0x1p-24}},
		{"too small for a scale", map[int]float32{0: -0x1p-22, 1: 0x1p-149}, "\x00\x00" + all(0x88), nil},
		{"the largest scale", map[int]float32{0: -8 * 65504}, "\xff\x7b\x80" + all(0x88)[1:], map[int]float32{0: -8 * 65504}},
		{"too large for a scale", map[int]float32{0: -8 * 65520}, "\x01\x7e" + all(0x88), map[int]float32{0: nan, 31: nan}},
		{"a NaN", map[int]float32{0: 1, 31: nan}, "\x01\x7e" + all(0x88), map[int]float32{0: nan, 31: nan}},
		{"an Inf", map[int]float32{0: 1, 31: -inf}, "\x01\x7e" + all(0x88), map[int]float32{0: nan, 31: nan}},
	} {
		row, data := make([]float32, 64), make([]byte, 36)
		for i, x := range c.row {
			row[32+i] = x
		}
		Q4.Quantise(data, row)
		if got := string(data[18:]); got != c.bytes {
			t.Errorf("%s: bytes are % x, should be % x", c.name, got, c.bytes)
		}
		Q4.Dequantise(row, data)
		for i, x := range row {
			w := c.want[i-32]
			if c.want[31] != c.want[31] && i >= 32 {
				w = nan
			}
			if x != w && (x == x || w == w) {
				t.Errorf("%s: element %d is %v, should be %v", c.name, i-32, x, w)
			}
		}
	}
}

func TestQ4Tensors(t *testing.T) {
	x := must.Get(AllocHost(Q4, Shape{2, 3, 5, 64}))(t)
	if x.Strides() != (Strides{3 * 5 * 36, 5 * 36, 36, 1}) || x.Offset() != 0 || x.Bytes() != 2*3*5*36 || !x.IsContiguous() {
		t.Errorf("strides %v, offset %d, %d bytes, contiguous %t", x.Strides(), x.Offset(), x.Bytes(), x.IsContiguous())
	}
	head := must.Get(x.Slice(Heads, 1, 2))(t)
	other := must.Get(x.Slice(Heads, 2, 3))(t)
	if first, _ := head.Slice(Batch, 0, 1); first.overlaps(&other) || !head.overlaps(&x) || x.selfOverlaps() {
		t.Error("heads side by side overlap, or a part does not overlap the whole")
	}
	tight, err := x.View(Shape{1, 1, 4, 64}, Strides{0, 0, 34, 1}, 0)
	if err != nil || !tight.selfOverlaps() {
		t.Errorf("rows that are longer than their distance do not overlap, %v", err)
	}
	for name, err := range map[string]error{
		"half a block":     must.Err(AllocHost(Q4, Shape{1, 1, 1, 48})),
		"less than one":    must.Err(x.View(Shape{1, 1, 1, 16}, Strides{0, 0, 18, 1}, 0)),
		"a cut row":        must.Err(x.Slice(Dim, 0, 32)),
		"a turned row":     must.Err(x.Swap(Seq, Dim)),
		"an odd stride":    must.Err(x.View(Shape{1, 1, 2, 64}, Strides{0, 0, 37, 1}, 0)),
		"an odd offset":    must.Err(x.View(Shape{1, 1, 2, 64}, Strides{0, 0, 36, 1}, 1)),
		"too few bytes":    must.Err(Host(make([]byte, 35), Q4, Shape{1, 1, 1, 64})),
		"beyond the bytes": must.Err(x.View(Shape{1, 1, 31, 64}, Strides{0, 0, 36, 1}, 0)),
		"a huge shape":     must.Err(Meta(Q4, Shape{1 << 30, 1 << 30, 1, 1})),
	} {
		must.Fail(t, name, err, ErrShape)
	}
}

func TestQ8Tensors(t *testing.T) {
	shape := Shape{2, 3, 5, 8}
	x := must.Get(AllocHost(Q8, shape))(t)
	if x.Strides() != (Strides{3 * 5 * 12, 5 * 12, 12, 1}) || x.Offset() != 4 || x.Bytes() != 2*3*5*12 || !x.IsContiguous() {
		t.Errorf("strides %v, offset %d, %d bytes, contiguous %t", x.Strides(), x.Offset(), x.Bytes(), x.IsContiguous())
	}
	rows, err := x.QuantisedRows()
	if err != nil || len(rows) != 360 {
		t.Errorf("%d bytes of rows, %v", len(rows), err)
	}
	head := must.Get(x.Slice(Heads, 1, 2))(t)
	if rows, err = head.QuantisedRows(); err != nil || len(rows) != 300 {
		t.Errorf("%d bytes from the second head's first scale on, %v", len(rows), err)
	}
	next := must.Get(x.Slice(Heads, 2, 3))(t)
	other := must.Get(x.Slice(Heads, 0, 1))(t)
	first := must.Get(other.Slice(Batch, 0, 1))(t)
	last := must.Get(next.Slice(Batch, 0, 1))(t)
	if first.overlaps(&last) || !head.overlaps(&x) || x.selfOverlaps() {
		t.Error("heads side by side overlap, or a part does not overlap the whole")
	}
	tight, err := x.View(Shape{1, 1, 4, 8}, Strides{0, 0, 8, 1}, 0)
	if err != nil || !tight.selfOverlaps() {
		t.Errorf("rows that leave no room for their scales do not overlap, %v", err)
	}
	for name, err := range map[string]error{
		"odd rows":         must.Err(AllocHost(Q8, Shape{1, 1, 1, 6})),
		"a cut row":        must.Err(x.Slice(Dim, 0, 4)),
		"a turned row":     must.Err(x.Swap(Seq, Dim)),
		"an odd stride":    must.Err(x.View(Shape{1, 1, 2, 8}, Strides{0, 0, 13, 1}, 0)),
		"an odd offset":    must.Err(x.View(Shape{1, 1, 2, 8}, Strides{0, 0, 12, 1}, 2)),
		"elements apart":   must.Err(x.View(Shape{1, 1, 2, 8}, Strides{0, 0, 24, 2}, 0)),
		"too few bytes":    must.Err(Host(make([]byte, 11), Q8, Shape{1, 1, 1, 8})),
		"beyond the bytes": must.Err(x.View(Shape{1, 1, 31, 8}, Strides{0, 0, 12, 1}, 0)),
	} {
		must.Fail(t, name, err, ErrShape)
	}
	must.Fail(t, "float32s of q8", must.Err(x.Float32s()), ErrDType)
}

func TestPages(t *testing.T) {
	meta := func(dtype DType, shape Shape) Tensor {
		return must.Get(Meta(dtype, shape))(t)
	}
	c := Call{Q: meta(F32, Shape{2, 4, 3, 8}), K: meta(Q8, Shape{6, 2, 16, 8}), V: meta(Q8, Shape{6, 2, 16, 4}), O: meta(F32, Shape{2, 4, 3, 4})}
	c.Visible = Everything()
	c.Pages = &Pages{Table: [][]int32{{5, 0, 99}, {5, 2}}, Keys: 32}
	must.Pass(t, "a page beyond the keys is looked at", c.CheckPages())
	if d := c.Dims(); d != (Dims{2, 4, 2, 3, 32, 8, 4}) {
		t.Errorf("dims are %+v", d)
	}
	c.Visible.KLen = []int{32, 20}
	// Pages 5 and 0 whole, four rows of page 2: 36 rows of two heads.
	if p, want := NewPlan(&c), int64(36*2*(12+8)+2*4*3*(8+4)*4); p.Bytes != want {
		t.Errorf("%d bytes move, should be %d", p.Bytes, want)
	}
	for _, bad := range []struct {
		name string
		p    Pages
		klen []int
		want error
	}{
		{"fewer than no keys", Pages{Table: [][]int32{{0}, {0}}, Keys: -1}, nil, ErrShape},
		{"more keys than the pool", Pages{Table: [][]int32{{0}, {0}}, Keys: 6*16 + 1}, []int{1, 1}, ErrShape},
		{"far more keys", Pages{Table: [][]int32{{0}, {0}}, Keys: 1 << 62}, []int{1, 1}, ErrShape},
		{"rows missing", Pages{Table: [][]int32{{0}}, Keys: 3}, nil, ErrShape},
		{"too few pages", Pages{Table: [][]int32{{0, 1}, {0}}, Keys: 17}, nil, ErrShape},
		{"beyond the pool", Pages{Table: [][]int32{{0, 1}, {0, 6}}, Keys: 17}, nil, ErrOption},
		{"negative", Pages{Table: [][]int32{{0, 1}, {-1}}, Keys: 17}, []int{17, 4}, ErrOption},
	} {
		c.Pages, c.Visible.KLen = &bad.p, bad.klen
		must.Fail(t, bad.name, c.CheckPages(), bad.want)
	}
}

// TestQuantiseF8 compares codes with the formula of e4m3fn (Micikevicius et al. 2022, FP8 Formats for Deep Learning) and
// rounding with the nearest of all numbers, in float64.
func TestQuantiseF8(t *testing.T) {
	number := func(code byte) float64 {
		e, m := int(code>>3&15), float64(code&7)
		x := math.Ldexp(1+m/8, e-7)
		switch {
		case code&0x7f == 0x7f:
			x = math.NaN()
		case e == 0:
			x = m * 0x1p-9
		}
		return math.Copysign(x, 0.5-float64(code>>7))
	}
	codes, read := make([]byte, 256), make([]float32, 256)
	for i := range codes {
		codes[i] = byte(i)
	}
	F8.Dequantise(read, codes)
	back := make([]byte, 256)
	F8.Quantise(back, read)
	for i, x := range read {
		if want := float32(number(byte(i))); math.Float32bits(x) != math.Float32bits(want) && x == x || (x == x) != (want == want) || back[i] != byte(i) {
			t.Errorf("code %#x is %v, should be %v, and becomes %#x again", i, x, want, back[i])
		}
	}
	near := []float32{0, 0x1p-149, 447, 448, 449, 464, 480, 0x1p127, math.MaxFloat32, float32(math.Inf(1))}
	for i := range 0x7e { // halves between neighbours, and their own neighbours
		half := float32(number(byte(i))+number(byte(i+1))) / 2
		near = append(near, half, math.Nextafter32(half, 0), math.Nextafter32(half, 1e9))
	}
	for _, x := range near {
		best := 0 // the even one of two that are equally near
		for i := range 0x7f {
			off, least := math.Abs(number(byte(i))-float64(x)), math.Abs(number(byte(best))-float64(x))
			if math.IsInf(float64(x), 1) || off < least || off == least && i%2 == 0 {
				best = i
			}
		}
		got := make([]byte, 2)
		if F8.Quantise(got, []float32{x, -x}); got[0] != byte(best) || got[1] != byte(best)|0x80 {
			t.Errorf("%v becomes %#x, should be %#x", x, got, best)
		}
	}
}
