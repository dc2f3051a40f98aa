package call

import (
	"context"
	"fmt"
	"slices"

	"github.com/seed90331342/attn/cmd/attn/internal/array"
	"github.com/seed90331342/attn/cmd/internal/cli"
	"github.com/seed90331342/attn/cmd/internal/flags"
	"github.com/seed90331342/attn/kernels"
)

// Inputs are the files of a problem, of which only the headers are read.
type Inputs struct {
	QKV   []*array.File // without v when only the weights are wanted
	Masks []*Mask
	DType kernels.DType // to compute on
	Dims  kernels.Dims

	options kernels.Options
	ofFiles kernels.Options // those of options whose values come from files
	axes    []int           // for each axis of the files, its place in [B, H, S, D]
}

// Mask is the file of a mask or a bias.
type Mask struct {
	*array.File
	Shape kernels.Shape
	field func(opt *kernels.Options) *kernels.Tensor
}

// Open opens the files of p. It checks their ranks and types; package kernels checks the lengths.
func (p *Problem) Open() (*Inputs, error) {
	in := &Inputs{}
	for _, f := range [][2]string{{"q", p.Q}, {"k", p.K}, {"v", p.V}} {
		if f[1] == "" && f[0] == "v" {
			continue
		}
		file, err := array.Open(f[0], f[1], false)
		if err != nil {
			return nil, err
		}
		switch rank := len(file.Shape); {
		case p.packed() && rank != 3:
			return nil, file.Errorf("shape %v has %d axes, packed sequences have 3: [total,H,D]", file.Shape, rank)
		case rank < 2 || rank > 4:
			return nil, file.Errorf("shape %v has %d axes, it must have 2, 3 or 4: [S,D], [B,S,D] or [B,H,S,D]", file.Shape, rank)
		}
		in.QKV = append(in.QKV, file)
	}
	switch rank := len(in.QKV[0].Shape); {
	case p.packed():
		in.axes = []int{kernels.Seq, kernels.Heads, kernels.Dim}
	case rank == 2:
		in.axes = []int{kernels.Seq, kernels.Dim}
	case rank == 3:
		in.axes = []int{kernels.Batch, kernels.Seq, kernels.Dim}
	case p.Layout == "bshd":
		in.axes = []int{kernels.Batch, kernels.Seq, kernels.Heads, kernels.Dim}
	default:
		in.axes = []int{kernels.Batch, kernels.Heads, kernels.Seq, kernels.Dim}
	}
	q := in.QKV[0]
	for _, f := range in.QKV[1:] {
		if len(f.Shape) != len(q.Shape) {
			return nil, f.Errorf("shape is %v, that of --q %s is %v: they must have as many axes", f.Shape, q.Path, q.Shape)
		}
		if p.DType == "" && f.TypeName() != q.TypeName() {
			return nil, f.Errorf("elements are %s, those of --q %s are %s: choose a type with --dtype", f.TypeName(), q.Path, q.TypeName())
		}
	}
	in.DType = q.DType()
	if p.DType != "" {
		var err error
		if in.DType, err = cli.ParseDType("--dtype", p.DType); err != nil {
			return nil, err
		}
	}
	if err := in.openMasks(p); err != nil {
		return nil, err
	}
	t, err := in.meta()
	if err != nil {
		return nil, err
	}
	qs, ks, vs := t[0].Shape(), t[1].Shape(), t[2].Shape()
	in.Dims = kernels.Dims{Batch: qs[0], Heads: qs[1], KVHeads: ks[1], SeqQ: qs[2], SeqK: ks[2], Dim: qs[3], ValueDim: vs[3]}
	if in.ofFiles, err = p.ofFiles().options(in.Dims); err == nil {
		in.options, err = p.options(in.Dims)
	}
	return in, err
}

// Files returns the files of the operands, masks and biases.
func (in *Inputs) Files() (files []flags.File) {
	operands := slices.Clone(in.QKV)
	for _, m := range in.Masks {
		operands = append(operands, m.File)
	}
	for _, f := range operands {
		files = append(files, flags.File{Flag: "--" + f.Flag, Path: array.Path(f.Path)})
	}
	return files
}

