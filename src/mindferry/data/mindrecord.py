"""MindRecord files: written for mindformers' CausalLanguageModelDataset, inspected before anything trusts them.

Layout of a file (mindspore 2.9.0, version "3.0"): u64 length of the header, the header as JSON, zeros up to
`header_size`; then pages of `page_size` bytes, the last one cut short. Beside it lies an SQLite index, NAME.db,
with one row a sample.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mindferry.data.packing import Row
from mindferry.errors import MindferryError, UsageError, printable

# What mindformers' GPTModel takes, all int32; labels are input_ids moved on by one token.
COLUMNS = ("input_ids", "labels", "loss_mask", "position_ids")

_HEADER_MAX = 1 << 27  # FileWriter.set_header_size takes no more
_PAGE_DEFAULT, _PAGE_MAX = 1 << 25, 1 << 28

# Fixed cost of a file: the header, and pages that are filled up.
_FILE_OVERHEAD = (1 << 24) + 2 * _PAGE_DEFAULT
# Index row in the .db, raw page entry and the lengths of the columns.
_ROW_OVERHEAD = 128

_BATCH_BYTES = 1 << 24


def worst_case_bytes(sequences: int, seq_length: int) -> int:
    """Upper bound of what `write_mindrecord` puts on the disk (integers are stored narrower where they can)."""
    return _FILE_OVERHEAD + sequences * (len(COLUMNS) * 4 * seq_length + _ROW_OVERHEAD)


def write_mindrecord(path: Path, rows: Iterable[Row], seq_length: int) -> int:
    """Write `rows` as COLUMNS to `path` and `path`.db; returns their number.

    The file stores its own base name: move it anywhere, but do not rename it.

    Raises:
        UsageError: seq_length is too large for a MindRecord page.
        OSError, RuntimeError: the disk is full, or mindspore cannot write.
    """
    from mindspore.mindrecord import FileWriter

    row_bytes = len(COLUMNS) * (4 * seq_length + 8)
    if row_bytes > _PAGE_MAX:
        raise UsageError(
            f"seq_length: found {seq_length}, expected at most {(_PAGE_MAX // len(COLUMNS) - 8) // 4} for a "
            "MindRecord row",
            id="data.seq-length",
        )
    writer = FileWriter(str(path), shard_num=1, overwrite=True)
    if row_bytes > _PAGE_DEFAULT // 2:
        writer.set_page_size(_PAGE_MAX)
    writer.add_schema({name: {"type": "int32", "shape": [seq_length]} for name in COLUMNS}, "mindferry")
    positions = np.arange(seq_length, dtype=np.int32)
    written = 0
    each = iter(rows)
    while batch := list(itertools.islice(each, max(1, min(256, _BATCH_BYTES // row_bytes)))):
        writer.write_raw_data([dict(zip(COLUMNS, (*row, positions), strict=True)) for row in batch])
        written += len(batch)
    writer.commit()
    return written


@dataclass(frozen=True)
class Column:
    """Name, dtype ("int32", "bytes", ...) and shape of a column; shape None: a plain value, -1: free length."""

    name: str
    dtype: str
    shape: tuple[int, ...] | None


@dataclass(frozen=True)
class MindRecordInfo:
    """What a MindRecord file says of itself, checked against its size and its index."""

    path: Path
    rows: int
    columns: dict[str, Column]


def damaged(path: Path, what: str) -> MindferryError:
    return MindferryError(
        f"{path}: {what}",
        cause="the file is cut short, overwritten or no MindRecord",
        remedy="write it again, or copy it anew together with its .db",
        id="mindrecord.damaged",
    )


def header_of(path: Path) -> tuple[dict[str, Any], int]:
    """The JSON header and the file's size."""
    try:
        with open(path, "rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            prefix = handle.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or not 2 <= length <= min(_HEADER_MAX, size - 8):
                raise damaged(path, f"header length {length} at byte 0 does not fit a file of {size} bytes")
            raw = handle.read(length)
    except OSError as err:
        raise UsageError(f"{path}: cannot be read: {err.strerror}", id="mindrecord.unreadable") from None
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError):
        raise damaged(path, "header at byte 8 is no JSON") from None
    if not isinstance(header, dict):
        raise damaged(path, "header at byte 8 is no JSON object")
    return header, size


def _natural(path: Path, where: str, mapping: Any, key: str) -> int:
    value = mapping.get(key) if isinstance(mapping, dict) else None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 62:
        raise damaged(path, f"header: {where}{key}: found {printable(value)[:40]}, expected a natural number")
    return value


