"""TensorBoard events beside metrics.jsonl, kept up while a run trains: `tensorboard --logdir RUN` shows it live."""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mindferry.checking import events

SUFFIX = ".mindferry"
# Columns of metrics.jsonl that have a name in TensorBoard's usual vocabulary; the others keep theirs.
NAMES = {"lr": "learning_rate"}


def tag(column: str) -> str:
    """The tag under which a column of metrics.jsonl is shown."""
    return f"train/{NAMES.get(column, column)}"


def scalars(record: dict[str, Any]) -> dict[str, float]:
    """Tag -> value of every number in a line of metrics.jsonl; NaN and infinities are numbers, too."""
    found = {}
    for column, value in record.items():
        if column == "step" or isinstance(value, (dict, list)) or value is None:
            continue
        try:
            found[tag(column)] = float(value)
        except (TypeError, ValueError, OverflowError):
            continue
    return found


class EventLog:
    """One event file of a run, which always says what metrics.jsonl says.

    The first step of a session writes the file anew, under a later name, from the metrics before that step: steps
    that a resumed run repeats, or that a killed one had not recorded, so are there once. Each step is appended. The
    wall times of earlier sessions are made from their step times, back from the last change of metrics.jsonl.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._path: Path | None = None

    def feed(self, record: dict[str, Any]) -> None:
        """A step ended; `record` is its line of metrics.jsonl."""
        if self._path is None:
            self._path = self._begin(int(record["step"]))
        with open(self._path, "ab") as handle:
            events.append_scalars(handle, time.time(), int(record["step"]), scalars(record))

    def _begin(self, first: int) -> Path:
        old = sorted(self._root.glob(f"events.out.tfevents.*{SUFFIX}"))
        now = time.time()
        # A running TensorBoard goes on to a file whose name sorts after the one it reads.
        name = f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{os.getpid()}{SUFFIX}"
        temporary = self._root / f".{name}.partial"
        with open(temporary, "wb") as handle:
            rows = list(_before(self._root / "metrics.jsonl", first, now))
            events.begin(handle, rows[0][0] if rows else now)
            for wall, step, values in rows:
                events.append_scalars(handle, wall, step, values)
        os.replace(temporary, self._root / name)
        for path in old:
            if path.name != name:
                path.unlink(missing_ok=True)
        return self._root / name


def _before(path: Path, first: int, now: float) -> Iterator[tuple[float, int, dict[str, float]]]:
    """(wall time, step, values) of the steps before `first` in metrics.jsonl; broken lines are passed over."""
    records: dict[int, dict[str, Any]] = {}
    try:
        with open(path, encoding="utf-8", errors="replace") as handle:
            for line in handle:
                try:
                    record = json.loads(line)
                    step = int(record["step"])
                except (ValueError, KeyError, TypeError, RecursionError):
                    continue
                if 0 < step < first:
                    records[step] = record
        wall = min(path.stat().st_mtime, now)
    except FileNotFoundError:
        return
    steps = sorted(records)
    values = [scalars(records[step]) for step in steps]
    took = [seen.get(tag("step_time"), 0.0) for seen in values]
    took = [t if math.isfinite(t) and t > 0 else 0.0 for t in took]
    wall -= sum(took)
    for step, seconds, seen in zip(steps, took, values, strict=True):
        wall += seconds
        yield wall, step, seen
