package tune

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"strings"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/cmd/internal/cli"
	"github.com/seed90331342/attn/cmd/internal/flags"
	"github.com/seed90331342/attn/cmd/internal/output"
	"github.com/seed90331342/attn/gpu"
	"github.com/seed90331342/attn/kernels"
)

// Emission holds the flags that select the calls of --emit, next to those of Command.
type Emission struct {
	Emit    string `name:"emit" help:"Write the kernels of each shape into this folder as WGSL, SPIR-V, CUDA and JSON, and measure nothing. Needs no GPU." placeholder:"DIR"`
	SeqQ    int    `name:"seq-q" help:"With --emit: number of queries, the last of them at the last key; 1 is decoding. Default: the number of keys." placeholder:"N"`
	KVHeads int    `name:"kv-heads" help:"With --emit: key and value heads, a divisor of --heads. Default: --heads." placeholder:"N"`
	Q8      bool   `name:"q8" help:"With --emit: keys and values of 8-bit integers with a scale a row."`
	Q4      bool   `name:"q4" help:"With --emit: keys and values in ggml's q4_0."`
	F8      bool   `name:"f8" help:"With --emit: keys and values in fp8, e4m3fn."`
	Causal  bool   `name:"causal" help:"With --emit: hide later keys from a row."`
	Staged  bool   `name:"staged" help:"With --emit: the kernels of QK, Softmax and PV."`
	// Gradients selects other kernels than those of attention, as Staged does.
	Gradients bool `name:"gradients" help:"With --emit: the kernels of the gradients of queries, keys and values."`
}

// check returns an error for flags that have no effect.
func (e *Emission) check() error {
	if *e != (Emission{}) && e.Emit == "" {
		return flags.Usagef("--seq-q, --kv-heads, --q8, --q4, --f8, --causal, --staged and --gradients select kernels for --emit DIR, which is missing")
	}
	return nil
}

// emittedCall describes the call of an emitted kernel.
type emittedCall struct {
	Q       kernels.Shape `json:"q"`
	K       kernels.Shape `json:"k"`
	DType   string        `json:"dtype"`    // of queries and output
	KVDType string        `json:"kv_dtype"` // of keys and values
	Scale   float64       `json:"scale"`
	Causal  bool          `json:"causal,omitempty"`
	Mask    bool          `json:"mask,omitempty"` // of type bool, [Sq, Sk]
	Bias    bool          `json:"bias,omitempty"` // of type f32, [Sq, Sk]
	ALiBi   bool          `json:"alibi,omitempty"`
	Softcap bool          `json:"softcap,omitempty"`
}

// emitted is the JSON of a kernel.
type emitted struct {
	Name string      `json:"name"`
	Call emittedCall `json:"call"`
	gpu.KernelSource
	*simulation
}

// call returns a call of a shape, on tensors without memory.
func (e *Emission) call(s shape) (*backend.Call, emittedCall, error) {
	kvHeads, seqQ, kv, multiple := s.heads, s.seq, s.dtype, 1
	switch {
	case e.Q8:
		kv, multiple = kernels.Q8, 4
	case e.Q4:
		kv, multiple = kernels.Q4, 32
	case e.F8:
		kv, multiple = kernels.F8, 4
	}
	switch {
	case e.KVHeads < 0 || e.KVHeads > 0 && s.heads%e.KVHeads != 0:
		return nil, emittedCall{}, flags.Usagef("--kv-heads is %d, it must divide --heads, which is %d", e.KVHeads, s.heads)
	case e.SeqQ < 0:
		return nil, emittedCall{}, flags.Usagef("--seq-q is %d, it must be at least 1", e.SeqQ)
	case e.Q8 && e.Q4 || e.F8 && (e.Q8 || e.Q4):
		return nil, emittedCall{}, flags.Usagef("--q8, --q4 and --f8 exclude each other")
	case s.dim%multiple != 0:
		return nil, emittedCall{}, flags.Usagef("--dim is %d, it must be a multiple of %d with --%v", s.dim, multiple, kv)
	case multiple > 1 && (e.Staged || e.Gradients):
		return nil, emittedCall{}, flags.Usagef("--%v excludes --staged and --gradients, which take no %v tensors", kv, kv)
	case e.Staged && e.Gradients:
		return nil, emittedCall{}, flags.Usagef("--staged and --gradients exclude each other")
	}
	if e.KVHeads > 0 {
		kvHeads = e.KVHeads
	}
	if e.SeqQ > 0 {
		seqQ = e.SeqQ
	}
	about := emittedCall{
		Q: kernels.Shape{1, s.heads, seqQ, s.dim}, K: kernels.Shape{1, kvHeads, s.seq, s.dim}, DType: s.dtype.String(), KVDType: kv.String(),
		Scale: 1 / math.Sqrt(float64(s.dim)), Causal: e.Causal, Mask: s.Mask, Bias: s.Bias, ALiBi: s.ALiBi, Softcap: s.Softcap,
	}
	q, err := kernels.Meta(s.dtype, about.Q)
	k, kerr := kernels.Meta(kv, about.K)
	if err = errors.Join(err, kerr); err != nil {
		return nil, about, err
	}
	c := &backend.Call{Q: q, K: k, V: k, O: q, Problem: backend.Problem{Scale: float32(about.Scale), Visible: backend.Everything()}}
	if e.Causal {
		c.Visible.Right, c.Visible.Offset = 0, s.seq-seqQ
	}
	return c, about, s.apply(c)
}

