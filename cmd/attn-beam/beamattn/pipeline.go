package beamattn

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/apache/beam/sdks/v2/go/pkg/beam"
	"github.com/apache/beam/sdks/v2/go/pkg/beam/io/filesystem"
	"github.com/apache/beam/sdks/v2/go/pkg/beam/register"

	"github.com/seed90331342/attn/cmd/attn-beam/internal/cut"
	"github.com/seed90331342/attn/cmd/attn-beam/internal/shards"
	"github.com/seed90331342/attn/cmd/attn-beam/internal/workers"
	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"

	// The backends of the workers.
	_ "github.com/seed90331342/attn/gpu"
)

func init() {
	register.DoFn2x0[[]byte, func(cut.Unit)](&unitsFn{})
	register.DoFn2x1[[]byte, func(string), error](&failFn{})
	register.DoFn3x1[context.Context, cut.Unit, func(int, cut.Unit), error](&attendFn{})
	register.DoFn4x1[context.Context, int, func(*cut.Unit) bool, func(int), error](&mergeFn{})
	register.DoFn4x1[context.Context, int, func(*int) bool, func(string), error](&manifestFn{})
	register.Function2x0(mark)
	register.Function1x2(together)
	register.Emitter1[cut.Unit]()
	register.Emitter2[int, cut.Unit]()
	register.Emitter1[int]()
	register.Emitter1[string]()
	register.Iter1[cut.Unit]()
	register.Iter1[int]()
}

// Counters of a job, as Beam metrics of the name space "attn".
var (
	pairsCounter  = beam.NewCounter("attn", "pairs")
	flopsCounter  = beam.NewCounter("attn", "flops")
	readCounter   = beam.NewCounter("attn", "bytes_read")
	writeCounter  = beam.NewCounter("attn", "bytes_written")
	unitsCounter  = beam.NewCounter("attn", "units")
	mergesCounter = beam.NewCounter("attn", "merges")
)

// Attention is Prepare and [Job.Attention] in one. An error of Prepare becomes that of the pipeline when it runs.
func Attention(s beam.Scope, spec Spec) beam.PCollection {
	j, err := Prepare(context.Background(), spec)
	if err != nil {
		return beam.ParDo(s, &failFn{Text: err.Error()}, beam.Impulse(s))
	}
	return j.Attention(s)
}

// failFn fails with a text.
type failFn struct{ Text string }

func (f *failFn) ProcessElement(_ []byte, _ func(string)) error { return errors.New(f.Text) }

// Attention adds the job to a pipeline. The result has one element, the URI of the manifest,
// when all shards are written.
func (j *Job) Attention(s beam.Scope) beam.PCollection {
	s = s.Scope("attention")
	var partials []beam.PCollection
	for i := range j.branches {
		b := workers.Scope(s, i)
		f := &unitsFn{Blocks: j.Left, Branch: i, Branches: j.branches}
		units := beam.ParDo(b, f, beam.Impulse(b))
		partials = append(partials, beam.ParDo(b, &attendFn{Call: j.call}, beam.Reshuffle(b, units)))
	}
	blocks := beam.GroupByKey(s, beam.Flatten(s, partials...))
	written := beam.Flatten(s, beam.ParDo(s, &mergeFn{Call: j.call}, blocks), beam.ParDo(s, mark, beam.Impulse(s)))
	all := beam.GroupByKey(s, beam.ParDo(s, together, written))
	return beam.ParDo(s, &manifestFn{Call: j.call, Options: j.options, Config: j.Cut.Config, URI: j.Manifest, Blocks: len(j.Left)}, all)
}

// mark is the element that ends a job without blocks.
func mark(_ []byte, emit func(int)) { emit(-1) }

// together gives all elements one key.
func together(id int) (int, int) { return 0, id }

// unitsFn emits the units of a branch. Each unit goes to the branch with the fewest pairs so far, in the order of
// blocks, which begin with the largest: branches of a worker each cannot give work to one another.
type unitsFn struct {
	Blocks           []cut.Block
	Branch, Branches int
}

// noUnits is the split of an element that stands for a block without units.
const noUnits = -1

func (f *unitsFn) ProcessElement(_ []byte, emit func(cut.Unit)) {
	loads := make([]int64, f.Branches)
	for _, b := range f.Blocks {
		units := b.Units()
		if len(units) == 0 {
			units = []cut.Unit{{Block: b, Split: noUnits}}
		}
		for _, u := range units {
			to := slices.Index(loads, slices.Min(loads))
			loads[to] += u.Pairs
			if to == f.Branch {
				emit(u)
			}
		}
	}
}

// attendFn computes the partial results of units.
type attendFn struct {
	Call call

	dev *kernels.Device
}

// computing admits one unit at a time: it uses all threads of the process, and the memory of two might not fit.
var computing sync.Mutex

func (f *attendFn) Setup() (err error) {
	name := f.Call.Backend
	if name == "" {
		name = "auto"
	}
	f.dev, err = kernels.Open(name)
	return err
}

