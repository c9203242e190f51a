"""Step 2, precision: the same steps in float32 against the run's own dtypes, then one dtype at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mindferry.diagnosis.loss.metrics import Metrics
from mindferry.diagnosis.loss.rerun import STEPS, Scratch
from mindferry.diagnosis.loss.step import Step
from mindferry.diagnosis.startup.events import telling_line
from mindferry.findings import Finding

BASE = "model.model_config."
# In the order in which the article blames them.
KEYS = ("layernorm_compute_type", "softmax_compute_type", "param_init_type", "compute_dtype")
_WORDS = {
    "layernorm_compute_type": "the variance of a LayerNorm leaves half precision's range or digits",
    "softmax_compute_type": "the attention scores' exponentials lose their digits in half precision",
    "param_init_type": "weights (and what the optimizer adds to them) are kept in half precision: small updates vanish",
    "compute_dtype": "matrix products overflow or lose their digits in half precision",
}
LOST_PROGRESS = 0.25  # of float32's own progress
RELATIVE_GAP = 2e-3  # of the loss; half precision's rounding alone stays below
OVERFLOW_SHARE = 0.2


def dtypes_of(content: Mapping[str, Any]) -> dict[str, str]:
    """The dtype settings of the run that are not float32."""
    config = content["model"]["model_config"]
    return {key: str(config[key]) for key in KEYS if config.get(key, "float32") not in ("float32", "fp32")}


def _quarter(values: np.ndarray) -> int:
    return max(1, len(values) // 4)


def worse(own: Metrics, reference: Metrics) -> str:
    """How `own` is worse than the float32 `reference` on the same batches; "" when it is not."""
    count = min(len(own), len(reference))
    if not count:
        return "it does not train at all"
    mine, theirs = own.loss[:count], reference.loss[:count]
    if not np.isfinite(theirs).all():
        return ""  # float32 fails too: not a matter of precision
    if not np.isfinite(mine).all():
        at = int(own.steps[np.flatnonzero(~np.isfinite(mine))[0]])
        return f"the loss is no number from step {at} on, in float32 it stays finite"
    lost = float(own.overflow[:count].mean() - reference.overflow[:count].mean())
    if lost > OVERFLOW_SHARE:
        shares = own.overflow[:count].mean(), reference.overflow[:count].mean()
        return f"{shares[0]:.0%} of the steps overflow, in float32 {shares[1]:.0%}"
    bad_norm = np.isfinite(reference.grad_norm[:count]) & ~np.isfinite(own.grad_norm[:count])
    if bad_norm.mean() > OVERFLOW_SHARE:
        return (
            f"the gradient norm is no number in {bad_norm.mean():.0%} of the steps, in float32 it is finite"
        )
    part = _quarter(theirs)
    gap = float(np.mean(mine[-part:] - theirs[-part:]))
    progress = float(np.mean(theirs[:part]) - np.mean(theirs[-part:]))
    level = float(np.mean(np.abs(theirs[-part:])))
    start_gap = float(np.abs(mine[0] - theirs[0]))
    if gap > RELATIVE_GAP * level and gap > LOST_PROGRESS * max(progress, 0.0):
        return f"after {count} steps the loss is {gap:.4f} above float32's (which fell by {progress:.4f})"
    if start_gap > 0.05 * abs(float(theirs[0])):
        return f"the very first loss is {mine[0]:.4f}, in float32 {theirs[0]:.4f}"
    return ""


def _float32(keys: Any) -> dict[str, Any]:
    return {BASE + key: "float32" for key in keys}


def _try(scratch: Scratch, steps: int, overrides: dict[str, Any], note: str) -> Metrics | Exception:
    try:
        return scratch.train(steps, overrides, note)
    except Exception as err:
        return err


def examine_precision(content: Mapping[str, Any], scratch: Scratch) -> Step:
    """Train some steps both ways and compare them on the same batches."""
    step = Step("precision")
    low = dtypes_of(content)
    step.evidence["not_float32"] = low
    if not low:
        step.summary = "everything is float32 already"
        return step
    total = content["lr_schedule"]["total_steps"]
    steps = min(STEPS, total) if total > 0 else STEPS
    reference = _try(scratch, steps, _float32(KEYS), "float32")
    if isinstance(reference, Exception):
        step.verdict = "unknown"
        step.summary = f"the float32 run cannot be made: {type(reference).__name__}"
        step.add(
            Finding("loss.precision.no-reference", "warning", step.summary, evidence=str(reference)[:300])
        )
        return step
    own = _try(scratch, steps, {}, "own precision")
    why = _said(own) if isinstance(own, Exception) else worse(own, reference)
    if not isinstance(own, Exception):
        step.evidence["final_loss"] = {"float32": _last(reference), "own": _last(own)}
    if not why:
        step.summary = f"{_shown(low)}: as good as float32 over {steps} steps"
    elif _scale_is_it(scratch, content, steps, reference, step):
        step.summary = f"{_shown(low)}: fine with a smaller loss scale, so it is not the dtypes"
    else:
        _blame(step, scratch, steps, low, reference, why)
    return step


def _said(err: Exception) -> str:
    first = telling_line(str(err)) or type(err).__name__
    return f"the run fails, in float32 it trains: {first[:160]}"


def _last(metrics: Metrics) -> float:
    return float(metrics.loss[-1]) if len(metrics) else float("nan")


def _shown(low: Mapping[str, str]) -> str:
    return ", ".join(f"{key} {value}" for key, value in low.items())


def _scale_is_it(
    scratch: Scratch, content: Mapping[str, Any], steps: int, reference: Metrics, step: Step
) -> bool:
    """The same dtypes without a loss scale are fine: then the scale is at fault, and step 4 tells."""
    scale = content["runner_wrapper"].get("scale_sense", 1.0)
    if scale == 1.0:
        return False
    without = _try(scratch, steps, {"runner_wrapper.scale_sense": 1.0}, "without loss scale")
    fine = not isinstance(without, Exception) and not worse(without, reference)
    step.evidence["fine_without_loss_scale"] = fine
    return fine


def _blame(
    step: Step, scratch: Scratch, steps: int, low: Mapping[str, str], reference: Metrics, why: str
) -> None:
    """One dtype at a time: which of them, set to float32, repairs the run?"""
    repairs = []
    if len(low) > 1:
        for key in low:
            tried = _try(scratch, steps, _float32([key]), f"{key} float32")
            if not isinstance(tried, Exception) and not worse(tried, reference):
                repairs.append(key)
                break
    elif low:
        repairs = list(low)
    step.evidence["repaired_by"] = repairs
    if repairs:
        key = repairs[0]
        cause, remedy = _WORDS[key], f"model_config.{key}: float32"
    else:
        cause = "no single dtype is to blame: too much runs in half precision (the article's O3)"
        remedy = f"keep {', '.join(key for key in low if key != 'compute_dtype')} in float32 (O2)"
    step.add(
        Finding(
            f"loss.precision.{repairs[0] if repairs else 'all'}".replace("_", "-"),
            "problem",
            f"with {_shown(low)} {why}",
            cause=cause,
            remedy=remedy,
        )
    )
    step.summary = "the run is worse than the same run in float32"
