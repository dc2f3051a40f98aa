// Package cut divides an attention call into units of work that machines compute independently:
//
//	block   a batch, a key and value head with the query heads that share it, and a range
//	        of query rows
//	unit    a block by one split of the keys: at most Config.Split of them
//
// A unit yields partial results, O and LSE of its rows over its keys. Those of a block, merged in the order of their
// keys, are the block's output. A split begins at a multiple of Config.Split from the first key of its block. Pairs of
// a row and a key that the options hide belong to no unit, and a unit in which no row sees a key does not exist.
//
// Sinks belong to split 0. The merge of a block whose first unit is another one, or that has
// no units, starts from O = 0 and an LSE of Block.NoKeys.
//
// Blocks and units are plain numbers, which pipelines encode. A block yields its units
// itself: there are 37 million of them for 100 million rows, and 24,416 blocks.
//
// The package holds neither tensors nor files, and its results depend on its arguments alone.
package cut

import (
	"cmp"
	"fmt"
	"math"
	"slices"

	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
)

const (
	// unitsPerWorker bounds the pairs of a unit: all pairs, divided by the workers and by
	// it. A worker that ends one unit late is then 1/32 late, which is 3%.
	unitsPerWorker = 32
	// minRows and maxRows bound the rows of a block that Config leaves to the rule. Fewer rows than minRows do not
	// repay reading a split of the keys: 16 MiB for D = Dv = 64, of which 256 rows make 2 GFLOP. More than maxRows gain
	// little: the rows are then half of what a unit reads.
	minRows, maxRows = 256, 32768
	// rowStep is what the rows of a block are a multiple of, and the least number of rows at the end of a part. Calls
	// with very few rows may use other kernels, whose bits differ.
	rowStep = 64
	// keyStep is what the first key of a unit is a multiple of, from the first key of its
	// block: where the CPU's chunks of keys begin.
	keyStep = 1024
)

// Config has the sizes of blocks and units. The zero value is for one worker.
type Config struct {
	// Workers is the number of workers that the call is cut for; 0 means 1. It changes
	// the rows of a block, never the result.
	Workers int
	// Rows is the number of query rows of a block. 0 means that no unit has more than
	// 1/32 of the visible pairs of a worker, within 256 to 32,768 rows.
	Rows int
	// Split is the number of keys of a split; 0 means cpu.ShardKeys, with which the
	// result has the bits of one call on a CPU. Other numbers yield other bits.
	Split int
}

// Span is the stretch [Lo, Hi) of rows or keys.
type Span struct{ Lo, Hi int }

// Len returns Hi - Lo.
func (r Span) Len() int { return r.Hi - r.Lo }

// Block is some query rows of the heads that share a key and value head. Row Rows.Lo+i sees
// key Keys.Lo+j, within Keys, when -Left <= j - (i + Offset) <= Right.
type Block struct {
	// ID counts the blocks in the order of batches, heads and rows.
	ID int
	// Batch is the batch. KVHead is the head of keys and values.
	Batch, KVHead int
	// Heads are the query heads that share KVHead.
	Heads Span
	// Rows are the query rows. Keys are those that the rows may see.
	Rows, Keys Span
	// Offset, Left and Right are those of kernels.Visibility.
	Offset, Left, Right int
	// Split is the number of keys of a split.
	Split int
	// Pairs is the number of visible pairs in all heads of the block.
	Pairs int64
}

// Unit is the part of a block that one split of the keys contributes.
type Unit struct {
	Block Block
	// Split is the number of the split, from Block.Keys.Lo. It orders the partial results of a block.
	Split int
	// Keys are the keys to read, those of the split that rows of the block see, and up to 1,023 before them.
	Keys Span
	// Pairs is the number of visible pairs in all heads of the unit.
	Pairs int64
}

// Cut is a call that is cut into blocks.
type Cut struct {
	Dims   kernels.Dims
	Config Config // with the numbers that were chosen
	// Blocks begin with those that have the most visible pairs. Equal ones are in the order of their IDs.
	Blocks []Block
	// Pairs is the number of visible pairs in all heads and batches.
	Pairs int64
}

