"""migrate: a source becomes a run directory, whole or not at all."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindferry import __version__, legacy_run
from mindferry.errors import UsageError
from mindferry.partition.cluster import ClusterCut, check_cut, write_cut
from mindferry.recipes.precision import precision_of
from mindferry.recipes.reading import read_recipe
from mindferry.recipes.stated import Overrides, Stated, resolve
from mindferry.spec import LossScale, ModelSpec, OptimizerSpec, Precision, Recipe, Recompute, Schedule
from mindferry.targets import model_keys, run_yaml
from mindferry.targets import recompute as recompute_config
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
        tokenizer: directory with tokenizer files, where the source has none.
        assume: values that the source does not state (ModelSpec field -> value).
        cut: strategy for which the weights are written a second time.
        target: "mindformers-1.3.2" for a run of that release instead of one for today's.
    """

    seq_length: int
    batch_size: int | None = None
    epochs: int | None = None
    steps: int | None = None
    learning_rate: float | None = None
    layer_spec: str = "portable"
    compute_dtype: str | None = None
    device: str = "CPU"
    accumulation: int | None = None
    amp_level: str | None = None
    recipe: Path | None = None
    lr_scaling: str | None = None
    warmup_rule: str | None = None
    recompute: Recompute | None = None
    optimizer_state: Path | None = None
    tokenizer: Path | None = None
    assume: dict[str, Any] | None = None
    cut: ClusterCut | None = None
    target: str | None = None


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


def _tokenizer_files(directory: Path) -> dict[str, Path]:
    """The tokenizer files in a directory of the person's choice."""
    from mindferry.data.tokenizer import FILE_NAMES

    found = {name: directory / name for name in FILE_NAMES if (directory / name).is_file()}
    if not found:
        raise UsageError(
            f"--tokenizer: {directory}: none of {', '.join(FILE_NAMES)} in it",
            remedy="give a directory with the tokenizer the model was trained with",
            id="tokenizer.missing",
        )
    return found


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


def _precision(choices: Choices) -> Precision | None:
    """What the command line says about precision, or None."""
    if choices.amp_level is not None:
        return precision_of(choices.amp_level, choices.compute_dtype or "float16")
    return Precision(compute=choices.compute_dtype) if choices.compute_dtype else None


def _recipe(
    choices: Choices, stated: Stated | None, sequences: int
) -> tuple[Recipe, list[dict[str, Any]], list[str]]:
    """The recipe, where each part of it comes from, and warnings."""
    if stated is None:
        if choices.lr_scaling or choices.warmup_rule:
            option = "--lr-scaling" if choices.lr_scaling else "--warmup-rule"
            raise UsageError(f"{option} changes a recipe, and none is given", remedy="add --recipe FILE")
        return _default_recipe(choices, sequences)
    asked = Overrides(
        batch_size=choices.batch_size,
        gradient_accumulation_steps=choices.accumulation,
        epochs=choices.epochs,
        steps=choices.steps,
        learning_rate=choices.learning_rate,
        precision=_precision(choices),
        lr_scaling=choices.lr_scaling,
        warmup_rule=choices.warmup_rule,
        recompute=choices.recompute,
    )
    resolved = resolve(stated, sequences, choices.seq_length, asked)
    return resolved.recipe, resolved.decisions, resolved.warnings


