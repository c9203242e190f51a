"""mindferry migrate"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from mindferry.cli.console import Progress, Result, command
from mindferry.errors import UsageError
from mindferry.findings import Finding

if TYPE_CHECKING:
    from mindferry.migration import Migration

EXAMPLE = "Example: mindferry migrate gpt2/ --data corpus/ --out run/ --seq-length 1024"


@command("migrate")
def migrate(
    source: Path = typer.Argument(
        ...,
        metavar="SRC",
        help="Model: a directory (Hugging Face, Megatron-LM, LitGPT, ...) or a nanoGPT ckpt.pt.",
    ),
    data: list[Path] = typer.Option(
        ..., "--data", metavar="TEXT...", help="Text files or directories to train on (several are fine)."
    ),
    out: Path = typer.Option(..., "--out", metavar="RUN", help="Directory to create."),
    seq_length: int = typer.Option(..., "--seq-length", help="Tokens in a sequence."),
    recipe: Path | None = typer.Option(
        None,
        "--recipe",
        metavar="FILE",
        help="The source's training settings: training_args.bin/.json/.yaml, nanoGPT .py, Megatron-LM .sh or .pt.",
    ),
    optimizer_state: Path | None = typer.Option(
        None,
        "--optimizer-state",
        metavar="FILE",
        help="The source's optimizer.pt, ckpt.pt or Megatron-LM checkpoint, to go on with it.",
    ),
    batch_size: int | None = typer.Option(
        None, "--batch-size", min=1, help="Sequences in a micro-batch (8)."
    ),
    accumulation: int | None = typer.Option(
        None, "--accumulation", min=1, help="Micro-batches in an optimizer step (1)."
    ),
    lr_scaling: str | None = typer.Option(
        None,
        "--lr-scaling",
        help="none, linear or sqrt: rates when a step's sequences differ from the recipe's.",
    ),
    warmup_rule: str | None = typer.Option(
        None,
        "--warmup-rule",
        help="t/w, (t+1)/(w+1) or max(1,t)/w: the recipe's warm-up, where versions differ.",
    ),
    epochs: int | None = typer.Option(None, "--epochs", min=1, help="Passes over the data (3)."),
    steps: int | None = typer.Option(
        None, "--steps", min=1, help="Length of the schedule, instead of --epochs."
    ),
    learning_rate: float | None = typer.Option(None, "--learning-rate", min=0.0, help="Peak rate (5e-5)."),
    layer_spec: str = typer.Option("portable", "--layer-spec", help="portable, fused or reference."),
    compute_dtype: str | None = typer.Option(
        None, "--compute-dtype", help="float32, float16 or bfloat16 (the recipe's, or float32)."
    ),
    amp_level: str | None = typer.Option(
        None, "--amp-level", help="O0, O1, O2 or O3, with --compute-dtype as the half type (float16)."
    ),
    recompute: str | None = typer.Option(
        None,
        "--recompute",
        help="off, or some of layers, core_attention, attention, mlp, each with =N for the first N layers.",
    ),
    device: str = typer.Option("cpu", "--device", help="cpu or ascend."),
    tokenizer: Path | None = typer.Option(
        None, "--tokenizer", metavar="DIR", help="Directory with the tokenizer, where SRC has none."
    ),
    assume: list[str] = typer.Option(
        [],
        "--assume",
        metavar="FIELD=VALUE",
        help="A value the source does not state (activation=gelu_tanh).",
    ),
    target: str = typer.Option(
        "mindformers-1.9.0",
        "--target",
        help="mindformers-1.9.0, or mindformers-1.3.2 for its GPT-2 (gpt2.yaml, gpt2.ckpt; within its limits).",
    ),
    cut: str | None = typer.Option(
        None,
        "--cut",
        metavar="dp=,mp=,pp=",
        help="Also write the weights cut for a cluster (model-cut/) and its YAML (run.cluster.yaml).",
    ),
    offset: str | None = typer.Option(
        None, "--offset", metavar="N,N,...", help="With --cut: layers more or fewer than even of each stage."
    ),
    pad_vocab: bool = typer.Option(
        False, "--pad-vocab", help="With --cut: pad the vocabulary with zeros until mp divides it."
    ),
    force: bool = typer.Option(False, "--force", help="Replace RUN if it is a run already."),
    json_output: bool = typer.Option(False, "--json", help="One JSON object on stdout."),
) -> Result:
    """Turn a model and a corpus into a MindSpore Transformers run.

    Writes RUN/run.yaml, RUN/model/, RUN/data/ and RUN/migration.json, where every key and tensor of the source
    is accounted for.
    """
    from mindferry import migration
    from mindferry.cli.choices import assumed, offsets, one_of
    from mindferry.layers import LAYER_SPECS
    from mindferry.partition.cluster import ClusterCut
    from mindferry.partition.layout import parse_grid
    from mindferry.recipes.precision import LEVELS
    from mindferry.recipes.recompute import parse
    from mindferry.recipes.schedule import SCALINGS
    from mindferry.targets.mindformers_132 import TARGET

    if (offset or pad_vocab) and not cut:
        raise UsageError(
            f"{'--offset' if offset else '--pad-vocab'} says how to cut, and --cut is missing",
            remedy="add --cut dp=,mp=,pp=",
            id="option.value",
        )
    legacy = one_of("--target", target, ("mindformers-1.9.0", TARGET)) == TARGET
    if legacy:
        _refuse({"--cut": cut, "--optimizer-state": optimizer_state, "--amp-level": amp_level}, TARGET)

    def maybe(option: str, value: str | None, allowed: tuple[str, ...]) -> str | None:
        return None if value is None else one_of(option, value, allowed)

    choices = migration.Choices(
        seq_length=seq_length,
        batch_size=batch_size,
        epochs=epochs,
        steps=steps,
        learning_rate=learning_rate,
        layer_spec=one_of("--layer-spec", layer_spec, LAYER_SPECS),
        compute_dtype=maybe("--compute-dtype", compute_dtype, ("float32", "float16", "bfloat16")),
        amp_level=maybe("--amp-level", amp_level, LEVELS),
        accumulation=accumulation,
        recipe=recipe,
        optimizer_state=optimizer_state,
        lr_scaling=maybe("--lr-scaling", lr_scaling, tuple(SCALINGS)),
        warmup_rule=maybe("--warmup-rule", warmup_rule, ("t/w", "(t+1)/(w+1)", "max(1,t)/w")),
        recompute=parse(recompute) if recompute is not None else None,
        device={"cpu": "CPU", "ascend": "Ascend"}[one_of("--device", device, ("cpu", "ascend"))],
        tokenizer=tokenizer,
        assume=assumed(assume),
        cut=ClusterCut(parse_grid(cut, "--cut"), offsets("--offset", offset), pad_vocab) if cut else None,
        target=TARGET if legacy else None,
    )
    with Progress("migrating", total=None, unit="steps") as bar:
        ticks = migration.Ticks(weights=lambda done, name: bar.advance(note=name), data=bar)
        made = migration.migrate(source, data, out, choices, force=force, ticks=ticks)
    return _result(made, source, out)


def _refuse(given: dict[str, object], target: str) -> None:
    """Options that the older target has no place for."""
    for option, value in given.items():
        if value is not None:
            raise UsageError(
                f"{option} is not made for --target {target}",
                remedy="leave it out, or stay with the current mindformers",
                id="option.value",
            )


def _result(made: Migration, source: Path, out: Path) -> Result:
    report = made.report
    counts = {key: len(report["weights"][key]) for key in ("used", "ignored", "created")}
    data = report["data"]
    tokens = {key: data[key] for key in ("tokens", "documents", "sequences")}
    findings = [Finding("migrate.attention", "warning", text) for text in made.warnings]
    text = (
        f"{made.run}\n"
        f"  model  {report['model']['family']}, {report['parameters']:,} parameters; tensors: "
        f"{counts['used']} used, {counts['ignored']} ignored, {counts['created']} created\n"
        f"  data   {tokens['documents']:,} documents, {tokens['tokens']:,} tokens, "
        f"{tokens['sequences']:,} sequences of {data['seq_length']}\n"
    )
    if "target" in report:
        text += f"  next   in {out}, with mindformers 1.3.2: run_mindformer.py --config gpt2.yaml"
    else:
        text += f"  next   mindferry verify {out} --against {source}\n         mindferry train {out}"
    if "cut" in report:
        text += f"\n  cut    {report['cut']['strategy']}: model-cut/, which run.cluster.yaml loads"
    return Result(
        findings=findings,
        extra={
            "run": str(made.run),
            "config": report["config"],
            "weights": counts,
            "data": tokens,
            "cut": report.get("cut"),
            "target": report["target"]["name"] if "target" in report else None,
        },
        text=text,
    )


def register(app: typer.Typer) -> None:
    app.command("migrate", epilog=EXAMPLE)(migrate)
