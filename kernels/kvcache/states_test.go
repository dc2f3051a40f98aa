package kvcache_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"slices"
	"testing"

	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
	"github.com/seed90331342/attn/kernels/kvcache"
)

var smallStates = kvcache.StateConfig{Batch: 2, KVHeads: 2, Dim: 4, ValueDim: 3, Channels: 5, Width: 3, Window: 4}

// layerStep makes the two calls of tokens whose elements are x.
func layerStep(t *testing.T, ctx context.Context, c *kvcache.States, config kvcache.StateConfig, tokens int, x float32) error {
	t.Helper()
	conv, linear := layerCalls(t, config, tokens, x)
	if config.Channels > 0 {
		if err := c.CausalConv(ctx, conv); err != nil {
			return err
		}
	}
	return c.LinearAttention(ctx, linear)
}

func layerCalls(t *testing.T, config kvcache.StateConfig, tokens int, x float32) (kernels.CausalConv, kernels.LinearAttention) {
	t.Helper()
	full := func(batch, heads, n, dim int) kernels.Tensor {
		shape := kernels.Shape{batch, heads, n, dim}
		return must.Get(kernels.HostF32(slices.Repeat([]float32{x}, shape.Elements()), shape))(t)
	}
	b, channels := config.Batch, max(config.Channels, 1)
	return kernels.CausalConv{X: full(b, 1, tokens, channels), Y: full(b, 1, tokens, channels), W: full(1, 1, max(config.Width, 1), channels)},
		kernels.LinearAttention{Q: full(b, 2, tokens, config.Dim), K: full(b, 2, tokens, config.Dim), V: full(b, 2, tokens, config.ValueDim), O: full(b, 2, tokens, config.ValueDim)}
}

// saved returns the file of sequence b.
func saved(t *testing.T, c *kvcache.States, b int) []byte {
	t.Helper()
	var file bytes.Buffer
	must.Do(t, c.Save(t.Context(), b, &file))
	return file.Bytes()
}

func TestStateConfigs(t *testing.T) {
	dev := onCPU(t, cpu.Options{})
	for _, c := range []struct {
		name   string
		dev    *kernels.Device
		change func(c *kvcache.StateConfig)
		want   error
		text   string
	}{
		{"no head size", dev, func(c *kvcache.StateConfig) { c.Dim = 0 }, kernels.ErrOption, "states: config: Dim is 0, it must be 1 to"},
		{"negative heads", dev, func(c *kvcache.StateConfig) { c.KVHeads = -1 }, kernels.ErrOption, "KVHeads is -1"},
		{"negative window", dev, func(c *kvcache.StateConfig) { c.Window = -1 }, kernels.ErrOption, "Window is -1"},
		{"negative batch", dev, func(c *kvcache.StateConfig) { c.Batch = -1 }, kernels.ErrOption, "Batch is -1"},
		{"negative channels", dev, func(c *kvcache.StateConfig) { c.Channels = -1 }, kernels.ErrOption, "Channels is -1"},
		{"channels without a width", dev, func(c *kvcache.StateConfig) { c.Width = 0 }, kernels.ErrOption, "Channels is 5 and Width is 0"},
		{"a width without channels", dev, func(c *kvcache.StateConfig) { c.Channels = 0 }, kernels.ErrOption, "Channels is 0 and Width is 3"},
		{"too wide", dev, func(c *kvcache.StateConfig) { c.Width = 65 }, kernels.ErrOption, "Width is 65"},
		{"a backend without copies", kernels.NewDevice(noCopies{dev.Backend()}), func(*kvcache.StateConfig) {}, kernels.ErrUnsupported, "cpu has no copies"},
		{"more than there is", dev, func(c *kvcache.StateConfig) { c.Batch, c.Dim, c.ValueDim = 1<<20, 1<<14, 1<<14 }, kernels.ErrMemory, ""},
		{"more sequences than there can be", dev, func(c *kvcache.StateConfig) { c.Batch = 1 << 30 }, kernels.ErrMemory, ""},
	} {
		config := smallStates
		c.change(&config)
		must.Fail(t, c.name, must.Err(kvcache.NewStates(t.Context(), c.dev, config)), c.want, c.text)
	}
}

