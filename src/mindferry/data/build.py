"""Any corpus to training data, whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mindferry.data import inputs, mindrecord, packing
from mindferry.data.inputs import Reading, Source
from mindferry.data.megatron import open_megatron
from mindferry.data.report import DataReport, SplitReport
from mindferry.data.token_files import raw_width
from mindferry.data.tokenizer import Tokenizer, load_tokenizer
from mindferry.data.tokens import Counts, Job, token_dtype, tokenize
from mindferry.errors import MindferryError, UsageError


@dataclass(frozen=True)
class DataOptions:
    """How a corpus becomes a data set.

    Attributes:
        output: "mindrecord" (rows for CausalLanguageModelDataset) or "megatron" (.bin/.idx for
            BlendedMegatronDatasetDataLoader and Megatron-LM).
        packing: "pack" joins documents into rows without gaps, "pad" starts a row at every document; None:
            "pack", but "pad" where the corpus is MindRecord alone, so that its rows stay rows.
        pad_token_id: fills padded rows (loss_mask is 0 there); None: eos_token_id, or 0.
        valid_fraction: share of the documents that become the split "valid".
        split_seed: picks those documents.
        text_field: field of the records that holds the text; None: guessed from the first record, and said.
        raw_dtype: width of the ids in raw .bin files without index; None: uint16, as nanoGPT writes them, refused
            where the ids or the vocabulary look wider.
        workers: threads that tokenize; None: one a core. The output is the same for any number.
    """

    output: Literal["mindrecord", "megatron"] = "mindrecord"
    packing: Literal["pack", "pad"] | None = None
    pad_token_id: int | None = None
    valid_fraction: float = 0.0
    split_seed: int = 0
    text_field: str | None = None
    raw_dtype: str | None = None
    workers: int | None = None


def _check_settings(seq_length: int, vocab_size: int, eos_token_id: int | None, options: DataOptions) -> None:
    if seq_length <= 0:
        raise UsageError(f"seq_length: found {seq_length}, expected a positive number", id="data.seq-length")
    token_dtype(vocab_size)
    for name, token in (("eos_token_id", eos_token_id), ("pad_token_id", options.pad_token_id)):
        if token is not None and not 0 <= token < vocab_size:
            raise UsageError(
                f"{name}: found {token}, expected an id below the vocabulary's {vocab_size}",
                remedy="correct it in the source's config.json",
                id="data.special-token",
            )
    if not 0.0 <= options.valid_fraction < 1.0:
        raise UsageError(
            f"valid_fraction: found {options.valid_fraction}, expected 0 <= fraction < 1", id="data.split"
        )
    if options.output == "megatron" and options.packing == "pad":
        raise UsageError(
            "packing 'pad' makes rows, and Megatron files hold whole documents",
            remedy="leave packing out, or choose output mindrecord",
            id="data.packing",
        )


@contextlib.contextmanager
def _workspace(
    out_dir: Path, work_dir: Path | None, needed: Callable[[], int], keep_when_full: bool = True
) -> Iterator[Path]:
    """A directory to work in. Without `work_dir` it is temporary, and a failure leaves nothing behind.

    A given `work_dir` stays after an interruption or (`keep_when_full`) a full disk, for the next attempt; when all
    is well, or when the input is at fault, it goes. `needed()` gives the bytes to ask for when the disk is full.
    """
    from filelock import FileLock, Timeout

    existed = out_dir.is_dir()
    work = work_dir or out_dir / f".partial-{os.getpid()}"
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        work.mkdir(parents=True, exist_ok=True)
        lock = FileLock(work / "lock", timeout=0, mode=0o666)
        lock.acquire()
    except Timeout:
        raise UsageError(
            f"{work}: another process is working there", remedy="wait for it, or choose another place"
        ) from None
    except OSError as err:
        raise UsageError(
            f"{out_dir}: cannot be written: {err.strerror}", remedy="choose another place", id="data.out"
        ) from None
    done, keep = False, work_dir is not None
    try:
        yield work
        done = True
    except MindferryError:
        keep = False
        raise
    except (OSError, RuntimeError) as err:
        # MindSpore's C++ side looks for free space itself, and reports a failed write as RuntimeError.
        full = (
            err.errno in (errno.ENOSPC, errno.EDQUOT) if isinstance(err, OSError) else "free disk" in str(err)
        )
        if full or shutil.disk_usage(work).free < 1 << 20:
            keep = keep and keep_when_full
            raise _disk_full(out_dir, needed(), kept=keep) from None
        raise
    finally:
        lock.release()
        if done or not keep:
            shutil.rmtree(work, ignore_errors=True)
        if not done and not existed:
            with contextlib.suppress(OSError):
                out_dir.rmdir()


def _disk_full(where: Path, needed: int, kept: bool) -> MindferryError:
    free = shutil.disk_usage(where if where.exists() else where.parent).free
    after = "run it again then, and it goes on" if kept else "nothing was left behind"
    return MindferryError(
        f"{where}: no space for the data: about {needed} bytes needed, {free} free",
        remedy=f"free some space or choose another place; {after}",
        id="disk.full",
    )


def _too_little(name: str, split: SplitReport, report: DataReport, sources: list[Source]) -> UsageError:
    """The error of a split without a single row."""
    where = str(sources[0].path)
    if len(sources) > 1:
        where = f"{len(sources)} files from {where} to {sources[-1].path}"
    if report.documents == 0:
        return UsageError(
            f"{where}: nothing but empty or blank documents ({report.skipped_documents})",
            remedy="give text to train on",
            id="data.empty",
        )
    what = f"{split.tokens} tokens" if name == "train" else f"{split.tokens} tokens in split {name}"
    remedy = "give more text, or a smaller seq-length"
    if len(report.splits) > 1:
        remedy = f"{report.documents} documents are split by whole documents: give more, or another fraction"
    return UsageError(
        f"{where}: {what}, expected at least {report.seq_length + 1} for one sequence of {report.seq_length}",
        remedy=remedy,
        id="data.too-short",
    )


def build_dataset(
    corpus: list[Path],
    tokenizer: Tokenizer | dict[str, Path],
    out_dir: Path,
    *,
    seq_length: int,
    vocab_size: int,
    eos_token_id: int | None,
    options: DataOptions | None = None,
    work_dir: Path | None = None,
    keep_when_full: bool = True,
    progress: Any = None,
) -> DataReport:
    """Tokenize a corpus and write out_dir/train.* and, with a valid_fraction, out_dir/valid.*.

    Every text file, JSON line or table row is one document; `eos_token_id` closes each. Sources of ids (Megatron,
    nanoGPT, MindRecord) are taken as they are. MindRecord rows have int32 columns of shape [seq_length]:
    input_ids, labels (already moved on by one: the model must not shift again), loss_mask, position_ids.

    Args:
        corpus: files, directories, Megatron prefixes (mindferry.data.inputs.find_sources).
        tokenizer: a Tokenizer, or name -> path of its files; not used when no source holds text.
        vocab_size: rows of the model's embedding; an id beyond is an error.
        work_dir: where unfinished work is kept; a second call with the same input goes on from there.
        keep_when_full: whether it stays on a full disk, too.
        progress: an object with `.advance(n, note="")`, told the bytes read.

    Raises:
        UsageError: no corpus, no tokenizer, settings that cannot work, less text than one sequence.
        MindferryError: damaged input, an id outside the vocabulary, or no space on the disk.
    """
    options = options or DataOptions()
    _check_settings(seq_length, vocab_size, eos_token_id, options)
    job = _job(corpus, tokenizer, vocab_size, eos_token_id, options)
    rows_stay = all(source.kind == "mindrecord" for source in job.sources) and options.output == "mindrecord"
    report = DataReport(
        seq_length=seq_length,
        vocab_size=vocab_size,
        eod_token_id=eos_token_id,
        tokenizer=job.tokenizer.name if job.tokenizer else "",
        text_field=job.reading.text_field,
        token_dtype=str(token_dtype(vocab_size)),
        output=options.output,
        packing=options.packing or ("pad" if rows_stay else "pack"),
    )

    def advance(read: int, note: str) -> None:
        if progress is not None:
            progress.advance(read, note=note)

    with _workspace(out_dir, work_dir, lambda: _needed(report, job), keep_when_full) as work:
        counts, prefixes = tokenize(job, work, workers=options.workers, advance=advance)
        _count(report, counts, prefixes)
        for name, split in report.splits.items():
            if not split.sequences:
                raise _too_little(name, split, report, job.sources)
        _write(work, prefixes, report, options)
        _publish(work, out_dir, report.files)
    _warn(report, options, job)
    return report


def _job(
    corpus: list[Path],
    tokenizer: Tokenizer | dict[str, Path],
    vocab_size: int,
    eos_token_id: int | None,
    options: DataOptions,
) -> Job:
    """What is to be tokenized; a tokenizer is loaded only where some source holds text."""
    sources = inputs.find_sources(corpus)
    loaded = None
    if any(source.has_text for source in sources):
        loaded = tokenizer if isinstance(tokenizer, Tokenizer) else load_tokenizer(tokenizer)
    for source in sources:
        if source.kind == "raw":
            raw_width(source.path, options.raw_dtype, vocab_size)
    field = inputs.resolve_field(sources, options.text_field)
    return Job(
        sources,
        Reading(field, options.raw_dtype, eos_token_id),
        loaded,
        vocab_size,
        eos_token_id,
        options.valid_fraction,
        options.split_seed,
    )


def _needed(report: DataReport, job: Job) -> int:
    """Bytes on the disk for the whole of it, at most."""
    # Before the tokens are counted: one token a byte is the most that byte-level BPE makes.
    tokens = report.tokens or sum(source.size() for source in job.sources)
    stored = tokens * token_dtype(job.vocab_size).itemsize
    if report.output == "megatron":
        return stored
    rows = max(report.sequences, packing.windows(tokens, report.seq_length)[0])
    return stored + mindrecord.worst_case_bytes(rows, report.seq_length)


def _count(report: DataReport, counts: Counts, prefixes: dict[str, Path]) -> None:
    """Fill in what the tokenized splits say."""
    report.documents, report.skipped_documents = counts.documents, counts.skipped_documents
    report.invalid_utf8_bytes = counts.invalid_utf8_bytes
    for name, prefix in prefixes.items():
        data = open_megatron(prefix)
        rows = packing.plan(data, report.seq_length, report.packing)
        report.splits[name] = SplitReport(data.num_documents, data.tokens, *rows)
        report.tokens += data.tokens
        report.leftover_tokens += rows.leftover_tokens
        report.padding_tokens += rows.padding_tokens
    report.sequences = report.splits["train"].sequences


def _write(work: Path, prefixes: dict[str, Path], report: DataReport, options: DataOptions) -> None:
    """Make the files of `report.files` in `work`."""
    if report.output == "megatron":
        report.files = [f"{name}{end}" for name in prefixes for end in (".idx", ".bin")]
        return
    columns = {"dtype": "int32", "shape": [report.seq_length]}
    report.columns = {name: dict(columns) for name in mindrecord.COLUMNS}
    pad = options.pad_token_id if options.pad_token_id is not None else report.eod_token_id or 0
    for name, prefix in prefixes.items():
        data = open_megatron(prefix)
        path = work / f"{name}.mindrecord"
        # Most of it is ids twice and small numbers twice; MindRecord stores integers as narrow as they are.
        likely = report.splits[name].sequences * report.seq_length * 2 * data.dtype.itemsize
        if shutil.disk_usage(work).free < likely:
            raise OSError(errno.ENOSPC, "")
        rows = packing.rows(data, report.seq_length, report.packing, pad)
        written = mindrecord.write_mindrecord(path, rows, report.seq_length)
        expected = report.splits[name].sequences
        if not written == expected == mindrecord.inspect_mindrecord(path).rows:
            raise OSError(errno.ENOSPC, "")
        # mindspore makes them 0600; the .bin beside them was made by the umask.
        mode = stat.S_IMODE(data.bin.stat().st_mode)
        for file in (path, path.with_name(f"{path.name}.db")):
            os.chmod(file, mode)
        report.files += [f"{path.name}.db", path.name]


def _publish(work: Path, out_dir: Path, names: list[str]) -> None:
    """Move the files to `out_dir`; an index goes before its data, so that data never stands without it."""
    for name in names:
        with open(work / name, "rb") as handle:
            os.fsync(handle.fileno())
    for name in names:
        os.replace(work / name, out_dir / name)


def _warn(report: DataReport, options: DataOptions, job: Job) -> None:
    has_text = any(source.has_text for source in job.sources)
    if report.eod_token_id is None and has_text:
        report.warnings.append(
            "the source states no eos_token_id: documents follow each other without a token in between"
        )
    if report.invalid_utf8_bytes:
        text = f"{report.invalid_utf8_bytes} bytes of the corpus are not UTF-8; each became U+FFFD"
        size = sum(source.size() for source in job.sources if source.has_text)
        if report.invalid_utf8_bytes > size / 100:
            text += f": {report.invalid_utf8_bytes / size:.0%} of it. Another encoding? iconv -f GBK -t UTF-8"
        report.warnings.append(text)
    if report.text_field is not None and options.text_field is None:
        report.warnings.append(f"the text was taken from field {report.text_field!r} of the records")


def build_mindrecord(
    corpus: list[Path],
    tokenizer_files: dict[str, Path],
    out_dir: Path,
    *,
    seq_length: int,
    vocab_size: int,
    eos_token_id: int | None,
    work_dir: Path | None = None,
    progress: Any = None,
) -> DataReport:
    """`build_dataset` with its defaults: out_dir/train.mindrecord and its .db, packed; a full disk leaves nothing."""
    return build_dataset(
        corpus,
        tokenizer_files,
        out_dir,
        seq_length=seq_length,
        vocab_size=vocab_size,
        eos_token_id=eos_token_id,
        work_dir=work_dir,
        keep_when_full=False,
        progress=progress,
    )