def _check_pages(path: Path, header: dict[str, Any], size: int) -> int:
    """The size equation; returns the number of samples the pages hold."""
    header_size = _natural(path, "", header, "header_size")
    page_size = _natural(path, "", header, "page_size")
    pages = header.get("page")
    if not isinstance(pages, list) or not pages:
        raise damaged(path, "header: page: found none")
    last = _natural(path, f"page[{len(pages) - 1}].", pages[-1], "page_size")
    expected = header_size + (len(pages) - 1) * page_size + last
    if last > page_size or size != expected:
        raise damaged(path, f"found {size} bytes, expected {expected} by its header")
    return max(_natural(path, f"page[{i}].", page, "end_row_id") for i, page in enumerate(pages))


def _columns(path: Path, header: dict[str, Any]) -> dict[str, Column]:
    schemas = header.get("schema")
    first = schemas[0] if isinstance(schemas, list) and schemas else None
    fields = first.get("schema") if isinstance(first, dict) else None
    if not isinstance(fields, dict) or not fields:
        raise damaged(path, "header: schema: found none")
    columns = {}
    for name, field in fields.items():
        dtype = field.get("type") if isinstance(field, dict) else None
        shape = field.get("shape") if isinstance(field, dict) else None
        whole = isinstance(shape, list) and all(type(n) is int and n >= -1 for n in shape)
        if not isinstance(dtype, str) or not (shape is None or whole):
            raise damaged(path, f"header: schema.{printable(name)[:60]}: no type and shape")
        columns[name] = Column(name, dtype, None if shape is None else tuple(shape))
    return columns


@contextlib.contextmanager
def opened_index(path: Path) -> Iterator[sqlite3.Connection]:
    """The SQLite index beside `path`, read-only; what sqlite finds wrong with it becomes a MindferryError.

    Raises:
        UsageError: it is missing.
    """
    index = path.with_name(path.name + ".db")
    if not index.is_file():
        raise UsageError(
            f"{index}: missing; a MindRecord is two files",
            remedy=f"copy {index.name} beside {path.name}, or write both again",
            id="mindrecord.no-index",
        )
    try:
        with contextlib.closing(
            sqlite3.connect(f"{index.resolve().as_uri()}?mode=ro", uri=True)
        ) as connection:
            yield connection
    except (sqlite3.Error, UnicodeDecodeError) as err:  # sqlite quotes damaged bytes in its message
        raise damaged(index, f"no index of a MindRecord: {err}") from None


def _index_rows(path: Path) -> int:
    with opened_index(path) as connection:
        (rows,) = connection.execute("SELECT COUNT(*) FROM INDEXES").fetchone()
    return int(rows)


def inspect_mindrecord(path: Path) -> MindRecordInfo:
    """Columns and number of rows of a MindRecord, without loading mindspore.

    Raises:
        UsageError: the file or its .db is missing.
        MindferryError: the sizes, the header and the index do not agree.
    """
    if not path.is_file():
        raise UsageError(f"{path}: no such file", remedy="check the path", id="mindrecord.missing")
    header, size = header_of(path)
    rows = _check_pages(path, header, size)
    columns = _columns(path, header)
    indexed = _index_rows(path)
    if indexed != rows:
        raise damaged(path, f"holds {rows} rows, its .db lists {indexed}")
    return MindRecordInfo(path, rows, columns)


def check_mindrecord(path: Path, columns: Sequence[str], length: int) -> MindRecordInfo:
    """Check that `path` has int32 `columns` of `length` tokens, as a run.yaml asks; other columns do not matter.

    Raises:
        UsageError: a missing column, another dtype, another length.
        MindferryError: a damaged file.
    """
    info = inspect_mindrecord(path)
    missing = [name for name in columns if name not in info.columns]
    if missing:
        raise UsageError(
            f"{path}: has no column {', '.join(missing)} (found {', '.join(printable(n) for n in info.columns)})",
            cause="train_dataset.input_columns asks for it",
            remedy="change input_columns, or write the data again",
            id="mindrecord.columns",
        )
    for name in columns:
        column = info.columns[name]
        if column.dtype != "int32":
            raise UsageError(
                f"{path}: column {name}: found {column.dtype}, expected int32", id="mindrecord.dtype"
            )
        shape = column.shape if column.shape not in (None, (-1,)) else _first_row_shape(path, name)
        if shape != (length,):
            raise UsageError(
                f"{path}: column {name}: found rows of shape {list(shape or ())}, expected [{length}]",
                remedy="set seq_length to the length of the rows, or write the data again",
                id="mindrecord.length",
            )
    return info


def _first_row_shape(path: Path, name: str) -> tuple[int, ...]:
    """Shape of column `name` in the first row, where the schema leaves it open."""
    from mindferry.data.mindrecord_rows import integer_rows

    for row in integer_rows(path, [name]):
        return (len(row[name]),)
    return ()
