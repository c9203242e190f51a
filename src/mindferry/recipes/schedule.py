"""The learning rate of every update, in float64, with the source's own arithmetic.

Frameworks agree on the shapes and differ in the first steps: whether warm-up starts at 0, at 1/w or at
1/(w+1), what the decay is measured from, and where it ends. `rate` follows the order of operations of
transformers' `optimization.py`, nanoGPT's `get_lr` and Megatron-LM's `OptimizerParamScheduler`, so the values
are theirs to the last bits, also where 1 + cos cancels.
"""

from __future__ import annotations

import math
from typing import Any

from mindferry.errors import UsageError
from mindferry.spec import Schedule


def _warmup_progress(schedule: Schedule, step: int) -> float:
    """How much of the warm-up is done at update `step`, 0 to 1."""
    if schedule.warmup_rule == "(t+1)/(w+1)":
        progress = (step + 1) / (schedule.warmup_steps + 1)
    elif schedule.warmup_rule == "max(1,t)/w":
        progress = max(1, step) / schedule.warmup_steps
    else:
        progress = float(step) / float(schedule.warmup_steps)
    if schedule.warmup_shape == "cosine":
        return 0.5 * (1.0 - math.cos(math.pi * progress))
    if schedule.warmup_shape == "1-sqrt":
        return 1.0 - math.sqrt(1.0 - progress)
    return progress


def _wsd_factor(schedule: Schedule, step: int, end: int) -> float:
    """1 while stable, then down to 0 over the last wsd_decay_steps."""
    length = schedule.wsd_decay_steps or 0
    start = end - length
    if step <= start:
        return 1.0
    done = float(step - start) / float(max(1, length))
    return {
        "linear": lambda: 1.0 - done,
        "cosine": lambda: 0.5 * (1.0 + math.cos(math.pi * done)),
        "1-sqrt": lambda: 1.0 - math.sqrt(done),
        "exponential": lambda: 2.0 * math.pow(0.5, done) - 1.0,
    }[schedule.wsd_shape]()


def _factor(schedule: Schedule, step: int, end: int) -> float:
    """Where between min_learning_rate (0) and learning_rate (1) the decay stands; step < end."""
    if schedule.kind == "wsd":
        return _wsd_factor(schedule, step, end)
    warmup = schedule.warmup_steps
    progress = float(step - warmup) / float(max(1, end - warmup))
    if schedule.kind == "linear":
        return float(end - step) / float(max(1, end - warmup))
    if schedule.kind == "polynomial":
        return (1.0 - progress) ** schedule.power
    if schedule.kind == "cosine_with_restarts":
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * ((float(schedule.num_cycles) * progress) % 1.0))))
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * float(schedule.num_cycles) * 2.0 * progress)))


def rate(schedule: Schedule, step: int) -> float:
    """Learning rate of update number `step` (0, 1, ...), a Python float."""
    peak, low = schedule.learning_rate, schedule.min_learning_rate
    if step < schedule.warmup_steps:
        first = schedule.warmup_init
        progress = _warmup_progress(schedule, step)
        # peak * progress, not 0 + (peak - 0) * progress: the same number, and the same rounding.
        return first + (peak - first) * progress if first else peak * progress
    if schedule.kind == "constant":
        return peak
    if schedule.kind == "inverse_sqrt":
        scale = schedule.timescale or max(schedule.warmup_steps, 1)
        return max(low, peak / math.sqrt(max(step + schedule.shift, 1) / scale))
    end = schedule.decay_steps or schedule.total_steps
    if step >= end:
        return low
    factor = _factor(schedule, step, end)
    return low + (peak - low) * factor if low else peak * factor


def table(schedule: Schedule, steps: int | None = None) -> Any:
    """Rates of updates 0 to steps - 1 (total_steps by default), numpy float64 [steps]."""
    import numpy as np

    count = schedule.total_steps if steps is None else steps
    return np.array([rate(schedule, step) for step in range(count)], dtype=np.float64)


def landmarks(schedule: Schedule) -> dict[str, float]:
    """The rates a person compares by eye: the first five, around the end of warm-up, and the last."""
    steps = {0, 1, 2, 3, 4, schedule.warmup_steps - 1, schedule.warmup_steps, schedule.warmup_steps + 1}
    steps.add(schedule.total_steps - 1)
    return {str(s): rate(schedule, s) for s in sorted(steps) if 0 <= s < schedule.total_steps}


# Rate scaling when the global batch changes by the factor r.
SCALINGS = {"none": lambda r: 1.0, "linear": lambda r: r, "sqrt": math.sqrt}


def scaled(schedule: Schedule, rule: str, ratio: float) -> Schedule:
    """`schedule` with every rate scaled for a global batch that is `ratio` times the source's.

    Raises:
        UsageError: an unknown rule.
    """
    if rule not in SCALINGS:
        raise UsageError(f"--lr-scaling: found {rule!r}, expected one of {', '.join(SCALINGS)}")
    factor = SCALINGS[rule](ratio)
    changed = {
        key: getattr(schedule, key) * factor for key in ("learning_rate", "min_learning_rate", "warmup_init")
    }
    return schedule.model_copy(update=changed)
