"""Step 3, the learning rate: the recorded rates against run.yaml, and run.yaml against what the source did."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindferry.diagnosis.loss.metrics import Metrics
from mindferry.diagnosis.loss.rerun import STEPS, Scratch
from mindferry.diagnosis.loss.step import Step
from mindferry.findings import Finding

TOLERANCE = 1e-3  # of the peak rate, for recorded against computed
RATIO = 1.5  # between the run's and the source's peak rate
FLAT_SHARE = 0.2
MAX_STEPS = 10_000_000
SANE_NORM = 100.0


@dataclass(frozen=True)
class Source:
    """What migration.json says the source's recipe was; None where it says nothing.

    Attributes:
        batch_size: sequences of an optimizer step.
    """

    learning_rate: float | None = None
    warmup_steps: int | None = None
    total_steps: int | None = None
    batch_size: int | None = None
    kind: str | None = None


def source_of(report: Mapping[str, Any]) -> Source:
    """The recipe that `migrate` recorded in migration.json's "recipe" list."""
    values: dict[str, Any] = {}
    for row in report.get("recipe") or ():
        if isinstance(row, Mapping) and isinstance(row.get("key"), str):
            values[row["key"]] = row.get("value")
    stated = _schedule_of(values.get("lr_schedule"))
    if stated is not None:
        values = {"learning_rate": stated.learning_rate, "total_steps": stated.total_steps, **values}
        values.setdefault("warmup_steps", stated.warmup_steps)
    text = str(values.get("lr_schedule", ""))
    kind = stated.kind if stated else next((w for w in ("cosine", "linear", "constant") if w in text), None)
    if "no warm-up" in text:
        values.setdefault("warmup_steps", 0)

    def number(key: str, cast: Any) -> Any:
        value = values.get(key)
        return cast(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    batch = number("batch_size", int)
    return Source(
        learning_rate=number("learning_rate", float),
        warmup_steps=number("warmup_steps", int),
        total_steps=number("total_steps", int),
        batch_size=batch * (number("gradient_accumulation_steps", int) or 1) if batch else None,
        kind=kind,
    )


def _schedule_of(raw: Any) -> Any:
    """The mindferry.spec.Schedule that `migrate` wrote down, or None for anything else."""
    from mindferry.errors import UsageError
    from mindferry.spec import Schedule, spec_from

    if not isinstance(raw, Mapping):
        return None
    try:
        return spec_from(Schedule, {str(key): value for key, value in raw.items()}, "migration.json")
    except UsageError:
        return None


def rates(block: Mapping[str, Any], count: int) -> list[float] | None:
    """The rates of updates 0 .. count - 1 by run.yaml's lr_schedule; None for a class without a known formula."""
    from mindferry.recipes.schedule import rate
    from mindferry.targets.run_yaml import schedule_from

    if int(block.get("total_steps") or 0) <= 0:
        return None
    schedule = schedule_from(block)
    return None if schedule is None else [rate(schedule, step) for step in range(count)]


def examine_schedule(
    content: Mapping[str, Any], report: Mapping[str, Any], metrics: Metrics, scratch: Scratch | None
) -> Step:
    """Compare the rates; where the loss went up without another reason, try a tenth of the rate."""
    step = Step("learning-rate")
    block, source = content["lr_schedule"], source_of(report)
    step.evidence["source"] = vars(source)
    step.evidence["run"] = {
        key: block.get(key) for key in ("type", "learning_rate", "warmup_steps", "total_steps")
    }
    _against_source(step, content, source)
    _recorded(step, block, metrics)
    _flat(step, block, metrics)
    if step.verdict == "good":
        _too_high(step, content, metrics, scratch)
    if not len(metrics) and step.verdict == "good":
        step.verdict = "unknown"
    if not step.summary:
        known = "as the source's" if source != Source() else "the source states none"
        known = "not as it should be" if step.verdict == "culprit" else known
        step.summary = f"{block['type']}, peak {float(block['learning_rate']):g}, {known}"
        step.summary += "" if len(metrics) else "; no record of a training to compare with"
    return step


def _against_source(step: Step, content: Mapping[str, Any], source: Source) -> None:
    block = content["lr_schedule"]
    peak = float(block["learning_rate"])
    if source.learning_rate:
        runner = content["runner_config"]
        batch = runner["batch_size"] * runner.get("gradient_accumulation_steps", 1)
        scaled = source.learning_rate * (batch / source.batch_size if source.batch_size else 1.0)
        low, high = sorted((source.learning_rate, scaled))
        if peak > high * RATIO or peak < low / RATIO:
            also = (
                f" (or {scaled:g}, scaled with the batch {source.batch_size} to {batch})"
                if low != high
                else ""
            )
            step.add(
                Finding(
                    "loss.learning-rate.peak",
                    "problem",
                    f"lr_schedule.learning_rate: found {peak:g}, the source's is {source.learning_rate:g}{also}",
                    cause="the rate was changed after the migration",
                    remedy=f"learning_rate: {source.learning_rate:g}",
                )
            )
    warmup = int(block.get("warmup_steps") or 0)
    if source.warmup_steps is not None and not block.get("warmup_ratio"):
        gap = abs(warmup - source.warmup_steps)
        if gap > max(1, 0.25 * source.warmup_steps):
            step.add(
                Finding(
                    "loss.learning-rate.warmup",
                    "problem",
                    f"lr_schedule.warmup_steps: found {warmup}, the source warms up for {source.warmup_steps} steps",
                    cause="full-size steps on fresh Adam moments throw the weights about",
                    remedy=f"warmup_steps: {source.warmup_steps}",
                )
            )
    total = int(block.get("total_steps") or 0)
    if source.total_steps and total > 0 and not 0.9 <= total / source.total_steps <= 1.1:
        step.add(
            Finding(
                "loss.learning-rate.length",
                "problem",
                f"lr_schedule.total_steps: found {total}, the source's schedule has {source.total_steps}",
                cause="the decay ends too early"
                if total < source.total_steps
                else "the decay does not reach its end",
                remedy=f"total_steps: {source.total_steps}",
            )
        )
    kind = _kind(block)
    if source.kind and kind and source.kind != kind:
        step.add(
            Finding(
                "loss.learning-rate.shape",
                "problem",
                f"lr_schedule.type: {block['type']}, the source's schedule is {source.kind}",
                remedy=f"use the {source.kind} schedule",
            )
        )


def _kind(block: Mapping[str, Any]) -> str | None:
    from mindferry.targets.run_yaml import schedule_from

    schedule = schedule_from(block) if int(block.get("total_steps") or 0) > 0 else None
    return schedule.kind if schedule is not None else None


def _recorded(step: Step, block: Mapping[str, Any], metrics: Metrics) -> None:
    """metrics.jsonl's lr against the formula. An overflow step makes no update, and the schedule waits for it."""
    if not len(metrics) or int(metrics.steps[-1]) > MAX_STEPS:
        return
    wanted = rates(block, int(metrics.steps[-1]))
    if wanted is None:
        return
    skipped = np.concatenate([[0], np.cumsum(metrics.overflow)[:-1]])
    peak = float(block["learning_rate"])
    off, compared = [], 0
    for number, lr, waits in zip(metrics.steps, metrics.lr, skipped, strict=True):
        if not math.isfinite(lr):
            continue
        compared += 1
        possible = (wanted[int(number) - 1], wanted[max(0, int(number) - 1 - int(waits))])
        if min(abs(lr - want) for want in possible) > TOLERANCE * peak:
            off.append((int(number), float(lr), possible[0]))
    step.evidence["compared_steps"] = compared
    if len(off) > 0.05 * max(1, compared):
        at, lr, want = off[0]
        step.add(
            Finding(
                "loss.learning-rate.recorded",
                "problem",
                f"step {at} ran with rate {lr:g}, run.yaml's schedule says {want:g} ({len(off)} such steps)",
                cause="run.yaml was edited after this training, or a resume started the schedule anew",
                remedy="train again with this run.yaml, or resume with the optimizer's own step",
            )
        )


def _flat(step: Step, block: Mapping[str, Any], metrics: Metrics) -> None:
    """A decay that ends long before the training does."""
    found = metrics.lr[np.isfinite(metrics.lr)]
    peak = float(block["learning_rate"])
    if len(found) < 10 or metrics.overflow.mean() > FLAT_SHARE or found.max() - found[-1] < 0.5 * peak:
        return
    moved = np.flatnonzero(np.abs(found - found[-1]) > 1e-3 * peak)
    flat = len(found) - 1 - int(moved[-1])
    if flat > FLAT_SHARE * len(found):
        step.add(
            Finding(
                "loss.learning-rate.flat",
                "problem",
                f"the rate has stood at {found[-1]:g} for the last {flat} of {len(found)} steps",
                cause="the decay is shorter than the training",
                remedy="make decay_steps and total_steps the length of the training",
            )
        )


def _too_high(step: Step, content: Mapping[str, Any], metrics: Metrics, scratch: Scratch | None) -> None:
    """The loss went up though the first gradient was sane: does a tenth of the rate do better?"""
    if len(metrics) < 8 or scratch is None:
        return
    loss = metrics.loss
    part = max(2, len(loss) // 4)
    start = float(np.mean(loss[:2]))
    risen = not np.isfinite(loss).all() or float(np.mean(loss[-part:])) > start * 1.02
    first = metrics.grad_norm[np.isfinite(metrics.grad_norm)][:1]
    if (
        not risen
        or not math.isfinite(start)
        or not len(first)
        or float(first[0]) > SANE_NORM
        or metrics.overflow.any()
    ):
        return
    steps = min(STEPS, len(metrics))
    lower = float(content["lr_schedule"]["learning_rate"]) / 10
    try:
        gentle = scratch.train(steps, {"lr_schedule.learning_rate": lower}, "a tenth of the rate")
    except Exception:
        return
    mine, theirs = loss[:steps][-part:], gentle.loss[-part:]
    better = np.isfinite(theirs).all() and (
        not np.isfinite(mine).all() or float(np.mean(theirs)) < float(np.mean(mine)) - 0.02 * abs(start)
    )
    step.evidence["tenth_of_the_rate"] = float(np.mean(theirs))
    if better:
        step.add(
            Finding(
                "loss.learning-rate.too-high",
                "problem",
                f"the loss rises with rate {lower * 10:g} and falls with {lower:g}",
                cause="the updates overshoot",
                remedy=f"lower learning_rate, towards {lower:g}, or lengthen the warm-up",
            )
        )
