package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"golang.org/x/term"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/bench"
	"github.com/seed90331342/attn/gpu"
	"github.com/seed90331342/attn/gpu/tuned"
)

// tuneCmd is attn tune.
type tuneCmd struct {
	Backend string        `name:"backend" default:"gpu" help:"The GPU: gpu, gpu:1, gpu:nvidia." placeholder:"NAME"`
	Seq     string        `name:"seq" default:"512,4k,32k,256k" help:"Query rows a head: 256,1k,4096 or 256..4k doubling." placeholder:"LIST"`
	Heads   int           `name:"heads" default:"1" help:"Query heads."`
	Dim     string        `name:"dim" default:"64,128" help:"Head sizes." placeholder:"LIST"`
	DType   string        `name:"dtype" default:"f32" help:"Element types: f32, f16, bf16." placeholder:"LIST"`
	Mask    bool          `name:"mask" help:"With a mask, a bias or softcap, for which kernels differ."`
	Budget  time.Duration `name:"budget" default:"2m" help:"Time for the whole run; what there is no time for is said." placeholder:"DURATION"`
	File    string        `name:"file" help:"The tuning file. Default: attn/tuning.json in the user's cache folder, which is where calls look." placeholder:"FILE"`
	Show    bool          `name:"show" help:"Print what the tuning file holds, and measure nothing."`
	Clear   bool          `name:"clear" help:"Remove the tuning file."`
	Probe   string        `name:"probe" hidden:"" help:"Only run this variant and compare it: what attn tune starts itself for, where a variant may lose the device."`
}

// probeLimit is how long a variant may take in a process of its own, most of it to
// compile.
const probeLimit = 2 * time.Minute

// Run measures, shows or clears.
func (c *tuneCmd) Run(ctx context.Context, out *streams) error {
	if c.Show && c.Clear {
		return fmt.Errorf("--show and --clear do not go together, give one of them: %w", backend.ErrOption)
	}
	path := c.File
	if path == "" {
		var err error
		if path, err = tuned.Path(); err != nil {
			return fmt.Errorf("where the tuning file is: %w, give --file", err)
		}
	}
	switch {
	case c.Clear:
		n, err := tuned.Clear(path)
		if err != nil {
			return err
		}
		_, err = fmt.Fprintf(out.out, "%s: %d entries removed\n", path, n)
		return err
	case c.Show:
		return show(path, out)
	}
	classes, err := c.classes()
	if err != nil {
		return err
	}
	t := tuning{cmd: c, path: path, out: out}
	if err := t.open(); err != nil {
		return err
	}
	defer func() { t.be.Close() }()
	if c.Probe != "" {
		call, err := classes[0].call()
		if err != nil {
			return err
		}
		return t.be.Probe(ctx, call, c.Probe)
	}
	return t.run(ctx, classes)
}

// show prints the entries of a file. One that is of no use is said, and is no
// failure: calls do without.
func show(path string, out *streams) error {
	entries, err := tuned.Read(path)
	if err != nil {
		fmt.Fprintf(out.err, "attn: %s\n", oneLine(err))
	}
	if len(entries) == 0 {
		_, err := fmt.Fprintf(out.out, "%s: nothing was measured\n", path)
		return err
	}
	var last tuned.Device
	for _, e := range entries {
		if e.Device != last {
			fmt.Fprintf(out.out, "%s · %s · %s\n", e.Device.Adapter, e.Device.Driver, e.Device.Provider)
		}
		last = e.Device
		if err := writeTuned(out.out, e); err != nil {
			return err
		}
	}
	return nil
}

// tuneClass is a kind of call to measure.
type tuneClass struct {
	seq, heads, dim int
	dtype           backend.DType
	mask            bool
}

// classes reads the flags, head size by head size.
func (c *tuneCmd) classes() ([]tuneClass, error) {
	seqs, err := bench.ParseSeqs(c.Seq)
	if err != nil {
		return nil, fmt.Errorf("--seq: %w", err)
	}
	if c.Heads < 1 {
		return nil, fmt.Errorf("--heads is %d, it must be at least 1: %w", c.Heads, backend.ErrOption)
	}
	var classes []tuneClass
	for dim := range strings.SplitSeq(c.Dim, ",") {
		d, err := strconv.Atoi(strings.TrimSpace(dim))
		if err != nil || d < 1 {
			return nil, fmt.Errorf("--dim has %q, head sizes are numbers of at least 1: %w", dim, backend.ErrOption)
		}
		for name := range strings.SplitSeq(c.DType, ",") {
			dtype, ok := map[string]backend.DType{"f32": backend.F32, "f16": backend.F16, "bf16": backend.BF16}[strings.TrimSpace(name)]
			if !ok {
				return nil, fmt.Errorf("--dtype has %q, it must be f32, f16 or bf16: %w", name, backend.ErrOption)
			}
			for _, seq := range seqs {
				classes = append(classes, tuneClass{seq, c.Heads, d, dtype, c.Mask})
			}
		}
	}
	return classes, nil
}

// call returns a call of the class, without memory.
func (k tuneClass) call() (*backend.Call, error) {
	x, err := backend.Meta(k.dtype, backend.Shape{1, k.heads, k.seq, k.dim})
	if err != nil {
		return nil, err
	}
	c := &backend.Call{Q: x, K: x, V: x, O: x, Problem: backend.Problem{Scale: 1, Visible: backend.Everything()}}
	if k.mask {
		c.Softcap = 1 // any of the three has the same kernel
	}
	return c, nil
}

