"""Computes attention and its gradients with PyTorch in float64: python3 torch_peer.py

Each line of the input is a problem as JSON, each line of the output its answer. Arrays
are float64 in base64. Masks and biases are made here from the options of a problem, from
their descriptions alone.
"""
import base64
import json
import math
import struct
import sys
import warnings

import numpy as np
import torch
import torch.nn.functional as F


def array(r, name, *shape):
    return torch.from_numpy(np.frombuffer(base64.b64decode(r[name]), dtype="<f8").reshape(shape).copy())


def encode(t):
    return None if t is None else base64.b64encode(t.detach().contiguous().numpy().astype("<f8").tobytes()).decode()


def longer(t, keys, fill):
    """Extends a mask or bias with fewer keys; one key is broadcast."""
    short = keys - t.shape[-1]
    return F.pad(t, (0, short), value=fill) if t.shape[-1] > 1 and short > 0 else t


def scores_bias(r, batch, heads, rows, keys, leaf=array):
    """Returns what is added to the scores [B, H, Sq, Sk]: -Inf where a key is hidden.

    leaf returns the biases, with respect to which PyTorch may differentiate.
    """
    i, j = torch.arange(rows)[:, None], torch.arange(keys)[None, :]
    offsets = torch.tensor(r["offsets"] or [0] * batch) + (keys - rows if r["lower_right"] else 0)
    position = i[None, None] + offsets[:, None, None, None]
    each = lambda a: torch.tensor(a)[:, None, None, None]
    ahead = (j > position) & r["causal"]
    seen = torch.ones(batch, heads, rows, keys, dtype=torch.bool)
    if r["window"]:
        left, right = r["window"]
        ahead |= j > position + right
        seen &= j >= position - left
    if r["prefix"]:
        ahead = ahead & (j >= each(r["prefix"]))
    seen &= ~ahead
    if r["klen"]:
        seen &= j < each(r["klen"])
    if r["q_segments"]:
        q, k = torch.tensor(r["q_segments"]), torch.tensor(r["k_segments"])
        seen &= q[:, None, :, None] == k[:, None, None, :]
    if r["mask"]:
        seen &= longer(array(r, "mask", *r["mask_shape"]) != 0, keys, False)
    if r["blocks"]:
        n = r["block_size"]
        blocks = array(r, "blocks", *r["blocks_shape"]) != 0
        seen &= blocks.repeat_interleave(n, 2)[:, :, :rows].repeat_interleave(n, 3)[..., :keys]
    bias = torch.zeros(batch, heads, rows, keys, dtype=torch.float64)
    if r["bias"]:
        bias = bias + longer(leaf(r, "bias", *r["bias_shape"]), keys, -math.inf)
    if r["relative"]:
        bias = bias + leaf(r, "relative", *r["relative_shape"])[:, :, 0][:, :, j - i + rows - 1]
    if r["alibi"]:
        slopes = leaf(r, "alibi", -1, heads)
        bias = bias - slopes[:, :, None, None] * (j - position).abs()
    return bias.masked_fill(~seen, -math.inf)


