"""Writes the files of this folder: a small attention layer of each family of models, with its
input and its output. See README.md.

Each function of a family follows the family's module in huggingface/transformers,
src/transformers/models/FAMILY/modeling_FAMILY.py, in float64, which is Python's own.
"""
import json, math, random, struct
from pathlib import Path

TOKENS = 11


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


def halves(x, frequencies, factor=1):
    """rotate_half: pairs are (i, i + n/2) of the first n elements."""
    turned = []
    for position, token in enumerate(x):
        cos = [math.cos(position * f) * factor for f in frequencies]
        sin = [math.sin(position * f) * factor for f in frequencies]
        n = len(frequencies)
        turned.append([[a * c - b * s for a, b, c, s in zip(h[:n], h[n:], cos, sin)] +
                       [b * c + a * s for a, b, c, s in zip(h[:n], h[n:], cos, sin)] + h[2 * n:] for h in token])
    return turned


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


def attend(q, k, v, scale, sees, sinks=None):
    """Softmax attention in which row i of head h sees the keys j with sees(i, j)."""
    groups, out = len(q[0]) // len(k[0]), []
    for i, token in enumerate(q):
        row = []
        for h, head in enumerate(token):
            keys = [j for j in range(len(k)) if sees(i, j)]
            logits = [scale * sum(a * b for a, b in zip(head, k[j][h // groups])) for j in keys]
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


def qwen3(x, t, c, kind):
    d, eps = c["head_dim"], c["rms_norm_eps"]
    q = each(weighted(t["q_norm.weight"], eps), split(linear(x, t["q_proj.weight"]), d))
    k = each(weighted(t["k_norm.weight"], eps), split(linear(x, t["k_proj.weight"]), d))
    v = split(linear(x, t["v_proj.weight"]), d)
    f = plain_frequencies(c["rope_theta"], d)
    o = attend(halves(q, f), halves(k, f), v, d ** -0.5, causal)
    return linear(o, t["o_proj.weight"])


def qwen3_next(x, t, c, kind):
    d, eps = c["head_dim"], c["rms_norm_eps"]
    both = split(linear(x, t["q_proj.weight"]), 2 * d)
    q, gate = each(lambda h: h[:d], both), join(each(lambda h: h[d:], both))
    q = each(weighted_from_one(t["q_norm.weight"], eps), q)
    k = each(weighted_from_one(t["k_norm.weight"], eps), split(linear(x, t["k_proj.weight"]), d))
    v = split(linear(x, t["v_proj.weight"]), d)
    f = plain_frequencies(c["rope_theta"], int(d * c["partial_rotary_factor"]))
    o = attend(halves(q, f), halves(k, f), v, d ** -0.5, causal)
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
    f = plain_frequencies(c["rope_theta"], d)
    o = attend(halves(split(q, d), f), halves(split(k, d), f), v, d ** -0.5, causal)
    return linear(o, t["o_proj.weight"])


def llama4(x, t, c, kind):
    d, eps = c["head_dim"], c["rms_norm_eps"]
    f = plain_frequencies(c["rope_theta"], d)
    q = each(lambda h: rms(h, eps), neighbours(split(linear(x, t["q_proj.weight"]), d), f))
    k = each(lambda h: rms(h, eps), neighbours(split(linear(x, t["k_proj.weight"]), d), f))
    v = split(linear(x, t["v_proj.weight"]), d)
    chunk = c["attention_chunk_size"]
    o = attend(q, k, v, d ** -0.5, lambda i, j: j <= i and i // chunk == j // chunk)
    return linear(o, t["o_proj.weight"])


def gpt_oss(x, t, c, kind):
    d, s = c["head_dim"], c["rope_scaling"]
    f = yarn(c["rope_theta"], d, s)
    far = 0.1 * math.log(s["factor"]) + 1
    q, k, v = (split(linear(x, t[p + ".weight"], t[p + ".bias"]), d) for p in ("q_proj", "k_proj", "v_proj"))
    o = attend(halves(q, f, far), halves(k, f, far), v, d ** -0.5, sliding(c["sliding_window"]), t["sinks"])
    return linear(o, t["o_proj.weight"], t["o_proj.bias"])


def gemma4(x, t, c, kind):
    full, eps = kind == "full_attention", c["rms_norm_eps"]
    d = c["global_head_dim"] if full else c["head_dim"]
    q = each(weighted(t["q_norm.weight"], eps), split(linear(x, t["q_proj.weight"]), d))
    k = split(linear(x, t["k_proj.weight"]), d)
    v = k if full and c["attention_k_eq_v"] else split(linear(x, t["v_proj.weight"]), d)
    k = each(weighted(t["k_norm.weight"], eps), k)
    v = each(lambda h: rms(h, eps), v)
    rope, sees = c["rope_parameters"][kind], causal if full else sliding(c["sliding_window"])
    f = plain_frequencies(rope["rope_theta"], d)
    if full:  # proportional: the others have the frequency 0
        f = [a if i < int(rope["partial_rotary_factor"] * d // 2) else 0 for i, a in enumerate(f)]
    return linear(attend(halves(q, f), halves(k, f), v, 1, sees), t["o_proj.weight"])


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
    q = [[h[:n] + p for h, p in zip(*token)] for token in zip(q, at_q)]
    k = [[h[:n] + p[0] for h in token] for token, p in zip(kv, at_k)]
    return linear(attend(q, k, each(lambda h: h[n:], kv), scale, causal), t["o_proj.weight"])


def config(family, kinds, **more):
    return {"model_type": family, "num_hidden_layers": len(kinds), "layer_types": kinds, "num_attention_heads": 4, "num_key_value_heads": 2,
            "rms_norm_eps": 1e-6, "max_position_embeddings": 4096, "attention_bias": False} | more


FULL, SLIDING, CHUNKED, LINEAR = "full_attention", "sliding_attention", "chunked_attention", "linear_attention"
MODELS = {
    "qwen3": (qwen3, config("qwen3", [FULL], hidden_size=40, head_dim=16, rope_theta=1e6)),
    "qwen3_next": (qwen3_next, config("qwen3_next", [LINEAR, FULL], hidden_size=40, head_dim=16, rope_theta=1e7, partial_rotary_factor=0.25)),
    "gemma3": (gemma3, config("gemma3_text", [SLIDING, FULL], hidden_size=36, head_dim=8, rope_theta=1e6, rope_local_base_freq=1e4,
                              query_pre_attn_scalar=24, sliding_window=4, rope_scaling={"rope_type": "linear", "factor": 8.0})),
    "olmo2": (olmo2, config("olmo2", [FULL], hidden_size=32, rope_theta=5e5)),
    "llama4": (llama4, config("llama4_text", [CHUNKED], hidden_size=40, head_dim=8, rope_theta=5e5, rms_norm_eps=1e-5, use_qk_norm=True,
                              no_rope_layers=[1], attention_chunk_size=8)),
    "gpt_oss": (gpt_oss, config("gpt_oss", [SLIDING], hidden_size=40, head_dim=16, rope_theta=150000.0, rms_norm_eps=1e-5, attention_bias=True,
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
}


def tensors(family, c, kind, rng):
    """Random weights of a layer. Types of 16 bits represent all numbers exactly."""
    m, h, kv, d = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"], c.get("head_dim", c["hidden_size"] // c["num_attention_heads"])
    keys_are_values = family == "gemma4" and kind == FULL
    if keys_are_values:
        kv, d = c["num_global_key_value_heads"], c["global_head_dim"]

    def normal(*shape):
        return [normal(*shape[1:]) for _ in range(shape[0])] if shape else rng.randint(-127, 127) / 256

    def ones(n):
        return [1 + rng.randint(-64, 63) / 128 for _ in range(n)]

    if "kv_lora_rank" in c:
        n, r, dv, rank, queries = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"], c["kv_lora_rank"], c["q_lora_rank"]
        t = {"kv_a_proj_with_mqa.weight": normal(rank + r, m), "kv_a_layernorm.weight": ones(rank), "kv_b_proj.weight": normal(h * (n + dv), rank), "o_proj.weight": normal(m, h * dv)}
        if queries:
            return t | {"q_a_proj.weight": normal(queries, m), "q_a_layernorm.weight": ones(queries), "q_b_proj.weight": normal(h * (n + r), queries)}
        return t | {"q_proj.weight": normal(h * (n + r), m)}
    t = {"q_proj.weight": normal(h * d * (2 if family == "qwen3_next" else 1), m), "k_proj.weight": normal(kv * d, m), "o_proj.weight": normal(m, h * d)}
    if not keys_are_values:
        t["v_proj.weight"] = normal(kv * d, m)
    if c["attention_bias"]:
        t |= {p.replace("weight", "bias"): normal(len(w)) for p, w in t.items()}
    if family == "gpt_oss":
        t["sinks"] = [4 * a for a in normal(h)]
    elif family != "llama4":
        lengths = (h * d, kv * d) if family == "olmo2" else (d, d)
        factor = normal if family in ("qwen3_next", "gemma3") else ones
        t |= {p + "_norm.weight": factor(n) for p, n in zip("qk", lengths)}
    return t


def write(path, stored):
    """A .safetensors file of (type, numbers)."""
    header, data = {}, b""
    for name, (kind, x) in stored.items():
        shape, flat = [len(x)], x
        if isinstance(x[0], list):
            shape, flat = [len(x), len(x[0])], sum(x, [])
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
        if kind == LINEAR:
            continue
        t = tensors(family, c, kind, rng)
        x = [[rng.randint(-1024, 1024) / 512 for _ in range(c["hidden_size"])] for _ in range(TOKENS)]
        stored |= {f"model.layers.{i}.self_attn.{name}": ("F32" if family == "olmo2" else "BF16", w) for name, w in t.items()}
        stored |= {f"input.{i}": ("F32", x), f"output.{i}": ("F32", layer(x, t, c, kind))}
    write(folder / (family + ".safetensors"), stored)
    (folder / (family + ".json")).write_text(json.dumps(c, indent=1) + "\n")
