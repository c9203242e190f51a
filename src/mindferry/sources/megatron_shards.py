"""Megatron-LM's sharded checkpoints: finds the files, checks that they belong together, merges the shards.

Layout on disk: ROOT/latest_checkpointed_iteration.txt, ROOT/iter_0001000/mp_rank_TT[_PPP]/model_optim_rng.pt
(TT tensor-parallel rank, PPP pipeline stage). Each file holds `args`, `iteration`, `checkpoint_version` and
`model` (or `model0`, `model1`, ... with virtual pipeline stages).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from mindferry.errors import MindferryError, UsageError
from mindferry.sources.pickled import TorchStore, load_pickled
from mindferry.weights.header import damaged
from mindferry.weights.tensor_store import MemoryStore, Shape, check_link, listing, same_bits
from mindferry.weights.transforms import SplitGateUp, SplitQKV

TRACKER: Final = "latest_checkpointed_iteration.txt"
_RANK = re.compile(r"mp_rank_([0-9]{2})(?:_([0-9]{3}))?")
_FILES = ("model_optim_rng.pt", "model_rng.pt")

# Names of Megatron's older own transformer -> those of Megatron-core; tried in this order on each name.
_RENAMES: Final = [
    (re.compile(old), new)
    for old, new in (
        (r"^language_model\.embedding\.", "embedding."),
        (r"^language_model\.(?:encoder|transformer)\.layers\.", "decoder.layers."),
        (r"^language_model\.(?:encoder|transformer)\.final_(?:layer)?norm\.", "decoder.final_layernorm."),
        (r"^language_model\.output_layer\.", "output_layer."),
        (r"^word_embeddings_for_head\.", "output_layer."),
        (r"\.(?:self_)?attention\.query_key_value\.", ".self_attention.linear_qkv."),
        (r"\.(?:self_)?attention\.dense\.", ".self_attention.linear_proj."),
        (r"\.input_norm\.", ".input_layernorm."),
        (r"\.post_attention_(?:layer)?norm\.", ".pre_mlp_layernorm."),
        (r"\.mlp\.dense_h_to_4h\.", ".mlp.linear_fc1."),
        (r"\.mlp\.dense_4h_to_h\.", ".mlp.linear_fc2."),
        # Transformer Engine fuses the norm into the matrix that follows it.
        (r"\.self_attention\.linear_qkv\.layer_norm_", ".input_layernorm."),
        (r"\.mlp\.linear_fc1\.layer_norm_", ".pre_mlp_layernorm."),
    )
]

Cut = Literal["rows", "columns", "qkv", "fc1", "same"]
# How tensor parallelism cuts each tensor; everything else is the same on every rank.
_CUTS: Final[list[tuple[re.Pattern[str], Cut]]] = [
    (re.compile(pattern), cut)  # type: ignore[misc]
    for pattern, cut in (
        (r"word_embeddings\.weight$", "rows"),
        (r"output_layer\.weight$", "rows"),
        (r"linear_qkv\.(weight|bias)$", "qkv"),
        (r"linear_fc1\.(weight|bias)$", "fc1"),
        (r"linear_proj\.weight$", "columns"),
        (r"linear_fc2\.weight$", "columns"),
    )
]


@dataclass(frozen=True)
class Shard:
    """One file, read: `chunks` are its model parts (several with virtual pipeline stages)."""

    path: Path
    tensor_rank: int
    stage: int
    iteration: int | None
    version: float
    args: Any
    chunks: list[Mapping[str, Any]]


@dataclass(frozen=True)
class Heads:
    """What the layout of a fused q/k/v matrix depends on."""

    heads: int
    groups: int
    head_dim: int
    gated: bool


def is_checkpoint(path: Path) -> bool:
    """True when `path` is a Megatron checkpoint root, iteration or rank directory."""
    if (path / TRACKER).is_file() or _RANK.fullmatch(path.name):
        return True
    return any(_RANK.fullmatch(p.name) for p in path.iterdir()) or bool(_iterations(path))


def _iterations(path: Path) -> list[Path]:
    return sorted(p for p in path.iterdir() if p.is_dir() and re.fullmatch(r"iter_[0-9]{7,}|release", p.name))


def iteration_directory(path: Path) -> Path:
    """The directory with the mp_rank_* directories: the tracked iteration of a root, or `path` itself.

    Raises:
        UsageError: there is none, or the checkpoint is in the distributed format.
        MindferryError: the tracker names an iteration that is not there.
    """
    if _RANK.fullmatch(path.name):
        return path.parent
    tracker = path / TRACKER
    if tracker.is_file():
        check_link(path, tracker)
        text = tracker.read_text("utf-8", "replace").strip()
        if text != "release" and not re.fullmatch(r"[0-9]{1,18}", text):
            raise damaged(tracker, f"holds {text[:40]!r}, expected a number or release")
        chosen = path / ("release" if text == "release" else f"iter_{int(text):07d}")
        if not chosen.is_dir():
            there = ", ".join(p.name for p in _iterations(path)) or "none"
            raise MindferryError(
                f"{tracker}: names iteration {text}, but {chosen.name} is not there; found: {there}",
                remedy="give the iteration directory itself",
                id="megatron.no-iteration",
            )
        path = chosen
    elif not any(_RANK.fullmatch(p.name) for p in path.iterdir()):
        found = _iterations(path)
        if len(found) != 1:
            raise UsageError(
                f"{path}: no {TRACKER} and {len(found)} iterations",
                remedy="give the iteration directory",
                id="megatron.no-iteration",
            )
        path = found[0]
    if (path / ".metadata").exists() or list(path.glob("*.distcp")):
        raise UsageError(
            f"{path}: a checkpoint in Megatron's distributed format (torch_dist)",
            remedy="write it again with --ckpt-convert-format torch",
            id="megatron.distributed",
        )
    return path


def read_shards(path: Path) -> list[Shard]:
    """All shards of the iteration directory `path`, checked to be one complete grid of one iteration.

    Raises:
        UsageError: no shard there.
        MindferryError: a rank or stage is missing, or shards of different iterations are mixed.
    """
    shards = []
    for directory in sorted(path.iterdir()):
        rank = _RANK.fullmatch(directory.name)
        if not rank:
            continue
        file = next((directory / name for name in _FILES if (directory / name).is_file()), None)
        if file is None:
            raise MindferryError(
                f"{directory}: no {_FILES[0]} in it",
                remedy="fetch the missing file",
                id="megatron.missing-shard",
            )
        check_link(path, file)
        shards.append(_read(file, int(rank.group(1)), int(rank.group(2) or 0)))
    if not shards:
        raise UsageError(
            f"{path}: no mp_rank_* directory", remedy="give a Megatron checkpoint", id="megatron.none"
        )
    _check_grid(path, shards)
    return shards


def _read(file: Path, tensor_rank: int, stage: int) -> Shard:
    tree = load_pickled(file)
    if not isinstance(tree, Mapping):
        raise damaged(file, f"holds a {type(tree).__name__}, expected a table")
    if isinstance(tree.get("model"), Mapping):
        chunks = [tree["model"]]
    else:
        chunks = []
        while isinstance(tree.get(f"model{len(chunks)}"), Mapping):
            chunks.append(tree[f"model{len(chunks)}"])
    if not chunks:
        raise damaged(file, f"no model in it; it holds {listing(sorted(map(str, tree)))}")
    version = tree.get("checkpoint_version", 0)
    if version not in (0, 0.0, 1.0, 2.0, 3.0):
        raise MindferryError(
            f"{file}: checkpoint_version {version!r} is not known (0, 1.0, 2.0, 3.0)", id="megatron.version"
        )
    iteration = tree.get("iteration")
    return Shard(
        file, tensor_rank, stage, iteration if isinstance(iteration, int) else None, float(version),
        tree.get("args"), [flatten(file, chunk) for chunk in chunks],
    )  # fmt: skip


def flatten(file: Path, tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables of tensors as one table with dotted names of today's Megatron-core."""
    result: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if name.endswith("_extra_state"):
            continue  # scaling of fp8 products in Transformer Engine; no learned number
        if isinstance(value, Mapping):
            result |= flatten(file, value, f"{name}.")
            continue
        for pattern, new in _RENAMES:
            name = pattern.sub(new, name)
        if name in result:
            raise damaged(file, f"two tensors mean {name!r}")
        result[name] = value
    return result


