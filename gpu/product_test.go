package gpu

import (
	"fmt"
	"math"
	"testing"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/queue"
	"github.com/seed90331342/attn/shaders"
)

// TestProductTilesGiveTheSameBits compares products on both tiles, bit for bit: loops as written, unrolled over
// registers and fully unrolled, loading one element or four, and in chunks. The reference is S, which passes the suite:
// a sum by fma in ascending order, without the NaN and Inf that weights of exactly 0 hide.
func TestProductTilesGiveTheSameBits(t *testing.T) {
	as := func(v productTile, expand shaders.Expand, scalar bool) productTile {
		v.kernel.Expand, v.scalar = expand, scalar
		return v
	}
	f32 := backend.F32
	for _, c := range []struct {
		productCase
		short bool // with -short too
		wide  bool // there are fours to load
		tiles []productTile
	}{
		{productCase{name: "scores and a bias", m: 150, x: 80, n: 140, a: f32, w: f32, keys: true, bias: true}, true, true, []productTile{
			as(productL, shaders.Full, false), as(productM, shaders.Full, false)}},
		{productCase{name: "values", m: 150, x: 140, n: 72, a: f32, w: f32, skip: true}, true, true, []productTile{
			as(productL, shaders.Registers, false), as(productM, shaders.Full, false), as(productS, shaders.Registers, true)}},
		{productCase{name: "values of 16 bits", m: 140, x: 76, n: 68, a: f32, w: backend.BF16, skip: true}, false, true, []productTile{
			as(productL, shaders.Full, false)}},
		{productCase{name: "16 bits and nothing even", m: 131, x: 45, n: 67, a: f32, w: backend.F16, keys: true, skip: true}, false, false, []productTile{
			as(productL, shaders.Registers, false), as(productM, shaders.Full, false), as(productS, shaders.Full, false)}},
	} {
		if testing.Short() && !c.short {
			continue
		}
		b, small := open(t, Options{}), open(t, Options{MaxWork: 1e5}) // which leaves chunks of 32
		defer b.Close()
		scalar := as(productS, shaders.Registers, true)
		want := c.run(t, b, &scalar)
		if worst := c.worst(want, 1e-4); worst > 1 {
			t.Fatalf("%s: %.3g of the bound", c.name, worst)
		}
		for _, v := range c.tiles {
			for name, b := range map[string]*Backend{"whole": b, "chunks": small} {
				t.Run(fmt.Sprintf("%s %s unrolled to %d %s", c.name, v.name, v.kernel.Expand, name), func(t *testing.T) {
					for i, got := range c.run(t, b, &v) {
						if math.Float32bits(got) != math.Float32bits(want[i]) && (got == got || want[i] == want[i]) { // NaN are equal
							t.Fatalf("y[%d] is %v, S says %v", i, got, want[i])
						}
					}
				})
			}
			k := v.kernel
			k.W, k.Along, k.Skip = shaders.Type(c.w), c.keys, c.skip
			if c.wide && !v.scalar {
				k.AVec, k.WVec, k.OVec, k.Full = true, true, true, c.x%(4*productQD) == 0
			}
			if !b.dev.Pipelines.Compiled(b.dev.Pipelines.Of(k)) {
				t.Errorf("%s: %s was not run", c.name, shaders.Key(k))
			}
		}
	}
}

// perWord returns the multiply-adds of a thread for each word that it reads from workgroup
// memory. With skip it reads one more word for each thread along columns and stage.
func (v productTile) perWord(skip bool) float64 {
	rows, columns, depth := v.kernel.Rows, 4*v.kernel.CV, 4*productQD
	read := (rows + columns) * depth
	if skip {
		read += productLanes
	}
	return float64(rows*columns*depth) / float64(read)
}

// TestProductMultiplyAddsPerWord checks that L does about 4 multiply-adds for each word that
// it reads from workgroup memory, M two thirds of that and S half.
func TestProductMultiplyAddsPerWord(t *testing.T) {
	for _, c := range []struct {
		v     productTile
		skip  bool
		least float64
	}{{productL, false, 4}, {productL, true, 3.87}, {productM, false, 2.66}, {productM, true, 2.55}, {productS, false, 2}, {productS, true, 1.88}} {
		if r := c.v.perWord(c.skip); r < c.least || r > c.least+0.02 {
			t.Errorf("%s, skip %v: %.3g multiply-adds a word, should be %.3g", c.v.name, c.skip, r, c.least)
		}
	}
}

// TestProductTilesAreWhole checks that threads share staged elements evenly, and that rows fit their memory.
func TestProductTilesAreWhole(t *testing.T) {
	for _, v := range productTiles {
		m := v.kernel
		m.Skip = true
		k := shaders.Describe(m)
		of := func(name string) int { return int(k.Constants[name]) }
		if of("AN")*productLanes != m.Rows*productQD || of("WN")*m.TY != 4*productQD*m.CV || m.Rows%of("ER") != 0 ||
			of("ER")*productLanes > of("SA") || of("SB") < 4*productQD*m.CV || k.WorkgroupMemory > 16<<10 || v.threads() > 256 {
			t.Errorf("%+v: %v", v, k.Constants)
		}
	}
}

func TestChooseProduct(t *testing.T) {
	all := gputypes.Limits{MaxComputeInvocationsPerWorkgroup: 256, MaxComputeWorkgroupStorageSize: 16 << 10, MaxStorageBufferBindingSize: 128 << 20}
	few, small := all, all
	few.MaxComputeInvocationsPerWorkgroup = 64
	small.MaxStorageBufferBindingSize = 24 << 10
	smaller := all
	smaller.MaxStorageBufferBindingSize = 6 << 10
	for _, c := range []struct {
		what           string
		products, m, n int
		limits         gputypes.Limits
		want           string
	}{
		{"many tiles", 16, 4096, 4096, all, "L"},
		{"few tiles", 1, 512, 512, all, "S"},
		{"few tiles of L", 1, 2048, 1024, all, "M"},
		{"many single rows", 10000, 1, 4096, all, "M"},
		{"half a tile of L", 1000, 64, 256, all, "M"},
		{"half a tile of M", 16, 8192, 32, all, "S"},
		{"values of one column", 16, 8192, 64, all, "L"},
		{"few threads", 16, 4096, 4096, few, "M"},
		{"small bindings", 16, 4096, 4096, small, "M"},
		{"smaller bindings", 16, 4096, 4096, smaller, "S"},
	} {
		b := &Backend{dev: &queue.Device{Limits: c.limits}, info: backend.Info{Type: backend.Discrete}}
		if v := b.chooseProduct(productTiles, c.products, c.m, c.n); v.name != c.want || v.scalar {
			t.Errorf("%s: %+v, should be %s", c.what, v, c.want)
		}
	}
}
