"""mindferry data: corpora to token files, and a look at token files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mindferry.cli.console import Progress, Result, command
from mindferry.findings import Finding

if TYPE_CHECKING:
    from mindferry.data import Tokenizer
    from mindferry.data.report import DataReport

BUILD_EXAMPLE = "Example: mindferry data build corpus/ --tokenizer gpt2/ --out data/ --seq-length 1024"
USE_EXAMPLE = "Example: mindferry data use run/ 0.7 books/train 0.3 code/train --seed 1234"
SHOW_EXAMPLE = "Example: mindferry data show data/train.mindrecord --tokenizer gpt2/"


def _load(tokenizer: str) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer of a directory (or "bytes"), and the directory's config.json where it has one."""
    import json

    from mindferry.data import ByteTokenizer, load_tokenizer
    from mindferry.data.tokenizer import FILE_NAMES
    from mindferry.errors import UsageError

    if tokenizer == "bytes":
        return ByteTokenizer(), {"eos_token_id": 256}
    directory = Path(tokenizer)
    if not directory.is_dir():
        raise UsageError(
            f"--tokenizer: {tokenizer}: no such directory", remedy="give the model's directory, or 'bytes'"
        )
    files = {name: directory / name for name in FILE_NAMES if (directory / name).is_file()}
    loaded = load_tokenizer(files)
    try:
        raw = (directory / "config.json").read_bytes() if (directory / "config.json").is_file() else b"{}"
        config = json.loads(raw)
    except (OSError, ValueError, RecursionError) as err:
        raise UsageError(f"{directory / 'config.json'}: cannot be read: {err}") from None
    return loaded, config if isinstance(config, dict) else {}


def _whole(config: dict[str, Any], key: str) -> int | None:
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _present(out: Path) -> list[Path]:
    """Files of a data set that stand in `out`."""
    return [
        out / f"{split}.{end}"
        for split in ("train", "valid")
        for end in ("bin", "idx", "mindrecord", "mindrecord.db")
        if (out / f"{split}.{end}").exists()
    ]


def _summary(out: Path, report: DataReport) -> str:
    lines = [str(out.resolve())]
    for name, split in report.splits.items():
        lines.append(
            f"  {name:6} {split.documents:,} documents, {split.tokens:,} tokens, {split.sequences:,} sequences "
            f"of {report.seq_length} ({split.leftover_tokens:,} tokens left over, "
            f"{split.padding_tokens:,} of padding)"
        )
    lines.append(f"  files  {', '.join(report.files)}")
    if report.skipped_documents:
        lines.append(f"  {report.skipped_documents:,} blank documents were left out")
    return "\n".join(lines)


