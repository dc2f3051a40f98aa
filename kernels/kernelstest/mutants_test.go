package kernelstest

import (
	"math"
	"slices"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/backend/oracle"
	"github.com/seed90331342/attn/kernels"
)

// mistake is an error in an attention kernel.
type mistake func(b *built, batch, h, i int, r *oracle.Row)

// mistakes are errors that the named cases must find.
var mistakes = map[string]mistake{
	"scale forgotten":        func(_ *built, _, _, _ int, r *oracle.Row) { r.Scale = 1 },
	"scale 0 taken for none": func(b *built, _, _, _ int, r *oracle.Row) { r.Scale = orDefault(r.Scale, b.Dim) },
	"softcap forgotten":      func(_ *built, _, _, _ int, r *oracle.Row) { r.Softcap = 0 },
	"bias forgotten": func(_ *built, _, _, _ int, r *oracle.Row) {
		if bias := r.Bias; bias != nil {
			r.Bias = hidesOnly(bias) // and keeps what it hides
		}
	},
	"bias of -Inf adds but does not hide": func(_ *built, _, _, _ int, r *oracle.Row) {
		if bias := r.Bias; bias != nil {
			r.Bias = func(j int) float64 { return math.Max(bias(j), -1e4) }
		}
	},
	"bias rows shared": func(b *built, batch, h, _ int, r *oracle.Row) {
		if r.Bias != nil {
			*r = withBiasOf(b, r, batch, h, 0)
		}
	},
	"one key too many after the diagonal": hiddenOf(func(c *built) {
		if c.Options.Causal {
			c.Options.Offset = moved(c.Options.Offset, 1)
		}
	}),
	"window one too wide to the left": hiddenOf(func(c *built) {
		if w := c.Options.Window; w != nil {
			c.Options.Window = &kernels.Window{Left: w.Left + 1, Right: w.Right}
		}
	}),
	"lower right taken for upper left": hiddenOf(func(c *built) {
		c.Options.Align = kernels.UpperLeft
	}),
	"klen of batch 0 for all": hiddenOf(func(c *built) {
		if k := c.Options.KLen; k != nil {
			c.Options.KLen = make([]int, len(k))
			for n := range k {
				c.Options.KLen[n] = k[0]
			}
		}
	}),
	"mask forgotten": hiddenOf(func(c *built) {
		c.mask = nil
	}),
	"prefix one too long": hiddenOf(func(c *built) {
		prefix := c.Options.Prefix
		c.Options.Prefix = nil
		for _, n := range prefix {
			c.Options.Prefix = append(c.Options.Prefix, n+1)
		}
	}),
	"prefix of batch 0 for all": hiddenOf(func(c *built) {
		if c.Options.Prefix != nil {
			c.Options.Prefix = c.Options.Prefix[:1]
		}
	}),
	"spans forgotten": hiddenOf(func(c *built) { c.Options.Spans = nil }),
	"spans of batch 0 for all": hiddenOf(func(c *built) {
		if c.Options.Spans != nil {
			c.Options.Spans = c.Options.Spans[:1]
		}
	}),
	"segments forgotten": hiddenOf(func(c *built) {
		c.Options.QSegments, c.Options.KSegments = nil, nil
	}),
	"lists forgotten":            hiddenOf(func(c *built) { c.Options.KeyIndices = nil }),
	"the list of head 0 for all": func(b *built, batch, h, i int, r *oracle.Row) { listedAs(b, r, batch, h, i, 0, i) },
	"the list of the block after": func(b *built, batch, h, i int, r *oracle.Row) {
		if x := b.Options.KeyIndices; x != nil {
			listedAs(b, r, batch, h, i, h, min(i+max(x.Rows, 1), b.SeqQ-1))
		}
	},
	"keys that a short mask lacks are seen": func(b *built, batch, h, i int, r *oracle.Row) {
		if hidden := r.Hidden; lacks(b.MaskShape, b.SeqK-1) {
			r.Hidden = func(j int) bool { return !lacks(b.MaskShape, j) && hidden(j) }
		}
	},
	"query heads interleaved over kv heads": func(b *built, batch, h, i int, r *oracle.Row) {
		kvh := h % b.KVHeads
		d, dv := b.Dim, b.ValueDim
		at := (batch*b.KVHeads + kvh) * b.SeqK
		r.K, r.V = b.k.data[at*d:(at+b.SeqK)*d], b.v.data[at*dv:(at+b.SeqK)*dv]
	},
	"sink forgotten": func(_ *built, _, _, _ int, r *oracle.Row) { r.Sink = nil },
	"sink of the next head": func(b *built, _, h, _ int, r *oracle.Row) {
		if s := b.Options.Sinks; s != nil {
			r.Sink = &s[(h+1)%len(s)]
		}
	},
	"slope of the wrong sign": func(_ *built, _, _, _ int, r *oracle.Row) { r.Slope = -r.Slope },
	"slopes of batch 0 for all": func(b *built, _, h, _ int, r *oracle.Row) {
		if s := b.Options.ALiBi; s != nil {
			r.Slope = float64(s[h])
		}
	},
	"distance without the row's position": func(_ *built, _, _, i int, r *oracle.Row) {
		if r.Distance != nil {
			r.Distance = func(j int) float64 { return math.Abs(float64(i - j)) }
		}
	},
	"relative bias off by one": func(_ *built, _, _, _ int, r *oracle.Row) {
		if relative := r.Relative; relative != nil {
			r.Relative = func(j int) float64 { return relative(max(j-1, 0)) }
		}
	},
	"relative bias the wrong way round": func(b *built, batch, h, i int, r *oracle.Row) {
		if r.Relative != nil {
			r.Relative = func(j int) float64 {
				return float64(b.relative.data[broadcastIndex(b.RelativeShape, batch, h, 0, b.RelativeShape[backend.Dim]-1-(j-i+b.SeqQ-1))])
			}
		}
	},
	"rows and columns of blocks swapped": func(b *built, batch, h, i int, r *oracle.Row) {
		if b.blocks != nil {
			r.Hidden = hiddenByBlock(b, batch, h, i, func(row, column int) (int, int) { return column, row })
		}
	},
	"blocks of the head before": func(b *built, batch, h, i int, r *oracle.Row) {
		if b.blocks != nil {
			r.Hidden = hiddenByBlock(b, batch, max(h-1, 0), i, func(row, column int) (int, int) { return row, column })
		}
	},
	"blocks one key off": func(b *built, batch, h, i int, r *oracle.Row) {
		if hidden := r.Hidden; b.blocks != nil {
			byBlock := hiddenByBlock(b, batch, h, i, func(row, column int) (int, int) { return row, column })
			r.Hidden = func(j int) bool { return hidden(j) || byBlock(max(j-1, 0)) }
		}
	},
	"factor of dropout forgotten": func(_ *built, _, _, _ int, r *oracle.Row) { r.KeepFactor = 1 },
	"dropout forgotten":           func(_ *built, _, _, _ int, r *oracle.Row) { r.Keeps = nil },
	"dropout drops what it is to keep": func(_ *built, _, _, _ int, r *oracle.Row) {
		if keeps := r.Keeps; keeps != nil {
			r.Keeps = func(j int) bool { return !keeps(j) }
		}
	},
	"dropout counts from 0 in any part": func(b *built, batch, h, i int, r *oracle.Row) {
		if drop := b.Options.Dropout; drop.P > 0 {
			drop.First = [4]int{}
			r.Keeps = func(j int) bool { return drop.Keeps(batch, h, i, j) }
		}
	},
	"dropout of rows and keys swapped": func(b *built, batch, h, i int, r *oracle.Row) {
		if drop := b.Options.Dropout; drop.P > 0 {
			r.Keeps = func(j int) bool { return drop.Keeps(batch, h, j, i) }
		}
	},
	"last key dropped": func(b *built, _, _, _ int, r *oracle.Row) {
		if hidden := r.Hidden; b.SeqK > 128 {
			r.Hidden = func(j int) bool { return hidden(j) || j == b.SeqK-1 }
		}
	},
	"last channel dropped": func(b *built, _, _, _ int, r *oracle.Row) {
		if b.Dim%8 == 1 {
			r.Q = append([]float32(nil), r.Q...)
			r.Q[b.Dim-1] = 0
		}
	},
}

