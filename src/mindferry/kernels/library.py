"""The loaded kernel library: calls with numpy arrays, threads, settings."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mindferry.errors import MindferryError


def pack(values: Sequence[int | float | bool]) -> np.ndarray:
    """Settings of a kernel as int64 [n]: integers and flags as they are, floats as the bits of a double."""
    words = [
        struct.unpack("<q", struct.pack("<d", value))[0] if isinstance(value, float) else int(value)
        for value in values
    ]
    return np.array(words, np.int64)


class Library:
    """One loaded libmindferry_kernels.so.

    Attributes:
        path: the file, as `ops.Custom(f"{path}:{function}", ...)` wants it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lib = ctypes.CDLL(str(path))
        self._lib.mf_problem.restype = ctypes.c_char_p
        self._lib.mf_last_error.restype = ctypes.c_char_p
        self._lib.mf_layer_kept_bytes.restype = ctypes.c_int64
        self._lib.mf_product_seconds.restype = ctypes.c_double
        self._lib.mf_product_seconds.argtypes = [ctypes.c_int64] * 3 + [ctypes.c_int] * 2
        self._lib.mf_set_seed.argtypes = [ctypes.c_uint64]

    def problem(self) -> str:
        """'' or what is wrong with the oneDNN it found."""
        return self._lib.mf_problem().decode()

    def call(self, name: str, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray]) -> None:
        """Run a kernel on C-contiguous arrays; outputs are written in place.

        Raises:
            MindferryError: the kernel refused its arguments.
            ValueError: an array is not contiguous.
        """
        arrays = [*inputs, *outputs]
        if not all(array.flags.c_contiguous for array in arrays):
            raise ValueError(f"{name}: kernels take C-contiguous arrays only")
        n = len(arrays)
        data = (ctypes.c_void_p * n)(*[array.ctypes.data for array in arrays])
        ndims = (ctypes.c_int * n)(*[array.ndim for array in arrays])
        shapes = [(ctypes.c_int64 * max(array.ndim, 1))(*array.shape) for array in arrays]
        shape_pointers = (ctypes.c_void_p * n)(*[ctypes.addressof(shape) for shape in shapes])
        dtypes = (ctypes.c_char_p * n)(*[array.dtype.name.encode() for array in arrays])
        function = ctypes.cast(getattr(self._lib, name), ctypes.c_void_p)
        if self._lib.mf_invoke(function, n, data, ndims, shape_pointers, dtypes) != 0:
            raise MindferryError(self._lib.mf_last_error().decode(), id="kernel.arguments")

    def kept_bytes(self, settings: np.ndarray, seq_length: int, batch: int) -> int:
        """Size of the activations that one layer keeps from forward to backward."""
        pointer = ctypes.c_void_p(settings.ctypes.data)
        return self._lib.mf_layer_kept_bytes(pointer, ctypes.c_int64(seq_length), ctypes.c_int64(batch))

    def threads(self) -> int:
        """Threads in use."""
        return self._lib.mf_threads()

    def set_threads(self, count: int) -> None:
        """Use `count` threads, at most as many as were made at the start."""
        self._lib.mf_set_threads(count)

    def set_seed(self, seed: int) -> None:
        """Seed of the dropout masks; the calls that follow number on from it."""
        self._lib.mf_set_seed(seed)

    def release(self) -> None:
        """Give scratch memory back to the system."""
        self._lib.mf_release()

    def product_seconds(self, m: int, n: int, k: int, bf16: bool, transposed: int) -> float:
        """Time of one [m, k] x [k, n] product; bit 0 of `transposed`: A is stored [k, m], bit 1: B is [n, k]."""
        return self._lib.mf_product_seconds(m, n, k, bf16, transposed)
