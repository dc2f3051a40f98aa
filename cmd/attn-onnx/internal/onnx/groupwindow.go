package onnx

import (
	"fmt"

	"github.com/seed90331342/attn/cmd/attn-onnx/internal/onnxfile"
	"github.com/seed90331342/attn/kernels"
)

// A cache of a window (sliding_window_cache) of GroupQueryAttention has room for C rows, at least those of the window W.
// After T tokens its first L(T) rows are the most recent ones in order, the others are unspecified, here zeros. A token
// that finds it full drops the first C-W+1 rows.

// resident returns L(tokens).
func (c *groupQueryCall) resident(tokens int) int {
	if tokens <= c.past {
		return tokens
	}
	drop := c.past - c.window + 1
	return tokens - drop*((tokens-c.past+drop-1)/drop)
}

// checkWindow reads seqlens_k of a call with a cache of a window. The keys of a batch are the rows of the past that are
// still there, and the new ones.
func (c *groupQueryCall) checkWindow(lens *onnxfile.Tensor) error {
	switch {
	case c.pastKey == nil || c.past < c.window:
		return fmt.Errorf("past_key has shape %v, sliding_window_cache needs it with at least the %d rows of local_window_size: %w", shapeOf(c.pastKey), c.window, kernels.ErrShape)
	case c.added == 0:
		return fmt.Errorf("key has no rows, sliding_window_cache needs those of query: %w", kernels.ErrUnsupported)
	}
	for b := range c.batch {
		tokens := int(lens.Int(b)) + 1
		start := tokens - c.seq
		if c.prompt {
			start = 0
		}
		if start < 0 || tokens < 1 || tokens > c.total {
			return fmt.Errorf("seqlens_k[%d] is %d, it must be one less than the tokens of the batch: from the %d rows of query, or 1 in a prompt, to total_sequence_length, %d: %w", b, lens.Int(b), c.seq, c.total, kernels.ErrOption)
		}
		kept := c.resident(start)
		c.starts, c.first = append(c.starts, start), append(c.first, start-kept)
		c.lens, c.tokens = append(c.lens, kept+c.seq), append(c.tokens, tokens)
		c.present = max(c.present, kept+c.seq)
	}
	c.visible = c.lens
	return checkBias(c.bias, c.batch, c.heads, c.seq, c.total)
}

// compacted returns the cache after the call, of its keys or values [batch, kv heads, present, size].
func (c *groupQueryCall) compacted(x *onnxfile.Tensor) (*onnxfile.Tensor, error) {
	y, err := newTensor(x.Type, []int{c.batch, c.kvHeads, c.past, c.size})
	if err != nil {
		return nil, err
	}
	y.Data = y.Data[:cap(y.Data)]
	row := c.size * x.Type.Size()
	for i := range c.batch * c.kvHeads {
		b := i / c.kvHeads
		kept := c.resident(c.tokens[b])
		from := i*c.present + c.tokens[b] - kept - c.first[b]
		copy(y.Data[i*c.past*row:], x.Data[from*row:(from+kept)*row])
	}
	return y, nil
}

// windowBias returns the columns of attention_bias for the keys of each batch, 0 for others.
func (c *groupQueryCall) windowBias() (*onnxfile.Tensor, error) {
	s := c.bias.Shape
	y, err := newTensor(c.bias.Type, []int{c.batch, s[1], c.seq, c.present})
	if err != nil {
		return nil, err
	}
	y.Data = y.Data[:cap(y.Data)]
	size, rows := y.Type.Size(), s[1]*c.seq
	for i := range c.batch * rows {
		b := i / rows
		from := (i%(s[0]*rows))*c.total + c.first[b]
		copy(y.Data[i*c.present*size:], c.bias.Data[from*size:(from+c.lens[b])*size])
	}
	return y, nil
}
