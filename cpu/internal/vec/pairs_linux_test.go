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
	"strconv"
	"strings"
	"testing"
)

// TestEncodings compares the instructions that the generator writes as bytes with the text of a disassembler.
func TestEncodings(t *testing.T) {
	if _, err := exec.LookPath("objdump"); err != nil {
		t.Skip("needs objdump")
	}
	source, err := os.ReadFile("vec_amd64.s")
	if err != nil {
		t.Fatal(err)
	}
	var code []byte
	var want []string
	for _, m := range regexp.MustCompile(`// (\w+)( .*)?\n((?:\tBYTE \$0x[0-9a-f]{2}\n)+)`).FindAllSubmatch(source, -1) {
		want = append(want, string(m[1])+string(m[2]))
		for line := range strings.Lines(string(m[3])) {
			b, err := strconv.ParseUint(strings.TrimSpace(line)[len("BYTE $"):], 0, 8)
			if err != nil {
				t.Fatal(err)
			}
			code = append(code, byte(b))
		}
	}
	file := filepath.Join(t.TempDir(), "code")
	if err := os.WriteFile(file, code, 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(t.Context(), "objdump", "-D", "-bbinary", "-mi386:x86-64", "-Mintel", "-w", "--no-show-raw-insn", file).Output()
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, m := range regexp.MustCompile(`(?m)^ +[0-9a-f]+:\t(.*?) *$`).FindAllStringSubmatch(string(out), -1) {
		got = append(got, regexp.MustCompile(` +`).ReplaceAllString(m[1], " "))
	}
	if g, w := strings.Join(got, "\n"), strings.Join(want, "\n"); g != w || len(want) < 20 {
		t.Errorf("the disassembler reads\n%s\nthe comments have\n%s", g, w)
	}
}

// pairTables returns the tables with kernels for pairs of bf16; without any it skips the test.
func pairTables(t testing.TB) (list []*Kernels) {
	for _, k := range append([]*Kernels{Tiers()[0]}, Tiers()[0].narrow...) {
		if k.PairUnit() != "" {
			list = append(list, k)
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

// TestProduct compares Product with sums in float64, between elements that must not change.
func TestProduct(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for _, k := range pairTables(t) {
		for groups := 1; groups <= 9; groups += 2 {
			for steps := 1; steps <= 5; steps += 2 {
				rows, cols, n := 16*groups, k.Width, PairStep*steps
				lda, ldb, ldc := n+8, cols+4, cols+2
				a, ones, b, c := bf16s(rng, rows*lda), bf16s(rng, n*cols), make([]uint32, n/2*ldb), make([]float32, rows*ldc)
				for i, x := range ones {
					b[i/2/cols*ldb+i/2%cols] |= uint32(x) << (16 * (i % 2))
				}
				for i := range c {
					c[i] = 7
				}
				k.Product(c, ldc, a, lda, b, ldb, groups, steps, cols)
				for i, got := range c {
					row, col := i/ldc, i%ldc
					if col >= cols {
						if got != 7 {
							t.Fatalf("element %d of row %d after the product changed to %v", col, row, got)
						}
						continue
					}
					sum, size := 0.0, 0.0
					for j := range n {
						x := float64(BF16ToF32(a[row*lda+j])) * float64(BF16ToF32(uint16(b[j/2*ldb+col]>>(16*(j%2)))))
						sum, size = sum+x, size+math.Abs(x)
					}
					if bound := size * float64(n) * 0x1p-24; !(math.Abs(float64(got)-sum) <= bound) {
						t.Fatalf("width %d, %d groups, %d steps: c[%d][%d] is %v, want %v within %v", cols, groups, steps, row, col, got, sum, bound)
					}
				}
			}
		}
	}
}

// TestProductKeepsBits shows that a column has the same bits in a product of other shape, and
// the transposed product has them, too.
func TestProductKeepsBits(t *testing.T) {
	k, rng := pairTables(t)[0], rand.New(rand.NewPCG(3, 4))
	const steps, n = 3, 3 * PairStep
	a, columns := bf16s(rng, 64*n), bf16s(rng, 64*n)
	pairs := func(rows []uint16) []uint32 { // [n/2, 64] from rows [64, n]
		b := make([]uint32, n/2*64)
		for i := range 64 / 16 {
			k.Turn(b[16*i:], 64, rows[16*i*n:], n, n/2)
		}
		return b
	}
	c, other := make([]float32, 64*64), make([]float32, 64*64)
	k.Product(c, 64, a, n, pairs(columns), 64, 4, steps, 64)
	k.Product(other, 64, columns, n, pairs(a), 64, 4, steps, 64)
	one := make([]float32, 16*16)
	k.Product(one, 16, a[16*n:], n, pairs(columns)[16:], 64, 1, steps, 16)
	for i := range 64 {
		for j := range 64 {
			if c[i*64+j] != other[j*64+i] {
				t.Fatalf("element %d, %d is %v, transposed it is %v", i, j, c[i*64+j], other[j*64+i])
			}
		}
	}
	for i, x := range one {
		if y := c[(16+i/16)*64+16+i%16]; x != y {
			t.Fatalf("element %d is %v, alone it is %v", i, y, x)
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
		got := BF16ToF32(uint16(pairs[i/48/2*48+i%48] >> (16 * (i / 48 % 2))))
		want := BF16ToF32(uint16((uint64(math.Float32bits(x)) + 0x7fff + uint64(math.Float32bits(x)>>16&1)) >> 16))
		if got != want && (x == x || got == got) {
			t.Errorf("RoundPairs: %v becomes %v, want %v", x, got, want)
		}
	}
}

func BenchmarkPairs(b *testing.B) {
	k, rng := pairTables(b)[0], rand.New(rand.NewPCG(7, 8))
	for _, d := range []int{64, 128} {
		a, q, c := bf16s(rng, 128*d), make([]uint32, d/2*64), make([]float32, 128*64)
		v := make([]uint16, 128*d)
		b.Run(fmt.Sprintf("scores/D=%d", d), func(b *testing.B) {
			for b.Loop() {
				k.Product(c, 64, a, d, q, 64, 8, d/32, 64)
			}
			b.ReportMetric(2*128*64*float64(d)*float64(b.N)/b.Elapsed().Seconds()/1e9, "GFLOP/s")
		})
		b.Run(fmt.Sprintf("values/D=%d", d), func(b *testing.B) {
			p := make([]uint32, 64*64)
			for b.Loop() {
				k.Product(c, 64, v, 128, p, 64, d/16, 4, 64)
			}
			b.ReportMetric(2*128*64*float64(d)*float64(b.N)/b.Elapsed().Seconds()/1e9, "GFLOP/s")
		})
		b.Run(fmt.Sprintf("turnPairs/D=%d", d), func(b *testing.B) {
			for b.Loop() {
				for g := range 4 {
					k.TurnPairs(v[32*g:], 128, a[32*g*d:], d, d)
				}
			}
		})
	}
	s, p := make([]float32, 128*64), make([]uint32, 64*64)
	b.Run("roundPairs", func(b *testing.B) {
		for b.Loop() {
			k.RoundPairs(p, s, 128, 64)
		}
	})
	b.Run("weights", func(b *testing.B) {
		m, mx, l, alpha := make([]float32, 64), make([]float32, 64), make([]float32, 64), make([]float32, 64)
		for b.Loop() {
			k.Weights(s, 32, m, mx, l, alpha)
		}
	})
}
