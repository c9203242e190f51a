"""Tensor names as the rules use them: wrappers and optional prefixes removed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from mindferry.errors import MindferryError
from mindferry.weights.tensor_store import Shape, TensorStore, same_bits

# torch.compile and DistributedDataParallel put these in front of every name, in any nesting.
WRAPPERS = ("_orig_mod.", "module.")


def canonical(name: str, prefixes: Iterable[str] = ()) -> str:
    """`name` without wrappers (as often as they occur, only at the front) and without one known prefix."""
    stripped = True
    while stripped:
        stripped = False
        for wrapper in WRAPPERS:
            if name.startswith(wrapper):
                name, stripped = name[len(wrapper) :], True
    for prefix in prefixes:
        if name.startswith(prefix):
            return name[len(prefix) :]
    return name


class CanonicalStore(TensorStore):
    """A store seen under canonical names.

    Raises:
        MindferryError: two tensors come to the same name with different contents.
    """

    def __init__(self, inner: TensorStore, prefixes: Iterable[str] = ()) -> None:
        self._inner = inner
        self.warnings = inner.warnings
        self.original: dict[str, str] = {}
        prefixes = tuple(prefixes)
        for name in inner.names():
            short = canonical(name, prefixes)
            other = self.original.setdefault(short, name)
            if other != name:
                self._check_equal(short, other, name)

    def names(self) -> list[str]:
        return list(self.original)

    def shape(self, name: str) -> Shape:
        return self._inner.shape(self.original[name])

    def dtype(self, name: str) -> np.dtype[Any]:
        return self._inner.dtype(self.original[name])

    def read(self, name: str) -> np.ndarray:
        return self._inner.read(self.original[name])

    def release(self, name: str) -> None:
        self._inner.release(self.original[name])

    def location(self, name: str) -> Path:
        return self._inner.location(self.original.get(name, name))

    def _check_equal(self, short: str, first: str, second: str) -> None:
        if not same_bits(self._inner.read(first), self._inner.read(second)):
            raise MindferryError(
                f"{self._inner.location(first)}: {first} and {second} both mean {short}, with other contents",
                remedy="keep one of them",
                id="weights.name-collision",
            )
        self.warnings.append(f"{second} repeats {first}, with equal contents")
