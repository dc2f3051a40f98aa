"""Writes the files of this folder: a small attention layer of each family of models, with its
input and its output. See README.md.

Each function of a family follows the family's module in huggingface/transformers,
src/transformers/models/FAMILY/modeling_FAMILY.py, in float64, which is Python's own.
Kimi Linear's is modeling_kimi.py of moonshotai/Kimi-Linear-48B-A3B-Instruct.
"""
import json, math, random, struct
from pathlib import Path

TOKENS = 11
POSITIONS = [[0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7], [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7], [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7]]  # of an image of 2 by 3 between texts


def linear(x, w, b=None):
    """x·wᵀ + b, as torch.nn.Linear."""
    return [[sum(a * c for a, c in zip(row, out)) + (b[i] if b else 0) for i, out in enumerate(w)] for row in x]


def split(x, d):
    """[tokens][heads·d] as [tokens][heads][d]."""
    return [[row[i:i + d] for i in range(0, len(row), d)] for row in x]


def each(f, x):
    """f of each head of each token."""
    return [[f(head) for head in token] for token in x]


def join(x):
    return [sum(token, []) for token in x]


def rms(x, eps):
    return [a / math.sqrt(sum(b * b for b in x) / len(x) + eps) for a in x]


def weighted(w, eps):
    return lambda x: [a * b for a, b in zip(rms(x, eps), w)]


def weighted_from_one(w, eps):
    return lambda x: [a * (1 + b) for a, b in zip(rms(x, eps), w)]


