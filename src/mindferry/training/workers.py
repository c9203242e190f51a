"""`mindferry train --workers N`: the process that starts the others, follows them and reports for them."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindferry.launching.msrun import Job
from mindferry.targets.run_directory import RunDirectory, write_text
from mindferry.training import engine, worker
from mindferry.training.outcome import Outcome


@dataclass
class _Follower:
    """Reads lines of a growing metrics.jsonl, and passes a wish to stop on."""

    path: Path
    options: engine.Options
    stop: Path
    _offset: int = field(default=0, init=False)
    _rest: bytes = field(default=b"", init=False)

    def __post_init__(self) -> None:
        self._offset = self.path.stat().st_size if self.path.exists() else 0

    def poll(self) -> None:
        if self.options.interruption.number and not self.stop.exists():
            write_text(self.stop, str(self.options.interruption.number))
        try:
            with open(self.path, "rb") as handle:
                handle.seek(self._offset)
                new = handle.read()
        except FileNotFoundError:
            return
        self._offset += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        for line in lines:
            self.options.on_step(_numbers(json.loads(line)))


def _numbers(record: dict[str, Any]) -> dict[str, Any]:
    """NaN and infinities, which metrics.jsonl has as text, as numbers again."""
    return {key: float(value) if isinstance(value, str) else value for key, value in record.items()}


def train(run: RunDirectory, options: engine.Options) -> Outcome:
    """Train `run` in options.workers processes; returns what engine.train does.

    Raises:
        UsageError: see engine.prepare and data_parallel.share_out.
        MindferryError: a process failed; the message is its own.
    """
    content = engine.prepare(run, options)
    checkpoint = engine.starting_point(run, options)
    start, last = engine.steps_to_do(run, content, options, checkpoint)
    folder = run.logs / "workers"
    stop = folder / worker.STOP
    stop.unlink(missing_ok=True)
    follower = _Follower(run.metrics, options, stop)
    job = Job(Path(worker.__file__), folder, options.workers, follower.poll)
    results = job.run(
        {
            "run": str(run.root.resolve()),
            "workers": options.workers,
            "mode": options.mode,
            "device": options.device,
            "overrides": options.overrides,
            "checkpoint": str(checkpoint.path.resolve()) if checkpoint else None,
            "start": start,
            "last": last,
        }
    )
    return _outcome(results, options)


def _outcome(results: list[dict[str, Any]], options: engine.Options) -> Outcome:
    first = results[0]
    return Outcome(
        first_step=first["first_step"],
        last_step=first["last_step"],
        losses={int(step): float(loss) for step, loss in first["losses"].items()},
        signal=options.interruption.number if first["signal"] else 0,
        checkpoint=Path(first["checkpoint"]) if first["checkpoint"] else None,
        skipped=first["skipped"],
        notes=first["notes"],
        optimizer_bytes=max(result["optimizer_bytes"] for result in results),
    )


def too_many(workers: int) -> str:
    """What to say when there are more processes than cores, or ''."""
    cores = len(os.sched_getaffinity(0))
    if workers <= cores:
        return ""
    return f"--workers {workers}: this machine has {cores} cores; the processes will wait for each other"
