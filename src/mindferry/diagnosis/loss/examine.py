"""The four steps on a run, in order, up to the first culprit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mindferry.diagnosis.loss import data_step, gradient_step, metrics, precision_step, schedule_step
from mindferry.diagnosis.loss.rerun import STEPS, Scratch, scratch_of
from mindferry.diagnosis.loss.step import Step
from mindferry.findings import Finding
from mindferry.targets.run_directory import RunDirectory

MIN_RECORDS = 5
MAX_JSON = 64 << 20


@dataclass
class Examination:
    """What the triage came to.

    Attributes:
        steps: those that were taken, in order.
        notes: findings that belong to no step.
    """

    steps: list[Step] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)

    @property
    def culprit(self) -> str | None:
        """Name of the first step at fault."""
        return next((step.name for step in self.steps if step.verdict == "culprit"), None)

    @property
    def findings(self) -> list[Finding]:
        return [*self.notes, *(item for step in self.steps for item in step.findings)]


def _report(path: Path) -> dict[str, Any]:
    """migration.json, or nothing when it is absent or damaged: the run may have been made by hand."""
    try:
        if path.stat().st_size > MAX_JSON:
            return {}
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _newest_weights(run: RunDirectory) -> dict[str, np.ndarray]:
    """The weights of the newest complete checkpoint, else those the run starts from."""
    from mindferry.training import checkpoints
    from mindferry.training.weights_check import open_model

    found, _ = checkpoints.newest(run.checkpoints)
    store = open_model(found.model if found is not None else run.model)
    return {name: np.asarray(store.read(name), dtype=np.float32) for name in store.names()}


def _record(run: RunDirectory, scratch: Scratch, total: int, exam: Examination) -> metrics.Metrics:
    """The run's own record; without one, that of some steps made now."""
    found = metrics.read(run.metrics)
    if found.bad_lines:
        exam.notes.append(
            Finding("loss.torn-lines", "info", f"{run.metrics.name}: {found.bad_lines} lines are no records")
        )
    if len(found) >= MIN_RECORDS:
        return found
    exam.notes.append(
        Finding(
            "loss.no-metrics",
            "info",
            f"{run.metrics.name} has {len(found)} steps; {STEPS} steps were made now in a scratch directory",
        )
    )
    try:
        return scratch.train(min(STEPS, total) if total > 0 else STEPS, {}, "the run as it is")
    except Exception as err:
        text = str(err).strip().splitlines()
        exam.notes.append(
            Finding(
                "loss.does-not-train",
                "problem",
                f"the run does not train: {text[0] if text else type(err).__name__}",
                remedy="`mindferry train` names the cause, or `mindferry doctor startup RUN/logs/train.log`",
            )
        )
        return found


def _layer_norms(run: RunDirectory, scratch: Scratch) -> dict[str, float]:
    from mindferry.checking import sides
    from mindferry.training import engine

    options = engine.Options(mode="pynative", overrides=sides.no_dropout())
    content = engine.prepare(scratch.run, options)
    config = engine.set_up(content, scratch.run)
    return gradient_step.layer_norms(content, config, run.model)


def examine(
    root: Path, *, every_step: bool = False, tick: Callable[[str], None] = lambda note: None
) -> Examination:
    """Take the article's four steps on the run at `root`, which is only read.

    Args:
        every_step: go on after the first culprit.
        tick: called after each part with a word about it.

    Raises:
        UsageError: `root` is no run, or its run.yaml cannot be used.
    """
    from mindferry.training import engine

    run = RunDirectory.open(root)
    content = engine.prepare(run, engine.Options())
    exam = Examination()
    with scratch_of(run, tick) as scratch:
        takes: list[Callable[[], Step]] = []
        record: list[metrics.Metrics] = []

        def recorded() -> metrics.Metrics:
            if not record:
                record.append(_record(run, scratch, content["lr_schedule"]["total_steps"], exam))
            return record[0]

        takes.append(lambda: data_step.examine_data(content, run.root / "tokenizer/tokenizer.json"))
        takes.append(lambda: precision_step.examine_precision(content, scratch))
        takes.append(
            lambda: schedule_step.examine_schedule(content, _report(run.migration), recorded(), scratch)
        )
        takes.append(
            lambda: gradient_step.examine_gradients(
                content, recorded(), lambda: _newest_weights(run), lambda: _layer_norms(run, scratch)
            )
        )
        for take in takes:
            step = take()
            exam.steps.append(step)
            tick(step.name)
            if step.verdict == "culprit" and not every_step:
                break
    return exam
