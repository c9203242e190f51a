"""C++ kernels of the fused GPT layer: built on first use, checked at every load.

`load()` gives the library or says why there is none; nothing here imports MindSpore.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from mindferry.kernels.build import KernelsUnavailable, built_library, flags, has_bf16, toolchain
from mindferry.kernels.library import Library

__all__ = ["KernelState", "KernelsUnavailable", "Library", "has_bf16", "load", "seed_step", "state"]


@dataclass(frozen=True)
class KernelState:
    """What `mindferry doctor env` shows.

    Attributes:
        usable: whether layer_spec fused runs here; reason: why not, else ''.
        bf16: whether the CPU computes in bfloat16 natively.
        threads: threads the kernels use; 0 when unusable.
    """

    usable: bool
    reason: str
    path: Path | None
    compiler: str
    bf16: bool
    threads: int


@lru_cache(maxsize=1)
def _attempt() -> Library | str:
    from mindferry.kernels.selftest import failures

    try:
        library = Library(built_library(toolchain(), flags()))
    except KernelsUnavailable as err:
        return str(err)
    except OSError as err:
        return f"the kernel library does not load: {err}"
    if problem := library.problem():
        return problem
    if failed := failures(library):
        return f"the kernels compute wrong results on this machine: {'; '.join(failed)}"
    return library


def load() -> Library:
    """The kernels, built if need be, after their self-test; kept for the process.

    Raises:
        KernelsUnavailable: with the reason.
    """
    found = _attempt()
    if isinstance(found, str):
        raise KernelsUnavailable(found)
    return found


def state() -> KernelState:
    """Try to load, and describe the outcome; never raises."""
    try:
        tools = toolchain()
        compiler = f"{tools.compiler} ({tools.version})"
    except KernelsUnavailable:
        compiler = ""
    try:
        library = load()
    except KernelsUnavailable as err:
        return KernelState(False, str(err), None, compiler, has_bf16(), 0)
    return KernelState(True, "", library.path, compiler, has_bf16(), library.threads())


def seed_step(seed: int, step: int, rank: int = 0) -> None:
    """Have the dropout masks of what follows depend on these numbers alone; nothing without kernels.

    Called before every step, a resumed run draws the masks of an unbroken one.
    """
    found = _attempt()
    if not isinstance(found, str):
        found.set_seed(((seed * 65537 + rank) * 1_000_003 + step) % 2**64)
