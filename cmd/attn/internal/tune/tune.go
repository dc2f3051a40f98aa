// Package tune is the command attn tune.
package tune

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/bench"
	"github.com/seed90331342/attn/bench/plain"
	"github.com/seed90331342/attn/cmd/internal/cli"
	"github.com/seed90331342/attn/cmd/internal/flags"
	"github.com/seed90331342/attn/gpu"
	"github.com/seed90331342/attn/kernels"
)

// Command is attn tune.
type Command struct {
	Backend string   `name:"backend" default:"gpu" help:"Device: gpu, gpu:N or gpu:NAME. Default: gpu." placeholder:"NAME"`
	Seq     string   `name:"seq" default:"512,4k,32k,256k" help:"Query rows of a head: 256,1k,4096, or 256..4k for powers of two. Default: 512,4k,32k,256k." placeholder:"LIST"`
	Heads   int      `name:"heads" default:"1" help:"Query heads."`
	Dim     []int    `name:"dim" default:"64,128" help:"Head sizes. Default: 64,128." placeholder:"LIST"`
	DType   []string `name:"dtype" default:"f32" help:"Element types: f32, f16, bf16. Default: f32." placeholder:"LIST"`
	Pairs
	Budget time.Duration `name:"budget" default:"2m" help:"Time for the whole run. Shapes beyond it are counted as not measured. Default: 2m." placeholder:"DURATION"`
	File   string        `name:"file" help:"Tuning file. Default: attn/tuning.json in the user's cache folder, where later calls look for it." placeholder:"FILE"`
	Show   bool          `name:"show" help:"Print the tuning file and measure nothing."`
	Clear  bool          `name:"clear" help:"Remove the tuning file."`
	Emission
}

// Run measures, shows, clears or emits.
func (c *Command) Run(ctx context.Context, out *cli.Streams) error {
	if c.Show && c.Clear {
		return flags.Usagef("--show and --clear exclude each other")
	}
	if err := c.Emission.check(); err != nil {
		return err
	}
	if c.Emit != "" {
		if c.Show || c.Clear {
			return flags.Usagef("--emit excludes --show and --clear")
		}
		shapes, err := c.shapes()
		if err != nil {
			return err
		}
		return c.emit(ctx, out, shapes)
	}
	if c.File == "" {
		path, err := gpu.TuneFile()
		if err != nil {
			return fmt.Errorf("no place for the tuning file: %w, give --file", err)
		}
		c.File = path
	}
	switch {
	case c.Clear:
		n, err := gpu.ClearTuneFile(c.File)
		if err != nil {
			return err
		}
		_, err = fmt.Fprintf(out.Out, "%s: %d entries removed\n", c.File, n)
		return err
	case c.Show:
		return c.show(out)
	}
	shapes, err := c.shapes()
	if err != nil {
		return err
	}
	t := tuning{Command: c, out: out}
	if err := t.open(); err != nil {
		return err
	}
	defer func() { t.be.Close() }()
	return t.run(ctx, shapes)
}

// show prints the entries of the tuning file.
func (c *Command) show(out *cli.Streams) error {
	entries, err := gpu.ReadTuneFile(c.File)
	if err != nil {
		return err
	}
	if len(entries) == 0 {
		_, err := fmt.Fprintf(out.Out, "%s: no measurements\n", c.File)
		return err
	}
	var last gpu.TuneEntry
	for _, e := range entries {
		if e.Device != last.Device {
			fmt.Fprintln(out.Out, plain.Line(e.Device.Adapter+" · "+e.Device.Driver+" · "+e.Device.Provider))
		}
		last = e
		if err := printEntry(out.Out, e); err != nil {
			return err
		}
	}
	return nil
}

// shape is a call to measure.
type shape struct {
	seq, heads, dim int
	dtype           kernels.DType
	Pairs
}

// Pairs are the flags of options that select the kernel.
type Pairs struct {
	Mask    bool `name:"mask" help:"Calls with a mask of type bool."`
	Bias    bool `name:"bias" help:"Calls with a bias of type f32."`
	ALiBi   bool `name:"alibi" help:"Calls with linear biases."`
	Softcap bool `name:"softcap" help:"Calls with softcap."`
}

// apply sets the options of c, on tensors without memory.
func (p Pairs) apply(c *backend.Call) error {
	d := c.Dims()
	shape := kernels.Shape{1, 1, d.SeqQ, d.SeqK}
	var err, err2 error
	if p.Mask {
		c.Mask, err = kernels.Meta(kernels.Bool, shape)
	}
	if p.Bias {
		c.Bias, err2 = kernels.Meta(kernels.F32, shape)
	}
	if p.ALiBi {
		c.Slopes = make([]float32, d.Heads)
		for i := range c.Slopes {
			c.Slopes[i] = float32(math.Exp2(-8 * float64(i+1) / float64(d.Heads)))
		}
	}
	if p.Softcap {
		c.Softcap = 30
	}
	return errors.Join(err, err2)
}

