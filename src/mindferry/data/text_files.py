"""Plain text: every file one document, as chunks of valid Unicode."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mindferry.data.compressed import blocks
from mindferry.errors import UsageError

_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)

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


def text_chunks(path: Path) -> Iterator[Chunk]:
    """The text of a file in chunks of some hundred thousand characters.

    A leading byte-order mark is dropped, line ends stay as they are, every byte that is not UTF-8 becomes one
    U+FFFD and is counted.

    Raises:
        UsageError: unreadable, or UTF-16.
        MindferryError: damaged compressed data.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")
    first = True
    for block, read in blocks(path):
        if first and block.startswith(_UTF16):
            raise UsageError(
                f"{path}: is UTF-16, expected UTF-8",
                remedy=f"convert it: iconv -f UTF-16 -t UTF-8 {path} > converted.txt",
                id="data.encoding",
            )
        first = False
        yield Chunk(*clean(decoder.decode(block)), read)
    yield Chunk(*clean(decoder.decode(b"", final=True)), 0)
