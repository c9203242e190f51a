"""Do two loss curves tell the same training? A verdict with its rule, and mindformers' own thresholds beside it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from mindferry.checking.curves import Curve

Verdict = Literal["same", "slower", "faster", "oscillating", "diverged", "undecided"]

MIN_POINTS = 8
ABSOLUTE, RELATIVE = 0.01, 0.01
OSCILLATION = 2.0

RULE = (
    "The two curves are brought to the steps that both have; where one logs means, the other is averaged over the "
    "same steps. d is candidate minus reference, smoothed by a running mean over w = max(5, n/20) points. They are "
    f"the same while |d| <= max({ABSOLUTE}, {RELATIVE:.0%} of the reference's loss) + 3 standard errors of d. "
    "They part at the first point from which on d stays outside, for at least w points and to the end. Above is "
    "slower, below is faster, a loss that is no number is diverged. Oscillating: around its own running mean the "
    f"candidate moves more than {OSCILLATION:g} times as much as the reference in the second half. "
    f"Fewer than {MIN_POINTS} common points are undecided."
)


@dataclass(frozen=True)
class Threshold:
    """One threshold of mindformers' migration precision standard: passed when abs or rel is within.

    `absolute`, `relative` are the measured errors (None where the standard has no such limit or data is missing).
    """

    name: str
    absolute: float | None
    relative: float | None
    absolute_limit: float | None
    relative_limit: float
    passed: bool | None


@dataclass
class Convergence:
    """The comparison of a candidate with a reference.

    Attributes:
        parted_at: the step from which on the smoothed losses differ; None when they do not.
        steps, reference, candidate, smoothed_difference, tolerance: [N], what the verdict was made from.
        slowdown: steps the candidate needed / steps the reference needed to the same loss; None when not known.
        lr_max_rel_diff: greatest relative difference of the learning rates, None when one was not logged.
        sentence: the verdict in words.
    """

    verdict: Verdict
    sentence: str
    parted_at: int | None = None
    steps: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    reference: np.ndarray = field(default_factory=lambda: np.zeros(0))
    candidate: np.ndarray = field(default_factory=lambda: np.zeros(0))
    smoothed_difference: np.ndarray = field(default_factory=lambda: np.zeros(0))
    tolerance: np.ndarray = field(default_factory=lambda: np.zeros(0))
    slowdown: float | None = None
    oscillation: float | None = None
    lr_max_rel_diff: float | None = None
    thresholds: list[Threshold] = field(default_factory=list)

    @property
    def parted(self) -> bool:
        """Whether the candidate must not replace the reference."""
        return self.verdict in ("slower", "oscillating", "diverged")


def smooth(values: np.ndarray, width: int) -> np.ndarray:
    """Centred running mean over `width` points, over fewer at the ends; same length, NaN left out of means."""
    finite = np.isfinite(values)
    kernel = np.ones(min(width, len(values)) or 1)
    total = np.convolve(np.where(finite, values, 0.0), kernel, "same")
    count = np.convolve(finite.astype(float), kernel, "same")
    return np.where(count > 0.5, total / np.maximum(count, 1.0), math.nan)


def common(
    reference: Curve, candidate: Curve, name: str = "loss"
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps that both curves have, and `name` of each there; means where either logs means."""
    a, b = reference[name], candidate[name]
    if name == "loss" and reference.averaged and not candidate.averaged:
        b = _averaged(candidate, reference.steps, b)
        return reference.steps[np.isfinite(a)], a[np.isfinite(a)], b[np.isfinite(a)]
    if name == "loss" and candidate.averaged and not reference.averaged:
        a = _averaged(reference, candidate.steps, a)
        return candidate.steps[np.isfinite(a)], a[np.isfinite(a)], b[np.isfinite(a)]
    steps, left, right = np.intersect1d(reference.steps, candidate.steps, return_indices=True)
    return steps, a[left], b[right]