// hiddenOf takes what a row sees from a changed case.
func hiddenOf(change func(c *built)) mistake {
	return func(b *built, batch, h, i int, r *oracle.Row) {
		c := *b
		change(&c)
		r.Hidden = c.row(batch, h, i).Hidden
	}
}

// listedAs gives row i of head h the list of row n of head g.
func listedAs(b *built, r *oracle.Row, batch, h, i, g, n int) {
	if b.Options.KeyIndices != nil {
		list := b.listOf(batch, g, n)
		hiddenOf(func(c *built) { c.Options.KeyIndices = nil })(b, batch, h, i, r)
		rest := r.Hidden
		r.Hidden = func(j int) bool { return !slices.Contains(list, int32(j)) || rest(j) }
	}
}

// hiddenByBlock returns the keys that a block mask hides from a row when the block is looked up at a wrong place.
func hiddenByBlock(b *built, batch, h, i int, place func(row, column int) (int, int)) func(j int) bool {
	c := *b
	c.blocks = nil
	rest := c.row(batch, h, i).Hidden
	return func(j int) bool {
		row, column := place(i/b.BlockSize, j/b.BlockSize)
		row, column = min(row, b.BlockShape[backend.Seq]-1), min(column, b.BlockShape[backend.Dim]-1)
		return rest(j) || !b.blocks[broadcastIndex(b.BlockShape, batch, h, row, column)]
	}
}

