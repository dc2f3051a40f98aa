package main

import (
	"fmt"
	"slices"

	"github.com/seed90331342/attn/backend"
)

// runInputs are the input files of attn run, known by their headers.
type runInputs struct {
	qkv     [3]*npyFile
	dtype   backend.DType // that q, k and v have on the device
	swapped bool          // the files are [B,S,H,D]

	mask      *npyFile // nil without --mask
	maskShape backend.Shape
}

// inputs opens the files and checks what concerns files: ranks and types. How
// lengths must fit each other is for package kernels to say.
func (c *runCmd) inputs() (*runInputs, error) {
	in := &runInputs{}
	for i, f := range []struct{ name, path string }{{"q", c.Q}, {"k", c.K}, {"v", c.V}} {
		n, err := openNPY(f.name, f.path, false)
		if err != nil {
			return nil, err
		}
		if rank := len(n.Shape); rank < 2 || rank > 4 {
			return nil, fmt.Errorf("--%s %s: shape %v has %d axes, it must have 2, 3 or 4: [S,D], [B,S,D] or [B,H,S,D]",
				n.name, n.path, n.Shape, rank)
		}
		in.qkv[i] = n
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