// openMasks opens the masks and biases. A mask of numbers is a bias.
func (in *Inputs) openMasks(p *Problem) error {
	mask, bias, biasFlag := p.Mask, p.Bias, "bias"
	if p.Mask != "" {
		f, err := array.Open("mask", p.Mask, true)
		if err != nil {
			return err
		}
		if f.Kind != 'b' {
			if p.Bias != "" {
				return f.Errorf("it holds numbers and --bias %s is given too: add them up in one file", p.Bias)
			}
			mask, bias, biasFlag = "", p.Mask, "mask"
		}
	}
	rank := len(in.QKV[0].Shape)
	for _, m := range []struct {
		flag, path string
		bools      bool
		shape      func(f *array.File, rank int) (kernels.Shape, error)
		field      func(opt *kernels.Options) *kernels.Tensor
	}{
		{"mask", mask, true, maskShape, func(opt *kernels.Options) *kernels.Tensor { return &opt.Mask }},
		{biasFlag, bias, false, maskShape, func(opt *kernels.Options) *kernels.Tensor { return &opt.Bias }},
		{"relative-bias", p.RelativeBias, false, distanceShape, func(opt *kernels.Options) *kernels.Tensor { return &opt.RelativeBias }},
		{"block-mask", p.BlockMask, true, maskShape, func(opt *kernels.Options) *kernels.Tensor { return &opt.BlockMask }},
	} {
		if m.path == "" {
			continue
		}
		f, err := array.Open(m.flag, m.path, m.bools)
		if err != nil {
			return err
		}
		if m.bools && f.Kind != 'b' {
			return f.Errorf("elements are %s, they must be bool", f.TypeName())
		}
		shape, err := m.shape(f, rank)
		if err != nil {
			return err
		}
		in.Masks = append(in.Masks, &Mask{f, shape, m.field})
	}
	return nil
}

// maskShape returns the shape of a mask as [B, H, Sq, Sk]. Its axes are those of scores of q's rank, [Sq,Sk], [B,Sq,Sk]
// or [B,H,Sq,Sk], from the right as in numpy. A 4-D mask has all four axes whatever q's rank is.
func maskShape(f *array.File, rank int) (kernels.Shape, error) {
	n := len(f.Shape)
	if n < 1 || n > 4 || n == 3 && rank == 2 {
		scores := [...]string{2: "[Sq,Sk]", 3: "[B,Sq,Sk]", 4: "[B,H,Sq,Sk]"}[rank]
		return kernels.Shape{}, f.Errorf("shape %v has %d axes, it must broadcast to %s", f.Shape, n, scores)
	}
	shape := kernels.Shape{1, 1, 1, 1}
	copy(shape[4-n:], f.Shape)
	if n == 3 && rank == 3 { // [B,Sq,Sk] has no axis of heads
		shape[kernels.Batch], shape[kernels.Heads] = f.Shape[0], 1
	}
	return shape, nil
}

// distanceShape returns the shape of a bias by distance as [B, H, 1, Sq+Sk-1].
func distanceShape(f *array.File, _ int) (kernels.Shape, error) {
	n := len(f.Shape)
	if n < 1 || n > 3 {
		return kernels.Shape{}, f.Errorf("shape %v has %d axes, it must be [Sq+Sk-1], [H,Sq+Sk-1] or [B,H,Sq+Sk-1]", f.Shape, n)
	}
	shape := kernels.Shape{1, 1, 1, f.Shape[n-1]}
	copy(shape[3-n:2], f.Shape)
	return shape, nil
}

// shape returns the shape of a file as [B, H, S, D].
func (in *Inputs) shape(f *array.File) kernels.Shape {
	shape := kernels.Shape{1, 1, 1, 1}
	for i, axis := range in.axes {
		shape[axis] = f.Shape[i]
	}
	return shape
}

// swapped reports whether the sequence comes before the heads in the files.
func (in *Inputs) swapped() bool {
	return slices.Index(in.axes, kernels.Heads) > slices.Index(in.axes, kernels.Seq)
}

// BHSD views a tensor in the order of the files as [B, H, S, D], and the reverse.
func (in *Inputs) BHSD(t kernels.Tensor) (kernels.Tensor, error) {
	if !in.swapped() {
		return t, nil
	}
	return t.Swap(kernels.Heads, kernels.Seq)
}

// stored returns a shape [B, H, S, D] in the order of the files.
func (in *Inputs) stored(s kernels.Shape) kernels.Shape {
	if in.swapped() {
		s[kernels.Heads], s[kernels.Seq] = s[kernels.Seq], s[kernels.Heads]
	}
	return s
}

// FileShape returns the shape of a file with the axes of q for a shape [B, H, S, D].
func (in *Inputs) FileShape(s kernels.Shape) (shape []int) {
	for _, axis := range in.axes {
		shape = append(shape, s[axis])
	}
	return shape
}

