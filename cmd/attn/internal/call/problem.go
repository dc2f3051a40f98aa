// Package call builds an attention call from flags and files of arrays.
package call

import (
	"github.com/seed90331342/attn/cmd/internal/flags"
	"github.com/seed90331342/attn/kernels"
)

// Problem has the flags of a call over files.
type Problem struct {
	Q   string `name:"q" required:"" placeholder:"Q.npy" group:"Inputs" help:"Queries: [S,D], [B,S,D] or [B,H,S,D] of f2, f4, f8 (rounded to f4) or bf16 (<V2); packed sequences [total,H,D]. Every input may be FILE.safetensors#NAME, a tensor of a file."`
	K   string `name:"k" required:"" placeholder:"K.npy" group:"Inputs" help:"Keys, of q's rank; their heads divide q's."`
	V   string `name:"v" required:"" placeholder:"V.npy" group:"Inputs" help:"Values, of q's rank, with k's heads and length and any head size."`
	CuQ Ints   `name:"cu-q" placeholder:"0,N,..|FILE" group:"Inputs" help:"Packed sequences: the first row of each and the total, as a list or a file. q, k and v are [total,H,D]; each sequence attends to itself, without padding."`
	CuK Ints   `name:"cu-k" placeholder:"0,N,..|FILE" group:"Inputs" help:"The same for the keys. Default: --cu-q."`

	Options `embed:""`

	Bias         string `name:"bias" placeholder:"M.npy" group:"Scores" help:"Float array added to the scores, in addition to a bool --mask."`
	RelativeBias string `name:"relative-bias" placeholder:"R.npy" group:"Scores" help:"Bias for each distance, [Sq+Sk-1], [H,Sq+Sk-1] or [B,H,Sq+Sk-1]: element j-i+Sq-1 is added to the score of row i and key j."`
	ALiBi        Floats `name:"alibi" placeholder:"auto|X,X|FILE" group:"Scores" help:"Linear biases: slopes, one for each head or for each batch and head, as numbers or a file; auto is 2^(-8/H), 2^(-16/H), .. as in the paper for H a power of two."`
	Sinks        Floats `name:"sinks" placeholder:"X,X|FILE" group:"Scores" help:"Attention sinks: a logit for each head that only enters the denominator, as numbers or a file."`

	Prefix     []int  `name:"prefix" placeholder:"N,N" group:"Visibility" help:"Number of first keys that --causal and the right side of --window do not hide, one for all batches or for each."`
	Segments   Ints   `name:"segments" placeholder:"N,N|FILE" group:"Visibility" help:"Document ids: a row sees only keys of its own id. One integer for each row, as a list or a file [S] or [B,S]."`
	KVSegments Ints   `name:"kv-segments" placeholder:"N,N|FILE" group:"Visibility" help:"Document ids of the keys. Default: --segments."`
	BlockMask  string `name:"block-mask" placeholder:"M.npy" group:"Visibility" help:"Bool array [Sq/block,Sk/block] of visible blocks, with axes for batches and heads as in --mask. Hidden blocks are not computed."`
	BlockSize  int    `name:"block-size" placeholder:"N" group:"Visibility" help:"Rows and keys of a block of --block-mask."`

	LowPrecision bool    `name:"low-precision" group:"Inputs" help:"With keys and values of f16 or bf16, multiply in that type and round weights to it, as FlashAttention does. With f32, GPUs with matrix units split numbers in two of f16."`
	RoPE         RoPE    `embed:""`
	Dropout      Dropout `embed:""`
}

// Options are the options that every command over files has.
type Options struct {
	Layout  string        `name:"layout" enum:"bhsd,bshd" default:"bhsd" group:"Inputs" help:"Order of the axes of 4-D files: bhsd is [B,H,S,D], bshd is [B,S,H,D]."`
	DType   string        `name:"dtype" enum:",f32,f16,bf16" default:"" placeholder:"TYPE" group:"Inputs" help:"Compute on f32, f16 or bf16 elements. Default: the type of the files (f2 is f16, f4 and f8 are f32, bf16 is itself)."`
	Scale   *float64      `name:"scale" placeholder:"X" group:"Scores" help:"Factor of QKᵀ. Default: 1/sqrt(D)."`
	Softcap float64       `name:"softcap" placeholder:"C" group:"Scores" help:"Replace scores s by C·tanh(s/C)."`
	Mask    string        `name:"mask" placeholder:"M.npy" group:"Scores" help:"Bool (true is visible) or float (added to the scores) array that broadcasts, as in numpy, to the scores of q's rank: [Sq,Sk], [B,Sq,Sk] or [B,H,Sq,Sk]. A 4-D one is always [B,H,Sq,Sk]. Keys beyond its last axis are hidden."`
	Causal  bool          `name:"causal" group:"Visibility" help:"Hide the keys after a row's own position."`
	Window  *flags.Window `name:"window" placeholder:"L,R" group:"Visibility" help:"Hide the keys more than L before or R after a row's own position; inf is no limit."`
	Offset  []int         `name:"offset" placeholder:"N,N" group:"Visibility" help:"Move every row's position by N keys, one number for all batches or for each."`
	KLen    []int         `name:"klen" placeholder:"N,N" group:"Visibility" help:"Number of existing keys, one for each batch, 0 to Sk."`
	Align   string        `name:"causal-align" enum:"top-left,bottom-right" default:"top-left" group:"Visibility" help:"Origin of the positions, for --causal, --window and --alibi: the first query is at the first key (top-left, as PyTorch's is_causal), or the last query at the last key (bottom-right)."`
}

