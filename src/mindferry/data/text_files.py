"""Plain text: every file one document, as chunks of valid Unicode."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mindferry.data.compressed import blocks
from mindferry.errors import UsageError

_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)

# First bytes of what is often taken for text by mistake.
_NO_TEXT = {
    b"\x1f\x8b": "gzip (expected a name that ends in .gz)",
    b"\x28\xb5\x2f\xfd": "zstd (expected a name that ends in .zst)",
    b"\xfd7zXZ\x00": "xz",
    **{b"BZh%d1AY&SY" % level: "bzip2" for level in range(1, 10)},
    b"PK\x03\x04": "a zip archive",
    b"PAR1": "parquet (expected a name that ends in .parquet)",
    b"ARROW1": "arrow (expected a name that ends in .arrow)",
    b"%PDF-": "PDF",
    b"\x93NUMPY": "a numpy array",
    b"MMIDIDX\x00": "a Megatron index (expected a name that ends in .idx)",
    b"SQLite format 3\x00": "an SQLite database",
}

# Share of zero bytes in the first block above which it is no text: UTF-16 without its mark has about a half.
_ZEROS = 0.1

# Surrogates are no characters: surrogateescape makes U+DC80..U+DCFF of bytes that are not UTF-8, and JSON may
# spell any of them out.
_SURROGATES = dict.fromkeys(range(0xD800, 0xE000), "\ufffd")


class Chunk(NamedTuple):
    """Text, how many characters of it stand for invalid bytes, and how many bytes of the file it took."""

    text: str
    invalid: int
    read: int


def clean(text: str) -> tuple[str, int]:
    """`text` with each surrogate replaced by U+FFFD, and their number."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        replaced = text.translate(_SURROGATES)
        return replaced, sum(old != new for old, new in zip(text, replaced, strict=True))
    return text, 0


def check_first(path: Path, block: bytes) -> None:
    """Refuse what cannot be text by its first block.

    Raises:
        UsageError: UTF-16, or another format by its first bytes.
    """
    for magic, name in _NO_TEXT.items():
        if block.startswith(magic):
            raise UsageError(
                f"{path}: is {name}, expected text",
                remedy="decompress or convert it, or rename it",
                id="data.encoding",
            )
    if block.startswith(_UTF16):
        raise UsageError(f"{path}: is UTF-16, expected UTF-8", remedy=_convert(path), id="data.encoding")
    zeros = block.count(0) / max(len(block), 1)
    if zeros > _ZEROS:
        raise UsageError(
            f"{path}: {zeros:.0%} of its first {len(block)} bytes are zero: is UTF-16 without its mark, or no text",
            remedy=f"if it is UTF-16: {_convert(path)}",
            id="data.encoding",
        )


def _convert(path: Path) -> str:
    return f"convert it: iconv -f UTF-16 -t UTF-8 {path} > converted.txt"


def text_chunks(path: Path) -> Iterator[Chunk]:
    """The text of a file in chunks of some hundred thousand characters.

    A leading byte-order mark is dropped, line ends stay as they are, every byte that is not UTF-8 becomes one
    U+FFFD and is counted.

    Raises:
        UsageError: unreadable, UTF-16, or another format than text.
        MindferryError: damaged compressed data.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")
    first = True
    for block, read in blocks(path):
        if first:
            check_first(path, block)
        first = False
        yield Chunk(*clean(decoder.decode(block)), read)
    yield Chunk(*clean(decoder.decode(b"", final=True)), 0)
