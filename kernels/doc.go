// Package kernels computes attention,
//
//	O = softmax(scale·Q·Kᵀ + bias) · V
//
// on the CPU or on a GPU. A program opens a [Device] and calls it:
//
//	dev, err := kernels.Open("auto") // a hardware GPU if there is one, else the CPU
//	...
//	o, err := dev.AttentionFloat32(ctx, kernels.Dims{Heads: 8, SeqQ: 1024, Dim: 64}, kernels.BHSD,
//		q, k, v, kernels.Options{Causal: true})
//
// Data that stays on the device between calls is in tensors. [Device.Attention] computes them; [Device.Prepare]
// validates a call once for many runs, and [Call.Reset] prepares the next step over a cache that grows. [Options] has
// masks, biases, windows, packed sequences and pages. QK, Softmax and PV are the stages of a call; Scores, TopWeights
// and EachWeightRow show what it attends to; Project, Rotate, Normalise, Gate, Merge and Copy surround it.
// [Device.LinearAttention] has a state of fixed size in place of keys and values, and [Device.CausalConv] goes before
// it. [Device.Index] chooses the keys of sparse attention.
//
// Tensors are [batch, heads, seq, dim] with arbitrary strides; data that lies as [batch, seq, heads, dim] is a view
// (Tensor.Swap), never a copy. Query heads may share key and value heads (grouped-query attention, Ainslie et al.
// 2023), and values may have another head size than queries and keys.
//
// Nothing is copied, converted or computed in O(S²) memory unless the call requests it.
// Package kvcache keeps keys and values between calls, package nn has layers.
package kernels