// RoPE is the rotary embedding of queries and keys.
type RoPE struct {
	Base        *float64 `name:"rope" placeholder:"BASE" group:"Positions" help:"Rotary embedding: rotate queries and keys by their positions, with angles of this base (10000 in the paper)."`
	Dim         int      `name:"rope-dim" placeholder:"R" group:"Positions" help:"Number of rotated elements of a row, even. Default: all."`
	Interleaved bool     `name:"rope-interleaved" group:"Positions" help:"Pair neighbours (2i, 2i+1), as RoFormer and GPT-J, instead of (i, i+R/2)."`
}

// Dropout is kernels.Dropout.
type Dropout struct {
	P    *float64 `name:"dropout" placeholder:"P" group:"Dropout" help:"Drop this share of the weights."`
	Seed uint64   `name:"seed" placeholder:"N" group:"Dropout" help:"Seed of the dropped weights, which are the same on every backend."`
}

// Check checks flags that need each other.
func (p *Problem) Check() error {
	switch {
	case p.BlockMask == "" && p.BlockSize != 0:
		return flags.Usagef("--block-size is given without a --block-mask")
	case p.BlockMask != "" && p.BlockSize < 1:
		return flags.Usagef("--block-size is %d, with a --block-mask it must be at least 1", p.BlockSize)
	case p.CuK.Rows != nil && !p.packed():
		return flags.Usagef("--cu-k is given without a --cu-q")
	case p.RoPE.Base == nil && p.RoPE != (RoPE{}):
		return flags.Usagef("--rope-dim or --rope-interleaved is given without a --rope")
	case p.RoPE.Base != nil && *p.RoPE.Base == 0:
		return flags.Usagef("--rope is 0, the base must be above 0: 10000 in the paper")
	case p.Dropout.P == nil && p.Dropout.Seed != 0:
		return flags.Usagef("--seed is given without a --dropout")
	case p.Sinks.Auto:
		return flags.Usagef("--sinks: \"auto\" is not a number")
	}
	return nil
}

// packed reports packed sequences.
func (p *Problem) packed() bool { return p.CuQ.Rows != nil }

// ofFiles returns the problem without the options that the command line has: those from files are left.
func (p *Problem) ofFiles() *Problem {
	f := &Problem{CuQ: p.CuQ, CuK: p.CuK, Segments: p.Segments, KVSegments: p.KVSegments, ALiBi: p.ALiBi, Sinks: p.Sinks, BlockSize: p.BlockSize}
	for _, l := range []*Ints{&f.CuQ, &f.CuK, &f.Segments, &f.KVSegments} {
		if l.File == "" {
			*l = Ints{}
		}
	}
	for _, l := range []*Floats{&f.ALiBi, &f.Sinks} {
		if l.File == "" {
			*l = Floats{}
		}
	}
	return f
}

// options returns the options that need no files, for a call with the lengths d.
func (p *Problem) options(d kernels.Dims) (kernels.Options, error) {
	opt := kernels.Options{
		Scale: p.Scale, Softcap: p.Softcap, Causal: p.Causal, Window: (*kernels.Window)(p.Window), Offset: p.Offset, KLen: p.KLen, Prefix: p.Prefix,
		QSegments: p.Segments.Rows, KSegments: p.KVSegments.Rows, ALiBi: p.ALiBi.Values, Sinks: p.Sinks.Values, BlockSize: p.BlockSize,
		LowPrecision: p.LowPrecision,
	}
	if p.ALiBi.Auto {
		opt.ALiBi = paperSlopes(d.Heads)
	}
	if p.Align == "bottom-right" {
		opt.Align = kernels.LowerRight
	}
	if p.Dropout.P != nil {
		opt.Dropout = kernels.Dropout{P: float32(*p.Dropout.P), Seed: p.Dropout.Seed}
	}
	var err error
	if opt.CuQ, err = p.CuQ.starts("cu-q"); err != nil {
		return opt, err
	}
	opt.CuK, err = p.CuK.starts("cu-k")
	return opt, err
}