// New cuts a call with lengths d and options o. It returns ErrUnsupported for an option that partial results cannot
// carry, ErrShape and ErrOption as kernels.Device.Prepare does, and ErrMemory for more blocks than fit in memory.
func New(d kernels.Dims, o kernels.Options, c Config) (*Cut, error) {
	if err := Supported(&o); err != nil {
		return nil, err
	}
	for _, n := range []struct {
		name  string
		value int
	}{{"workers", c.Workers}, {"rows of a block", c.Rows}, {"keys of a split", c.Split}} {
		if n.value < 0 {
			return nil, fmt.Errorf("%s: %d is negative, it must be at least 1, or 0 for the default: %w", n.name, n.value, kernels.ErrOption)
		}
	}
	parts, err := o.Parts(d)
	if err != nil {
		return nil, err
	}
	if d.SeqK == 0 && d.SeqQ > 0 { // its rows are fully masked
		parts = []kernels.Part{{Hi: [3]int{d.Batch, d.SeqQ, 0}, Visible: kernels.Visibility{Left: kernels.Unbounded, Right: kernels.Unbounded}}}
	}
	x := &Cut{Dims: d, Config: c}
	x.Config.Workers, x.Config.Split = max(1, c.Workers), c.Split
	if c.Split == 0 {
		x.Config.Split = cpu.ShardKeys
	}
	group, width := 1, 0
	if d.KVHeads > 0 {
		group = d.Heads / d.KVHeads
	}
	for _, p := range parts {
		v, keys := p.Visible, p.Hi[2]-p.Lo[2]
		x.Pairs += v.Pairs(p.Hi[0]-p.Lo[0], p.Hi[1]-p.Lo[1], keys) * int64(d.Heads)
		width = max(width, min(keys, x.Config.Split, v.Left+v.Right+1))
	}
	if c.Rows == 0 {
		most := x.Pairs / int64(x.Config.Workers*unitsPerWorker*group*max(1, width))
		x.Config.Rows = int(max(minRows, min(maxRows, most/rowStep*rowStep)))
	}
	blocks := 0
	for _, p := range parts {
		blocks += (p.Hi[0] - p.Lo[0]) * d.KVHeads * ((p.Hi[1]-p.Lo[1])/x.Config.Rows + 1)
	}
	if x.Blocks, err = kernels.Make[Block](blocks); err != nil {
		return nil, fmt.Errorf("%d blocks of %d rows: %w", blocks, x.Config.Rows, err)
	}
	x.Blocks = x.Blocks[:0]
	for _, p := range parts {
		for b := p.Lo[0]; b < p.Hi[0]; b++ {
			for h := range d.KVHeads {
				x.add(&p, Block{Batch: b, KVHead: h, Heads: Span{h * group, (h + 1) * group}})
			}
		}
	}
	slices.SortFunc(x.Blocks, func(a, b Block) int {
		return cmp.Or(a.Batch-b.Batch, a.KVHead-b.KVHead, a.Rows.Lo-b.Rows.Lo)
	})
	for id := range x.Blocks {
		x.Blocks[id].ID = id
	}
	slices.SortStableFunc(x.Blocks, func(a, b Block) int { return cmp.Compare(b.Pairs, a.Pairs) })
	return x, nil
}

// add adds the blocks of a batch and a head of p. b has these.
func (x *Cut) add(p *kernels.Part, b Block) {
	end := p.Hi[2]
	if p.Visible.KLen != nil {
		end = p.Lo[2] + p.Visible.KLen[b.Batch-p.Lo[0]]
	}
	b.Keys, b.Split = Span{p.Lo[2], end}, x.Config.Split
	b.Left, b.Right = p.Visible.Left, p.Visible.Right
	for row := p.Lo[1]; row < p.Hi[1]; row = b.Rows.Hi {
		b.Rows = Span{row, min(row+x.Config.Rows, p.Hi[1])}
		if p.Hi[1]-b.Rows.Hi < min(rowStep, x.Config.Rows) {
			b.Rows.Hi = p.Hi[1]
		}
		b.Offset = p.Visible.OffsetOf(b.Batch-p.Lo[0]) + row - p.Lo[1]
		b.Pairs = b.pairs(b.Keys)
		x.Blocks = append(x.Blocks, b)
	}
}

// visible is the rule for keys, counted from the first one and the first row of the block.
func (b *Block) visible(keys Span) kernels.Visibility {
	return kernels.Visibility{Offset: b.Offset - (keys.Lo - b.Keys.Lo), Left: b.Left, Right: b.Right}
}

