"""Documents become streams of token ids on disk: in parallel, in a fixed order, checked, and resumable."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mindferry.data import inputs
from mindferry.data.inputs import Piece, Reading, Source, pieces
from mindferry.data.megatron import MegatronWriter, WriterState
from mindferry.data.tokenizer import Tokenizer
from mindferry.errors import MindferryError, UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Characters that one thread encodes at a time. The library's result takes some 100 bytes a token.
BATCH_CHARACTERS = 1 << 18

# Text between two entries of the journal: what a killed run has to do again at most.
JOURNAL_CHARACTERS = 1 << 25

# A change of what the same input gives must change this, or an old journal would be continued.
FORMAT = 1


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
        cause="the tokenizer knows more tokens than the model's embedding has rows, or ids were read in a wrong width",
        remedy="use the tokenizer that belongs to the model, or enlarge the model's vocab_size",
        id="data.token-range",
    )


@dataclass(frozen=True)
class Job:
    """What is to be tokenized, and how; two equal jobs write equal files.

    Attributes:
        eod_token_id: closes every document of text; documents of ids are taken as they are.
        valid_fraction: share of the documents that go to "valid" instead of "train".
        split_seed: picks which.
    """

    sources: list[Source]
    reading: Reading
    tokenizer: Tokenizer | None
    vocab_size: int
    eod_token_id: int | None
    valid_fraction: float = 0.0
    split_seed: int = 0

    @property
    def splits(self) -> list[str]:
        return ["train", "valid"] if self.valid_fraction else ["train"]

    def fingerprint(self) -> str:
        """Changes when anything changes that could change the output."""
        files = []
        for source in self.sources:
            for path in source.files():
                stat = path.stat()
                files.append([str(path.resolve()), source.kind, stat.st_size, stat.st_mtime_ns])
        content = [
            FORMAT,
            inputs.PIECE_CHARACTERS,
            files,
            asdict(self.reading),
            self.tokenizer.digest if self.tokenizer else None,
            [self.vocab_size, self.eod_token_id, self.valid_fraction, self.split_seed],
        ]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def split_of(document: int, valid_fraction: float, seed: int) -> str:
    """Where document number `document` goes: by a hash of its number, so that no count is needed beforehand."""
    if not valid_fraction:
        return "train"
    digest = hashlib.blake2b(f"{seed}:{document}".encode(), digest_size=8).digest()
    return "valid" if int.from_bytes(digest, "little") < valid_fraction * 2.0**64 else "train"


@dataclass
class Counts:
    """What was seen so far; part of the journal.

    Attributes:
        source, piece: the next piece is number `piece` of source number `source`.
        seen: documents begun, blank ones included.
        in_document: ids written of the open document.
    """

    source: int = 0
    piece: int = 0
    seen: int = 0
    in_document: int = 0
    documents: int = 0
    skipped_documents: int = 0
    tokens: int = 0
    invalid_utf8_bytes: int = 0
    characters: int = 0


@dataclass
class Journal:
    """Where a tokenization stands, as it lies in `path`."""

    path: Path
    fingerprint: str
    counts: Counts = field(default_factory=Counts)
    writers: dict[str, WriterState] = field(default_factory=dict)
    finished: bool = False

    @classmethod
    def load(cls, path: Path, fingerprint: str) -> Journal:
        """The journal of the same job, or a fresh one where there is none that can be continued."""
        try:
            raw = json.loads(path.read_bytes())
            if raw["fingerprint"] == fingerprint:
                writers = {name: WriterState(**state) for name, state in raw["writers"].items()}
                return cls(path, fingerprint, Counts(**raw["counts"]), writers, raw["finished"] is True)
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            pass
        return cls(path, fingerprint)

    def save(self) -> None:
        """Replace the file by the present state."""
        content = {
            "fingerprint": self.fingerprint,
            "counts": asdict(self.counts),
            "writers": {name: asdict(state) for name, state in self.writers.items()},
            "finished": self.finished,
        }
        temporary = self.path.with_name(self.path.name + ".new")
        with open(temporary, "w", encoding="utf-8") as handle:
            json.dump(content, handle)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, self.path)


def _remaining(job: Job, counts: Counts) -> Iterator[tuple[int, Piece]]:
    """(source number, piece) from where `counts` stand."""
    for number in range(counts.source, len(job.sources)):
        skip = counts.piece if number == counts.source else 0
        for index, piece in enumerate(pieces(job.sources[number], job.reading, job.tokenizer)):
            if index >= skip:
                yield number, piece


def _batches(items: Iterator[tuple[int, Piece]]) -> Iterator[list[tuple[int, Piece]]]:
    batch: list[tuple[int, Piece]] = []
    size = 0
    for item in items:
        batch.append(item)
        size += len(item[1].text) + (0 if item[1].ids is None else len(item[1].ids))
        # A document costs a little even when it is empty.
        if size >= BATCH_CHARACTERS or len(batch) >= 2048:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@contextlib.contextmanager
def _one_thread_a_call() -> Iterator[None]:
    """Keep the library's own thread pool out of the way: our threads each encode a batch of their own.

    That is as fast, keeps the order, and leaves nothing behind that a later fork could stumble over.
    """
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("TOKENIZERS_PARALLELISM", None)
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def _encoded(job: Job, counts: Counts, workers: int) -> Iterator[list[tuple[int, Piece, NDArray[np.int64]]]]:
    """Batches of (source number, piece, its ids) in order, `workers` batches being encoded at a time."""

    def encode(batch: list[tuple[int, Piece]]) -> list[tuple[int, Piece, NDArray[np.int64]]]:
        texts = [piece.context + piece.text for _, piece in batch if piece.ids is None]
        encoded: Iterator[NDArray[np.int64]] = iter(())
        if texts:
            assert job.tokenizer is not None
            encoded = iter(job.tokenizer.encode(texts))
        return [(n, p, next(encoded)[p.drop :] if p.ids is None else p.ids) for n, p in batch]

    with _one_thread_a_call(), ThreadPoolExecutor(workers, thread_name_prefix="tokenize") as pool:
        waiting: deque[Future[Any]] = deque()
        try:
            for batch in _batches(_remaining(job, counts)):
                waiting.append(pool.submit(encode, batch))
                if len(waiting) > workers + 1:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


class _Sink:
    """Puts ids into the writers of the splits and keeps the counts."""

    def __init__(self, job: Job, counts: Counts, writers: dict[str, MegatronWriter]) -> None:
        self._job, self._counts, self._writers = job, counts, writers
        eod = job.eod_token_id
        self._eod = None if eod is None else np.asarray([eod], dtype=np.int64)

    def add(self, source: int, piece: Piece, ids: NDArray[np.int64]) -> None:
        """Append a piece. A document of nothing but white space is left out.

        Text is cut behind a word, so only a piece that is a whole document can be blank.
        """
        job, counts = self._job, self._counts
        writer = self._writers[split_of(counts.seen, job.valid_fraction, job.split_seed)]
        if piece.ids is not None or (piece.text and not piece.text.isspace()):
            check_ids(ids, job.vocab_size, piece.document, counts.in_document)
            writer.add(ids)
            counts.tokens += len(ids)
            counts.in_document += len(ids)
        counts.invalid_utf8_bytes += piece.invalid
        counts.characters += len(piece.text) + len(ids)
        if source != counts.source:
            counts.source, counts.piece = source, 0
        counts.piece += 1
        if piece.last:
            self._close(writer, add_eod=piece.ids is None)

    def _close(self, writer: MegatronWriter, add_eod: bool) -> None:
        counts = self._counts
        if counts.in_document:
            if add_eod and self._eod is not None:
                writer.add(self._eod)
                counts.tokens += 1
            writer.end_document()
            counts.documents += 1
        else:
            counts.skipped_documents += 1
        counts.seen += 1
        counts.in_document = 0


def tokenize(
    job: Job,
    work: Path,
    *,
    workers: int | None = None,
    advance: Callable[[int, str], None] = lambda read, note: None,
) -> tuple[Counts, dict[str, Path]]:
    """Write the documents of `job` as Megatron data sets into `work`; returns counts and split -> prefix.

    The output does not depend on `workers` (default: one a core). A run that was killed goes on where the journal
    in `work` stands; `advance` is told the bytes read, those of the earlier run included.

    Raises:
        UsageError, MindferryError: a source cannot be read, or holds an id outside the vocabulary.
        OSError: the disk is full.
    """
    journal = Journal.load(work / "journal.json", job.fingerprint())
    prefixes = {name: work / name for name in job.splits}
    if journal.finished and all((work / f"{name}.idx").is_file() for name in job.splits):
        advance(sum(source.size() for source in job.sources), "found tokenized")
        return journal.counts, prefixes
    dtype = token_dtype(job.vocab_size)
    try:
        writers = {name: MegatronWriter(work, name, dtype, journal.writers.get(name)) for name in job.splits}
    except MindferryError:  # the working files do not belong to the journal: start over
        journal = Journal(work / "journal.json", journal.fingerprint)
        writers = {name: MegatronWriter(work, name, dtype) for name in job.splits}
    advance(sum(source.size() for source in job.sources[: journal.counts.source]), "")
    sink = _Sink(job, journal.counts, writers)
    try:
        saved = journal.counts.characters
        for batch in _encoded(job, Counts(**vars(journal.counts)), max(1, workers or os.cpu_count() or 1)):
            for number, piece, ids in batch:
                sink.add(number, piece, ids)
            advance(sum(piece.read for _, piece, _ in batch), f"{journal.counts.tokens:,} tokens")
            if journal.counts.characters - saved >= JOURNAL_CHARACTERS:
                saved = journal.counts.characters
                journal.writers = {name: writer.sync() for name, writer in writers.items()}
                journal.save()
        for name, writer in writers.items():
            writer.finish(prefixes[name])
    finally:
        for writer in writers.values():
            writer.close()
    journal.finished = True
    journal.save()
    return journal.counts, prefixes
