"""mindferry tune"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from mindferry.cli.console import Progress, Result, command
from mindferry.findings import Finding

EXAMPLE = "Example: mindferry tune run/ --budget 30"


@command("tune")
def tune(
    run: Path = typer.Argument(..., metavar="RUN", help="Run directory made by migrate."),
    budget: float = typer.Option(
        30.0, "--budget", min=0.1, help="Minutes; no change is started beyond them."
    ),
    steps: int = typer.Option(16, "--steps", min=8, help="Training steps to measure a change on."),
    memory_limit: float | None = typer.Option(
        None, "--memory-limit", min=0.01, help="GiB that the peak should not exceed."
    ),
    extra: list[str] = typer.Option(
        [], "--try", metavar="KEY=VALUE", help="Also try this key of run.yaml; repeatable."
    ),
    restart: bool = typer.Option(False, "--restart", help="Forget what tune.jsonl says was tried."),
    json_output: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
) -> Result:
    """One change at a time: measured against what is kept so far, then kept or reverted.

    Starts from the smallest configuration (eager, float32, stock operators). Writes RUN/tune.jsonl after every
    change and RUN/run.tuned.yaml; stopped with Ctrl-C or by the budget, the same command goes on.
    """
    from mindferry.targets.run_directory import RunDirectory
    from mindferry.tuning import session

    directory = RunDirectory.open(run)
    limit = int(memory_limit * (1 << 30)) if memory_limit else None
    plan = session.Plan(steps, budget * 60, limit, [_extra(item, directory) for item in extra])
    with Progress("tuning", unit="parts") as bar:
        work = session.Session(directory, plan, restart, lambda note: bar.advance(note=note))
        done = work.tune()
    return _result(directory, done)


def _extra(item: str, directory: Any) -> Any:
    from mindferry.errors import UsageError
    from mindferry.targets import run_yaml
    from mindferry.tuning import session
    from mindferry.tuning.changes import Change

    key, sign, text = item.partition("=")
    if not sign:
        raise UsageError(f"--try {item!r}: expected KEY=VALUE", id="option.value")
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    session.changed(run_yaml.read(directory.yaml), {key: value})
    return Change(item, lambda content: {key: value})


def _result(directory: Any, done: Any) -> Result:
    from mindferry.tuning.changes import WORKERS

    result = next((r for r in done.records if r["decision"] == "result"), None)
    findings = []
    if done.ended == "budget":
        findings.append(
            Finding(
                "tune.budget",
                "info",
                "the budget is used up",
                remedy=f"go on with: mindferry tune {directory.root}",
            )
        )
    extra = {
        "run": str(directory.root),
        "ended": done.ended,
        "kept": done.kept,
        "workers": done.kept.get(WORKERS, 1),
        "ratio": result["ratio"] if result else None,
        "changes": [{k: v for k, v in r.items() if k != "losses"} for r in done.records],
        "tuned": str(directory.root / "run.tuned.yaml"),
    }
    lines = [f"{r['decision']:10} {r['change']:36} {r['why']}" for r in done.records]
    lines.append(f"{directory.root / 'run.tuned.yaml'}")
    if WORKERS in done.kept:
        lines.append(f"train it with --workers {done.kept[WORKERS]}")
    return Result("good", findings, extra, "\n".join(lines))


def register(app: typer.Typer) -> None:
    app.command("tune", epilog=EXAMPLE)(tune)
