// Package beamattn computes attention over sequences in sharded files as a pipeline of Apache Beam:
//
//	O = softmax(scale·Q·Kᵀ + bias) · V
//
//	job, err := beamattn.Prepare(ctx, beamattn.Spec{
//		Q: "q-*.npy", K: "k-*.npy", V: "v-*.npy", Out: "out",
//		Options: kernels.Options{Causal: true},
//	})
//	...
//	p, s := beam.NewPipelineWithRoot()
//	done := job.Attention(s)
//	_, err = beam.Run(ctx, "prism", p)
//
// The elements of the pipeline are descriptors of a few hundred bytes, never tensors:
//
//	blocks ──► units ──► attend ──► group by block ──► merge ──► manifest
//	           k splits  (O, LSE)                      O shards
//	           a block   of a split,
//	                     in a file
//
// A unit is some query rows over one split of the keys, at most cpu.ShardKeys of them. Its partial result goes to a
// file below Out. The merge of a block reads its partial results in the order of their keys, whatever order they were
// computed in: results have the same bits on any number of workers, and those of one call on a CPU.
//
// Every step writes files that appear complete or not at all and have the same content
// whenever they are written. The engine may therefore repeat any of them.
package beamattn

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	"github.com/seed90331342/attn/cmd/attn-beam/internal/cut"
	"github.com/seed90331342/attn/cmd/attn-beam/internal/plan"
	"github.com/seed90331342/attn/cmd/attn-beam/internal/shards"
	"github.com/seed90331342/attn/kernels"
)

// Spec describes a call of attention over files.
type Spec struct {
	// Q, K and V are URIs of .npy files of f2 or f4 elements, globs, or lists of both separated by commas, that hold
	// [B, H, rows, D], [B, rows, D] or [rows, D] each and together one tensor, in order along the rows.
	Q, K, V string
	// Out is the folder of the results: a shard of .npy for each block of query rows and
	// manifest.json, which is written last.
	Out string
	// Options are those of the call. With LSE the log-sum-exp of each row is written too.
	// Those that partial results cannot carry are errors.
	Options kernels.Options
	// DType is the type to compute on: f32, f16 or bf16. It is that of the files when
	// empty. The output has elements of f2 for f16, else of f4.
	DType string
	// Backend is the device of the workers, as for kernels.Open; "" means "auto". Workers with different devices may
	// serve one job, whose bits then depend on which worker computed what.
	Backend string
	// Workers is the number of workers that the call is cut for; 0 means 1. It changes the
	// rows of a block, never the result.
	Workers int
	// Branches divides the units into so many branches of the pipeline; 0 means 1. Only
	// Beam's local runner needs more than one, as it gives a branch one worker.
	Branches int
	// split is the number of keys of a split, for tests; 0 means cpu.ShardKeys.
	split int
	// Gather is the file that the program gathers the output into, "" for none.
	Gather string
	// Replaces, unless nil, gets the files that the job reads and those that it, or Gather,
	// writes, before it writes any. Its error is that of Prepare.
	Replaces func(inputs, outputs []string) error
	// Resume continues a job with the same inputs and options in the same folder. Without
	// it a folder with results is an error.
	Resume bool
}

// Job is a call that is validated and cut, before its pipeline is built.
type Job struct {
	Cut *cut.Cut
	// Left are the blocks that have to be computed, all of them unless the job resumes.
	Left []cut.Block
	// Manifest is the URI of the file that ends the job.
	Manifest string

	call     call
	options  json.RawMessage // of the manifest
	branches int
}

// call is what the steps need, as JSON.
type call struct {
	Q, K, V, O, LSE *shards.Array // LSE is nil when it is not requested
	Heads           int
	DType           string
	Backend         string
	// Scale to Sinks are those options that hold in each unit. JSON has no -Inf, so sinks are bits.
	Scale        *float64
	Softcap      float64
	ALiBi, Sinks []uint32
	// Scratch is the folder of partial results.
	Scratch string
}