// meta returns q, k and v without memory, as [B, H, S, D].
func (in *Inputs) meta() (t [3]kernels.Tensor, err error) {
	for i, f := range in.QKV {
		if t[i], err = kernels.Meta(in.DType, in.stored(in.shape(f))); err == nil {
			t[i], err = in.BHSD(t[i])
		}
		if err != nil {
			return t, f.Errorf("%w", err)
		}
	}
	if len(in.QKV) < len(t) { // the first column of the keys stands for the values
		if t[2], err = t[1].Slice(kernels.Dim, 0, 1); err != nil {
			return t, in.QKV[1].Errorf("%w", err)
		}
	}
	return t, nil
}

// Bias returns the file of the bias, or nil.
func (in *Inputs) Bias() *Mask {
	var opt kernels.Options
	for _, m := range in.Masks {
		if m.field(&opt) == &opt.Bias {
			return m
		}
	}
	return nil
}

// Prepare prepares the call with the outputs lse and weights on tensors without
// memory, which validates everything but the data. It returns an error for files
// beyond the memory of the machine. Errors are wrong usage where the files alone are a call.
func (in *Inputs) Prepare(dev *kernels.Device, lse, weights bool) (*kernels.Call, error) {
	opt := in.options
	opt.LSE, opt.Weights = lse, weights
	c, err := in.prepare(dev, opt)
	return c, flags.Blame(err, func() error {
		_, err := in.prepare(dev, in.ofFiles)
		return err
	})
}

func (in *Inputs) prepare(dev *kernels.Device, opt kernels.Options) (*kernels.Call, error) {
	t, err := in.meta()
	if err != nil {
		return nil, err
	}
	for _, m := range in.Masks {
		if *m.field(&opt), err = kernels.Meta(m.DType(), m.Shape); err != nil {
			return nil, m.Errorf("%w", err)
		}
	}
	return dev.Prepare(t[0], t[1], t[2], opt)
}

// CheckMemory returns ErrMemory for files whose data does not fit in memory, before it is read.
func (in *Inputs) CheckMemory() error {
	var need int64
	for _, f := range in.QKV {
		need += f.Memory(in.DType)
	}
	for _, m := range in.Masks {
		need += m.Memory(m.DType())
	}
	if err := kernels.CheckMemory(need); err != nil {
		return fmt.Errorf("the inputs need %s of memory: %w", cli.Bytes(need), err)
	}
	return nil
}

// Operands are inputs in the memory of a device.
type Operands struct {
	*Inputs
	Q, K, V kernels.Tensor // [B, H, S, D], views of tensors in the order of the files
	Options kernels.Options

	dev    *kernels.Device
	note   array.Note
	held   []kernels.Tensor
	unmaps []func() // end the mappings of files that tensors lie in
}

// Load reads the files into the memory of dev. Rounding of f8 is noted. The
// caller calls Release.
func (in *Inputs) Load(ctx context.Context, dev *kernels.Device, note array.Note) (*Operands, error) {
	o := &Operands{Inputs: in, Options: in.options, dev: dev, note: note}
	err := o.load(ctx)
	if err != nil {
		o.Release()
	}
	return o, err
}

func (o *Operands) load(ctx context.Context) (err error) {
	for i, to := range []*kernels.Tensor{&o.Q, &o.K, &o.V}[:len(o.QKV)] {
		if *to, err = o.Upload(ctx, o.QKV[i], o.DType); err != nil {
			return err
		}
	}
	for _, m := range o.Masks {
		if *m.field(&o.Options), err = o.upload(ctx, m.File, m.DType(), m.Shape); err != nil {
			return err
		}
	}
	return nil
}

// Release frees the memory.
func (o *Operands) Release() {
	for _, t := range o.held {
		t.Release()
	}
	for _, unmap := range o.unmaps {
		unmap()
	}
}

func (o *Operands) upload(ctx context.Context, f *array.File, dtype kernels.DType, shape kernels.Shape) (kernels.Tensor, error) {
	t, unmap, err := f.Upload(ctx, o.dev, dtype, shape, o.note)
	if unmap != nil {
		o.unmaps = append(o.unmaps, unmap)
	}
	if err == nil {
		o.held = append(o.held, t)
	}
	return t, err
}

// Upload uploads a file with the axes of q, which Release frees, as [B, H, S, D].
func (o *Operands) Upload(ctx context.Context, f *array.File, dtype kernels.DType) (kernels.Tensor, error) {
	t, err := o.upload(ctx, f, dtype, o.stored(o.shape(f)))
	if err != nil {
		return t, err
	}
	return o.BHSD(t)
}

// Alloc allocates a tensor [B, H, S, D] in the order of the files, which Release frees.
func (o *Operands) Alloc(ctx context.Context, shape kernels.Shape) (kernels.Tensor, error) {
	t, err := o.dev.Alloc(ctx, o.DType, o.stored(shape))
	if err != nil {
		return t, err
	}
	o.held = append(o.held, t)
	return o.BHSD(t)
}
