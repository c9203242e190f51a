"""Element types a checkpoint may have, and exact, fast ways between them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


def cast(array: np.ndarray, dtype: np.dtype[Any], out: np.ndarray | None = None) -> np.ndarray:
    """`array` as a contiguous array of `dtype`.

    Args:
        out: memory for the result, of its shape and type; not used where nothing has to change.

    Between bfloat16 and float32 by shifting words, where that is exact: as fast as a copy, and NaNs keep
    their bits, so that a model comes back as it was.
    """
    bfloat16, float32 = DTYPES["bfloat16"], DTYPES["float32"]
    if array.dtype == dtype:
        return np.ascontiguousarray(array)
    made = np.empty(array.shape, dtype) if out is None else out
    if array.dtype == bfloat16 and dtype == float32:
        wide = made.view(np.uint32)
        np.copyto(wide, array.view(np.uint16))
        np.left_shift(wide, np.uint32(16), out=wide)
        return made
    if array.dtype == float32 and dtype == bfloat16:
        words = np.ascontiguousarray(array).view(np.uint32)
        if not np.any(words & np.uint32(0xFFFF)):
            np.copyto(made.view(np.uint16), words >> np.uint32(16), casting="unsafe")
            return made
    with np.errstate(over="ignore", invalid="ignore"):
        np.copyto(made, array, casting="unsafe")
    return made


def count_not_finite(array: np.ndarray) -> int:
    """How many elements are NaN or infinite.

    A sum is finite only if every element is, and costs one pass without a temporary; only when it is not
    (or overflows) are the elements looked at one by one.
    """
    if array.dtype == DTYPES["bfloat16"]:
        words = array.reshape(-1).view(np.uint16)
        # Without the sign, infinity is 0xFF00 and NaNs are above it. In blocks that stay in the cache.
        blocks = range(0, words.size, 1 << 18)
        if all(int((words[b : b + (1 << 18)] << np.uint16(1)).max()) < 0xFF00 for b in blocks):
            return 0
        return int(np.count_nonzero((words & np.uint16(0x7FFF)) >= np.uint16(0x7F80)))
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(array.sum(dtype=array.dtype if array.dtype.itemsize >= 4 else np.float32)):
            return 0
    return int(array.size - np.count_nonzero(np.isfinite(array)))
