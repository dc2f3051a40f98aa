"""Compares the files of this folder with huggingface/transformers. See README.md.

python3 check_with_transformers.py [FAMILY ...] needs torch and transformers 5. It makes the model of a FAMILY.json with small MLPs and runs it in
float64. Each module of attention gets the weights and the input of FAMILY.safetensors; masks, positions, frequencies and shared keys are the
model's. It prints the largest difference of an output from that of the file, relative to the largest number of the layer's output.
"""
import json, sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModel

FOLDER = Path(__file__).parent
FILES = {p.stem: load_file(p) for p in sorted(FOLDER.glob("*.safetensors"))}
SMALL = dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "intermediate_size", "intermediate_size_mlp", "moe_intermediate_size",
                       "shared_expert_intermediate_size", "n_routed_experts", "hidden_size_per_layer_input", "laurel_rank"), 8)
SMALL |= {"num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 2, "pad_token_id": 0, "_attn_implementation": "eager", "_experts_implementation": "eager"}

# From here on numbers have 64 bits, also where modules ask for 32.
torch.float = torch.float32 = torch.float64
torch.Tensor.float = torch.Tensor.double
torch.set_default_dtype(torch.float64)


def largest_difference(family):
    c = json.loads((FOLDER / (family + ".json")).read_text())
    model = AutoModel.from_config(CONFIG_MAPPING[c["model_type"]].from_dict(SMALL | c)).double().eval()
    stored = {name: t.double() for name, t in FILES[family].items()}
    tokens, differences = len(stored["input.0"]), []
    positions = torch.arange(tokens)[None]
    if "positions.0" in stored:  # after those of the mask
        positions = torch.cat([positions, stored["positions.0"]]).long()[:, None]
    for i, layer in enumerate(model.layers):
        name = "linear_attn" if hasattr(layer, "linear_attn") else "self_attn"
        module, prefix = getattr(layer, name), f"model.layers.{i}.{name}."
        weights = {name[len(prefix):]: t for name, t in stored.items() if name.startswith(prefix)}
        if family == "gemma3n":  # whose files have weights of shared keys, which no layer uses
            weights = {name: t for name, t in weights.items() if name in module.state_dict()}
        module.load_state_dict(weights)

        def give(module, args, kwargs, i=i):
            x = {"hidden_states": stored[f"input.{i}"][None]}
            if family == "olmo3" and c["layer_types"][i] == "sliding_attention":  # see README.md
                x["position_embeddings"] = type(model.rotary_emb)(type(model.config).from_dict(c | {"rope_scaling": None}))(x["hidden_states"], positions)
            return args, kwargs | x

        def take(module, args, output, i=i):
            got, want = output if torch.is_tensor(output) else output[0], stored[f"output.{i}"]
            differences.append(((got[0] - want).abs().max() / want.abs().max()).item())

        module.register_forward_pre_hook(give, with_kwargs=True)
        module.register_forward_hook(take)
    with torch.no_grad():
        model(input_ids=torch.ones(1, tokens, dtype=torch.long), position_ids=positions)
    assert len(differences) == c["num_hidden_layers"]
    return max(differences)


for family in sys.argv[1:] or FILES:
    if not family.startswith("kimi"):  # whose module transformers does not have
        print(f"{family:16}{largest_difference(family):.1e}", flush=True)
