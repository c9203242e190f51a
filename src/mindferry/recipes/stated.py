"""What a source says about training, and how it becomes the Recipe of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindferry.errors import UsageError
from mindferry.recipes.schedule import landmarks, scaled
from mindferry.spec import LossScale, OptimizerSpec, Precision, Recipe, Recompute, Schedule, spec_from


@dataclass
class Stated:
    """A recipe as its file states it; sizes that only the data settle are still open.

    Attributes:
        schedule: Schedule fields but total_steps, which may depend on the data.
        steps: optimizer steps; None: epochs say it.
        warmup_ratio: of the total steps, rounded up, where warmup_steps is not stated.
        batch_size: sequences of a micro-batch and process, as the source ran it.
        sequences_per_step: of one optimizer step, over all processes of the source; None: one process.
        values: the settings as read, by the source's own key.
        ignored: keys that are not about training.
    """

    origin: Path
    kind: str
    optimizer: OptimizerSpec
    schedule: dict[str, Any]
    batch_size: int
    gradient_accumulation_steps: int
    steps: int | None = None
    epochs: float | None = None
    warmup_ratio: float | None = None
    sequences_per_step: int | None = None
    seq_length: int | None = None
    max_grad_norm: float | None = 1.0
    per_token_loss: bool = False
    loss_scale: LossScale = field(default_factory=LossScale)
    precision: Precision = field(default_factory=Precision)
    recompute: Recompute = field(default_factory=Recompute)
    seed: int = 42
    values: dict[str, Any] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Overrides:
    """What the command line says instead; None leaves it to the source."""

    batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    epochs: int | None = None
    steps: int | None = None
    learning_rate: float | None = None
    precision: Precision | None = None
    lr_scaling: str | None = None
    warmup_rule: str | None = None
    recompute: Recompute | None = None


@dataclass
class Resolved:
    """The recipe of a run, where each part is from, and what to look at."""

    recipe: Recipe
    decisions: list[dict[str, Any]]
    warnings: list[str]


def _batch(stated: Stated, asked: Overrides, sequences: int) -> tuple[int, int, float]:
    """Micro-batch size, micro-batches per step, and the new step's sequences over the source's.

    Raises:
        UsageError: the step cannot be cut that way, or the data are too few.
    """
    source = stated.sequences_per_step or stated.batch_size * stated.gradient_accumulation_steps
    size = asked.batch_size or stated.batch_size
    count = asked.gradient_accumulation_steps
    if count is None:
        # The same optimizer step in other micro-batches, unless the person says how many.
        if source % size:
            raise UsageError(
                f"{stated.origin}: an optimizer step has {source} sequences, which do not divide into "
                f"micro-batches of {size}",
                remedy=f"choose a --batch-size that divides {source}, or give --accumulation and --lr-scaling",
                id="recipe.batch",
            )
        count = source // size
    if size * count > sequences:
        raise UsageError(
            f"{stated.origin}: an optimizer step needs {size * count} sequences, the data have {sequences}",
            remedy="give more data, a smaller --seq-length, or --batch-size, --accumulation and --lr-scaling",
            id="recipe.data",
        )
    ratio = size * count / source
    if ratio != 1.0 and asked.lr_scaling is None:
        raise UsageError(
            f"--batch-size {size} x --accumulation {count} makes {size * count} sequences a step, the source "
            f"had {source}: whether the learning rate changes with it must be said",
            remedy=f"add --lr-scaling none, linear (x{ratio:g}) or sqrt (x{math.sqrt(ratio):g})",
            id="recipe.lr-scaling",
        )
    return size, count, ratio


def _schedule(stated: Stated, asked: Overrides, steps: int, ratio: float) -> Schedule:
    values = {**stated.schedule, "total_steps": steps}
    if asked.learning_rate is not None:
        values["learning_rate"] = asked.learning_rate
    if asked.warmup_rule is not None:
        values["warmup_rule"] = asked.warmup_rule
    if stated.warmup_ratio is not None and not values.get("warmup_steps"):
        values["warmup_steps"] = math.ceil(steps * stated.warmup_ratio)
    if values.get("warmup_steps", 0) > steps:
        raise UsageError(
            f"{stated.origin}: warm-up of {values['warmup_steps']} steps, the run has {steps}",
            remedy="give more --steps, or a recipe with a shorter warm-up",
            id="recipe.warmup",
        )
    schedule: Schedule = spec_from(Schedule, values, str(stated.origin))
    return scaled(schedule, asked.lr_scaling or "none", ratio)


def check_precision(precision: Precision, scale: LossScale, origin: str) -> None:
    """Refuse what cannot train.

    Raises:
        UsageError: half-precision parameters (their optimizer states and updates would be lost in them).
    """
    if precision.params != "float32":
        raise UsageError(
            f"{origin}: params {precision.params}: AdamW's updates vanish in half-precision parameters without a "
            "float32 copy, and mindformers keeps none",
            remedy="leave param_init_type at float32; compute_dtype is what makes it fast",
            id="recipe.half-params",
        )
    if precision.compute == "bfloat16" and "float16" in (precision.layernorm, precision.softmax):
        raise UsageError(
            f"{origin}: compute bfloat16 with layernorm {precision.layernorm} and softmax {precision.softmax}: "
            "level O3 means float16 everywhere",
            remedy="use float32 for both (level O2), or float16 throughout",
            id="recipe.o3-bf16",
        )
    if precision.compute != "float16" and scale.dynamic:
        raise UsageError(
            f"{origin}: dynamic loss scale with compute {precision.compute}: only float16 needs one",
            remedy="set compute_dtype float16, or drop the loss scale",
            id="recipe.scale",
        )


def resolve(stated: Stated, sequences: int, seq_length: int, asked: Overrides) -> Resolved:
    """The Recipe of `stated` on `sequences` sequences of data.

    Raises:
        UsageError: the recipe does not fit the data or the command line.
    """
    warnings = list(stated.warnings)
    size, count, ratio = _batch(stated, asked, sequences)
    steps = asked.steps or (None if asked.epochs else stated.steps)
    if steps is None:
        epochs = asked.epochs or stated.epochs or 1
        steps = math.ceil(epochs * (sequences // (size * count)))
    precision = asked.precision or stated.precision
    scale = stated.loss_scale
    if precision.compute != stated.precision.compute:
        half = precision.compute == "float16"
        scale = LossScale(dynamic=True, value=65536.0) if half else LossScale()
    check_precision(precision, scale, str(stated.origin))
    schedule = _schedule(stated, asked, steps, ratio)
    if schedule.kind not in ("constant", "inverse_sqrt") and (schedule.decay_steps or steps) > steps:
        warnings.append(
            f"the decay ends at step {schedule.decay_steps}, the run at {steps}: the rate does not reach its end"
        )
    if stated.seq_length not in (None, seq_length):
        warnings.append(
            f"{stated.origin.name} trained on sequences of {stated.seq_length} tokens, this run has {seq_length}: "
            "an optimizer step sees another number of tokens"
        )
    recipe = Recipe(
        optimizer=stated.optimizer,
        schedule=schedule,
        precision=precision,
        seq_length=seq_length,
        batch_size=size,
        gradient_accumulation_steps=count,
        max_grad_norm=stated.max_grad_norm,
        per_token_loss=stated.per_token_loss,
        loss_scale=scale,
        recompute=asked.recompute or stated.recompute,
        seed=stated.seed,
    )
    return Resolved(recipe, _decisions(stated, asked, recipe), warnings)


def _decisions(stated: Stated, asked: Overrides, recipe: Recipe) -> list[dict[str, Any]]:
    """One row a part: its value and where it is from."""
    said = {key for key, value in vars(asked).items() if value is not None}
    origin = f"{stated.origin.name} ({stated.kind})"

    def row(key: str, value: Any, *options: str) -> dict[str, Any]:
        return {"key": key, "value": value, "from": "command line" if said & set(options) else origin}

    schedule = recipe.schedule.model_dump(exclude_defaults=True)
    return [
        row("batch_size", recipe.batch_size, "batch_size"),
        row("gradient_accumulation_steps", recipe.gradient_accumulation_steps, "gradient_accumulation_steps"),
        row("total_steps", recipe.schedule.total_steps, "steps", "epochs"),
        row("learning_rate", recipe.schedule.learning_rate, "learning_rate", "lr_scaling"),
        row("lr_scaling", asked.lr_scaling or "none", "lr_scaling"),
        row("lr_schedule", schedule, "warmup_rule"),
        row("first_learning_rates", landmarks(recipe.schedule), "warmup_rule"),
        row("optimizer", recipe.optimizer.model_dump()),
        row("max_grad_norm", recipe.max_grad_norm),
        row("per_token_loss", recipe.per_token_loss),
        row("precision", recipe.precision.model_dump(), "precision"),
        row("loss_scale", recipe.loss_scale.model_dump()),
        row("recompute", recipe.recompute.model_dump(exclude_defaults=True), "recompute"),
        row("seed", recipe.seed),
        row("settings_not_about_training", sorted(stated.ignored)),
    ]


class Settings:
    """Typed access to a table of settings; every complaint names the file and the key."""

    def __init__(self, values: dict[str, Any], origin: Path) -> None:
        self.values, self.origin = values, origin
        self.used: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.used.add(key)
        value = self.values.get(key)
        return default if value is None else value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                raise self.wrong(key, value, "a number") from None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self.wrong(key, value, "a finite number")
        return float(value)

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.number(key, default)
        if value != int(value):
            raise self.wrong(key, value, "a whole number")
        return int(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, value, "true or false")
        return value

    def wrong(self, key: str, found: Any, expected: str) -> UsageError:
        return UsageError(
            f"{self.origin}: {key}: found {str(found)[:80]!r}, expected {expected}",
            remedy="correct the recipe, or give the value on the command line",
            id="recipe.value",
        )

    def refuse(self, key: str, why: str) -> UsageError:
        return UsageError(
            f"{self.origin}: {key} = {str(self.values.get(key))[:80]!r}: {why}", id="recipe.unsupported"
        )
