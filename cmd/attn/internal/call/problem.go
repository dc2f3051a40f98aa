// Package call builds an attention call from flags or a JSON file, and from files of arrays.
package call

import (
	"context"
	"errors"
	"fmt"
	"math"
	"reflect"

	"github.com/seed90331342/attn/cmd/internal/cli"
	"github.com/seed90331342/attn/cmd/internal/files"
	"github.com/seed90331342/attn/cmd/internal/flags"
	"github.com/seed90331342/attn/kernels"
)

// Problem is a call over files: as flags, and as the JSON of --print-problem and
// --problem. The JSON is canonical: defaults and automatic values are numbers,
// causal masks, windows and alignment are the one visibility rule. Paths stay as
// they were given.
type Problem struct {
	Q     string `json:"q" name:"q" placeholder:"Q.npy" group:"Inputs" help:"Queries: [S,D], [B,S,D] or [B,H,S,D] of f2, f4 or f8 (rounded to f4); packed sequences [total,H,D]. Every input may be FILE.safetensors#NAME, a tensor of a file, also of bf16."`
	K     string `json:"k" name:"k" placeholder:"K.npy" group:"Inputs" help:"Keys, of q's rank; their heads divide q's."`
	V     string `json:"v" name:"v" placeholder:"V.npy" group:"Inputs" help:"Values, of q's rank, with k's heads and length and any head size."`
	PastK string `json:"past_k,omitempty" name:"past-k" placeholder:"K.npy" group:"Inputs" help:"Earlier keys (a cache), before those of --k. Positions continue after them."`
	PastV string `json:"past_v,omitempty" name:"past-v" placeholder:"V.npy" group:"Inputs" help:"Earlier values."`
	CuQ   Starts `json:"cu_q,omitempty" name:"cu-q" placeholder:"0,N,..|FILE" group:"Inputs" help:"Packed sequences: the first row of each and the total, as a list or a file. q, k and v are [total,H,D]; each sequence attends to itself, without padding."`
	CuK   Starts `json:"cu_k,omitempty" name:"cu-k" placeholder:"0,N,..|FILE" group:"Inputs" help:"The same for the keys. Default: --cu-q."`

	Options `embed:""`
	Dims    *Dims `json:"dims,omitempty" kong:"-"` // must be those of the files

	Bias         string `json:"bias,omitempty" name:"bias" placeholder:"M.npy" group:"Scores" help:"Float array added to the scores, in addition to a bool --mask."`
	RelativeBias string `json:"relative_bias,omitempty" name:"relative-bias" placeholder:"R.npy" group:"Scores" help:"Bias for each distance, [Sq+Sk-1], [H,Sq+Sk-1] or [B,H,Sq+Sk-1]: element j-i+Sq-1 is added to the score of row i and key j."`
	ALiBi        Logits `json:"alibi,omitempty" name:"alibi" placeholder:"auto|X,X|FILE" group:"Scores" help:"Linear biases: slopes, one for each head or for each batch and head, as numbers or a file; auto is 2^(-8/H), 2^(-16/H), .. as in the paper for H a power of two."`
	Sinks        Logits `json:"sinks,omitempty" name:"sinks" placeholder:"X,X|FILE" group:"Scores" help:"Attention sinks: a logit for each head that only enters the denominator, as numbers or a file."`

	Prefix     []int  `json:"prefix,omitempty" name:"prefix" placeholder:"N,N" group:"Visibility" help:"Number of first keys that --causal and the right side of --window do not hide, one for all batches or for each."`
	Segments   IDs    `json:"segments,omitempty" name:"segments" placeholder:"N,N|FILE" group:"Visibility" help:"Document ids: a row sees only keys of its own id. One integer for each row, as a list or a file [S] or [B,S]."`
	KVSegments IDs    `json:"kv_segments,omitempty" name:"kv-segments" placeholder:"N,N|FILE" group:"Visibility" help:"Document ids of the keys. Default: --segments."`
	BlockMask  string `json:"block_mask,omitempty" name:"block-mask" placeholder:"M.npy" group:"Visibility" help:"Bool array [Sq/block,Sk/block] of visible blocks, with axes for batches and heads as in --mask. Hidden blocks are not computed."`
	BlockSize  int    `json:"block_size,omitempty" name:"block-size" placeholder:"N" group:"Visibility" help:"Rows and keys of a block of --block-mask."`

	RoPE    RoPE    `json:"rope,omitzero" embed:""`
	Dropout Dropout `json:"dropout,omitzero" embed:""`
}

