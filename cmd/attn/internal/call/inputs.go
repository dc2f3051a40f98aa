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
	QKV   []*array.File  // without v when only the weights are wanted
	Past  [3]*array.File // earlier k and v, else nil
	Masks []*Mask
	DType kernels.DType // to compute on
	Dims  kernels.Dims

	opt  kernels.Options
	axes []int // for each axis of the files, its place in [B, H, S, D]
}

// Mask is the file of a mask or a bias.
type Mask struct {
	*array.File
	Shape kernels.Shape
	field func(opt *kernels.Options) *kernels.Tensor
}

// Open opens the files of p and makes p canonical. It checks the ranks and types
// of the files; package kernels checks the lengths.
func (p *Problem) Open() (*Inputs, error) {
	in := &Inputs{}
	for i, f := range [3]struct{ flag, path, past string }{{"q", p.Q, ""}, {"k", p.K, p.PastK}, {"v", p.V, p.PastV}} {
		if f.path == "" && f.flag == "v" {
			continue
		}
		file, err := array.Open(f.flag, f.path, false)
		if err == nil && f.past != "" {
			in.Past[i], err = array.Open("past-"+f.flag, f.past, false)
		}
		if err != nil {
			return nil, err
		}
		switch rank := len(file.Shape); {
		case p.CuQ != nil && rank != 3:
			return nil, file.Errorf("shape %v has %d axes, packed sequences have 3: [total,H,D]", file.Shape, rank)
		case rank < 2 || rank > 4:
			return nil, file.Errorf("shape %v has %d axes, it must have 2, 3 or 4: [S,D], [B,S,D] or [B,H,S,D]", file.Shape, rank)
		}
		in.QKV = append(in.QKV, file)
	}
	switch rank := len(in.QKV[0].Shape); {
	case p.CuQ != nil:
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
	if err := in.agree(p.DType != ""); err != nil {
		return nil, err
	}
	in.DType = in.QKV[0].DType()
	if p.DType != "" {
		var err error
		if in.DType, err = cli.ParseDType("--dtype", p.DType); err != nil {
			return nil, err
		}
	}
	p.DType = in.DType.String()
	if err := in.openMasks(p); err != nil {
		return nil, err
	}
	t, err := in.meta()
	if err != nil {
		return nil, err
	}
	q, k, v := t[0].Shape(), t[1].Shape(), t[2].Shape()
	in.Dims = kernels.Dims{Batch: q[0], Heads: q[1], KVHeads: k[1], SeqQ: q[2], SeqK: k[2], Dim: q[3], ValueDim: v[3]}
	if err := p.resolve(in.Dims, in.PastKeys()); err != nil {
		return nil, err
	}
	in.opt = p.options()
	return in, nil
}

// Files returns the files of the operands, masks and biases.
func (in *Inputs) Files() (files []flags.File) {
	operands := slices.Concat(in.QKV, in.Past[:])
	for _, m := range in.Masks {
		operands = append(operands, m.File)
	}
	for _, f := range operands {
		if f != nil {
			files = append(files, flags.File{Flag: "--" + f.Flag, Path: array.Path(f.Path)})
		}
	}
	return files
}

// agree checks that the files have one rank and, unless typed, one type.
func (in *Inputs) agree(typed bool) error {
	q := in.QKV[0]
	for i, f := range slices.Concat(in.QKV[1:], in.Past[1:]) {
		if f == nil {
			continue
		}
		if len(f.Shape) != len(q.Shape) {
			return f.Errorf("shape is %v, that of --q %s is %v: they must have as many axes", f.Shape, q.Path, q.Shape)
		}
		if !typed && f.TypeName() != q.TypeName() {
			return f.Errorf("elements are %s, those of --q %s are %s: choose a type with --dtype", f.TypeName(), q.Path, q.TypeName())
		}
		if i < len(in.QKV)-1 {
			continue
		}
		next, seq := in.QKV[i-len(in.QKV)+2], slices.Index(in.axes, kernels.Seq)
		want := slices.Clone(next.Shape)
		want[seq] = f.Shape[seq]
		if !slices.Equal(want, f.Shape) {
			return f.Errorf("shape is %v, that of --%s %s is %v: only the number of keys may differ", f.Shape, next.Flag, next.Path, next.Shape)
		}
	}
	return nil
}

// openMasks opens the masks and biases. It moves a float mask to the bias.
func (in *Inputs) openMasks(p *Problem) error {
	biasFlag := "bias"
	if p.Mask != "" {
		f, err := array.Open("mask", p.Mask, true)
		if err != nil {
			return err
		}
		if f.Kind != 'b' {
			if p.Bias != "" {
				return f.Errorf("it holds numbers and --bias %s is given too: add them up in one file", p.Bias)
			}
			p.Mask, p.Bias, biasFlag = "", p.Mask, "mask"
		}
	}
	rank := len(in.QKV[0].Shape)
	for _, m := range []struct {
		flag, path string
		bools      bool
		shape      func(f *array.File, rank int) (kernels.Shape, error)
		field      func(opt *kernels.Options) *kernels.Tensor
	}{
		{"mask", p.Mask, true, maskShape, func(opt *kernels.Options) *kernels.Tensor { return &opt.Mask }},
		{biasFlag, p.Bias, false, maskShape, func(opt *kernels.Options) *kernels.Tensor { return &opt.Bias }},
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

// maskShape returns the shape of a mask as [B, H, Sq, Sk]. Its axes are those of
// scores of q's rank, [Sq,Sk], [B,Sq,Sk] or [B,H,Sq,Sk], from the right as in
// numpy. A 4-D mask has all four axes whatever q's rank is.
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

// whole returns the shape of operand i together with its past.
func (in *Inputs) whole(i int) kernels.Shape {
	s := in.shape(in.QKV[i])
	if past := in.Past[i]; past != nil {
		s[kernels.Seq] += in.shape(past)[kernels.Seq]
	}
	return s
}

// PastKeys returns the number of earlier keys.
func (in *Inputs) PastKeys() int {
	if in.Past[1] == nil {
		return 0
	}
	return in.shape(in.Past[1])[kernels.Seq]
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
		if t[i], err = kernels.Meta(in.DType, in.stored(in.whole(i))); err == nil {
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

// Prepare prepares the call with the outputs lse and weights on tensors without
// memory, which validates everything but the data. It returns an error for files
// beyond the memory of the machine.
func (in *Inputs) Prepare(dev *kernels.Device, lse, weights bool) (*kernels.Call, error) {
	t, err := in.meta()
	if err != nil {
		return nil, err
	}
	opt := in.opt
	opt.LSE, opt.Weights = lse, weights
	for _, m := range in.Masks {
		if *m.field(&opt), err = kernels.Meta(m.DType(), m.Shape); err != nil {
			return nil, m.Errorf("%w", err)
		}
	}
	return dev.Prepare(t[0], t[1], t[2], opt)
}

// CheckMemory returns ErrMemory for files whose data does not fit in memory, before it is
// read.
func (in *Inputs) CheckMemory() error {
	var need int64
	for i, f := range in.QKV {
		if past := in.Past[i]; past != nil {
			need += past.Memory(in.DType) + int64(f.Count+past.Count)*int64(in.DType.Size())
		}
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
	Q, K, V kernels.Tensor // [B, H, S, D], views of tensors in the order of the files
	Options kernels.Options

	dev    *kernels.Device
	held   []kernels.Tensor
	unmaps []func() // end the mappings of files that tensors lie in
}

// Load reads the files into the memory of dev. Rounding of f8 is noted. The
// caller calls Release.
func (in *Inputs) Load(ctx context.Context, dev *kernels.Device, note array.Note) (*Operands, error) {
	o := &Operands{Options: in.opt, dev: dev}
	err := in.load(ctx, o, note)
	if err != nil {
		o.Release()
	}
	return o, err
}

func (in *Inputs) load(ctx context.Context, o *Operands, note array.Note) (err error) {
	for i, to := range []*kernels.Tensor{&o.Q, &o.K, &o.V}[:len(in.QKV)] {
		if in.Past[i] != nil {
			*to, err = in.join(ctx, o, i, note)
		} else {
			*to, err = in.upload(ctx, o, in.QKV[i], note)
		}
		if err != nil {
			return err
		}
	}
	for _, m := range in.Masks {
		if *m.field(&o.Options), err = o.upload(ctx, m.File, m.DType(), m.Shape, note); err != nil {
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

func (o *Operands) upload(ctx context.Context, f *array.File, dtype kernels.DType, shape kernels.Shape, note array.Note) (kernels.Tensor, error) {
	t, unmap, err := f.Upload(ctx, o.dev, dtype, shape, note)
	if unmap != nil {
		o.unmaps = append(o.unmaps, unmap)
	}
	if err == nil {
		o.held = append(o.held, t)
	}
	return t, err
}

// upload uploads a file of q, k or v as [B, H, S, D].
func (in *Inputs) upload(ctx context.Context, o *Operands, f *array.File, note array.Note) (kernels.Tensor, error) {
	t, err := o.upload(ctx, f, in.DType, in.stored(in.shape(f)), note)
	if err != nil {
		return t, err
	}
	return in.BHSD(t)
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

// LoadRows reads a further file with the shape of the output, in its own type, as [B, H, Sq,
// Dv]. Release of o frees it.
func (in *Inputs) LoadRows(ctx context.Context, o *Operands, f *array.File, note array.Note) (kernels.Tensor, error) {
	t, err := o.upload(ctx, f, f.DType(), in.stored(in.shape(f)), note)
	if err != nil {
		return t, err
	}
	return in.BHSD(t)
}

// Alloc allocates a tensor [B, H, S, D] in the order of the files, which Release releases.
func (in *Inputs) Alloc(ctx context.Context, o *Operands, shape kernels.Shape) (kernels.Tensor, error) {
	t, err := o.dev.Alloc(ctx, in.DType, in.stored(shape))
	if err != nil {
		return t, err
	}
	o.held = append(o.held, t)
	return in.BHSD(t)
}

// join uploads operand i after its past.
func (in *Inputs) join(ctx context.Context, o *Operands, i int, note array.Note) (kernels.Tensor, error) {
	all, err := in.Alloc(ctx, o, in.whole(i))
	if err != nil {
		return all, err
	}
	first := 0
	for _, f := range []*array.File{in.Past[i], in.QKV[i]} {
		part, err := in.upload(ctx, o, f, note)
		if err != nil {
			return all, err
		}
		keys := part.Shape()[kernels.Seq]
		to, err := all.Slice(kernels.Seq, first, first+keys)
		if err == nil {
			err = o.dev.Copy(ctx, []kernels.Tensor{to}, []kernels.Tensor{part})
		}
		if err != nil {
			return all, err
		}
		first += keys
	}
	return all, nil
}