func orDefault(scale float32, d int) float32 {
	if scale == 0 {
		return float32(1 / math.Sqrt(float64(d)))
	}
	return scale
}

func hidesOnly(bias func(int) float64) func(int) float64 {
	return func(j int) float64 {
		if math.IsInf(bias(j), -1) {
			return bias(j)
		}
		return 0
	}
}

func withBiasOf(b *built, r *oracle.Row, batch, h, i int) oracle.Row {
	c := *r
	c.Bias = b.row(batch, h, i).Bias
	return c
}

// solve computes a case as a backend does, with a mistake or without.
func solve(b *built, wrong mistake) (a answer) {
	b.rows(func(_, batch, h, i int) {
		r := b.row(batch, h, i)
		if wrong != nil {
			wrong(b, batch, h, i, &r)
		}
		ref := oracle.Solve(r)
		for _, o := range ref.O {
			a.o = append(a.o, b.DType.Round(float32(o)))
		}
		for _, w := range ref.Weights {
			a.weights = append(a.weights, float32(w))
		}
		a.lse = append(a.lse, float32(ref.LSE))
	})
	return a
}

// TestCasesFindMistakes: the correct answer passes every case, and each mistake fails at least one.
func TestCasesFindMistakes(t *testing.T) {
	found := map[string]string{}
	cases := slices.Concat(spanCases(), keyCases(), Pairs(), Cases())
	slices.SortStableFunc(cases, func(a, b Case) int { return a.SeqQ*a.SeqK - b.SeqQ*b.SeqK }) // most mistakes are found by small ones
	for _, c := range cases {
		b := c.build()
		if err := b.compare(solve(b, nil)); err != nil {
			t.Errorf("the right answer is refused: %v: %v", c, err)
		}
		for name, wrong := range mistakes {
			if found[name] == "" && b.compare(solve(b, wrong)) != nil {
				found[name] = c.Name
			}
		}
	}
	for name := range mistakes {
		if found[name] == "" {
			t.Errorf("no case finds: %s", name)
		}
	}
}

// TestCompareFindsWrongOutputs: compare finds wrong outputs of correct results.
func TestCompareFindsWrongOutputs(t *testing.T) {
	c := Cases()[0]
	b := c.build()
	for name, spoil := range map[string]func(a *answer){
		"lse in base 2":        func(a *answer) { a.lse[5] /= math.Ln2 },
		"one output not there": func(a *answer) { a.o[7] = float32(math.NaN()) },
		"two rows exchanged": func(a *answer) {
			d := b.ValueDim
			for x := range d {
				a.o[x], a.o[d+x] = a.o[d+x], a.o[x]
			}
		},
		"a weight off by a thousandth": func(a *answer) { a.weights[3] *= 1.001 },
	} {
		a := solve(b, nil)
		spoil(&a)
		if b.compare(a) == nil {
			t.Errorf("not found: %s", name)
		}
	}
	masked := Case{Name: "masked", Dims: c.Dims, Options: kernels.Options{Causal: true}}.build()
	a := solve(masked, nil)
	a.weights[1] = 1e-40 // row 0 sees key 0 alone
	if masked.compare(a) == nil {
		t.Error("not found: a hidden weight that is not exactly 0")
	}
}
