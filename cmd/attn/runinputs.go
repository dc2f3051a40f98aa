package main

import (
	"fmt"
	"slices"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
)

// namedPath is a file and what the command line calls it.
type namedPath struct{ name, path string }

// runInputs are the input files of a call, known by their headers.
type runInputs struct {
	qkv     []*npyFile  // v is not there when only the weights are wanted
	past    [3]*npyFile // of k and v, nil without
	dtype   backend.DType
	swapped bool // the files are [B,S,H,D], or packed
	packed  bool // [total,H,D], with
	cuQ     []int
	cuK     []int // as cuQ when there are none of their own
	pairs   []pairFile
}

// pairFile is a mask or a bias.
type pairFile struct {
	*npyFile
	shape backend.Shape // as [B, H, Sq, Sk]
	put   func(opt *kernels.Options, t backend.Tensor)
}

// inputs opens the files of p and checks what concerns files: ranks and types. How
// lengths must fit each other is for package kernels to say. It moves a float mask to
// where biases are.
func (p *problem) inputs() (*runInputs, error) {
	in := &runInputs{packed: p.packed(), cuQ: p.CuQ, cuK: p.CuK}
	if in.cuK == nil {
		in.cuK = in.cuQ
	}
	for i, f := range []struct{ name, path, past string }{{"q", p.Q, ""}, {"k", p.K, p.PastK}, {"v", p.V, p.PastV}} {
		if f.path == "" && f.name == "v" {
			continue
		}
		n, err := openNPY(f.name, f.path, false)
		if err != nil {
			return nil, err
		}
		switch rank := len(n.Shape); {
		case in.packed && rank != 3:
			return nil, fmt.Errorf("--%s %s: shape %v has %d axes, packed sequences have 3: [total,H,D]", n.name, n.path, n.Shape, rank)
		case rank < 2 || rank > 4:
			return nil, fmt.Errorf("--%s %s: shape %v has %d axes, it must have 2, 3 or 4: [S,D], [B,S,D] or [B,H,S,D]",
				n.name, n.path, n.Shape, rank)
		}
		in.qkv = append(in.qkv, n)
		if f.past != "" {
			if in.past[i], err = openNPY("past-"+f.name, f.past, false); err != nil {
				return nil, err
			}
		}
	}
	in.swapped = in.packed || p.Layout == "bshd" && len(in.qkv[0].Shape) == 4
	if err := in.agree(p.DType); err != nil {
		return nil, err
	}
	in.dtype = in.qkv[0].dtype()
	if p.DType != "" {
		var err error
		if in.dtype, err = p.dtype(); err != nil {
			return nil, err
		}
	}
	p.DType = in.dtype.String()
	return in, in.openPairs(p)
}

// agree checks that the files have one rank, and one type unless dtype says which.
func (in *runInputs) agree(dtype string) error {
	q := in.qkv[0]
	for i, n := range slices.Concat(in.qkv[1:], in.past[1:]) {
		if n == nil {
			continue
		}
		now := i - len(in.qkv) + 2 // of what is from before
		if len(n.Shape) != len(q.Shape) {
			return fmt.Errorf("--%s %s has shape %v, --q %s has %v: they must have as many axes", n.name, n.path, n.Shape, q.path, q.Shape)
		}
		if dtype == "" && n.Size != q.Size {
			return fmt.Errorf("--%s %s is %s, --q %s is %s: say which type to compute on with --dtype", n.name, n.path, n.TypeName(), q.path, q.TypeName())
		}
		if now < 1 {
			continue
		}
		// What is from before differs from what follows it in its length alone.
		next, seq := in.qkv[now], in.seqAxis()
		want := slices.Clone(next.Shape)
		want[seq] = n.Shape[seq]
		if !slices.Equal(want, n.Shape) {
			return fmt.Errorf("--%s %s has shape %v, --%s %s has %v: they may differ in the number of keys alone", n.name, n.path, n.Shape, next.name, next.path, next.Shape)
		}
	}
	return nil
}

// seqAxis is the axis of the files along which the sequence goes.
func (in *runInputs) seqAxis() int {
	switch rank := len(in.qkv[0].Shape); {
	case in.packed:
		return 0
	case in.swapped:
		return 1
	default:
		return rank - 2
	}
}

// openPairs opens the masks and biases.
func (in *runInputs) openPairs(p *problem) error {
	open := func(name, path string, bools bool, shape func(*npyFile, int) (backend.Shape, error), put func(*kernels.Options, backend.Tensor)) (*npyFile, error) {
		n, err := openNPY(name, path, bools)
		if err != nil {
			return nil, err
		}
		s, err := shape(n, len(in.qkv[0].Shape))
		in.pairs = append(in.pairs, pairFile{n, s, put})
		return n, err
	}
	summed := false // the float mask is open as the bias
	if p.Mask != "" {
		n, err := open("mask", p.Mask, true, maskShape, setMask)
		if err != nil {
			return err
		}
		if n.Kind != 'b' {
			if p.Bias != "" {
				return fmt.Errorf("--mask %s holds numbers and --bias %s is given too: add them up in one file", p.Mask, p.Bias)
			}
			p.Mask, p.Bias, summed = "", p.Mask, true
		}
	}
	if p.Bias != "" && !summed {
		if _, err := open("bias", p.Bias, false, maskShape, setMask); err != nil {
			return err
		}
	}
	if p.RelativeBias != "" {
		_, err := open("relative-bias", p.RelativeBias, false, distanceShape, func(opt *kernels.Options, t backend.Tensor) { opt.RelativeBias = t })
		if err != nil {
			return err
		}
	}
	if p.BlockMask != "" {
		n, err := open("block-mask", p.BlockMask, true, maskShape, func(opt *kernels.Options, t backend.Tensor) { opt.BlockMask = t })
		if err != nil {
			return err
		}
		if n.Kind != 'b' {
			return fmt.Errorf("--block-mask %s: elements are %s, they must be bool", p.BlockMask, n.TypeName())
		}
	}
	return nil
}

