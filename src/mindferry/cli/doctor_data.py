"""mindferry doctor data: does the model wait for its data, and is the data what it should be?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mindferry.cli.console import Progress, Result, command, output_to
from mindferry.findings import Finding

if TYPE_CHECKING:
    from mindferry.data import TokenStatistics
    from mindferry.data.pipeline import Settings, StepTimes, Timing
    from mindferry.targets.run_directory import RunDirectory

EXAMPLE = "Example: mindferry doctor data run/ --seconds 20 --write"

# Share of a step that may wait for data before it is a problem.
_WAITS = 0.05

# A gain below this is the noise of the measurement.
_WORTH_WRITING = 1.10

_SAMPLE_ROWS = 256


def _tokens(run: RunDirectory, content: dict[str, Any]) -> tuple[Path, Any]:
    """(first file, ids of _SAMPLE_ROWS rows) after a check of all files; their paths in `content` become absolute.

    Raises:
        UsageError, MindferryError: the files do not fit run.yaml, or are damaged.
    """
    import numpy as np

    from mindferry.data import check_mindrecord, sample_tokens
    from mindferry.data.blend import Blend, BlendedSamples
    from mindferry.targets import run_yaml
    from mindferry.training import data_source

    section = content["train_dataset"]
    data_source.make_absolute(content, run.root)
    seq_length = int(content["model"]["model_config"].get("seq_length") or 0)
    if data_source.is_megatron(content):
        data_source.check_megatron(content, data_source.sequences_per_step(content))
        blend = Blend.of(section["data_loader"])
        samples = BlendedSamples(blend)
        rows = [samples[k][:-1] for k in range(min(_SAMPLE_ROWS, len(samples)))]
        return blend.parts[0][1], np.concatenate(rows)
    files = run_yaml.data_files(content, run.root)
    for path in files:
        check_mindrecord(path, section["input_columns"], seq_length)
    section["data_loader"] = {**section["data_loader"], "dataset_files": [str(path) for path in files]}
    section["data_loader"].pop("dataset_dir", None)
    return files[0], sample_tokens(files[0], limit=_SAMPLE_ROWS * (seq_length + 1))


def _sample(run: RunDirectory, content: dict[str, Any]) -> tuple[TokenStatistics, list[Finding]]:
    from mindferry.data import load_tokenizer, token_statistics
    from mindferry.data.statistics import judge, padding_share
    from mindferry.data.tokenizer import FILE_NAMES
    from mindferry.errors import MindferryError
    from mindferry.training import data_source

    model = content["model"]["model_config"]
    path, tokens = _tokens(run, content)
    folder = run.root / "tokenizer"
    files = {name: folder / name for name in FILE_NAMES if (folder / name).is_file()}
    try:
        tokenizer = load_tokenizer(files) if files else None
    except MindferryError:
        tokenizer = None  # text is a comfort here; `migrate` has judged the tokenizer
    found = token_statistics(
        tokens,
        model.get("vocab_size"),
        tokenizer=tokenizer,
        eod_token_id=model.get("eos_token_id"),
        unknown_token_id=tokenizer.token_to_id("<unk>") if tokenizer else None,
    )
    if not data_source.is_megatron(content):
        found.padding_share = padding_share(path, _SAMPLE_ROWS)
    return found, judge(found, path, model.get("vocab_size"))


def _waiting(times: StepTimes | None, now: Timing, best: Timing) -> list[Finding]:
    """Whether the pipeline holds the model up, from the training's own record and from the pipeline alone."""
    gain = now.seconds_per_batch / best.seconds_per_batch
    advice = (
        f"{best.settings.text()} makes the pipeline {gain:.2f} times as fast: --write puts it into run.yaml"
        if gain >= _WORTH_WRITING
        else "none of the settings tried is faster: read from a faster disk, or make rows of fewer columns"
    )
    if times is None:
        return [
            Finding(
                "data.no-steps",
                "info",
                "no steps in metrics.jsonl yet: whether the model waits shows after some steps of training",
                remedy="mindferry train RUN --steps 10",
            )
        ]
    numbers = (
        f"data_time {times.data_time * 1e3:.2f} ms of step_time {times.step_time * 1e3:.2f} ms "
        f"({times.waits:.1%}), median of {times.steps} steps; the pipeline alone gives a batch in "
        f"{now.seconds_per_batch * 1e3:.2f} ms"
    )
    if times.waits <= _WAITS:
        return [Finding("data.keeps-up", "info", f"the data keeps up: {numbers}")]
    slow = now.seconds_per_batch > times.compute_time
    cause = (
        "the pipeline takes longer for a batch than the model"
        if slow
        else "the pipeline is fast enough alone: it competes with the model for cores, or prefetches too little"
    )
    return [
        Finding("data.waits", "problem", f"the model waits for data: {numbers}", cause=cause, remedy=advice)
    ]