func (f *attendFn) Teardown() error { return f.dev.Close() }

func (f *attendFn) ProcessElement(ctx context.Context, u cut.Unit, emit func(int, cut.Unit)) error {
	if u.Split != noUnits {
		computing.Lock()
		err := f.Call.attend(ctx, f.dev, &u)
		computing.Unlock()
		if err != nil {
			return fmt.Errorf("%s: %w", f.Call.name(&u), err)
		}
	}
	emit(u.Block.ID, u)
	return nil
}

// attend writes the partial result of u, unless it has been written.
func (c *call) attend(ctx context.Context, dev *kernels.Device, u *cut.Unit) error {
	b := &u.Block
	heads, rows, keys := b.Heads.Len(), b.Rows.Len(), u.Keys.Len()
	width := c.V.Shape[3]
	n := heads * rows
	if done, err := c.done(ctx, u); done || err != nil {
		return err
	}
	dtype, err := dtypeOf(c.DType, "")
	if err != nil {
		return err
	}
	var tensors [3]kernels.Tensor
	for i, x := range []struct {
		a           *shards.Array
		heads, rows cut.Span
	}{
		{c.Q, b.Heads, b.Rows}, {c.K, cut.Span{Lo: b.KVHead, Hi: b.KVHead + 1}, u.Keys}, {c.V, cut.Span{Lo: b.KVHead, Hi: b.KVHead + 1}, u.Keys},
	} {
		shape := kernels.Shape{1, x.heads.Len(), x.rows.Len(), x.a.Shape[3]}
		data, err := kernels.Make[float32](shape.Elements())
		if err == nil {
			err = x.a.Read(ctx, data, b.Batch, x.heads, x.rows)
		}
		if err == nil {
			tensors[i], err = dev.FromFloat32(ctx, dtype, data, shape)
		}
		if err != nil {
			return err
		}
		defer tensors[i].Release()
	}
	call, err := dev.Prepare(tensors[0], tensors[1], tensors[2], u.Options(c.options(), c.Heads))
	if err != nil {
		return err
	}
	var r kernels.Result
	defer func() { r.Release() }()
	if r.O, err = dev.Alloc(ctx, kernels.F32, kernels.Shape{1, heads, rows, width}); err != nil {
		return err
	}
	if r.LSE, err = dev.Alloc(ctx, kernels.F32, kernels.Shape{1, heads, rows, 1}); err != nil {
		return err
	}
	if err := call.RunInto(ctx, r); err != nil {
		return err
	}
	o, err := dev.ToFloat32(ctx, r.O)
	if err != nil {
		return err
	}
	lse, err := dev.ToFloat32(ctx, r.LSE)
	if err != nil {
		return err
	}
	if err := shards.WriteTensor(ctx, c.partial(u), "f4", []int{n * (width + 1)}, slices.Concat(o, lse)); err != nil {
		return err
	}
	unitsCounter.Inc(ctx, 1)
	pairsCounter.Inc(ctx, u.Pairs)
	flopsCounter.Inc(ctx, 2*u.Pairs*int64(c.K.Shape[3]+width))
	readCounter.Inc(ctx, c.Q.Bytes(n)+c.K.Bytes(keys)+c.V.Bytes(keys))
	writeCounter.Inc(ctx, int64(4*n*(width+1)))
	return nil
}

// done reports whether the partial result of u is written.
func (c *call) done(ctx context.Context, u *cut.Unit) (bool, error) {
	n := u.Block.Heads.Len() * u.Block.Rows.Len()
	_, err := shards.ReadTensor(ctx, c.partial(u), "f4", []int{n * (c.V.Shape[3] + 1)})
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, kernels.ErrShape) {
		return false, nil
	}
	return err == nil, err
}

// mergeFn merges the partial results of a block, in the order of their keys, on the CPU.
type mergeFn struct {
	Call call

	dev *kernels.Device
}

func (f *mergeFn) Setup() error {
	f.dev = kernels.NewDevice(cpu.New(cpu.Options{}))
	return nil
}

func (f *mergeFn) Teardown() error { return f.dev.Close() }

func (f *mergeFn) ProcessElement(ctx context.Context, id int, next func(*cut.Unit) bool, emit func(int)) error {
	var units []cut.Unit
	for u := (cut.Unit{}); next(&u); {
		units = append(units, u)
	}
	// The engine may deliver an element twice.
	slices.SortFunc(units, func(a, b cut.Unit) int { return a.Split - b.Split })
	units = slices.CompactFunc(units, func(a, b cut.Unit) bool { return a.Split == b.Split })
	b := units[0].Block
	if units[0].Split == noUnits {
		units = nil
	}
	if want := len(b.Units()); len(units) != want {
		return fmt.Errorf("block %d has %d partial results, it must have %d", id, len(units), want)
	}
	computing.Lock()
	defer computing.Unlock()
	if err := f.Call.merge(ctx, f.dev, &b, units); err != nil {
		return fmt.Errorf("%s: %w", f.Call.O.Shards[id].URI, err)
	}
	emit(id)
	return nil
}

