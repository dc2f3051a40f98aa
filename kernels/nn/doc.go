// Package nn has the layers around attention: linear projections, multi-head attention with its weights, and rotary
// position embedding. Its tensors stay in the device's memory from the input of a layer to its output.
//
//	q = x·Wq + Bq    k = z·Wk + Bk    v = z·Wv + Bv
//	y = concat over heads of softmax(scale·q·kᵀ + bias)·v, times Wo, + Bo
//
// where z is x, or the memory of cross attention. A config adds what the families of models have besides: norms of
// queries and keys, sinks, and gates before Wo. [LatentAttention] is the layer of DeepSeek's models, whose keys and
// values follow from one small row. [LinearAttention] is that of Qwen3-Next and Kimi Linear, which has a state of fixed
// size. For generation, the other layers append keys and values to a cache of package kvcache. For training, Forward
// and Backward of [MultiHeadAttention] compute the gradients of its input and weights.
package nn
