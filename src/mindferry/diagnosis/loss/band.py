"""The band in which loss and gradient norm have moved so far; a step outside it is worth a line."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from mindferry.findings import Finding

_SPREAD = 1.4826  # median absolute deviation of a normal distribution -> its standard deviation


class Band:
    """Watches a training step by step; pure, no input or output of its own.

    A value is outside when its logarithm lies more than `width` robust standard deviations above the median of
    the last `window` steps. Nothing is said in the first `quiet` steps, nor twice within `every` steps.

    Usage: `for text in band.feed(record): say(text)` with each record of metrics.jsonl.
    """

    def __init__(self, window: int = 64, quiet: int = 20, width: float = 8.0, every: int = 20) -> None:
        self._quiet, self._width, self._every = quiet, width, every
        self._seen = {name: deque[float](maxlen=window) for name in ("loss", "grad_norm")}
        self._last_said = dict.fromkeys(("loss", "grad_norm", "overflow", "nan"), -(10**12))
        self._overflows = 0
        self._steps = 0

    def feed(self, record: Mapping[str, Any]) -> list[Finding]:
        """Take one step's record; returns what to warn about, mostly nothing."""
        self._steps += 1
        given = record.get("step")
        step = given if isinstance(given, int) else self._steps
        found = [item for name in ("loss", "grad_norm") for item in self._value(name, record.get(name), step)]
        self._overflows = self._overflows + 1 if record.get("overflow") is True else 0
        if self._overflows >= 5 and self._may_say("overflow", step):
            found.append(
                Finding(
                    "loss.overflowing",
                    "warning",
                    f"step {step}: the last {self._overflows} steps overflowed; no weight moved in them",
                    remedy="stop and run `mindferry doctor loss RUN`",
                )
            )
        return found

    def _may_say(self, name: str, step: int) -> bool:
        if step - self._last_said[name] < self._every:
            return False
        self._last_said[name] = step
        return True

    def _value(self, name: str, raw: Any, step: int) -> list[Finding]:
        try:
            value = float(raw)
        except (TypeError, ValueError, OverflowError):
            return []
        if not math.isfinite(value):
            if not self._may_say("nan", step):
                return []
            return [
                Finding(
                    "loss.not-finite",
                    "warning",
                    f"step {step}: {name} is {value}",
                    remedy="stop, go back to the last good checkpoint, and run `mindferry doctor loss RUN`",
                )
            ]
        seen, log = self._seen[name], math.log(max(value, 1e-12))
        outside = []
        if len(seen) >= self._quiet:
            middle = float(np.median(seen))
            spread = max(_SPREAD * float(np.median(np.abs(np.array(seen) - middle))), 0.02)
            if log > middle + self._width * spread and self._may_say(name, step):
                outside.append(
                    Finding(
                        f"loss.band.{name.replace('_', '-')}",
                        "warning",
                        f"step {step}: {name} {value:.4g} is far outside its band "
                        f"(median {math.exp(middle):.4g} over {len(seen)} steps)",
                        remedy="if it does not come back, run `mindferry doctor loss RUN`",
                    )
                )
        seen.append(log)
        return outside
