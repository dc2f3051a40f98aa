package kernelstest

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/backend/oracle"
	"github.com/seed90331342/attn/kernels"
)

// testProperties tests properties that need no reference.
func testProperties(t *testing.T, dev *kernels.Device) {
	dims := kernels.Dims{Batch: 3, Heads: 4, KVHeads: 2, SeqQ: 70, SeqK: 300, Dim: 24, ValueDim: 20}
	base := supported(dev, Case{Name: "property", Dims: dims, Options: kernels.Options{Causal: true, Offset: []int{200}, Softcap: 9}, Seed: 99})

	t.Run("same bits again", func(t *testing.T) {
		on := base.build().on(t, dev)
		defer on.release()
		for _, how := range []how{fused, staged} {
			first := on.mustRun(t, how)
			for range 3 {
				sameBits(t, first, on.mustRun(t, how))
			}
		}
	})

	t.Run("same row in any batch", func(t *testing.T) {
		ragged, window, decode := base, base, base // sequences of unequal lengths, each at its own lower right
		ragged.Options.KLen, ragged.Options.Offset = []int{300, 97, 170}, []int{230, 27, 100}
		window.Options = ragged.Options
		window.Options.Window = &kernels.Window{Left: 40}
		decode.SeqQ = 2
		decode.Options.KLen, decode.Options.Offset = ragged.Options.KLen, []int{298, 95, 168}
		for _, c := range []Case{base, ragged, window, decode} {
			b := c.build()
			whole := b.once(t, dev, fused)
			rows := c.Heads * c.SeqQ
			for batch := range c.Batch {
				alone := *b
				alone.Batch = 1
				alone.q, alone.k, alone.v = oneBatch(b.q, batch), oneBatch(b.k, batch), oneBatch(b.v, batch)
				if alone.Options.Offset = []int{forBatch(b.Options.Offset, batch)}; b.Options.KLen != nil {
					alone.Options.KLen = b.Options.KLen[batch : batch+1]
				}
				got := alone.once(t, dev, fused)
				n := rows * c.ValueDim
				sameBits(t, answer{o: whole.o[batch*n : (batch+1)*n], lse: whole.lse[batch*rows : (batch+1)*rows]}, got)
			}
		}
	})

	t.Run("prefill equals decode", func(t *testing.T) {
		b := base.build()
		b.Batch, b.Heads, b.KVHeads = 1, 1, 1
		b.q, b.k, b.v = oneHead(b.q), oneHead(b.k), oneHead(b.v)
		prefill := b.once(t, dev, fused)
		for _, i := range []int{0, 1, 31, 32, 63, 64, 69} {
			one := *b
			one.SeqQ = 1
			one.Options.Offset = moved(b.Options.Offset, i)
			one.q = operand{backend.Shape{1, 1, 1, b.Dim}, b.q.dtype, b.q.data[i*b.Dim : (i+1)*b.Dim]}
			decode := one.once(t, dev, fused)
			sameBits(t, answer{o: prefill.o[i*b.ValueDim : (i+1)*b.ValueDim], lse: prefill.lse[i : i+1]}, decode)
		}
	})

	t.Run("layouts give the same bits", func(t *testing.T) {
		for _, dtype := range []backend.DType{backend.F32, backend.F16, backend.BF16} {
			var first answer
			for _, layout := range []Layout{Contiguous, BSHD, Padded, Transposed} {
				c := base
				c.Layout, c.DType = layout, dtype
				got := c.build().once(t, dev, fused)
				if layout == Contiguous {
					first = got
				}
				sameBits(t, first, got)
			}
		}
	})

	t.Run("slack beyond klen", func(t *testing.T) {
		// The contents of keys beyond klen change nothing.
		clean := base
		clean.Options.KLen = []int{270, 290, 211}
		dirty := clean
		dirty.PoisonK = map[int]float32{290: float32(math.NaN()), 299: float32(math.Inf(1))}
		dirty.PoisonV = map[int]float32{290: float32(math.NaN()), 295: float32(math.Inf(-1))}
		sameBits(t, clean.build().once(t, dev, fused), dirty.build().once(t, dev, fused))
	})

	t.Run("keys in another order", func(t *testing.T) {
		c := base
		c.Options = kernels.Options{}
		b := c.build()
		first := b.once(t, dev, fused)
		perm := rand.New(rand.NewPCG(1, 2)).Perm(dims.SeqK)
		p := *b
		p.k, p.v = permuteRows(b.k, perm), permuteRows(b.v, perm)
		near(t, b, first, p.once(t, dev, fused), 0)
	})

	t.Run("a constant added to all scores", func(t *testing.T) {
		needsAll(t, dev, "bias")
		b := base.build()
		first := b.once(t, dev, fused)
		const constant = 3.5
		c := *b
		c.BiasShape = backend.Shape{1, 1, 1, 1}
		c.bias = operand{c.BiasShape, backend.F32, []float32{constant}}
		near(t, &c, first, c.once(t, dev, fused), constant)
	})

	t.Run("the largest biases hide nothing", func(t *testing.T) {
		needsAll(t, dev, "bias")
		// They absorb any score, so that all scores are equal, as with a scale of 0.
		equal := base
		equal.Options.Scale, equal.Options.Softcap = new(float64), 0
		want := equal.build().once(t, dev, fused)
		for _, shape := range []backend.Shape{{1, 1, 1, 1}, {1, dims.Heads, dims.SeqQ, dims.SeqK}} {
			for _, bias := range []float32{-math.MaxFloat32, -backend.MaxBias, math.MaxFloat32} {
				c := *base.build()
				c.Options.Softcap = 0
				c.BiasShape = shape
				c.bias = operand{shape, backend.F32, slices.Repeat([]float32{bias}, shape.Elements())}
				got := c.once(t, dev, fused)
				sameBits(t, answer{o: want.o}, answer{o: got.o})
				for i, lse := range got.lse {
					if exact := max(-backend.MaxBias, min(float64(bias), backend.MaxBias)); !(math.Abs(float64(lse)-exact) <= 4*0x1p-23*math.Abs(exact)) {
						t.Fatalf("LSE of row %d is %v with biases of %v", i, lse, bias)
					}
				}
			}
		}
	})

	t.Run("visible values come out with a weight of 0", func(t *testing.T) {
		for _, rows := range []int{1, dims.SeqQ} {
			for _, keys := range []int{2, dims.SeqK} {
				for _, v := range []float64{math.NaN(), math.Inf(1), math.Inf(-1)} {
					c := Case{Name: "weight of 0", Dims: kernels.Dims{Batch: 1, Heads: 1, KVHeads: 1, SeqQ: rows, SeqK: keys, Dim: 1, ValueDim: 1}, Options: kernels.Options{Scale: new(1.0)}}
					b := c.build()
					b.q.data, b.k.data = slices.Repeat([]float32{1}, rows), make([]float32, keys)
					b.k.data[0], b.v.data[0] = -1000, float32(v)
					on := b.on(t, dev)
					defer on.release()
					want, got := on.mustRun(t, fused), on.mustRun(t, weighed)
					if err := b.compare(got); err != nil {
						t.Error(err)
					}
					want.weights = on.mustRun(t, staged).weights
					sameBits(t, want, got)
					if got.o[0] == got.o[0] || got.weights[0] != 0 {
						t.Errorf("%d rows, %d keys: the output is %v for a value of %v with a weight of %v", rows, keys, got.o[0], v, got.weights[0])
					}
				}
			}
		}
	})

	t.Run("values of 1 give 1", func(t *testing.T) {
		b := base.build()
		for i := range b.v.data {
			b.v.data[i] = 1
		}
		// The errors of the weights cancel. Those of the two sums over the keys and of
		// the division remain (package oracle).
		bound := 0x1p-24 * (oracle.Lambda*math.Sqrt(float64(dims.SeqK))*17/4 + 4)
		for i, x := range b.once(t, dev, fused).o {
			if !(math.Abs(float64(x)-1) <= bound) {
				t.Fatalf("o[%d] is %v, all values are 1: off by more than %.3g", i, x, bound)
			}
		}
	})
}

