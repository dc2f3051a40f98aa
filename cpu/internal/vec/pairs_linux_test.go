//go:build amd64

package vec

import (
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// TestEncodings compares the instructions that the generator writes as bytes with the text of a disassembler.
func TestEncodings(t *testing.T) {
	if _, err := exec.LookPath("objdump"); err != nil {
		t.Skip("needs objdump")
	}
	source := must.Get(os.ReadFile("vec_amd64.s"))(t)
	var code []byte
	var want []string
	for _, m := range regexp.MustCompile(`// (\w+)( .*)?\n((?:\tBYTE \$0x[0-9a-f]{2}\n)+)`).FindAllSubmatch(source, -1) {
		want = append(want, string(m[1])+string(m[2]))
		for line := range strings.Lines(string(m[3])) {
			b := must.Get(strconv.ParseUint(strings.TrimSpace(line)[len("BYTE $"):], 0, 8))(t)
			code = append(code, byte(b))
		}
	}
	file := filepath.Join(t.TempDir(), "code")
	must.Do(t, os.WriteFile(file, code, 0o600))
	out := must.Get(exec.CommandContext(t.Context(), "objdump", "-D", "-bbinary", "-mi386:x86-64", "-Mintel", "-w", "--no-show-raw-insn", file).Output())(t)
	var got []string
	for _, m := range regexp.MustCompile(`(?m)^ +[0-9a-f]+:\t(.*?) *$`).FindAllStringSubmatch(string(out), -1) {
		got = append(got, regexp.MustCompile(` +`).ReplaceAllString(m[1], " "))
	}
	if g, w := strings.Join(got, "\n"), strings.Join(want, "\n"); g != w || len(want) < 20 {
		t.Errorf("the disassembler reads\n%s\nthe comments have\n%s", g, w)
	}
}

// pairTables returns the tables with kernels for pairs of bf16, for each unit of the machine;
// without any it skips the test.
func pairTables(t testing.TB) (list []*Kernels) {
	first := Tiers()[0]
	for _, k := range []*Kernels{first, first.WithoutTiles()} {
		if k.PairUnit() != "" && (len(list) == 0 || k.PairUnit() != list[0].PairUnit()) {
			list = append(list, k)
			for _, narrow := range k.narrow {
				if narrow.PairUnit() != "" {
					list = append(list, narrow)
				}
			}
		}
	}
	if list == nil {
		t.Skip("this machine has no unit for pairs of bf16")
	}
	return list
}

// bf16s returns n random numbers of bf16.
func bf16s(rng *rand.Rand, n int) []uint16 {
	s := make([]uint16, n)
	for i := range s {
		s[i] = uint16(math.Float32bits(float32(rng.NormFloat64())) >> 16)
	}
	return s
}

// TestPairProducts compares scores and outputs with sums in float64, between elements that must
// not change, and the scores of a row with its scores in a tile of the first table.
func TestPairProducts(t *testing.T) {
	const edge, scale = 3, 0.7
	first := map[string]float32{}
	for _, k := range pairTables(t) {
		w, lanes := k.Width, make([]float32, k.Width)
		for _, keys := range []int{1, 15, 16, 33, 64, 80, 128} {
			for _, d := range []int{32, 96, 160} {
				rng := rand.New(rand.NewPCG(uint64(keys), uint64(d)))
				rows, ld := (keys+15)/16*16, d+8
				x, column := bf16s(rng, rows*ld), bf16s(rng, d) // all query rows are multiples of this one
				y := make([]uint32, d/2*w)
				for i := range y {
					power := uint32(0x0080 * (i % w % 4)) // of 2
					y[i] = uint32(column[i/w*2])&0x7fff + power | (uint32(column[i/w*2+1])&0x7fff+power)<<16
				}
				sum := func(row, lane int) (sum, size float64) {
					for c := range d {
						x, y := float64(BF16.Decode(x[row*ld+c])), float64(BF16.Decode(uint16(y[c/2*w+lane]>>(16*(c%2)))))
						sum, size = sum+x*y, size+math.Abs(x*y)
					}
					return sum, size * float64(d) * 0x1p-24
				}
				s, mx := make([]float32, rows*w+edge), slices.Repeat([]float32{-1}, w)
				k.PairScores(s[:rows*w], x, ld, keys, y, d, scale, mx)
				o, sums := slices.Repeat([]float32{7}, rows*w+edge), make([]float32, 1024)
				for i := range lanes {
					lanes[i] = float32(i%5) / 4
				}
				k.PairValues(o[:rows*w], x, ld, y, rows, d, lanes, sums)
				most := slices.Repeat([]float32{-1}, w)
				for row := range rows {
					for lane := range w {
						want, bound := sum(row, lane)
						got := s[row*w+lane]
						if row < keys {
							most[lane] = max(most[lane], got)
							if !(math.Abs(float64(got)-scale*want) <= 2*bound) {
								t.Fatalf("%s, width %d, %d keys, d %d: score %d of lane %d is %v, want %v within %v", k.PairUnit(), w, keys, d, row, lane, got, scale*want, 2*bound)
							}
							name := fmt.Sprint(k.PairUnit(), keys, d, row, lane)
							if _, found := first[name]; !found {
								first[name] = got
							} else if first[name] != got {
								t.Fatalf("%s, width %d, %d keys, d %d: score %d of lane %d is %v, in other tiles %v", k.PairUnit(), w, keys, d, row, lane, got, first[name])
							}
						}
						if want, got := want+7*float64(lanes[lane]), o[row*w+lane]; !(math.Abs(float64(got)-want) <= 2*bound+0x1p-20) {
							t.Fatalf("%s, width %d, %d rows, n %d: output %d of lane %d is %v, want %v within %v", k.PairUnit(), w, rows, d, row, lane, got, want, 2*bound)
						}
					}
				}
				if !slices.Equal(mx, most) {
					t.Fatalf("%s, width %d, %d keys, d %d: maxima %v, want %v", k.PairUnit(), w, keys, d, mx, most)
				}
				for i := range edge {
					if s[rows*w+i] != 0 || o[rows*w+i] != 7 {
						t.Fatalf("%s, width %d, %d keys, d %d: elements after the last one changed", k.PairUnit(), w, keys, d)
					}
				}
			}
		}
	}
}

// TestPairs compares the kernels that move and round pairs with plain Go.
func TestPairs(t *testing.T) {
	k, rng := pairTables(t)[0], rand.New(rand.NewPCG(5, 6))
	const lds, ldd = 80, 40
	src := bf16s(rng, 32*lds)
	turned, columns := make([]uint32, 32*ldd), make([]uint16, 64*ldd)
	k.Turn(turned, ldd, src, lds, 32)
	k.TurnPairs(columns, ldd, src, lds, 64)
	for r := range 16 {
		for c := range 32 {
			if got, want := turned[c*ldd+r], uint32(src[r*lds+2*c])|uint32(src[r*lds+2*c+1])<<16; got != want {
				t.Fatalf("Turn: pair %d, %d is %#x, want %#x", c, r, got, want)
			}
		}
	}
	for r := range 32 {
		for c := range 64 {
			if got, want := columns[c*ldd+r], src[r*lds+c]; got != want {
				t.Fatalf("TurnPairs: element %d, %d is %#x, want %#x", c, r, got, want)
			}
		}
	}
	weights := make([]float32, 8*48)
	for i := range weights {
		weights[i] = rng.Float32()
	}
	copy(weights, []float32{0, 1, 1 + 0x1p-8, 1 + 0x3p-8, 1 + 0x1.01p-8, float32(math.NaN()), 0x1p-126, float32(math.Inf(1))})
	pairs := make([]uint32, 4*48)
	k.RoundPairs(pairs, weights, 8, 48)
	for i, x := range weights {
		got := BF16.Decode(uint16(pairs[i/48/2*48+i%48] >> (16 * (i / 48 % 2))))
		want := BF16.Decode(uint16((uint64(math.Float32bits(x)) + 0x7fff + uint64(math.Float32bits(x)>>16&1)) >> 16))
		if got != want && (x == x || got == got) {
			t.Errorf("RoundPairs: %v becomes %v, want %v", x, got, want)
		}
	}
}
