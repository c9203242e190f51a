"""Checks that several commands share."""

from __future__ import annotations

from collections.abc import Sequence

from mindferry.errors import UsageError, did_you_mean


def one_of(option: str, value: str, allowed: Sequence[str]) -> str:
    """`value`, if it is one of `allowed`.

    Raises:
        UsageError: it is not; the nearest one is named.
    """
    if value in allowed:
        return value
    raise UsageError(
        f"{option}: found {value!r}, expected one of {', '.join(allowed)}",
        remedy=did_you_mean(value, allowed),
        id="option.value",
    )