// Options are the options that every command over files has.
type Options struct {
	Layout  string        `json:"layout" name:"layout" enum:"bhsd,bshd" default:"bhsd" group:"Inputs" help:"Order of the axes of 4-D files: bhsd is [B,H,S,D], bshd is [B,S,H,D]."`
	DType   string        `json:"dtype" name:"dtype" enum:",f32,f16,bf16" default:"" placeholder:"TYPE" group:"Inputs" help:"Compute on f32, f16 or bf16 elements. Default: the type of the files (f2 is f16, f4 and f8 are f32, bf16 is itself)."`
	Scale   *float64      `json:"scale,omitempty" name:"scale" placeholder:"X" group:"Scores" help:"Factor of QKᵀ. Default: 1/sqrt(D)."`
	Softcap float64       `json:"softcap,omitempty" name:"softcap" placeholder:"C" group:"Scores" help:"Replace scores s by C·tanh(s/C)."`
	Mask    string        `json:"mask,omitempty" name:"mask" placeholder:"M.npy" group:"Scores" help:"Bool (true is visible) or float (added to the scores) array that broadcasts, as in numpy, to the scores of q's rank: [Sq,Sk], [B,Sq,Sk] or [B,H,Sq,Sk]. A 4-D one is always [B,H,Sq,Sk]. Keys beyond its last axis are hidden."`
	Causal  bool          `json:"-" name:"causal" group:"Visibility" help:"Hide the keys after a row's own position."`
	Window  *flags.Window `json:"-" name:"window" placeholder:"L,R" group:"Visibility" help:"Hide the keys more than L before or R after a row's own position; inf is no limit."`
	Visible Visible       `json:"visible" embed:""`
}

// Visible is kernels.Visibility: row i sees key j when -left <= j - (i+offset) <=
// right and j < klen[b]; null is no limit. Align is part of the canonical form of
// packed sequences only, each of which has its own offset.
type Visible struct {
	Left   *int   `json:"left" kong:"-"`
	Right  *int   `json:"right" kong:"-"`
	Offset int    `json:"offset" name:"offset" placeholder:"N" group:"Visibility" help:"Move every row's position by N keys."`
	KLen   []int  `json:"klen,omitempty" name:"klen" placeholder:"N,N" group:"Visibility" help:"Number of existing keys, one for each batch, 0 to Sk."`
	Align  string `json:"align,omitempty" name:"causal-align" enum:"top-left,bottom-right" default:"top-left" group:"Visibility" help:"Origin of the positions, for --causal, --window and --alibi: the first query is at the first key (top-left, as PyTorch's is_causal), or the last query at the last key (bottom-right)."`
}

// RoPE is the rotary embedding of queries and keys.
type RoPE struct {
	Base        *float64 `json:"base" name:"rope" placeholder:"BASE" group:"Positions" help:"Rotary embedding: rotate queries and keys by their positions, with angles of this base (10000 in the paper). Earlier keys are rotated already, as in a cache."`
	Dim         int      `json:"dim,omitempty" name:"rope-dim" placeholder:"R" group:"Positions" help:"Number of rotated elements of a row, even. Default: all."`
	Interleaved bool     `json:"interleaved,omitempty" name:"rope-interleaved" group:"Positions" help:"Pair neighbours (2i, 2i+1), as RoFormer and GPT-J, instead of (i, i+R/2)."`
}

// Dropout is kernels.Dropout.
type Dropout struct {
	P    *float64 `json:"p" name:"dropout" placeholder:"P" group:"Dropout" help:"Drop this share of the weights."`
	Seed uint64   `json:"seed" name:"seed" placeholder:"N" group:"Dropout" help:"Seed of the dropped weights, which are the same on every backend."`
}

// Dims is kernels.Dims as JSON.
type Dims struct {
	Batch    int `json:"batch"`
	Heads    int `json:"heads"`
	KVHeads  int `json:"kv_heads"`
	SeqQ     int `json:"seq_q"`
	SeqK     int `json:"seq_k"`
	Dim      int `json:"dim"`
	ValueDim int `json:"value_dim"`
}

// Alignments of Visible.
const (
	topLeft     = "top-left"
	bottomRight = "bottom-right"
)

// Given reports whether any flag differs from its default.
func (p *Problem) Given() bool {
	return !reflect.DeepEqual(*p, Problem{Options: Options{Layout: "bhsd", Visible: Visible{Align: topLeft}}})
}

