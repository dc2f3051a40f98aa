package gpu

import (
	"fmt"
	"math"
	"math/bits"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/cut"
	"github.com/seed90331342/attn/gpu/internal/tune"
	"github.com/seed90331342/attn/shaders"
)

const (
	// decodeRows is up to how many query rows a key head are decoded: two workgroups'
	// for each split. The smallest tiles of the prefill kernel have 16 to 64 rows, of one
	// head, which so few would leave mostly empty, and its grid would be small.
	decodeRows    = 16
	decodeThreads = 128
	decodeParts   = 4   // vec4 of a row's sums, see splitmerge.wgsl
	chunkGranules = 512 // granules of kv in decode.wgsl
)

// decode is a fused call that runs as splits of the keys and a merge. It embeds the
// call as the prefill path sees it.
type decode struct {
	*attention
	class  tune.HeadClass
	splits variant
	merge  variant
	cut    *cut.Cutter
	all    cut.Box // the keys that any row sees, by whole splits
	rows   int     // query rows of a workgroup
	width  int     // float32 of a row's state for a split
}

// newDecode returns a as a decode call, or an error that says why it is none. The bits
// of the result are the same on either path.
func newDecode(a *attention) (_ *decode, err error) {
	d := a.d
	group := d.Heads / d.KVHeads
	if most := a.b.decodeRows; group*d.SeqQ > most {
		return nil, fmt.Errorf("%d query rows a key head, decoding takes up to %d: %w", group*d.SeqQ, most, backend.ErrUnsupported)
	}
	if k, l := shaders.Decode, a.b.limits; k.Threads > int(l.MaxComputeInvocationsPerWorkgroup) || k.WorkgroupMemory > int(l.MaxComputeWorkgroupStorageSize) {
		return nil, fmt.Errorf("decoding takes %d threads and %d bytes of workgroup memory, %s has %d and %d: %w",
			k.Threads, k.WorkgroupMemory, a.b.info.Name, l.MaxComputeInvocationsPerWorkgroup, l.MaxComputeWorkgroupStorageSize, backend.ErrUnsupported)
	}
	x := &decode{attention: a}
	x.class = tune.ClassOf(d.Dim, d.ValueDim)
	x.rows = rowsOf(group * d.SeqQ)
	x.width = x.class.Width + 4*decodeParts + 4
	kFar, vFar := a.K.Gathered, a.V.Gathered
	defer func() {
		if err != nil {
			a.K.Gathered, a.V.Gathered = kFar, vFar // as the other path has them
		}
	}()
	cutter := a.newCutter(decodeBuffers)
	x.variants()
	if err := a.bindable(x.splits); err != nil {
		return nil, err
	}
	cutter.Granule = x.class.Split
	cutter.AlignGranules()
	x.all = x.seen(cut.Space(d.Batch, d.Heads, d.SeqQ, d.SeqK, 1))
	// All splits of a row lie side by side until they are merged.
	splits := (x.all.Len(cut.Col) + x.class.Split - 1) / x.class.Split
	if splits > cut.MaxLoops/17*8 { // splitmerge.wgsl makes 17 rounds for 8 splits
		return nil, fmt.Errorf("%d splits of %d keys are too many for one merge: %w", splits, x.class.Split, backend.ErrUnsupported)
	}
	rows := int(cutter.MaxState / uint64(4*x.width*max(splits, 1)))
	if rows == 0 {
		return nil, fmt.Errorf("the %d splits of a row take %d bytes of scratch, %d can be bound: %w",
			splits, 4*x.width*splits, cutter.MaxState, backend.ErrUnsupported)
	}
	cutter.Most[cut.Row] = min(rows, d.SeqQ)
	cutter.Most[cut.Head] = min(rows/cutter.Most[cut.Row], d.Heads)
	cutter.Most[cut.Batch] = min(rows/cutter.Most[cut.Row]/cutter.Most[cut.Head], d.Batch)
	a.limit(cutter)
	x.cut = cutter
	return x, cutter.Boxes(x.all, func(cut.Box, int) error { return nil })
}

// seen narrows a box to the keys that any of its rows sees, by whole splits; it may
// end empty.
func (x *decode) seen(all cut.Box) cut.Box { return all.Visible(x.c.Visible, x.class.Split) }

// rowsOf is how many rows a workgroup takes: three variants, and not eight.
func rowsOf(rows int) int {
	switch {
	case rows == 1:
		return 1
	case rows <= 4:
		return 4
	}
	return 8
}

