"""Sources that hold ids already: Megatron .bin/.idx, nanoGPT's .bin, MindRecord."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mindferry.data.megatron import as_ids, open_megatron
from mindferry.data.mindrecord import inspect_mindrecord
from mindferry.data.mindrecord_rows import INTEGERS, integer_rows
from mindferry.errors import MindferryError, UsageError, printable

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Ids handed on in one piece.
_PIECE = 1 << 20

# nanoGPT's prepare.py writes uint16; others are possible where they are stated.
RAW_DTYPES: dict[str, np.dtype[Any]] = {
    "uint16": np.dtype("<u2"),
    "int32": np.dtype("<i4"),
    "uint32": np.dtype("<u4"),
}


class Ids(NamedTuple):
    """Part of a document of ids; `last` closes it. `read` counts bytes of the file."""

    name: str
    ids: NDArray[np.int64]
    last: bool
    read: int


def megatron_documents(prefix: Path) -> Iterator[Ids]:
    """Documents of a Megatron data set, as they are: the end-of-document tokens are in them already.

    Raises:
        UsageError, MindferryError: as `open_megatron` says.
    """
    data = open_megatron(prefix)
    for i in range(data.num_documents):
        first, last = int(data.documents[i]), int(data.documents[i + 1])
        name = f"{data.bin}: document {i}"
        for j in range(first, last):
            raw = data.sequence(j)
            for start in range(0, len(raw), _PIECE):
                part = raw[start : start + _PIECE]
                yield Ids(name, as_ids(part, name), False, part.nbytes)
        yield Ids(name, np.empty(0, np.int64), True, 0)


def raw_width(path: Path, dtype_name: str | None, vocab_size: int) -> None:
    """Refuse to take `path` for uint16, unless that was stated, where the vocabulary does not fit.

    Raises:
        UsageError: the width must be stated.
    """
    if dtype_name is None and vocab_size > 1 << 16:
        raise UsageError(
            f"{path}: uint16 ids, as nanoGPT writes them, cannot hold a vocabulary of {vocab_size}",
            cause="the file has no header that states its width",
            remedy=f"state it with --raw-dtype ({', '.join(RAW_DTYPES)})",
            id="data.raw-dtype",
        )


def _refuse_wider(path: Path, stream: NDArray[Any]) -> None:
    """Ids of four bytes, read as pairs of uint16: the second of each pair is 0, or 1 or 2 in large vocabularies."""
    low, high = stream[: 1 << 16 : 2], stream[1 : 1 << 16 : 2]
    few = len(high) >= 3 and not high.any() and low.any()
    many = len(high) >= 64 and int(high.max()) <= 2 and len(np.unique(low)) > 8
    if few or many:
        raise MindferryError(
            f"{path}: every second uint16 is {'0' if not high.any() else '0, 1 or 2'}: ids of four bytes",
            cause="the file has no header that states its width; nanoGPT writes uint16",
            remedy="state it: --raw-dtype int32, or uint16 if it is that all the same",
            id="data.raw-dtype",
        )


def raw_documents(path: Path, dtype_name: str | None, eod: int | None) -> Iterator[Ids]:
    """Documents of a file of nothing but ids (nanoGPT's train.bin); `eod` closes each and stays in it.

    `dtype_name` None: uint16, unless the ids look like wider ones.

    Raises:
        UsageError: unknown dtype, empty, or unreadable.
        MindferryError: the size is no multiple of the width, or the width is another.
    """
    stated, dtype_name = dtype_name is not None, dtype_name or "uint16"
    if dtype_name not in RAW_DTYPES:
        raise UsageError(
            f"raw dtype: found {dtype_name!r}, expected one of {', '.join(RAW_DTYPES)}", id="data.raw-dtype"
        )
    dtype = RAW_DTYPES[dtype_name]
    try:
        size = os.stat(path).st_size
        if size % dtype.itemsize:
            raise MindferryError(
                f"{path}: {size} bytes are no whole number of {dtype_name} ids",
                cause="the file has no header that states its width",
                remedy="state the right one with --raw-dtype",
                id="data.raw-dtype",
            )
        if not size:
            raise UsageError(f"{path}: empty", id="data.empty")
        stream = np.memmap(path, dtype=dtype, mode="r")
        if not stated:
            _refuse_wider(path, stream)
    except OSError as err:
        raise UsageError(f"{path}: cannot be read: {err.strerror}", id="data.corpus") from None
    document = 0
    for start in range(0, len(stream), _PIECE):
        part = np.asarray(stream[start : start + _PIECE]).astype(np.int64)
        ends = np.flatnonzero(part == eod) + 1 if eod is not None else np.empty(0, np.int64)
        begin = 0
        for end in ends.tolist():
            yield Ids(f"{path}: document {document}", part[begin:end], True, (end - begin) * dtype.itemsize)
            begin, document = end, document + 1
        if begin < len(part):
            yield Ids(
                f"{path}: document {document}", part[begin:], False, (len(part) - begin) * dtype.itemsize
            )
    yield Ids(f"{path}: document {document}", np.empty(0, np.int64), True, 0)


def mindrecord_rows(path: Path) -> Iterator[Ids]:
    """Rows of a MindRecord, each as one document of all its tokens.

    With labels: they must be input_ids moved on by one, and the row is input_ids and the last label. Without:
    input_ids is the row, one token longer than seq_length (the form of mindformers' old GPT-2, which shifts by
    itself).

    Raises:
        UsageError: no .db beside it, or no int32 input_ids.
        MindferryError: damaged, or labels that are shifted in another way.
    """
    info = inspect_mindrecord(path)
    column = info.columns.get("input_ids")
    if column is None or column.dtype not in INTEGERS:
        raise UsageError(
            f"{path}: no column input_ids of int32 (found {', '.join(map(printable, info.columns))})",
            id="mindrecord.columns",
        )
    share = path.stat().st_size // max(info.rows, 1)
    names = ["input_ids", *(["labels"] if "labels" in info.columns else [])]
    for i, row in enumerate(integer_rows(path, names)):
        yield Ids(f"{path}: row {i}", _row_tokens(path, i, row), True, share)


def _row_tokens(path: Path, number: int, row: dict[str, NDArray[np.int64]]) -> NDArray[np.int64]:
    inputs = row["input_ids"]
    if "labels" not in row:
        return inputs
    labels = row["labels"]
    if np.array_equal(labels[:-1], inputs[1:]) and len(labels) == len(inputs):
        return np.concatenate([inputs, labels[-1:]])
    if np.array_equal(labels, inputs):
        return inputs  # the old form writes them twice and shifts in the model
    raise MindferryError(
        f"{path}: row {number}: labels are neither input_ids nor input_ids moved on by one",
        cause="shifted twice, or not made for a language model",
        remedy="make the data again from the text",
        id="data.shift",
    )
