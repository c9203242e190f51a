"""Megatron's .bin/.idx token files: read without trust, written in one pass with bounded memory.

PREFIX.bin holds the ids, raw, back to back. PREFIX.idx (all little-endian): 9 bytes magic; u64 version 1; u8 dtype
code; u64 number of sequences n; u64 length d of the document index; n int32 lengths (tokens); n int64 byte
offsets into .bin; d int64 document bounds (sequence numbers, first 0, last n). A multimodal data set ends with n
more int8. The same layout is read by Megatron-LM and by mindformers' IndexedDataset.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from mindferry.errors import MindferryError, UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAGIC = b"MMIDIDX\x00\x00"
_COUNTS = struct.Struct("<9sQBQQ")
HEADER_BYTES = _COUNTS.size  # 34

DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
CODES = {dtype: code for code, dtype in DTYPES.items()}

# A sequence length is int32; a longer document becomes several sequences.
MAX_SEQUENCE = (1 << 31) - 1

# Elements looked at in one go: memory stays far below 100 MB whatever the size of the index.
_CHUNK = 1 << 20


def paths(prefix: Path) -> tuple[Path, Path]:
    """(PREFIX.bin, PREFIX.idx); `prefix` may itself end in .bin or .idx."""
    if prefix.suffix in (".bin", ".idx"):
        prefix = prefix.with_suffix("")
    return prefix.with_name(prefix.name + ".bin"), prefix.with_name(prefix.name + ".idx")


@dataclass(frozen=True)
class MegatronDataset:
    """An opened and checked pair of files.

    Attributes:
        dtype: of the ids in .bin.
        lengths: int32 [n], tokens of each sequence.
        pointers: int64 [n], byte offset of each sequence.
        documents: int64 [d], document i is sequences documents[i] to documents[i + 1] - 1.
        contiguous: the sequences lie in .bin in their order and without gaps.
    """

    bin: Path
    dtype: np.dtype[Any]
    lengths: NDArray[np.int32] = field(repr=False)
    pointers: NDArray[np.int64] = field(repr=False)
    documents: NDArray[np.int64] = field(repr=False)
    tokens: int
    contiguous: bool
    _data: NDArray[np.uint8] = field(repr=False)

    @property
    def num_documents(self) -> int:
        return len(self.documents) - 1

    def sequence(self, i: int) -> NDArray[Any]:
        """Ids of sequence `i` as they are stored (a view into the file)."""
        start, length = int(self.pointers[i]), int(self.lengths[i])
        raw: NDArray[Any] = np.frombuffer(self._data, dtype=self.dtype, count=length, offset=start)
        return raw

    def stream(self) -> NDArray[Any]:
        """All ids in one dimension (a view into the file).

        Raises:
            MindferryError: the sequences are not stored in their order.
        """
        if not self.contiguous:
            raise MindferryError(
                f"{self.bin}: sequences do not lie one after the other",
                remedy="rewrite it with `mindferry data`",
                id="megatron.order",
            )
        return np.frombuffer(self._data, dtype=self.dtype, count=self.tokens)

    def iter_documents(self) -> Iterator[NDArray[np.int64]]:
        """Ids of each document as int64.

        Raises:
            MindferryError: stored as floats that are no whole numbers.
        """
        for i in range(self.num_documents):
            first, last = int(self.documents[i]), int(self.documents[i + 1])
            parts = [self.sequence(j) for j in range(first, last)]
            raw = np.concatenate(parts) if parts else np.empty(0, self.dtype)
            ids: NDArray[np.int64] = as_ids(raw, f"{self.bin}: document {i}")
            yield ids


def as_ids(raw: NDArray[Any], where: str) -> NDArray[np.int64]:
    """`raw` as int64; floats must be whole numbers.

    Raises:
        MindferryError: names the first value that is none.
    """
    if raw.dtype.kind == "f":
        with np.errstate(invalid="ignore"):
            bad = ~(np.isfinite(raw) & (raw == np.floor(raw)) & (np.abs(raw) < 2.0**53))
        if bad.any():
            at = int(np.argmax(bad))
            raise MindferryError(
                f"{where}: found {raw[at]!r} at position {at}, expected a whole number", id="megatron.float"
            )
    return raw.astype(np.int64)


def _damaged(path: Path, byte: int, what: str) -> MindferryError:
    return MindferryError(
        f"{path}: byte {byte}: {what}",
        cause="the index is cut short, overwritten, or belongs to another .bin",
        remedy="copy both files anew, or make them again from the text",
        id="megatron.damaged",
    )


def _check_header(path: Path, raw: bytes, size: int) -> tuple[np.dtype[Any], int, int]:
    """The size equation, before anything is allocated: (dtype, n, d)."""
    if len(raw) < HEADER_BYTES:
        raise _damaged(path, 0, f"found {size} bytes, expected a header of {HEADER_BYTES}")
    magic, version, code, n, d = _COUNTS.unpack(raw)
    if magic != MAGIC:
        raise _damaged(path, 0, f"found {magic!r}, expected {MAGIC!r}: no Megatron index")
    if version != 1:
        raise _damaged(path, 9, f"version: found {version}, expected 1")
    if code not in DTYPES:
        raise _damaged(path, 17, f"dtype code: found {code}, expected one of {sorted(DTYPES)}")
    expected = HEADER_BYTES + 12 * n + 8 * d
    if n and size == expected + n:
        raise UsageError(
            f"{path}: a multimodal data set (a mode for each of {n} sequences)",
            remedy="only text is read",
            id="megatron.multimodal",
        )
    if size != expected:
        raise _damaged(
            path, 18, f"{n} sequences and {d} document bounds need {expected} bytes, the file has {size}"
        )
    if d == 0:
        raise _damaged(path, 26, "document bounds: found 0, expected at least 1")
    return DTYPES[code], n, d


def _check_documents(path: Path, documents: NDArray[np.int64], n: int) -> None:
    base = HEADER_BYTES + 12 * n
    if documents[0] != 0 or documents[-1] != n:
        raise _damaged(
            path, base, f"document bounds run from {documents[0]} to {documents[-1]}, not 0 to {n}"
        )
    for start in range(0, len(documents) - 1, _CHUNK):
        steps = np.diff(documents[start : start + _CHUNK + 1])
        if (steps < 0).any():
            at = start + int(np.argmax(steps < 0)) + 1
            raise _damaged(path, base + 8 * at, f"document bound {at} is smaller than the one before")


def _check_sequences(
    path: Path,
    index: tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]],
    width: int,
    bin_size: int,
) -> tuple[int, bool]:
    """Every sequence lies inside .bin; returns (tokens, contiguous)."""
    lengths, pointers, documents = index
    n = len(lengths)
    tokens, contiguous = 0, True
    for start in range(0, n, _CHUNK):
        length = lengths[start : start + _CHUNK].astype(np.int64)
        pointer = pointers[start : start + _CHUNK]
        # As floats, a pointer near 2^63 cannot wrap round; 2^53 bytes is beyond any file.
        end = pointer.astype(np.float64) + length.astype(np.float64) * width
        bad = (length < 0) | (pointer < 0) | (end > bin_size)
        if bad.any():
            at = start + int(np.argmax(bad))
            document = int(np.searchsorted(documents, at, side="right")) - 1
            where = f"sequence {at} (document {document})"
            if lengths[at] < 0:
                raise _damaged(path, HEADER_BYTES + 4 * at, f"{where}: length {lengths[at]}")
            raise _damaged(
                path,
                HEADER_BYTES + 4 * n + 8 * at,
                f"{where}: offset {pointers[at]} and {lengths[at]} tokens of {width} bytes do not lie inside "
                f"the {bin_size} bytes of the .bin",
            )
        expected = (tokens + np.cumsum(length) - length) * width
        contiguous = contiguous and bool((expected == pointer).all())
        tokens += int(length.sum())
    return tokens, contiguous


def open_megatron(prefix: Path) -> MegatronDataset:
    """Open PREFIX.bin and PREFIX.idx after checking all of the index against both sizes.

    Memory in use does not depend on what the index claims.

    Raises:
        UsageError: a file is missing, or it is a multimodal data set.
        MindferryError: the index is damaged; names the byte, and the sequence and document where it can.
    """
    data, index = paths(prefix)
    for path in (data, index):
        if not path.is_file():
            raise UsageError(
                f"{path}: no such file; a Megatron data set is a .bin and an .idx",
                remedy="give the path without ending, both files beside each other",
                id="megatron.missing",
            )
    try:
        with open(index, "rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            dtype, n, d = _check_header(index, handle.read(HEADER_BYTES), size)
        bin_size = data.stat().st_size
        mapped = np.memmap(index, dtype=np.uint8, mode="r")
        raw = np.memmap(data, dtype=np.uint8, mode="r") if bin_size else np.empty(0, np.uint8)
    except OSError as err:
        raise UsageError(
            f"{err.filename or prefix}: cannot be read: {err.strerror}", id="megatron.missing"
        ) from None
    lengths = np.frombuffer(mapped, "<i4", n, HEADER_BYTES)
    pointers = np.frombuffer(mapped, "<i8", n, HEADER_BYTES + 4 * n)
    documents = np.frombuffer(mapped, "<i8", d, HEADER_BYTES + 12 * n)
    _check_documents(index, documents, n)
    tokens, contiguous = _check_sequences(index, (lengths, pointers, documents), dtype.itemsize, bin_size)
    if contiguous and tokens * dtype.itemsize != bin_size:
        raise MindferryError(
            f"{data}: found {bin_size} bytes, expected {tokens * dtype.itemsize}: {tokens} tokens of "
            f"{dtype.itemsize} bytes by its .idx",
            cause="the .bin and the .idx do not belong together, or one was cut short",
            remedy="copy both files anew",
            id="megatron.sizes",
        )
    return MegatronDataset(data, dtype, lengths, pointers, documents, tokens, contiguous, raw)


@dataclass
class WriterState:
    """Where a writer stands: what must be in its files so that it can go on."""

    tokens: int = 0
    sequences: int = 0
    documents: int = 0
    open_length: int = 0


class MegatronWriter:
    """Writes documents, piece by piece; lengths wait on the disk until `finish` makes the index of them.

    Usage: `add(ids)` any number of times, then `end_document()`; at the end `finish(prefix)`. `sync()` returns a
    state from which `MegatronWriter(..., state=state)` goes on after a crash, however much was written since.
    """

    def __init__(self, directory: Path, name: str, dtype: Any, state: WriterState | None = None) -> None:
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in CODES:
            raise UsageError(f"Megatron files cannot hold {self.dtype}", id="megatron.dtype")
        self._directory, self._name = directory, name
        self.state = WriterState(**vars(state)) if state else WriterState()
        s = self.state
        self._data = self._open("tokens", s.tokens * self.dtype.itemsize)
        self._lengths = self._open("lengths", s.sequences * 4)
        self._documents = self._open("documents", s.documents * 8)

    def _open(self, what: str, keep: int) -> IO[bytes]:
        path = self._path(what)
        handle = open(path, "r+b" if keep else "wb")  # noqa: SIM115
        if os.fstat(handle.fileno()).st_size < keep:
            handle.close()
            raise MindferryError(f"{path}: shorter than its journal says", id="data.resume")
        if keep:
            handle.truncate(keep)
            handle.seek(keep)
        return handle

    def _path(self, what: str) -> Path:
        return self._directory / f"{self._name}.{what}"

    def add(self, ids: NDArray[Any]) -> None:
        """Append ids to the open document; the caller has checked that they fit the dtype."""
        self._data.write(ids.astype(self.dtype, copy=False).tobytes())
        s = self.state
        s.tokens += len(ids)
        s.open_length += len(ids)
        while s.open_length > MAX_SEQUENCE:
            self._close_sequence(MAX_SEQUENCE)

    def _close_sequence(self, length: int) -> None:
        self._lengths.write(struct.pack("<i", length))
        self.state.sequences += 1
        self.state.open_length -= length

    def end_document(self) -> None:
        """Close the document: its last sequence, and its bound."""
        self._close_sequence(self.state.open_length)
        self._documents.write(struct.pack("<q", self.state.sequences))
        self.state.documents += 1

    def sync(self) -> WriterState:
        """Bring everything to the disk; returns the state reached."""
        for handle in (self._data, self._lengths, self._documents):
            handle.flush()
            os.fsync(handle.fileno())
        return WriterState(**vars(self.state))

    def close(self) -> None:
        """Close the files as they are."""
        for handle in (self._data, self._lengths, self._documents):
            with contextlib.suppress(OSError):
                handle.close()

    def finish(self, prefix: Path) -> None:
        """Write PREFIX.idx and move the ids to PREFIX.bin."""
        self.sync()
        self.close()
        data, index = paths(prefix.with_name(prefix.name + ".bin"))
        s = self.state
        with open(index, "wb") as out:
            out.write(_COUNTS.pack(MAGIC, 1, CODES[self.dtype], s.sequences, s.documents + 1))
            lengths = self._path("lengths")
            for block in _blocks(lengths, "<i4"):
                out.write(block.tobytes())
            offset = 0
            for block in _blocks(lengths, "<i4"):
                ends = offset + np.cumsum(block.astype(np.int64)) * self.dtype.itemsize
                out.write((ends - block.astype(np.int64) * self.dtype.itemsize).astype("<i8").tobytes())
                offset = int(ends[-1])
            out.write(struct.pack("<q", 0))
            for block in _blocks(self._path("documents"), "<i8"):
                out.write(block.tobytes())
            out.flush()
            os.fsync(out.fileno())
        os.replace(self._path("tokens"), data)
        self.discard()

    def discard(self) -> None:
        """Close and remove the working files."""
        self.close()
        for what in ("tokens", "lengths", "documents"):
            self._path(what).unlink(missing_ok=True)


def _blocks(path: Path, dtype: str) -> Iterator[NDArray[Any]]:
    """The numbers in `path`, a chunk at a time."""
    width = np.dtype(dtype).itemsize
    with open(path, "rb") as handle:
        while raw := handle.read(_CHUNK * width):
            yield np.frombuffer(raw, dtype)