// sources returns the kernels that the flags select for c.
func (e *Emission) sources(c *backend.Call) ([]gpu.KernelSource, error) {
	if !e.Gradients {
		return gpu.KernelSources(c, e.Staged)
	}
	d := c.Dims()
	g := &backend.Gradients{Call: *c, DO: c.O, DQ: c.Q, DK: c.K, DV: c.V}
	var err error
	if g.LSE, err = kernels.Meta(kernels.F32, kernels.Shape{d.Batch, d.Heads, d.SeqQ, 1}); err != nil {
		return nil, err
	}
	return gpu.GradientSources(g)
}

// name names a kernel of a call: the shader, the head size, the variant, the types, the key
// heads if there are fewer, the options and the lengths, such as flash-064-L-f32-kv4-causal-2048.
func (e *emitted) name() string {
	c := &e.Call
	parts := []string{e.Kernel, fmt.Sprintf("%03d", c.Q[kernels.Dim])}
	add := func(on bool, part string) {
		if on {
			parts = append(parts, part)
		}
	}
	variant := strings.NewReplacer("/", "-", " ", "-").Replace(e.Variant)
	add(variant != "" && variant != "plain", variant)
	switch e.Kernel {
	case "decode":
		add(true, fmt.Sprintf("r%d", e.Constants["ROWS"]))
	case "gradient":
		add(true, []string{"dkv", "dq"}[e.Constants["OF"]])
	}
	add(true, c.DType)
	add(c.KVDType != c.DType, c.KVDType)
	add(c.K[kernels.Heads] != c.Q[kernels.Heads], fmt.Sprintf("kv%d", c.K[kernels.Heads]))
	add(c.Causal, "causal")
	add(c.Mask, "mask")
	add(c.Bias, "bias")
	add(c.ALiBi, "alibi")
	add(c.Softcap, "softcap")
	length := fmt.Sprint(c.K[kernels.Seq])
	if c.Q[kernels.Seq] != c.K[kernels.Seq] {
		length = fmt.Sprintf("%dx%d", c.Q[kernels.Seq], c.K[kernels.Seq])
	}
	return strings.Join(append(parts, length), "-")
}

// emit writes the kernels of the shapes into the folder, once all of them were rendered.
func (c *Command) emit(ctx context.Context, out *cli.Streams, shapes []shape) error {
	if err := os.MkdirAll(c.Emit, 0o755); err != nil {
		return fmt.Errorf("--emit: %w", err)
	}
	var files output.Set
	defer files.Discard()
	write := func(name string, content func(io.Writer) error) error {
		if err := files.Add(name, filepath.Join(c.Emit, name)); err != nil {
			return err
		}
		return files.Write(ctx, name, content)
	}
	var lines strings.Builder
	for _, s := range shapes {
		call, about, err := c.call(s)
		if err != nil {
			return err
		}
		list, err := c.sources(call)
		if err != nil {
			return err
		}
		for _, k := range list {
			if err := ctx.Err(); err != nil {
				return err
			}
			e := emitted{Call: about, KernelSource: k}
			e.Name = e.name()
			cuda, err := e.simulate()
			if err != nil {
				return err
			}
			text := func(s string) func(io.Writer) error {
				return func(w io.Writer) error {
					_, err := io.WriteString(w, s)
					return err
				}
			}
			if cuda != "" {
				err = write(e.Name+".cu", text(cuda))
			}
			err = errors.Join(err,
				write(e.Name+".wgsl", text(k.WGSL)),
				write(e.Name+".spv", func(w io.Writer) error { return binary.Write(w, binary.LittleEndian, k.SPIRV) }),
				write(e.Name+".json", func(w io.Writer) error {
					enc := json.NewEncoder(w)
					enc.SetIndent("", " ")
					return enc.Encode(e)
				}))
			if err != nil {
				return err
			}
			fmt.Fprintf(&lines, "%s: %d workgroups of %d threads and %d bytes, %d words of SPIR-V\n", e.Name, k.Groups, k.Threads, k.Memory, len(k.SPIRV))
		}
	}
	if err := files.Commit(ctx); err != nil {
		return err
	}
	_, err := fmt.Fprintf(out.Out, "%swritten to %s\n", lines.String(), c.Emit)
	return err
}
