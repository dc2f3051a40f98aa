package gpu

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/cut"
	"github.com/seed90331342/attn/gpu/internal/queue"
	"github.com/seed90331342/attn/shaders"
)

// listOps is the approximate cost of a key of a list, with its memory accesses.
const listOps = 40

// errCollected means that the keys of a call cannot be looked up, so that the host must know its lists.
var errCollected = errors.New("keys are collected")

// route is how the device computes a call.
type route struct {
	c     *backend.Call // whose Listed are as long as its lists can be, if only the device knows their keys
	parts []path        // of c, or of each slice of V's columns
	// given is the call with lists that kernels look up, nil without, and ranges what they need to know of it.
	given  *backend.Call
	ranges []byte
}

// route returns the route of c. Without Lists in its call, kernels cannot look keys up.
func (b *Backend) route(c *backend.Call) (x *route, err error) {
	x = &route{c: c}
	if !c.Lists.IsZero() {
		if x.c, err = c.FillLists(); err == nil {
			err = b.headsAsRows(x.c)
		}
		if err != nil {
			return nil, err
		}
		x.given, x.ranges = c, ranges(c)
	}
	if uint64(len(x.ranges)) <= queue.MaxWindow(b.dev.Limits) {
		if err = b.paths(x); !errors.Is(err, errCollected) {
			return x, err
		}
	}
	x.c.Lists, x.given, x.ranges = backend.Tensor{}, nil, nil
	return x, b.paths(x)
}

// paths sets the parts of x.
func (b *Backend) paths(x *route) error {
	parts, err := cut.Slices(x.c)
	x.parts = make([]path, len(parts))
	for i, part := range parts {
		if x.parts[i], err = b.path(part); err != nil {
			return err
		}
	}
	return err
}

// download returns calls with Listed in place of Lists where kernels cannot look keys up, and the routes of those that have Lists.
func (b *Backend) download(ctx context.Context, calls []*backend.Call) (own []*backend.Call, looked []*route, err error) {
	own, looked = calls, make([]*route, len(calls))
	for i, c := range calls {
		if c.Lists.IsZero() {
			continue
		}
		x, err := b.route(c)
		if err != nil {
			return nil, nil, err
		}
		if x.given != nil {
			looked[i] = x
			continue
		}
		host, err := backend.AllocHost(backend.I32, c.Lists.Shape())
		if err == nil {
			err = b.Download(ctx, host, c.Lists)
		}
		if err != nil {
			return nil, nil, fmt.Errorf("key indices: %w", err)
		}
		keys, err := host.Int32s()
		if err == nil {
			c, err = c.ListKeys(keys)
		}
		if err == nil {
			err = b.headsAsRows(c)
		}
		if err != nil {
			return nil, nil, err
		}
		if &own[0] == &calls[0] {
			own = slices.Clone(calls)
		}
		own[i] = c
	}
	return own, looked, nil
}

// headsAsRows makes the heads that share a key head the rows of c, a call of one row that has Listed, if they are too many to
// decode: a tile of the prefill kernel then looks a key up once for all of them, as for the 128 heads of latent attention.
// What depends on a head forbids it.
func (b *Backend) headsAsRows(c *backend.Call) error {
	d := c.Dims()
	if b.decodes(c) || c.Slopes != nil || c.Sinks != nil {
		return nil
	}
	for _, t := range [3]*backend.Tensor{&c.Q, &c.O, &c.LSE} {
		if t.IsZero() {
			continue
		}
		shape, strides, rows := t.Shape(), t.Strides(), d.Heads/d.KVHeads
		shape[backend.Heads], shape[backend.Seq] = d.KVHeads, rows
		strides[backend.Seq] = strides[backend.Heads]
		strides[backend.Heads] *= rows
		var err error
		if *t, err = t.View(shape, strides, 0); err != nil {
			return err
		}
	}
	return nil
}

// tableBytes returns the size of the table of lists in device memory: that of listed keys, and then their numbers.
func (a *attention) tableBytes() uint64 { return 4 * uint64(a.Pages.At(a.d.Batch)+a.d.Batch) }

// base implements path.
func (a *attention) base() *attention { return a }

// fill makes op, which computes a, write its table on the device, from the lists if there are any.
func (x *route) fill(a *attention, op *queue.Op) {
	c := x.given
	if c == nil {
		return
	}
	k, v, top := a.K.T.Strides(), a.V.T.Strides(), c.Lists.Shape()[backend.Dim]
	p := shaders.ListsParams{
		Top: top, CountsAt: a.Pages.At(a.d.Batch),
		KB: k[backend.Batch], KS: k[backend.Seq], VB: v[backend.Batch], VS: v[backend.Seq],
	}
	if c.Pages != nil {
		p.Page = c.K.Shape()[backend.Seq]
	}
	keys := []*cut.Operand{cut.Reads("key indices", c.Lists, [4]int{cut.Batch, cut.Whole, cut.Whole, cut.Whole}, 1)}
	op.Filled = a.tableBytes()
	op.Fill = func(table cut.Window) *queue.Op {
		lists := a.b.rowOp(backend.Shape{a.d.Batch, 1, 1, 1}, keys, func(x cut.Box, v []cut.View) queue.Step {
			p := p
			p.List0, p.Keys = x.Lo[cut.Batch], strides(v[0])
			return queue.Step{Kernel: shaders.Lists, Params: &p, Groups: rows(x), Each: float64(listOps * top)}
		})
		step := lists.Step
		lists.Table = x.ranges
		lists.Step = func(x queue.Chunk) queue.Step {
			s := step(x)
			s.Windows = append(s.Windows, x.Table, table)
			return s
		}
		return lists
	}
}

// ranges returns the words of the same name of lists.wgsl. Batches may have the same pages, which are there once.
func ranges(c *backend.Call) []byte {
	keys, batch := c.Positions(), c.Lists.Shape()[backend.Batch]
	words, at := make([]int32, 3*batch), 0
	for b := range batch {
		if lo, hi := c.Visible.Range(b, 0, keys); lo < hi {
			words[3*b], words[3*b+1] = int32(lo), int32(hi)
		}
		if c.Pages == nil {
			continue
		}
		pages := c.Pages.Table[b]
		if b == 0 || len(pages) > 0 && (len(c.Pages.Table[b-1]) != len(pages) || &c.Pages.Table[b-1][0] != &pages[0]) {
			at = len(words)
			words = append(words, pages...)
		}
		words[3*b+2] = int32(at)
	}
	data := make([]byte, 0, 4*len(words))
	for _, word := range words {
		data = binary.LittleEndian.AppendUint32(data, uint32(word))
	}
	return data
}
