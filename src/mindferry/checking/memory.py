"""Peak memory: a verdict only above what two runs of the same thing differ by."""

from __future__ import annotations

import math
from typing import Literal

FLOOR_BYTES, FLOOR_SHARE = 16 << 20, 0.03
RULE = "Peak memory differs where the peaks differ by more than 3 % and more than 16 MiB."


def judge(reference: float, candidate: float) -> Literal["same", "less", "more", "undecided"]:
    """Compare two peaks in bytes by RULE."""
    if not (math.isfinite(reference) and math.isfinite(candidate)) or min(reference, candidate) <= 0:
        return "undecided"
    difference = candidate - reference
    if abs(difference) <= max(FLOOR_BYTES, FLOOR_SHARE * reference):
        return "same"
    return "less" if difference < 0 else "more"