def _check_grid(path: Path, shards: list[Shard]) -> None:
    ranks = max(shard.tensor_rank for shard in shards) + 1
    stages = max(shard.stage for shard in shards) + 1
    stated = vars(shards[0].args) if hasattr(shards[0].args, "__dict__") else {}
    ranks = max(ranks, _count(stated.get("tensor_model_parallel_size")))
    stages = max(stages, _count(stated.get("pipeline_model_parallel_size")))
    have = {(shard.tensor_rank, shard.stage) for shard in shards}
    wanted = {(rank, stage) for rank in range(ranks) for stage in range(stages)}
    if have != wanted:
        missing = [f"mp_rank_{rank:02d}_{stage:03d}" for rank, stage in sorted(wanted - have)]
        raise MindferryError(
            f"{path}: {len(missing)} of {ranks * stages} shards are missing "
            f"(tensor parallel {ranks}, pipeline stages {stages}): {listing(missing)}",
            remedy="fetch the missing directories; nothing was written",
            id="megatron.missing-shard",
        )
    for what in ("iteration", "version"):
        values = {getattr(shard, what) for shard in shards}
        if len(values) > 1:
            odd = [f"{s.path.parent.name}: {getattr(s, what)}" for s in shards]
            raise MindferryError(
                f"{path}: shards of different {what}s: {listing(odd)}",
                remedy="take all shards from one save",
                id="megatron.mixed-shards",
            )
    if len({len(shard.chunks) for shard in shards}) > 1:
        raise damaged(path, "stages with different numbers of virtual stages")


def _count(value: Any) -> int:
    return value if type(value) is int and 0 < value < 10_000 else 1