def sdpa(r):
    batch, heads, kv, rows, keys, d, dv = r["dims"]
    q, k, v = array(r, "q", batch, heads, rows, d), array(r, "k", batch, kv, keys, d), array(r, "v", batch, kv, keys, dv)
    k, v = k.repeat_interleave(heads // kv, 1), v.repeat_interleave(heads // kv, 1)
    q = q * (r["scale"] * math.sqrt(d))  # undoes 1/sqrt(d)
    if r["is_causal"]:
        o, w = attention(q, k, v, None, True)
        return {"o": encode(o), "weights": encode(w)}
    bias = scores_bias(r, batch, heads, rows, keys)
    if r["sinks"]:  # a key of zeros with a value of zeros, whose bias is the logit
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        sinks = array(r, "sinks", 1, heads, 1, 1)
        bias = torch.cat([bias, sinks.expand(batch, heads, rows, 1)], -1)
    o, w = attention(q, k, v, bias, False)
    return {"o": encode(o), "weights": None if w is None else encode(w[..., :keys])}


def attention(q, k, v, bias, causal):
    if hasattr(F, "scaled_dot_product_attention"):
        return F.scaled_dot_product_attention(q, k, v, bias, is_causal=causal), None
    return F._scaled_dot_product_attention(q, k, v, bias, 0.0, True, causal)  # 1.13


def gradients(r):
    """Returns the gradients of sum(do * o) + sum(dlse * lse) by autograd of ordinary operations.

    They are in the order of backend.Gradients, in float64 and in float32.
    """
    return {"gradients": differentiate(r, torch.float64), "single": differentiate(r, torch.float32)}


def differentiate(r, dtype):
    batch, heads, kv, rows, keys, d, dv = r["dims"]
    leaves = {}

    def leaf(r, name, *shape):
        leaves[name] = array(r, name, *shape).to(dtype).requires_grad_()
        return leaves[name]

    with torch.enable_grad():
        q, k, v = leaf(r, "q", batch, heads, rows, d), leaf(r, "k", batch, kv, keys, d), leaf(r, "v", batch, kv, keys, dv)
        k, v = k.repeat_interleave(heads // kv, 1), v.repeat_interleave(heads // kv, 1)
        s = r["scale"] * (q @ k.transpose(-1, -2))
        if r["softcap"]:
            s = r["softcap"] * torch.tanh(s / r["softcap"])
        s = (s + scores_bias(r, batch, heads, rows, keys, leaf)).to(dtype)
        if r["sinks"]:
            s = torch.cat([s, leaf(r, "sinks", 1, heads, 1, 1).expand(batch, heads, rows, 1)], -1)
        blind = (s == -math.inf).all(-1, keepdim=True)
        s = s.masked_fill(blind, 0)
        w = torch.softmax(s, -1).masked_fill(blind, 0)[..., :keys]
        if r["keep"]:
            w = w * (r["keep_factor"] * array(r, "keep", batch, heads, rows, keys)).to(dtype)
        loss = (array(r, "do", batch, heads, rows, dv).to(dtype) * (w @ v)).sum()
        if r["dlse"]:
            lse = torch.logsumexp(s, -1, keepdim=True).masked_fill(blind, 0)
            loss = loss + (array(r, "dlse", batch, heads, rows, 1).to(dtype) * lse).sum()
    names = [name if name in leaves else None for name in ("q", "k", "v", "bias", "relative", "alibi", "sinks")]
    used = [leaves[name] for name in names if name]
    found = iter(torch.autograd.grad(loss, used))
    return [encode(next(found)) if name else None for name in names]


def stored(tensors):
    """Returns a .safetensors file of float32 tensors."""
    header, data = {}, b""
    for name, t in tensors.items():
        raw = t.detach().numpy().astype("<f4").tobytes()
        header[name] = {"dtype": "F32", "shape": list(t.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    return base64.b64encode(struct.pack("<Q", len(text)) + text + data).decode()


def mha(r):
    batch, heads, rows, keys, model, memory = r["dims"]
    torch.manual_seed(r["seed"])
    layer = torch.nn.MultiheadAttention(model, heads, bias=r["layer_bias"], batch_first=True, kdim=memory, vdim=memory, add_zero_attn=r["zero"])
    for name, p in layer.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(p)
    file = stored(layer.state_dict())
    layer = layer.double().train(not r["eval"])
    x = array(r, "q", batch, rows, model)
    z = array(r, "k", batch, keys, memory) if r["k"] else x
    padding = array(r, "padding", batch, keys) != 0 if r["padding"] else None
    mask = None
    if r["mask"]:
        mask = array(r, "mask", *r["mask_shape"])
        mask = torch.zeros_like(mask).masked_fill(mask != 0, -math.inf) if r["float_mask"] else mask != 0
    call = lambda: layer(x, z, z, key_padding_mask=padding, attn_mask=mask, need_weights=r["need_weights"], average_attn_weights=r["average"])
    failed = ""
    try:
        y, w = call()
    except (RuntimeError, TypeError) as err:  # of the code path of evaluation
        if layer.training:
            raise
        failed = str(err).split("\n")[0]
        layer.train()
        y, w = call()
    if w is not None and r["zero"]:
        w = w[..., :keys]
    return {"o": encode(y), "weights": encode(w), "file": file, "failed": failed}


warnings.simplefilter("ignore")
torch.set_num_threads(1)
print(torch.__version__, flush=True)
with torch.no_grad():
    for line in sys.stdin:
        r = json.loads(line)
        print(json.dumps({"sdpa": sdpa, "mha": mha, "gradients": gradients}[r["op"]](r)), flush=True)
