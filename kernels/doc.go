// Package kernels is what programs import to compute attention,
//
//	O = softmax(scale·Q·Kᵀ + bias) · V
//
// on whatever backend they opened. It validates a call once, translates its
// [Options] into the canonical problem of package backend, and dispatches:
//
//	be, err := backend.Open("auto") // a GPU when there is one, else the CPU
//	...
//	o, err := kernels.AttentionFloat32(ctx, be, kernels.Dims{Heads: 8, SeqQ: 1024, Dim: 64},
//		q, k, v, kernels.Options{Causal: true})
//
// For data that stays on the device between calls use tensors: [Attention],
// [AttentionInto], the stages [QK], [Softmax] and [PV], [Device.Rotate] for rotary
// embeddings, [Merge] for results over parts of the keys, [Plan] to see what a call will
// cost before it runs, and [Warmup] to compile what it needs. [AttentionVarlen] takes
// sequences of different lengths, packed one after the other. [Scores] and [TopWeights]
// show what attention looks at. Package nn has layers, package kvcache caches of keys and
// values.
//
// Tensors are [batch, heads, seq, dim] with any strides; data that lies as
// [batch, seq, heads, dim] is a view (Tensor.Swap), never a copy. Query heads
// may share key and value heads (grouped-query attention, Ainslie et al. 2023),
// values may have another head size than queries and keys.
//
// What it does not do: nothing is copied, cast or computed in O(S²) memory
// unless the call asks for it (Options.Weights), and no backend is chosen by
// itself.
package kernels
