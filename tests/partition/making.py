"""Whole checkpoints with random numbers and the training YAML of their network, written without mindferry's code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from safetensors.numpy import load_file, save_file

from mindferry.spec import ModelSpec
from mindferry.weights.target import target_names

MOMENTS = ("adam_m.", "adam_v.")


def tensors_of(
    spec: ModelSpec, *, moments: bool, dtype: Any = np.float32, seed: int = 0
) -> dict[str, np.ndarray]:
    """Random values for every parameter; moments and a counter on request."""
    rng = np.random.default_rng(seed)
    made = {name: rng.standard_normal(shape).astype(dtype) for name, shape in target_names(spec).items()}
    if moments:
        for prefix in MOMENTS:
            made |= {
                prefix + name: rng.standard_normal(shape).astype(np.float32)
                for name, shape in target_names(spec).items()
                if not name.endswith("beta")
            }
        made["global_step"] = np.array([12], np.int32)
    return made


def write_whole(directory: Path, tensors: dict[str, np.ndarray]) -> Path:
    """As mindferry's checkpoints lie: model/model.safetensors, optimizer.safetensors, state.json."""
    (directory / "model").mkdir(parents=True)
    weights = {n: a for n, a in tensors.items() if not n.startswith(MOMENTS) and n != "global_step"}
    rest = {n: a for n, a in tensors.items() if n not in weights}
    save_file(weights, directory / "model" / "model.safetensors")
    if rest:
        save_file(rest, directory / "optimizer.safetensors")
        (directory / "state.json").write_text(json.dumps({"step": 12, "steps_per_epoch": 5, "samples": 48}))
    return directory


def write_yaml(
    path: Path,
    spec: ModelSpec,
    *,
    contiguous_qkv: bool = False,
    interleaved_mlp: bool = True,
    **parallel: int,
) -> Path:
    """The part of a mindformers training YAML that says what the network is."""
    config = {
        "model_type": spec.family,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "num_layers": spec.num_layers,
        "num_heads": spec.num_attention_heads,
        "num_query_groups": spec.num_query_groups,
        "kv_channels": spec.kv_channels,
        "ffn_hidden_size": spec.ffn_hidden_size,
        "max_position_embeddings": spec.max_position_embeddings,
        "seq_length": spec.max_position_embeddings,
        "position_embedding_type": spec.position_embedding,
        "normalization": spec.normalization,
        "layernorm_epsilon": spec.layernorm_epsilon,
        "activation": spec.activation,
        "gated_linear_unit": spec.gated_linear_unit,
        "add_bias_linear": spec.add_bias_linear,
        "add_qkv_bias": spec.add_qkv_bias,
        "qk_layernorm": spec.qk_layernorm,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "use_contiguous_weight_layout_attention": contiguous_qkv,
        "use_interleaved_weight_layout_mlp": interleaved_mlp,
    }
    tree = {
        "use_legacy": False,
        "use_parallel": True,
        "runner_config": {"batch_size": 1, "epochs": 1},
        "parallel": {"parallel_mode": 1},
        "parallel_config": parallel,
        "model": {"model_config": config, "arch": {"type": "GPT2ForTraining"}},
    }
    path.write_text(yaml.safe_dump(tree))
    return path


def read_whole(directory: Path) -> dict[str, np.ndarray]:
    """Everything a merged checkpoint holds."""
    found: dict[str, np.ndarray] = {}
    for path in [*sorted((directory / "model").glob("*.safetensors")), directory / "optimizer.safetensors"]:
        if path.exists():
            found |= load_file(path)
    return found


def rank_file(directory: Path, rank: int) -> Path:
    """The one file of a rank."""
    (path,) = (directory / f"rank_{rank}").glob("*.safetensors")
    return path


def read_rank(directory: Path, rank: int) -> dict[str, np.ndarray]:
    """What a rank holds."""
    return load_file(rank_file(directory, rank))


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    """Names, types, shapes and every bit; types by name, since MindSpore brings a bfloat16 of its own to numpy."""
    return a.keys() == b.keys() and all(
        x.dtype.name == b[n].dtype.name and x.shape == b[n].shape and x.tobytes() == b[n].tobytes()
        for n, x in a.items()
    )