def _averaged(fine: Curve, steps: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Mean of `values` of `fine` over (previous step, step] for each of `steps`; NaN where it has none."""
    means, previous = [], 0
    for step in steps:
        inside = (fine.steps > previous) & (fine.steps <= step)
        means.append(float(np.mean(values[inside])) if inside.any() else math.nan)
        previous = int(step)
    return np.array(means)


def compare(reference: Curve, candidate: Curve) -> Convergence:
    """Judge `candidate` against `reference` by RULE."""
    steps, a, b = common(reference, candidate)
    keep = np.isfinite(a)
    steps, a, b = steps[keep], a[keep], b[keep]
    result = Convergence("undecided", "", steps=steps, reference=a, candidate=b)
    result.lr_max_rel_diff = _lr_difference(reference, candidate)
    result.thresholds = thresholds(reference, candidate)
    bad = np.flatnonzero(~np.isfinite(b))
    if len(bad):
        result.verdict, result.parted_at = "diverged", int(steps[bad[0]])
        result.sentence = (
            f"the loss is no number at step {result.parted_at}, where the reference has {a[bad[0]]:.4f}"
        )
        return result
    if len(steps) < MIN_POINTS:
        result.sentence = f"{len(steps)} common steps, a verdict needs {MIN_POINTS}"
        return result
    _judge(result)
    return result


def _judge(result: Convergence) -> None:
    steps, a, b = result.steps, result.reference, result.candidate
    width = max(5, len(steps) // 20)
    raw = b - a
    d = smooth(raw, width)
    error = float(np.std(raw - d)) / math.sqrt(width)
    level = smooth(a, width)
    tolerance = np.maximum(ABSOLUTE, RELATIVE * np.abs(level)) + 3 * error
    result.smoothed_difference, result.tolerance = d, tolerance
    outside = np.abs(d) > tolerance
    last_inside = np.flatnonzero(~outside)
    start = int(last_inside[-1]) + 1 if len(last_inside) else 0
    half = len(steps) // 2
    moves = [float(np.std((curve - smooth(curve, width))[half:])) for curve in (a, b)]
    result.oscillation = moves[1] / max(moves[0], 1e-12)
    shakes = result.oscillation > OSCILLATION and moves[1] > ABSOLUTE
    if len(steps) - start >= width:
        result.parted_at = int(steps[start])
        gap = float(d[-1])
        result.verdict = "slower" if gap > 0 else "faster"
        result.sentence = (
            f"parted at step {result.parted_at}; at the end the loss is {abs(gap):.4f} "
            f"{'above' if gap > 0 else 'below'} the reference's {level[-1]:.4f}"
        )
        result.slowdown = _slowdown(steps, level, smooth(b, width))
    elif shakes:
        result.verdict = "oscillating"
        result.sentence = (
            f"the mean agrees, but the loss moves {result.oscillation:.1f} times as much as the reference's"
        )
    else:
        result.verdict = "same"
        worst = int(np.argmax(np.abs(d)))
        result.sentence = (
            f"the same over {len(steps)} points; greatest smoothed difference {abs(d[worst]):.2g} at step "
            f"{steps[worst]}"
        )


def _slowdown(steps: np.ndarray, reference: np.ndarray, candidate: np.ndarray) -> float | None:
    """How many times the reference's steps the candidate needs to the loss that both reach last."""
    goal = max(reference.min(), candidate.min())
    first = [int(steps[np.flatnonzero(curve <= goal)[0]]) for curve in (reference, candidate)]
    return first[1] / first[0]


def _lr_difference(reference: Curve, candidate: Curve) -> float | None:
    _, a, b = common(reference, candidate, "lr")
    both = np.isfinite(a) & np.isfinite(b)
    if not both.any():
        return None
    top = float(np.max(np.abs(a[both])))
    return float(np.max(np.abs(a - b)[both]) / max(top, 1e-30))


def thresholds(reference: Curve, candidate: Curve) -> list[Threshold]:
    """mindformers' "Large Model Migration Precision Standard" (its precision optimization guide).

    First-step loss: 0.005 or 0.5 %; mean loss of the run: 0.01 or 1 %; global norm: mean relative error 10 %.
    The guide wants 5000 steps observed, not fewer than 1000.
    """
    steps, a, b = common(reference, candidate)
    both = np.isfinite(a)
    steps, a, b = steps[both], a[both], b[both]
    found = []
    if len(steps):
        found.append(_threshold("first_step_loss", a[:1], b[:1], 0.005, 0.005))
        found.append(_threshold("mean_loss", a.mean(keepdims=True), b.mean(keepdims=True), 0.01, 0.01))
    else:
        found += [_unknown("first_step_loss"), _unknown("mean_loss")]
    _, x, y = common(reference, candidate, "grad_norm")
    both = np.isfinite(x) & (x > 0)
    if both.any():
        relative = float(np.mean(np.abs(y - x)[both] / x[both]))
        found.append(Threshold("global_norm", None, relative, None, 0.1, bool(relative <= 0.1)))
    else:
        found.append(_unknown("global_norm"))
    return found


def _unknown(name: str) -> Threshold:
    return Threshold(
        name, None, None, None, {"first_step_loss": 0.005, "mean_loss": 0.01}.get(name, 0.1), None
    )


def _threshold(name: str, a: np.ndarray, b: np.ndarray, absolute: float, relative: float) -> Threshold:
    error = abs(float(b[0] - a[0]))
    part = error / max(abs(float(a[0])), 1e-30)
    return Threshold(name, error, part, absolute, relative, bool(error < absolute or part < relative))
