package tune

import (
	"fmt"
	"testing"

	"github.com/gogpu/naga"
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/shaders"
)

// perWord returns the multiply-adds of a thread for each word that it reads from workgroup memory, with the largest
// heads of its class. An SM of 128 multiply-adds and 32 words a clock needs 4 to be bound by the multiply-adds.
func (v Variant) perWord() float64 {
	rows, columns, turns := 4*v.tiles.RV, 4*v.tiles.CV, v.turns(v.Width)
	scores, values := rows*v.tiles.KT*v.Width, rows*columns*turns*v.Keys
	read := (rows+v.tiles.KT)*v.Width + (rows+columns)*turns*v.Keys
	return float64(scores+values) / float64(read)
}

// L must do 4 multiply-adds for each word, or reads bound it. Heads of 256 leave no
// registers for tiles of 8x8 in both products.
func TestMultiplyAddsPerWord(t *testing.T) {
	for c, vs := range variants {
		for _, v := range vs {
			least := map[string]float64{"L": 4, "L32": 4, "L48": 4, "M": 8. / 3, "S": 8. / 3}[v.Name]
			if c.Width == 256 {
				least = map[string]float64{"L": 3.2, "L32": 3.55, "M": 2.2, "S": 2.2}[v.Name]
			}
			if r := v.perWord(); r < least-1e-9 {
				t.Errorf("%s of class %d: %.3g multiply-adds a word, should be %.3g", v.Name, c.Width, r, least)
			}
		}
	}
}

// Every variant is consistent: the parts of a stage fit into its arrays, and a workgroup
// into its memory and 256 threads. Threads come in pairs along ty.
func TestVariants(t *testing.T) {
	memory := map[string]int{"L": 16 << 10, "D": 16 << 10, "M": 16 << 10, "S": 16 << 10, "L32": 32 << 10, "L48": 48 << 10}
	for c, vs := range variants {
		if c.Keys%c.Lanes != 0 || c.Split%c.Keys != 0 || c.Split-256 > c.Keys/2 || 256-c.Split > c.Keys/2 {
			t.Errorf("class %d: tiles of %d keys, %d lanes, splits of %d", c.Width, c.Keys, c.Lanes, c.Split)
		}
		for _, v := range vs {
			if v.tiles.TY%2 != 0 || v.tiles.KT%v.tiles.JJ != 0 || (4*v.tiles.RV)%v.tiles.ER != 0 || v.tiles.TX*v.tiles.TY > 256 || v.memory() > memory[v.Name] {
				t.Errorf("class %d: %+v: %d bytes, %d threads", c.Width, v, v.memory(), v.tiles.TX*v.tiles.TY)
			}
			if v.turns(c.Width)*v.tiles.CV*4*v.Lanes != max(c.Width, 4*v.Lanes*v.tiles.CV) {
				t.Errorf("class %d: %s: %d turns of %d columns", c.Width, v.Name, v.turns(c.Width), v.tiles.CV*4*v.Lanes)
			}
		}
	}
}

// Only kernels for rows that fill all stages omit the guards at the ends of rows.
func TestFull(t *testing.T) {
	for _, c := range []struct {
		variant       string
		dim, valueDim int
		partial, wide bool
		want          bool
	}{
		{"L", 64, 64, false, true, true},
		{"L", 64, 64, true, true, false},
		{"L", 64, 64, false, false, false},
		{"L", 64, 32, false, true, false}, // half a turn of columns
		{"L", 80, 80, false, true, true},
		{"L32", 80, 80, false, true, false}, // two stages and a half
		{"L32", 96, 96, false, true, true},
		{"L32", 256, 256, false, true, true},
	} {
		s := Shape{Tiling: TilingOf(c.dim, c.valueDim), ValueDim: c.valueDim, Partial: c.partial, Wide: c.wide}
		for _, v := range variants[s.Tiling] {
			if v.Name == c.variant && (s.Kernel(v).Full != c.want || s.Kernel(v.Quick()).Full) {
				t.Errorf("%+v: full is %v, on software drivers %v", c, s.Kernel(v).Full, s.Kernel(v.Quick()).Full)
			}
		}
	}
}

