package main

import (
	"errors"
	"fmt"
	"math"
	"reflect"
	"strings"

	"github.com/seed90331342/attn/kernels"
)

// callFlags are the options of an attention call that every command takes which makes
// one from files.
type callFlags struct {
	Backend string `name:"backend" default:"auto" help:"auto, cpu, gpu, gpu:N or gpu:NAME."`

	Layout string `name:"layout" enum:"bhsd,bshd" default:"bhsd" group:"Inputs" help:"Order of the axes of 4-D files: bhsd is [B,H,S,D], bshd is [B,S,H,D]."`
	DType  string `name:"dtype" enum:",f32,f16,bf16" default:"" placeholder:"TYPE" group:"Inputs" help:"Compute on f32, f16 or bf16 elements instead of the files' type (f2 is f16, f4 and f8 are f32)."`

	Scale   number `name:"scale" placeholder:"X" group:"Scores" help:"Factor on QKᵀ; 1/sqrt(D) when left out."`
	Softcap number `name:"softcap" placeholder:"C" group:"Scores" help:"Replace scores s by C·tanh(s/C)."`
	Mask    string `name:"mask" placeholder:"M.npy" group:"Scores" help:"Bool (true may be seen) or float (added to the scores) array that broadcasts, as in numpy, to the scores of q's rank: [Sq,Sk], [B,Sq,Sk] or [B,H,Sq,Sk]. A 4-D one is always [B,H,Sq,Sk]. One with fewer keys hides the rest."`

	Causal      bool    `name:"causal" group:"Visibility" help:"Hide the keys after a row's own position."`
	CausalAlign string  `name:"causal-align" enum:"top-left,bottom-right" default:"top-left" group:"Visibility" help:"Where positions are counted from, for --causal, --window and --alibi: the first key is the first query's (top-left, as PyTorch's is_causal), or the last key the last query's (bottom-right)."`
	Window      window  `name:"window" placeholder:"L,R" group:"Visibility" help:"Hide the keys more than L before or R after a row's own position; inf is no limit."`
	KLen        lengths `name:"klen" placeholder:"N,N" group:"Visibility" help:"How many keys exist, one number for each batch, 0 to Sk."`
}

// problem returns what the flags say of a problem.
func (f *callFlags) problem() *problem {
	p := &problem{
		Layout: f.Layout, DType: f.DType, Softcap: f.Softcap.value, Mask: f.Mask,
		Visible: visible{KLen: f.KLen, Align: f.CausalAlign},
	}
	if f.Scale.set {
		p.Scale = new(f.Scale.value)
	}
	if f.Window.set && f.Window.Left != kernels.Unbounded {
		p.Visible.Left = &f.Window.Left
	}
	switch {
	case f.Causal:
		p.Visible.Right = new(0)
	case f.Window.set && f.Window.Right != kernels.Unbounded:
		p.Visible.Right = &f.Window.Right
	}
	return p
}

// problemFlags are the flags of attn run that say what is computed.
type problemFlags struct {
	Q string `name:"q" placeholder:"Q.npy" group:"Inputs" help:"Queries: [S,D], [B,S,D] or [B,H,S,D] of f2, f4 or f8 (rounded to f4); packed ones [total,H,D]."`
	K string `name:"k" placeholder:"K.npy" group:"Inputs" help:"Keys, of q's rank; their heads divide q's."`
	V string `name:"v" placeholder:"V.npy" group:"Inputs" help:"Values, of q's rank, with k's heads and length and any head size."`

	PastK string `name:"past-k" placeholder:"K.npy" group:"Inputs" help:"Keys from before, which those of --k follow; the queries' positions follow them too."`
	PastV string `name:"past-v" placeholder:"V.npy" group:"Inputs" help:"Values from before."`

	CuQ idsFlag `name:"cu-q" placeholder:"0,N,..|FILE" group:"Inputs" help:"Packed sequences: where each begins and the last one ends among the rows of q, k and v, [total,H,D], as a list or a .npy file. Each is computed by itself, without padding."`
	CuK idsFlag `name:"cu-k" placeholder:"0,N,..|FILE" group:"Inputs" help:"The same for the keys, where they are not those of the rows."`

	callFlags `embed:""`

	Bias         string `name:"bias" placeholder:"M.npy" group:"Scores" help:"A float array beside a bool --mask, added to the scores."`
	RelativeBias string `name:"relative-bias" placeholder:"R.npy" group:"Scores" help:"A bias for each distance, [Sq+Sk-1], [H,Sq+Sk-1] or [B,H,Sq+Sk-1]: element j-i+Sq-1 is added to the score of row i and key j."`

	ALiBi logitsFlag `name:"alibi" placeholder:"auto|X,X|FILE" group:"Scores" help:"Linear biases: slopes, one a head or one a batch and head, as numbers or as a .npy file; auto is 2^(-8/H), 2^(-16/H), .. as in the paper for H a power of two."`
	Sinks logitsFlag `name:"sinks" placeholder:"X,X|FILE" group:"Scores" help:"Attention sinks: a logit for each head in the denominator alone, as numbers or as a .npy file."`

	Offset     int     `name:"offset" placeholder:"N" group:"Visibility" help:"Move every row's position by N keys."`
	Prefix     lengths `name:"prefix" placeholder:"N,N" group:"Visibility" help:"Keys from the first on that --causal and the right side of --window do not hide, one number for all batches or for each."`
	Segments   idsFlag `name:"segments" placeholder:"N,N|FILE" group:"Visibility" help:"Document ids: a row sees the keys of its own id only. Whole numbers, one for each row, as a list or as a .npy file [S] or [B,S]."`
	KVSegments idsFlag `name:"kv-segments" placeholder:"N,N|FILE" group:"Visibility" help:"Document ids of the keys, where they are not those of the rows."`
	BlockMask  string  `name:"block-mask" placeholder:"M.npy" group:"Visibility" help:"Bool array of [Sq/block,Sk/block], with axes for batches and heads as in --mask: which blocks may be seen. Hidden ones are not computed."`
	BlockSize  int     `name:"block-size" placeholder:"N" group:"Visibility" help:"Rows and keys of a block of --block-mask."`

	RoPE            number `name:"rope" placeholder:"BASE" group:"Positions" help:"Rotary embedding: turn queries and keys by their positions, with angles of this base (10000 in the paper). Keys from before are turned already, as a cache keeps them; rows and keys count on from them."`
	RoPEDim         int    `name:"rope-dim" placeholder:"R" group:"Positions" help:"How many elements of a row turn, an even number; all when left out."`
	RoPEInterleaved bool   `name:"rope-interleaved" group:"Positions" help:"Pairs are neighbours, (2i, 2i+1), as in RoFormer and GPT-J, and not (i, i+R/2)."`

	Dropout number `name:"dropout" placeholder:"P" group:"Dropout" help:"Drop this share of the weights."`
	Seed    uint64 `name:"seed" placeholder:"N" group:"Dropout" help:"What is dropped; the same on every backend."`
}

