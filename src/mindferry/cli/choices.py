"""Checks that several commands share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

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


def assumed(items: list[str]) -> dict[str, Any]:
    """`["a=1", "b=x"]` as a table; numbers and true/false as JSON has them, anything else as text."""
    result: dict[str, Any] = {}
    for item in items:
        name, sign, value = item.partition("=")
        if not sign:
            raise UsageError(f"--assume {item!r}: expected FIELD=VALUE", id="option.value")
        try:
            result[name] = json.loads(value)
        except ValueError:
            result[name] = value
    return result


def offsets(option: str, text: str | None) -> Any:
    """`0,1` as [0, 1], `0,1;1,0` as one list a virtual stage, `0` as 0, None as None.

    Raises:
        UsageError: something that is no whole number.
    """
    if text is None:
        return None
    try:
        rows = [[int(item) for item in row.split(",")] for row in text.split(";")]
    except ValueError:
        raise UsageError(
            f"{option}: found {text!r}, expected whole numbers such as 0,1 (0,1;1,0 with two virtual stages)",
            id="option.value",
        ) from None
    if rows == [[0]]:
        return 0
    return rows if len(rows) > 1 else rows[0]