// shapes returns the combinations of the flags.
func (c *Command) shapes() ([]shape, error) {
	seqs, err := bench.ParseSeqs(c.Seq)
	if err != nil {
		return nil, flags.Usagef("--seq: %w", err)
	}
	if c.Budget <= 0 {
		return nil, flags.Usagef("--budget is %v, it must be more than 0", c.Budget)
	}
	if c.Heads < 1 {
		return nil, flags.Usagef("--heads is %d, it must be at least 1", c.Heads)
	}
	var shapes []shape
	for _, dim := range c.Dim {
		if dim < 1 {
			return nil, flags.Usagef("--dim is %d, it must be at least 1", dim)
		}
		for _, name := range c.DType {
			dtype, err := cli.ParseDType("--dtype", name)
			if err != nil {
				return nil, err
			}
			for _, seq := range seqs {
				shapes = append(shapes, shape{seq, c.Heads, dim, dtype, c.Pairs})
			}
		}
	}
	return shapes, nil
}

// call returns a call of the shape, on tensors without memory.
func (s shape) call() (*backend.Call, error) {
	x, err := kernels.Meta(s.dtype, kernels.Shape{1, s.heads, s.seq, s.dim})
	if err != nil {
		return nil, err
	}
	c := &backend.Call{Q: x, K: x, V: x, O: x, Problem: backend.Problem{Scale: 1, Visible: backend.Everything()}}
	return c, s.apply(c)
}

// tuning is a run of attn tune.
type tuning struct {
	*Command
	out *cli.Streams
	be  *gpu.Backend
}

// open opens the device. It uses stored measurements and takes none during calls.
func (t *tuning) open() error {
	family, selector, _ := strings.Cut(t.Backend, ":")
	if family != "gpu" {
		return flags.Usagef("--backend is %q, only gpu has variants", t.Backend)
	}
	be, err := gpu.Open(selector, gpu.Options{Tune: gpu.TuneStored, TuneFile: t.File})
	if err == nil {
		t.be = be
	}
	return err
}

// run measures the shapes in turn and prints each.
func (t *tuning) run(ctx context.Context, shapes []shape) error {
	info := t.be.Info()
	fmt.Fprintf(t.out.Out, "%s: %s · %s · %s\n", info.Name, info.Device, info.Driver, info.Provider)
	began := time.Now()
	var done []gpu.TuneEntry
	for i, s := range shapes {
		left := t.Budget - time.Since(began)
		if left <= 0 && i > 0 {
			_, err := fmt.Fprintf(t.out.Out, "%d of %d shapes were not measured: the budget of %v is spent\n", len(shapes)-i, len(shapes), t.Budget)
			return err
		}
		e, err := t.measure(ctx, s, max(left, time.Nanosecond))
		if err != nil {
			return err
		}
		if slices.ContainsFunc(done, func(d gpu.TuneEntry) bool { return d.Class == e.Class }) {
			continue // another shape of the same class
		}
		done = append(done, e)
		if err := printEntry(t.out.Out, e); err != nil {
			return err
		}
	}
	_, err := fmt.Fprintf(t.out.Out, "stored in %s\n", t.File)
	return err
}

// measure measures a shape. When it loses the device, it opens that again and leaves out the
// variants that have failed or may lose it.
func (t *tuning) measure(ctx context.Context, s shape, budget time.Duration) (gpu.TuneEntry, error) {
	call, err := s.call()
	if err != nil {
		return gpu.TuneEntry{}, err
	}
	status := cli.NewStatus(t.out.Err)
	defer status.Clear()
	opt := gpu.TuneOptions{
		Budget: budget, All: true,
		Progress: func(variant string) { status.Show(fmt.Sprintf("%s, %d rows: %s", s.dtype, s.seq*s.heads, variant)) },
	}
	e, err := t.be.Tune(ctx, call, opt)
	if !errors.Is(err, kernels.ErrDeviceLost) {
		return e, err
	}
	t.be.Close()
	if err := t.open(); err != nil {
		return e, err
	}
	opt.All = false
	return t.be.Tune(ctx, call, opt)
}

// printEntry prints the measurements of a class of shapes.
func printEntry(out io.Writer, e gpu.TuneEntry) error {
	fmt.Fprintf(out, "\n%s · %s\n", plain.Line(e.Class.String()), e.When.Format("2006-01-02 15:04 UTC"))
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "  variant\tms\tGFLOP/s\tof FMA peak\t")
	for _, t := range e.Trials {
		if t.Failed != "" {
			fmt.Fprintf(w, "  %s\t-\t-\t-\t%s\n", plain.Line(t.Variant), plain.Line(t.Failed))
			continue
		}
		note, percent := "", "-"
		if t.Variant == e.Best {
			note = "fastest, in use"
		}
		if e.Peak > 0 {
			percent = fmt.Sprintf("%.1f%%", 100*e.FLOPs/t.Seconds/e.Peak)
		}
		fmt.Fprintf(w, "  %s\t%.3f\t%.1f\t%s\t%s\n", plain.Line(t.Variant), 1e3*t.Seconds, e.FLOPs/t.Seconds/1e9, percent, note)
	}
	return w.Flush()
}
