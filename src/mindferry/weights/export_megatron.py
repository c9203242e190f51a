"""Writes a Megatron-LM checkpoint: Megatron-core names, checkpoint_version 3.0, cut over ranks and stages."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mindferry.errors import MindferryError, UsageError
from mindferry.spec import ModelSpec
from mindferry.weights.dtypes import cast
from mindferry.weights.transforms import SplitGateUp
from mindferry.weights.writer import Item

DIVISOR = 128  # Megatron's default for make_vocab_size_divisible_by


@dataclass(frozen=True)
class Cut:
    """How the checkpoint is cut.

    Attributes:
        tensor_parallel: ranks that share each matrix.
        pipeline_stages: groups of consecutive layers, of equal size.
    """

    tensor_parallel: int = 1
    pipeline_stages: int = 1

    def check(self, spec: ModelSpec) -> None:
        """Refuse, before anything is written, what Megatron could not load.

        Raises:
            UsageError: something does not divide; all reasons are named.
        """
        t, p = self.tensor_parallel, self.pipeline_stages
        problems = [
            f"{name} {value} does not divide over {t} tensor-parallel ranks"
            for name, value in (
                ("num_attention_heads", spec.num_attention_heads),
                ("num_query_groups", spec.num_query_groups),
                ("ffn_hidden_size", spec.ffn_hidden_size),
            )
            if value % t
        ]
        if spec.num_layers % p:
            problems.append(f"num_layers {spec.num_layers} does not divide over {p} pipeline stages")
        if problems:
            raise UsageError("megatron: " + "; ".join(problems), remedy="choose other sizes", id="export.cut")


def arguments(spec: ModelSpec, cut: Cut, padded_vocab: int) -> dict[str, Any]:
    """The arguments of Megatron that make the network of `spec`.

    Raises:
        MindferryError: Megatron has no arguments for it.
    """
    args: dict[str, Any] = {
        "num_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "ffn_hidden_size": spec.ffn_hidden_size,
        "num_attention_heads": spec.num_attention_heads,
        "num_query_groups": spec.num_query_groups,
        "group_query_attention": spec.num_query_groups != spec.num_attention_heads,
        "kv_channels": spec.kv_channels,
        "max_position_embeddings": spec.max_position_embeddings,
        "position_embedding_type": spec.position_embedding,
        "use_rotary_position_embeddings": spec.position_embedding == "rope",
        "rotary_base": spec.rotary_base,
        "rotary_percent": spec.rotary_percent,
        "normalization": spec.normalization,
        "layernorm_epsilon": spec.layernorm_epsilon,
        "norm_epsilon": spec.layernorm_epsilon,
        "qk_layernorm": spec.qk_layernorm,
        "add_bias_linear": spec.add_bias_linear,
        "add_qkv_bias": spec.add_qkv_bias and not spec.add_bias_linear,
        "untie_embeddings_and_output_weights": not spec.tie_word_embeddings,
        "hidden_dropout": spec.hidden_dropout,
        "attention_dropout": spec.attention_dropout,
        "init_method_std": spec.init_method_std,
        "vocab_size": spec.vocab_size,
        "padded_vocab_size": padded_vocab,
        "make_vocab_size_divisible_by": DIVISOR,
        "tensor_model_parallel_size": cut.tensor_parallel,
        "pipeline_model_parallel_size": cut.pipeline_stages,
        "num_experts": None,
        "apply_layernorm_1p": False,
        "use_mcore_models": True,
    }
    return args | _activation(spec) | _rope_scaling(spec)


def _activation(spec: ModelSpec) -> dict[str, bool]:
    table = {
        ("silu", True): {"swiglu": True},
        ("gelu_erf", False): {"swiglu": False, "openai_gelu": False, "bias_gelu_fusion": False},
        ("gelu_tanh", False): {
            "swiglu": False,
            "openai_gelu": not spec.add_bias_linear,
            "bias_gelu_fusion": spec.add_bias_linear,
        },
    }
    found = table.get((spec.activation, spec.gated_linear_unit))
    if found is None:
        raise MindferryError(
            f"Megatron-LM has no argument for {spec.activation}"
            + (" with a gated MLP" if spec.gated_linear_unit else ""),
            remedy="export to hf",
            id="export.family",
        )
    return found


def _rope_scaling(spec: ModelSpec) -> dict[str, Any]:
    scaling = spec.rope_scaling
    if scaling is None:
        return {}
    if scaling.type == "linear":
        return {"rotary_seq_len_interpolation_factor": scaling.factor}
    constants = (scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_position_embeddings)
    if scaling.type == "llama3" and constants == (1.0, 4.0, 8192):
        return {"use_rope_scaling": True, "rope_scaling_factor": scaling.factor}
    raise MindferryError(
        f"Megatron-LM cannot hold rope_scaling {scaling.model_dump(exclude_none=True)}",
        cause="its Llama 3 scaling has fixed factors 1 and 4 and length 8192, and it has no other but linear",
        remedy="export to hf",
        id="export.family",
    )


def write(
    items: list[Item],
    spec: ModelSpec,
    cut: Cut,
    padded_vocab: int,
    step: int,
    out: Path,
    progress: Callable[[int, str], None] | None,
) -> None:
    """Write OUT/iter_NNNNNNN/mp_rank_*/model_optim_rng.pt and the tracker file.

    Args:
        items: whole tensors under Megatron-core's names.
        step: optimizer steps done, the number of the iteration.
    """
    from mindferry.sources.pickled import import_torch

    torch = import_torch(out)
    args = argparse.Namespace(**arguments(spec, cut, padded_vocab))
    ranks, stages = cut.tensor_parallel, cut.pipeline_stages
    shards: dict[tuple[int, int], dict[str, Any]] = {(r, s): {} for r in range(ranks) for s in range(stages)}
    for item in items:
        array = cast(item.make(), item.dtype)
        for name, stage in _places(item.name, spec, cut):
            for rank in range(ranks):
                shards[rank, stage][name] = _tensor(torch, _part(item.name, array, spec, rank, ranks))
        if progress is not None:
            progress(item.nbytes, item.name)
    for (rank, stage), model in shards.items():
        folder = f"mp_rank_{rank:02d}" if stages == 1 else f"mp_rank_{rank:02d}_{stage:03d}"
        directory = out / f"iter_{step:07d}" / folder
        directory.mkdir(parents=True)
        tree = {"iteration": step, "checkpoint_version": 3.0, "args": args, "model": model}
        torch.save(tree, directory / "model_optim_rng.pt")
    (out / "latest_checkpointed_iteration.txt").write_text(str(step))


def _tensor(torch: Any, array: np.ndarray) -> Any:
    if array.dtype.kind == "V":  # numpy knows bfloat16 only as words
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def _places(name: str, spec: ModelSpec, cut: Cut) -> list[tuple[str, int]]:
    """(name within its stage, stage) for each place the tensor is kept."""
    last = cut.pipeline_stages - 1
    if name.startswith("decoder.layers."):
        number, rest = name.removeprefix("decoder.layers.").split(".", 1)
        stage, local = divmod(int(number), spec.num_layers // cut.pipeline_stages)
        return [(f"decoder.layers.{local}.{rest}", stage)]
    if name == "embedding.word_embeddings.weight" and spec.tie_word_embeddings and last:
        return [(name, 0), ("output_layer.weight", last)]  # the last stage keeps a copy as its head
    return [(name, 0 if name.startswith("embedding.") else last)]


def _part(name: str, array: np.ndarray, spec: ModelSpec, rank: int, ranks: int) -> np.ndarray:
    """The share of `rank`. Rows of q/k/v are packed per group, so equal shares of rows are whole groups."""
    if name.endswith((".linear_proj.weight", ".linear_fc2.weight")):
        return np.split(array, ranks, axis=1)[rank]
    if ".linear_fc1." in name and spec.gated_linear_unit:
        halves = SplitGateUp("concatenated").forward([array])
        return np.concatenate([np.split(half, ranks)[rank] for half in halves])
    if (
        ".linear_qkv." in name
        or ".linear_fc1." in name
        or name.endswith(("word_embeddings.weight", "output_layer.weight"))
    ):
        return np.split(array, ranks)[rank]
    return array
