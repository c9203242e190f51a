"""Lazy, read-only access to the tensors of a checkpoint, whatever its format."""

from __future__ import annotations

import json
import mmap
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np

from mindferry.errors import MindferryError
from mindferry.weights.header import Entry, damaged, no_duplicates, read_header

Shape = tuple[int, ...]

NUMPY_DTYPE: Final[dict[str, np.dtype[Any]]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
SAFETENSORS_DTYPE: Final = {dtype.name: name for name, dtype in NUMPY_DTYPE.items()}

MAX_INDEX_BYTES: Final = 100_000_000
_SHARD_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,250}\.(safetensors|bin)")


class TensorStore(ABC):
    """Named tensors that are read one at a time.

    `warnings` lists what is odd about the files but does not stop reading.
    """

    warnings: list[str]

    @abstractmethod
    def names(self) -> list[str]:
        """All tensor names, in the order of the files."""

    @abstractmethod
    def shape(self, name: str) -> Shape:
        """Sizes of the dimensions."""

    @abstractmethod
    def dtype(self, name: str) -> np.dtype[Any]:
        """Element type as stored (bfloat16 is ml_dtypes' own)."""

    @abstractmethod
    def read(self, name: str) -> np.ndarray:
        """The tensor, read-only; it may be a view of the file that lives as long as the store."""

    def release(self, name: str) -> None:  # noqa: B027 - most stores have nothing to give back
        """Tell the store that `name` was read for the last time for now."""

    @abstractmethod
    def location(self, name: str) -> Path:
        """The file the tensor lies in, for messages."""


class MemoryStore(TensorStore):
    """Tensors that are made on demand by functions; shapes and dtypes are known beforehand.

    Args:
        tensors: name -> (shape, dtype, function that returns the array).
        path: what to name in messages.
    """

    def __init__(
        self, tensors: Mapping[str, tuple[Shape, np.dtype[Any], Callable[[], np.ndarray]]], path: Path
    ) -> None:
        self._tensors = dict(tensors)
        self._path = path
        self.warnings = []

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, np.ndarray], path: Path = Path("memory")) -> MemoryStore:
        """A store over arrays that are already there."""
        return cls({n: (a.shape, a.dtype, lambda a=a: a) for n, a in arrays.items()}, path)  # type: ignore[misc]

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> Shape:
        return self._tensors[name][0]

    def dtype(self, name: str) -> np.dtype[Any]:
        return self._tensors[name][1]

    def read(self, name: str) -> np.ndarray:
        return self._tensors[name][2]()

    def location(self, name: str) -> Path:
        return self._path


