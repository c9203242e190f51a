"""mindferry reshard"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import typer

from mindferry.cli.console import Progress, Result, command
from mindferry.findings import Finding

EXAMPLE = "Example: mindferry reshard run/ --to dp=2,mp=2,pp=2 --out run-cut/"


@command("reshard")
def reshard(
    checkpoint: Path = typer.Argument(
        ...,
        metavar="CHECKPOINT|RUN",
        help="A run (its newest checkpoint), a checkpoint directory, or a directory with rank_0, rank_1, ...",
    ),
    to: str = typer.Option(
        ..., "--to", metavar="dp=,mp=,pp=", help="Strategy to write; dp=1,mp=1,pp=1 merges."
    ),
    out: Path = typer.Option(..., "--out", "-o", metavar="DIR", help="Directory to create."),
    source: str | None = typer.Option(
        None,
        "--from",
        metavar="dp=,mp=,pp=",
        help="Strategy the checkpoint is cut for, where no partition.json says it (parallel_config of --config).",
    ),
    config: Path | None = typer.Option(
        None,
        "--config",
        metavar="RUN|YAML",
        help="The network's run or training YAML, where nothing else says it.",
    ),
    step: str | None = typer.Option(
        None,
        "--step",
        metavar="NAME",
        help="step-00000020 of a run, or EPOCH_STEP of rank files; newest by default.",
    ),
    offset: str | None = typer.Option(
        None,
        "--offset",
        metavar="N,N,...",
        help="Layers more or fewer than even of each stage (model_config.offset).",
    ),
    source_offset: str | None = typer.Option(
        None, "--from-offset", metavar="N,N,...", help="The same of the checkpoint that is read."
    ),
    interleave: int | None = typer.Option(
        None, "--interleave", min=1, help="Virtual stages a stage (model_config.pp_interleave_num)."
    ),
    devices: int | None = typer.Option(None, "--devices", min=1, help="Refuse a strategy of another size."),
    pad_vocab: bool = typer.Option(
        False, "--pad-vocab", help="Pad the vocabulary with rows of zeros until mp divides it."
    ),
    take_first: bool = typer.Option(
        False, "--take-first", help="Where ranks that should hold copies differ, take the first."
    ),
    json_output: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
) -> Result:
    """Cut a checkpoint for a parallel strategy, merge one, or go from one strategy to another.

    Bit for bit, the optimizer's moments included; nothing but one share of a tensor is in memory.
    """
    from mindferry.cli.choices import offsets
    from mindferry.partition.layout import check_devices, parse_grid
    from mindferry.partition.opening import Asked
    from mindferry.partition.reshard import Wanted
    from mindferry.partition.reshard import reshard as work

    grid = parse_grid(to)
    if devices is not None:
        check_devices(grid, devices)
    asked = Asked(
        config=config,
        grid=parse_grid(source, "--from") if source else None,
        offset=offsets("--from-offset", source_offset),
        step=step,
    )
    wanted = Wanted(grid, offsets("--offset", offset), interleave, pad_vocab, take_first)
    with Progress("resharding", total=None, unit="tensors") as bar:
        report = work(checkpoint, out, asked, wanted, lambda done, name: bar.advance(note=name))
    findings = [Finding("reshard.attention", "warning", text) for text in report.warnings]
    return Result(findings=findings, extra=asdict(report), text=_text(report, grid.ranks))


def _text(report: object, ranks: int) -> str:
    values = vars(report)
    names = ("data_parallel", "model_parallel", "pipeline_stage")
    before, after = (
        ",".join(
            f"{short}={values[side][name]}" for short, name in zip(("dp", "mp", "pp"), names, strict=True)
        )
        for side in ("source_grid", "grid")
    )
    lines = [
        values["out"],
        f"  {before} -> {after}: {ranks} ranks, {values['tensors']} tensors, {values['bytes']:,} bytes",
        f"  layers of each stage: {', '.join(map(str, values['layers']))}",
        "  the training YAML needs",
        *(f"    {key}: {value}" for key, value in values["keys"].items()),
    ]
    return "\n".join(lines)


def register(app: typer.Typer) -> None:
    app.command("reshard", epilog=EXAMPLE)(reshard)