// Alignments of --causal-align.
const (
	topLeft     = "top-left"
	bottomRight = "bottom-right"
)

// given reports whether any flag was.
func (f *problemFlags) given() bool {
	defaults := problemFlags{callFlags: callFlags{Backend: f.Backend, Layout: "bhsd", CausalAlign: topLeft}}
	return !reflect.DeepEqual(*f, defaults)
}

// problem returns what the flags say, with lists read from their files. What follows
// from the lengths of q and k is left to resolve.
func (f *problemFlags) problem() (*problem, error) {
	var missing []string
	for _, x := range []struct{ name, path string }{{"--q", f.Q}, {"--k", f.K}, {"--v", f.V}} {
		if x.path == "" {
			missing = append(missing, x.name)
		}
	}
	switch {
	case missing != nil:
		return nil, fmt.Errorf("missing flags: %s (or --problem FILE)", strings.Join(missing, ", "))
	case (f.PastK == "") != (f.PastV == ""):
		return nil, errors.New("--past-k and --past-v go together: give both or none")
	case f.BlockMask == "" && f.BlockSize != 0:
		return nil, errors.New("--block-size is given without a --block-mask")
	case f.CuK.text != "" && f.CuQ.text == "":
		return nil, errors.New("--cu-k is given without a --cu-q")
	case f.CuQ.text != "" && f.PastK != "":
		return nil, errors.New("--past-k cannot be given for packed sequences: put each one's keys together in --k")
	case !f.RoPE.set && (f.RoPEDim != 0 || f.RoPEInterleaved):
		return nil, errors.New("--rope-dim or --rope-interleaved is given without a --rope")
	case f.RoPE.set && f.RoPE.value == 0:
		return nil, errors.New("--rope is 0, the base must be above 0: 10000 in the paper")
	case f.Seed != 0 && !f.Dropout.set:
		return nil, errors.New("--seed is given without a --dropout")
	}
	p := f.callFlags.problem()
	p.Q, p.K, p.V, p.PastK, p.PastV = f.Q, f.K, f.V, f.PastK, f.PastV
	p.Bias, p.RelativeBias, p.BlockMask, p.BlockSize, p.Visible.Offset = f.Bias, f.RelativeBias, f.BlockMask, f.BlockSize, f.Offset
	p.Prefix = f.Prefix
	if f.RoPE.set {
		p.RoPE = &ropeJSON{f.RoPE.value, f.RoPEDim, f.RoPEInterleaved}
	}
	if f.Dropout.set {
		p.Dropout = &dropoutJSON{f.Dropout.value, f.Seed}
	}
	var err error
	if p.CuQ, err = f.CuQ.list("cu-q"); err != nil {
		return nil, err
	}
	if p.CuK, err = f.CuK.list("cu-k"); err != nil {
		return nil, err
	}
	if p.Segments, err = f.Segments.ids("segments"); err != nil {
		return nil, err
	}
	if p.KVSegments, err = f.KVSegments.ids("kv-segments"); err != nil {
		return nil, err
	}
	if f.ALiBi.text != autoSlopes {
		if p.ALiBi, err = f.ALiBi.values("alibi"); err != nil {
			return nil, err
		}
	}
	p.Sinks, err = f.Sinks.values("sinks")
	return p, err
}

// autoSlopes as --alibi is the slopes of the paper.
const autoSlopes = "auto"

// paperSlopes are those of Press et al. 2022: a geometric sequence that starts at
// 2^(-8/n) for n heads, a power of two; for other n those of the next lower power, then
// every second one of the next higher.
func paperSlopes(n int) logits {
	power := 1
	for power*2 <= n {
		power *= 2
	}
	var s logits
	for i := range power {
		s = append(s, float32(math.Exp2(-8*float64(i+1)/float64(power))))
	}
	for i := 0; len(s) < n; i += 2 {
		s = append(s, float32(math.Exp2(-8*float64(i+1)/float64(2*power))))
	}
	return s
}
