"""mindferry doctor comm: where the time of several processes goes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mindferry.cli.console import Progress, Result, command, output_to
from mindferry.errors import UsageError
from mindferry.findings import Finding

if TYPE_CHECKING:
    from mindferry.diagnosis.communication.examine import Examination
    from mindferry.diagnosis.communication.measure import Scaling
    from mindferry.diagnosis.communication.profiler import RankProfile

EXAMPLE = "Example: mindferry doctor comm run/ --workers 1,2 --steps 12"


def _counts(text: str) -> list[int]:
    """ "1,2,4" -> [1, 2, 4]; '' -> powers of two up to the cores, at least 2."""
    if not text:
        cores = len(os.sched_getaffinity(0))
        return [count for count in (1, 2, 4, 8) if count <= max(2, cores)]
    try:
        counts = sorted({int(part) for part in text.split(",")})
    except ValueError:
        counts = [0]
    if counts[0] < 1:
        raise UsageError(f"--workers {text}: expected numbers like 1,2,4", id="comm.workers")
    return counts


@command("doctor comm")
def comm(
    run: Path | None = typer.Argument(
        None, metavar="[RUN]", help="Directory made by migrate; it is only read."
    ),
    workers: str = typer.Option("", "--workers", metavar="1,2,4", help="Numbers of processes to measure."),
    steps: int = typer.Option(15, "--steps", min=6, help="Steps of each measurement, three of them warm-up."),
    recorded: bool = typer.Option(
        False, "--recorded", help="Judge what train --workers left; train nothing."
    ),
    try_remedies: bool = typer.Option(False, "--try", help="Measure the remedies, too."),
    profile: Path | None = typer.Option(
        None, "--profile", metavar="DIR", help="Read MindSpore's profiler output of an Ascend job instead."
    ),
    plog: Path | None = typer.Option(
        None, "--plog", metavar="DIR", help="Read the communication logs (plog) of an Ascend job instead."
    ),
    json_output: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
) -> Result:
    """Split the step of several processes into computing, collectives, waiting, data and rest, and name the cause.

    Measures T1 (one process with one rank's work) and TN, says which cause costs most and what its remedy would
    bring. --profile and --plog read what Ascend machines write; docs/workers.md says how to turn it on.
    """
    if profile is not None or plog is not None:
        return _ascend(profile, plog)
    if run is None:
        raise UsageError(
            "RUN, --profile or --plog is needed", remedy="mindferry doctor comm --help", id="comm.nothing"
        )
    from mindferry.diagnosis.communication import examine
    from mindferry.diagnosis.loss.rerun import scratch_of
    from mindferry.targets.run_directory import RunDirectory
    from mindferry.training.workers import too_many

    directory = RunDirectory.open(run)
    findings = []
    if recorded:
        exam = examine.from_record(directory)
    else:
        counts = _counts(workers)
        if note := too_many(counts[-1]):
            findings.append(Finding("workers.cores", "warning", note))
        total = None if try_remedies else sum(1 + (count > 1) for count in counts) + (counts[-1] > 1)
        with (
            scratch_of(directory) as scratch,
            Progress("measuring", total=total, unit="runs") as bar,
            output_to(scratch.run.logs / "comm.log"),
        ):
            exam = examine.examine(
                directory, scratch.run, counts, steps, try_remedies, lambda note: bar.advance(note=note)
            )
    findings += [cause.finding for cause in exam.causes]
    if not exam.causes:
        findings.append(Finding("comm.fine", "info", "nothing between the processes costs 5 % of a step"))
    return _result(exam, findings)


def _result(exam: Examination, findings: list[Finding]) -> Result:
    extra = {
        "culprit": exam.culprit or None,
        "scalings": [scaling.to_json() for scaling in exam.scalings],
        "causes": [
            {
                "id": cause.finding.id,
                "seconds": cause.seconds,
                "remedies": [
                    {"name": r.name, "set": r.overrides, "predicted_seconds": r.predicted, "why": r.why}
                    for r in cause.remedies
                ],
            }
            for cause in exam.causes
        ],
        "collective": vars(exam.collective) if exam.collective else None,
        "tried": [tried.to_json() for tried in exam.tried],
    }
    return Result("problem" if exam.culprit else "good", findings, extra, _text(exam))


def _ascend(profile: Path | None, plog: Path | None) -> Result:
    """Judge what an Ascend job left."""
    findings: list[Finding] = []
    lines: list[str] = []
    extra: dict[str, Any] = {"culprit": None, "profiles": [], "processes": []}
    if profile is not None:
        from mindferry.diagnosis.communication import profiler

        ranks = profiler.read(profile)
        findings += profiler.judge(ranks)
        lines += _profile_lines(ranks)
        extra["profiles"] = [
            {
                "rank": rank.rank,
                "steps": rank.steps,
                "microseconds": rank.parts,
                "collectives": {
                    c.kind: {
                        "calls": c.calls, "elapsed_ms": c.elapsed, "wait_ms": c.waiting, "transit_ms": c.transit,
                        "megabytes": c.megabytes, "gigabytes_per_second": c.gigabytes_per_second,
                    }
                    for c in rank.collectives.values()
                },
            }
            for rank in ranks
        ]  # fmt: skip
    if plog is not None:
        from mindferry.diagnosis.communication import hccl_log

        with Progress("reading", total=None, unit="bytes") as bar:
            processes = hccl_log.read(plog, bar.advance)
        findings += hccl_log.judge(processes)
        lines += [
            f"{process.name}: {process.count:,} calls, {sum(c.bytes for g in process.calls.values() for c in g):,} "
            f"bytes; handing them over took {sum(process.host_us.values()) / 1e3:.1f} ms of the host"
            for process in processes
        ]
        extra["processes"] = [
            {
                "name": p.name,
                "calls": {tag: len(calls) for tag, calls in p.calls.items()},
                "host_us": p.host_us,
            }
            for p in processes
        ]
    extra["culprit"] = next((item.id for item in findings if item.severity == "problem"), None)
    if not findings:
        findings.append(Finding("comm.fine", "info", "nothing between the processes stands out"))
    return Result("problem" if extra["culprit"] else "good", findings, extra, "\n".join(lines))


def _profile_lines(ranks: list[RankProfile]) -> list[str]:
    lines = ["ms a step, mean over the profiled steps", "rank  computing  exposed  hidden    free  bubble"]
    for rank in ranks:
        parts = [rank.parts[name] / 1e3 for name in ("computing", "exposed", "overlapped", "free", "bubble")]
        lines.append(f"{rank.rank:4}  " + " ".join(f"{value:8.1f}" for value in parts))
        lines += [
            f"      {c.kind}: {c.calls} calls, {c.elapsed:.1f} ms, of which {c.waiting:.1f} waiting; "
            f"{c.megabytes:.0f} MB at {c.gigabytes_per_second:.1f} GB/s over {', '.join(sorted(c.transports)) or '-'}"
            for c in rank.collectives.values()
        ]
    return lines


def _text(exam: Examination) -> str:
    from mindferry.diagnosis.communication.measure import PARTS

    lines = [
        "ms a step (mean over the processes; T1: one process with one rank's work)",
        f"{'processes':>9} {'T1':>8} {'TN':>8} {'tokens/s':>9}  " + " ".join(f"{part:>10}" for part in PARTS),
    ]
    lines += [_line(scaling) for scaling in exam.scalings]
    last = exam.scalings[-1]
    if last.workers > 1:
        lines.append(f"by rank, of {last.workers}:")
        lines += [
            f"{split.rank:>9} {'':8} {split.step * 1e3:8.1f} {split.tokens / split.step:9,.0f}  "
            + " ".join(f"{getattr(split, part) * 1e3:10.1f}" for part in PARTS)
            for split in last.ranks
        ]
    for remedy in exam.remedies:
        measured = next((tried for tried in exam.tried if tried.remedy is remedy), None)
        after = f", measured {measured.after * 1e3:.1f}" if measured else ""
        lines.append(
            f"{remedy.name} ({remedy.text()}): {last.step * 1e3:.1f} ms a batch now, predicted "
            f"{remedy.predicted * 1e3:.1f}{after}; {remedy.why}"
        )
    return "\n".join(lines)


def _line(scaling: Scaling) -> str:
    from mindferry.diagnosis.communication.measure import PARTS

    alone = f"{scaling.alone * 1e3:8.1f}" if scaling.alone is not None else " " * 8
    parts = " ".join(f"{scaling.mean(part) * 1e3:10.1f}" for part in PARTS)
    return (
        f"{scaling.workers:>9} {alone} {scaling.step * 1e3:8.1f} {scaling.tokens_per_second:9,.0f}  {parts}"
    )


def register(app: typer.Typer) -> None:
    app.command("comm", epilog=EXAMPLE)(comm)