// TestStateCalls lists calls that a state cache refuses. They change nothing.
func TestStateCalls(t *testing.T) {
	ctx, dev := t.Context(), onCPU(t, cpu.Options{})
	c := must.Get(kvcache.NewStates(ctx, dev, smallStates))(t)
	defer c.Release()
	bare := must.Get(kvcache.NewStates(ctx, dev, kvcache.StateConfig{Dim: 4}))(t)
	defer bare.Release()
	must.Do(t, layerStep(t, ctx, c, smallStates, 3, 0.5))
	before := saved(t, c, 1)
	conv, linear := layerCalls(t, smallStates, 2, 1)
	state := must.Get(kernels.AllocHost(kernels.F32, kernels.Shape{2, 2, 4, 3}))(t)
	rows := must.Get(kernels.AllocHost(kernels.F32, kernels.Shape{2, 1, 2, 5}))(t)
	conv3, linear3 := layerCalls(t, kvcache.StateConfig{Batch: 3, Dim: 4, ValueDim: 3, Channels: 5, Width: 3}, 2, 1)
	for _, x := range []struct {
		name string
		err  error
		want error
		text string
	}{
		{"a past state", c.CausalConv(ctx, kernels.CausalConv{X: conv.X, Y: conv.Y, W: conv.W, PastState: rows}), kernels.ErrOption, "past state or present state is set, but the cache sets them itself"},
		{"a present state", c.LinearAttention(ctx, kernels.LinearAttention{Q: linear.Q, K: linear.K, V: linear.V, O: linear.O, PresentState: state}), kernels.ErrOption, "the cache sets them itself"},
		{"sequences of a convolution", c.CausalConv(ctx, conv3), kernels.ErrShape, "past state has shape [2 1 2 5], it must be [3 1 2 5]"},
		{"sequences", c.LinearAttention(ctx, linear3), kernels.ErrShape, "past state has shape [2 2 4 3], it must be [3 2 4 3]"},
		{"tokens of k", c.LinearAttention(ctx, kernels.LinearAttention{Q: linear.Q, K: must.Get(linear.K.Slice(kernels.Seq, 0, 1))(t), V: linear.V, O: linear.O}), kernels.ErrShape, "q has shape [2 2 2 4], k [2 2 1 4]"},
		{"tokens of q", c.LinearAttention(ctx, kernels.LinearAttention{Q: must.Get(linear.Q.Slice(kernels.Seq, 0, 1))(t), K: linear.K, V: linear.V, O: linear.O}), kernels.ErrShape, "q has shape [2 2 1 4], k [2 2 2 4]"},
		{"nothing", c.LinearAttention(ctx, kernels.LinearAttention{}), kernels.ErrShape, "q is missing"},
		{"packed", c.LinearAttention(ctx, kernels.LinearAttention{Q: linear.Q, K: linear.K, V: linear.V, O: linear.O, CuQ: []int{0, 1, 2}}), kernels.ErrShape, "packed sequences (cuQ) have 1"},
		{"no convolution", bare.CausalConv(ctx, conv), kernels.ErrOption, "the cache has no convolution, set Channels and Width"},
		{"rewind of a sequence that does not exist", c.Rewind(2, 0), kernels.ErrOption, "rewind: sequence 2 does not exist, the cache has 2"},
		{"rewind forward", c.Rewind(1, 4), kernels.ErrOption, "length is 4, it must be 0 or 1 to 3"},
		{"rewind to less than nothing", c.Rewind(1, -1), kernels.ErrOption, "length is -1"},
		{"fork of a sequence that does not exist", c.Fork(ctx, -1, 0), kernels.ErrOption, "fork: sequence -1 does not exist"},
		{"fork to one that does not exist", c.Fork(ctx, 0, 2), kernels.ErrOption, "sequence 2 is no other one of 2"},
		{"fork to itself", c.Fork(ctx, 1, 1), kernels.ErrOption, "sequence 1 is no other one of 2"},
		{"save of a sequence that does not exist", c.Save(ctx, 2, io.Discard), kernels.ErrOption, "save: sequence 2"},
		{"save to nothing", c.Save(ctx, 1, nil), kernels.ErrOption, "the writer is nil"},
		{"load of a sequence that does not exist", c.Load(ctx, 2, bytes.NewReader(before), int64(len(before))), kernels.ErrOption, "load: sequence 2"},
	} {
		must.Fail(t, x.name, x.err, x.want, x.text)
	}
	if n := c.Lens(); !slices.Equal(n, []int{3, 3}) || !bytes.Equal(saved(t, c, 1), before) {
		t.Errorf("refused calls change the states, or the lengths to %v", n)
	}
	must.Do(t, c.CausalConv(ctx, conv))
	for name, err := range map[string]error{"fork": c.Fork(ctx, 0, 1), "save": c.Save(ctx, 0, io.Discard)} {
		must.Fail(t, name+" between the calls of a step", err, kernels.ErrOption, "3 tokens in its state and 5 in its convolution")
	}
	must.Do(t, c.Rewind(0, 3))
	must.Do(t, c.LinearAttention(ctx, linear))
	must.Fail(t, "rewind", c.Rewind(0, 5), kernels.ErrOption, "length is 5")
	c.Release()
	for name, err := range map[string]error{"call": c.LinearAttention(ctx, linear), "rewind": c.Rewind(0, 0), "fork": c.Fork(ctx, 0, 1), "save": c.Save(ctx, 0, io.Discard)} {
		must.Fail(t, name+" after Release", err, kernels.ErrReleased, "the cache was released")
	}
}

