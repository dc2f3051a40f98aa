package backend

import (
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/quick"

	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

func host(t *testing.T, shape Shape) Tensor {
	t.Helper()
	return must.Get(AllocHost(F32, shape))(t)
}

func TestShapeElements(t *testing.T) {
	for _, c := range []struct {
		shape Shape
		want  int
	}{
		{Shape{2, 3, 4, 5}, 120},
		{Shape{1, 1, 1, 1}, 1},
		{Shape{0, 3, 4, 5}, 0},
		{Shape{-1, 3, 4, 5}, -1},
		{Shape{-1, -3, 4, 5}, -1},
		{Shape{math.MaxInt, 2, 1, 1}, -1},
		{Shape{1 << 40, 1 << 40, 0, 1}, 0},
		{Shape{1 << 16, 1 << 16, 1 << 16, 1 << 16}, -1},
	} {
		if got := c.shape.Elements(); got != c.want {
			t.Errorf("%v has %d elements, should have %d", c.shape, got, c.want)
		}
	}
}

func TestHostTensorsShareTheSlice(t *testing.T) {
	data := []float32{1, 2, 3, 4, 5, 6}
	x := must.Get(Host(data, F32, Shape{1, 1, 2, 3}))(t)
	data[4] = 50
	got, err := x.Float32s()
	if err != nil || got[4] != 50 {
		t.Errorf("element 4 is %v, %v: the tensor copied the slice", got, err)
	}
	for name, bad := range map[string]error{
		"too few": must.Err(Host(data, F32, Shape{1, 1, 2, 4})),
		"bits":    must.Err(Host(make([]uint16, 3), F16, Shape{1, 1, 1, 4})),
		"bools":   must.Err(Host(make([]bool, 3), Bool, Shape{1, 1, 1, 4})),
	} {
		must.Fail(t, name, bad, ErrShape)
	}
	must.Fail(t, "f32 bits", must.Err(Host(make([]uint16, 4), F32, Shape{1, 1, 1, 4})), ErrDType)
}

func TestViewsStayInside(t *testing.T) {
	x := host(t, Shape{1, 2, 3, 4}) // 24 elements
	for _, c := range []struct {
		name    string
		shape   Shape
		strides Strides
		offset  int
		ok      bool
	}{
		{"all", Shape{1, 1, 1, 24}, Strides{0, 0, 0, 1}, 0, true},
		{"last element", Shape{1, 1, 1, 1}, Strides{}, 23, true},
		{"one past", Shape{1, 1, 1, 1}, Strides{}, 24, false},
		{"one too long", Shape{1, 1, 1, 25}, Strides{0, 0, 0, 1}, 0, false},
		{"strided to the end", Shape{1, 1, 8, 1}, Strides{0, 0, 3, 1}, 2, true},
		{"strided past the end", Shape{1, 1, 8, 1}, Strides{0, 0, 3, 1}, 3, false},
		{"negative stride", Shape{1, 1, 2, 2}, Strides{0, 0, -2, 1}, 4, false},
		{"negative offset", Shape{1, 1, 1, 1}, Strides{}, -1, false},
		{"overflowing stride", Shape{1, 1, 3, 1}, Strides{0, 0, math.MaxInt, 1}, 0, false},
		{"broadcast", Shape{9, 9, 9, 24}, Strides{0, 0, 0, 1}, 0, true},
		{"overflowing shape", Shape{1 << 40, 1 << 40, 1, 1}, Strides{}, 0, false},
	} {
		_, err := x.View(c.shape, c.strides, c.offset)
		if c.ok && err != nil || !c.ok && !errors.Is(err, ErrShape) {
			t.Errorf("%s: error is %v", c.name, err)
		}
	}
}

func TestSliceSwapBroadcast(t *testing.T) {
	x := host(t, Shape{2, 3, 4, 5})
	data, _ := x.Float32s()
	for i := range data {
		data[i] = float32(i)
	}
	s := must.Get(x.Slice(Heads, 1, 3))(t)
	w := must.Get(s.Swap(Heads, Seq))(t)
	if w.Shape() != (Shape{2, 4, 2, 5}) || w.Strides() != (Strides{60, 5, 20, 1}) || w.Offset() != 20 {
		t.Errorf("got %v %v %d", w.Shape(), w.Strides(), w.Offset())
	}
	if got, _ := w.Float32s(); got[0] != 20 {
		t.Errorf("first element is %v, should be 20", got[0])
	}
	must.Fail(t, "slice past the end", must.Err(x.Slice(Seq, 3, 5)), ErrShape)
	must.Fail(t, "swap with axis 4", must.Err(x.Swap(0, 4)), ErrShape)
	one := host(t, Shape{1, 3, 1, 5})
	b, err := one.Broadcast(Shape{2, 3, 4, 5})
	if err != nil || b.Strides() != (Strides{0, 5, 0, 1}) || b.Bytes() != 60 {
		t.Errorf("broadcast gives %v, %d bytes, %v", b.Strides(), b.Bytes(), err)
	}
	must.Fail(t, "3 heads to 4", must.Err(one.Broadcast(Shape{2, 4, 4, 5})), ErrShape)
}

func TestSelfOverlapAgainstBruteForce(t *testing.T) {
	f := func(l, s [4]uint8) bool {
		var x Tensor
		for i := range 4 {
			x.shape[i], x.strides[i] = int(l[i]%4)+1, int(s[i]%13)
		}
		seen := map[int]bool{}
		twice := false
		for a := range x.shape[0] {
			for b := range x.shape[1] {
				for c := range x.shape[2] {
					for d := range x.shape[3] {
						at := a*x.strides[0] + b*x.strides[1] + c*x.strides[2] + d*x.strides[3]
						twice = twice || seen[at]
						seen[at] = true
					}
				}
			}
		}
		// Interleaved strides can have distinct elements without being nested. These are
		// refused too: only one direction must hold.
		return !twice || x.selfOverlaps()
	}
	if err := quick.Check(f, &quick.Config{MaxCount: 20000}); err != nil {
		t.Error(err)
	}
	if x := (Tensor{shape: Shape{2, 3, 4, 5}, strides: Strides{60, 5, 15, 1}}); x.selfOverlaps() {
		t.Error("[B,S,H,D] data seen as [B,H,S,D] counts as overlapping itself")
	}
}

func TestReleaseWaitsForUsers(t *testing.T) {
	freed := 0
	m := NewMemory(nil, "test", 64, nil, func() { freed++ })
	x := must.Get(NewTensor(m, F32, Shape{1, 1, 4, 4}))(t)
	var p Pinned
	must.Do(t, p.Pin(nil, "test", nil, []Operand{{"x", x}, {"again", x}}))
	x.Release()
	x.Release()
	if freed != 0 {
		t.Fatal("freed while a call holds it")
	}
	p.Unpin()
	p.Unpin()
	if freed != 1 {
		t.Fatalf("freed %d times, should be once", freed)
	}
	must.Fail(t, "released", p.Pin(nil, "test", nil, []Operand{{"x", x}}), ErrReleased)
}

func TestAliasIsReleasedOnItsOwn(t *testing.T) {
	x := host(t, Shape{1, 1, 2, 2})
	y := must.Get(x.Alias())(t)
	y.Release()
	must.Fail(t, "alias", must.Err(y.Float32s()), ErrReleased)
	if _, err := x.Float32s(); err != nil {
		t.Errorf("original: %v", err)
	}
	var p Pinned
	z, _ := x.Alias()
	must.Fail(t, "alias as output and input", p.Pin(nil, "host", []Operand{{"o", x}}, []Operand{{"q", z}}), ErrOverlap)
}

func TestPinDoesNotAllocate(t *testing.T) {
	x, y := host(t, Shape{1, 1, 2, 2}), host(t, Shape{1, 1, 2, 2})
	out, in := []Operand{{"o", x}}, []Operand{{"q", y}, {"mask", Tensor{}}}
	if n := testing.AllocsPerRun(100, func() {
		var p Pinned
		must.Do(t, p.Pin(nil, "host", out, in))
		p.Unpin()
	}); n != 0 {
		t.Errorf("%v allocations a call", n)
	}
}

func TestEncodeRoundsToNearestEven(t *testing.T) {
	inf, nan := float32(math.Inf(1)), float32(math.NaN())
	for _, c := range []struct {
		dtype    DType
		in, want float32
	}{
		{F16, 1, 1}, {F16, 1 + 0x1p-11, 1}, {F16, 1 + 3*0x1p-11, 1 + 0x1p-9}, {F16, 65504, 65504}, {F16, 65520, inf}, {F16, 0x1p-24, 0x1p-24}, {F16, 0x1p-26, 0}, {F16, -inf, -inf},
		{BF16, 1, 1}, {BF16, 1 + 0x1p-8, 1}, {BF16, 1 + 3*0x1p-8, 1 + 0x1p-6}, {BF16, math.MaxFloat32, inf}, {BF16, -0.15625, -0.15625}, {BF16, 1 + 0x1p-8 + 0x1p-20, 1 + 0x1p-7},
		{F32, 0.1, 0.1},
	} {
		if got := c.dtype.Round(c.in); got != c.want {
			t.Errorf("%v of %v is %v, should be %v", c.dtype, c.in, got, c.want)
		}
	}
	for _, d := range []DType{F16, BF16} {
		if got := d.Round(nan); got == got {
			t.Errorf("%v of NaN is %v", d, got)
		}
		for _, bits := range []uint32{0x7f800001, 0x7fffffff, 0xffffffff} { // payloads in bits that are removed, or that carry
			if got := d.Round(math.Float32frombits(bits)); got == got {
				t.Errorf("%v of NaN %#x is %v", d, bits, got)
			}
		}
	}
}

func TestVisibility(t *testing.T) {
	for _, c := range []struct {
		name string
		v    Visibility
		want []string // rows of batch 0, 4 keys
	}{
		{"everything", Everything(), []string{"1111", "1111", "1111"}},
		{"zero value", Visibility{}, []string{"1000", "0100", "0010"}},
		{"causal", Visibility{Left: Unbounded}, []string{"1000", "1100", "1110"}},
		{"causal, offset 1", Visibility{Left: Unbounded, Offset: 1}, []string{"1100", "1110", "1111"}},
		{"causal, offset -2", Visibility{Left: Unbounded, Offset: -2}, []string{"0000", "0000", "1000"}},
		{"window 1,1", Visibility{Left: 1, Right: 1}, []string{"1100", "1110", "0111"}},
		{"klen 2", Visibility{Left: Unbounded, Right: Unbounded, KLen: []int{2}}, []string{"1100", "1100", "1100"}},
		{"no left limit, right 1", Visibility{Left: Unbounded, Right: 1}, []string{"1100", "1110", "1111"}},
	} {
		var got []string
		pairs := int64(0)
		for i := range 3 {
			row := make([]byte, 4)
			lo, hi := c.v.Range(0, i, 4)
			for j := range row {
				row[j] = '0'
				if lo <= j && j < hi {
					row[j] = '1'
					pairs++
				}
			}
			got = append(got, string(row))
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: sees %v, should see %v", c.name, got, c.want)
		}
		if n := c.v.Pairs(1, 3, 4); n != pairs {
			t.Errorf("%s: %d pairs, counted %d", c.name, n, pairs)
		}
	}
	if n := (Visibility{Left: Unbounded, Right: Unbounded, KLen: []int{2, 3}}).Pairs(2, 3, 4); n != 15 {
		t.Errorf("klen 2 and 3: %d pairs, should be 15", n)
	}
	// Two rows of two sequences with 4 and 2 keys, causal: 3 + 4 and 1 + 2.
	if n := (Visibility{Left: Unbounded, KLen: []int{4, 2}, Offsets: []int{2, 0}}).Pairs(2, 2, 4); n != 10 {
		t.Errorf("causal, offsets 2 and 0: %d pairs, should be 10", n)
	}
}

// The sum in closed form is that of a loop over the rows.
func TestPairsAreThoseOfALoop(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 20_000 {
		v := Visibility{Offset: rng.IntN(31) - 15, Left: rng.IntN(12), Right: rng.IntN(12)}
		if rng.IntN(3) == 0 {
			v.Left = Unbounded
		}
		if rng.IntN(3) == 0 {
			v.Right = Unbounded
		}
		batch, seqQ, seqK := rng.IntN(4), rng.IntN(9), rng.IntN(9)
		for range batch * rng.IntN(2) {
			v.KLen = append(v.KLen, rng.IntN(seqK+1))
		}
		for range batch * rng.IntN(2) {
			v.Offsets = append(v.Offsets, rng.IntN(13)-6)
		}
		want := int64(0)
		for b := range batch {
			for i := range seqQ {
				lo, hi := v.Range(b, i, seqK)
				want += int64(hi - lo)
			}
		}
		if got := v.Pairs(batch, seqQ, seqK); got != want {
			t.Fatalf("%+v of %d batches, %d rows, %d keys: %d pairs, want %d", v, batch, seqQ, seqK, got, want)
		}
	}
}
