"""mindferry report"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from mindferry.cli.console import Result, command
from mindferry.findings import Finding

EXAMPLE = "Example: mindferry report run/ earlier-run/"


@command("report")
def report(
    run: Path = typer.Argument(..., metavar="RUN", help="Run directory made by migrate."),
    others: list[Path] = typer.Argument(
        None, metavar="[OTHER]...", help="Earlier runs or source logs to compare with."
    ),
    out: Path = typer.Option(None, "--out", help="Where to write the page; RUN/report.html otherwise."),
    language: str = typer.Option("en", "--language", help="Language shown first: en or zh."),
    force: bool = typer.Option(False, "--force", help="Compare runs of different models or data."),
    json_output: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
) -> Result:
    """One self-contained HTML page about a run, alone or beside earlier ones.

    OTHER is a run directory, metrics.jsonl, transformers' trainer_state.json, a log of nanoGPT or Megatron-LM, or
    TensorBoard events.
    """
    from mindferry.cli.choices import one_of
    from mindferry.errors import UsageError
    from mindferry.report import collect, page
    from mindferry.targets.run_directory import RunDirectory, write_text

    one_of("--language", language, page.LANGUAGES)
    directory = RunDirectory.open(run)
    subject = collect.gather(directory.root)
    rest = [collect.gather(path) for path in others or []]
    forced = collect.check_comparable(subject, rest, force)
    target = out or directory.root / "report.html"
    if target.is_dir() or not target.resolve().parent.is_dir():
        raise UsageError(
            f"--out: {target}: no file can be written there", remedy="name a file in a directory"
        )
    text = page.render(subject, rest, forced, language)
    write_text(target, text)
    return _result(target, len(text.encode()), subject, rest)


def _result(target: Path, size: int, subject: Any, rest: list[Any]) -> Result:
    from mindferry.report import collect
    from mindferry.report.hints import hints

    findings = []
    for item in (subject, *rest):
        findings += [Finding("report.note", "warning", f"{item.label}: {note}") for note in item.notes]
        findings += [
            Finding("report.missing", "info", f"{item.label}: no {name}") for name, _ in item.missing
        ]
    comparisons = []
    for other in rest:
        pair = collect.dimensions(other, subject)
        comparisons.append(
            {
                "before": str(other.path),
                "step_time": {
                    "verdict": pair.speed.verdict,
                    "ratio": pair.speed.ratio,
                    "noise": pair.speed.noise,
                    "waiting_before": pair.waiting_before,
                    "waiting_after": pair.waiting_after,
                    "starves": pair.starves,
                },
                "memory": {"verdict": pair.memory, "before": pair.memory_before, "after": pair.memory_after},
                "convergence": {
                    "verdict": pair.convergence.verdict,
                    "parted_at": pair.convergence.parted_at,
                    "sentence": pair.convergence.sentence,
                },
                "hints": hints(pair),
            }
        )
    extra = {"report": str(target), "bytes": size, "comparisons": comparisons}
    return Result(findings=findings, extra=extra, text=f"{target} ({size / 1e3:.0f} kB)")


def register(app: typer.Typer) -> None:
    app.command("report", epilog=EXAMPLE)(report)
