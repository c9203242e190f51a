"""Reads GPT-2 as MindSpore Transformers 1.0 to 1.3 kept it: a YAML and a .ckpt or safetensors file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mindferry.errors import MindferryError, UsageError
from mindferry.sources.assemble import Options, assemble
from mindferry.sources.family import Common, declaration
from mindferry.sources.huggingface import tokenizer_files
from mindferry.sources.source import Source
from mindferry.sources.yaml_file import MAX_YAML_BYTES, read_yaml_object
from mindferry.weights.header import damaged, valid_name
from mindferry.weights.tensor_store import MemoryStore, SafetensorsStore, TensorStore, check_link

MAX_CHECKPOINT_BYTES = 1 << 40


def find(path: Path) -> tuple[Path, Path] | None:
    """(YAML, checkpoint) when directory `path` holds such a model."""
    configs = [file for file in sorted(path.glob("*.yaml")) if file.is_file() and _mentions_gpt2(file)]
    weights = sorted([*path.glob("*.ckpt"), *path.glob("*.safetensors")])
    return (configs[0], weights[0]) if len(configs) == 1 and len(weights) == 1 else None


def _mentions_gpt2(file: Path) -> bool:
    with open(file, "rb") as handle:
        return b"GPT2" in handle.read(MAX_YAML_BYTES)


def open_mindformers_gpt2(path: Path, config: Path, weights: Path, options: Options) -> Source:
    """The model made of the YAML `config` and the checkpoint `weights`."""
    for file in (config, weights):
        check_link(path, file)
    model = read_yaml_object(config).get("model")
    block = model.get("model_config") if isinstance(model, Mapping) else None
    if not isinstance(block, Mapping) or "GPT2" not in str(block.get("type")):
        raise UsageError(
            f"{config}: no model.model_config of type GPT2Config", remedy="give the run's YAML",
            id="source.no-config",
        )  # fmt: skip
    store = _open(weights)
    if not any(name.startswith("backbone.blocks.") for name in store.names()):
        raise MindferryError(
            f"{weights}: not the parameters of a GPT-2 of MindSpore Transformers 1.x",
            cause="these are named backbone.blocks.N...",
            id="source.unknown-format",
        )
    return assemble(
        path=path,
        format="mindformers-1.x",
        tree=_tree(block, str(config)),
        family=declaration("mindformers_gpt2"),
        shared=Common(),
        origin=f"{config}: model_config",
        inner=store,
        options=options,
        tokenizer_files=tokenizer_files(path),
        warnings=[
            "its GPT-2 computes in float16, masks every eos_token_id out of attention and loss, and uses "
            "epsilon 1e-5: expect small differences to its own logs"
        ],
    )


def _tree(block: Mapping[str, Any], origin: str) -> dict[str, Any]:
    tree = dict(block)
    ratio = tree.get("expand_ratio", 4)
    hidden = next((tree[n] for n in ("hidden_size", "embedding_size", "embed_dim") if n in tree), 768)
    if type(ratio) is not int or type(hidden) is not int:
        raise MindferryError(f"{origin}: expand_ratio {ratio!r} and hidden_size {hidden!r} must be whole numbers",
                             id="source.config")  # fmt: skip
    tree["ffn_hidden_size"] = ratio * hidden
    if tree.get("max_position_embeddings") is None:
        tree["max_position_embeddings"] = tree.get("seq_length", 1024)
    return tree


def _open(file: Path) -> TensorStore:
    """The parameters in `file`; states of an optimizer beside them are left out."""
    if file.suffix == ".safetensors":
        store = SafetensorsStore([file])
        tensors = {n: (store.shape(n), store.dtype(n), lambda n=n: store.read(n)) for n in store.names()}
    else:
        tensors = {name: (a.shape, a.dtype, lambda a=a: a) for name, a in _read_ckpt(file).items()}
    kept = {name: entry for name, entry in tensors.items() if name.startswith(("backbone.", "head."))}
    return MemoryStore(kept, file)


def _read_ckpt(file: Path) -> dict[str, np.ndarray]:
    """MindSpore's own format (protobuf), read by MindSpore."""
    import mindspore

    if file.stat().st_size > MAX_CHECKPOINT_BYTES:
        raise damaged(file, f"larger than {MAX_CHECKPOINT_BYTES} bytes")
    try:
        found = mindspore.load_checkpoint(str(file))
    except Exception as err:
        raise damaged(file, f"MindSpore cannot read it: {str(err).strip().splitlines()[0][:200]}") from None
    bad = [name for name in found if not valid_name(name)]
    if bad:
        raise damaged(file, f"parameter name {bad[0][:80]!r} is not printable text")
    return {name: value.asnumpy() for name, value in found.items()}