class SafetensorsStore(TensorStore):
    """The tensors of one safetensors file, or of the shards that an index names.

    Files are mapped into memory, so reading a tensor costs no copy; `release` gives its pages back.
    """

    def __init__(self, files: list[Path]) -> None:
        self.warnings = []
        self._files = files
        self._entries: dict[str, tuple[int, Entry]] = {}
        self._maps: dict[int, mmap.mmap] = {}
        self.metadata: dict[str, str] = {}
        for number, path in enumerate(files):
            header = read_header(path)
            self.metadata.update(header.metadata)
            for name, entry in header.entries.items():
                if name in self._entries:
                    self._resolve_double(name, number, entry)
                else:
                    self._entries[name] = (number, entry)

    @classmethod
    def open_index(cls, index: Path) -> SafetensorsStore:
        """Open all shards of `*.safetensors.index.json` and hold them against its table, both ways."""
        stated: list[int] = []
        table = read_index(index, stated)
        store = cls([inside(index.parent, name) for name in sorted(set(table.values()))])
        held = sum(store._entries[name][1].nbytes for name in store.names())
        if stated and stated[0] != held:
            store.warnings.append(f"{index.name}: total_size is {stated[0]}, the shards hold {held} bytes")
        _check_index(
            index, table, {name: store.location(name).name for name in store.names()}, store.warnings
        )
        return store

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def names(self) -> list[str]:
        return list(self._entries)

    def shape(self, name: str) -> Shape:
        return self._entries[name][1].shape

    def dtype(self, name: str) -> np.dtype[Any]:
        return NUMPY_DTYPE[self._entries[name][1].dtype]

    def read(self, name: str) -> np.ndarray:
        number, entry = self._entries[name]
        return self._view(number, entry)

    def release(self, name: str) -> None:
        number, entry = self._entries[name]
        mapped = self._maps.get(number)
        if mapped is None or not hasattr(mmap, "MADV_DONTNEED"):
            return
        start = entry.start - entry.start % mmap.PAGESIZE
        if entry.end > start:
            mapped.madvise(mmap.MADV_DONTNEED, start, entry.end - start)

    def location(self, name: str) -> Path:
        return self._files[self._entries[name][0]]

    def _view(self, number: int, entry: Entry) -> np.ndarray:
        dtype = NUMPY_DTYPE[entry.dtype]
        if not entry.nbytes:
            return np.empty(entry.shape, dtype)
        if number not in self._maps:
            with open(self._files[number], "rb") as handle:
                self._maps[number] = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        flat = np.frombuffer(
            self._maps[number], dtype=dtype, count=entry.nbytes // dtype.itemsize, offset=entry.start
        )
        return flat.reshape(entry.shape)

    def _resolve_double(self, name: str, number: int, entry: Entry) -> None:
        """Two shards hold the same name: harmless only when they hold the same bytes."""
        first_number, first = self._entries[name]
        same = same_bits(self._view(first_number, first), self._view(number, entry))
        here, there = self._files[first_number].name, self._files[number].name
        if not same:
            raise damaged(
                self._files[number],
                f"tensor {name!r} is also in {here}, with other contents",
                id="weights.double-tensor",
            )
        self.warnings.append(f"tensor {name!r} is stored twice with equal contents: in {here} and {there}")


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """True when type, shape and every bit agree (NaNs compare by their bits, -0 differs from 0)."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    flat = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (a, b)]
    return bool(np.array_equal(flat[0], flat[1]))


def inside(root: Path, name: str) -> Path:
    """The file `name` of directory `root`, after checking that it is a file of that directory.

    A symbolic link may only lead to a file inside
    `root` or, as in the Hugging Face cache (snapshots/<revision>/ -> blobs/), to its blob folder.

    Raises:
        MindferryError: the file is missing, or it leads out of the directory.
    """
    if not _SHARD_NAME.fullmatch(name):
        raise damaged(
            root,
            f"the index names {name[:120]!r}, which is not a plain file name",
            id="weights.bad-shard-name",
        )
    path = root / name
    if not path.exists():
        raise MindferryError(
            f"{path}: the file is missing",
            remedy="fetch the missing file; nothing was written",
            id="weights.missing-shard",
        )
    check_link(root, path)
    return path


def check_link(root: Path, path: Path) -> None:
    """Refuse `path` when it is not a regular file or leads out of `root` (see `inside`)."""
    real, home = path.resolve(), root.resolve()
    allowed = [home]
    if home.parent.name == "snapshots":
        allowed.append(home.parent.parent / "blobs")
    if not any(real.is_relative_to(place) for place in allowed):
        raise MindferryError(
            f"{path}: the link leads out of the directory, to {real}",
            remedy="put the file itself into the directory",
            id="weights.link-outside",
        )
    if not real.is_file():
        raise MindferryError(f"{path}: not a regular file", remedy="remove it", id="weights.not-a-file")


def read_index(index: Path, stated: list[int] | None = None) -> dict[str, str]:
    """The `weight_map` of an index file: tensor name -> shard file name.

    Args:
        stated: gets the index's total_size in bytes, where it has one.
    """
    if index.stat().st_size > MAX_INDEX_BYTES:
        raise damaged(index, f"larger than {MAX_INDEX_BYTES} bytes")
    try:
        tree = json.loads(index.read_text("utf-8"), object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as err:
        raise damaged(index, f"not valid JSON: {err}") from None
    table = tree.get("weight_map") if isinstance(tree, dict) else None
    if not isinstance(table, dict) or not table or not all(isinstance(v, str) for v in table.values()):
        raise damaged(index, "expected an object with a table 'weight_map' of tensor name -> file name")
    metadata = tree.get("metadata")
    size = metadata.get("total_size") if isinstance(metadata, dict) else None
    if stated is not None and isinstance(size, (int, float)) and not isinstance(size, bool):
        stated.append(int(size) if size == size and abs(size) < 2**63 else -1)
    bad = next((name for name in table.values() if not _SHARD_NAME.fullmatch(name)), None)
    if bad is not None:  # names from a file nobody vouches for: never paths
        raise damaged(
            index,
            f"names the file {bad[:120]!r}, which is not a plain file name",
            id="weights.bad-shard-name",
        )
    missing = sorted({name for name in table.values() if not (index.parent / name).exists()})
    if missing:
        lost = sorted(tensor for tensor, name in table.items() if name in missing)
        raise MindferryError(
            f"{index}: {len(missing)} of {len(set(table.values()))} shards are missing: "
            f"{listing(missing)}; with them {len(lost)} tensors: {listing(lost)}",
            remedy="fetch the missing files; nothing was written",
            id="weights.missing-shard",
        )
    return table


def check_listed(index: Path, table: Iterable[str], found: Iterable[str], warnings: list[str]) -> None:
    """Every tensor that the index lists is in a shard; those of the shards that it does not list are a warning.

    Raises:
        MindferryError: a listed tensor is in no shard.
    """
    listed, there = list(table), set(found)
    ghosts = [name for name in listed if name not in there]
    if ghosts:
        raise damaged(
            index,
            f"{len(ghosts)} tensors are listed but in no shard: {listing(ghosts)}",
            id="weights.ghost-tensor",
        )
    unlisted = sorted(there - set(listed))
    if unlisted:
        warnings.append(
            f"{index.name}: {len(unlisted)} tensors of the shards are not listed: {listing(unlisted)}"
        )


def _check_index(index: Path, table: dict[str, str], found: dict[str, str], warnings: list[str]) -> None:
    check_listed(index, table, found, warnings)
    elsewhere = [name for name, file in table.items() if found[name] != file]
    if elsewhere:
        warnings.append(
            f"{index.name}: {len(elsewhere)} tensors lie in another shard than listed: {listing(elsewhere)}"
        )
    beside = sorted(
        path.name for path in index.parent.glob("model-*-of-*.safetensors") if path.name not in table.values()
    )
    if beside:
        warnings.append(f"{index.name}: {len(beside)} files beside it are not listed: {listing(beside)}")


def listing(names: list[str], limit: int = 6) -> str:
    """The first few names, and how many more there are."""
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest} more" if rest > 0 else "")
