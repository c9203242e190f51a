"""The line that casts, writes and hashes: right bytes, right checksums, and errors that reach the caller."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mindferry.weights.outlet import BLOCK_BYTES, BLOCKS, Outlet

BF16, F32, F16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32), np.dtype(np.float16)


def reference(array: np.ndarray, dtype: np.dtype[Any]) -> bytes:
    """By another road: through float64 for real casts, as bytes where nothing changes."""
    return array.tobytes() if array.dtype == dtype else array.astype(np.float64).astype(dtype).tobytes()


@pytest.mark.parametrize(
    ("stored", "wanted"), [(BF16, F32), (F32, F32), (BF16, BF16), (F32, F16), (F32, BF16), (F16, F32)]
)
def test_bytes_and_checksums(tmp_path: Path, stored: Any, wanted: Any) -> None:
    """Many tensors at once, some longer than a block, one empty, one with the block's very size, one not contiguous."""
    rng = np.random.default_rng(0)
    elements = BLOCK_BYTES // wanted.itemsize
    sizes = [7, 0, elements, 2 * elements + 3, 1, elements - 1, 5]
    arrays = [rng.standard_normal(size, np.float32).astype(stored) for size in sizes]
    arrays.append(rng.standard_normal((33, 20), np.float32).astype(stored).T)
    with open(tmp_path / "x", "wb", buffering=0) as handle:
        with Outlet(handle) as outlet:
            done = [outlet.put(array, wanted) for array in arrays]
        digests = [future.result() for future, _ in done]
    parts = [reference(array, wanted) for array in arrays]
    assert (tmp_path / "x").read_bytes() == b"".join(parts)
    assert digests == [hashlib.sha256(part).hexdigest() for part in parts]
    assert [count for _, count in done] == [0] * len(arrays)


def test_more_blocks_than_there_is_room_for(tmp_path: Path) -> None:
    """Buffers are used again only when they are written and hashed: nothing of a later block shows in an earlier."""
    array = np.repeat(np.arange(BLOCKS + 8, dtype=np.float32), BLOCK_BYTES // 4).astype(BF16)
    with open(tmp_path / "x", "wb", buffering=0) as handle:
        with Outlet(handle) as outlet:
            digest, _ = outlet.put(array, F32)
        found = digest.result()
    expected = array.astype(np.float32)
    assert np.array_equal(np.fromfile(tmp_path / "x", np.float32), expected)
    assert found == hashlib.sha256(expected.tobytes()).hexdigest()


def test_nan_and_infinity_are_counted(tmp_path: Path) -> None:
    array = np.ones(1000, BF16)
    array[[3, 500]] = np.nan, np.inf
    with open(tmp_path / "x", "wb", buffering=0) as handle, Outlet(handle) as outlet:
        assert outlet.put(array, F32)[1] == 2
        assert outlet.put(np.full(10, 1e6, np.float32), F16)[1] == 10, "too large for the new type"


class Full:
    """A disk that takes `room` bytes, a few thousand at a time."""

    def __init__(self, handle: Any, room: int) -> None:
        self._handle, self._room = handle, room

    def write(self, data: memoryview) -> int:
        if self._room <= 0:
            raise OSError(28, "No space left on device")
        taken = self._handle.write(data[: min(5000, self._room)])
        self._room -= taken
        return taken

    def fileno(self) -> int:
        return int(self._handle.fileno())


@pytest.mark.parametrize("size", [100, 10 * BLOCK_BYTES, 40 * BLOCK_BYTES])
def test_a_full_disk_reaches_the_caller_and_ends_the_threads(tmp_path: Path, size: int) -> None:
    before = threading.active_count()
    with (
        pytest.raises(OSError, match="No space left"),
        open(tmp_path / "x", "wb", buffering=0) as handle,
        Outlet(Full(handle, min(50, size))) as outlet,
    ):
        outlet.put(np.zeros(size, np.uint8), np.dtype(np.uint8))
    assert threading.active_count() == before


def test_an_error_of_the_caller_ends_the_threads_too(tmp_path: Path) -> None:
    before = threading.active_count()

    def fail() -> None:
        with open(tmp_path / "x", "wb", buffering=0) as handle, Outlet(handle) as outlet:
            outlet.put(np.zeros(10, np.float32), F32)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert threading.active_count() == before