// pairs returns the number of visible pairs of keys.
func (b *Block) pairs(keys Span) int64 {
	v := b.visible(keys)
	return v.Pairs(1, b.Rows.Len(), keys.Len()) * int64(b.Heads.Len())
}

// seen returns the keys, out of keys, that rows of the block see.
func (b *Block) seen(keys Span) Span {
	// The first row sees the first of them, and the last row the last.
	first, last := b.visible(keys), b.visible(keys)
	first.Right, last.Left = kernels.Unbounded, kernels.Unbounded
	lo, _ := first.Range(0, 0, keys.Len())
	_, hi := last.Range(0, b.Rows.Len()-1, keys.Len())
	return Span{keys.Lo + lo, keys.Lo + hi}
}

// Units returns the units of the block in the order of their keys.
func (b Block) Units() []Unit {
	var all []Unit
	seen := b.seen(b.Keys)
	for split := (seen.Lo - b.Keys.Lo) / b.Split; b.Keys.Lo+split*b.Split < seen.Hi; split++ {
		start := b.Keys.Lo + split*b.Split
		u := Unit{Block: b, Split: split}
		u.Keys = b.seen(Span{start, min(start+b.Split, b.Keys.Hi)})
		u.Keys.Lo = start + (u.Keys.Lo-start)/keyStep*keyStep
		if u.Pairs = b.pairs(u.Keys); u.Pairs > 0 {
			all = append(all, u)
		}
	}
	return all
}

// NoKeys returns the LSE of each head of the block before any key: its sink, or -Inf.
func (b *Block) NoKeys(o kernels.Options) []float32 {
	if len(o.Sinks) > 0 {
		return o.Sinks[b.Heads.Lo:b.Heads.Hi]
	}
	return slices.Repeat([]float32{float32(math.Inf(-1))}, b.Heads.Len())
}

// Options returns the options of the unit as a call of its own: its query rows of its heads over its keys, with LSE. o
// has the options of the whole call, and heads is its number of query heads.
func (u *Unit) Options(o kernels.Options, heads int) kernels.Options {
	b := &u.Block
	v := b.visible(u.Keys)
	own := kernels.Options{Scale: o.Scale, Softcap: o.Softcap, Offset: []int{v.Offset}, LSE: true}
	if v.Left != kernels.Unbounded || v.Right != kernels.Unbounded {
		own.Window = &kernels.Window{Left: v.Left, Right: v.Right}
	}
	if n := len(o.ALiBi); n > 0 {
		of := o.ALiBi
		if n > heads {
			of = of[b.Batch*heads:]
		}
		own.ALiBi = of[b.Heads.Lo:b.Heads.Hi]
	}
	if len(o.Sinks) > 0 && u.Split == 0 {
		own.Sinks = o.Sinks[b.Heads.Lo:b.Heads.Hi]
	}
	return own
}

// Supported returns an error that names an option which partial results cannot carry, nil if there is none.
func Supported(o *kernels.Options) error {
	for _, x := range []struct {
		set        bool
		name, does string
	}{
		{!o.Mask.IsZero(), "mask", "use causal, a window, klen or segments"},
		{!o.Bias.IsZero(), "bias", "use alibi"},
		{!o.RelativeBias.IsZero(), "relative bias", "use alibi"},
		{!o.BlockMask.IsZero(), "block mask", "use causal, a window or segments"},
		{o.ScoreMod != nil, "a score mod, which is a function of this program,", "use alibi or softcap"},
		{o.KeyIndices != nil, "lists of keys (KeyIndices)", "use causal, a window or segments"},
		{o.Dropout.P > 0, "dropout", "leave it out"},
		{o.LowPrecision, "low precision", "leave it out"},
		{o.Pages != nil, "pages", "give k and v as they are"},
		{o.CuQ != nil || o.CuK != nil, "packed sequences (cuQ, cuK)", "give qsegments and ksegments"},
		{o.Weights, "weights", "take them from a call on one machine"},
	} {
		if x.set {
			return fmt.Errorf("%s cannot be divided over machines: %s: %w", x.name, x.does, kernels.ErrUnsupported)
		}
	}
	return nil
}
