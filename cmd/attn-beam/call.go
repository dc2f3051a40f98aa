package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/apache/beam/sdks/v2/go/pkg/beam/io/filesystem"

	"github.com/seed90331342/attn/cmd/attn-beam/beamattn"
	"github.com/seed90331342/attn/cmd/internal/flags"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/npy"
)

// operands are the files of a call, named as those of attn run.
type operands struct {
	Q string `name:"q" required:"" placeholder:"URI,.." group:"Inputs" help:"Queries: .npy files of f2 or f4, [B,H,rows,D], [B,rows,D] or [rows,D], as URIs or globs separated by commas, in the order of rows."`
	K string `name:"k" required:"" placeholder:"URI,.." group:"Inputs" help:"Keys, of q's rank; their heads divide q's."`
	V string `name:"v" required:"" placeholder:"URI,.." group:"Inputs" help:"Values, with k's heads and length and any head size."`
}

// callFlags are the other flags of a call.
type callFlags struct {
	DType string `name:"dtype" enum:",f32,f16,bf16" default:"" placeholder:"TYPE" group:"Inputs" help:"Compute on f32, f16 or bf16 elements. Default: the type of the files."`

	Scale   *float64  `name:"scale" placeholder:"X" group:"Scores" help:"Factor of QKᵀ. Default: 1/sqrt(D)."`
	Softcap float64   `name:"softcap" placeholder:"C" group:"Scores" help:"Replace scores s by C·tanh(s/C)."`
	ALiBi   []float32 `name:"alibi" placeholder:"X,X" group:"Scores" help:"Linear biases: a slope for each head, or for each batch and head."`
	Sinks   []float32 `name:"sinks" placeholder:"X,X" group:"Scores" help:"Attention sinks: a logit for each head that only enters the denominator."`

	Causal     bool          `name:"causal" group:"Visibility" help:"Hide the keys after a row's own position."`
	Window     *flags.Window `name:"window" placeholder:"L,R" group:"Visibility" help:"Hide the keys more than L before or R after a row's own position; inf is no limit."`
	Offset     []int         `name:"offset" placeholder:"N,N" group:"Visibility" help:"Move every row's position by N keys, one number for all batches or for each."`
	KLen       []int         `name:"klen" placeholder:"N,N" group:"Visibility" help:"Number of existing keys, one for each batch."`
	Prefix     []int         `name:"prefix" placeholder:"N,N" group:"Visibility" help:"Number of first keys that --causal and the right side of --window do not hide."`
	Segments   string        `name:"segments" placeholder:"URI" group:"Visibility" help:"Document ids of the rows, a .npy file of integers, [S] or [B,S]: a row sees only keys of its own id, which are adjacent."`
	KVSegments string        `name:"kv-segments" placeholder:"URI" group:"Visibility" help:"Document ids of the keys. Default: --segments."`
	Align      string        `name:"causal-align" enum:"top-left,bottom-right" default:"top-left" group:"Visibility" help:"Origin of the positions: the first query is at the first key (top-left), or the last query at the last key (bottom-right)."`

	Workers int `name:"workers" default:"1" placeholder:"N" help:"Number of workers that the call is cut for; with --runner prism, of worker processes."`
}

// spec returns the call without its operands. It reads the segments.
func (c *callFlags) spec(ctx context.Context) (beamattn.Spec, error) {
	if c.Workers < 1 {
		return beamattn.Spec{}, flags.Usagef("--workers is %d, it must be at least 1", c.Workers)
	}
	o := kernels.Options{
		Scale: c.Scale, Softcap: c.Softcap, ALiBi: c.ALiBi, Sinks: c.Sinks, Causal: c.Causal, Window: (*kernels.Window)(c.Window),
		Offset: c.Offset, KLen: c.KLen, Prefix: c.Prefix,
	}
	if c.Align == "bottom-right" {
		o.Align = kernels.LowerRight
	}
	var err error
	if o.QSegments, err = readIDs(ctx, "--segments", c.Segments); err == nil {
		o.KSegments, err = readIDs(ctx, "--kv-segments", c.KVSegments)
	}
	return beamattn.Spec{DType: c.DType, Workers: c.Workers, Options: o}, err
}

// readIDs reads a .npy file of integers with one or two axes.
func readIDs(ctx context.Context, name, uri string) (rows [][]int32, err error) {
	if uri == "" {
		return nil, nil
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("%s %s: %w", name, uri, err)
		}
	}()
	system, err := filesystem.New(ctx, uri)
	if err != nil {
		return nil, err
	}
	content, err := filesystem.Read(ctx, system, uri)
	if err = errors.Join(err, system.Close()); err != nil {
		return nil, err
	}
	h, err := npy.ReadHeader(bytes.NewReader(content), int64(len(content)), true)
	if err != nil {
		return nil, err
	}
	if n := len(h.Shape); n < 1 || n > 2 {
		return nil, fmt.Errorf("shape %v has %d axes, it must have 1 or 2: [S] or [B,S]", h.Shape, n)
	}
	all, err := kernels.Make[int64](h.Count)
	if err != nil || h.Count == 0 {
		return nil, err
	}
	h.Int64s(all, content[h.Start:])
	ids, err := kernels.Make[int32](h.Count)
	if err != nil {
		return nil, err
	}
	for i, x := range all {
		if ids[i] = int32(x); int64(ids[i]) != x {
			return nil, fmt.Errorf("element %d is %d, ids must be numbers of 32 bits", i, x)
		}
	}
	return slices.Collect(slices.Chunk(ids, h.Shape[len(h.Shape)-1])), nil
}
