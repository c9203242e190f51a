"""Documents become one stream of token ids on disk, checked on the way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from mindferry.data.report import DataReport
from mindferry.data.text_files import Utf8Count, decoded_pieces
from mindferry.data.tokenizer import PIECE_CHARACTERS, Tokenizer
from mindferry.errors import MindferryError, UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Characters encoded by one call of the library: enough to keep its threads busy, small enough to stay in
# memory (its result takes some 100 bytes a token).
BATCH_CHARACTERS = 1 << 20

# Longest text that is encoded in one piece.
MAX_UNCUT_CHARACTERS = 1 << 22


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest dtype Megatron knows that holds every id below `vocab_size`: uint16 or int32.

    Raises:
        UsageError: ids would not fit int32, the widest that MindSpore's embedding takes.
    """
    if vocab_size <= 0:
        raise UsageError(f"vocab_size: found {vocab_size}, expected a positive number", id="data.vocab")
    if vocab_size > 1 << 31:
        raise UsageError(
            f"vocab_size: found {vocab_size}, expected at most {1 << 31}: ids are int32", id="data.vocab"
        )
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.int32)


def check_ids(ids: NDArray[Any], vocab_size: int, document: str, start: int = 0) -> None:
    """Refuse ids outside 0..vocab_size-1; `start` is the position of ids[0] in the document.

    Raises:
        MindferryError: names the first such id, its document and its position.
    """
    if ids.size == 0 or (int(ids.max()) < vocab_size and int(ids.min()) >= 0):
        return
    at = int(np.argmax((ids >= vocab_size) | (ids < 0)))
    raise MindferryError(
        f"{document}: token {int(ids[at])} at position {start + at}, expected ids below {vocab_size}",
        cause="the tokenizer knows more tokens than the model's embedding has rows",
        remedy="use the tokenizer that belongs to the model, or enlarge the model's vocab_size",
        id="data.token-range",
    )


@dataclass
class _Piece:
    """Part of a document; `last` closes it."""

    document: str
    text: str
    last: bool
    read: int


def _pieces(path: Path, tokenizer: Tokenizer, count: Utf8Count) -> Iterator[_Piece]:
    """`path` in pieces that encode on their own to the ids of the whole."""
    held, read = "", 0
    retry = PIECE_CHARACTERS
    for text, size in decoded_pieces(path, count):
        held += text
        read += size
        while len(held) > retry:
            at = tokenizer.split_point(held[:retry])
            if at:
                yield _Piece(str(path), held[:at], False, read)
                held, read, retry = held[at:], 0, PIECE_CHARACTERS
            else:
                retry *= 2
        if len(held) > MAX_UNCUT_CHARACTERS:
            raise UsageError(
                f"{path}: {len(held)} characters with no place where this tokenizer's ids stay the same when "
                "the text is cut",
                remedy="split the document into smaller files, or give it spaces or line breaks",
                id="data.uncuttable",
            )
    yield _Piece(str(path), held, True, read)


def _batches(pieces: Iterator[_Piece]) -> Iterator[list[_Piece]]:
    batch: list[_Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        # A document costs a little even when it is empty.
        if size >= BATCH_CHARACTERS or len(batch) >= 4096:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _Stream:
    """Writes ids to an open file, closing documents with the end-of-document token."""

    def __init__(self, sink: IO[bytes], vocab_size: int, eod: int | None, report: DataReport) -> None:
        self._sink, self._vocab_size, self._report = sink, vocab_size, report
        self._dtype = token_dtype(vocab_size)
        self._eod = None if eod is None else np.asarray([eod], dtype=np.int64)
        self._in_document = 0

    def add(self, ids: NDArray[np.int64], document: str, last: bool, blank: bool) -> None:
        """Append part of a document; `last` closes it. A document of nothing but white space is left out.

        Pieces are cut behind a word, so only a piece that is a whole document can be blank.
        """
        if not blank:
            check_ids(ids, self._vocab_size, document, self._in_document)
            self._write(ids)
            self._in_document += len(ids)
        if not last:
            return
        if self._in_document:
            self._report.documents += 1
            if self._eod is not None:
                self._write(self._eod)
        else:
            self._report.skipped_documents += 1
        self._in_document = 0

    def _write(self, ids: NDArray[np.int64]) -> None:
        self._sink.write(ids.astype(self._dtype).tobytes())
        self._report.tokens += len(ids)


def tokenize_files(
    files: list[Path],
    tokenizer: Tokenizer,
    sink: IO[bytes],
    *,
    vocab_size: int,
    eod_token_id: int | None,
    report: DataReport,
    progress: Any = None,
) -> None:
    """Write the ids of `files`, one document each, to `sink` in `token_dtype(vocab_size)`.

    Counts go to `report`; `progress.advance` is told the bytes read.

    Raises:
        UsageError: a file cannot be read or cut.
        MindferryError: an id outside the vocabulary.
    """
    stream = _Stream(sink, vocab_size, eod_token_id, report)
    count = Utf8Count()
    pieces = (piece for path in files for piece in _pieces(path, tokenizer, count))
    for batch in _batches(pieces):
        for piece, ids in zip(batch, tokenizer.encode([piece.text for piece in batch]), strict=True):
            stream.add(ids, piece.document, piece.last, blank=not piece.text.strip())
        if progress is not None:
            progress.advance(sum(piece.read for piece in batch), note=f"{report.tokens:,} tokens")
    report.invalid_utf8_bytes += count.invalid_bytes
