package gpu

import (
	"context"
	"encoding/binary"
	"math"
	"strings"
	"testing"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/internal/must"
)

// through multiplies each value by a weight of 1, which decodes it from one type and stores
// it as another: bits in, bits out.
func through(t *testing.T, b *Backend, in []uint32, from, to backend.DType) []uint32 {
	t.Helper()
	shape := backend.Shape{1, 1, len(in), 1}
	memory := func(d backend.DType) (h backend.Tensor, data []byte) {
		h = must.Get(backend.AllocHost(d, shape))(t)
		data = must.Get(backend.HostBytes(h))(t)
		return h, data
	}
	h, data := memory(from)
	for i, x := range in {
		if from == backend.F32 {
			binary.LittleEndian.PutUint32(data[4*i:], x)
		} else {
			binary.LittleEndian.PutUint16(data[2*i:], uint16(x))
		}
	}
	x := upload(t, b, h)
	w := upload(t, b, host(t, backend.Shape{1, 1, 1, 1}, func(int) float32 { return 1 }))
	y := alloc(t, b, to, shape)
	check(t, b.Project(context.Background(), y, x, w, backend.Tensor{}))
	h, data = memory(to)
	check(t, b.Download(context.Background(), h, y))
	out := make([]uint32, len(in))
	for i := range out {
		if to == backend.F32 {
			out[i] = binary.LittleEndian.Uint32(data[4*i:])
		} else {
			out[i] = uint32(binary.LittleEndian.Uint16(data[2*i:]))
		}
	}
	return out
}

// TestEveryHalfComesBack reads all 65,536 values of both 16-bit types on the device and
// stores them again: the bits are equal, except for the payload of NaN and the sign of
// zero, which a product's sum loses.
func TestEveryHalfComesBack(t *testing.T) {
	b := open(t, Options{})
	all := make([]uint32, 1<<16)
	for i := range all {
		all[i] = uint32(i)
	}
	for _, d := range []backend.DType{backend.F16, backend.BF16} {
		inf := map[backend.DType]uint32{backend.F16: 0x7c00, backend.BF16: 0x7f80}[d]
		least := map[backend.DType]uint32{backend.F16: 1, backend.BF16: 0x80}[d] // f32 subnormals may be flushed
		for i, got := range through(t, b, all, d, d) {
			want := uint32(i)
			mag := want & 0x7fff
			switch {
			case mag > inf && got&0x7fff > inf, mag < least && got&0x7fff <= mag, got == want:
			default:
				t.Fatalf("%v %#04x came back as %#04x", d, want, got)
			}
		}
	}
}

// TestRoundingToHalf stores float32 values near every kind of edge and compares them with
// rounding to nearest, ties to even.
func TestRoundingToHalf(t *testing.T) {
	b := open(t, Options{})
	var in []uint32
	for _, exp := range []int{-30, -26, -25, -24, -23, -16, -15, -14, -13, -1, 0, 1, 14, 15, 16, 100} {
		for _, m := range []uint32{0, 1, 0xfff, 0x1000, 0x1001, 0x1fff, 0x2000, 0x3000, 0x3001, 0x7fff, 0x8000, 0x8001, 0x17fff, 0x18000, 0x3fffff, 0x400000, 0x400001, 0x7fdfff, 0x7fe000, 0x7fefff, 0x7ff000, 0x7fffff} {
			bits := uint32(exp+127)<<23 | m
			in = append(in, bits, bits|1<<31)
		}
	}
	in = append(in, 0x7f800000, 0xff800000, 0x7f7fffff)
	for _, d := range []backend.DType{backend.F16, backend.BF16} {
		stored := through(t, b, in, backend.F32, d)
		back := through(t, b, stored, d, backend.F32)
		for i, x := range in {
			want := d.Round(math.Float32frombits(x))
			if got := math.Float32frombits(back[i]); got != want {
				t.Errorf("%v of %v (%#x) is %v, should be %v", d, math.Float32frombits(x), x, got, want)
			}
		}
	}
}

// TestOpenBySelector opens by number and by name.
func TestOpenBySelector(t *testing.T) {
	open(t, Options{}).Close()
	infos, err := Driver{}.Devices()
	if err != nil || len(infos) == 0 {
		t.Fatalf("devices: %v, %v", infos, err)
	}
	word := strings.ToUpper(strings.Fields(infos[0].Device)[0])
	for _, name := range []string{"gpu", infos[0].Name, "gpu:" + word} {
		b, err := backend.Open(name)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if got := b.Info(); name != "gpu" && got.Name != infos[0].Name || got.Provider != Provider || len(got.Limits) == 0 {
			t.Errorf("%s opened %+v", name, got)
		}
		if err := b.Close(); err != nil {
			t.Errorf("%s: close: %v", name, err)
		}
	}
	for _, name := range []string{"gpu:99", "gpu:-1", "gpu:no such adapter"} {
		must.Fail(t, name, must.Err(backend.Open(name)), backend.ErrNoDevice)
	}
	over := gputypes.Limits{MaxComputeWorkgroupsPerDimension: math.MaxUint32 - 1} // all ones asks wgpu-native for its default
	must.Fail(t, "limits over the adapter's", must.Err(Open("", Options{Limits: over})), backend.ErrUnsupported)
}