def _default_recipe(choices: Choices, sequences: int) -> tuple[Recipe, list[dict[str, Any]], list[str]]:
    """What transformers' Trainer would do, where no recipe is given."""
    warnings = []
    count = choices.accumulation or 1
    batch_size = choices.batch_size or int(HF_TRAINER_DEFAULTS["batch_size"])
    if batch_size * count > sequences:
        lowered = max(1, sequences // count)
        warnings.append(
            f"batch size lowered from {batch_size} to {lowered}: the corpus has no more sequences"
        )
        batch_size = lowered
    steps_per_epoch = sequences // (batch_size * count)
    epochs = choices.epochs or int(HF_TRAINER_DEFAULTS["epochs"])
    steps = choices.steps or epochs * max(steps_per_epoch, 1)
    precision = _precision(choices) or Precision()
    recipe = Recipe(
        optimizer=OptimizerSpec(),
        schedule=Schedule(
            kind="linear",
            learning_rate=choices.learning_rate or HF_TRAINER_DEFAULTS["learning_rate"],
            total_steps=steps,
        ),
        precision=precision,
        seq_length=choices.seq_length,
        batch_size=batch_size,
        gradient_accumulation_steps=count,
        max_grad_norm=HF_TRAINER_DEFAULTS["max_grad_norm"],
        loss_scale=LossScale(dynamic=True, value=65536.0) if precision.compute == "float16" else LossScale(),
        recompute=choices.recompute or Recompute(),
        seed=int(HF_TRAINER_DEFAULTS["seed"]),
    )

    def row(key: str, value: Any, given: Any = None) -> dict[str, Any]:
        origin = "command line" if given else "transformers.TrainingArguments default"
        return {"key": key, "value": value, "from": origin}

    said = choices.compute_dtype or choices.amp_level
    decisions = [
        row("batch_size", batch_size, choices.batch_size),
        row("gradient_accumulation_steps", count, choices.accumulation),
        row("total_steps", steps, choices.steps or choices.epochs),
        row("learning_rate", recipe.schedule.learning_rate, choices.learning_rate),
        row("lr_schedule", "linear to 0, no warm-up"),
        row("optimizer", "AdamW betas 0.9 0.999 eps 1e-8 decay 0"),
        row("max_grad_norm", recipe.max_grad_norm),
        row("seed", recipe.seed),
        {
            "key": "precision",
            "value": precision.model_dump(),
            "from": "command line" if said else "float32, to compare with the source",
        },
        row("loss_scale", recipe.loss_scale.model_dump(), said),
        row("recompute", recipe.recompute.model_dump(exclude_defaults=True), choices.recompute),
    ]
    return recipe, decisions, warnings


def _continue(
    choices: Choices, source: Any, recipe: Recipe, staging: Path, steps_per_epoch: int
) -> list[str]:
    """Write a checkpoint from which `train --resume` goes on with the source's optimizer state; warnings."""
    import numpy as np

    from mindferry.recipes.optimizer_state import read_state
    from mindferry.training import checkpoints
    from mindferry.training.weights_check import open_model

    if choices.optimizer_state is None:
        return []
    state = read_state(choices.optimizer_state, source, recipe.optimizer)
    if state.step >= recipe.schedule.total_steps:
        raise UsageError(
            f"{choices.optimizer_state}: {state.step} updates made, the schedule has {recipe.schedule.total_steps}",
            remedy="give the whole length of the training as --steps, or a --recipe that states it",
            id="optimizer.steps",
        )
    store = open_model(staging / "model")
    model = {name: np.array(store.read(name)) for name in store.names()} | state.masters
    zeros = {name: np.zeros_like(model[name]) for name in model if name not in state.exp_avg}
    state.exp_avg.update(zeros)
    state.exp_avg_sq.update(zeros)
    checkpoints.save(
        staging / "checkpoints",
        state.step,
        model,
        state.parameters(recipe.loss_scale),
        {
            "seed": recipe.seed,
            "global_batch_size": recipe.sequences_per_step,
            "steps_per_epoch": steps_per_epoch,
            "step": state.step,
            "samples": state.step * recipe.sequences_per_step,
            "skipped_steps": 0,
        },
        keep=1,
    )
    return [
        *state.warnings,
        f"a checkpoint at step {state.step} holds the source's optimizer state: go on with train --resume",
    ]


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
    from mindferry.data import build_mindrecord, find_sources
    from mindferry.sources import open_source
    from mindferry.weights import convert

    ticks = ticks or Ticks()
    check_free(out, force)
    stated = read_recipe(choices.recipe) if choices.recipe is not None else None
    source = open_source(source_path, assume=choices.assume)
    if choices.tokenizer is not None:
        source.tokenizer_files = _tokenizer_files(choices.tokenizer)
    _check(source.spec, choices, source_path)
    if choices.cut is not None:
        check_cut(source.spec, choices.cut)
    if choices.target is not None:
        legacy_run.check_model(source.spec)
    find_sources(data)  # a mistyped path is said before the weights are converted
    with staged(out, force) as staging:
        # First: a kill in the hours of tokenizing costs the minutes of this, and not the other way round.
        weights = convert(source, staging / "model", dtype="float32", progress=ticks.weights)
        data_report = build_mindrecord(
            data,
            source.tokenizer_files,
            staging / "data",
            seq_length=choices.seq_length,
            vocab_size=source.spec.vocab_size,
            eos_token_id=source.spec.eos_token_id,
            # Beside `out`, not in the staging directory: that one goes with a process that was killed.
            work_dir=staging.parent / f".{out.resolve().name}.unfinished",
            progress=ticks.data,
        )
        recipe, recipe_decisions, recipe_warnings = _recipe(choices, stated, data_report.sequences)
        steps_per_epoch = data_report.sequences // recipe.sequences_per_step
        recipe_warnings += _continue(choices, source, recipe, staging, steps_per_epoch)
        content = run_yaml.build(
            source.spec,
            recipe,
            steps_per_epoch=steps_per_epoch,
            layer_spec=choices.layer_spec,
            device=choices.device,
        )
        if any(row["target"].endswith(".beta") for row in weights.created):
            content["model"]["model_config"]["trainable_norm_bias"] = False
        recompute_config.check(content, str(out / "run.yaml"))
        recipe_warnings += recompute_config.notes(content)
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
            "source": {
                "path": str(source_path),
                "format": source.format,
                "family": source.family,
                "assume": choices.assume or {},
            },
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
        if choices.cut is not None:
            made = write_cut(staging, content, choices.cut, ticks.weights)
            report["cut"] = {
                "strategy": str(choices.cut.grid),
                "layers": made.layers,
                "vocab_rows": made.vocab_rows,
            }
            warnings += made.warnings
            write_json(staging / "migration.json", report)
        if choices.target is not None:
            rows, notes = legacy_run.rewrite(
                staging, source.spec, recipe, content, steps_per_epoch, ticks.weights
            )
            report["target"] = {"name": choices.target, "parameters": rows}
            warnings += notes
            write_json(staging / "migration.json", report)
    return Migration(out.resolve(), report, warnings)
