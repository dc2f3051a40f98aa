package kernels_test

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"strings"
	"testing"

	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
	"github.com/seed90331342/attn/kernels/npy"
	"github.com/seed90331342/attn/kernels/safetensors"
)

// TestMessages: errors name an operation once, the argument, and what to write instead.
func TestMessages(t *testing.T) {
	ctx, dev := t.Context(), kernels.NewDevice(cpu.New(cpu.Options{}))
	defer dev.Close()
	closed := kernels.NewDevice(cpu.New(cpu.Options{}))
	must.Do(t, closed.Close())
	x := make([]float32, 12)
	slices := func(dev *kernels.Device, d kernels.Dims) error {
		_, err := dev.AttentionFloat32(ctx, d, kernels.BHSD, x, x, x, kernels.Options{})
		return err
	}
	q := must.Get(kernels.HostF32(x, kernels.Shape{1, 1, 3, 4}))(t)
	flat := must.Get(kernels.AllocHost(kernels.F32, kernels.Shape{3, 4}))(t)
	mask := must.Get(kernels.AllocHost(kernels.Bool, kernels.Shape{3, 3}))(t)
	_, short := kernels.HostF32(x, kernels.Shape{3, 4})
	_, single := kernels.HostF32(x, kernels.Shape{12})
	_, negative := kernels.HostF32(x, kernels.Shape{1, 4, -220, 40})
	_, other := dev.Attention(ctx, q, q, q, kernels.Options{Mask: mask})
	_, missing := dev.Attention(ctx, flat, q, q, kernels.Options{})
	for _, c := range []struct {
		err  error
		is   error
		want string
	}{
		{slices(closed, kernels.Dims{SeqQ: 3, Dim: 4}), kernels.ErrClosed, "attention: q: cpu: upload: backend is closed"},
		{slices(dev, kernels.Dims{SeqQ: -220, Dim: 40}), kernels.ErrShape, "attention: Dims has SeqQ -220 and SeqK -220: each must be at least 0: shapes do not match"},
		{slices(dev, kernels.Dims{SeqQ: 3, SeqK: -2, Dim: 4}), kernels.ErrShape, "attention: Dims has SeqQ 3 and SeqK -2: each must be at least 0: shapes do not match"},
		{slices(dev, kernels.Dims{SeqQ: 3, Dim: 4, Heads: -1}), kernels.ErrShape, "attention: Dims has Batch 1, Heads -1, KVHeads -1 and ValueDim 4: each must be at least 1, or 0 for the default: shapes do not match"},
		{short, kernels.ErrShape, "data has 12 elements, shape [3 4 0 0] needs 0 (a Shape has four lengths, [batch, heads, seq, dim]: write [1 1 3 4]?): shapes do not match"},
		{single, kernels.ErrShape, "data has 12 elements, shape [12 0 0 0] needs 0 (a Shape has four lengths, [batch, heads, seq, dim]: write [1 1 1 12]?): shapes do not match"},
		{negative, kernels.ErrShape, "shape [1 4 -220 40] is negative or too large: shapes do not match"},
		{other, kernels.ErrShape, "attention: mask: shape [3 3 0 0] does not broadcast to [1 1 3 3] (each length must be equal or 1) (a Shape has four lengths, [batch, heads, seq, dim]: write [1 1 3 3]?): shapes do not match"},
		{missing, kernels.ErrShape, "attention: the head sizes of q [3 4 0 0] and v [1 1 3 4] are 0 and 4: both must be at least 1 (a Shape has four lengths, [batch, heads, seq, dim]: write [1 1 3 4]?): shapes do not match"},
	} {
		if !errors.Is(c.err, c.is) || c.err.Error() != c.want {
			t.Errorf("error is\n%v\nwant\n%s", c.err, c.want)
		}
	}
	call := must.Get(closed.Prepare(q, q, q, kernels.Options{}))(t)
	o := must.Get(kernels.AllocHost(kernels.F32, q.Shape()))(t)
	if err := call.RunInto(ctx, kernels.Result{O: o}); !errors.Is(err, kernels.ErrClosed) || err.Error() != "cpu: attention: backend is closed" {
		t.Errorf("a closed backend: %v", err)
	}
}

// failing is a file that cannot be read.
type failing struct{}

