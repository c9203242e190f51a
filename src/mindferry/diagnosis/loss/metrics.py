"""metrics.jsonl as arrays, read with patience: torn lines, repeated steps and words for NaN are expected."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

MAX_LINES = 5_000_000
_FIELDS = ("loss", "lr", "grad_norm", "loss_scale")


@dataclass
class Metrics:
    """A training's record, one entry a step, steps ascending (a later line for a step replaces an earlier).

    Attributes:
        steps: [N] int64.
        loss, lr, grad_norm, loss_scale: [N] float64; NaN where a line does not have it.
        overflow: [N] bool.
        bad_lines: lines that were no record.
        bad_ranks: of several processes those whose own loss was no number at the first step where the mean is none.
    """

    steps: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    loss: np.ndarray = field(default_factory=lambda: np.zeros(0))
    lr: np.ndarray = field(default_factory=lambda: np.zeros(0))
    grad_norm: np.ndarray = field(default_factory=lambda: np.zeros(0))
    loss_scale: np.ndarray = field(default_factory=lambda: np.zeros(0))
    overflow: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    bad_lines: int = 0
    bad_ranks: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.steps)


def _number(value: Any) -> float:
    """A float; JSON has no NaN, so its words stand for it. Anything else is NaN."""
    if isinstance(value, bool) or value is None:
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def from_records(records: Iterable[Mapping[str, Any]], bad_lines: int = 0) -> Metrics:
    """Metrics of records as StepMetrics makes them."""
    by_step: dict[int, Mapping[str, Any]] = {}
    for record in records:
        step = record.get("step")
        if isinstance(step, int) and not isinstance(step, bool) and 0 < step < 1 << 53:
            by_step[step] = record
        else:
            bad_lines += 1
    steps = sorted(by_step)
    columns: dict[str, Any] = {
        name: np.array([_number(by_step[s].get(name)) for s in steps]) for name in _FIELDS
    }
    overflow = np.array([by_step[s].get("overflow") is True for s in steps], bool)
    return Metrics(np.array(steps, np.int64), **columns, overflow=overflow, bad_lines=bad_lines)


def read(path: Path) -> Metrics:
    """The metrics at `path`; empty when there are none."""
    if not path.is_file():
        return Metrics()
    records, bad = [], 0
    with open(path, encoding="utf-8", errors="replace") as handle:
        for number, line in enumerate(handle):
            if number >= MAX_LINES:
                break
            try:
                record = json.loads(line[:100_000])
            except (ValueError, RecursionError):
                bad += bool(line.strip())
                continue
            if isinstance(record, dict):
                records.append(record)
            else:
                bad += 1
    found = from_records(records, bad)
    broken = first_break(found)
    if broken is not None:
        found.bad_ranks = _bad_ranks(path, broken.first_bad)
    return found


def _bad_ranks(path: Path, step: int) -> tuple[int, ...]:
    """Ranks whose own loss is no number at `step`, where processes recorded it."""
    bad = []
    others = path.parent.glob("logs/metrics.rank_*.jsonl")
    for file in (path, *(file for file in others if file.stem.rpartition("_")[2].isdecimal())):
        with open(file, encoding="utf-8", errors="replace") as handle:
            for line in handle:
                try:
                    record = json.loads(line[:100_000])
                    here = record["step"] == step and "rank_loss" in record
                except (ValueError, RecursionError, KeyError, TypeError):
                    continue
                if here and not math.isfinite(_number(record["rank_loss"])):
                    bad.append(0 if file == path else int(file.stem.rpartition("_")[2]))
                    break
    return tuple(sorted(bad))


@dataclass(frozen=True)
class Break:
    """Where the loss stopped being a number: after step `last_finite` and at the latest at `first_bad`."""

    last_finite: int | None
    last_loss: float
    first_bad: int

    def __str__(self) -> str:
        if self.last_finite is None:
            return f"the loss is no number from the first record on (step {self.first_bad})"
        where = f"({self.last_finite}, {self.first_bad}]"
        return f"first non-finite loss in {where}, last finite one {self.last_loss:.4f} at step {self.last_finite}"


def first_break(metrics: Metrics) -> Break | None:
    """The first non-finite loss, or None. Between sparse records the exact step is not known."""
    bad = np.flatnonzero(~np.isfinite(metrics.loss))
    if not len(bad):
        return None
    at = int(bad[0])
    if at == 0:
        return Break(None, math.nan, int(metrics.steps[0]))
    return Break(int(metrics.steps[at - 1]), float(metrics.loss[at - 1]), int(metrics.steps[at]))


def longest_overflow(metrics: Metrics) -> tuple[int, int]:
    """(length, first step) of the longest row of overflow steps; (0, 0) without any."""
    best, start, length = (0, 0), 0, 0
    for step, flag in zip(metrics.steps, metrics.overflow, strict=True):
        length = length + 1 if flag else 0
        start = int(step) if length == 1 else start
        if length > best[0]:
            best = (length, start)
    return best