// sameBits fails when two answers differ in any bit.
func sameBits(t *testing.T, want, got answer) {
	t.Helper()
	noError(t, differ(want, got))
}

// differ returns an error when two answers differ in any bit.
func differ(want, got answer) error {
	for _, x := range []struct {
		name      string
		want, got []float32
	}{{"o", want.o, got.o}, {"lse", want.lse, got.lse}, {"weights", want.weights, got.weights}} {
		if err := differIn(x.name, x.want, x.got); err != nil {
			return err
		}
	}
	return nil
}

// differIn returns an error when two lists of numbers differ in any bit.
func differIn(name string, want, got []float32) error {
	if len(want) != len(got) {
		return fmt.Errorf("%s has %d elements, was %d", name, len(got), len(want))
	}
	for i := range want {
		if !sameNumber(want[i], got[i]) {
			return fmt.Errorf("%s[%d] is %v, was %v: not the same bits", name, i, got[i], want[i])
		}
	}
	return nil
}

// near fails when two answers for the rows of b differ by more than both bounds. The LSE of got is greater by shift.
func near(t *testing.T, b *built, want, got answer, shift float64) {
	t.Helper()
	var worst oracle.Worst
	b.eachRow(func(n, batch, h, i int, ref oracle.Answer) {
		where := func() string { return fmt.Sprintf("row [%d,%d,%d]", batch, h, i) }
		for d := range ref.O {
			at := n*b.ValueDim + d
			worst.See(float64(got.o[at]), float64(want.o[at]), 2*ref.OBound[d], where)
		}
		worst.See(float64(got.lse[n])-shift, float64(want.lse[n]), 2*ref.LSEBound, where)
	})
	if err := worst.Err(); err != nil {
		t.Error(err)
	}
}