// variants chooses the kernels.
func (x *decode) variants() {
	c, kv := x.class, x.c.K.DType()
	el := cut.GranuleBytes / kv.Size()
	quads := c.Width / 4
	// As many granules of a key at a time as the chunk holds, in a power of two, and of
	// which qs holds what belongs to them.
	gran := min(1<<(bits.Len(uint(chunkGranules/c.Keys))-1), 8, 64/el)
	shift := when(gran == 4, 1)
	vg := c.Width / el
	// As many keys as fit, a multiple of 4 that divides the tile.
	jc := 4
	for n := 4; n <= c.Keys && n*vg <= chunkGranules; n += 4 {
		if c.Keys%n == 0 {
			jc = n
		}
	}
	below := func(n int) int { return min(1<<(bits.Len(uint(n))-1), x.rows) } // a power of two
	loads := func(granules int) int { return (granules + decodeThreads - 1) / decodeThreads }
	qslots, pslots := below(decodeThreads/(c.Keys/2)), below(decodeThreads/quads)
	expand := uint32(shaders.Full)
	if x.b.info.Type == backend.CPU {
		expand = shaders.Registers // compiles in less time
	}
	u := func(n int) uint32 { return uint32(n) }
	x.splits = variant{shaders.Decode, map[string]uint32{
		"EXPAND": expand, "IN": u(int(x.c.Q.DType())), "KV": u(int(kv)), "WIDE": u(when(kv != backend.Q8 && cut.AlignedRows(x.c.K, cut.GranuleBytes/x.c.K.DType().Size()) && cut.AlignedRows(x.c.V, cut.GranuleBytes/x.c.V.DType().Size()), 1)),
		"EXTRA": u(when(x.flags()&(shaders.HasSlopes|shaders.HasBlocks|shaders.HasDropout) != 0 || !x.c.Relative.IsZero(), 1)), "EL": u(el), "ROWS": u(x.rows),
		"SPLIT": u(c.Split), "BC": u(c.Keys), "TX": u(c.Lanes), "TQ": u(c.Keys / c.Lanes / 4), "QUADS": u(quads),
		"GRAN": u(gran), "QG": u(gran * el / 4), "SHIFT": u(shift), "KLOADS": u(loads(c.Keys * gran)),
		"KT": u(c.Keys / 2), "QSLOTS": u(qslots), "QROWS": u(x.rows / qslots),
		"VLOADS": u(loads(jc * vg)), "VG": u(vg), "JC": u(jc), "VCHUNKS": u(c.Keys / jc),
		"PSLOTS": u(pslots), "PROWS": u(x.rows / pslots), "WIDTH": u(x.width / 4),
	}}
	x.splits = x.kernel(x.splits)
	x.merge = variant{shaders.SplitMerge, map[string]uint32{
		"EXPAND": expand, "SPLIT": u(c.Split), "TX": u(c.Lanes), "QUADS": u(quads), "WIDTH": u(x.width / 4),
	}}
}

// walk calls f for each dispatch, before it is split over the workgroup counts: the
// step with a window for the state at place state, the bytes of that, how many
// workgroups and what each of them computes at most.
func (x *decode) walk(f func(s step, state int, stateBytes uint64, total int, each float64) error) error {
	if err := x.checkPages(); err != nil {
		return err
	}
	return x.cut.Boxes(x.all, func(all cut.Box, piece int) error {
		n := x.class.Split
		all = x.seen(all)
		splits := (all.Len(cut.Col) + n - 1) / n
		rows := all.Len(cut.Batch) * all.Len(cut.Head) * all.Len(cut.Row)
		bytes := uint64(max(rows*splits, 1)) * uint64(4*x.width)
		group := x.K.Group
		kvHeads := (all.Hi[cut.Head]-1)/group + 1 - all.Lo[cut.Head]/group
		blocks := (min(group, all.Len(cut.Head))*all.Len(cut.Row) + x.rows - 1) / x.rows
		err := x.cut.Pieces(all, max(piece/n*n, n), func(p cut.Box, _, _ bool) error {
			q, k, v := x.Q.View(p, x.cut.Align), x.K.View(p, x.cut.Align).Granules(), x.V.View(p, x.cut.Align).Granules()
			pairs := x.views(p, x.cut.Align)
			mask, bias, more := x.options.windows(pairs)
			parts := (p.Len(cut.Col) + n - 1) / n
			w := x.params(p, blocks, kvHeads, parts, (p.Lo[cut.Col]-all.Lo[cut.Col])/n, splits, pairs)
			w.Q, w.K, w.V = strides(q), strides(k), strides(v)
			s := step{
				variant: x.splits,
				params:  w,
				windows: append([]cut.Window{q.Window, k.Window, v.Window, mask, bias, {}}, more...),
			}
			total := p.Len(cut.Batch) * kvHeads * parts * blocks
			return f(s, 5, bytes, total, x.each*float64(x.rows*n))
		})
		if err != nil {
			return err
		}
		o, lse := x.O.View(all, x.cut.Align), x.LSE.View(all, x.cut.Align)
		w := x.params(all, blocks, kvHeads, splits, 0, splits, pairViews{})
		w.O, w.LSE = strides(o), strides(lse)
		s := step{
			variant: x.merge,
			params:  w,
			windows: []cut.Window{{}, o.Window, lse.Window},
		}
		return f(s, 0, bytes, rows, mergeOps*float64(x.width*max(splits, 1)))
	})
}

