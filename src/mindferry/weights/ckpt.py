"""Writes MindSpore's own checkpoint format (.ckpt), tensor by tensor.

mindformers up to 1.3.2 loads nothing else. The file is a row of protobuf messages `Checkpoint`, of which each holds
one tensor or a piece of one (mindspore.train.serialization._exec_save writes it like that); MindSpore's own classes
encode them here.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mindferry.errors import MindferryError
from mindferry.targets.run_directory import sync_directory
from mindferry.weights.dtypes import cast, count_not_finite
from mindferry.weights.writer import Item

PIECE_BYTES = 256 << 20  # MindSpore takes at most 512 MiB a message
_TENSOR_TYPE = {"float32": "Float32", "float16": "Float16", "bfloat16": "BFloat16"}


def write_ckpt(
    items: list[Item], path: Path, progress: Callable[[int, str], None] | None = None
) -> dict[str, str]:
    """Write `items` to `path`, all or nothing; sha256 of each tensor's bytes by name.

    Raises:
        MindferryError: a type that the format has no word for here, or nothing can be written.
    """
    unknown = [item.name for item in items if item.dtype.name not in _TENSOR_TYPE]
    if unknown:
        raise MindferryError(
            f"{unknown[0]}: its type has no place in a .ckpt",
            remedy=f"write it as {', '.join(_TENSOR_TYPE)}",
            id="weights.dtype",
        )
    partial = path.with_name(f".{path.name}.partial")
    digests = {}
    try:
        with open(partial, "wb") as handle:
            for item in items:
                array = cast(item.make(), item.dtype)
                digests[item.name] = _write_tensor(handle, item, array)
                item.done(count_not_finite(array))
                if progress is not None:
                    progress(item.nbytes, item.name)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(partial, path)
        sync_directory(path.parent)
    except BaseException as err:
        partial.unlink(missing_ok=True)
        if isinstance(err, OSError):
            raise MindferryError(
                f"{path}: cannot be written: {err.strerror or err}",
                remedy="check space and rights; nothing was left behind",
                id="weights.cannot-write",
            ) from err
        raise
    return digests


def _write_tensor(handle: Any, item: Item, array: np.ndarray) -> str:
    """One message for each piece; the dims are the whole tensor's in all of them."""
    from mindspore.train.checkpoint_pb2 import Checkpoint

    data = array.reshape(-1).view(np.uint8)
    digest = hashlib.sha256(data)  # type: ignore[arg-type]
    for start in range(0, data.size, PIECE_BYTES):
        message = Checkpoint()
        value = message.value.add()
        value.tag = item.name
        value.tensor.dims.extend(item.shape)
        value.tensor.tensor_type = _TENSOR_TYPE[item.dtype.name]
        value.tensor.tensor_content = data[start : start + PIECE_BYTES].tobytes()
        handle.write(message.SerializeToString())
    return digest.hexdigest()
