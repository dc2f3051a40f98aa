// Package kvcache keeps the keys and values of growing sequences in device memory, for generation: each step appends
// the keys and values of its new tokens and attends from their queries to all tokens so far.
//
//	err := cache.Append(ctx, k, v, nil)                  // k [B, Hkv, n, D], v [B, Hkv, n, Dv]
//	r, err := cache.Attention(ctx, q, kvcache.CallOptions{}) // q [B, H, n, D], O [B, H, n, Dv]
//
// Attention is causal, and the last row of q has the position of the last token. The result is that of
// [kernels.Device.Attention] over the same keys and values, rounded to the cache's dtype.
//
// A [Cache] has a fixed number of sequences, each in contiguous memory:
//
//	sequence 0  k0 k1 k2 k3 k4 .. .. ..
//	sequence 1  k0 k1 .. .. .. .. .. ..
//
// A [Paged] cache has a pool of pages. Sequences come, fork and go. Each has a block table, the list of its pages, and
// sequences with a common prefix share its pages until one of them writes to a page:
//
//	pool        page 0       page 1       page 2       page 3
//	            k0 k1 k2 k3  k4 k5 s6 ..  k4 k5 t6 t7  t8 .. .. ..
//	references  2            1            1            1
//	s           0 1
//	t           0 2 3
//
// For speculative decoding, Rewind takes back the last tokens of a sequence. AppendAt and a call with Positions and a
// Mask of ancestors attend from a tree of tokens, and Keep leaves one of its paths.
//
// The tokens of an image may see each other: [kernels.Options].Spans has their positions.
//
// A cache can also have a window: tokens that no later row sees make room for new ones.
// A cache with a [Rotary] embedding rotates keys when they are appended and queries when
// they attend. One with [Config].Hadamard multiplies both, and values, by Hadamard matrices. One
// with KScale and VScale divides keys and values by factors and multiplies queries and outputs by them. One
// with [Config].Latent has no values of its own: they are the first elements of the keys.
//
// [States] is for linear attention, whose state has a fixed size, and for the convolution before it.
package kvcache