// Kernels for GPUs know the options of a call, and those for software drivers look at flags.
func TestOptionConstants(t *testing.T) {
	names := []string{"PAIRED", "MASKS", "BLOCKED", "BIASES", "SLOPED", "CAPPED", "DROPS"}
	for _, c := range []struct {
		pairs Pairs
		want  string
	}{
		{Pairs{}, "[0 0 0 0 0 0 0]"},
		{Pairs{Mask: true}, "[1 1 0 0 0 0 0]"},
		{Pairs{Blocks: true, Bias: true}, "[1 0 1 1 0 0 0]"},
		{Pairs{Bias: true, Slopes: true}, "[1 0 0 2 1 0 0]"},
		{Pairs{OtherBias: true}, "[1 0 0 2 0 0 0]"},
		{Pairs{Softcap: true, Dropout: true}, "[1 0 0 0 0 1 1]"},
	} {
		s := Shape{Tiling: TilingOf(64, 64), ValueDim: 64, Pairs: c.pairs}
		values := func(v Variant) string {
			var list []uint32
			for _, name := range names {
				list = append(list, shaders.Describe(s.Kernel(v)).Constants[name])
			}
			return fmt.Sprint(list)
		}
		quick := "[1 2 2 2 2 2 2]"
		if c.pairs == (Pairs{}) {
			quick = c.want
		}
		v := variants[s.Tiling][0]
		if got := values(v); got != c.want {
			t.Errorf("%+v: %s, should be %s", c.pairs, got, c.want)
		}
		if got := values(v.Quick()); got != quick {
			t.Errorf("%+v on software drivers: %s, should be %s", c.pairs, got, quick)
		}
	}
}

// All variants compile, with loops unrolled as for software drivers.
func TestVariantsCompile(t *testing.T) {
	for c, vs := range variants {
		for i, v := range vs {
			s := Shape{Tiling: c, ValueDim: c.Width, In: backend.F32, KV: backend.F32}
			if i%2 == 0 {
				s.Pairs = exercised
			}
			if i%2 == 1 {
				s.In, s.KV, s.Wide, s.Half = backend.F16, backend.F16, true, true
			}
			src, err := shaders.Render(s.Kernel(v.Quick()))
			if err == nil {
				_, err = naga.Compile(src)
			}
			if err != nil {
				t.Errorf("class %d: %s: %v", c.Width, v.Label(), err)
			}
		}
	}
}

// On GPUs of NVIDIA whose workgroups may have 48 KiB, heads of 97 to 128 take the variant that was the fastest there.
func TestRuleOfNVIDIA(t *testing.T) {
	for _, c := range []struct {
		d, memory, s int
		nvidia       bool
		want         string
	}{{128, 48, 4096, true, "L48"}, {128, 48, 4096, false, "L"}, {128, 16, 4096, true, "L"}, {128, 48, 1024, true, "M"}, {64, 48, 4096, true, "L"}} {
		s := Shape{Tiling: TilingOf(c.d, c.d), ValueDim: c.d, Heads: 16, SeqQ: c.s, NVIDIA: c.nvidia, Limits: Limits{Threads: 256, Memory: c.memory << 10, Binding: 128 << 20}}
		if v, why := s.Rule(); v.Name != c.want {
			t.Errorf("%+v: %q because %q", c, v.Name, why)
		}
	}
}

// The rule follows the grid and the limits. It returns a reason also when no variant fits.
func TestRule(t *testing.T) {
	all := Limits{Threads: 256, Memory: 16 << 10, Binding: 128 << 20}
	few, small := all, all
	few.Threads, small.Binding = 64, 36<<10
	for _, c := range []struct {
		name        string
		d, heads, s int
		limits      Limits
		want, quick string // on a GPU, on a software driver
	}{
		{"many rows", 64, 16, 8192, all, "L", "L"},
		{"some rows", 64, 16, 2048, all, "M", "L"},
		{"few rows", 64, 4, 512, all, "S", "L"},
		{"very few rows", 64, 4, 100, all, "S", "S"},
		{"many short heads", 64, 300, 64, all, "M", "M"},
		{"many very short heads", 64, 300, 20, all, "S", "S"},
		{"few threads", 64, 16, 8192, few, "S", "S"},
		{"too few threads", 80, 16, 8192, few, "", ""},
		{"small bindings", 64, 16, 8192, small, "S", "S"},
	} {
		for software, want := range map[bool]string{false: c.want, true: c.quick} {
			s := Shape{Tiling: TilingOf(c.d, c.d), ValueDim: c.d, Heads: c.heads, SeqQ: c.s, Limits: c.limits, Software: software}
			if v, why := s.Rule(); v.Name != want || why == "" {
				t.Errorf("%s, on a software driver %v: %q because %q, should be %q", c.name, software, v.Name, why, want)
			}
			if s.Direct = software; !software {
				continue
			}
			if v, why := s.Rule(); v.Name != "D" || why == "" {
				t.Errorf("%s, on SwiftShader: %q because %q, should be D", c.name, v.Name, why)
			}
		}
	}
}