// args are the flags that name the class alone.
func (k tuneClass) args() []string {
	args := []string{"--seq", strconv.Itoa(k.seq), "--heads", strconv.Itoa(k.heads), "--dim", strconv.Itoa(k.dim), "--dtype", k.dtype.String()}
	if k.mask {
		args = append(args, "--mask")
	}
	return args
}

// tuning is a run of attn tune.
type tuning struct {
	cmd  *tuneCmd
	path string
	out  *streams
	be   *gpu.Backend
}

// open opens the device. Calls of the others are not measured meanwhile.
func (t *tuning) open() error {
	family, selector, _ := strings.Cut(t.cmd.Backend, ":")
	if family != "gpu" {
		return fmt.Errorf("--backend is %q, only gpu has variants to choose from: %w", t.cmd.Backend, backend.ErrOption)
	}
	be, err := gpu.Open(selector, gpu.Options{Tune: gpu.TuneStored, TuneFile: t.path})
	if err == nil {
		t.be = be
	}
	return err
}

// run measures the classes one after the other and prints each.
func (t *tuning) run(ctx context.Context, classes []tuneClass) error {
	info := t.be.Info()
	fmt.Fprintf(t.out.out, "%s: %s · %s · %s\n", info.Name, info.Device, info.Driver, info.Provider)
	began := time.Now()
	done := map[tuned.Class]bool{}
	for i, k := range classes {
		left := t.cmd.Budget - time.Since(began)
		if left <= 0 && i > 0 {
			_, err := fmt.Fprintf(t.out.out, "%d of %d shapes were not measured, the budget of %v is spent\n", len(classes)-i, len(classes), t.cmd.Budget)
			return err
		}
		e, err := t.measure(ctx, k, max(left, time.Nanosecond))
		if err != nil {
			return err
		}
		if done[e.Class] { // another shape of the same class
			continue
		}
		done[e.Class] = true
		if err := writeTuned(t.out.out, e); err != nil {
			return err
		}
	}
	_, err := fmt.Fprintf(t.out.out, "kept in %s\n", t.path)
	return err
}

// losses is how often a class may lose the device. Each time there is one variant
// less that is not tried in a process of its own first.
const losses = 3

// measure measures a class, on a new device when it loses one.
func (t *tuning) measure(ctx context.Context, k tuneClass, budget time.Duration) (tuned.Entry, error) {
	call, err := k.call()
	if err != nil {
		return tuned.Entry{}, err
	}
	note := newNote(t.out.err)
	defer note.clear()
	name := t.be.Info().Name
	opt := gpu.TuneOptions{
		Budget:   budget,
		Progress: func(variant string) { note.show(fmt.Sprintf("%s, %d rows: %s", k.dtype, k.seq*k.heads, variant)) },
		Probe: func(ctx context.Context, variant string) error {
			return probe(ctx, append([]string{"tune", "--backend", name, "--file", t.path, "--probe", variant}, k.args()...))
		},
	}
	for n := 1; ; n++ {
		e, err := t.be.Tune(ctx, call, opt)
		if !errors.Is(err, backend.ErrDeviceLost) || n == losses {
			return e, err
		}
		t.be.Close()
		if err := t.open(); err != nil {
			return e, err
		}
	}
}

// executable is this program; tests, which are another, say where it is.
var executable = os.Executable

// probe runs this program with args, so that what happens to its device happens to
// another process.
func probe(ctx context.Context, args []string) error {
	self, err := executable()
	if err != nil {
		return err
	}
	limited, cancel := context.WithTimeout(ctx, probeLimit)
	defer cancel()
	cmd := exec.CommandContext(limited, self, args...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	err = cmd.Run()
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return ctx.Err()
	case limited.Err() != nil:
		return fmt.Errorf("no result after %v in a process of its own", probeLimit)
	}
	lines := strings.Split(strings.TrimSpace(stderr.String()), "\n")
	return fmt.Errorf("in a process of its own: %w: %s", err, strings.TrimPrefix(lines[len(lines)-1], "attn: "))
}

// writeTuned prints what was measured of a class.
func writeTuned(out io.Writer, e tuned.Entry) error {
	rows := "more rows"
	if e.Class.Rows > 0 {
		rows = fmt.Sprintf("up to %d rows", e.Class.Rows)
	}
	fmt.Fprintf(out, "\n%s · D=%d Dv=%d · %s", e.Class.DType, e.Class.Dim, e.Class.ValueDim, rows)
	if e.Class.Features != "" {
		fmt.Fprintf(out, " · %s", e.Class.Features)
	}
	fmt.Fprintf(out, " · %s\n", e.When.Format("2006-01-02 15:04 UTC"))
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "  variant\tms\tGFLOP/s\tof FMA peak\t")
	for _, t := range e.Trials {
		if t.Failed != "" {
			fmt.Fprintf(w, "  %s\t-\t-\t-\t%s\n", t.Variant, t.Failed)
			continue
		}
		note, percent := "", "-"
		if t.Variant == e.Best {
			note = "the fastest, in use"
		}
		if e.Peak > 0 {
			percent = fmt.Sprintf("%.1f%%", 100*e.FLOPs/t.Seconds/e.Peak)
		}
		fmt.Fprintf(w, "  %s\t%.3f\t%.1f\t%s\t%s\n", t.Variant, 1e3*t.Seconds, e.FLOPs/t.Seconds/1e9, percent, note)
	}
	return w.Flush()
}

// note is a line on a terminal that says what goes on; nothing in a pipe.
type note struct{ w io.Writer }

func newNote(w io.Writer) note {
	if f, ok := w.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
		return note{w}
	}
	return note{io.Discard}
}

func (n note) show(text string) { fmt.Fprintf(n.w, "\r\x1b[K%s", text) }
func (n note) clear()           { fmt.Fprint(n.w, "\r\x1b[K") }
