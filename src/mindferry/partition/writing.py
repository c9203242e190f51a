"""Writes a checkpoint for another strategy: a share at a time, replicas as hard links."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mindferry import __version__
from mindferry.errors import MindferryError
from mindferry.partition import manifest as manifests
from mindferry.partition.checkpoint import Checkpoint, Spread
from mindferry.partition.network import Network
from mindferry.partition.opening import OPTIMIZER, SINGLE, STATE
from mindferry.partition.rank_files import file_name
from mindferry.partition.rules import parameter_of, rule_of
from mindferry.targets.run_directory import sync_directory, write_json
from mindferry.weights import MAX_SHARD_BYTES
from mindferry.weights.target import target_names
from mindferry.weights.writer import Item, write_checkpoint

Progress = Callable[[int, str], None]
ONE_FILE = 1 << 62
# "remove_redundancy" as MindSpore writes it: mindformers asks each file whether every rank has all of its part.
_RANK_METADATA = {"format": "np", "remove_redundancy": "False"}
_INT64 = np.dtype(np.int64)


def items_for(
    source: Checkpoint, spread: Spread, stage: int, tensor: int, added: dict[str, np.ndarray]
) -> list[Item]:
    """What the ranks at `stage` and `tensor` hold, in network order: parameters, moments, scalars."""
    shapes = target_names(spread.spec)
    items = []
    for name in source.names():
        if stage not in spread.stages.of(name):
            continue
        cut = spread.cut(name, shapes[parameter_of(name)])

        def make(name: str = name, cut: Any = cut) -> np.ndarray:
            return source.share(name, cut, tensor)

        def done(not_finite: int, name: str = name) -> None:
            source.release(name)

        items.append(Item(name, cut.local_shape, source.dtype(name), make, done))
    scalars = {name: source.scalar(name) for name in source.scalars()} | added
    for name, value in sorted(scalars.items()):
        items.append(Item(name, value.shape, value.dtype, lambda value=value: value))  # type: ignore[misc]
    return items


def bytes_for(source: Checkpoint, spread: Spread) -> int:
    """Bytes that the strategy takes on disk, replicas counted once."""
    return sum(
        item.nbytes
        for stage in range(spread.grid.pipeline_stage)
        for tensor in range(spread.grid.model_parallel)
        for item in items_for(source, spread, stage, tensor, {})
    )


def check_space(directory: Path, needed: int) -> None:
    """Refuse before the first byte what cannot fit."""
    free = shutil.disk_usage(directory).free
    if free < needed * 1.02 + (1 << 20):
        raise MindferryError(
            f"{directory}: {needed} bytes to write, {free} free",
            remedy="free some space or choose another disk; nothing was written",
            id="weights.no-space",
        )


def write_ranks(
    source: Checkpoint,
    spread: Spread,
    network: Network,
    offset: Any,
    virtual: int,
    out: Path,
    progress: Progress,
) -> manifests.Manifest:
    """Fill the empty directory `out` with rank_0, rank_1, ... and partition.json."""
    grid, added = spread.grid, _resume_scalars(source)
    epoch, step = _epoch_and_step(source)
    prefix, suffix = network.spec.family, f"{epoch}_{step}"
    digests: dict[str, dict[int, str]] = {}
    for stage in range(grid.pipeline_stage):
        for tensor in range(grid.model_parallel):
            rank = grid.rank(stage, 0, tensor)
            home = out / f"rank_{rank}"
            items = items_for(source, spread, stage, tensor, added)
            found = write_checkpoint(
                items, home, max_shard_bytes=ONE_FILE, metadata=_RANK_METADATA, progress=progress
            )
            for name, digest in found.items():
                digests.setdefault(name, {}).setdefault(tensor, digest)
            first = home / file_name(prefix, rank, suffix)
            os.rename(home / SINGLE, first)
            sync_directory(home)
            for data in range(1, grid.data_parallel):
                copy = grid.rank(stage, data, tensor)
                _link(first, out / f"rank_{copy}" / file_name(prefix, copy, suffix))
    manifest = manifests.Manifest(
        mindferry=__version__,
        grid=manifests.Degrees(**vars(grid)),
        model=network.spec,
        **spread.layout.config(),
        vocab_rows=spread.spec.vocab_size,
        layers=spread.stages.layers,
        offset=offset,
        pp_interleave_num=virtual,
        prefix=prefix,
        file_suffix=suffix,
        state=source.state,
        added=tuple(added),
        tensors=_table(source, spread, digests, added),
    )
    write_json(out / manifests.NAME, manifest.model_dump(mode="json"))
    return manifest


def _table(
    source: Checkpoint, spread: Spread, digests: dict[str, dict[int, str]], added: dict[str, np.ndarray]
) -> dict[str, manifests.Tensor]:
    shapes = target_names(spread.spec)
    table = {}
    for name in source.names():
        dim = rule_of(name).dim
        found = digests[name]
        shares = [found[0]] if dim is None else [found[tensor] for tensor in sorted(found)]
        table[name] = manifests.Tensor(
            dtype=source.dtype(name).name,
            shape=shapes[parameter_of(name)],
            dim=dim,
            stages=spread.stages.of(name),
            sha256=tuple(shares),
        )
    every = tuple(range(spread.grid.pipeline_stage))
    for name in (*source.scalars(), *added):
        value = added[name] if name in added else source.scalar(name)
        table[name] = manifests.Tensor(
            dtype=value.dtype.name, shape=value.shape, dim=None, stages=every, sha256=(digests[name][0],)
        )
    return table


def _resume_scalars(source: Checkpoint) -> dict[str, np.ndarray]:
    """epoch_num and step_num, by which mindformers' resume_training finds its place in the data."""
    if source.state is None or not source.scalars():
        return {}
    per_epoch = source.state.get("steps_per_epoch") or 0
    step = source.state["step"]
    found = {"step_num": step} | ({"epoch_num": -(-step // per_epoch)} if per_epoch > 0 else {})
    present = set(source.scalars())
    return {name: np.array(value, _INT64) for name, value in found.items() if name not in present}


def _epoch_and_step(source: Checkpoint) -> tuple[int, int]:
    """For the file names; mindformers counts the steps of the epoch there, and 0_0 is before training."""
    if source.state is None:
        return source.epoch, source.step
    step, per_epoch = source.state["step"], source.state.get("steps_per_epoch") or 0
    if step <= 0 or per_epoch <= 0:
        return min(step, 1), step
    epoch = -(-step // per_epoch)
    return epoch, step - (epoch - 1) * per_epoch


def _link(first: Path, copy: Path) -> None:
    """A second name for the file; a copy where the file system has no hard links."""
    copy.parent.mkdir()
    try:
        os.link(first, copy)
    except OSError:
        shutil.copyfile(first, copy)
    sync_directory(copy.parent)


def write_whole(source: Checkpoint, spread: Spread, out: Path, progress: Progress) -> int:
    """Fill the empty directory `out` as a run's checkpoint: model/, optimizer.safetensors, state.json. Tensors."""
    dropped = source.manifest.added if source.manifest is not None else ()
    items = [i for i in items_for(source, spread, 0, 0, {}) if i.name not in dropped]
    known = target_names(spread.spec)
    weights = [item for item in items if item.name in known]
    rest = [item for item in items if item.name not in known]
    complete = source.state is not None and bool(rest)
    write_checkpoint(
        weights,
        out / "model",
        max_shard_bytes=ONE_FILE if complete else MAX_SHARD_BYTES,
        metadata={"format": "np"},
        progress=progress,
    )
    if rest:
        aside = out / ".optimizer"
        write_checkpoint(rest, aside, max_shard_bytes=ONE_FILE, metadata={"format": "np"}, progress=progress)
        os.rename(aside / SINGLE, out / OPTIMIZER)
        aside.rmdir()
    if source.state is not None:
        write_json(out / STATE, source.state)
    if complete:
        _write_checkpoint_manifest(out, source.state["step"])  # type: ignore[index]
    sync_directory(out)
    return len(items)


def _write_checkpoint_manifest(out: Path, step: int) -> None:
    """What makes the directory a checkpoint that `train --resume` takes (training/checkpoints.py)."""
    files = {}
    for name in (f"model/{SINGLE}", OPTIMIZER, STATE):
        digest = hashlib.sha256()
        with open(out / name, "rb") as handle:
            while block := handle.read(1 << 22):
                digest.update(block)
        files[name] = {"bytes": (out / name).stat().st_size, "sha256": digest.hexdigest()}
    text = json.dumps({"step": step, "files": files}, indent=2)
    (out / "manifest.json").write_text(text, encoding="utf-8")