def _write(path: Path, settings: Settings) -> None:
    """Put `settings` into train_dataset of run.yaml; everything else of the file stays, comments too."""
    from mindferry.targets.edit import edited

    with edited(path) as content:
        section = content["train_dataset"]
        section["num_parallel_workers"] = settings.num_parallel_workers
        section["prefetch_size"] = settings.prefetch_size


def _text(times: StepTimes | None, timings: list[Timing], now: Settings, found: TokenStatistics) -> str:
    lines = ["the pipeline alone, ms a batch:"]
    for timing in timings:
        mark = "  <- run.yaml" if timing.settings == now else ""
        lines.append(f"  {timing.seconds_per_batch * 1e3:9.3f}  {timing.settings.text()}{mark}")
    if times is not None:
        lines.append(
            f"a step computes {times.compute_time * 1e3:.2f} ms and waits {times.data_time * 1e3:.2f} ms"
        )
    lines.append(
        f"{found.tokens:,} tokens looked at: {found.distinct:,} different, {found.entropy_bits:.2f} bits a token, "
        f"{found.repeated_share:.1%} repeated"
        + (f", {found.padding_share:.1%} padding" if found.padding_share else "")
    )
    if found.text:
        lines.append(f"begins: {found.text!r}")
    return "\n".join(lines)


def look(run: Path) -> tuple[list[Finding], str]:
    """What `doctor data` can say in a moment: files, a sample of tokens, the waiting in metrics.jsonl.

    Raises:
        UsageError, MindferryError: the files do not fit run.yaml, or are damaged.
    """
    from mindferry.data.pipeline import step_times
    from mindferry.targets import run_yaml
    from mindferry.targets.run_directory import RunDirectory

    directory = RunDirectory.open(run)
    found, findings = _sample(directory, run_yaml.read(directory.yaml))
    text = f"data: {found.tokens:,} tokens looked at, {found.distinct:,} different"
    text += f", {found.entropy_bits:.2f} bits a token"
    times = step_times(directory.metrics)
    if times is not None:
        text += f"; a step waits {times.waits:.1%} of its time"
        if times.waits > _WAITS:
            message = (
                f"the model waits for data: data_time {times.data_time * 1e3:.2f} ms of step_time "
                f"{times.step_time * 1e3:.2f} ms, median of {times.steps} steps"
            )
            findings.append(
                Finding("data.waits", "problem", message, remedy=f"mindferry doctor data {run} --write")
            )
    return findings, text


@command("doctor data")
def data(
    run: Path = typer.Argument(..., metavar="RUN", help="Directory made by migrate."),
    seconds: float = typer.Option(10.0, "--seconds", min=1.0, help="Time to try settings in."),
    write: bool = typer.Option(False, "--write", help="Put the fastest settings into run.yaml."),
    json_output: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
) -> Result:
    """Look at the data of a run: files, a sample of tokens, speed, and whether the model waits for it."""
    import tempfile

    from mindferry.data.pipeline import Settings, candidates, step_times, try_settings
    from mindferry.targets import run_yaml
    from mindferry.targets.run_directory import RunDirectory
    from mindferry.training import compat, data_source

    directory = RunDirectory.open(run)
    content = run_yaml.read(directory.yaml)
    section = content["train_dataset"]
    found, findings = _sample(directory, content)
    now = Settings(section["num_parallel_workers"], section["prefetch_size"])
    with (
        tempfile.TemporaryDirectory() as folder,
        Progress("trying settings", total=2 * len(candidates(now)), unit="runs") as bar,
        output_to(Path(folder) / "pipeline.log"),
        data_source.helper_for(content),
    ):
        compat.quiet(Path(folder))
        if data_source.is_megatron(content):
            section["data_loader"]["config"]["path_to_cache"] = folder
        batch_size = content["runner_config"]["batch_size"]
        timings = try_settings(section, batch_size, now, seconds, lambda n, note: bar.advance(n, note))
    times = step_times(directory.metrics)
    present = next(timing for timing in timings if timing.settings == now)
    findings += _waiting(times, present, timings[0])
    written = write and present.seconds_per_batch / timings[0].seconds_per_batch >= _WORTH_WRITING
    if written:
        _write(directory.yaml, timings[0].settings)
        findings.append(
            Finding("data.written", "info", f"{directory.yaml}: train_dataset: {timings[0].settings.text()}")
        )
    bad = any(finding.severity == "problem" for finding in findings)
    return Result(
        "problem" if bad else "good",
        findings,
        {
            "checked": ["files", "tokens", "pipeline", *(["metrics"] if times else [])],
            "pipeline": [timing.to_json() for timing in timings],
            "steps": vars(times) | {"waits": times.waits} if times else None,
            "statistics": found.to_json(),
            "written": written,
        },
        _text(times, timings, now, found),
    )


def register(app: typer.Typer) -> None:
    app.command("data", epilog=EXAMPLE)(data)