// options are the options of the call that units need.
func (c *call) options() kernels.Options {
	return kernels.Options{Scale: c.Scale, Softcap: c.Softcap, ALiBi: fromBits(c.ALiBi), Sinks: fromBits(c.Sinks)}
}

func bits(x []float32) (b []uint32) {
	for _, x := range x {
		b = append(b, math.Float32bits(x))
	}
	return b
}

func fromBits(b []uint32) (x []float32) {
	for _, b := range b {
		x = append(x, math.Float32frombits(b))
	}
	return x
}

// Prepare reads the headers of all shards, validates the call, cuts it, and notes it in the
// output folder, where a later job finds it to resume.
//
// Errors name the shard or the option. They wrap ErrShape, ErrDType, ErrOption or
// ErrUnsupported as those of kernels.Device.Prepare, or the error of the file system.
func Prepare(ctx context.Context, s Spec) (*Job, error) {
	if s.Out == "" {
		return nil, fmt.Errorf("out is missing: the folder for the results: %w", kernels.ErrOption)
	}
	if s.Branches < 0 {
		return nil, fmt.Errorf("branches is %d, it must be at least 1, or 0 for 1: %w", s.Branches, kernels.ErrOption)
	}
	inputs, dims, dtype, err := s.open(ctx)
	if err != nil {
		return nil, err
	}
	q, k, v := inputs["q"], inputs["k"], inputs["v"]
	config := cut.Config{Workers: s.Workers, Split: s.split}
	note := strings.TrimSuffix(s.Out, "/") + "/job.json"
	manifest := strings.TrimSuffix(s.Out, "/") + "/manifest.json"
	old, err := shards.ReadManifest(ctx, note)
	switch {
	case err == nil && !s.Resume:
		return nil, fmt.Errorf("%s has a job already: resume it, or choose another folder: %w", s.Out, fs.ErrExist)
	case err == nil:
		config = old.Config // other blocks would be other files
	case !errors.Is(err, fs.ErrNotExist):
		return nil, err
	}
	x, err := cut.New(dims, s.Options, config)
	if err != nil {
		return nil, err
	}
	options, err := json.Marshal(described(s, dtype))
	if err != nil {
		return nil, err
	}
	this := shards.Manifest{Inputs: inputs, Options: options, Config: x.Config}
	if old.Inputs != nil && !same(old, this) {
		return nil, fmt.Errorf("%s has a job with other inputs or options: choose another folder: %w", s.Out, fs.ErrExist)
	}
	folder := strings.TrimSuffix(s.Out, "/")
	elements := elementsOf(dtype)
	j := &Job{Cut: x, Left: x.Blocks, Manifest: manifest, options: options, branches: max(1, s.Branches), call: call{
		Q: q, K: k, V: v, Heads: dims.Heads, DType: dtype.String(), Backend: s.Backend,
		Scale: s.Options.Scale, Softcap: s.Options.Softcap, ALiBi: bits(s.Options.ALiBi), Sinks: bits(s.Options.Sinks),
		Scratch: folder + "/partial",
	}}
	file := func(name string) func(b *cut.Block) string {
		return func(b *cut.Block) string { return fmt.Sprintf("%s/%s-%06d.npy", folder, name, b.ID) }
	}
	j.call.O = shards.Output("o", elements, x, dims.ValueDim, file("o"))
	if s.Options.LSE {
		j.call.LSE = shards.Output("lse", "f4", x, 1, file("lse"))
	}
	if s.Replaces != nil {
		if err := s.Replaces(files(q, k, v), append(files(j.call.O, j.call.LSE), s.Gather, note, manifest)); err != nil {
			return nil, err
		}
	}
	if err := shards.WriteManifest(ctx, note, this); err != nil {
		return nil, err
	}
	if s.Resume {
		return j, j.skipFinished(ctx)
	}
	return j, nil
}

