"""mindferry rehearse"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mindferry.cli.console import Progress, Result, command, output_to
from mindferry.findings import Finding

if TYPE_CHECKING:
    from mindferry.rehearsal.session import Report

EXAMPLE = "Example: mindferry rehearse run/ --strategy dp=2,mp=2,pp=2 --scale tiny"


@command("rehearse")
def rehearse(
    run: Path = typer.Argument(..., metavar="RUN", help="Run directory made by migrate."),
    strategy: str | None = typer.Option(
        None, "--strategy", metavar="dp=,mp=,pp=", help="Degrees to rehearse; run.yaml's otherwise."
    ),
    config: Path | None = typer.Option(
        None,
        "--config",
        metavar="YAML",
        help="Training YAML to take the strategy from: RUN/run.cluster.yaml.",
    ),
    scale: str = typer.Option(
        "tiny",
        "--scale",
        help="tiny: the run's layers and heads, small sizes. full: the run's sizes and weights.",
    ),
    steps: int = typer.Option(3, "--steps", min=1, max=1000, help="Optimizer steps."),
    micro_batches: int | None = typer.Option(
        None,
        "--micro-batches",
        min=1,
        help="Micro-batches a step; run.yaml's otherwise, at least one a stage.",
    ),
    offset: str | None = typer.Option(
        None, "--offset", metavar="N,N,...", help="Layers more or fewer than even of each stage."
    ),
    sequence: bool | None = typer.Option(
        None, "--sequence-parallel/--no-sequence-parallel", help="run.yaml's use_seq_parallel otherwise."
    ),
    seed: int = typer.Option(0, "--seed", min=0, help="Of the tokens and of tiny weights."),
    json_output: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
) -> Result:
    """Try a parallel strategy with real processes on this machine, before a cluster is rented.

    Each process takes the part of the model that its card would have. Losses, gradients and checkpoints must be those
    of one process, to 1e-5. It finds wrong partition dimensions, a wrong rank layout, sizes that do not divide and
    layers on a wrong stage. It is a check: on the cluster MindSpore's own semi-automatic parallel trains.

    Logs are in RUN/logs/rehearse.log and RUN/logs/rehearse/job/msrun/worker_R.log.
    """
    from mindferry.cli.choices import offsets, one_of
    from mindferry.partition.layout import parse_grid
    from mindferry.rehearsal import plan as planning
    from mindferry.rehearsal import session
    from mindferry.targets.run_directory import RunDirectory
    from mindferry.training.workers import too_many

    directory = RunDirectory.open(run)
    options = planning.Options(
        yaml=config,
        grid=parse_grid(strategy, "--strategy") if strategy else None,
        micro_batches=micro_batches,
        sequence=sequence,
        offset=offsets("--offset", offset),
        scale=one_of("--scale", scale, planning.SCALES),
        steps=steps,
        seed=seed,
    )
    plan = planning.make(directory, options)
    findings = [Finding("rehearse.note", "info", note) for note in plan.notes]
    crowd = too_many(plan.grid.ranks)
    if crowd:
        text = crowd.replace("--workers", "processes")
        findings.append(Finding("rehearse.cores", "warning", text))
    with Progress("rehearsing", unit="stages") as bar, output_to(directory.logs / "rehearse.log"):
        report = session.rehearse(plan, directory.logs / "rehearse", lambda stage: bar.advance(note=stage))
    return Result(
        verdict="good" if report.good else "problem",
        findings=[*findings, *report.findings],
        extra=_fields(report),
        text=_text(report),
    )


def _fields(report: Report) -> dict[str, Any]:
    plan = report.plan
    return {
        "run": str(plan.run.root),
        "strategy": vars(plan.grid),
        "scale": plan.scale,
        "sizes": {
            "num_layers": plan.spec.num_layers,
            "hidden_size": plan.spec.hidden_size,
            "num_attention_heads": plan.spec.num_attention_heads,
            "vocab_size": plan.spec.vocab_size,
            "seq_length": plan.seq_length,
            "batch_size": plan.batch_size,
            "micro_batches": plan.micro_batches,
        },
        "offset": plan.offset,
        "sequence_parallel": plan.sequence,
        "steps": [{"loss": ours, "one_process": theirs} for ours, theirs in report.losses],
        "errors": {
            "loss": report.loss_error,
            "grad_norm": report.grad_norm_error,
            "weights": report.weights_error,
        },
        "gradients": [{"name": row.kind, "error": row.error, "worst": row.worst} for row in report.gradients],
        "ranks": report.ranks,
    }


_GROUPS = ("tensor", "data", "pipeline", "tied", "world")


def _text(report: Report) -> str:
    plan = report.plan
    sizes = f"{plan.spec.num_layers} layers of {plan.spec.hidden_size}, vocabulary {plan.spec.vocab_size}"
    lines = [f"{plan.grid} on {plan.grid.ranks} processes, {plan.scale}: {sizes}"]
    if not report.ranks:
        return "\n".join([*lines, "no process was started"])
    lines += [
        f"  {plan.steps} steps of {plan.micro_batches} micro-batches of {plan.batch_size} sequences of "
        f"{plan.seq_length} tokens a replica",
        "",
        "  rank stage replica share  layers  parameters  held  " + "".join(f"{g:>11}" for g in _GROUPS),
    ]
    for row in report.ranks:
        lines.append(
            f"  {row['rank']:>4} {row['stage']:>5} {row['replica']:>7} {row['share']:>5}  {_span(row['layers']):>6}  "
            f"{row['parameters']:>10,}  {row['micro_batches_held']:>4}  "
            + "".join(f"{row['bytes'].get(group, 0):>11,}" for group in _GROUPS)
        )
    lines += [
        "  held: micro-batches in flight at most; then bytes handed to each group",
        "",
        "  largest error against one process, relative",
        f"    {'loss':<52} {report.loss_error:.1e}",
        f"    {'norm of the gradient':<52} {report.grad_norm_error:.1e}",
        *(f"    {row.kind:<52} {row.error:.1e}{'' if row.good else '  <-'}" for row in report.gradients),
    ]
    if report.weights_error is not None:
        lines.append(f"    {'weights, merged from the ranks':<52} {report.weights_error:.1e}")
    lines += ["", "the cut model is the model" if report.good else "the cut model is another model"]
    return "\n".join(lines)


def _span(layers: list[int]) -> str:
    """[3, 4, 5] as 3-5."""
    if not layers:
        return "-"
    return f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else str(layers[0])


def register(app: typer.Typer) -> None:
    app.command("rehearse", epilog=EXAMPLE)(rehearse)