func (failing) Read([]byte) (int, error)          { return 0, fs.ErrPermission }
func (failing) ReadAt([]byte, int64) (int, error) { return 0, fs.ErrPermission }

// TestSentinels: errors that begin in another package, or in a file, wrap a sentinel too.
func TestSentinels(t *testing.T) {
	const version1 = "\x93NUMPY\x01\x00"
	opened := func(name, tier string) error {
		t.Setenv("ATTN_CPU_TIER", tier)
		return must.Err(kernels.Open(name))
	}
	array := func(text string) error {
		_, _, err := npy.Open(strings.NewReader(text), int64(len(text)))
		if _, other := npy.ReadHeader(strings.NewReader(text), int64(len(text)), false); other == nil || other.Error() != err.Error() {
			t.Errorf("Open: %v, ReadHeader: %v", err, other)
		}
		return err
	}
	tensors := func(text string) error {
		return must.Err(safetensors.ReadHeader(strings.NewReader(text), int64(len(text))))
	}
	const f8 = `{"q":{"dtype":"F8_E4M3","shape":[0],"data_offsets":[0,0]}}`
	h := must.Get(safetensors.ReadHeader(strings.NewReader(fmt.Sprintf("%c\x00\x00\x00\x00\x00\x00\x00%s", len(f8), f8)), int64(8+len(f8))))(t)
	one := npy.Header{Kind: 'f', Size: 4, Count: 1}
	_, _, unreadable := npy.Open(failing{}, 128)
	_, _, unmapped := one.Map(nil)
	for _, c := range []struct {
		what string
		err  error
		is   []error
	}{
		{"cpu.Open of an unknown tier", must.Err(cpu.Open(cpu.Options{Tier: "bogus"})), []error{kernels.ErrOption, cpu.ErrTier}},
		{"ATTN_CPU_TIER", opened("cpu", "bogus"), []error{kernels.ErrOption, cpu.ErrTier}},
		{"an unknown family", opened("tpu", ""), []error{kernels.ErrNoBackend}},
		{"another CPU", opened("cpu:1", ""), []error{kernels.ErrNoDevice}},
		{"npy: junk", array("hello, world"), []error{kernels.ErrFile}},
		{"npy: nothing", array(""), []error{kernels.ErrFile}},
		{"npy: half a header", array(version1 + "\x76\x00{'descr'"), []error{kernels.ErrFile}},
		{"npy: no dict", array(version1 + "\x02\x00[]"), []error{kernels.ErrFile}},
		{"npy: a negative length", array(version1 + "\x3c\x00{'descr': '<f4', 'fortran_order': False, 'shape': (-1,-1), }\n"), []error{kernels.ErrFile, kernels.ErrShape}},
		{"npy: complex numbers", array(version1 + "\x3a\x00{'descr': '<c8', 'fortran_order': False, 'shape': (0,), }\n"), []error{kernels.ErrDType}},
		{"npy: a negative size", must.Err(npy.ReadHeader(strings.NewReader("x"), -1, false)), []error{kernels.ErrFile}},
		{"npy: the error of a reader", unreadable, []error{kernels.ErrFile, fs.ErrPermission}},
		{"npy: that of a ReaderAt", must.Err(npy.ReadHeader(failing{}, 128, false)), []error{kernels.ErrFile, fs.ErrPermission}},
		{"npy.Read", must.Err(npy.Read(failing{}, one, func([]float32, []byte) {})), []error{kernels.ErrFile, fs.ErrPermission}},
		{"npy.Header.SetShape", one.SetShape([]int{-1}), []error{kernels.ErrShape}},
		{"npy.Write", npy.Write(io.Discard, "<c8", []int{1}, []float32{1}), []error{kernels.ErrDType}},
		{"safetensors: junk", tensors("hello, world"), []error{kernels.ErrFile}},
		{"safetensors: nothing", tensors(""), []error{kernels.ErrFile}},
		{"safetensors: a list", tensors("\x02\x00\x00\x00\x00\x00\x00\x00[]"), []error{kernels.ErrFile}},
		{"safetensors: a negative size", must.Err(safetensors.ReadHeader(failing{}, -1)), []error{kernels.ErrFile}},
		{"safetensors: the error of a reader", must.Err(safetensors.ReadHeader(failing{}, 128)), []error{kernels.ErrFile, fs.ErrPermission}},
		{"safetensors: a missing tensor", must.Err(h.Tensor("k")), []error{kernels.ErrFile}},
		{"safetensors: F8", must.Err(h.Tensor("q")), []error{kernels.ErrDType}},
	} {
		for _, is := range c.is {
			if !errors.Is(c.err, is) {
				t.Errorf("%s: %v is not %v", c.what, c.err, is)
			}
		}
	}
	if !errors.Is(unmapped, kernels.ErrFile) && !errors.Is(unmapped, kernels.ErrUnsupported) {
		t.Errorf("npy.Header.Map: %v", unmapped)
	}
}

