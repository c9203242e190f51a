"""Writes safetensors files tensor by tensor: nothing but the tensor at hand is in memory.

The library's own `save_file` needs all tensors at once, leaves files with mode 0600 whatever the umask,
and does not fsync; a checkpoint must be readable by the group and survive a power loss.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mindferry.errors import MindferryError
from mindferry.targets.run_directory import sync_directory
from mindferry.weights.outlet import Outlet
from mindferry.weights.tensor_store import SAFETENSORS_DTYPE, Shape


@dataclass(frozen=True)
class Item:
    """A tensor to write.

    Attributes:
        make: gives the array when its turn comes, of the right shape and of any floating-point type.
        done: called with the number of values that are NaN or infinite, when all is written.
    """

    name: str
    shape: Shape
    dtype: np.dtype[Any]
    make: Callable[[], np.ndarray]
    done: Callable[[int], None] = lambda not_finite: None

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def shards_of(items: Iterable[Item], max_shard_bytes: int) -> list[list[Item]]:
    """Cut `items`, in order, into groups of at most `max_shard_bytes` (a larger tensor stands alone)."""
    shards: list[list[Item]] = [[]]
    room = max_shard_bytes
    for item in items:
        if shards[-1] and item.nbytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(item)
        room -= item.nbytes
    return shards


def shard_names(count: int, stem: str = "model") -> list[str]:
    """File names as Hugging Face writes them: one plain file, or numbered shards."""
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def write_checkpoint(
    items: list[Item],
    out_dir: Path,
    *,
    max_shard_bytes: int,
    metadata: dict[str, str],
    progress: Callable[[int, str], None] | None = None,
) -> dict[str, str]:
    """Write `items` into `out_dir` as safetensors shards (with an index when there are several).

    Returns:
        name -> sha256 of the tensor's bytes as written.

    Raises:
        MindferryError: `out_dir` already holds a model, or the disk has no room. Files written by this
            call are removed again on any failure.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    taken = sorted(path.name for path in out_dir.glob("model*.safetensors*"))
    if taken:
        raise MindferryError(
            f"{out_dir}: already holds {taken[0]}",
            remedy="give an empty directory",
            id="weights.output-exists",
        )
    total = sum(item.nbytes for item in items)
    free = shutil.disk_usage(out_dir).free
    if free < total * 1.02 + (1 << 20):
        raise MindferryError(
            f"{out_dir}: {total} bytes to write, {free} free",
            remedy="free some space or choose another disk; nothing was written",
            id="weights.no-space",
        )
    shards = shards_of(items, max_shard_bytes)
    names = shard_names(len(shards))
    digests: dict[str, str] = {}
    written: list[Path] = []
    try:
        for name, shard in zip(names, shards, strict=True):
            written.append(out_dir / name)
            digests |= _write_file(out_dir / name, shard, metadata, progress)
        if len(shards) > 1:
            table = {item.name: name for name, shard in zip(names, shards, strict=True) for item in shard}
            index = {"metadata": {"total_size": total}, "weight_map": table}
            written.append(out_dir / "model.safetensors.index.json")
            _write_bytes(written[-1], (json.dumps(index, indent=1) + "\n").encode())
        sync_directory(out_dir)
    except BaseException as err:
        for path in written:
            path.unlink(missing_ok=True)
            _partial(path).unlink(missing_ok=True)
        if isinstance(err, OSError):
            raise MindferryError(
                f"{out_dir}: cannot write the weights: {err.strerror or err}",
                remedy="check space and rights; nothing was left behind",
                id="weights.cannot-write",
            ) from err
        raise
    return digests


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def _write_file(
    path: Path, items: list[Item], metadata: dict[str, str], progress: Callable[[int, str], None] | None
) -> dict[str, str]:
    # Wide types first, so that every tensor starts at a multiple of its item size.
    items = sorted(items, key=lambda item: -item.dtype.itemsize)
    table: dict[str, Any] = {"__metadata__": metadata}
    position = 0
    for item in items:
        table[item.name] = {
            "dtype": SAFETENSORS_DTYPE[item.dtype.name],
            "shape": list(item.shape),
            "data_offsets": [position, position + item.nbytes],
        }
        position += item.nbytes
    header = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    header += b" " * (-len(header) % 8)
    digests: dict[str, str] = {}
    # Written, and perhaps still being hashed: what `done` gives back must not be needed any more.
    written: deque[tuple[Item, Future[str], int]] = deque()

    def settle() -> None:
        item, digest, not_finite = written.popleft()
        digests[item.name] = digest.result()
        item.done(not_finite)

    with open(_partial(path), "wb", buffering=0) as handle:
        with Outlet(handle) as outlet:
            outlet.put(
                np.frombuffer(len(header).to_bytes(8, "little") + header, np.uint8), np.dtype(np.uint8)
            )
            for item in items:
                array = item.make()
                if array.shape != item.shape:
                    raise AssertionError(f"{item.name}: made {array.shape}, planned {item.shape}")
                written.append((item, *outlet.put(array, item.dtype)))
                del array
                if progress is not None:
                    progress(item.nbytes, item.name)
                while written and written[0][1].done():
                    settle()
        while written:
            settle()
        os.fsync(handle.fileno())
    os.replace(_partial(path), path)
    return digests


def _write_bytes(path: Path, data: bytes) -> None:
    with open(_partial(path), "wb") as handle:
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(_partial(path), path)
