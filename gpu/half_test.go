package gpu

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"regexp"
	"strings"
	"testing"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
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

// TestEveryHalfComesBack reads all 65,536 values of both 16-bit types on the device and stores them again: the bits are
// equal, except for the payload of NaN and the sign of zero, which a product's sum loses.
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

// TestOpenBySelector opens by number and by name. The error of a number that is too large names the last adapter.
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
		must.Pass(t, fmt.Sprintf("%s: close", name), b.Close())
	}
	for name, text := range map[string]string{"gpu:99": "gpu:99: there is no such adapter, the last one is gpu:", "gpu:-1": "", "gpu:no such adapter": ""} {
		must.Fail(t, name, must.Err(backend.Open(name)), backend.ErrNoDevice, text)
	}
	over := gputypes.Limits{MaxComputeWorkgroupsPerDimension: math.MaxUint32 - 1} // all ones asks wgpu-native for its default
	must.Fail(t, "limits over the adapter's", must.Err(Open("", Options{Limits: over})), backend.ErrUnsupported)
}

// fused returns x·y + 8.5 rounded once, for products of at most 8.5. The software driver rounds both operations of fma.
const fused = `
fn fused(x: f32, y: f32) -> f32 {
	let x1 = bitcast<f32>(bitcast<u32>(x) & 0xfffff000u); let y1 = bitcast<f32>(bitcast<u32>(y) & 0xfffff000u);
	let product = x * y;
	let rest = (x1 * y1 - product + x1 * (y - y1) + (x - x1) * y1) + (x - x1) * (y - y1);
	return product + 8.5 + (product - (product + 8.5 - 8.5) + rest);
}`

// TestQuantisedAsOnHost quantises 20,000 blocks with drawn scales, whose other elements are next to the middle between
// two integers: every integer is the host's, also on devices whose quotients are 2 ulp off and that fuse products and sums.
func TestQuantisedAsOnHost(t *testing.T) {
	quotient, sum := regexp.MustCompile(`\b(\d+\.0) / `), regexp.MustCompile(`\b(\w+) \* (\w+) \+ 8\.5`)
	rng, data := rand.New(rand.NewPCG(1, 2)), make([]float32, 20000*32)
	shape := backend.Shape{1, 1, len(data) / 32, 32}
	for _, off := range []string{"1.0", "1.00000011920928955", "0.99999988079071045"} {
		b, found := open(t, Options{}), false
		b, err := newBackend(&mutated{Device: b.dev.Port, kernel: "convert ", edit: func(wgsl string) string {
			found = found || quotient.MatchString(wgsl)
			return sum.ReplaceAllString(quotient.ReplaceAllString(wgsl, "$1 * "+off+" / "), "fused($1, $2)") + fused
		}}, b.info, Options{})
		check(t, err)
		for n, dtype := range []backend.DType{backend.Q8, backend.Q4} {
			steps := []int{127, 8}[n]
			for i := range data {
				if data[i] = float32(rng.NormFloat64()) * float32(1+i/32%5000); i%32 > 0 {
					data[i] = float32(float64(data[i/32*32]) * (float64(rng.IntN(2*steps)-steps) + 0.5) / float64(steps))
				}
			}
			got := copied(t, b, dtype, filled(t, b, backend.F32, data, shape))
			sameRow(t, dtype.String()+", quotients times "+off, numbers(t, b, got), numbers(t, b, filled(t, b, dtype, data, shape)))
		}
		if !found {
			t.Error("no quotient was found")
		}
	}
}
