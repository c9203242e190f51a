"""migrate: a source becomes a run directory, whole or not at all."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindferry import __version__
from mindferry.errors import UsageError
from mindferry.spec import ModelSpec, OptimizerSpec, Precision, Recipe, Schedule
from mindferry.targets import model_keys, run_yaml
from mindferry.targets.run_directory import check_free, staged, write_json, write_text

# What transformers' TrainingArguments would do where the source states no recipe.
HF_TRAINER_DEFAULTS = {"learning_rate": 5e-5, "epochs": 3, "batch_size": 8, "max_grad_norm": 1.0, "seed": 42}


@dataclass(frozen=True)
class Choices:
    """What the person may say about the run; None leaves it to the source or to HF Trainer's defaults.

    Attributes:
        seq_length: tokens a sequence.
        batch_size: sequences a step.
        steps: length of the schedule in optimizer steps (wins over epochs).
    """

    seq_length: int
    batch_size: int | None = None
    epochs: int | None = None
    steps: int | None = None
    learning_rate: float | None = None
    layer_spec: str = "portable"
    compute_dtype: str = "float32"
    device: str = "CPU"


@dataclass
class Migration:
    """What was made.

    Attributes:
        report: content of migration.json.
        warnings: what a person should look at.
    """

    run: Path
    report: dict[str, Any]
    warnings: list[str]


@dataclass
class Ticks:
    """Where the parts of a migration report their progress."""

    weights: Callable[[int, str], None] | None = None
    data: Any = None


def _check(spec: ModelSpec, choices: Choices, source: Path) -> None:
    if choices.seq_length <= 0:
        raise UsageError(f"--seq-length: found {choices.seq_length}, expected a positive number of tokens")
    if spec.position_embedding == "learned_absolute" and choices.seq_length > spec.max_position_embeddings:
        raise UsageError(
            f"--seq-length: found {choices.seq_length}, expected at most {spec.max_position_embeddings} "
            f"(the learned positions of {source / 'config.json'})",
            remedy=f"use --seq-length {spec.max_position_embeddings} or less",
            id="seq-length.positions",
        )
    if spec.sliding_window is not None and choices.seq_length > spec.sliding_window:
        raise UsageError(
            f"--seq-length: found {choices.seq_length}, expected at most {spec.sliding_window} "
            "(the source's sliding_window)",
            remedy="up to that length the window changes nothing; beyond it mindformers' layers would differ",
            id="seq-length.window",
        )
    if spec.family not in run_yaml.ARCHITECTURES:
        raise UsageError(
            f"{source}: models of family {spec.family!r} cannot be trained yet",
            remedy=f"families that can: {', '.join(sorted(run_yaml.ARCHITECTURES))}",
            id="family.untrainable",
        )


def _recipe(choices: Choices, sequences: int) -> tuple[Recipe, list[dict[str, Any]], list[str]]:
    """The recipe, where each part of it comes from, and warnings."""
    warnings = []
    batch_size = choices.batch_size or int(HF_TRAINER_DEFAULTS["batch_size"])
    if batch_size > sequences:
        warnings.append(
            f"batch size lowered from {batch_size} to {sequences}: the corpus has no more sequences"
        )
        batch_size = sequences
    steps_per_epoch = sequences // batch_size
    epochs = choices.epochs or int(HF_TRAINER_DEFAULTS["epochs"])
    steps = choices.steps or epochs * steps_per_epoch
    recipe = Recipe(
        optimizer=OptimizerSpec(),
        schedule=Schedule(
            kind="linear",
            learning_rate=choices.learning_rate or HF_TRAINER_DEFAULTS["learning_rate"],
            total_steps=steps,
        ),
        precision=Precision(compute=choices.compute_dtype),
        seq_length=choices.seq_length,
        batch_size=batch_size,
        max_grad_norm=HF_TRAINER_DEFAULTS["max_grad_norm"],
        seed=int(HF_TRAINER_DEFAULTS["seed"]),
    )

    def origin(given: Any) -> str:
        return "command line" if given else "transformers.TrainingArguments default"

    decisions: list[dict[str, Any]] = [
        {"key": "batch_size", "value": batch_size, "from": origin(choices.batch_size)},
        {"key": "total_steps", "value": steps, "from": origin(choices.steps or choices.epochs)},
        {
            "key": "learning_rate",
            "value": recipe.schedule.learning_rate,
            "from": origin(choices.learning_rate),
        },
        {"key": "lr_schedule", "value": "linear to 0, no warm-up", "from": origin(None)},
        {"key": "optimizer", "value": "AdamW betas 0.9 0.999 eps 1e-8 decay 0", "from": origin(None)},
        {"key": "max_grad_norm", "value": recipe.max_grad_norm, "from": origin(None)},
        {"key": "seed", "value": recipe.seed, "from": origin(None)},
        {
            "key": "compute_dtype",
            "value": choices.compute_dtype,
            "from": "command line or float32, to compare",
        },
    ]
    return recipe, decisions, warnings


def migrate(
    source_path: Path,
    data: list[Path],
    out: Path,
    choices: Choices,
    *,
    force: bool = False,
    ticks: Ticks | None = None,
) -> Migration:
    """Write the run directory `out` from a source and a corpus.

    Raises:
        UsageError: a path, a setting or the source cannot be used; `out` is then as it was.
        MindferryError: the source is damaged, or no space is left.
    """
    from mindferry.data import build_mindrecord
    from mindferry.sources import open_source
    from mindferry.weights import convert

    ticks = ticks or Ticks()
    check_free(out, force)
    source = open_source(source_path)
    _check(source.spec, choices, source_path)
    with staged(out, force) as staging:
        data_report = build_mindrecord(
            data,
            source.tokenizer_files,
            staging / "data",
            seq_length=choices.seq_length,
            vocab_size=source.spec.vocab_size,
            eos_token_id=source.spec.eos_token_id,
            progress=ticks.data,
        )
        weights = convert(source, staging / "model", dtype="float32", progress=ticks.weights)
        recipe, recipe_decisions, recipe_warnings = _recipe(choices, data_report.sequences)
        content = run_yaml.build(
            source.spec,
            recipe,
            steps_per_epoch=data_report.sequences // recipe.batch_size,
            layer_spec=choices.layer_spec,
            device=choices.device,
        )
        write_text(staging / "run.yaml", run_yaml.dump(content))
        tokenizer = staging / "tokenizer"
        if source.tokenizer_files:
            tokenizer.mkdir()
            for name, path in source.tokenizer_files.items():
                shutil.copyfile(path, tokenizer / name)
        warnings = [*source.warnings, *weights.warnings, *recipe_warnings]
        report = {
            "mindferry": __version__,
            "python": platform.python_version(),
            "source": {"path": str(source_path), "format": source.format, "family": source.family},
            "model": source.spec.model_dump(),
            "parameters": source.spec.num_parameters(),
            "config": [vars(d) for d in source.decisions],
            "target_defaults_that_differ": model_keys.differing_defaults(content["model"]["model_config"]),
            "recipe": recipe_decisions,
            "weights": weights.to_json(),
            "data": data_report.to_json(),
            "warnings": warnings,
        }
        write_json(staging / "migration.json", report)
    return Migration(out.resolve(), report, warnings)
