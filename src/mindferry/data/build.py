"""Text to training data, whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mindferry.data.mindrecord import COLUMNS, inspect_mindrecord, windows, worst_case_bytes, write_mindrecord
from mindferry.data.report import DataReport
from mindferry.data.text_files import corpus_files
from mindferry.data.tokenizer import load_tokenizer
from mindferry.data.tokens import token_dtype, tokenize_files
from mindferry.errors import MindferryError, UsageError

NAME = "train.mindrecord"


def _check_settings(seq_length: int, vocab_size: int, eos_token_id: int | None) -> None:
    if seq_length <= 0:
        raise UsageError(f"seq_length: found {seq_length}, expected a positive number", id="data.seq-length")
    token_dtype(vocab_size)
    if eos_token_id is not None and not 0 <= eos_token_id < vocab_size:
        raise UsageError(
            f"eos_token_id: found {eos_token_id}, expected an id below the vocabulary's {vocab_size}",
            remedy="correct eos_token_id in the source's config.json",
            id="data.eos",
        )


@contextlib.contextmanager
def _workspace(out_dir: Path, needed: Any) -> Iterator[Path]:
    """A temporary directory inside `out_dir`; on failure nothing of either stays that was not there before.

    `needed()` gives the bytes to ask for when the disk is full.
    """
    existed = out_dir.is_dir()
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        work = out_dir / f".partial-{os.getpid()}"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
    except OSError as err:
        raise UsageError(
            f"{out_dir}: cannot be written: {err.strerror}", remedy="choose another place", id="data.out"
        ) from None
    done = False
    try:
        yield work
        done = True
    except (OSError, RuntimeError) as err:
        # MindSpore's C++ side reports a failed write as RuntimeError.
        full = isinstance(err, OSError) and err.errno in (errno.ENOSPC, errno.EDQUOT)
        if full or shutil.disk_usage(work).free < 1 << 20:
            raise disk_full(out_dir, needed()) from None
        raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
        if not done and not existed:
            with contextlib.suppress(OSError):
                out_dir.rmdir()


def disk_full(where: Path, needed: int) -> MindferryError:
    """The error of a disk that cannot take `needed` bytes."""
    free = shutil.disk_usage(where).free
    return MindferryError(
        f"{where}: no space for the data: about {needed} bytes needed, {free} free",
        remedy="free some space or choose another place; nothing was left behind",
        id="disk.full",
    )


def _nothing_left(report: DataReport, files: list[Path], seq_length: int) -> UsageError:
    """The error of a corpus without a single row."""
    where = str(files[0]) if len(files) == 1 else f"{len(files)} files from {files[0]} to {files[-1]}"
    if report.documents == 0:
        return UsageError(
            f"{where}: nothing but empty or blank documents ({report.skipped_documents})",
            remedy="give text to train on",
            id="data.empty",
        )
    return UsageError(
        f"{where}: {report.tokens} tokens, expected at least {seq_length + 1} for one sequence of {seq_length}",
        remedy="give more text, or a smaller seq-length",
        id="data.too-short",
    )


def build_mindrecord(
    corpus: list[Path],
    tokenizer_files: dict[str, Path],
    out_dir: Path,
    *,
    seq_length: int,
    vocab_size: int,
    eos_token_id: int | None,
    progress: Any = None,
) -> DataReport:
    """Tokenize a corpus and write out_dir/train.mindrecord and its .db.

    Every file is one document; `eos_token_id` closes each. The stream is cut into windows of seq_length + 1
    tokens at a stride of seq_length (mindferry.data.mindrecord.windows). Columns, int32, of shape
    [seq_length]: input_ids, labels (already moved on by one: the model must not shift again), loss_mask
    (all 1), position_ids (0, 1, ...).

    Args:
        corpus: UTF-8 text files, and directories that are searched for mindferry.data.TEXT_SUFFIXES.
        tokenizer_files: name -> path of tokenizer.json, or of vocab.json and merges.txt.
        vocab_size: rows of the model's embedding; an id beyond is an error.
        progress: an object with `.advance(n, note="")`, told the bytes read.

    Raises:
        UsageError: no corpus, no tokenizer, settings that cannot work, less text than one sequence.
        MindferryError: an id outside the vocabulary, or no space on the disk.
    """
    _check_settings(seq_length, vocab_size, eos_token_id)
    tokenizer = load_tokenizer(tokenizer_files)
    files = corpus_files(corpus)
    report = DataReport(
        seq_length=seq_length, vocab_size=vocab_size, eod_token_id=eos_token_id, tokenizer=tokenizer.name
    )
    total_bytes = sum(file.stat().st_size for file in files)
    dtype = token_dtype(vocab_size)

    def needed() -> int:
        # Before the tokens are counted: one token a byte is the most that byte-level BPE makes.
        rows, _ = windows(report.tokens or total_bytes, seq_length)
        return max(report.tokens, total_bytes) * dtype.itemsize + worst_case_bytes(rows, seq_length)

    with _workspace(out_dir, needed) as work:
        spool = work / "tokens"
        with open(spool, "wb") as sink:
            tokenize_files(
                files,
                tokenizer,
                sink,
                vocab_size=vocab_size,
                eod_token_id=eos_token_id,
                report=report,
                progress=progress,
            )
        report.sequences, report.leftover_tokens = windows(report.tokens, seq_length)
        if not report.sequences:
            raise _nothing_left(report, files, seq_length)
        _write(work, spool, dtype, report)
        _publish(work, out_dir, mode=stat.S_IMODE(spool.stat().st_mode))
    _describe(report, out_dir)
    return report


def _write(work: Path, spool: Path, dtype: Any, report: DataReport) -> None:
    """MindRecord from the spooled ids, read back."""
    stream = np.memmap(spool, dtype=dtype, mode="r")
    # Most of it is ids twice and small numbers twice; MindRecord stores integers as narrow as they are.
    likely = report.sequences * report.seq_length * 2 * dtype.itemsize
    if shutil.disk_usage(work).free < likely:
        raise OSError(errno.ENOSPC, "")
    write_mindrecord(work / NAME, stream, report.seq_length)
    info = inspect_mindrecord(work / NAME)
    if info.rows != report.sequences:
        raise OSError(errno.ENOSPC, "")


def _publish(work: Path, out_dir: Path, mode: int) -> None:
    """Move the files to `out_dir`; the index first, so that a .mindrecord never stands without it."""
    for name in (f"{NAME}.db", NAME):
        os.chmod(work / name, mode)  # mindspore makes them 0600
        with open(work / name, "rb") as handle:
            os.fsync(handle.fileno())
    for name in (f"{NAME}.db", NAME):
        os.replace(work / name, out_dir / name)


def _describe(report: DataReport, out_dir: Path) -> None:
    report.columns = {name: {"dtype": "int32", "shape": [report.seq_length]} for name in COLUMNS}
    report.files = [NAME, f"{NAME}.db"]
    if report.eod_token_id is None:
        report.warnings.append(
            "the source states no eos_token_id: documents follow each other without a token in between"
        )
    if report.invalid_utf8_bytes:
        report.warnings.append(
            f"{report.invalid_utf8_bytes} bytes of the corpus are not UTF-8; each became U+FFFD"
        )