// TestNoKeys: slices without keys are a call without keys, whose rows are zeros.
func TestNoKeys(t *testing.T) {
	dev := kernels.NewDevice(cpu.New(cpu.Options{}))
	defer dev.Close()
	q := []float32{1, 2, 3, 4}
	o, err := dev.AttentionFloat32(t.Context(), kernels.Dims{SeqQ: 2, Dim: 2, ValueDim: 3}, kernels.BHSD, q, nil, nil, kernels.Options{Causal: true})
	if err != nil || len(o) != 6 {
		t.Fatalf("%v, %v, want 6 zeros", o, err)
	}
	for _, x := range o {
		if math.Float32bits(x) != 0 {
			t.Errorf("the output is %v, want zeros", o)
		}
	}
	for name, err := range map[string]error{
		"values without keys": must.Err(dev.AttentionFloat32(t.Context(), kernels.Dims{SeqQ: 2, Dim: 2}, kernels.BHSD, q, nil, q, kernels.Options{})),
		"a number of keys":    must.Err(dev.AttentionFloat32(t.Context(), kernels.Dims{SeqQ: 2, SeqK: 2, Dim: 2}, kernels.BHSD, q, nil, nil, kernels.Options{})),
	} {
		must.Fail(t, name, err, kernels.ErrShape)
	}
}

// TestLayout: data in either layout gives the same numbers, and an output in its layout.
func TestLayout(t *testing.T) {
	dev := kernels.NewDevice(cpu.New(cpu.Options{}))
	defer dev.Close()
	d := kernels.Dims{Batch: 2, Heads: 4, KVHeads: 2, SeqQ: 3, SeqK: 5, Dim: 4, ValueDim: 2}
	// data returns numbers, and the same ones with heads and positions exchanged.
	data := func(heads, seq, dim int) (bhsd, bshd []float32) {
		bhsd, bshd = make([]float32, d.Batch*heads*seq*dim), make([]float32, d.Batch*heads*seq*dim)
		for i := range bhsd {
			bhsd[i] = float32(i*37%101)/64 - 0.75
			b, h, s, x := i/(heads*seq*dim), i/(seq*dim)%heads, i/dim%seq, i%dim
			bshd[((b*seq+s)*heads+h)*dim+x] = bhsd[i]
		}
		return bhsd, bshd
	}
	q, qs := data(d.Heads, d.SeqQ, d.Dim)
	k, ks := data(d.KVHeads, d.SeqK, d.Dim)
	v, vs := data(d.KVHeads, d.SeqK, d.ValueDim)
	want := must.Get(dev.AttentionFloat32(t.Context(), d, kernels.BHSD, q, k, v, kernels.Options{Causal: true}))(t)
	got := must.Get(dev.AttentionFloat32(t.Context(), d, kernels.BSHD, qs, ks, vs, kernels.Options{Causal: true}))(t)
	for i, x := range want {
		b, h, s, e := i/(d.Heads*d.SeqQ*d.ValueDim), i/(d.SeqQ*d.ValueDim)%d.Heads, i/d.ValueDim%d.SeqQ, i%d.ValueDim
		if y := got[((b*d.SeqQ+s)*d.Heads+h)*d.ValueDim+e]; y != x {
			t.Fatalf("element %d is %v by BSHD, %v by BHSD", i, y, x)
		}
	}
	must.Fail(t, "layout 2", must.Err(dev.AttentionFloat32(t.Context(), d, 2, q, k, v, kernels.Options{})), kernels.ErrOption)
}
