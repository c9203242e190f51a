"""Gathers what a run directory holds for the page; whatever is missing or broken becomes a note, never a failure."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mindferry.checking import convergence, memory, speed
from mindferry.checking.curves import Curve, read_curve
from mindferry.errors import MindferryError, UsageError

MAX_JSON = 64 << 20


@dataclass
class Subject:
    """One run, or one source log, as the page shows it.

    Attributes:
        migration, verify, bench: content of migration.json, verify.json, bench.json; {} where there is none.
        tuning: records of tune.jsonl.
        plan: the planner's pictures (SVG) of its parallel strategy, by name.
        missing: (file, key of the words that say what it would have shown and how to get it).
        notes: what was broken.
    """

    label: str
    path: Path
    curve: Curve
    migration: dict[str, Any] = field(default_factory=dict)
    verify: dict[str, Any] = field(default_factory=dict)
    bench: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    tuning: list[dict[str, Any]] = field(default_factory=list)
    plan: dict[str, str] = field(default_factory=dict)
    missing: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class Dimensions:
    """A run against an earlier one: step time, memory, convergence.

    Attributes:
        waiting_before, waiting_after: median seconds a step that waited for its data; NaN where not logged.
    """

    before: Subject
    after: Subject
    speed: speed.Speed
    interleaved: bool
    memory: str
    memory_before: float
    memory_after: float
    convergence: convergence.Convergence
    waiting_before: float = math.nan
    waiting_after: float = math.nan

    @property
    def starves(self) -> bool:
        """Whether the later run waits for its data for most of a step."""
        return self.waiting_after > 0.5 * self.speed.candidate_median


def _json_file(path: Path, subject: Subject, absent: str) -> dict[str, Any]:
    if not path.is_file():
        subject.missing.append((path.name, absent))
        return {}
    try:
        if path.stat().st_size > MAX_JSON:
            raise ValueError("too large")
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("no JSON object")
        return content
    except (OSError, ValueError, RecursionError) as err:
        subject.notes.append(f"{path.name}: broken ({err})"[:300])
        return {}


def _lines(path: Path, subject: Subject) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    if not path.is_file():
        return rows
    broken = 0
    with open(path, encoding="utf-8", errors="replace") as handle:
        while line := handle.readline(1 << 20):
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                broken += bool(line.strip())
                continue
            rows += [value] if isinstance(value, dict) else []
    if broken:
        subject.notes.append(f"{path.name}: {broken} broken lines left out")
    return rows


def gather(path: Path) -> Subject:
    """Everything the page shows of `path`: a run directory, or a source's log or trainer_state.json.

    Raises:
        UsageError: there is nothing of the kind.
    """
    curve = read_curve(path)
    subject = Subject(curve.label, path.resolve(), curve)
    subject.notes += [f"{curve.format}: {note}" for note in curve.notes]
    if not path.is_dir() or not (path / "run.yaml").is_file():
        return subject
    if not len(curve):
        subject.missing.append(("metrics.jsonl", "absent_metrics"))
    subject.migration = _json_file(path / "migration.json", subject, "absent_migration")
    subject.verify = _json_file(path / "verify.json", subject, "absent_verify")
    subject.bench = _json_file(path / "bench.json", subject, "absent_bench")
    subject.tuning = _lines(path / "tune.jsonl", subject)
    if not subject.tuning:
        subject.missing.append(("tune.jsonl", "absent_tuning"))
    subject.settings = _settings(path, subject)
    subject.plan = _plan(path / "run.yaml", subject)
    return subject


def _plan(yaml: Path, subject: Subject) -> dict[str, str]:
    """Pictures of the strategy that run.yaml names, where it is for more than one device."""
    from mindferry.planning import draw, session

    try:
        resolved = session.resolve(session.Request(), yaml)
        if resolved.run is None or resolved.devices < 2:
            return {}
        checked = session.check_layout(resolved, resolved.run.layout, resolved.run.unread)
    except MindferryError as err:
        subject.notes.append(f"no pictures of the strategy: {err.message}")
        return {}
    return draw.pictures(checked.estimate) if checked.estimate else {}


def _settings(path: Path, subject: Subject) -> dict[str, Any]:
    from mindferry.targets import run_yaml

    try:
        content = run_yaml.read(path / "run.yaml")
        config = content["model"]["model_config"]
        return {
            "layer_spec": config.get("layer_spec"),
            "compute_dtype": config.get("compute_dtype"),
            "layernorm_compute_type": config.get("layernorm_compute_type"),
            "softmax_compute_type": config.get("softmax_compute_type"),
            "context.mode": {0: "graph", 1: "pynative"}.get(content["context"]["mode"]),
            "enable_graph_kernel": content["context"].get("enable_graph_kernel"),
            "device_target": content["context"]["device_target"],
            "batch_size": content["runner_config"]["batch_size"],
            "gradient_accumulation_steps": content["runner_config"]["gradient_accumulation_steps"],
            "recompute": content["recompute_config"].get("recompute"),
            "select_recompute": content["recompute_config"].get("select_recompute"),
            "seq_length": config.get("seq_length"),
        }
    except (MindferryError, KeyError, TypeError, AttributeError, ValueError) as err:
        subject.notes.append(f"run.yaml: broken ({err})"[:300])
        return {}


def _identity(subject: Subject) -> dict[str, Any]:
    """What must agree for two runs to be comparable."""
    model = subject.migration.get("model")
    data = subject.migration.get("data")
    found: dict[str, Any] = {}
    if isinstance(model, dict):
        found["model"] = {k: v for k, v in model.items() if "dropout" not in k}
    if isinstance(data, dict):
        found["data"] = {key: data.get(key) for key in ("tokens", "documents", "sequences", "seq_length")}
    return found


def differences(after: Subject, before: Subject) -> list[str]:
    """How the models or data of two runs differ; [] when they are the same or when one is not known."""
    a, b = _identity(before), _identity(after)
    found = []
    for part in sorted(set(a) & set(b)):
        keys = [k for k in sorted({*a[part], *b[part]}) if a[part].get(k) != b[part].get(k)]
        found += [f"{part}: {k}: {a[part].get(k)!r} and {b[part].get(k)!r}" for k in keys]
    return found


def check_comparable(after: Subject, others: list[Subject], force: bool) -> list[str]:
    """Refuse runs of different models or data, unless `force`; then say what differs.

    Raises:
        UsageError: they differ and `force` is false.
    """
    notes = []
    for other in others:
        found = differences(after, other)
        if found and not force:
            raise UsageError(
                f"{other.path} and {after.path} differ in {found[0]}"
                + (f" and {len(found) - 1} more" if len(found) > 1 else ""),
                cause="a comparison of different models or data says nothing about the change",
                remedy="compare runs of one model and one corpus, or insist with --force",
                id="compare.different",
            )
        notes += [f"{other.label} / {after.label}: {text}" for text in found[:8]]
    return notes


def warm_step_times(curve: Curve, column: str = "step_time") -> np.ndarray:
    """Step times (or another column) without the first steps, which compile: 3, or a third of a short run."""
    times = curve[column]
    return times[min(3, len(times) // 3) :]


def _waiting(curve: Curve) -> float:
    times = warm_step_times(curve, "data_time")
    times = times[np.isfinite(times)]
    return float(np.median(times)) if len(times) else math.nan


def peak_memory(curve: Curve) -> float:
    """Bytes; NaN where none was logged."""
    values = curve["peak_memory_bytes"]
    return float(np.nanmax(values)) if np.isfinite(values).any() else float("nan")


def dimensions(before: Subject, after: Subject) -> Dimensions:
    """Judge `after` against `before` in the three dimensions."""
    times = speed.judge(warm_step_times(before.curve), warm_step_times(after.curve), interleaved=False)
    peaks = peak_memory(before.curve), peak_memory(after.curve)
    return Dimensions(
        before,
        after,
        times,
        False,
        memory.judge(*peaks),
        *peaks,
        convergence.compare(before.curve, after.curve),
        _waiting(before.curve),
        _waiting(after.curve),
    )