// TestRewindStates: Rewind reaches over several calls as far as the Window does, and a state is that after the tokens left.
func TestRewindStates(t *testing.T) {
	ctx := t.Context()
	c := must.Get(kvcache.NewStates(ctx, onCPU(t, cpu.Options{}), smallStates))(t)
	defer c.Release()
	files := [][]byte{saved(t, c, 1)} // after each number of tokens
	for n := range 9 {
		must.Do(t, layerStep(t, ctx, c, smallStates, 1, float32(n)/8))
		files = append(files, saved(t, c, 1))
	}
	must.Fail(t, "further than the window", c.Rewind(1, 4), kernels.ErrOption, "rewind: length is 4, it must be 0 or 5 to 9, of which the cache has the states")
	for n := 9; n >= 5; n-- {
		must.Do(t, c.Rewind(1, n))
		if c.Lens()[1] != n || !bytes.Equal(saved(t, c, 1), files[n]) {
			t.Errorf("rewound to %d tokens, sequence 1 has %d and another state", n, c.Lens()[1])
		}
	}
	must.Fail(t, "twice further than the window", c.Rewind(1, 4), kernels.ErrOption, "it must be 0 or 5 to 5")
	must.Do(t, layerStep(t, ctx, c, smallStates, 3, 5.0/8)) // copies the state of sequence 1 to that of sequence 0
	must.Do(t, c.Rewind(1, 6))
	if !bytes.Equal(saved(t, c, 1), files[6]) {
		t.Error("another state after a token of a second try")
	}
	must.Do(t, layerStep(t, ctx, c, smallStates, 4, 1))
	for name, f := range map[string]func() error{
		"a call that copies": func() error { return layerStep(t, ctx, c, smallStates, 1, 1) },
		"fork":               func() error { return c.Fork(ctx, 0, 1) },
		"load": func() error {
			file := saved(t, c, 1)
			return c.Load(ctx, 1, bytes.NewReader(file), int64(len(file)))
		},
	} {
		must.Do(t, layerStep(t, ctx, c, smallStates, 4, 1))
		must.Do(t, c.Rewind(1, c.Lens()[1]-1))
		n := c.Lens()[1]
		must.Do(t, f())
		if name == "fork" {
			n = c.Lens()[1]
		}
		must.Fail(t, "before "+name, c.Rewind(1, n-1), kernels.ErrOption, "of which the cache has the states")
	}
	must.Do(t, layerStep(t, ctx, c, smallStates, 5, 1))
	n := c.Lens()[1]
	must.Fail(t, "of a call longer than the window", c.Rewind(1, n-1), kernels.ErrOption, fmt.Sprintf("it must be 0 or %d to %d", n, n))
	must.Do(t, c.Rewind(1, 0))
	if c.Lens()[1] != 0 || !bytes.Equal(saved(t, c, 1), files[0]) {
		t.Errorf("%d tokens, or a state that is not zero, at the start", c.Lens()[1])
	}
}

