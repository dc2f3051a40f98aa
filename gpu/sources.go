package gpu

import (
	"time"

	"github.com/gogpu/gputypes"
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/gpu/internal/cut"
	"github.com/seed90331342/attn/gpu/internal/queue"
	"github.com/seed90331342/attn/gpu/internal/source"
	"github.com/seed90331342/attn/gpu/internal/tune"
	"github.com/seed90331342/attn/shaders"
)

// KernelSource is a kernel with the constants of a call, and the first dispatch in which the call runs it.
type KernelSource = source.Source

// emitLimits are those of common discrete GPUs.
var emitLimits = gputypes.Limits{
	MaxBufferSize: 1 << 40, MaxStorageBufferBindingSize: 1<<32 - 4, MaxStorageBuffersPerShaderStage: 16,
	MaxComputeWorkgroupStorageSize: 48 << 10, MaxComputeInvocationsPerWorkgroup: 1024, MaxComputeWorkgroupsPerDimension: 65535,
	MinStorageBufferOffsetAlignment: 32, MinUniformBufferOffsetAlignment: 64,
}

const emitBudget = time.Hour // of a submission: ordinary calls take one

// KernelSources returns the kernels that calls like c may run on a discrete GPU with 48 KiB of workgroup memory,
// without opening a device: all variants for prefill, the kernels of a split and of the merge for decoding, and with
// staged those of QK, Softmax and PV. They use the exp2 of the device, as where it is precise enough. c's operands need
// no memory. Errors are those of Attention.
func KernelSources(c *backend.Call, staged bool) ([]KernelSource, error) {
	return kernelSources(c, staged, true)
}

// GradientSources is KernelSources for the gradients that g requests.
func GradientSources(g *backend.Gradients) ([]KernelSource, error) {
	s := newSources(true)
	x, err := s.b.newGradients(g, backend.Meta)
	for i := 0; err == nil && i < len(x.ops); i++ {
		err = s.add("", x.ops[i])
	}
	return s.list, err
}

func kernelSources(c *backend.Call, staged, ownExp2 bool) ([]KernelSource, error) {
	s := newSources(ownExp2)
	add := s.attention
	if staged {
		add = s.stages
	}
	err := add(c)
	return s.list, err
}

// sources collects kernels.
type sources struct {
	b    *Backend // without a device
	list []KernelSource
	have map[string]bool // by key
}

func newSources(ownExp2 bool) *sources {
	dev := queue.NewPlanner(emitLimits, "gpu", backend.Discrete, queue.Config{Budget: emitBudget})
	dev.Pipelines.OwnExp2 = ownExp2
	return &sources{b: &Backend{info: backend.Info{Name: "gpu", Type: backend.Discrete}, decodeRows: decodeRows, dev: dev}, have: map[string]bool{}}
}

// attention adds the kernels of an attention call.
func (s *sources) attention(c *backend.Call) error {
	parts, err := cut.Slices(c)
	if err != nil {
		return err
	}
	c = parts[0] // the others have the same kernels
	if s.b.decodes(c) {
		x, err := s.b.newDecode(c)
		if err != nil {
			return err
		}
		return s.add("", x.op())
	}
	a, err := s.b.newAttention(c)
	if err != nil {
		return err
	}
	for _, v := range append(a.shape().Candidates(), tune.Variant{}) {
		x, err := s.b.newPrefill(c, func(tune.Shape) (tune.Variant, string) { return v, "emitted" })
		if err == nil {
			err = s.add(v.Label(), x.op())
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// stages adds the kernels of the three stages.
func (s *sources) stages(c *backend.Call) error {
	if err := tooLong(operandsOf(c)); err != nil {
		return err
	}
	w, err := weightsOf(c)
	if err != nil {
		return err
	}
	kt, err := c.K.Swap(backend.Seq, backend.Dim)
	if err != nil {
		return err
	}
	for _, t := range productTiles {
		if err := s.add("qk "+t.name, s.b.product(product{y: w, a: c.Q, w: kt, tile: &t})); err != nil {
			return err
		}
		if err := s.add("pv "+t.name, s.b.product(product{y: c.O, a: w, w: c.V, skip: true, tile: &t})); err != nil {
			return err
		}
	}
	op, err := s.b.softmax(w, c.LSE, &c.Problem, false)
	if err != nil {
		return err
	}
	return s.add("", op)
}

// add adds the kernels of op.
func (s *sources) add(variant string, op *queue.Op) error {
	return s.b.dev.Dispatches(op, func(x queue.Dispatch) error {
		key := variant + " " + shaders.Key(x.Kernel)
		if s.have[key] {
			return nil
		}
		s.have[key] = true
		k, err := source.Of(x)
		k.Variant = variant
		s.list = append(s.list, k)
		return err
	})
}
