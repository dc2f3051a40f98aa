package backend

import (
	"errors"
	"math"
	"math/rand/v2"
	"testing"
)

func TestQuantise(t *testing.T) {
	inf, nan := float32(math.Inf(1)), float32(math.NaN())
	read := func(row ...float32) []float32 {
		data := make([]byte, q8Lead+len(row))
		QuantiseQ8(data, row)
		got := make([]float32, len(row))
		DequantiseQ8(got, data)
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

func TestQ8Tensors(t *testing.T) {
	shape := Shape{2, 3, 5, 8}
	x, err := AllocHost(Q8, shape)
	noError(t, err)
	if x.Strides() != (Strides{3 * 5 * 12, 5 * 12, 12, 1}) || x.Offset() != 4 || x.Bytes() != 2*3*5*12 || !x.IsContiguous() {
		t.Errorf("strides %v, offset %d, %d bytes, contiguous %t", x.Strides(), x.Offset(), x.Bytes(), x.IsContiguous())
	}
	rows, err := x.Q8Rows()
	if err != nil || len(rows) != 360 {
		t.Errorf("%d bytes of rows, %v", len(rows), err)
	}
	head, err := x.Slice(Heads, 1, 2)
	noError(t, err)
	if rows, err = head.Q8Rows(); err != nil || len(rows) != 300 {
		t.Errorf("%d bytes from the second head's first scale on, %v", len(rows), err)
	}
	next, err := x.Slice(Heads, 2, 3)
	noError(t, err)
	other, err := x.Slice(Heads, 0, 1)
	noError(t, err)
	first, err := other.Slice(Batch, 0, 1)
	noError(t, err)
	last, err := next.Slice(Batch, 0, 1)
	noError(t, err)
	if first.overlaps(&last) || !head.overlaps(&x) || x.selfOverlaps() {
		t.Error("heads side by side overlap, or a part does not overlap the whole")
	}
	tight, err := x.View(Shape{1, 1, 4, 8}, Strides{0, 0, 8, 1}, 0)
	if err != nil || !tight.selfOverlaps() {
		t.Errorf("rows that leave no room for their scales do not overlap, %v", err)
	}
	for name, err := range map[string]error{
		"odd rows":         second(AllocHost(Q8, Shape{1, 1, 1, 6})),
		"a cut row":        second(x.Slice(Dim, 0, 4)),
		"a turned row":     second(x.Swap(Seq, Dim)),
		"an odd stride":    second(x.View(Shape{1, 1, 2, 8}, Strides{0, 0, 13, 1}, 0)),
		"an odd offset":    second(x.View(Shape{1, 1, 2, 8}, Strides{0, 0, 12, 1}, 2)),
		"elements apart":   second(x.View(Shape{1, 1, 2, 8}, Strides{0, 0, 24, 2}, 0)),
		"too few bytes":    second(HostQ8(make([]byte, 11), Shape{1, 1, 1, 8})),
		"beyond the bytes": second(x.View(Shape{1, 1, 31, 8}, Strides{0, 0, 12, 1}, 0)),
	} {
		if !errors.Is(err, ErrShape) {
			t.Errorf("%s: error is %v, should be %v", name, err, ErrShape)
		}
	}
	if _, err := x.Float32s(); !errors.Is(err, ErrDType) {
		t.Errorf("float32s of q8: %v", err)
	}
}

func TestPages(t *testing.T) {
	meta := func(dtype DType, shape Shape) Tensor {
		x, err := Meta(dtype, shape)
		noError(t, err)
		return x
	}
	c := Call{Q: meta(F32, Shape{2, 4, 3, 8}), K: meta(Q8, Shape{6, 2, 16, 8}), V: meta(Q8, Shape{6, 2, 16, 4}), O: meta(F32, Shape{2, 4, 3, 4})}
	c.Visible = Everything()
	c.Pages = &Pages{Table: [][]int32{{5, 0, 99}, {5, 2}}, Keys: 32}
	if err := c.CheckPages(); err != nil {
		t.Errorf("a page beyond the keys is looked at: %v", err)
	}
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
		if err := c.CheckPages(); !errors.Is(err, bad.want) {
			t.Errorf("%s: error is %v, should be %v", bad.name, err, bad.want)
		}
	}
}