// merge writes the shards of a block, unless they have been written.
func (c *call) merge(ctx context.Context, dev *kernels.Device, b *cut.Block, units []cut.Unit) error {
	heads, rows, width := b.Heads.Len(), b.Rows.Len(), c.V.Shape[3]
	n := heads * rows
	written := true
	for _, a := range c.outputs() {
		_, err := shards.ReadTensor(ctx, a.Shards[b.ID].URI, a.Type, []int{1, heads, rows, a.Shape[3]})
		if written = written && err == nil; err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, kernels.ErrShape) {
			return err
		}
	}
	if written {
		return nil
	}
	sum, err := kernels.Make[float32](n * (width + 1))
	if err != nil {
		return err
	}
	for h, lse := range b.NoKeys(c.options()) {
		for i := range rows {
			sum[n*width+h*rows+i] = lse
		}
	}
	total, err := result(dev, ctx, sum, heads, rows, width)
	if err != nil {
		return err
	}
	for i := range units {
		part, err := shards.ReadTensor(ctx, c.partial(&units[i]), "f4", []int{n * (width + 1)})
		if err != nil {
			return err
		}
		readCounter.Inc(ctx, int64(4*len(part)))
		if i == 0 && units[i].Split == 0 { // the sinks are in it
			copy(sum, part)
			continue
		}
		r, err := result(dev, ctx, part, heads, rows, width)
		if err == nil {
			err = dev.Merge(ctx, total, r)
		}
		if err != nil {
			return err
		}
		mergesCounter.Inc(ctx, 1)
	}
	dtype, err := dtypeOf(c.DType, "")
	if err != nil {
		return err
	}
	if dtype == kernels.BF16 {
		for i, x := range sum[:n*width] {
			sum[i] = dtype.Round(x)
		}
	}
	data := map[string][]float32{"o": sum[:n*width], "lse": sum[n*width:]}
	for name, a := range c.outputs() {
		if err := shards.WriteTensor(ctx, a.Shards[b.ID].URI, a.Type, []int{1, heads, rows, a.Shape[3]}, data[name]); err != nil {
			return err
		}
		writeCounter.Inc(ctx, a.Bytes(n))
	}
	return c.remove(ctx, units)
}

// result returns O and LSE, which follow one another in data, as tensors.
func result(dev *kernels.Device, ctx context.Context, data []float32, heads, rows, width int) (r kernels.Result, err error) {
	n := heads * rows * width
	if r.O, err = dev.FromFloat32(ctx, kernels.F32, data[:n], kernels.Shape{1, heads, rows, width}); err == nil {
		r.LSE, err = dev.FromFloat32(ctx, kernels.F32, data[n:], kernels.Shape{1, heads, rows, 1})
	}
	return r, err
}

// remove removes the partial results of a block whose shards are written, and in a local folder
// what killed workers left of them.
func (c *call) remove(ctx context.Context, units []cut.Unit) error {
	system, err := filesystem.New(ctx, c.Scratch)
	if err != nil {
		return err
	}
	if r, ok := system.(filesystem.Remover); ok {
		var names []string
		for i := range units {
			name := c.partial(&units[i])
			if names = append(names, name); !strings.Contains(name, "://") {
				left, _ := filepath.Glob(filepath.Join(c.Scratch, ".attn-*-"+filepath.Base(name)))
				names = append(names, left...)
			}
		}
		for _, name := range names {
			if e := r.Remove(ctx, name); e != nil && !errors.Is(e, fs.ErrNotExist) {
				err = errors.Join(err, e)
			}
		}
	}
	return errors.Join(err, system.Close())
}

// manifestFn writes the manifest when all blocks are written.
type manifestFn struct {
	Call    call
	Options json.RawMessage
	Config  cut.Config
	URI     string
	Blocks  int
}

func (f *manifestFn) ProcessElement(ctx context.Context, _ int, next func(*int) bool, emit func(string)) error {
	seen := map[int]bool{}
	for id := 0; next(&id); {
		seen[id] = true
	}
	if len(seen) != f.Blocks+1 { // and the mark
		return fmt.Errorf("%d blocks are written, it must be %d", len(seen)-1, f.Blocks)
	}
	outputs := f.Call.outputs()
	for _, a := range outputs {
		if err := a.Check(ctx); err != nil {
			return err
		}
	}
	inputs := map[string]*shards.Array{"q": f.Call.Q, "k": f.Call.K, "v": f.Call.V}
	if err := shards.WriteManifest(ctx, f.URI, shards.Manifest{Inputs: inputs, Options: f.Options, Config: f.Config, Outputs: outputs}); err != nil {
		return err
	}
	emit(f.URI)
	return nil
}
