"""mindferry verify"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mindferry.cli.console import Progress, Result, command, output_to
from mindferry.findings import Finding

if TYPE_CHECKING:
    from mindferry.checking.alignment import Alignment
    from mindferry.checking.parity import Parity

EXAMPLE = "Example: mindferry verify run/ --against gpt2/"


@command("verify")
def verify(
    run: Path = typer.Argument(..., metavar="RUN", help="Run directory made by migrate."),
    against: Path = typer.Option(..., "--against", metavar="SRC", help="The source it was migrated from."),
    batch_size: int = typer.Option(2, "--batch-size", min=1, help="Sequences to compare on."),
    training_steps: int = typer.Option(
        50, "--training-steps", min=0, help="Steps of AdamW to compare after that; 0 for none."
    ),
    half: str | None = typer.Option(
        None,
        "--precision",
        help="Also where float16 or bfloat16 leaves float32; run.yaml's compute_dtype otherwise.",
    ),
    json_output: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
) -> Result:
    """Prove that run and source compute the same numbers (needs PyTorch).

    Compares, in fp32 on the run's own data: embedding output, every layer, logits, loss, every gradient; then
    the losses of some training steps. Says where the two part first.
    """
    from mindferry.checking import alignment, parity, precision, sides
    from mindferry.targets.run_directory import RunDirectory

    directory = RunDirectory.open(run)
    log = directory.logs / "verify.log"
    with Progress("verifying", total=1 + 2 * training_steps, unit="steps") as bar, output_to(log):
        training = None
        with sides.opened(directory, against) as pair:
            found = alignment.align(directory, against, batch_size, pair)
            bar.advance(note="one batch compared")
            if found.aligned and training_steps:
                training = parity.train_both(directory, against, training_steps, bar.advance, pair)
        dtype = half or precision.stated(directory)
        seen = precision.view(directory, dtype, batch_size) if dtype else None
    good = found.aligned and (training is None or training.good)
    extra = {**_json(found, training), "precision": seen and seen.to_json()}
    _keep(directory, against, "good" if good else "problem", extra)
    return Result(
        verdict="good" if good else "problem",
        findings=[*_findings(found, training), *_departure(seen)],
        extra=extra,
        text=_table(found, training) + (f"\n{seen.table()}" if seen else ""),
    )


def _keep(directory: Any, against: Path, verdict: str, extra: dict[str, Any]) -> None:
    """Leave the result in RUN/verify.json for `report`; a run that cannot be written to is compared all the same."""
    from mindferry.cli.console import plain
    from mindferry.targets.run_directory import write_json

    content = {"against": str(against), "verdict": verdict, **extra}
    with contextlib.suppress(OSError):
        write_json(directory.root / "verify.json", plain(content))


def _findings(found: Alignment, training: Parity | None) -> list[Finding]:
    findings = []
    if not found.aligned:
        findings.append(
            Finding(
                "verify.parted",
                "problem",
                f"source and target part at {found.first_divergence}",
                remedy="everything before it agrees: look at the parameters and settings of that part",
            )
        )
    if training is not None and not training.good:
        findings.append(
            Finding(
                "verify.training-parted",
                "problem",
                f"the losses part at training step {training.first_bad_step}",
                remedy="one batch agrees, so look at the optimizer, the schedule and the clipping in run.yaml",
            )
        )
    return findings


def _departure(seen: Any) -> list[Finding]:
    """What the precision view has to warn of."""
    if seen is None:
        return []
    findings = [Finding("verify.precision-device", "info", note) for note in seen.notes]
    if seen.first_departure is not None:
        from mindferry.checking import precision

        findings.append(
            Finding(
                "verify.precision",
                "warning",
                f"{seen.dtype} leaves float32 first at {seen.first_departure}",
                cause=precision.RULE,
                remedy="set layernorm_compute_type and softmax_compute_type to float32, or compute_dtype to bfloat16",
            )
        )
    return findings


def _json(found: Alignment, training: Parity | None) -> dict[str, Any]:
    def rows(items: Any) -> list[dict[str, Any]]:
        return [
            {"name": r.name, "max_abs_diff": r.max_abs_diff, "max_rel_diff": r.max_rel_diff} for r in items
        ]

    result: dict[str, Any] = {
        "aligned": found.aligned,
        "logits_max_abs_diff": found.logits_max_abs_diff,
        "loss_abs_diff": found.loss_abs_diff,
        "grad_max_rel_diff": found.grad_max_rel_diff,
        "layers": rows(found.layers),
        "gradients": rows(found.gradients),
        "first_divergence": found.first_divergence,
        "training": None,
    }
    if training is not None:
        result["training"] = {
            "steps": len(training.source_losses),
            "max_loss_diff": training.max_loss_diff,
            "max_lr_rel_diff": training.max_lr_diff,
            "first_bad_step": training.first_bad_step,
            "standard": [vars(row) for row in training.standard],
        }
    return result


def _table(found: Alignment, training: Parity | None) -> str:
    lines = [f"{'':34} {'max abs diff':>12} {'relative':>10}"]
    for row in found.layers:
        mark = "" if row.good else "   <-- parts here" if row.name == found.first_divergence else "   differs"
        lines.append(f"{row.name:34} {row.max_abs_diff:12.2e} {row.max_rel_diff:10.2e}{mark}")
    lines.append(
        f"{'loss':34} {found.loss_abs_diff:12.2e}{'':11}   source {found.loss_source:.6f}, "
        f"target {found.loss_target:.6f}"
    )
    worst = max(found.gradients, key=lambda row: row.max_rel_diff)
    lines.append(
        f"{f'gradients ({len(found.gradients)}), worst':34} {worst.max_abs_diff:12.2e} "
        f"{worst.max_rel_diff:10.2e}   {worst.name}"
    )
    if training is not None:
        lines.append(
            f"{f'training, {len(training.source_losses)} steps':34} {training.max_loss_diff:12.2e}{'':11}"
            f"   loss {training.source_losses[0]:.4f} -> {training.source_losses[-1]:.4f}"
        )
        lines += [_standard(row) for row in training.standard]
    aligned = found.aligned and (training is None or training.good)
    lines.append("aligned" if aligned else "NOT aligned")
    return "\n".join(lines)


def _standard(row: Any) -> str:
    """A threshold of mindformers' migration standard beside ours; it wants 1000 steps or more."""
    passed = {True: "passed", False: "MISSED", None: "not measured"}[row.passed]
    absolute = f"{row.absolute:12.2e}" if row.absolute is not None else f"{'':12}"
    relative = f"{row.relative:10.2e}" if row.relative is not None else f"{'':10}"
    limits = " or ".join(
        [*([f"{row.absolute_limit:g}"] if row.absolute_limit else []), f"{row.relative_limit:.1%}"]
    )
    return f"{'  mindformers: ' + row.name:34} {absolute} {relative}   {passed} (limit {limits})"


def register(app: typer.Typer) -> None:
    app.command("verify", epilog=EXAMPLE)(verify)
