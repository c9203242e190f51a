"""mindferry train"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from mindferry.cli.console import Progress, Result, command, output_to
from mindferry.errors import MindferryError
from mindferry.findings import Finding

EXAMPLE = "Example: mindferry train run/ --steps 100"


@command("train")
def train(
    run: Path = typer.Argument(..., metavar="RUN", help="Run directory made by migrate."),
    steps: int | None = typer.Option(None, "--steps", min=1, help="Stop after this step of the schedule."),
    mode: str | None = typer.Option(None, "--mode", help="graph or pynative; run.yaml's otherwise."),
    device: str | None = typer.Option(None, "--device", help="cpu or ascend; run.yaml's otherwise."),
    resume: bool = typer.Option(False, "--resume", help="Go on from the newest complete checkpoint."),
    restart: bool = typer.Option(False, "--restart", help="Throw an earlier training away and start over."),
    workers: int = typer.Option(
        1, "--workers", min=1, help="Processes on this machine that share each step's batch (data parallel)."
    ),
    json_output: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
) -> Result:
    """Train a run with mindformers' own Trainer.

    Writes RUN/metrics.jsonl (a line a step) with TensorBoard events beside it, RUN/checkpoints/ and RUN/logs/. The
    first Ctrl-C finishes the step and saves a checkpoint, the second ends at once.

    With --workers, logs of the processes are in RUN/logs/workers/msrun/worker_R.log.
    """
    from mindferry.checking.event_log import EventLog
    from mindferry.cli.choices import one_of
    from mindferry.diagnosis.loss.band import Band
    from mindferry.diagnosis.startup.report import explained
    from mindferry.errors import UsageError
    from mindferry.targets.run_directory import RunDirectory
    from mindferry.training import engine
    from mindferry.training import workers as processes
    from mindferry.training.interruption import Interruption

    if resume and restart:
        raise UsageError("--resume and --restart exclude each other", remedy="give one of them")
    directory = RunDirectory.open(run)
    options = engine.Options(
        steps=steps,
        mode=one_of("--mode", mode, tuple(engine.MODES)) if mode else None,
        device=one_of("--device", device, tuple(engine.DEVICES)) if device else None,
        resume=resume,
        restart=restart,
        workers=workers,
    )
    log = directory.logs / "train.log"
    total = engine.last_step(directory, options)
    with (
        Interruption() as options.interruption,
        Progress("training", total=total, unit="steps") as bar,
        output_to(log),
    ):
        band, warnings, events = Band(), [], EventLog(directory.root)
        crowd = processes.too_many(workers)
        if crowd:
            bar.say(f"warning: {crowd}")
            warnings.append(Finding("workers.cores", "warning", crowd))

        def on_step(record: dict[str, Any]) -> None:
            events.feed(record)
            for finding in band.feed(record):
                warnings.append(finding)
                bar.say(f"warning: {finding.message}")
            bar.at(record["step"], f"loss {record['loss']:.4f}  {record['tokens_per_second']:,.0f} tokens/s")

        options.on_step = on_step
        try:
            if workers > 1:
                outcome = processes.train(directory, options)
            else:
                outcome = engine.train_logged(directory, options, log)
        except MindferryError as err:
            raise explained(err, log) from err
    return _result(directory, outcome, warnings)


def _result(directory: Any, outcome: Any, warnings: list[Finding]) -> Result:
    losses = list(outcome.losses.values())
    first, last = losses[0], losses[-1]
    interrupted = outcome.signal != 0
    extra = {
        "run": str(directory.root),
        "steps": [outcome.first_step, outcome.last_step],
        "first_loss": first,
        "last_loss": last,
        "checkpoint": str(outcome.checkpoint) if outcome.checkpoint else None,
        "metrics": str(directory.metrics),
        "skipped_steps": outcome.skipped,
        "optimizer_bytes": outcome.optimizer_bytes,
        "stopped": "interrupted" if interrupted else "finished",
    }
    text = (
        f"steps {outcome.first_step + 1} to {outcome.last_step}: loss {first:.4f} -> {last:.4f}\n"
        f"  metrics     {directory.metrics}\n"
        f"  checkpoint  {outcome.checkpoint}"
    )
    findings = [*(Finding("train.note", "warning", note) for note in outcome.notes), *warnings]
    if outcome.skipped:
        shown = ", ".join(str(step) for step in outcome.skipped[:5]) + ("..." if outcome.skipped[5:] else "")
        findings.append(
            Finding(
                "train.overflow",
                "info",
                f"{len(outcome.skipped)} updates left out because gradients overflowed (steps {shown})",
                cause="the loss scale was too high for float16; it falls until they fit",
            )
        )
    if interrupted:
        findings.append(
            Finding(
                "train.interrupted",
                "warning",
                f"stopped after step {outcome.last_step}, checkpoint written",
                remedy=f"go on with: mindferry train {directory.root} --resume",
            )
        )
    return Result(
        verdict="problem" if interrupted else "good",
        findings=findings,
        extra=extra,
        text=text,
        exit_code=128 + outcome.signal if interrupted else None,
    )


def register(app: typer.Typer) -> None:
    app.command("train", epilog=EXAMPLE)(train)
