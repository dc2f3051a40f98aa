package main

import (
	"fmt"
	"slices"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
)

// callFlags are the options of an attention call, alike in every command that
// makes one from files.
type callFlags struct {
	Layout      string  `name:"layout" enum:"bhsd,bshd" default:"bhsd" help:"Order of the axes of 4-D files: bhsd is [B,H,S,D], bshd is [B,S,H,D]."`
	Backend     string  `name:"backend" default:"auto" help:"auto, cpu, gpu, gpu:N or gpu:NAME."`
	DType       string  `name:"dtype" enum:",f32,f16,bf16" default:"" placeholder:"TYPE" help:"Compute on f32, f16 or bf16 elements instead of the files' type (f2 is f16, f4 and f8 are f32)."`
	Scale       number  `name:"scale" placeholder:"X" help:"Factor on QKᵀ; 1/sqrt(D) when left out."`
	Softcap     number  `name:"softcap" placeholder:"C" help:"Replace scores s by C·tanh(s/C)."`
	Causal      bool    `name:"causal" help:"Hide the keys after a row's own position."`
	CausalAlign string  `name:"causal-align" enum:"top-left,bottom-right" default:"top-left" help:"Where positions are counted from, for --causal and --window: the first key is the first query's (top-left, as PyTorch's is_causal), or the last key the last query's (bottom-right)."`
	Window      window  `name:"window" placeholder:"L,R" help:"Hide the keys more than L before or R after a row's own position; inf is no limit."`
	KLen        lengths `name:"klen" placeholder:"N,N" help:"How many keys exist, one number for each batch, 0 to Sk."`
	Mask        string  `name:"mask" placeholder:"M.npy" help:"Bool (true may be seen) or float (added to the scores) array that broadcasts, as in numpy, to the scores of q's rank: [Sq,Sk], [B,Sq,Sk] or [B,H,Sq,Sk]. A 4-D one is always [B,H,Sq,Sk]."`
}

// options are the call's options but for the mask, which needs its data.
func (c *callFlags) options() kernels.Options {
	opt := kernels.Options{
		Softcap: c.Softcap.value,
		Causal:  c.Causal,
		KLen:    c.KLen,
	}
	if c.Scale.set {
		opt.Scale = new(c.Scale.value)
	}
	if c.Window.set {
		opt.Window = &c.Window.Window
	}
	if c.CausalAlign == "bottom-right" {
		opt.Align = kernels.LowerRight
	}
	return opt
}

// runInputs are the input files of a call, known by their headers.
type runInputs struct {
	qkv     []*npyFile    // v is not there when only the weights are wanted
	dtype   backend.DType // that q, k and v have on the device
	swapped bool          // the files are [B,S,H,D]

	mask      *npyFile // nil without --mask
	maskShape backend.Shape
}

// namedPath is a file and what the command line calls it.
type namedPath struct{ name, path string }

// inputs opens the files and checks what concerns files: ranks and types. How
// lengths must fit each other is for package kernels to say.
func (c *callFlags) inputs(qkv []namedPath) (*runInputs, error) {
	in := &runInputs{}
	for _, f := range qkv {
		n, err := openNPY(f.name, f.path, false)
		if err != nil {
			return nil, err
		}
		if rank := len(n.Shape); rank < 2 || rank > 4 {
			return nil, fmt.Errorf("--%s %s: shape %v has %d axes, it must have 2, 3 or 4: [S,D], [B,S,D] or [B,H,S,D]",
				n.name, n.path, n.Shape, rank)
		}
		in.qkv = append(in.qkv, n)
	}
	q := in.qkv[0]
	for _, n := range in.qkv[1:] {
		if len(n.Shape) != len(q.Shape) {
			return nil, fmt.Errorf("--%s %s has shape %v, --q %s has %v: they must have as many axes", n.name, n.path, n.Shape, q.path, q.Shape)
		}
		if c.DType == "" && n.Size != q.Size {
			return nil, fmt.Errorf("--%s %s is %s, --q %s is %s: say which type to compute on with --dtype", n.name, n.path, n.TypeName(), q.path, q.TypeName())
		}
	}
	in.swapped = c.Layout == "bshd" && len(q.Shape) == 4
	in.dtype = q.dtype()
	for _, d := range []backend.DType{backend.F32, backend.F16, backend.BF16} {
		if d.String() == c.DType {
			in.dtype = d
		}
	}
	if c.Mask == "" {
		return in, nil
	}
	m, err := openNPY("mask", c.Mask, true)
	if err != nil {
		return nil, err
	}
	in.mask = m
	in.maskShape, err = maskShape(m, len(q.Shape))
	return in, err
}

