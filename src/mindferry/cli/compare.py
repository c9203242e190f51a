"""mindferry compare"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from mindferry.cli.console import Result, command
from mindferry.findings import Finding

EXAMPLE = "Example: mindferry compare trainer_state.json run/"


@command("compare")
def compare(
    reference: Path = typer.Argument(..., metavar="REFERENCE", help="Run directory or log that is right."),
    candidate: Path = typer.Argument(..., metavar="CANDIDATE", help="Run directory or log to judge."),
    force: bool = typer.Option(False, "--force", help="Compare runs of different models or data."),
    json_output: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
) -> Result:
    """Do two loss curves tell the same training?

    Takes run directories, metrics.jsonl, transformers' trainer_state.json, logs of nanoGPT or Megatron-LM, and
    TensorBoard events. Ends with 1 where the candidate is slower, oscillates or diverges.
    """
    from mindferry.checking import convergence
    from mindferry.report import collect

    before, after = collect.gather(reference), collect.gather(candidate)
    forced = collect.check_comparable(after, [before], force)
    found = convergence.compare(before.curve, after.curve)
    findings = [Finding("compare.different", "warning", text) for text in forced]
    findings += [
        Finding("compare.note", "warning", f"{s.label}: {note}")
        for s in (before, after)
        for note in s.curve.notes
    ]
    if found.parted:
        findings.append(Finding(f"convergence.{found.verdict}", "problem", found.sentence, convergence.RULE))
    if found.lr_max_rel_diff is not None and found.lr_max_rel_diff > 1e-3:
        findings.append(
            Finding(
                "convergence.learning-rate",
                "warning",
                f"the learning rates differ by up to {found.lr_max_rel_diff:.1%} of their peak",
                remedy="compare lr_schedule in both run.yaml, and whether it was scaled with the batch",
            )
        )
    missed = [row.name for row in found.thresholds if row.passed is False]
    if missed:
        findings.append(
            Finding(
                "convergence.standard",
                "warning",
                f"mindformers' migration standard is missed: {', '.join(missed)}",
            )
        )
    verdict = "problem" if found.parted or found.verdict == "undecided" else "good"
    return Result(verdict, findings, _json(found), _text(found))  # type: ignore[arg-type]


def _json(found: Any) -> dict[str, Any]:
    return {
        "convergence": found.verdict,
        "sentence": found.sentence,
        "parted_at": found.parted_at,
        "points": len(found.steps),
        "slowdown": found.slowdown,
        "oscillation": found.oscillation,
        "lr_max_rel_diff": found.lr_max_rel_diff,
        "thresholds": [vars(row) for row in found.thresholds],
    }


def _text(found: Any) -> str:
    lines = [f"{found.verdict}: {found.sentence}"]
    for row in found.thresholds:
        passed = {True: "passed", False: "MISSED", None: "not measured"}[row.passed]
        absolute = f"{row.absolute:.2e} (limit {row.absolute_limit})" if row.absolute is not None else "-"
        relative = f"{row.relative:.2%} (limit {row.relative_limit:.1%})" if row.relative is not None else "-"
        lines.append(f"  {row.name:16} {absolute:26} {relative:26} {passed}")
    return "\n".join(lines)


def register(app: typer.Typer) -> None:
    app.command("compare", epilog=EXAMPLE)(compare)
