"""Step times: medians, spread, and a verdict only above the noise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

BLOCKS = 8
INTERLEAVED_FLOOR, SEPARATE_FLOOR = 0.03, 0.10
RULE = (
    "The ratio is that of the medians. Each series is cut into 8 blocks in the order of time; the standard error of "
    "the ratio is that of the logarithms of the block medians (of the pairwise ratios where both sides took turns). "
    "A difference is one where the logarithm of the ratio exceeds 4 standard errors and the floor: 3 % where both "
    "took turns, 10 % where they were measured one after the other. Everything else is noise."
)


@dataclass(frozen=True)
class Speed:
    """How a candidate's times compare.

    Attributes:
        ratio: reference median / candidate median; above 1 the candidate is faster.
        noise: the relative difference below which nothing is said.
    """

    verdict: Literal["same", "faster", "slower", "undecided"]
    ratio: float
    noise: float
    reference_median: float
    candidate_median: float


def block_medians(values: np.ndarray) -> np.ndarray:
    """Medians of up to BLOCKS consecutive blocks, at least 3 values each."""
    count = max(1, min(BLOCKS, len(values) // 3))
    return np.array([np.median(block) for block in np.array_split(values, count)])


def spread(values: np.ndarray) -> float:
    """Half of the distance between the quartiles, in the unit of the values; 0 for fewer than two."""
    if len(values) < 2:
        return 0.0
    low, high = np.percentile(values, (25, 75))
    return float(high - low) / 2


def judge(reference: np.ndarray, candidate: np.ndarray, *, interleaved: bool) -> Speed:
    """Compare two series of seconds by RULE; interleaved ones are paired by position."""
    a = reference[np.isfinite(reference) & (reference > 0)]
    b = candidate[np.isfinite(candidate) & (candidate > 0)]
    if min(len(a), len(b)) < 6:
        ratio = float(np.median(a) / np.median(b)) if len(a) and len(b) else math.nan
        return Speed("undecided", ratio, math.inf, _median(a), _median(b))
    ratio = float(np.median(a) / np.median(b))
    if interleaved:
        n = min(len(a), len(b))
        logs = block_medians(np.log(a[:n] / b[:n]))
        error = float(np.std(logs, ddof=1)) / math.sqrt(len(logs)) if len(logs) > 1 else math.inf
        floor = INTERLEAVED_FLOOR
    else:
        parts = [np.log(block_medians(x)) for x in (a, b)]
        if min(map(len, parts)) < 2:
            return Speed("undecided", ratio, math.inf, _median(a), _median(b))
        error = math.sqrt(sum(float(np.var(p, ddof=1)) / len(p) for p in parts))
        floor = SEPARATE_FLOOR
    noise = max(4 * error, floor)
    difference = math.log(ratio)
    verdict: Literal["same", "faster", "slower"] = "same"
    if abs(difference) > noise:
        verdict = "faster" if difference > 0 else "slower"
    return Speed(verdict, ratio, noise, _median(a), _median(b))


def _median(values: np.ndarray) -> float:
    return float(np.median(values)) if len(values) else math.nan
