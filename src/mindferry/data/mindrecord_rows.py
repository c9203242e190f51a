"""Rows of a MindRecord, read without mindspore: its C++ reader ends the process at a damaged page.

A row is a block in a page of kind BLOB_DATA: u64 length (little endian), then its array columns in the order of
`blob_fields`, each behind a u64 length (big endian) where there are several. An integer column is compressed:
u32 count (big endian), two bits an element (first element highest) for its width of 1, 2, 4 or 8 bytes, then the
elements, signed and little endian. Which block belongs to which row stands in the SQLite index.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mindferry.data.mindrecord import MindRecordInfo, damaged, header_of, inspect_mindrecord, opened_index

if TYPE_CHECKING:
    from numpy.typing import NDArray

_WIDTHS: tuple[np.dtype[Any], ...] = (np.dtype("<i1"), np.dtype("<i2"), np.dtype("<i4"), np.dtype("<i8"))
_VERSION = "3.0"
INTEGERS = ("int32", "int64")


def _integers(path: Path, row: int, raw: bytes) -> NDArray[np.int64]:
    """The elements of a compressed integer column."""
    count = int.from_bytes(raw[:4], "big")
    bits = raw[4 : 4 + -(-count // 4)]
    if len(raw) < 4 or len(bits) < -(-count // 4):
        raise damaged(path, f"row {row}: {count} elements do not fit a column of {len(raw)} bytes")
    packed = np.frombuffer(bits, np.uint8)
    kinds = np.stack([packed >> 6, packed >> 4 & 3, packed >> 2 & 3, packed & 3], axis=1).reshape(-1)[:count]
    ends = np.cumsum(np.left_shift(1, kinds.astype(np.int64)))
    body = np.frombuffer(raw, np.uint8, offset=4 + len(bits))
    if len(body) != (int(ends[-1]) if count else 0):
        raise damaged(path, f"row {row}: the elements of a column do not fill its {len(raw)} bytes")
    values = np.empty(count, np.int64)
    for kind, dtype in enumerate(_WIDTHS):
        chosen = np.flatnonzero(kinds == kind)
        if len(chosen):
            at = (ends[chosen] - dtype.itemsize)[:, None] + np.arange(dtype.itemsize)
            values[chosen] = np.frombuffer(body[at].tobytes(), dtype)
    return values


class _Blocks:
    """The pages of one file, mapped."""

    def __init__(self, path: Path) -> None:
        header, _ = header_of(path)
        if header.get("version") != _VERSION:
            raise damaged(path, f"header: version: found {header.get('version')!r}, expected {_VERSION!r}")
        self.path = path
        self._base, self._page_size = header["header_size"], header["page_size"]
        self._sizes = {
            page.get("page_id"): page.get("page_size")
            for page in header["page"]
            if isinstance(page, dict) and page.get("page_type") == "BLOB_DATA"
        }
        names = header["schema"][0].get("blob_fields")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise damaged(path, "header: blob_fields: no list of names")
        self.names: list[str] = names
        self._data = np.memmap(path, np.uint8, mode="r")

    def columns(self, row: int, page: Any, first: Any, last: Any) -> dict[str, bytes]:
        """name -> raw bytes of the block from `first` to `last` in `page`."""
        size = self._sizes.get(page) if isinstance(page, int) else None
        whole = all(isinstance(n, int) for n in (first, last, size))
        if not whole or not 0 <= first <= last - 8 <= min(size, self._page_size) - 8:
            raise damaged(self.path, f"row {row}: its .db places it at {first} to {last} of page {page}")
        start = self._base + page * self._page_size + first
        block = self._data[start : start + last - first].tobytes()
        if int.from_bytes(block[:8], "little") != len(block) - 8 or len(block) != last - first:
            raise damaged(
                self.path, f"row {row}: byte {start}: no block of {last - first} bytes begins there"
            )
        if len(self.names) == 1:
            return {self.names[0]: block[8:]}
        found, at = {}, 8
        for name in self.names:
            length = int.from_bytes(block[at : at + 8], "big")
            if at + 8 + length > len(block):
                raise damaged(self.path, f"row {row}: column {name} reaches beyond its block")
            found[name] = block[at + 8 : at + 8 + length]
            at += 8 + length
        if at != len(block):
            raise damaged(self.path, f"row {row}: {len(block) - at} bytes behind its last column")
        return found


def integer_rows(path: Path, names: Sequence[str]) -> Iterator[dict[str, NDArray[np.int64]]]:
    """The integer columns `names` of each row, in the order of the file.

    Raises:
        UsageError: the file or its .db is missing.
        MindferryError: damaged; names the row.
    """
    info: MindRecordInfo = inspect_mindrecord(path)
    blocks = _Blocks(path)
    for name in names:
        column = info.columns.get(name)
        if name not in blocks.names or column is None or column.dtype not in INTEGERS:
            raise damaged(path, f"header: column {name} is no array of integers")
    where = "SELECT PAGE_ID_BLOB, PAGE_OFFSET_BLOB, PAGE_OFFSET_BLOB_END FROM INDEXES ORDER BY ROW_ID"
    with opened_index(path) as connection:
        cursor = connection.execute(where)
        for row in range(info.rows):
            place = cursor.fetchone()
            if place is None:
                raise damaged(path, f"row {row}: not in its .db")
            raw = blocks.columns(row, *place)
            yield {name: _integers(path, row, raw[name]) for name in names}
