"""A Llama under GPTModel's names, packed row by row as mindformers 1.6 or 1.7 packs it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import yaml
from safetensors.numpy import save_file

from .test_megatron import LLAMA

NAMES = {
    "model.embed_tokens.weight": "embedding.word_embeddings.weight",
    "model.norm.weight": "decoder.final_layernorm.weight",
    "lm_head.weight": "output_layer.weight",
}
LAYER_NAMES = {
    "input_layernorm.weight": "input_layernorm.weight",
    "post_attention_layernorm.weight": "pre_mlp_layernorm.weight",
    "self_attn.o_proj.weight": "self_attention.linear_proj.weight",
    "mlp.down_proj.weight": "mlp.linear_fc2.weight",
}


def write(path: Path, hf: dict[str, np.ndarray], release: str) -> Path:
    """train.yaml and model.safetensors of `release`, from the tensors of a Hugging Face Llama."""
    path.mkdir()
    heads, groups, size = LLAMA["num_attention_heads"], LLAMA["num_key_value_heads"], LLAMA["head_dim"]
    made = {ours: hf[theirs] for theirs, ours in NAMES.items()}
    for layer in range(LLAMA["num_hidden_layers"]):
        at, to = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        made |= {to + ours: hf[at + theirs] for theirs, ours in LAYER_NAMES.items()}
        q, k, v = (hf[f"{at}self_attn.{name}_proj.weight"] for name in "qkv")
        gate, up = (hf[f"{at}mlp.{name}_proj.weight"] for name in ("gate", "up"))
        if release == "1.6":
            rows, pairs = [*q, *k, *v], [*gate, *up]
        else:
            rows, share = [], heads // groups * size
            for group in range(groups):
                rows += list(q[group * share : (group + 1) * share])
                rows += list(k[group * size : (group + 1) * size]) + list(
                    v[group * size : (group + 1) * size]
                )
            pairs = [row for both in zip(gate, up, strict=True) for row in both]
        made[to + "self_attention.linear_qkv.weight"] = np.stack(rows)
        made[to + "mlp.linear_fc1.weight"] = np.stack(pairs)
    config = {
        **{name: value for name, value in LLAMA.items() if name != "intermediate_size"},
        "ffn_hidden_size": LLAMA["intermediate_size"],
        "seq_length": 16,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "hidden_act": "swiglu",
        "add_bias_linear": False,
        "tie_word_embeddings": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    if release == "1.6":
        config["use_contiguous_weight_layout"] = True
    else:
        config["use_contiguous_weight_layout_attention"] = False
    (path / "train.yaml").write_text(yaml.safe_dump({"use_legacy": False, "model": {"model_config": config}}))
    save_file({name: np.ascontiguousarray(value) for name, value in made.items()}, path / "model.safetensors")
    return path
