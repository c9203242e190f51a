"""Precision levels O0 to O3, as MindSpore's amp_level names them."""

from __future__ import annotations

from mindferry.errors import UsageError
from mindferry.spec import Precision

LEVELS = ("O0", "O1", "O2", "O3")


def precision_of(level: str, half: str = "float16") -> Precision:
    """The Precision of an amp_level.

    O0: float32 throughout. O1: matrix products in `half`, additions to the residual stream in float32 (what
    leaves a layer is cast to `half` all the same, as mindformers 1.9.0 does it). O2: `half`, with LayerNorm,
    softmax and loss in float32. O3: float16 throughout (the loss stays float32, as mindformers casts the
    logits). Parameters are float32 at every level.

    Raises:
        UsageError: O3 with bfloat16, whose 8 bits are too few for norms and softmax.
    """
    if level not in LEVELS:
        raise UsageError(f"--amp-level: found {level!r}, expected one of {', '.join(LEVELS)}")
    if level == "O0":
        return Precision()
    if level == "O3":
        if half != "float16":
            raise UsageError(
                f"--amp-level O3 with --compute-dtype {half}: O3 means float16 everywhere",
                remedy="use O2 with bfloat16, or O3 with float16",
                id="recipe.o3-bf16",
            )
        return Precision(compute="float16", layernorm="float16", softmax="float16")
    return Precision(compute=half, fp32_residual=level == "O1")