// files returns the URIs of the shards of arrays, which may be nil.
func files(arrays ...*shards.Array) (uris []string) {
	for _, a := range arrays {
		if a != nil {
			for _, s := range a.Shards {
				uris = append(uris, s.URI)
			}
		}
	}
	return uris
}

// open reads the headers of all shards and validates the call.
func (s *Spec) open(ctx context.Context) (inputs map[string]*shards.Array, d kernels.Dims, dtype kernels.DType, err error) {
	if err := cut.Supported(&s.Options); err != nil {
		return nil, d, 0, err
	}
	inputs = map[string]*shards.Array{}
	for _, x := range [][2]string{{"q", s.Q}, {"k", s.K}, {"v", s.V}} {
		if x[1] == "" {
			return nil, d, 0, fmt.Errorf("%s is missing: the URIs of its shards: %w", x[0], kernels.ErrOption)
		}
		if inputs[x[0]], err = shards.Open(ctx, x[0], x[1]); err != nil {
			return nil, d, 0, err
		}
	}
	if dtype, err = dtypeOf(s.DType, inputs["q"].Type); err == nil {
		d, err = shards.Dims(inputs["q"], inputs["k"], inputs["v"], s.Options)
	}
	return inputs, d, dtype, err
}

// Plan cuts the call and predicts its cost. It reads only the headers of the shards.
func Plan(ctx context.Context, s Spec) (*plan.Plan, error) {
	inputs, d, dtype, err := s.open(ctx)
	if err != nil {
		return nil, err
	}
	return s.plan(d, inputs["q"].Type, inputs["k"].Type, elementsOf(dtype))
}

// PlanDims is Plan for a call of these lengths, whose files have elements of s.DType (bf16: f4).
func PlanDims(d kernels.Dims, s Spec) (*plan.Plan, error) {
	if err := cut.Supported(&s.Options); err != nil {
		return nil, err
	}
	dtype, err := dtypeOf(s.DType, "f4")
	if err != nil {
		return nil, err
	}
	elements := elementsOf(dtype)
	array := func(name string, heads, rows, dim int) *shards.Array {
		return &shards.Array{Name: name, Type: elements, Shape: [4]int{d.Batch, heads, rows, dim}}
	}
	d, err = shards.Dims(array("q", d.Heads, d.SeqQ, d.Dim), array("k", d.KVHeads, d.SeqK, d.Dim), array("v", d.KVHeads, d.SeqK, d.ValueDim), s.Options)
	if err != nil {
		return nil, err
	}
	return s.plan(d, elements, elements, elements)
}

// plan returns the plan of a call of lengths d with these elements in q, in k and v, and in o.
func (s *Spec) plan(d kernels.Dims, q, kv, o string) (*plan.Plan, error) {
	x, err := cut.New(d, s.Options, cut.Config{Workers: s.Workers})
	if err != nil {
		return nil, err
	}
	return plan.New(x, size(q), size(kv), size(o)), nil
}

// skipFinished removes the blocks whose shards are written from those that are left.
func (j *Job) skipFinished(ctx context.Context) error {
	left := map[int]bool{}
	for _, a := range j.call.outputs() {
		ids, err := a.Unfinished(ctx)
		if err != nil {
			return err
		}
		for _, id := range ids {
			left[id] = true
		}
	}
	j.Left = slices.DeleteFunc(slices.Clone(j.Left), func(b cut.Block) bool { return !left[b.ID] })
	return nil
}

// Missing returns the units of the blocks that are left whose results are not written, in
// words that name the shards of their keys: at most n of them.
func (j *Job) Missing(ctx context.Context, n int) ([]string, error) {
	if err := j.skipFinished(ctx); err != nil {
		return nil, err
	}
	var names []string
	for _, b := range j.Left {
		for _, u := range b.Units() {
			if len(names) == n {
				return names, nil
			}
			if done, err := j.call.done(ctx, &u); err != nil {
				return nil, err
			} else if !done {
				names = append(names, j.call.name(&u))
			}
		}
	}
	return names, nil
}

