package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"strconv"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
)

// problem is everything that decides what attn run computes, in its canonical form:
// flags and defaults are resolved into numbers, causal masks, windows and alignment
// into the one visibility rule. Its JSON is what --print-problem prints and --problem
// reads. Paths are as the command line had them.
type problem struct {
	Q     string `json:"q"`
	K     string `json:"k"`
	V     string `json:"v"`
	PastK string `json:"past_k,omitempty"`
	PastV string `json:"past_v,omitempty"`

	Layout string    `json:"layout"`
	DType  string    `json:"dtype"`
	Dims   *dimsJSON `json:"dims,omitempty"` // must be those of the files

	Scale   *float64 `json:"scale,omitempty"`
	Softcap float64  `json:"softcap,omitempty"`
	Visible visible  `json:"visible"`
	Prefix  []int    `json:"prefix,omitempty"`

	// A row for each batch or one for all, from files too.
	Segments   [][]int32 `json:"segments,omitempty"`
	KVSegments [][]int32 `json:"kv_segments,omitempty"`

	Mask         string `json:"mask,omitempty"`
	Bias         string `json:"bias,omitempty"`
	RelativeBias string `json:"relative_bias,omitempty"`
	BlockMask    string `json:"block_mask,omitempty"`
	BlockSize    int    `json:"block_size,omitempty"`
	ALiBi        logits `json:"alibi,omitempty"`
	Sinks        logits `json:"sinks,omitempty"`

	RoPE    *ropeJSON    `json:"rope,omitempty"`
	Dropout *dropoutJSON `json:"dropout,omitempty"`

	CuQ []int `json:"cu_q,omitempty"`
	CuK []int `json:"cu_k,omitempty"`
}

// dimsJSON is kernels.Dims.
type dimsJSON struct {
	Batch    int `json:"batch"`
	Heads    int `json:"heads"`
	KVHeads  int `json:"kv_heads"`
	SeqQ     int `json:"seq_q"`
	SeqK     int `json:"seq_k"`
	Dim      int `json:"dim"`
	ValueDim int `json:"value_dim"`
}

// visible is backend.Visibility: row i sees key j when -left <= j - (i+offset) <= right
// and j < klen; null is no limit. Packed sequences have an alignment of their own each.
type visible struct {
	Left   *int   `json:"left"`
	Right  *int   `json:"right"`
	Offset int    `json:"offset"`
	KLen   []int  `json:"klen,omitempty"`
	Align  string `json:"align,omitempty"`
}

// dropoutJSON is backend.Dropout.
type dropoutJSON struct {
	P    float64 `json:"p"`
	Seed uint64  `json:"seed"`
}

// ropeJSON is nn.RoPE.
type ropeJSON struct {
	Base        float64 `json:"base"`
	Dim         int     `json:"dim,omitempty"`
	Interleaved bool    `json:"interleaved,omitempty"`
}

// logits are numbers of which some may be -Inf, which JSON has no number for: they are
// the text "-Inf".
type logits []float32

// MarshalJSON implements json.Marshaler.
func (l logits) MarshalJSON() ([]byte, error) {
	out := []byte{'['}
	for i, x := range l {
		if i > 0 {
			out = append(out, ',')
		}
		if y := float64(x); math.IsInf(y, 0) || math.IsNaN(y) {
			out = strconv.AppendQuote(out, strconv.FormatFloat(y, 'g', -1, 32))
		} else {
			out = strconv.AppendFloat(out, y, 'g', -1, 32)
		}
	}
	return append(out, ']'), nil
}

// UnmarshalJSON implements json.Unmarshaler.
func (l *logits) UnmarshalJSON(text []byte) error {
	var raw []json.RawMessage
	if err := json.Unmarshal(text, &raw); err != nil {
		return err
	}
	*l = make(logits, len(raw))
	for i, r := range raw {
		x, err := strconv.ParseFloat(string(bytes.Trim(r, `"`)), 32)
		if err != nil {
			return fmt.Errorf("%s is not a number", r)
		}
		(*l)[i] = float32(x)
	}
	return nil
}

// readProblem reads a problem that --print-problem printed, or that was written by hand.
func readProblem(path string) (*problem, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("--problem %s: %w", path, reason(err))
	}
	p := &problem{Layout: "bhsd"}
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(p); err != nil {
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			err = errors.New("it ends in the middle")
		}
		return nil, fmt.Errorf("--problem %s: %w", path, err)
	}
	if d.More() {
		return nil, fmt.Errorf("--problem %s: something follows the problem, one object is expected", path)
	}
	if p.Layout != "bhsd" && p.Layout != "bshd" {
		return nil, fmt.Errorf("--problem %s: layout is %q, it must be bhsd or bshd", path, p.Layout)
	}
	if _, err := p.dtype(); err != nil {
		return nil, fmt.Errorf("--problem %s: %w", path, err)
	}
	if a := p.Visible.Align; a != "" && a != topLeft && a != bottomRight {
		return nil, fmt.Errorf("--problem %s: align is %q, it must be %s or %s", path, a, topLeft, bottomRight)
	}
	return p, nil
}

// print writes p as --problem reads it.
func (p *problem) print(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	return e.Encode(p)
}

// dtype is the type to compute on; "" is that of the files.
func (p *problem) dtype() (backend.DType, error) {
	for _, d := range []backend.DType{backend.F32, backend.F16, backend.BF16} {
		if d.String() == p.DType || p.DType == "" {
			return d, nil
		}
	}
	return 0, fmt.Errorf("dtype is %q, it must be f32, f16 or bf16", p.DType)
}

// packed reports whether sequences lie one after the other.
func (p *problem) packed() bool { return p.CuQ != nil }

// resolve makes p canonical for the lengths d, past of whose keys are from before: it
// puts in what they decide.
func (p *problem) resolve(d kernels.Dims, past int) error {
	have := dimsJSON{d.Batch, d.Heads, d.KVHeads, d.SeqQ, d.SeqK, d.Dim, d.ValueDim}
	if p.Dims != nil && *p.Dims != have {
		return fmt.Errorf("the problem's dims are %+v, those of its files are %+v", *p.Dims, have)
	}
	asked := p.Dims != nil
	p.Dims = &have
	if p.Scale == nil {
		p.Scale = new(1 / math.Sqrt(float64(d.Dim)))
	}
	if asked || p.packed() { // canonical already, or each sequence by itself
		return nil
	}
	if p.Visible.Align == bottomRight {
		p.Visible.Offset += d.SeqK - d.SeqQ
	} else {
		p.Visible.Offset += past
	}
	p.Visible.Align = ""
	return nil
}

// options are the call's, but for what needs the data of files.
func (p *problem) options() kernels.Options {
	opt := kernels.Options{
		Scale: p.Scale, Softcap: p.Softcap, Offset: p.Visible.Offset, KLen: p.Visible.KLen,
		Prefix: p.Prefix, QSegments: p.Segments, KSegments: p.KVSegments, ALiBi: p.ALiBi, Sinks: p.Sinks, BlockSize: p.BlockSize,
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
	if d := p.Dropout; d != nil {
		opt.Dropout = backend.Dropout{P: float32(d.P), Seed: d.Seed}
	}
	return opt
}
