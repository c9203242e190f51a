"""What a verdict most likely means, given how the settings of two runs differ; each hint is a key of the words.

The three dimensions and their reading are the article's: a slower step means that a part of it went wrong; memory that
did not fall means that recompute or mixed precision has no effect; a loss that falls slower or shakes means precision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mindferry.report.collect import Dimensions

PRECISION = ("compute_dtype", "layernorm_compute_type", "softmax_compute_type")
HALF = ("float16", "bfloat16")


def _differs(before: dict[str, Any], after: dict[str, Any], keys: tuple[str, ...]) -> bool:
    """Whether one of `keys` is known of both and not the same."""
    return any(key in before and key in after and before[key] != after[key] for key in keys)


def hints(pair: Dimensions) -> list[str]:
    """Keys of words.yaml, in the order of the dimensions; [] where nothing is to be explained."""
    before, after = pair.before.settings, pair.after.settings
    found = []
    if pair.speed.verdict == "slower" and pair.starves:
        found.append("hint_data")
    elif pair.speed.verdict == "slower":
        found.append("hint_slower")
    if pair.memory in ("same", "more") and before and after:
        recompute = any(after.get(key) and not before.get(key) for key in ("recompute", "select_recompute"))
        halved = after.get("compute_dtype") in HALF and before.get("compute_dtype") == "float32"
        if recompute or halved:
            found.append("hint_no_effect")
        elif pair.memory == "more" and any(
            before.get(k) and not after.get(k) for k in ("recompute", "select_recompute")
        ):
            found.append("hint_recompute_off")
    if pair.convergence.parted:
        rates = pair.convergence.lr_max_rel_diff
        if rates is not None and rates > 1e-3:
            found.append("hint_rate")
        if _differs(before, after, PRECISION):
            found.append("hint_precision")
        if not {"hint_rate", "hint_precision"} & set(found):
            found.append("hint_parted")
    return found