// setMask puts a mask where its type belongs.
func setMask(opt *kernels.Options, m backend.Tensor) {
	if m.DType() == backend.Bool {
		opt.Mask = m
	} else {
		opt.Bias = m
	}
}

// maskShape places the axes of a mask on [B, H, Sq, Sk] as numpy broadcasts to
// scores of q's rank, [Sq,Sk], [B,Sq,Sk] or [B,H,Sq,Sk]: from the right. A 4-D
// mask has all four axes whatever q's rank is.
func maskShape(m *npyFile, rank int) (backend.Shape, error) {
	n := len(m.Shape)
	if n < 1 || n > 4 || n == 3 && rank == 2 {
		scores := [...]string{2: "[Sq,Sk]", 3: "[B,Sq,Sk]", 4: "[B,H,Sq,Sk]"}[rank]
		return backend.Shape{}, fmt.Errorf("--%s %s: shape %v has %d axes, it must broadcast to %s", m.name, m.path, m.Shape, n, scores)
	}
	shape := backend.Shape{1, 1, 1, 1}
	copy(shape[4-n:], m.Shape)
	if n == 3 && rank == 3 { // [B,Sq,Sk]: there is no axis of heads
		shape[backend.Batch], shape[backend.Heads] = m.Shape[0], 1
	}
	return shape, nil
}

// distanceShape places the axes of a bias by distance on [B, H, 1, Sq+Sk-1].
func distanceShape(m *npyFile, _ int) (backend.Shape, error) {
	n := len(m.Shape)
	if n < 1 || n > 3 {
		return backend.Shape{}, fmt.Errorf("--%s %s: shape %v has %d axes, it must be [Sq+Sk-1], [H,Sq+Sk-1] or [B,H,Sq+Sk-1]", m.name, m.path, m.Shape, n)
	}
	shape := backend.Shape{1, 1, 1, m.Shape[n-1]}
	copy(shape[3-n:2], m.Shape)
	return shape, nil
}

// stored is the shape of an input as four axes in the file's order: [B,H,S,D],
// [B,S,H,D], or for packed ones [1,total,H,D].
func (in *runInputs) stored(n *npyFile) backend.Shape {
	s := n.Shape
	switch {
	case in.packed:
		return backend.Shape{1, s[0], s[1], s[2]}
	case len(s) == 2:
		return backend.Shape{1, 1, s[0], s[1]}
	case len(s) == 3:
		return backend.Shape{s[0], 1, s[1], s[2]}
	}
	return backend.Shape(s)
}

// whole is the shape of operand i with what is from before, in the file's order.
func (in *runInputs) whole(i int) backend.Shape {
	s := in.stored(in.qkv[i])
	if past := in.past[i]; past != nil {
		axis := backend.Seq
		if in.swapped {
			axis = backend.Heads
		}
		s[axis] += in.stored(past)[axis]
	}
	return s
}

// pastKeys is how many keys are from before.
func (in *runInputs) pastKeys() int {
	if in.past[1] == nil {
		return 0
	}
	return in.past[1].Shape[in.seqAxis()]
}

// bhsd views a tensor in the files' order of axes as [B, H, S, D], and the other
// way round.
func (in *runInputs) bhsd(t backend.Tensor) (backend.Tensor, error) {
	if !in.swapped {
		return t, nil
	}
	return t.Swap(backend.Heads, backend.Seq)
}

// meta returns q, k and v without memory, as [B, H, S, D]. Where there are no values
// the keys' first column is in their place.
func (in *runInputs) meta() (t [3]backend.Tensor, err error) {
	for i, f := range in.qkv {
		if t[i], err = backend.Meta(in.dtype, in.whole(i)); err == nil {
			t[i], err = in.bhsd(t[i])
		}
		if err != nil {
			return t, fmt.Errorf("--%s %s: %w", f.name, f.path, err)
		}
	}
	if len(in.qkv) < len(t) {
		if t[2], err = t[1].Slice(backend.Dim, 0, 1); err != nil {
			return t, fmt.Errorf("--%s %s: %w", in.qkv[1].name, in.qkv[1].path, err)
		}
	}
	return t, nil
}

// outShape drops the axes that q's file does not have from a shape in its order of axes.
func (in *runInputs) outShape(s backend.Shape) []int {
	switch {
	case in.packed:
		return s[1:]
	case len(in.qkv[0].Shape) == 2:
		return s[2:]
	case len(in.qkv[0].Shape) == 3:
		return slices.Concat(s[:1], s[2:])
	}
	return s[:]
}

// lseShape is [B,H,Sq], or [H,total] of packed sequences.
func (in *runInputs) lseShape(s backend.Shape) []int {
	if in.packed {
		return s[1:backend.Dim]
	}
	return s[:backend.Dim]
}

// fitMemory refuses files whose data the machine's memory cannot hold, which Go
// would end the program for: those that are read, as they must be converted, and
// not mapped. The CPU backend knows how much there is.
func (in *runInputs) fitMemory() error {
	var need int64
	for i, f := range in.qkv {
		switch past := in.past[i]; {
		case past != nil:
			need += 2 * int64(f.Count+past.Count) * int64(max(in.dtype.Size(), 4))
		case !f.mappable(in.dtype):
			need += int64(f.Count) * int64(max(in.dtype.Size(), min(f.Size, 4)))
		}
	}
	for _, m := range in.pairs {
		if !m.mappable(m.dtype()) {
			need += int64(m.Count) * int64(m.dtype().Size())
		}
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
