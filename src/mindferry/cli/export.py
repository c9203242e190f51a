"""mindferry export"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import typer

from mindferry.cli.console import Progress, Result, command
from mindferry.findings import Finding

EXAMPLE = "Example: mindferry export run/ --to hf --out gpt2-trained/"


@command("export")
def export(
    run: Path = typer.Argument(
        ..., metavar="RUN", help="Run directory, or one of its checkpoint directories."
    ),
    to: str = typer.Option(..., "--to", help="hf, nanogpt, megatron or mindformers-1.3.2."),
    out: Path = typer.Option(..., "--out", metavar="DIR", help="Directory to create."),
    checkpoint: str | None = typer.Option(
        None,
        "--checkpoint",
        metavar="NAME",
        help="Checkpoint to take (step-00000020), or none for the weights before training; newest by default.",
    ),
    dtype: str | None = typer.Option(
        None, "--dtype", help="float32, float16 or bfloat16; each tensor's type in the source by default."
    ),
    tensor_parallel: int = typer.Option(
        1, "--tensor-parallel", min=1, help="Ranks of a Megatron checkpoint."
    ),
    pipeline_stages: int = typer.Option(
        1, "--pipeline-stages", min=1, help="Stages of a Megatron checkpoint."
    ),
    json_output: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
) -> Result:
    """Write a run's weights for transformers, nanoGPT, Megatron-LM or mindformers 1.3.2.

    A run that was not trained comes back bit for bit.
    """
    from mindferry.cli.choices import one_of
    from mindferry.weights import exporting

    to = one_of("--to", to, exporting.FORMATS)
    trained = exporting.locate(run, checkpoint)
    with Progress("exporting", total=None, unit="tensors") as bar:
        report = exporting.export(
            trained,
            to,
            out,
            dtype=dtype,
            cut=exporting.Cut(tensor_parallel, pipeline_stages),
            progress=lambda done, name: bar.advance(note=name),
        )
    findings = [Finding("export.attention", "warning", text) for text in report.warnings]
    if report.created:
        findings.append(
            Finding(
                "export.created",
                "info",
                f"{len(report.created)} biases that {report.family} always has were written as zeros",
                evidence=", ".join(report.created[:6]),
            )
        )
    where = f"step {report.step}" if report.step else "before training"
    text = (
        f"{report.out}\n  {report.family} as {report.format}, {where}: {report.tensors} tensors, "
        f"{report.bytes:,} bytes\n  from {report.weights}"
    )
    return Result(findings=findings, extra=asdict(report), text=text)


def register(app: typer.Typer) -> None:
    app.command("export", epilog=EXAMPLE)(export)