// params are those of decode.wgsl and of splitmerge.wgsl, without strides of operands.
func (x *decode) params(p cut.Box, blocks, kvHeads, parts, part0, splits int, pairs pairViews) *shaders.AttentionParams {
	w := &shaders.AttentionParams{
		Blocks: blocks, Heads: p.Len(cut.Head), Head0: p.Lo[cut.Head], Group: x.K.Group, KVHeads: kvHeads,
		Rows: p.Len(cut.Row), Row0: p.Lo[cut.Row], Keys: p.Len(cut.Col), Key0: p.Lo[cut.Col],
		Parts: parts, Part0: part0, Splits: splits, Dim: x.d.Dim, VDim: x.d.ValueDim,
		Flags: when(!x.c.LSE.IsZero(), shaders.WantLSE), OutType: int(x.c.O.DType()),
	}
	x.options.params(w, p, pairs, math.Log2E)
	x.pageParams(w, p)
	return w
}

// queue hands the call to r.
func (x *decode) queue(r *runner) error {
	if err := r.keep(x.c, x.cut, x.splits); err != nil {
		return err
	}
	table, err := x.tableFor(r)
	if err != nil {
		return err
	}
	return x.walk(func(s step, state int, bytes uint64, total int, each float64) error {
		buf, err := r.stateFor(bytes)
		if err != nil {
			return err
		}
		s.windows[state] = cut.Window{Buf: buf, Size: bytes}
		if state != 0 { // of splits, which read keys
			s.windows = append(s.windows, table...)
		}
		return r.dispatch(s, total, each)
	})
}

// plan says in p how the call would run.
func (x *decode) plan(p *backend.Plan) error {
	splits, boxes := 0, 0
	err := x.walk(func(s step, state int, bytes uint64, total int, each float64) error {
		p.Scratch = max(p.Scratch, int64(bytes))
		if state == 0 {
			boxes++
			splits = max(splits, s.params.(*shaders.AttentionParams).Splits)
		}
		atOnce := func() int { return x.b.atOnce(s.variant, each) }
		return split(total, atOnce, int(x.b.limits.MaxComputeWorkgroupsPerDimension), func(_, _, _, _ int) error {
			p.Chunks++
			return nil
		})
	})
	load := "16 bytes a load"
	if x.c.K.DType() == backend.Q8 {
		load = "4 integers a load"
	} else if x.splits.consts["WIDE"] == 0 {
		load = "element by element, as rows do not lie on 16 bytes"
	}
	rows := x.K.Group * x.d.SeqQ
	p.Path = "split keys WGSL (decode)"
	p.Why = fmt.Sprintf("%d query rows a key head, up to %d are decoded: K and V are read once for %d rows, %s, and splits of the keys fill the device; %s storage, float32 arithmetic; %s",
		rows, x.b.decodeRows, x.rows, load, x.storage(), x.b.pacing(x.splits))
	p.Cut = fmt.Sprintf("%d batches x %d kv heads x up to %d splits of %d keys x %d blocks of %d rows, key tiles of %d; %d merges",
		x.d.Batch, x.d.KVHeads, splits, x.class.Split, (rows+x.rows-1)/x.rows, x.rows, x.class.Keys, boxes)
	return err
}

// decodes returns a as a decode call, or nil when it takes the other path.
func (a *attention) decodes() *decode {
	x, err := newDecode(a)
	if err != nil {
		return nil // what keeps both from it, the other one says
	}
	return x
}
