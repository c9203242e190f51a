"""Files read as a stream of bytes, gzip and zstd undone on the way; memory stays bounded."""

from __future__ import annotations

import contextlib
import gzip
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from mindferry.errors import MindferryError, UsageError

COMPRESSION = {".gz": "gzip", ".zst": "zstd"}

READ_BYTES = 1 << 18


def plain_name(path: Path) -> str:
    """Name of `path` in lower case, without the suffix of its compression."""
    name = path.name.lower()
    for suffix in COMPRESSION:
        name = name.removesuffix(suffix)
    return name


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, IO[bytes]]]:
    """(stream of plain bytes, the raw file below it)."""
    kind = COMPRESSION.get(path.suffix.lower())
    with open(path, "rb") as raw:
        if kind == "gzip":
            with gzip.GzipFile(fileobj=raw) as stream:
                yield stream, raw
        elif kind == "zstd":
            try:
                import pyarrow
            except ImportError:
                raise UsageError(
                    f"{path}: reading zstd needs pyarrow",
                    remedy="pip install pyarrow, or decompress the file",
                ) from None
            with pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), "zstd") as stream:
                yield stream, raw
        else:
            yield raw, raw


def blocks(path: Path, size: int = READ_BYTES) -> Iterator[tuple[bytes, int]]:
    """Blocks of plain bytes, each with the bytes of the file that were consumed for it.

    Raises:
        UsageError: the file cannot be read.
        MindferryError: its compressed data is damaged or cut short.
    """
    try:
        with _opened(path) as (stream, raw):
            before = 0
            while block := stream.read(size):
                at = raw.tell()
                yield bytes(block), at - before
                before = at
    except (EOFError, zlib.error, gzip.BadGzipFile) as err:
        raise _damaged(path, err) from None
    except OSError as err:
        if err.errno is None:  # pyarrow's
            raise _damaged(path, err) from None
        raise UsageError(
            f"{path}: cannot be read: {err.strerror or err}", remedy="check the file", id="data.corpus"
        ) from None


def _damaged(path: Path, err: BaseException) -> MindferryError:
    return MindferryError(
        f"{path}: compressed data is damaged: {' '.join(str(err).split())[:120]}",
        remedy="fetch the file anew",
        id="data.compressed",
    )


def file_size(path: Path) -> int:
    """Size in bytes as it lies on the disk.

    Raises:
        UsageError: it cannot be looked at.
    """
    try:
        return os.stat(path).st_size
    except OSError as err:
        raise UsageError(f"{path}: cannot be read: {err.strerror}", id="data.corpus") from None