func oneBatch(o operand, b int) operand {
	n := len(o.data) / o.shape[0]
	s := o.shape
	s[0] = 1
	return operand{s, o.dtype, o.data[b*n : (b+1)*n]}
}

func oneHead(o operand) operand {
	n := o.shape[2] * o.shape[3]
	return operand{backend.Shape{1, 1, o.shape[2], o.shape[3]}, o.dtype, o.data[:n]}
}

func permuteRows(o operand, perm []int) operand {
	d := o.shape[3]
	p := operand{o.shape, o.dtype, slices.Clone(o.data)}
	for head := range o.shape[0] * o.shape[1] {
		base := head * o.shape[2] * d
		for to, from := range perm {
			copy(p.data[base+to*d:base+(to+1)*d], o.data[base+from*d:base+(from+1)*d])
		}
	}
	return p
}

var updateDigests = flag.Bool("update-digests", false, "write the digests of output bits instead of comparing them")

// digests holds output bits to the ones recorded in a file of "digest case" lines. It shows that a change meant to keep
// results keeps them to the bit. The zero value, for backends without a file, compares nothing.
type digests struct {
	file  string
	want  map[string]string // nil when nothing is recorded for this device
	lines strings.Builder
	seen  int
}

func readDigests(t *testing.T, h Harness) *digests {
	file := h.Digests
	d := &digests{file: file}
	if file == "" || *updateDigests {
		return d
	}
	raw, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return d
	}
	if err != nil {
		t.Fatal(err)
	}
	d.want = make(map[string]string)
	for line := range strings.Lines(string(raw)) {
		sum, name, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
		d.want[name] = sum
	}
	return d
}

// see compares the bits of one answer.
func (d *digests) see(t testing.TB, c Case, how how, a answer) {
	t.Helper()
	if d.file == "" {
		return
	}
	name, sum := fmt.Sprintf("%s, weights %v", c.Name, how == staged), a.digest()
	fmt.Fprintf(&d.lines, "%s %s\n", sum, name)
	d.seen++
	switch want, ok := d.want[name]; {
	case d.want == nil:
	case !ok:
		t.Errorf("%s has no digest for %q: run the test with -update-digests", d.file, name)
	case sum != want:
		t.Errorf("the output bits changed: digest %s, recorded %s", sum, want)
	}
}

// finish writes the file with -update-digests; otherwise it reports whether anything was compared.
func (d *digests) finish(t *testing.T) {
	switch {
	case *updateDigests:
		noError(t, os.WriteFile(d.file, []byte(d.lines.String()), 0o644))
	case d.want == nil:
		t.Skipf("no digests are recorded for this device: -update-digests writes %s", d.file)
	default:
		t.Logf("%d of %d recorded digests compared", d.seen, len(d.want))
	}
}

// digest returns the first 64 bits of the SHA-256 of all outputs; all NaN count as one.
func (a answer) digest() string {
	h := sha256.New()
	var word [4]byte
	for _, part := range [][]float32{a.o, a.lse, a.weights} {
		for _, x := range part {
			bits := math.Float32bits(x)
			if x != x {
				bits = 0x7fc00000
			}
			binary.LittleEndian.PutUint32(word[:], bits)
			h.Write(word[:])
		}
	}
	return fmt.Sprintf("%x", h.Sum(nil)[:8])
}
