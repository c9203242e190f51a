"""Training curves from what trainings leave behind: metrics.jsonl, trainer_state.json, logs, TensorBoard events."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mindferry.checking import events
from mindferry.errors import UsageError, printable

MAX_BYTES = 1 << 30
MAX_LINE = 100_000
COLUMNS = (
    "loss",
    "lr",
    "grad_norm",
    "data_time",
    "compute_time",
    "step_time",
    "tokens_per_second",
    "peak_memory_bytes",
)


@dataclass
class Curve:
    """A training, one entry a logged step, steps ascending from 1.

    Attributes:
        label: how to call it in a report.
        format: what it was read from.
        steps: [N] int64.
        columns: name of COLUMNS -> [N] float64 (seconds, bytes); NaN where a step does not have it.
        averaged: whether a loss is the mean of all steps since the entry before (Megatron, transformers).
        notes: what was missing or broken in the file.
    """

    label: str
    format: str
    steps: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    columns: dict[str, np.ndarray] = field(default_factory=dict)
    averaged: bool = False
    notes: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, name: str) -> np.ndarray:
        """[N] float64; all NaN where nothing logged it."""
        return self.columns.get(name, np.full(len(self.steps), math.nan))

    def has(self, name: str) -> bool:
        return bool(np.isfinite(self[name]).any())


def number(value: Any) -> float:
    """A float; "nan" and "inf" as words count, anything else is NaN."""
    if value is None or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _assemble(label: str, form: str, rows: Iterable[dict[str, Any]], **more: Any) -> Curve:
    by_step: dict[int, dict[str, Any]] = {}
    repeated = 0
    for row in rows:
        step = row.get("step")
        if isinstance(step, int) and not isinstance(step, bool) and 0 < step < 1 << 53:
            if step in by_step:
                repeated += 1
            by_step.setdefault(step, {}).update(row)
    steps = sorted(by_step)
    curve = Curve(label, form, np.array(steps, np.int64), **more)
    for name in COLUMNS:
        values = np.array([number(by_step[step].get(name)) for step in steps])
        if np.isfinite(values).any() or name == "loss":
            curve.columns[name] = values
    if form == "metrics.jsonl":
        if repeated:
            curve.notes.append(f"{repeated} steps were logged twice; the later line counts")
        missing = steps[-1] - steps[0] + 1 - len(steps) if steps else 0
        if missing:
            curve.notes.append(f"{missing} steps between {steps[0]} and {steps[-1]} are missing")
    bad = int(np.sum(~np.isfinite(curve["loss"]))) if steps else 0
    if bad:
        curve.notes.append(f"{bad} of {len(steps)} steps have no finite loss")
    if not steps:
        curve.notes.append("no training step in it")
    return curve


def from_jsonl(path: Path, label: str) -> Curve:
    """metrics.jsonl as `mindferry train` writes it; broken lines are counted in the notes."""
    rows, broken = [], 0
    with open(path, encoding="utf-8", errors="replace") as handle:
        while line := handle.readline(MAX_LINE):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                broken += bool(line.strip())
                continue
            if isinstance(record, dict):
                rows.append(record)
            else:
                broken += 1
    curve = _assemble(label, "metrics.jsonl", rows)
    if broken:
        curve.notes.append(f"{broken} broken lines left out")
    return curve


def from_trainer_state(path: Path, label: str) -> Curve:
    """trainer_state.json of transformers' Trainer; its loss is the mean since the last log.

    Raises:
        UsageError: the file is no such thing.
    """
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        history = state["log_history"]
        rows = [
            {
                "step": r["step"],
                "loss": r["loss"],
                "lr": r.get("learning_rate"),
                "grad_norm": r.get("grad_norm"),
            }
            for r in history
            if isinstance(r, dict) and "loss" in r and "step" in r
        ]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UsageError(
            f"{path}: not a trainer_state.json of transformers", remedy="it needs a list log_history"
        ) from None
    return _assemble(label, "trainer_state.json", rows, averaged=True)


_FLOAT = r"([-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf))"


@dataclass(frozen=True)
class LogFormat:
    """How a trainer prints a step.

    Attributes:
        line: a regular expression with one group, the number of the step.
        offset: what to add to that number so that the first update is step 1.
        fields: column -> (expression with one group, factor).
    """

    name: str
    line: re.Pattern[str]
    offset: int
    averaged: bool
    fields: dict[str, tuple[re.Pattern[str], float]]


LOG_FORMATS = (
    LogFormat(
        "nanoGPT stdout",
        re.compile(r"^iter (\d{1,15}): loss "),
        1,
        False,
        {
            "loss": (re.compile(rf": loss {_FLOAT}"), 1.0),
            "step_time": (re.compile(rf"time {_FLOAT}ms"), 1e-3),
        },
    ),
    LogFormat(
        "Megatron-LM log",
        re.compile(r"iteration\s+(\d{1,15})\s*/\s*\d+\s*\|"),
        0,
        True,
        {
            "loss": (re.compile(rf"\| lm loss: {_FLOAT}", re.IGNORECASE), 1.0),
            "lr": (re.compile(rf"\| learning rate: {_FLOAT}", re.IGNORECASE), 1.0),
            "grad_norm": (re.compile(rf"\| grad norm: {_FLOAT}", re.IGNORECASE), 1.0),
            "step_time": (re.compile(rf"elapsed time per iteration \(ms\): {_FLOAT}", re.IGNORECASE), 1e-3),
        },
    ),
)


def from_log(path: Path, label: str) -> Curve:
    """A trainer's text log, by LOG_FORMATS.

    Raises:
        UsageError: no line of it looks like a training step.
    """
    rows: dict[str, list[dict[str, Any]]] = {form.name: [] for form in LOG_FORMATS}
    with open(path, encoding="utf-8", errors="replace") as handle:
        while line := handle.readline(MAX_LINE):
            for form in LOG_FORMATS:
                found = form.line.search(line)
                if found:
                    row: dict[str, Any] = {"step": int(found.group(1)) + form.offset}
                    for name, (pattern, factor) in form.fields.items():
                        value = pattern.search(line)
                        if value:
                            row[name] = number(value.group(1)) * factor
                    rows[form.name].append(row)
    best = max(LOG_FORMATS, key=lambda form: len(rows[form.name]))
    if not rows[best.name]:
        known = ", ".join(form.name for form in LOG_FORMATS)
        raise UsageError(
            f"{path}: no training step found in it",
            remedy=f"known: a run directory, metrics.jsonl, trainer_state.json, TensorBoard events, {known}",
            id="curve.unknown",
        )
    return _assemble(label, best.name, rows[best.name], averaged=best.averaged)


# Names under which trainers log to TensorBoard, best first.
EVENT_TAGS = {
    "loss": ("train/loss", "loss", "lm loss", "lm-loss-training/lm loss", "train_loss", "loss/train"),
    "lr": ("train/learning_rate", "learning-rate", "lr", "learning_rate", "learning-rate/learning-rate"),
    "grad_norm": ("train/grad_norm", "grad-norm", "grad_norm", "grad-norm/grad-norm", "global_norm"),
    # As `mindferry train` logs them.
    **{
        name: (f"train/{name}",)
        for name in ("data_time", "compute_time", "step_time", "tokens_per_second", "peak_memory_bytes")
    },
}


def from_events(path: Path, label: str) -> Curve:
    """Scalars of a TensorBoard event file."""
    scalars, note = events.read_scalars(path)
    rows = []
    for column, tags in EVENT_TAGS.items():
        tag = next((t for t in tags if t in scalars), None)
        rows += [{"step": step, column: value} for step, value in scalars.get(tag or "", [])]
    curve = _assemble(label, "TensorBoard events", rows)
    if note:
        curve.notes.append(note)
    return curve


def read_curve(path: Path, label: str | None = None) -> Curve:
    """The curve at `path`: a run directory, a directory with trainer_state.json or events, or one of the files.

    A run that was never trained gives an empty curve, with a note.

    Raises:
        UsageError: there is nothing of that kind.
    """
    label = printable(label or path.resolve().name)
    if path.is_dir():
        if (path / "run.yaml").is_file() and not (path / "metrics.jsonl").is_file():
            return Curve(label, "metrics.jsonl", notes=["not trained yet: no metrics.jsonl"])
        inside = [
            path / "metrics.jsonl",
            path / "trainer_state.json",
            *sorted(path.glob("events.out.tfevents.*")),
        ]
        found = next((item for item in inside if item.is_file()), None)
        if found is None:
            raise UsageError(
                f"{path}: no metrics.jsonl, trainer_state.json or TensorBoard events in it",
                remedy="give a run directory or a log file",
                id="curve.unknown",
            )
        path = found
    if not path.is_file():
        raise UsageError(f"{path}: no such file or directory", id="curve.missing")
    if path.stat().st_size > MAX_BYTES:
        raise UsageError(f"{path}: larger than {MAX_BYTES >> 30} GiB, not read", id="curve.size")
    if path.suffix == ".jsonl":
        return from_jsonl(path, label)
    if path.suffix == ".json":
        return from_trainer_state(path, label)
    if ".tfevents." in path.name:
        return from_events(path, label)
    return from_log(path, label)