// TestStateFiles: other files are errors that name what is wrong, and change nothing.
func TestStateFiles(t *testing.T) {
	ctx, dev := t.Context(), onCPU(t, cpu.Options{})
	c := must.Get(kvcache.NewStates(ctx, dev, smallStates))(t)
	defer c.Release()
	must.Do(t, layerStep(t, ctx, c, smallStates, 70000, 0.01))
	good := saved(t, c, 0)
	must.Do(t, layerStep(t, ctx, c, smallStates, 1, 1))
	before := saved(t, c, 0)
	other := func(change func(c *kvcache.StateConfig)) []byte {
		config := smallStates
		change(&config)
		x := must.Get(kvcache.NewStates(ctx, dev, config))(t)
		defer x.Release()
		return saved(t, x, 0)
	}
	header := 8 + int(binary.LittleEndian.Uint64(good))
	meta := func(i int, x float32) []byte {
		file := bytes.Clone(good)
		must.Get(binary.Encode(file[header+4*i:], binary.LittleEndian, x))(t)
		return file
	}
	for _, x := range []struct {
		name string
		file []byte
		text string
	}{
		{"no file", nil, "it ends after 0 bytes"},
		{"a cut file", good[:len(good)-1], "truncated: tensor"},
		{"a cut header", good[:40], "truncated: the .safetensors header"},
		{"another format", bytes.Repeat([]byte("x"), 200), "not a .safetensors file"},
		{"more bytes", append(bytes.Clone(good), 0), "they must agree"},
		{"another size of values", other(func(c *kvcache.StateConfig) { c.ValueDim = 4 }), "state: shape is [8 4], for the config it must be [8 3]"},
		{"another width", other(func(c *kvcache.StateConfig) { c.Width = 4 }), "rows: shape is [3 5], for the config it must be [2 5]"},
		{"no convolution", other(func(c *kvcache.StateConfig) { c.Channels, c.Width = 0, 0 }), `there is no "rows"`},
		{"other heads of as many rows", other(func(c *kvcache.StateConfig) { c.KVHeads, c.Dim = 4, 2 }), "meta is [4 2 0 0], it must be 2, 4"},
		{"negative tokens", meta(2, -1), "and a number of tokens up to"},
		{"half a token", meta(3, 0.5), "and a number of tokens up to"},
		{"too many tokens", meta(2, 1<<20), "and a number of tokens up to"},
	} {
		must.Fail(t, x.name, c.Load(ctx, 0, bytes.NewReader(x.file), int64(len(x.file))), kernels.ErrFile, "load: ", x.text)
	}
	bare := must.Get(kvcache.NewStates(ctx, dev, kvcache.StateConfig{KVHeads: 2, Dim: 4, ValueDim: 3}))(t)
	defer bare.Release()
	must.Fail(t, "rows without a convolution", bare.Load(ctx, 0, bytes.NewReader(good), int64(len(good))), kernels.ErrFile, `would ignore ["rows"]`)
	if !bytes.Equal(saved(t, c, 0), before) {
		t.Error("a file that was refused changes the state")
	}
	must.Do(t, c.Load(ctx, 1, bytes.NewReader(good), int64(len(good))))
	if n := c.Lens(); !slices.Equal(n, []int{70001, 70000}) || !bytes.Equal(saved(t, c, 1), good) {
		t.Errorf("lengths are %v after a load, or the state another one", n)
	}
}

// TestFailedStates: after calls that fail or are cancelled, the sequences are as before, and Release frees all memory.
func TestFailedStates(t *testing.T) {
	ctx := t.Context()
	cancelled, cancel := context.WithCancel(ctx)
	cancel()
	be := cpu.New(cpu.Options{})
	defer be.Close()
	copies := &failing{Backend: be, after: -1}
	c := must.Get(kvcache.NewStates(ctx, kernels.NewDevice(copies), smallStates))(t)
	defer c.Release()
	must.Do(t, layerStep(t, ctx, c, smallStates, 3, 0.5))
	must.Do(t, layerStep(t, ctx, c, smallStates, 2, 0.25))
	must.Do(t, c.Rewind(1, 4))
	before := [][]byte{saved(t, c, 0), saved(t, c, 1)}
	for _, x := range []struct {
		name string
		f    func(ctx context.Context) error
	}{
		{"a call", func(ctx context.Context) error { return layerStep(t, ctx, c, smallStates, 2, 1) }}, // sequence 1 is copied first
		{"fork", func(ctx context.Context) error { return c.Fork(ctx, 0, 1) }},
		{"load", func(ctx context.Context) error {
			return c.Load(ctx, 1, bytes.NewReader(before[0]), int64(len(before[0])))
		}},
	} {
		for i := range 2 { // the state or the rows
			if copies.after = i; x.name == "a call" && i == 1 {
				copies.after = -1
				continue
			}
			must.Fail(t, fmt.Sprintf("%s, copy %d fails", x.name, i), x.f(ctx), errCopy)
			copies.after = -1
		}
		must.Fail(t, fmt.Sprintf("%s, cancelled", x.name), x.f(cancelled), context.Canceled)
		for b, want := range before {
			if !bytes.Equal(saved(t, c, b), want) {
				t.Errorf("%s fails: sequence %d has another state", x.name, b)
			}
		}
	}
	must.Do(t, layerStep(t, ctx, c, smallStates, 1, 1))
	copies.after = 0
	for range 3 {
		must.Do(t, layerStep(t, ctx, c, smallStates, 4, 1)) // sequences of one age need no copies
	}
	must.Fail(t, "no device", must.Err(kvcache.NewStates(ctx, nil, smallStates)), kernels.ErrNoBackend)
}