// Check checks flags, or fields, that need each other.
func (p *Problem) Check() error {
	switch {
	case (p.PastK == "") != (p.PastV == ""):
		return flags.Usagef("--past-k and --past-v go together: give both or none")
	case p.BlockMask == "" && p.BlockSize != 0:
		return flags.Usagef("--block-size is given without a --block-mask")
	case p.CuK != nil && p.CuQ == nil:
		return flags.Usagef("--cu-k is given without a --cu-q")
	case p.CuQ != nil && p.PastK != "":
		return flags.Usagef("--past-k cannot be given for packed sequences: put each one's keys together in --k")
	case p.RoPE.Base == nil && p.RoPE != (RoPE{}):
		return flags.Usagef("--rope-dim or --rope-interleaved is given without a --rope")
	case p.RoPE.Base != nil && *p.RoPE.Base == 0:
		return flags.Usagef("--rope is 0, the base must be above 0: 10000 in the paper")
	case p.Dropout.P == nil && p.Dropout.Seed != 0:
		return flags.Usagef("--seed is given without a --dropout")
	}
	return nil
}

// Missing returns the flags of the operands that are missing.
func (p *Problem) Missing() (missing []string) {
	for _, f := range [][2]string{{"--q", p.Q}, {"--k", p.K}, {"--v", p.V}} {
		if f[1] == "" {
			missing = append(missing, f[0])
		}
	}
	return missing
}

// Read replaces p with the problem in the JSON file at path.
func (p *Problem) Read(ctx context.Context, path string) error {
	text, err := files.Read(ctx, path, files.MaxText)
	if err == nil {
		*p = Problem{Options: Options{Layout: "bhsd"}}
		err = p.decode(text)
	}
	if err != nil {
		return fmt.Errorf("--problem %s: %w", path, err)
	}
	return nil
}

func (p *Problem) decode(text []byte) error {
	if err := files.DecodeJSON(text, p, true); err != nil {
		return err
	}
	switch {
	case p.Layout != "bhsd" && p.Layout != "bshd":
		return fmt.Errorf("layout is %q, it must be bhsd or bshd", p.Layout)
	case p.Visible.Align != "" && p.Visible.Align != topLeft && p.Visible.Align != bottomRight:
		return fmt.Errorf("align is %q, it must be %s or %s", p.Visible.Align, topLeft, bottomRight)
	case p.DType != "":
		if _, err := cli.ParseDType("dtype", p.DType); err != nil {
			return err
		}
	}
	if p.Missing() != nil {
		return errors.New("q, k or v is missing: the files of the operands")
	}
	return p.Check()
}

// resolve makes p canonical for a call with the lengths d, whose first past keys are earlier ones.
func (p *Problem) resolve(d kernels.Dims, past int) error {
	have := Dims(d)
	if p.Dims != nil { // canonical already
		if *p.Dims != have {
			return fmt.Errorf("the problem's dims are %+v, those of its files are %+v", *p.Dims, have)
		}
		return nil
	}
	p.Dims = &have
	if p.Scale == nil {
		p.Scale = new(1 / math.Sqrt(float64(d.Dim)))
	}
	if p.ALiBi.auto() {
		p.ALiBi = paperSlopes(d.Heads)
	}
	if v := &p.Visible; p.CuQ == nil {
		if v.Align == bottomRight {
			v.Offset += d.SeqK - d.SeqQ
		} else {
			v.Offset += past
		}
		v.Align = ""
	}
	if w := p.Window; w != nil && w.Left != kernels.Unbounded {
		p.Visible.Left = &w.Left
	}
	if w := p.Window; w != nil && w.Right != kernels.Unbounded {
		p.Visible.Right = &w.Right
	}
	if p.Causal {
		p.Visible.Right = new(0)
	}
	return nil
}

// options returns the options of the canonical p that need no files.
func (p *Problem) options() kernels.Options {
	opt := kernels.Options{
		Scale: p.Scale, Softcap: p.Softcap, Offset: []int{p.Visible.Offset}, KLen: p.Visible.KLen, Prefix: p.Prefix,
		QSegments: p.Segments, KSegments: p.KVSegments, ALiBi: p.ALiBi, Sinks: p.Sinks, BlockSize: p.BlockSize, CuQ: p.CuQ, CuK: p.CuK,
	}
	if v := p.Visible; v.Left != nil || v.Right != nil {
		opt.Window = &kernels.Window{Left: kernels.Unbounded, Right: kernels.Unbounded}
		if v.Left != nil {
			opt.Window.Left = *v.Left
		}
		if v.Right != nil {
			opt.Window.Right = *v.Right
		}
	}
	if p.Visible.Align == bottomRight {
		opt.Align = kernels.LowerRight
	}
	if d := p.Dropout; d.P != nil {
		opt.Dropout = kernels.Dropout{P: float32(*d.P), Seed: d.Seed}
	}
	return opt
}
