"""Reads and checks the header of a safetensors file without trusting it.

The safetensors library accepts some headers we must not: a tensor name that occurs twice over the same
bytes (last wins, so the bytes are read as another dtype) and names with control characters. The header
decides what is read and where, so every rule is checked here before a byte of data is touched.
"""

from __future__ import annotations

import json
import os
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from mindferry.errors import MindferryError

MAX_HEADER_BYTES: Final = 100_000_000  # the format's own limit
MAX_TENSORS: Final = 1_000_000
MAX_NAME_LENGTH: Final = 1024
MAX_RANK: Final = 8

# Name in the file -> size of one element in bytes.
ITEM_SIZE: Final = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies: `start` and `end` are byte offsets from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Header:
    """The checked contents of a safetensors header."""

    entries: dict[str, Entry]
    metadata: dict[str, str]


def damaged(path: Path, what: str, *, id: str = "weights.damaged-file") -> MindferryError:
    """The error for a weight file that is not what it claims to be."""
    return MindferryError(
        f"{path}: {what}",
        remedy="fetch or write the file again; its checksum should tell whether it arrived complete",
        id=id,
    )


def valid_name(name: str) -> bool:
    """True when `name` can be shown and matched: not empty, not huge, no control or format characters."""
    return 0 < len(name) <= MAX_NAME_LENGTH and not any(
        unicodedata.category(ch) in ("Cc", "Cf", "Cs", "Zl", "Zp") for ch in name
    )


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """`object_pairs_hook` that refuses an object in which a key occurs twice."""
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"key {key!r} occurs twice")
        result[key] = value
    return result


def read_header(path: Path) -> Header:
    """Read the header of `path`.

    Raises:
        MindferryError: the file breaks a rule of the format or one of the limits above.
    """
    size = os.stat(path).st_size
    with open(path, "rb") as handle:
        prefix = handle.read(8)
        if len(prefix) < 8:
            raise damaged(path, f"{size} bytes is too short for a safetensors file")
        length = int.from_bytes(prefix, "little")
        if length > MAX_HEADER_BYTES or 8 + length > size:
            raise damaged(
                path, f"header of {length} bytes in a file of {size} bytes (limit {MAX_HEADER_BYTES})"
            )
        raw = handle.read(length)
    try:
        tree = json.loads(raw.decode("utf-8"), object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as err:
        raise damaged(path, f"header is not valid JSON: {err}") from None
    if not isinstance(tree, dict):
        raise damaged(path, "header is not a JSON object")
    metadata = tree.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise damaged(path, "__metadata__ is not a table of texts")
    if len(tree) > MAX_TENSORS:
        raise damaged(path, f"{len(tree)} tensors (limit {MAX_TENSORS})")
    entries = {name: _entry(path, name, value, 8 + length) for name, value in tree.items()}
    _check_tiling(path, entries, 8 + length, size)
    return Header(entries, metadata)


def _entry(path: Path, name: str, value: Any, base: int) -> Entry:
    if not valid_name(name):
        raise damaged(path, f"tensor name {name[:80]!r} is empty, too long or has control characters")
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise damaged(path, f"tensor {name!r}: expected exactly the keys dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_SIZE:
        raise damaged(path, f"tensor {name!r}: dtype {dtype!r} is not one of {', '.join(ITEM_SIZE)}")
    if not _counts(shape) or len(shape) > MAX_RANK:
        raise damaged(path, f"tensor {name!r}: shape {shape!r} is not a list of at most {MAX_RANK} sizes")
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise damaged(path, f"tensor {name!r}: data_offsets {offsets!r} is not a begin and an end")
    needed = ITEM_SIZE[dtype]
    for dim in shape:
        needed *= dim
    if needed != offsets[1] - offsets[0] or max(shape, default=0) >= 2**63:
        raise damaged(
            path,
            f"tensor {name!r}: shape {shape} of {dtype} needs {needed} bytes, "
            f"data_offsets span {offsets[1] - offsets[0]}",
        )
    return Entry(name, dtype, tuple(shape), base + offsets[0], base + offsets[1])


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_tiling(path: Path, entries: dict[str, Entry], base: int, size: int) -> None:
    """Tensors must cover the data exactly: no gap, no overlap, no tail."""
    position = base
    for entry in sorted(entries.values(), key=lambda item: (item.start, item.end)):
        if entry.start != position:
            what = "overlaps the tensor before it" if entry.start < position else "leaves a gap before it"
            raise damaged(path, f"tensor {entry.name!r} {what} (byte {entry.start}, expected {position})")
        position = entry.end
    if position != size:
        what = "is cut off" if position > size else "has bytes that belong to no tensor"
        raise damaged(path, f"the file {what}: {size} bytes, the tensors end at {position}")