// maskShape places the axes of a mask on [B, H, Sq, Sk] as numpy broadcasts to
// scores of q's rank, [Sq,Sk], [B,Sq,Sk] or [B,H,Sq,Sk]: from the right. A 4-D
// mask has all four axes whatever q's rank is.
func maskShape(m *npyFile, rank int) (backend.Shape, error) {
	n := len(m.Shape)
	if n < 1 || n > 4 || n == 3 && rank == 2 {
		scores := [...]string{2: "[Sq,Sk]", 3: "[B,Sq,Sk]", 4: "[B,H,Sq,Sk]"}[rank]
		return backend.Shape{}, fmt.Errorf("--mask %s: shape %v has %d axes, it must broadcast to %s", m.path, m.Shape, n, scores)
	}
	shape := backend.Shape{1, 1, 1, 1}
	copy(shape[4-n:], m.Shape)
	if n == 3 && rank == 3 { // [B,Sq,Sk]: there is no axis of heads
		shape[backend.Batch], shape[backend.Heads] = m.Shape[0], 1
	}
	return shape, nil
}

// stored is the shape of an input as four axes in the file's order: [B,H,S,D],
// or [B,S,H,D].
func (n *npyFile) stored() backend.Shape {
	s := n.Shape
	switch len(s) {
	case 2:
		return backend.Shape{1, 1, s[0], s[1]}
	case 3:
		return backend.Shape{s[0], 1, s[1], s[2]}
	}
	return backend.Shape(s)
}

// bhsd views a tensor in the files' order of axes as [B, H, S, D], and the other
// way round.
func (in *runInputs) bhsd(t backend.Tensor) (backend.Tensor, error) {
	if !in.swapped {
		return t, nil
	}
	return t.Swap(backend.Heads, backend.Seq)
}

// plan plans the call on tensors without memory. It validates everything that
// does not need the data. Without values the keys' first column is taken for
// them.
func (in *runInputs) plan(be backend.Backend, opt kernels.Options) (backend.Plan, error) {
	var t [3]backend.Tensor
	for i, f := range in.qkv {
		var err error
		if t[i], err = backend.Meta(in.dtype, f.stored()); err == nil {
			t[i], err = in.bhsd(t[i])
		}
		if err != nil {
			return backend.Plan{}, fmt.Errorf("--%s %s: %w", f.name, f.path, err)
		}
	}
	if len(in.qkv) < len(t) {
		var err error
		if t[2], err = t[1].Slice(backend.Dim, 0, 1); err != nil {
			return backend.Plan{}, fmt.Errorf("--%s %s: %w", in.qkv[1].name, in.qkv[1].path, err)
		}
	}
	if in.mask != nil {
		m, err := backend.Meta(in.mask.dtype(), in.maskShape)
		if err != nil {
			return backend.Plan{}, fmt.Errorf("--mask %s: %w", in.mask.path, err)
		}
		setMask(&opt, m)
	}
	return kernels.Plan(be, t[0], t[1], t[2], opt)
}

// outShape drops the axes that q's file does not have from the output's.
func (in *runInputs) outShape(s backend.Shape) []int {
	switch len(in.qkv[0].Shape) {
	case 2:
		return s[2:]
	case 3:
		return slices.Concat(s[:1], s[2:])
	}
	return s[:]
}

// fitMemory refuses files whose data the machine's memory cannot hold, which Go
// would end the program for: those that are read, as they must be converted, and
// not mapped. The CPU backend knows how much there is.
func (in *runInputs) fitMemory() error {
	var need int64
	for _, f := range in.qkv {
		if !f.mappable(in.dtype) {
			need += int64(f.Count) * int64(max(in.dtype.Size(), min(f.Size, 4)))
		}
	}
	if m := in.mask; m != nil && !m.mappable(m.dtype()) {
		need += int64(m.Count) * int64(m.dtype().Size())
	}
	cpu, err := backend.Open("cpu")
	if err != nil {
		return err
	}
	defer cpu.Close()
	for _, limit := range cpu.Info().Limits {
		if limit.Name == "memory" && need > limit.Value {
			return fmt.Errorf("the inputs take %s in memory, the machine has %s", bytesText(need), bytesText(limit.Value))
		}
	}
	return nil
}