// outputs returns o and, if requested, lse, by their names.
func (c *call) outputs() map[string]*shards.Array {
	all := map[string]*shards.Array{"o": c.O}
	if c.LSE != nil {
		all["lse"] = c.LSE
	}
	return all
}

// dtypeOf returns the type to compute on, for elements of a file.
func dtypeOf(name, elements string) (kernels.DType, error) {
	switch {
	case name == "" && elements == "f2":
		return kernels.F16, nil
	case name == "":
		return kernels.F32, nil
	}
	for _, d := range []kernels.DType{kernels.F32, kernels.F16, kernels.BF16} {
		if d.String() == name {
			return d, nil
		}
	}
	return 0, fmt.Errorf("dtype is %q, it must be f32, f16 or bf16: %w", name, kernels.ErrOption)
}

// elementsOf returns numpy's name of the elements of the output.
func elementsOf(dtype kernels.DType) string {
	if dtype == kernels.F16 {
		return "f2"
	}
	return "f4"
}

// size returns the bytes of an element, f2 or f4.
func size(elements string) int { return int(elements[1] - '0') }

// described returns the options that decide the result, for a comparison. Segments may be
// long: their hash stands for them.
func described(s Spec, dtype kernels.DType) map[string]any {
	d := map[string]any{"DType": dtype.String(), "Backend": s.Backend}
	o := reflect.ValueOf(s.Options)
	for i := range o.NumField() {
		f := o.Field(i)
		if f.IsZero() {
			continue
		}
		switch x := f.Interface().(type) {
		case *float64:
			d[o.Type().Field(i).Name] = *x
		case *kernels.Window:
			d[o.Type().Field(i).Name] = *x
		default:
			text := fmt.Sprint(x)
			if len(text) > 200 {
				sum := sha256.Sum256([]byte(text))
				text = "sha256 " + hex.EncodeToString(sum[:])
			}
			d[o.Type().Field(i).Name] = text
		}
	}
	return d
}

// same reports whether two jobs have the same inputs and options.
func same(a, b shards.Manifest) bool {
	text := func(m shards.Manifest) string {
		var options any
		if err := json.Unmarshal(m.Options, &options); err != nil {
			return err.Error()
		}
		t, err := json.Marshal([]any{m.Inputs, options, m.Config})
		if err != nil {
			return err.Error()
		}
		return string(t)
	}
	return text(a) == text(b)
}

// partial returns the file of the partial result of a unit.
func (c *call) partial(u *cut.Unit) string {
	return c.Scratch + "/" + fmt.Sprintf("%06d-%04d.npy", u.Block.ID, u.Split)
}

// name describes a unit in errors: its rows and keys, and the shards that hold them.
func (c *call) name(u *cut.Unit) string {
	b := &u.Block
	var files []string
	for _, s := range c.K.Shards {
		if s.Rows.Lo < u.Keys.Hi && s.Rows.Hi > u.Keys.Lo {
			files = append(files, filepath.Base(s.URI))
		}
	}
	return fmt.Sprintf("rows %d to %d of heads %d to %d of batch %d over keys %d to %d (%s)",
		b.Rows.Lo, b.Rows.Hi-1, b.Heads.Lo, b.Heads.Hi-1, b.Batch, u.Keys.Lo, u.Keys.Hi-1, strings.Join(files, ", "))
}

// Gather writes the output of a finished job as one .npy file, [B, H, Sq, Dv].
func (j *Job) Gather(ctx context.Context, uri string) error {
	m, err := shards.ReadManifest(ctx, j.Manifest)
	if err != nil {
		return err
	}
	o := m.Outputs["o"]
	return o.Gather(ctx, uri, o.Shape[:])
}