def plain_frequencies(base, dim):
    return [base ** (-2 * i / dim) for i in range(dim // 2)]


def halves(x, frequencies, factor=1, axes=None):
    """rotate_half: pairs are (i, i + n/2) of the first n elements. Pair i turns with the position on axes[i], if any."""
    turned = []
    for token, place in zip(x, zip(*POSITIONS) if axes else enumerate(range(len(x)))):
        at = [place[axis] for axis in axes or [0] * len(frequencies)]
        cos = [math.cos(position * f) * factor for position, f in zip(at, frequencies)]
        sin = [math.sin(position * f) * factor for position, f in zip(at, frequencies)]
        n = len(frequencies)
        turned.append([[a * c - b * s for a, b, c, s in zip(h[:n], h[n:], cos, sin)] +
                       [b * c + a * s for a, b, c, s in zip(h[:n], h[n:], cos, sin)] + h[2 * n:] for h in token])
    return turned


def axes_of(rope):
    """apply_interleaved_mrope: the axis of each pair, if the config has sections. Those of Qwen2-VL follow each other."""
    sections = (rope or {}).get("mrope_section")
    if sections and not rope.get("mrope_interleaved"):
        return sum(([axis] * n for axis, n in enumerate(sections)), [])
    return sections and [i % 3 if i % 3 and i < 3 * sections[i % 3] else 0 for i in range(sum(sections))]


def neighbours(x, frequencies, factor=1):
    """Pairs (2i, 2i + 1) are complex numbers."""
    out = []
    for position, token in enumerate(x):
        turns = [complex(math.cos(position * f) * factor, math.sin(position * f) * factor) for f in frequencies]
        out.append([sum(([z.real, z.imag] for z in (complex(*h[2 * i:2 * i + 2]) * a for i, a in enumerate(turns))), []) for h in token])
    return out


def yarn(base, d, s):
    """Frequencies of pairs."""
    low, high = (d * math.log(s["original_max_position_embeddings"] / (turns * 2 * math.pi)) / (2 * math.log(base)) for turns in (s["beta_fast"], s["beta_slow"]))
    if s.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d - 1)
    f = []
    for i, a in enumerate(plain_frequencies(base, d)):
        ramp = min(max((i - low) / (high - low), 0), 1)
        f.append(a / s["factor"] * ramp + a * (1 - ramp))
    return f


def attend(q, k, v, scale, sees, sinks=None, softcap=None):
    """Softmax attention in which row i of head h sees the keys j with sees(i, j)."""
    groups, out = len(q[0]) // len(k[0]), []
    for i, token in enumerate(q):
        row = []
        for h, head in enumerate(token):
            keys = [j for j in range(len(k)) if sees(i, j)]
            logits = [scale * sum(a * b for a, b in zip(head, k[j][h // groups])) for j in keys]
            logits = [softcap * math.tanh(s / softcap) for s in logits] if softcap else logits
            logits += [sinks[h]] if sinks else []
            top = max(logits)
            p = [math.exp(s - top) for s in logits]
            row.append([sum(w * v[j][h // groups][e] for w, j in zip(p, keys)) / sum(p) for e in range(len(v[0][0]))])
        out.append(row)
    return join(out)


def causal(i, j):
    return j <= i


def sliding(window):
    return lambda i, j: i - window < j <= i


def sigmoid(a):
    return 1 / (1 + math.exp(-a))


def silu(a):
    return a * sigmoid(a)


def softplus(a):
    return math.log1p(math.exp(a))


def convolved(x, w):
    """SiLU of torch.nn.Conv1d with groups = channels, over the tokens up to each one."""
    width, tokens = len(w[0][0]), []
    for i in range(len(x)):
        taps = [(j, i - width + 1 + j) for j in range(width) if i - width + 1 + j >= 0]
        tokens.append([silu(sum(channel[0][j] * x[at][n] for j, at in taps)) for n, channel in enumerate(w)])
    return tokens


def unit(x):
    """l2norm"""
    return [a / math.sqrt(sum(b * b for b in x) + 1e-6) for a in x]


def delta(q, k, v, g, beta):
    """The gated delta rule, token after token. q, k [tokens][key heads][K], v [tokens][heads][V], g [tokens][heads][K]."""
    heads, keys, values, out = len(v[0]), len(k[0][0]), len(v[0][0]), []
    states = [[[0] * values for _ in range(keys)] for _ in range(heads)]
    for i in range(len(v)):
        row = []
        for h, state in enumerate(states):
            query, key = (unit(a[i][h * len(k[0]) // heads]) for a in (q, k))
            state = [[a * math.exp(d) for a in line] for line, d in zip(state, g[i][h])]
            held = [sum(a * line[e] for a, line in zip(key, state)) for e in range(values)]
            new = [beta[i][h] * (a - b) for a, b in zip(v[i][h], held)]
            states[h] = state = [[a + b * n for a, n in zip(line, new)] for line, b in zip(state, key)]
            row.append([sum(a * line[e] for a, line in zip(query, state)) * keys ** -0.5 for e in range(values)])
        out.append(row)
    return out


def gated(o, w, gate, f, eps):
    """RMSNormGated"""
    return join([[[a * f(b) for a, b in zip(weighted(w, eps)(h), g)] for h, g in zip(*token)] for token in zip(o, gate)])


def delta_net(x, t, c):
    """GatedDeltaNet of Qwen3-Next and Qwen3.5."""
    hk, hv, dk, dv = c["linear_num_key_heads"], c["linear_num_value_heads"], c["linear_key_head_dim"], c["linear_value_head_dim"]
    n = hv // hk  # fix_query_key_value_ordering
    if "in_proj_qkvz.weight" in t:
        heads = split(linear(x, t["in_proj_qkvz.weight"]), 2 * dk + 2 * n * dv)
        parts = [(0, dk), (dk, 2 * dk), (2 * dk, 2 * dk + n * dv)]
        qkv = [sum((sum((h[lo:hi] for h in token), []) for lo, hi in parts), []) for token in heads]
        z = join(each(lambda h: h[2 * dk + n * dv:], heads))
        ba = split(linear(x, t["in_proj_ba.weight"]), 2 * n)
        b, a = join(each(lambda h: h[:n], ba)), join(each(lambda h: h[n:], ba))
    else:
        qkv, z, b, a = (linear(x, t["in_proj_" + p + ".weight"]) for p in ("qkv", "z", "b", "a"))
    qkv = convolved(qkv, t["conv1d.weight"])
    q, k, v = split([r[:hk * dk] for r in qkv], dk), split([r[hk * dk:2 * hk * dk] for r in qkv], dk), split([r[2 * hk * dk:] for r in qkv], dv)
    g = [[[-math.exp(log) * softplus(u + bias)] * dk for u, log, bias in zip(row, t["A_log"], t["dt_bias"])] for row in a]
    o = delta(q, k, v, g, each(sigmoid, b))
    return linear(gated(o, t["norm.weight"], split(z, dv), silu, c["rms_norm_eps"]), t["out_proj.weight"])


def kimi_delta(x, t, c):
    """KimiDeltaAttention, with the gate function of fla's ops/kda/gate.py."""
    d, low = c["linear_attn_config"]["head_dim"], c["linear_attn_config"].get("gate_lower_bound")
    q, k, v = (split(convolved(linear(x, t[p + "_proj.weight"]), t[p + "_conv1d.weight"]), d) for p in "qkv")
    f, z = (split(linear(linear(x, t[p + "_a_proj.weight"]), t[p + "_b_proj.weight"]), d) for p in "fg")
    bias, logs = split([t["dt_bias"]], d)[0], [h[0] for h in t["A_log"][0][0]]
    if low:
        g = [[[low * sigmoid(math.exp(log) * (a + b)) for a, b in zip(h, bs)] for h, log, bs in zip(token, logs, bias)] for token in f]
    else:
        g = [[[-math.exp(log) * softplus(a + b) for a, b in zip(h, bs)] for h, log, bs in zip(token, logs, bias)] for token in f]
    o = delta(q, k, v, g, each(sigmoid, linear(x, t["b_proj.weight"])))
    return linear(gated(o, t["o_norm.weight"], z, sigmoid, c["rms_norm_eps"]), t["o_proj.weight"])


def qwen3(x, t, c, kind):
    d, eps = c["head_dim"], c["rms_norm_eps"]
    q = each(weighted(t["q_norm.weight"], eps), split(linear(x, t["q_proj.weight"]), d))
    k = each(weighted(t["k_norm.weight"], eps), split(linear(x, t["k_proj.weight"]), d))
    v = split(linear(x, t["v_proj.weight"]), d)
    f, axes = plain_frequencies(c["rope_theta"], d), axes_of(c.get("rope_scaling"))
    o = attend(halves(q, f, axes=axes), halves(k, f, axes=axes), v, d ** -0.5, causal)
    return linear(o, t["o_proj.weight"])


def llama(x, t, c, kind):
    """LlamaAttention and those that follow it, with the windows of Mistral."""
    d = c.get("head_dim", c["hidden_size"] // c["num_attention_heads"])
    q, k, v = (split(linear(x, t[p + "_proj.weight"], t.get(p + "_proj.bias")), d) for p in "qkv")
    f, s, sees = plain_frequencies(c["rope_theta"], d), c.get("rope_scaling") or {}, sliding(c["sliding_window"]) if c["sliding_window"] else causal
    if s.get("rope_type") == "llama3":  # the part u of each frequency stays
        turns = [a * s["original_max_position_embeddings"] / (2 * math.pi) for a in f]
        u = [min(max((a - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"]), 0), 1) for a in turns]
        f = [b * a + (1 - b) * a / s["factor"] for a, b in zip(f, u)]
    return linear(attend(halves(q, f, axes=axes_of(s)), halves(k, f, axes=axes_of(s)), v, d ** -0.5, sees), t["o_proj.weight"])


def smollm3(x, t, c, kind):
    """Layers without RoPE have the window."""
    d = c["hidden_size"] // c["num_attention_heads"]
    q, k, v = (split(linear(x, t[p + "_proj.weight"]), d) for p in "qkv")
    if kind == FULL:
        q, k = (halves(a, plain_frequencies(c["rope_theta"], d)) for a in (q, k))
    return linear(attend(q, k, v, d ** -0.5, causal if kind == FULL else sliding(c["sliding_window"])), t["o_proj.weight"])


def phi3(x, t, c, kind):
    """All tokens are more than original_max_position_embeddings, so long_factor it is."""
    h, kv, d, s = c["num_attention_heads"], c["num_key_value_heads"], c["hidden_size"] // c["num_attention_heads"], c["rope_scaling"]
    heads = split(linear(x, t["qkv_proj.weight"]), d)
    q, k, v = ([token[lo:hi] for token in heads] for lo, hi in ((0, h), (h, h + kv), (h + kv, h + 2 * kv)))
    f = [a / b for a, b in zip(plain_frequencies(c["rope_theta"], int(d * c["partial_rotary_factor"])), s["long_factor"])]
    length = c["original_max_position_embeddings"]
    factor = math.sqrt(1 + math.log(c["max_position_embeddings"] / length) / math.log(length))
    return linear(attend(halves(q, f, factor), halves(k, f, factor), v, d ** -0.5, sliding(c["sliding_window"])), t["o_proj.weight"])


def gemma2(x, t, c, kind):
    q, k, v = (split(linear(x, t[p + "_proj.weight"]), c["head_dim"]) for p in "qkv")
    f, sees = plain_frequencies(c["rope_theta"], c["head_dim"]), causal if kind == FULL else sliding(c["sliding_window"])
    o = attend(halves(q, f), halves(k, f), v, c["query_pre_attn_scalar"] ** -0.5, sees, softcap=c["attn_logit_softcapping"])
    return linear(o, t["o_proj.weight"])


def layer_norm(x, w, eps):
    """CohereLayerNorm"""
    mean = sum(x) / len(x)
    r = 1 / math.sqrt(sum((a - mean) ** 2 for a in x) / len(x) + eps)
    return [(a - mean) * r * b for a, b in zip(x, w)]


def cohere(x, t, c, kind):
    d = c["hidden_size"] // c["num_attention_heads"]
    q, k, v = (split(linear(x, t[p + "_proj.weight"], t.get(p + "_proj.bias")), d) for p in "qkv")
    if c.get("use_qk_norm"):
        q, k = ([[layer_norm(h, w, c["layer_norm_eps"]) for h, w in zip(token, t[p + "_norm.weight"])] for token in a] for p, a in (("q", q), ("k", k)))
    if c["model_type"] == "cohere" or kind == SLIDING:
        q, k = (neighbours(a, plain_frequencies(c["rope_theta"], d)) for a in (q, k))
    o = attend(q, k, v, d ** -0.5, sliding(c["sliding_window"]) if kind == SLIDING else causal)
    return linear(o, t["o_proj.weight"], t.get("o_proj.bias"))


def qwen3_next(x, t, c, kind):
    if kind == LINEAR:
        return delta_net(x, t, c)
    d, eps = c["head_dim"], c["rms_norm_eps"]
    both = split(linear(x, t["q_proj.weight"]), 2 * d)
    q, gate = each(lambda h: h[:d], both), join(each(lambda h: h[d:], both))
    q = each(weighted_from_one(t["q_norm.weight"], eps), q)
    k = each(weighted_from_one(t["k_norm.weight"], eps), split(linear(x, t["k_proj.weight"]), d))
    v = split(linear(x, t["v_proj.weight"]), d)
    f, axes = plain_frequencies(c["rope_theta"], int(d * c["partial_rotary_factor"])), axes_of(c.get("rope_parameters"))
    o = attend(halves(q, f, axes=axes), halves(k, f, axes=axes), v, d ** -0.5, causal)
    o = [[a / (1 + math.exp(-g)) for a, g in zip(row, gates)] for row, gates in zip(o, gate)]
    return linear(o, t["o_proj.weight"])


def gemma3(x, t, c, kind):
    d, eps = c["head_dim"], c["rms_norm_eps"]
    q = each(weighted_from_one(t["q_norm.weight"], eps), split(linear(x, t["q_proj.weight"]), d))
    k = each(weighted_from_one(t["k_norm.weight"], eps), split(linear(x, t["k_proj.weight"]), d))
    v = split(linear(x, t["v_proj.weight"]), d)
    if kind == "sliding_attention":
        f, sees = plain_frequencies(c["rope_local_base_freq"], d), sliding(c["sliding_window"])
    else:
        f, sees = [a / c["rope_scaling"]["factor"] for a in plain_frequencies(c["rope_theta"], d)], causal
    o = attend(halves(q, f), halves(k, f), v, c["query_pre_attn_scalar"] ** -0.5, sees)
    return linear(o, t["o_proj.weight"])


def olmo2(x, t, c, kind):
    d, eps = c["hidden_size"] // c["num_attention_heads"], c["rms_norm_eps"]
    q = [weighted(t["q_norm.weight"], eps)(row) for row in linear(x, t["q_proj.weight"])]
    k = [weighted(t["k_norm.weight"], eps)(row) for row in linear(x, t["k_proj.weight"])]
    v = split(linear(x, t["v_proj.weight"]), d)
    f, factor, sees = plain_frequencies(c["rope_theta"], d), 1, causal if kind == FULL else sliding(c["sliding_window"])
    if kind == FULL and "rope_scaling" in c:  # of OLMo 3, whose layers with windows are not scaled
        f, factor = yarn(c["rope_theta"], d, c["rope_scaling"]), c["rope_scaling"]["attention_factor"]
    o = attend(halves(split(q, d), f, factor), halves(split(k, d), f, factor), v, d ** -0.5, sees)
    return linear(o, t["o_proj.weight"])


def llama4(x, t, c, kind):
    d, eps = c["head_dim"], c["rms_norm_eps"]
    f = plain_frequencies(c["rope_theta"], d)
    q, k, v = (split(linear(x, t[p + "_proj.weight"]), d) for p in "qkv")
    chunk = c["attention_chunk_size"]
    if kind == CHUNKED:  # those with RoPE, by no_rope_layers
        q, k = (each(lambda h: rms(h, eps), neighbours(a, f)) for a in (q, k))
        sees = lambda i, j: j <= i and i // chunk == j // chunk
    else:
        q, sees = [[[a * (1 + c["attn_scale"] * math.log1p(math.floor((i + 1.0) / c["floor_scale"]))) for a in h] for h in token] for i, token in enumerate(q)], causal
    return linear(attend(q, k, v, d ** -0.5, sees), t["o_proj.weight"])


def gpt_oss(x, t, c, kind):
    d, s = c["head_dim"], c["rope_scaling"]
    f = yarn(c["rope_theta"], d, s)
    far = 0.1 * math.log(s["factor"]) + 1
    q, k, v = (split(linear(x, t[p + ".weight"], t[p + ".bias"]), d) for p in ("q_proj", "k_proj", "v_proj"))
    o = attend(halves(q, f, far), halves(k, f, far), v, d ** -0.5, causal if kind == FULL else sliding(c["sliding_window"]), t["sinks"])
    return linear(o, t["o_proj.weight"], t["o_proj.bias"])


KEYS = {}  # of each kind, the rotated keys and the values of the last layer that has its own


def gemma4(x, t, c, kind):
    full, eps = kind == "full_attention", c["rms_norm_eps"]
    d = c["global_head_dim"] if full else c["head_dim"]
    rope, sees = c["rope_parameters"][kind], causal if full else sliding(c["sliding_window"])
    f = plain_frequencies(rope["rope_theta"], d)
    if full:  # proportional: the others have the frequency 0
        f = [a if i < int(rope["partial_rotary_factor"] * d // 2) else 0 for i, a in enumerate(f)]
    q = each(weighted(t["q_norm.weight"], eps), split(linear(x, t["q_proj.weight"]), d))
    if "k_proj.weight" in t:
        k = split(linear(x, t["k_proj.weight"]), d)
        v = k if full and c["attention_k_eq_v"] else split(linear(x, t["v_proj.weight"]), d)
        KEYS[kind] = halves(each(weighted(t["k_norm.weight"], eps), k), f), each(lambda h: rms(h, eps), v)
    return linear(attend(halves(q, f), *KEYS[kind], 1, sees), t["o_proj.weight"])


def gemma3n(x, t, c, kind):
    d, eps, full = c["head_dim"], c["rms_norm_eps"], kind == FULL
    f, sees = plain_frequencies(c["rope_theta" if full else "rope_local_base_freq"], d), causal if full else sliding(c["sliding_window"])
    q = each(weighted(t["q_norm.weight"], eps), split(linear(x, t["q_proj.weight"]), d))
    if "k_proj.weight" in t:
        k, v = (split(linear(x, t[p + "_proj.weight"]), d) for p in "kv")
        KEYS[kind] = halves(each(weighted(t["k_norm.weight"], eps), k), f), each(lambda h: rms(h, eps), v)
    return linear(attend(halves(q, f), *KEYS[kind], 1, sees), t["o_proj.weight"])


def deepseek(x, t, c, kind):
    n, r, dv, rank, s = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"], c["kv_lora_rank"], c["rope_scaling"]
    f, factor, scale = plain_frequencies(c["rope_theta"], r), 1, (n + r) ** -0.5
    if s:
        ms = [0.1 * s[m] * math.log(s["factor"]) + 1 for m in ("mscale", "mscale_all_dim")]
        f, factor, scale = yarn(c["rope_theta"], r, s), ms[0] / ms[1], scale * ms[1] ** 2
    u, name = x, "q_proj.weight"
    if c["q_lora_rank"]:
        u, name = [weighted(t["q_a_layernorm.weight"], 1e-6)(row) for row in linear(x, t["q_a_proj.weight"])], "q_b_proj.weight"
    q, both = split(linear(u, t[name]), n + r), linear(x, t["kv_a_proj_with_mqa.weight"])
    kv = split(linear([weighted(t["kv_a_layernorm.weight"], 1e-6)(row[:rank]) for row in both], t["kv_b_proj.weight"]), n + dv)
    at_q, at_k = neighbours(each(lambda h: h[n:], q), f, factor), neighbours([[row[rank:]] for row in both], f, factor)
    if c.get("mla_use_nope"):
        at_q, at_k = each(lambda h: h[n:], q), [[row[rank:]] for row in both]
    q = [[h[:n] + p for h, p in zip(*token)] for token in zip(q, at_q)]
    k = [[h[:n] + p[0] for h in token] for token, p in zip(kv, at_k)]
    return linear(attend(q, k, each(lambda h: h[n:], kv), scale, causal), t["o_proj.weight"])


def kimi_linear(x, t, c, kind):
    return kimi_delta(x, t, c) if kind == LINEAR else deepseek(x, t, c, kind)


def config(family, kinds, **more):
    return {"model_type": family, "num_hidden_layers": len(kinds), "layer_types": kinds, "num_attention_heads": 4, "num_key_value_heads": 2,
            "rms_norm_eps": 1e-6, "max_position_embeddings": 4096, "attention_bias": False} | more


def kimi(width, **more):
    c = config("kimi_linear", [LINEAR, FULL], hidden_size=40, q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10, num_key_value_heads=4,
               mla_use_nope=True, rope_theta=1e4, rope_scaling=None, rms_norm_eps=1e-5,
               linear_attn_config={"kda_layers": [1], "full_attn_layers": [2], "num_heads": 3, "head_dim": 8, "short_conv_kernel_size": width} | more)
    return c


NEXT = ("qwen3_next", "qwen3_5")
FULL, SLIDING, CHUNKED, LINEAR = "full_attention", "sliding_attention", "chunked_attention", "linear_attention"
MODELS = {
    "qwen3": (qwen3, config("qwen3", [FULL], hidden_size=40, head_dim=16, rope_theta=1e6)),
    "qwen3_next": (qwen3_next, config("qwen3_next", [LINEAR, FULL], hidden_size=40, head_dim=16, rope_theta=1e7, partial_rotary_factor=0.25, linear_num_key_heads=2,
                                      linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=6, linear_conv_kernel_dim=4)),
    "gemma3": (gemma3, config("gemma3_text", [SLIDING, FULL], hidden_size=36, head_dim=8, rope_theta=1e6, rope_local_base_freq=1e4,
                              query_pre_attn_scalar=24, sliding_window=4, rope_scaling={"rope_type": "linear", "factor": 8.0})),
    "olmo2": (olmo2, config("olmo2", [FULL], hidden_size=32, rope_theta=5e5)),
    "llama4": (llama4, config("llama4_text", [CHUNKED, FULL], hidden_size=40, head_dim=8, rope_theta=5e5, rms_norm_eps=1e-5, use_qk_norm=True,
                              no_rope_layers=[1, 0], attention_chunk_size=8, attn_temperature_tuning=True, attn_scale=0.5, floor_scale=3)),
    "gpt_oss": (gpt_oss, config("gpt_oss", [SLIDING, FULL], hidden_size=40, head_dim=16, rope_theta=150000.0, rms_norm_eps=1e-5, attention_bias=True,
                                sliding_window=5, rope_scaling={"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                                                                "truncate": False, "original_max_position_embeddings": 4096})),
    "gemma4": (gemma4, config("gemma4_text", [SLIDING, FULL], hidden_size=40, head_dim=8, global_head_dim=16, num_global_key_value_heads=1,
                              attention_k_eq_v=True, num_kv_shared_layers=0, sliding_window=4, rope_parameters={
                                  SLIDING: {"rope_type": "default", "rope_theta": 1e4},
                                  FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}})),
    "deepseek_v3": (deepseek, config("deepseek_v3", [FULL], hidden_size=40, rope_theta=1e4, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=12, qk_rope_head_dim=8,
                                     v_head_dim=10, num_key_value_heads=4, rope_scaling={"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
                                                                                         "mscale_all_dim": 0.5, "original_max_position_embeddings": 4096})),
    "deepseek_v2": (deepseek, config("deepseek_v2", [FULL], hidden_size=40, rope_theta=1e4, q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=12, qk_rope_head_dim=8,
                                     v_head_dim=10, num_key_value_heads=4, rope_scaling=None)),
    "qwen3_5": (qwen3_next, config("qwen3_5_text", [LINEAR, FULL], hidden_size=40, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=8,
                                   linear_value_head_dim=10, linear_conv_kernel_dim=3, partial_rotary_factor=0.5, rope_theta=1e7, rope_parameters={
                                       "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1], "mrope_interleaved": True})),
    "kimi_linear": (kimi_linear, kimi(4)),
    "kimi_bounded": (kimi_linear, kimi(2, gate_lower_bound=-5.0)),
    "qwen3_moe": (qwen3, config("qwen3_moe", [FULL], hidden_size=32, head_dim=16, rope_theta=1e6, max_window_layers=1, use_sliding_window=False, sliding_window=None)),
    "mixtral": (llama, config("mixtral", [SLIDING], hidden_size=32, rope_theta=1e6, sliding_window=4)),
    "qwen2_moe": (llama, config("qwen2_moe", [FULL], hidden_size=32, rope_theta=1e6, use_sliding_window=False, sliding_window=None, qkv_bias=True)),
    "olmoe": (olmo2, config("olmoe", [FULL], hidden_size=32, rope_theta=1e4, rms_norm_eps=1e-5, clip_qkv=None)),
    "gemma4_shared": (gemma4, config("gemma4_text", [SLIDING, FULL, SLIDING, FULL], hidden_size=32, head_dim=8, global_head_dim=16, num_global_key_value_heads=1,
                                     attention_k_eq_v=True, num_kv_shared_layers=2, sliding_window=4, rope_parameters={
                                         SLIDING: {"rope_type": "default", "rope_theta": 1e4},
                                         FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}})),
    "gemma3n": (gemma3n, config("gemma3n_text", [SLIDING, FULL, SLIDING, FULL, SLIDING], hidden_size=32, head_dim=8, num_kv_shared_layers=2, sliding_window=4,
                                rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling=None)),
    "cohere": (cohere, config("cohere", [FULL], hidden_size=32, rope_theta=8e6, layer_norm_eps=1e-5, use_qk_norm=False, attention_bias=True)),
    "cohere_norm": (cohere, config("cohere", [FULL], hidden_size=32, rope_theta=8e6, layer_norm_eps=1e-5, use_qk_norm=True, attention_bias=True)),
    "cohere2": (cohere, config("cohere2", [SLIDING, FULL], hidden_size=32, rope_theta=5e4, layer_norm_eps=1e-5, sliding_window=4)),
    "olmo3": (olmo2, config("olmo3", [SLIDING, FULL], hidden_size=32, rope_theta=5e5, sliding_window=4, max_position_embeddings=128, rope_scaling={
        "rope_type": "yarn", "factor": 8.0, "beta_fast": 32, "beta_slow": 1, "attention_factor": 1.25, "original_max_position_embeddings": 16})),
    "qwen3_vl": (qwen3, config("qwen3_vl_text", [FULL], hidden_size=32, head_dim=16, rope_theta=5e6,
                               rope_scaling={"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True})),
    "gemma2": (gemma2, config("gemma2", [SLIDING, FULL], hidden_size=32, head_dim=8, rope_theta=1e4, query_pre_attn_scalar=12, attn_logit_softcapping=3.0, sliding_window=4)),
    "smollm3": (smollm3, config("smollm3", [FULL, SLIDING], hidden_size=32, rope_theta=2e6, no_rope_layers=[1, 0], use_sliding_window=True, sliding_window=4)),
    "phi3": (phi3, config("phi3", [SLIDING], hidden_size=32, rope_theta=1e4, partial_rotary_factor=0.75, sliding_window=5, max_position_embeddings=32,
                          original_max_position_embeddings=8, rope_scaling={"type": "longrope", "short_factor": [1.0, 1.0, 1.0], "long_factor": [1.25, 2.5, 7.0]})),
    "llama": (llama, config("llama", [FULL], hidden_size=32, rope_theta=1e3, sliding_window=None, rope_scaling={
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64})),
    "qwen2_vl": (llama, config("qwen2_vl_text", [FULL], hidden_size=32, rope_theta=1e2, qkv_bias=True, use_sliding_window=False, sliding_window=None,
                               rope_scaling={"type": "mrope", "mrope_section": [1, 2, 1]})),
}


def tensors(family, c, kind, rng):
    """Random weights of a layer. Types of 16 bits represent all numbers exactly."""
    m, h, kv, d = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"], c.get("head_dim", c["hidden_size"] // c["num_attention_heads"])
    keys_are_values = c["model_type"] == "gemma4_text" and kind == FULL
    if keys_are_values:
        kv, d = c["num_global_key_value_heads"], c["global_head_dim"]

    def normal(*shape):
        return [normal(*shape[1:]) for _ in range(shape[0])] if shape else rng.randint(-127, 127) / 256

    def ones(n):
        return [1 + rng.randint(-64, 63) / 128 for _ in range(n)]

    if kind == LINEAR:
        return linear_tensors(family, c, normal, ones)
    if "kv_lora_rank" in c:
        n, r, dv, rank, queries = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"], c["kv_lora_rank"], c["q_lora_rank"]
        t = {"kv_a_proj_with_mqa.weight": normal(rank + r, m), "kv_a_layernorm.weight": ones(rank), "kv_b_proj.weight": normal(h * (n + dv), rank), "o_proj.weight": normal(m, h * dv)}
        if queries:
            return t | {"q_a_proj.weight": normal(queries, m), "q_a_layernorm.weight": ones(queries), "q_b_proj.weight": normal(h * (n + r), queries)}
        return t | {"q_proj.weight": normal(h * (n + r), m)}
    t = {"q_proj.weight": normal(h * d * (2 if family in NEXT else 1), m), "k_proj.weight": normal(kv * d, m), "o_proj.weight": normal(m, h * d)}
    if not keys_are_values:
        t["v_proj.weight"] = normal(kv * d, m)
    if c["attention_bias"] or c.get("qkv_bias"):
        t |= {p.replace("weight", "bias"): normal(len(w)) for p, w in t.items() if c["attention_bias"] or p[0] != "o"}
    if family == "gpt_oss":
        t["sinks"] = [4 * a for a in normal(h)]
    elif c["model_type"] == "cohere" and c["use_qk_norm"]:
        t |= {p + "_norm.weight": [ones(d) for _ in range(n)] for p, n in (("q", h), ("k", kv))}
    elif family == "phi3":
        return {"qkv_proj.weight": normal((h + 2 * kv) * d, m), "o_proj.weight": normal(m, h * d)}
    elif family not in ("llama4", "llama", "mixtral", "qwen2_moe", "qwen2_vl", "cohere", "cohere2", "gemma2", "smollm3"):
        lengths = (h * d, kv * d) if family in ("olmo2", "olmo3", "olmoe") else (d, d)
        factor = normal if family in (*NEXT, "gemma3") else ones
        t |= {p + "_norm.weight": factor(n) for p, n in zip("qk", lengths)}
    return t


def linear_tensors(family, c, normal, ones):
    def less(n):  # log rates and biases, small enough for states that last
        return [2 * a - 1 for a in normal(n)]

    def faint(rows, *spans):  # queries and keys whose lengths are near the epsilon of their norm
        return [[a / 1024 for a in row] if any(lo <= i < hi for lo, hi in spans) else row for i, row in enumerate(rows)]

    m = c["hidden_size"]
    if family not in NEXT:
        a = c["linear_attn_config"]
        h, d, w = a["num_heads"], a["head_dim"], a["short_conv_kernel_size"]
        t = {p + "_proj.weight": faint(normal(h * d, m), (0, 0 if p == "v" else d)) for p in "qkv"} | {p + "_conv1d.weight": normal(h * d, 1, w) for p in "qkv"} | {"b_proj.weight": normal(h, m)}
        for p in "fg":
            t |= {p + "_a_proj.weight": normal(d, m), p + "_b_proj.weight": normal(h * d, d)}
        return t | {"A_log": [[[[a] for a in less(h)]]], "dt_bias": less(h * d), "o_norm.weight": ones(d), "o_proj.weight": normal(m, h * d)}
    hk, hv, dk, dv = c["linear_num_key_heads"], c["linear_num_value_heads"], c["linear_key_head_dim"], c["linear_value_head_dim"]
    n = 2 * hk * dk + hv * dv
    if family == "qwen3_next":
        t = {"in_proj_qkvz.weight": faint(normal(n + hv * dv, m), (0, 2 * dk)), "in_proj_ba.weight": normal(2 * hv, m)}
    else:
        t = {"in_proj_qkv.weight": faint(normal(n, m), (0, dk), (hk * dk, (hk + 1) * dk)), "in_proj_z.weight": normal(hv * dv, m), "in_proj_b.weight": normal(hv, m), "in_proj_a.weight": normal(hv, m)}
    return t | {"conv1d.weight": normal(n, 1, c["linear_conv_kernel_dim"]), "A_log": less(hv), "dt_bias": less(hv), "norm.weight": ones(dv), "out_proj.weight": normal(m, hv * dv)}


def write(path, stored):
    """A .safetensors file of (type, numbers)."""
    header, data = {}, b""
    for name, (kind, x) in stored.items():
        shape, flat = [len(x)], x
        while isinstance(flat[0], list):
            shape, flat = shape + [len(flat[0])], sum(flat, [])
        raw = struct.pack(f"<{len(flat)}f", *flat)
        if kind == "BF16":
            raw = b"".join(raw[i + 2:i + 4] for i in range(0, len(raw), 4))
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


for number, (family, (layer, c)) in enumerate(MODELS.items()):
    rng, folder, stored = random.Random(number), Path(__file__).parent, {}
    for i, kind in enumerate(c["layer_types"]):
        t = tensors(family, c, kind, rng)
        used = t if i < len(c["layer_types"]) - c.get("num_kv_shared_layers", 0) else {name: w for name, w in t.items() if name[0] not in "kv"}
        t = t if family == "gemma3n" else used  # its files have the unused weights
        x = [[rng.randint(-1024, 1024) / 512 for _ in range(c["hidden_size"])] for _ in range(TOKENS)]
        module = "linear_attn" if kind == LINEAR and family in NEXT else "self_attn"
        stored |= {f"model.layers.{i}.{module}.{name}": ("F32" if family == "olmo2" or name == "A_log" else "BF16", w) for name, w in t.items()}
        stored |= {f"input.{i}": ("F32", x), f"output.{i}": ("F32", layer(x, used, c, kind))}
    if axes_of(c.get("rope_scaling") or c.get("rope_parameters")):
        stored["positions.0"] = "F32", POSITIONS
    write(folder / (family + ".safetensors"), stored)
    (folder / (family + ".json")).write_text(json.dumps(c, indent=1) + "\n")
