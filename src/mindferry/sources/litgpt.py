"""Reads a LitGPT checkpoint directory: lit_model.pth, model_config.yaml, tokenizer files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mindferry.errors import MindferryError, UsageError
from mindferry.sources.assemble import Options, assemble
from mindferry.sources.family import Common, declaration
from mindferry.sources.huggingface import tokenizer_files
from mindferry.sources.pickled import TorchStore, load_pickled, state_dict
from mindferry.sources.source import Source
from mindferry.sources.yaml_file import read_yaml_object
from mindferry.weights.tensor_store import check_link

FILE = "lit_model.pth"
CONFIG = "model_config.yaml"


def open_litgpt(path: Path, options: Options) -> Source:
    """The model in directory `path`."""
    config, weights = path / CONFIG, path / FILE
    if not config.is_file():
        raise UsageError(f"{path}: {FILE} but no {CONFIG}", remedy="give a LitGPT checkpoint directory",
                         id="source.no-config")  # fmt: skip
    for file in (config, weights):
        check_link(path, file)
    store = TorchStore([(weights, state_dict(weights, load_pickled(weights)))])
    tree = _tree(read_yaml_object(config), str(config))
    old = any(".attn.attn." in name for name in store.names())
    name = "litgpt" + ("_gated" if tree["gated"] else "") + ("_old" if old else "")
    source = assemble(
        path=path,
        format="litgpt",
        tree=tree,
        family=declaration(name),
        shared=Common(),
        origin=str(config),
        inner=store,
        options=options,
        tokenizer_files=tokenizer_files(path),
    )
    family = _family(source)
    source.family, source.spec = family, source.spec.model_copy(update={"family": family})
    return source


def _family(source: Source) -> str:
    spec = source.spec
    if spec.normalization == "RMSNorm" and spec.gated_linear_unit and not spec.parallel_residual:
        return "qwen3" if spec.qk_layernorm else "qwen2" if spec.add_qkv_bias else "llama"
    return "gpt_neox" if spec.normalization == "LayerNorm" else "litgpt"


def _tree(tree: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """The configuration with combined meanings put into single keys."""
    flat = dict(tree)
    name = str(flat.get("name", ""))
    for word, why in (("Gemma", "its norms add one to their scale"), ("OLMo-", "its norms have no scale")):
        if word in name:
            raise MindferryError(f"{origin}: {name}: {why}, which GPTModel cannot", id="source.litgpt-family")
    mlp = flat.get("mlp_class_name", "GptNeoxMLP")
    gelu = {"none": "gelu_erf", "tanh": "gelu_tanh"}.get(str(flat.get("gelu_approximate", "none")))
    kinds = {"GptNeoxMLP": (gelu, False), "LLaMAMLP": ("silu", True), "GemmaMLP": (gelu, True)}
    if mlp not in kinds:
        raise MindferryError(
            f"{origin}: mlp_class_name {mlp!r} is not supported; known: {', '.join(kinds)}",
            id="source.config",
        )
    flat["activation"], flat["gated"] = kinds[mlp]
    if flat.get("padded_vocab_size") is None and isinstance(flat.get("vocab_size"), int):
        multiple = flat.get("padding_multiple", 512)
        flat["padded_vocab_size"] = -(-flat["vocab_size"] // multiple) * multiple
    flat["attn_bias"] = bool(flat.get("attn_bias")) or bool(flat.get("bias", True))
    flat["rope_scaling"] = _scaling(flat, origin)
    window = flat.get("sliding_window_indices")
    if flat.get("sliding_window_size") is not None and window is not None and not all(window):
        raise MindferryError(
            f"{origin}: a sliding window on some layers only cannot be expressed", id="source.config"
        )
    return flat


def _scaling(tree: Mapping[str, Any], origin: str) -> dict[str, Any] | None:
    ratio, table = tree.get("rope_condense_ratio", 1), tree.get("rope_adjustments")
    if table is None:
        return {"rope_type": "linear", "factor": ratio} if ratio != 1 else None
    if not isinstance(table, Mapping) or ratio != 1 or "beta_fast" in table:
        raise MindferryError(f"{origin}: rope_adjustments {table!r} are not supported", id="source.config")
    renamed = {"original_max_seq_len": "original_max_position_embeddings"}
    values = {renamed.get(str(key), str(key)): value for key, value in table.items()}
    return {"rope_type": "llama3" if "low_freq_factor" in values else "linear", **values}
