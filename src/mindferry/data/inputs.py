"""What a corpus is made of: which files, of which format, and their documents as pieces in a fixed order."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mindferry.data import records, text_files, token_files
from mindferry.data.compressed import COMPRESSION, file_size, plain_name
from mindferry.data.megatron import paths as megatron_paths
from mindferry.data.text_files import Chunk
from mindferry.data.tokenizer import PIECE_CHARACTERS, Cut, Tokenizer
from mindferry.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst")
JSONL_SUFFIXES = (".jsonl", ".ndjson")
TABLE_SUFFIXES = (".parquet", ".arrow")

# What is taken from a directory, plain or compressed. A file that is named itself may have any name.
CORPUS_SUFFIXES = TEXT_SUFFIXES + JSONL_SUFFIXES + TABLE_SUFFIXES

# Longest text that is encoded in one piece.
MAX_UNCUT_CHARACTERS = 1 << 22


@dataclass(frozen=True)
class Source:
    """One input. `kind`: text, jsonl, table, megatron, raw or mindrecord."""

    path: Path
    kind: str

    @property
    def has_text(self) -> bool:
        return self.kind in ("text", "jsonl", "table")

    def files(self) -> list[Path]:
        """The files behind it."""
        if self.kind == "megatron":
            return list(megatron_paths(self.path))
        if self.kind == "mindrecord":
            return [self.path, self.path.with_name(self.path.name + ".db")]
        return [self.path]

    def size(self) -> int:
        """Bytes that reading it takes."""
        return file_size(self.files()[0])


@dataclass(frozen=True)
class Reading:
    """How sources are read: text_field None is guessed, raw_dtype (of raw files) None is uint16 that looks like it."""

    text_field: str | None = None
    raw_dtype: str | None = None
    eod_token_id: int | None = None


@dataclass
class Piece:
    """Part of a document, as text or as ids; `last` closes the document.

    Attributes:
        read: bytes of the source taken since the piece before.
        context, drop: encode `context` + `text` and leave out the first `drop` ids.
        invalid: characters of `text` that stand for invalid bytes.
    """

    document: str
    last: bool
    read: int
    text: str = ""
    invalid: int = 0
    context: str = ""
    drop: int = 0
    ids: NDArray[np.int64] | None = None


def find_sources(corpus: list[Path]) -> list[Source]:
    """The sources of a corpus: named files as they are, directories recursively in the order of their paths.

    Hidden files and directories are passed over, directory links are not followed, and a file that is reached
    twice counts once. From a directory come CORPUS_SUFFIXES; Megatron, raw and MindRecord files only by name.

    Raises:
        UsageError: a path does not exist, is no file or directory, or nothing was found at all.
    """
    if not corpus:
        raise UsageError("no corpus given", remedy="name text files or directories", id="data.corpus")
    found: dict[Path, Source] = {}
    for path in corpus:
        for source in _sources_of(path):
            found.setdefault(source.path.resolve(), source)
    if not found:
        where = ", ".join(str(path) for path in corpus)
        raise UsageError(
            f"{where}: no files ending in {', '.join(CORPUS_SUFFIXES)} in it",
            remedy="name the files themselves, or rename them",
            id="data.no-files",
        )
    return list(found.values())


def _sources_of(path: Path) -> list[Source]:
    try:
        kind = os.stat(path).st_mode
    except FileNotFoundError:
        if all(file.is_file() for file in megatron_paths(path)):
            return [Source(path, "megatron")]
        raise UsageError(
            f"{path}: no such file or directory", remedy="check the path of the corpus", id="data.corpus"
        ) from None
    except (OSError, ValueError) as err:
        raise UsageError(f"{path}: cannot be read: {err}", id="data.corpus") from None
    if stat.S_ISDIR(kind):
        saved = records.saved_dataset(path)
        files = saved if saved is not None else _walk(path)
        return [Source(file, _kind_of(file)) for file in files]
    if stat.S_ISREG(kind):
        return [_complete(Source(path.with_suffix("") if _is_megatron(path) else path, _kind_of(path)))]
    raise UsageError(f"{path}: neither a file nor a directory", id="data.corpus")


def _complete(source: Source) -> Source:
    """`source`, if all of its files are there."""
    for file in source.files():
        if not file.is_file():
            what = "a Megatron data set is a .bin and an .idx"
            if source.kind == "mindrecord":
                what = "a MindRecord is a file and its .db"
            raise UsageError(
                f"{file}: no such file; {what}", remedy="copy both, beside each other", id="data.corpus"
            )
    return source


def _is_megatron(path: Path) -> bool:
    if path.suffix not in (".bin", ".idx"):
        return False
    data, index = megatron_paths(path)
    return path.suffix == ".idx" or (index.is_file() and data.is_file())


def _kind_of(path: Path) -> str:
    if _is_megatron(path):
        return "megatron"
    name = plain_name(path)
    if name.endswith((*JSONL_SUFFIXES, ".json")):  # much of what is named .json holds a record a line
        return "jsonl"
    if name.endswith(TABLE_SUFFIXES):
        if path.suffix.lower() in COMPRESSION:
            raise UsageError(f"{path}: compressed around its own compression", remedy="decompress it first")
        return "table"
    # FileWriter numbers the files of several shards.
    ids = "raw" if name.endswith(".bin") else "mindrecord" if re.search(r"\.mindrecord\d*$", name) else ""
    if ids and path.suffix.lower() in COMPRESSION:
        raise UsageError(
            f"{path}: ids are not read compressed", remedy="decompress it first", id="data.corpus"
        )
    if ids:
        return ids
    return "text"


def _walk(root: Path) -> list[Path]:
    def refuse(err: OSError) -> None:
        raise UsageError(f"{err.filename}: cannot be listed: {err.strerror}", id="data.corpus")

    files = []
    for directory, subdirectories, names in os.walk(root, onerror=refuse):
        subdirectories[:] = [name for name in subdirectories if not name.startswith(".")]
        for name in names:
            path = Path(directory) / name
            if not name.startswith(".") and plain_name(path).endswith(CORPUS_SUFFIXES) and path.is_file():
                files.append(path)
    # By path parts as bytes: the same on every machine, whatever its locale and file system say.
    return sorted(files, key=lambda file: [os.fsencode(part) for part in file.parts])


def resolve_field(sources: list[Source], given: str | None) -> str | None:
    """The field that holds the text in all sources with records: `given`, or as the first one suggests.

    Raises:
        UsageError: there is no telling.
    """
    for source in sources:
        name = None
        if source.kind == "jsonl":
            name = records.jsonl_field(source.path, given)
        elif source.kind == "table":
            name = records.table_field(source.path, given)
        if name is not None:
            return name
    return given


def _cut(document: str, chunks: Iterator[Chunk], tokenizer: Tokenizer) -> Iterator[Piece]:
    """A document in pieces that encode on their own to the ids of the whole."""
    held, invalid, read = "", 0, 0
    last_cut, retry = Cut(0), PIECE_CHARACTERS
    for chunk in _one_blank(document, chunks):
        held += chunk.text
        invalid += chunk.invalid
        read += chunk.read
        begin = 0
        while len(held) - begin > retry:
            cut = tokenizer.split_point(held[begin : begin + retry])
            if cut is None:
                retry *= 2
                if retry > MAX_UNCUT_CHARACTERS:
                    raise _uncuttable(document, retry)
                continue
            text = held[begin : begin + cut.at]
            yield Piece(document, False, read, text, invalid, last_cut.context, last_cut.drop)
            begin, invalid, read = begin + cut.at, 0, 0
            last_cut, retry = cut, PIECE_CHARACTERS
        held = held[begin:]
    yield Piece(document, True, read, held, invalid, last_cut.context, last_cut.drop)


def _one_blank(document: str, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
    """`chunks`, but a document of nothing but white space is one blank if it is long: it will be left out.

    Raises:
        UsageError: text behind more white space than is encoded in one piece.
    """
    blanks: list[Chunk] = []
    size, read, begun = 0, 0, False
    for chunk in chunks:
        if begun or (chunk.text and not chunk.text.isspace()):
            if size > MAX_UNCUT_CHARACTERS:
                raise _uncuttable(document, size)
            yield from blanks
            yield chunk
            blanks, begun = [], True
            continue
        size, read = size + len(chunk.text), read + chunk.read
        blanks = [*blanks, chunk] if size <= MAX_UNCUT_CHARACTERS else [Chunk(" ", 0, read)]
    yield from blanks


def _uncuttable(document: str, characters: int) -> UsageError:
    return UsageError(
        f"{document}: {characters} characters with no place where this tokenizer's ids stay the same when the "
        "text is cut",
        remedy="split the document, or give it spaces or line breaks",
        id="data.uncuttable",
    )


def _text(source: Source, reading: Reading, tokenizer: Tokenizer) -> Iterator[Piece]:
    yield from _cut(str(source.path), text_files.text_chunks(source.path), tokenizer)


def _records(source: Source, reading: Reading, tokenizer: Tokenizer) -> Iterator[Piece]:
    if reading.text_field is None:
        return  # resolve_field found no record in any source
    read = records.jsonl_records if source.kind == "jsonl" else records.table_records
    for record in read(source.path, reading.text_field):
        yield from _cut(record.name, iter([Chunk(record.text, record.invalid, record.read)]), tokenizer)


def _ids(source: Source, reading: Reading, tokenizer: Tokenizer | None) -> Iterator[Piece]:
    if source.kind == "megatron":
        documents = token_files.megatron_documents(source.path)
    elif source.kind == "mindrecord":
        documents = token_files.mindrecord_rows(source.path)
    else:
        documents = token_files.raw_documents(source.path, reading.raw_dtype, reading.eod_token_id)
    for part in documents:
        yield Piece(part.name, part.last, part.read, ids=part.ids)


_READERS: dict[str, Callable[..., Iterator[Piece]]] = {
    "text": _text,
    "jsonl": _records,
    "table": _records,
    "megatron": _ids,
    "raw": _ids,
    "mindrecord": _ids,
}


def pieces(source: Source, reading: Reading, tokenizer: Tokenizer | None) -> Iterator[Piece]:
    """The documents of `source` in pieces; the same pieces every time.

    Raises:
        UsageError, MindferryError: the source cannot be read; names file and position.
    """
    yield from _READERS[source.kind](source, reading, tokenizer)