@command("data build")
def build(
    corpus: list[Path] = typer.Argument(
        ...,
        metavar="CORPUS...",
        help="Text, JSONL, parquet, arrow, .gz, .zst, .bin/.idx, .mindrecord; directories.",
    ),
    out: Path = typer.Option(..., "--out", metavar="DIR", help="Directory to write to."),
    tokenizer: str = typer.Option(
        ...,
        "--tokenizer",
        metavar="DIR",
        help="Directory of the model or tokenizer; 'bytes': one token a byte.",
    ),
    seq_length: int = typer.Option(..., "--seq-length", help="Tokens in a sequence."),
    vocab_size: int | None = typer.Option(
        None, "--vocab-size", help="Rows of the embedding (from config.json)."
    ),
    eos_token_id: int | None = typer.Option(
        None, "--eos-token-id", help="Token that closes a document (from config.json)."
    ),
    output: str = typer.Option("mindrecord", "--output", help="mindrecord or megatron (.bin/.idx)."),
    packing: str | None = typer.Option(None, "--packing", help="pack (documents joined) or pad (one a row)."),
    valid_fraction: float = typer.Option(0.0, "--valid-fraction", help="Share of the documents to hold out."),
    text_field: str | None = typer.Option(None, "--text-field", help="Field of the records with the text."),
    raw_dtype: str | None = typer.Option(
        None, "--raw-dtype", help="Width of ids in .bin files without .idx (uint16, if they look like it)."
    ),
    workers: int | None = typer.Option(None, "--workers", min=1, help="Threads (one a core)."),
    force: bool = typer.Option(False, "--force", help="Replace a data set that is there."),
    json_output: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
) -> Result:
    """Tokenize a corpus. A build that was killed goes on where it stopped when it is called again."""
    from mindferry.cli.choices import one_of
    from mindferry.data import DataOptions, build_dataset, find_sources
    from mindferry.data.token_files import RAW_DTYPES
    from mindferry.errors import UsageError

    loaded, config = _load(tokenizer)
    options = DataOptions(
        output=one_of("--output", output, ("mindrecord", "megatron")),  # type: ignore[arg-type]
        packing=None if packing is None else one_of("--packing", packing, ("pack", "pad")),  # type: ignore[arg-type]
        valid_fraction=valid_fraction,
        text_field=text_field,
        raw_dtype=None if raw_dtype is None else one_of("--raw-dtype", raw_dtype, tuple(RAW_DTYPES)),
        workers=workers,
    )
    before = _present(out)
    if before and not force:
        raise UsageError(f"{before[0]}: exists", remedy="choose another --out, or replace it with --force")
    total = sum(source.size() for source in find_sources(corpus))
    with Progress("tokenizing", total=total, unit="B") as bar:
        report = build_dataset(
            corpus,
            loaded,
            out,
            seq_length=seq_length,
            vocab_size=_whole(config, "vocab_size") or loaded.size if vocab_size is None else vocab_size,
            eos_token_id=_whole(config, "eos_token_id") if eos_token_id is None else eos_token_id,
            options=options,
            work_dir=out / ".unfinished",
            progress=bar,
        )
    for path in before:
        if path.name not in report.files:
            path.unlink(missing_ok=True)
    findings = [Finding("data.attention", "warning", text) for text in report.warnings]
    extra = {"out": str(out.resolve()), "data": report.to_json()}
    return Result(findings=findings, extra=extra, text=_summary(out, report))


@command("data show")
def show(
    path: Path = typer.Argument(..., metavar="DATA", help=".bin, .idx, their prefix, or .mindrecord."),
    tokenizer: str | None = typer.Option(None, "--tokenizer", metavar="DIR", help="To show tokens as text."),
    vocab_size: int | None = typer.Option(
        None, "--vocab-size", help="Rows of the embedding (from config.json)."
    ),
    raw_dtype: str | None = typer.Option(
        None, "--raw-dtype", help="Width of ids in .bin files without .idx (uint16, if they look like it)."
    ),
    json_output: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
) -> Result:
    """Check a token file and look at a sample of a million tokens. Exit code 1: something is wrong with it."""
    from mindferry.data.statistics import judge, padding_share, sample_tokens, token_statistics

    loaded, config = _load(tokenizer) if tokenizer else (None, {})
    if vocab_size is None:
        vocab_size = _whole(config, "vocab_size") or (loaded.size if loaded else None)
    unknown = loaded.token_to_id("<unk>") if loaded else None
    found = token_statistics(
        sample_tokens(path, raw_dtype=raw_dtype),
        vocab_size,
        tokenizer=loaded,
        eod_token_id=_whole(config, "eos_token_id"),
        unknown_token_id=unknown,
    )
    if path.name.endswith(".mindrecord"):
        found.padding_share = padding_share(path)
    findings = judge(found, path, vocab_size)
    bad = any(finding.severity == "problem" for finding in findings)
    lines = [
        f"{found.tokens:,} tokens looked at: {found.distinct:,} different, largest {found.largest}, "
        f"{found.entropy_bits:.2f} bits a token, {found.repeated_share:.1%} repeated"
    ]
    if found.padding_share is not None:
        lines.append(f"{found.padding_share:.1%} of the positions of its first rows are padding")
    if found.tokens_per_document:
        lines.append(f"a document has {found.tokens_per_document:.0f} tokens on average")
    for token, share, text in found.common:
        lines.append(f"  {token:8} {share:7.2%}  {text!r}")
    if found.text:
        lines.append(f"begins: {found.text!r}")
    return Result(
        verdict="problem" if bad else "good",
        findings=findings,
        extra={"path": str(path), "statistics": found.to_json()},
        text="\n".join(lines),
    )


