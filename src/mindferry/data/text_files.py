"""Plain text: which files make a corpus, and their content as pieces of valid Unicode."""

from __future__ import annotations

import codecs
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mindferry.errors import UsageError

# What is taken from a directory. A file that is named itself may have any name.
TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst")

READ_BYTES = 1 << 18

_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)

# surrogateescape turns each byte that is not UTF-8 into one of U+DC80..U+DCFF.
_ESCAPED = dict.fromkeys(range(0xDC80, 0xDD00), "\ufffd")


@dataclass
class Utf8Count:
    """How many bytes were not UTF-8 so far."""

    invalid_bytes: int = 0


def corpus_files(corpus: list[Path], suffixes: tuple[str, ...] = TEXT_SUFFIXES) -> list[Path]:
    """The files of a corpus: named files as they are, directories recursively in the order of their paths.

    Hidden files and directories are passed over, directory links are not followed, and a file that is reached
    twice counts once.

    Raises:
        UsageError: a path does not exist, is no file or directory, or nothing was found at all.
    """
    if not corpus:
        raise UsageError("no corpus given", remedy="name text files or directories", id="data.corpus")
    found: dict[Path, Path] = {}
    for path in corpus:
        kind = _kind(path)
        if stat.S_ISDIR(kind):
            for file in _walk(path, suffixes):
                found.setdefault(file.resolve(), file)
        elif stat.S_ISREG(kind):
            found.setdefault(path.resolve(), path)
        else:
            raise UsageError(f"{path}: neither a file nor a directory", id="data.corpus")
    if not found:
        where = ", ".join(str(path) for path in corpus)
        raise UsageError(
            f"{where}: no files ending in {', '.join(suffixes)} in it",
            remedy="name the files themselves, or rename them",
            id="data.no-files",
        )
    return list(found.values())


def _kind(path: Path) -> int:
    try:
        return os.stat(path).st_mode
    except FileNotFoundError:
        raise UsageError(
            f"{path}: no such file or directory", remedy="check the path of the corpus", id="data.corpus"
        ) from None
    except (OSError, ValueError) as err:
        raise UsageError(f"{path}: cannot be read: {err}", id="data.corpus") from None


def _walk(root: Path, suffixes: tuple[str, ...]) -> Iterator[Path]:
    def refuse(err: OSError) -> None:
        raise UsageError(f"{err.filename}: cannot be listed: {err.strerror}", id="data.corpus")

    files = []
    for directory, subdirectories, names in os.walk(root, onerror=refuse):
        subdirectories[:] = [name for name in subdirectories if not name.startswith(".")]
        for name in names:
            path = Path(directory) / name
            if not name.startswith(".") and name.lower().endswith(suffixes) and path.is_file():
                files.append(path)
    # By path parts as bytes: the same on every machine, whatever its locale and file system say.
    yield from sorted(files, key=lambda file: [os.fsencode(part) for part in file.parts])


def decoded_pieces(path: Path, count: Utf8Count) -> Iterator[tuple[str, int]]:
    """The text of `path` as (piece, bytes read) of some hundred thousand characters each.

    A leading byte-order mark is dropped, line ends stay as they are, every byte that is not UTF-8 becomes one
    U+FFFD and is counted.

    Raises:
        UsageError: unreadable, or UTF-16.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")
    try:
        with open(path, "rb") as handle:
            first = True
            while True:
                block = handle.read(READ_BYTES)
                if first and block.startswith(_UTF16):
                    raise UsageError(
                        f"{path}: is UTF-16, expected UTF-8",
                        remedy=f"convert it: iconv -f UTF-16 -t UTF-8 {path} > converted.txt",
                        id="data.encoding",
                    )
                first = False
                yield clean(decoder.decode(block, final=not block), count), len(block)
                if not block:
                    return
    except OSError as err:
        raise UsageError(f"{path}: cannot be read: {err.strerror}", id="data.corpus") from None


def clean(text: str, count: Utf8Count) -> str:
    """`text` with the escapes of undecodable bytes replaced by U+FFFD, and counted."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        replaced = text.translate(_ESCAPED)
        count.invalid_bytes += sum(old != new for old, new in zip(text, replaced, strict=True))
        return replaced
    return text