def merge(shards: list[Shard], heads: Callable[[], Heads]) -> MemoryStore:
    """All tensors of the model, whole, with layers numbered through; read when asked for.

    Args:
        heads: how q/k/v are packed; called only when a tensor is read.
    """
    stages = max(shard.stage for shard in shards) + 1
    path = shards[0].path.parent.parent
    tensors: dict[str, tuple[Shape, np.dtype[Any], Callable[[], np.ndarray]]] = {}
    offset = 0
    # With virtual stages, chunk 0 of every stage comes before chunk 1 of the first.
    for chunk in range(len(shards[0].chunks)):
        for stage in range(stages):
            parts = sorted((s for s in shards if s.stage == stage), key=lambda s: s.tensor_rank)
            stores = [TorchStore([(s.path, s.chunks[chunk])]) for s in parts]
            layers = _check_names(parts, stores)
            for name in stores[0].names():
                whole = _shifted(name, offset)
                entry = _merged(name, parts, stores, heads)
                if whole in tensors:
                    _check_copy(whole, tensors[whole], entry, parts[0].path)
                tensors[whole] = entry
            offset += layers
    return MemoryStore(tensors, path)


def _shifted(name: str, offset: int) -> str:
    """`name` with its layer counted through all stages before it."""
    return re.sub(r"^decoder\.layers\.([0-9]+)\.", lambda m: f"decoder.layers.{int(m[1]) + offset}.", name)


def _check_names(parts: list[Shard], stores: list[TorchStore]) -> int:
    """The number of layers of this stage; every rank must hold the same names."""
    first = set(stores[0].names())
    for part, store in zip(parts, stores, strict=True):
        if set(store.names()) != first:
            odd = sorted(first.symmetric_difference(store.names()))
            raise damaged(part.path, f"holds other tensors than rank 0 of its stage: {listing(odd)}")
    numbers = {int(m[1]) for name in first if (m := re.match(r"decoder\.layers\.([0-9]+)\.", name))}
    if numbers != set(range(len(numbers))):
        raise damaged(
            parts[0].path, f"layers are numbered {sorted(numbers)[:10]}, expected 0 to {len(numbers) - 1}"
        )
    return len(numbers)


def _check_copy(name: str, one: Any, two: Any, path: Path) -> None:
    """The embedding is kept on the first and, as the head, on the last stage: the copies must agree."""
    if one[0] != two[0] or not same_bits(one[2](), two[2]()):
        raise damaged(
            path, f"{name} is stored on two stages with other contents", id="megatron.copies-differ"
        )


def _merged(
    name: str, parts: list[Shard], stores: list[TorchStore], heads: Callable[[], Heads]
) -> tuple[Shape, np.dtype[Any], Callable[[], np.ndarray]]:
    cut = next((kind for pattern, kind in _CUTS if pattern.search(name)), "same")
    shape, dtype = stores[0].shape(name), stores[0].dtype(name)
    for part, store in zip(parts, stores, strict=True):
        if store.shape(name) != shape or store.dtype(name) != dtype:
            raise damaged(part.path, f"{name} is {list(store.shape(name))}, rank 0 has {list(shape)}")
    ranks = len(stores)
    if cut == "columns":
        if len(shape) != 2:
            raise damaged(parts[0].path, f"{name} is {list(shape)}, expected a matrix")
        whole: Shape = (shape[0], shape[1] * ranks)
    elif cut == "same" or not shape:
        whole = shape
    else:
        whole = (shape[0] * ranks, *shape[1:])

    def read() -> np.ndarray:
        arrays = [store.read(name) for store in stores]
        if cut == "same":
            for part, array in zip(parts, arrays, strict=True):
                if not same_bits(array, arrays[0]):
                    raise damaged(
                        part.path,
                        f"{name} should be the same on every rank and is not",
                        id="megatron.ranks-differ",
                    )
            return arrays[0]
        if cut == "columns":
            return arrays[0] if ranks == 1 else np.concatenate(arrays, axis=1)
        if cut == "qkv":
            return _merge_qkv(arrays, parts[0].version, heads())
        if cut == "fc1" and heads().gated and ranks > 1:
            halves = [SplitGateUp("concatenated").forward([array]) for array in arrays]
            return np.concatenate([half[i] for i in (0, 1) for half in halves])
        return arrays[0] if ranks == 1 else np.concatenate(arrays)

    return whole, dtype, read


def _merge_qkv(arrays: list[np.ndarray], version: float, heads: Heads) -> np.ndarray:
    """Shards of a fused projection, in the layout of their version, as one in the layout of today.

    Version 0 keeps [3, heads, head_dim, ...] on each rank, 1.0 [heads, head_dim, 3, ...], 2.0 and later
    [groups, (heads per group + 2), head_dim, ...].
    """
    ranks = len(arrays)
    if version < 2.0:
        local = (heads.heads // ranks, heads.groups // ranks, heads.head_dim)
        old = SplitQKV("flat" if version < 1.0 else "head_dim_three", *local)
        new = SplitQKV("per_group", *local)
        arrays = [new.backward(old.forward([array]))[0] for array in arrays]
    return arrays[0] if ranks == 1 else np.concatenate(arrays)