def _weighted(parts: list[str]) -> list[tuple[float, Path]]:
    """[(weight, prefix)] of the words of a command line: one prefix, or a weight before each."""
    from mindferry.errors import UsageError

    words = ["1", *parts] if len(parts) == 1 else parts
    try:
        return [(float(weight), Path(prefix)) for weight, prefix in zip(words[::2], words[1::2], strict=True)]
    except ValueError:
        raise UsageError(
            f"found {' '.join(parts)}, expected one prefix, or a weight before each",
            remedy="as for Megatron-LM's --data-path: 0.7 books/train 0.3 code/train",
            id="megatron.blend",
        ) from None


@command("data use")
def use(
    run: Path = typer.Argument(..., metavar="RUN", help="Directory made by migrate."),
    parts: list[str] = typer.Argument(
        ..., metavar="[WEIGHT] PREFIX...", help="PREFIX.bin and PREFIX.idx; several: a weight before each."
    ),
    seed: int = typer.Option(1234, "--seed", help="Megatron-LM's --seed: decides the order of the samples."),
    split: str = typer.Option(
        "1, 0, 0", "--split", help="Megatron-LM's --split; its first share is trained on."
    ),
    samples: int | None = typer.Option(
        None,
        "--samples",
        min=1,
        help="Samples to lay out: all steps' sequences. The order follows from it, too.",
    ),
    json_output: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
) -> Result:
    """Have a run train on Megatron files as they are, in Megatron's order: sets train_dataset of its run.yaml.

    Every id is compared with the model's vocabulary first. The rest of run.yaml stays.
    """
    from mindferry.data.blend import check_vocabulary, megatron_train_dataset
    from mindferry.data.megatron import paths
    from mindferry.errors import UsageError
    from mindferry.targets import run_yaml
    from mindferry.targets.edit import edited
    from mindferry.targets.run_directory import RunDirectory

    directory = RunDirectory.open(run)
    content = run_yaml.read(directory.yaml)
    model, runner = content["model"]["model_config"], content["runner_config"]
    needed = (
        content["lr_schedule"]["total_steps"] * runner["batch_size"] * runner["gradient_accumulation_steps"]
    )
    if samples is not None and samples < needed:
        raise UsageError(
            f"--samples: found {samples}, expected at least {needed}, the sequences of all steps of run.yaml",
            id="megatron.sizes",
        )
    weighted = _weighted(parts)
    block = megatron_train_dataset(
        weighted, seq_length=model["seq_length"], samples=samples or needed, seed=seed, split=split
    )
    with Progress(
        "checking ids", total=sum(paths(p)[0].stat().st_size for _, p in weighted), unit="B"
    ) as bar:
        for _, prefix in weighted:
            check_vocabulary(prefix, model["vocab_size"], bar.advance)
    for key in ("num_parallel_workers", "prefetch_size"):
        block[key] = content["train_dataset"][key]
    loader = block["data_loader"]
    root = str(directory.root.resolve()) + "/"
    loader["config"]["data_path"] = [
        f"./{word.removeprefix(root)}" if word.startswith(root) else word
        for word in loader["config"]["data_path"]
    ]  # what lies inside RUN moves with it
    with edited(directory.yaml) as text:
        text["train_dataset"] = block
    return Result(
        extra={"run": str(directory.root), "train_dataset": block},
        text=f"{directory.yaml}\n  train_dataset: {', '.join(map(str, loader['config']['data_path']))}\n"
        f"  {loader['sizes'][0]:,} samples of {model['seq_length']}, seed {seed}, split {split}",
    )


def register(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, help="Make token files from a corpus, and look at them.")
    group.command("build", epilog=BUILD_EXAMPLE)(build)
    group.command("use", epilog=USE_EXAMPLE)(use)
    group.command("show", epilog=SHOW_EXAMPLE)(show)
    app.add_typer(group, name="data")
