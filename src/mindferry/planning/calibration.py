"""What was measured, kept in one file and applied to later plans: memory from DryRun logs, step times, this machine."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from mindferry.errors import MindferryError, UsageError
from mindferry.planning.estimate import Calibration, Estimator, Job
from mindferry.planning.settings import Device
from mindferry.planning.strategy import Strategy
from mindferry.spec import NonNegativeFloat, PositiveFloat, Spec, spec_from

MAX_LOG_BYTES = 256 << 20
THIS_MACHINE = "this-machine"


class MemoryPoint(Spec):
    """One measured peak against what was predicted: bytes."""

    label: str
    static: NonNegativeFloat
    activations: NonNegativeFloat
    measured: PositiveFloat


class TimePoint(Spec):
    """One measured step: seconds that scale with computing, seconds that do not, seconds measured."""

    label: str
    computing: PositiveFloat
    rest: NonNegativeFloat
    measured: PositiveFloat


class Entry(Spec):
    """Everything measured for one device and memory convention."""

    memory: tuple[MemoryPoint, ...] = ()
    time: tuple[TimePoint, ...] = ()


class CalibrationFile(Spec):
    """The file's content. Keys of `entries` are "device/convention"."""

    version: int = Field(default=1, ge=1, le=1)
    device: Device | None = None
    entries: dict[str, Entry] = Field(default_factory=dict)


def default_path() -> Path:
    """Where calibrations are kept: the person's configuration directory."""
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "mindferry" / "calibration.json"


def load(path: Path) -> CalibrationFile:
    """The calibrations in `path`; empty when there is no such file.

    Raises:
        UsageError: the file is not one of ours.
    """
    if not path.is_file():
        return CalibrationFile()
    if path.stat().st_size > 4 << 20:
        raise UsageError(f"{path}: too big for a calibration file", remedy="remove it", id="plan.calibration")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as err:
        raise UsageError(
            f"{path}: no calibration file: {err}",
            remedy="remove it and calibrate again",
            id="plan.calibration",
        ) from None
    if not isinstance(values, dict):
        raise UsageError(f"{path}: no calibration file", remedy="remove it", id="plan.calibration")
    made: CalibrationFile = spec_from(CalibrationFile, values, str(path))
    return made


def save(path: Path, content: CalibrationFile) -> None:
    """Write `content` to `path`, all or nothing."""
    from mindferry.planning.write import write_text

    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, content.model_dump_json(indent=1) + "\n")


def key(job: Job) -> str:
    return f"{job.device.name}/{job.convention.name}"


def fitted(entry: Entry) -> Calibration:
    """The corrections that fit the measured points best.

    Memory: measured = static + activations x factor + constant, by least squares; with one point, or points that do
    not tell the two apart, only the constant. Time: the median factor on computing.
    """
    factor, constant = _fit_memory(entry.memory)
    time = 1.0
    if entry.time:
        time = float(np.median([(p.measured - p.rest) / p.computing for p in entry.time]))
        time = max(time, 0.05)
    source = ", ".join([*(p.label for p in entry.memory), *(p.label for p in entry.time)])
    return Calibration(activations=factor, constant_bytes=constant, time=time, source=source)


def _fit_memory(points: tuple[MemoryPoint, ...]) -> tuple[float, float]:
    if not points:
        return 1.0, 0.0
    act = np.array([p.activations for p in points])
    rest = np.array([p.measured - p.static for p in points])
    if len(points) > 1 and np.ptp(act) > 0.05 * act.max():
        factor, constant = np.polyfit(act, rest, 1)
        if factor > 0.05 and constant >= 0:
            return float(factor), float(constant)
        if (act > 0).any():
            return max(0.05, float(act @ rest / (act @ act))), 0.0
    return 1.0, max(0.0, float(np.mean(rest - act)))


def apply(job: Job, content: CalibrationFile) -> Job:
    """`job` with the calibration of its device and convention, if there is one."""
    entry = content.entries.get(key(job))
    return replace(job, calibration=fitted(entry)) if entry is not None else job


_PEAK = re.compile(r"Used peak memory usage \(without fragments\):\s*(\d+)\s*M")
_ACTUAL = re.compile(r"Actual peak memory usage \(with fragments\):\s*(\d+)\s*M")


def dryrun_peak(path: Path) -> int:
    """Bytes of the peak that a DryRun (or a run with MS_MEMORY_STATISTIC=1) logged; MindSpore writes MiB.

    Raises:
        UsageError: no such file, or far too big for a log.
        MindferryError: the log has no memory lines.
    """
    if not path.is_file():
        raise UsageError(f"{path}: no such file", remedy="give a DryRun log", id="plan.dryrun-log")
    if path.stat().st_size > MAX_LOG_BYTES:
        raise UsageError(
            f"{path}: more than 256 MiB", remedy="give the part with the memory lines", id="plan.dryrun-log"
        )
    peak = 0
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            found = _PEAK.search(line[:4096]) or (_ACTUAL.search(line[:4096]) if not peak else None)
            if found:
                peak = max(peak, int(found[1]))
    if not peak:
        raise MindferryError(
            f"{path}: no line 'Used peak memory usage (without fragments): ...M'",
            remedy="run with MS_SIMULATION_LEVEL=1 and MS_MEMORY_STATISTIC=1",
            cause="the run stopped before its memory statistics, or logs at a higher level",
            id="plan.dryrun-log",
        )
    return peak << 20


def memory_point(job: Job, st: Strategy, stage: int, measured: float, label: str) -> MemoryPoint:
    """A point for `stage` of `st`, predicted without any calibration."""
    memory = Estimator(replace(job, calibration=Calibration())).memory(st)
    activations = float(np.broadcast_to(memory["activations"], (st.pipeline_stage,))[stage])
    static = (
        sum(float(np.broadcast_to(part, (st.pipeline_stage,))[stage]) for part in memory.values())
        - activations
    )
    return MemoryPoint(label=label, static=static, activations=activations, measured=measured)


def time_point(job: Job, st: Strategy, measured: float, label: str) -> TimePoint:
    """A point for a measured step of `st`; what does not scale with computing is told apart by doubling it."""
    one = Estimator(replace(job, calibration=Calibration())).estimate(st).step_seconds
    two = Estimator(replace(job, calibration=Calibration(time=2.0))).estimate(st).step_seconds
    return TimePoint(label=label, computing=two - one, rest=max(0.0, 2 * one - two), measured=measured)


def added(content: CalibrationFile, job: Job, points: list[MemoryPoint | TimePoint]) -> CalibrationFile:
    """`content` with `points`; a point of the same label replaces the older one."""
    entry = content.entries.get(key(job), Entry())
    memory = {p.label: p for p in entry.memory}
    time = {p.label: p for p in entry.time}
    for point in points:
        if isinstance(point, MemoryPoint):
            memory[point.label] = point
        else:
            time[point.label] = point
    new = Entry(memory=tuple(memory.values()), time=tuple(time.values()))
    return content.model_copy(update={"entries": {**content.entries, key(job): new}})


def summary(job: Job) -> dict[str, Any]:
    """What a plan says about its calibration."""
    cal = job.calibration
    return {
        "activations_factor": cal.activations,
        "constant_bytes": cal.constant_bytes,
        "time_factor": cal.time,
        "source": cal.source or "not calibrated",
    }
