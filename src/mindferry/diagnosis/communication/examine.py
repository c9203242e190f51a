"""`mindferry doctor comm`: measure, judge, and on request try the remedies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from mindferry.diagnosis.communication import probe
from mindferry.diagnosis.communication.judge import Cause, Exchange, Remedy, blamed, causes
from mindferry.diagnosis.communication.measure import Scaling, Trials, recorded
from mindferry.targets import run_yaml
from mindferry.targets.run_directory import RunDirectory


@dataclass
class Tried:
    """A remedy as measured. Seconds are for the batch of a step as it is without it."""

    remedy: Remedy
    before: float
    after: float

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.remedy.name,
            "set": self.remedy.overrides,
            "predicted_seconds": self.remedy.predicted,
            "measured_seconds": self.after,
            "before_seconds": self.before,
        }


@dataclass
class Examination:
    """What was measured and found; `causes` belong to the job of the most processes."""

    scalings: list[Scaling] = field(default_factory=list)
    causes: list[Cause] = field(default_factory=list)
    collective: probe.Collective | None = None
    tried: list[Tried] = field(default_factory=list)

    @property
    def culprit(self) -> str:
        """Id of the costliest problem, or ''."""
        return next((c.finding.id for c in self.causes if c.finding.severity == "problem"), "")

    @property
    def remedies(self) -> list[Remedy]:
        return [remedy for cause in self.causes for remedy in cause.remedies]


def exchange_of(run: RunDirectory, workers: int) -> Exchange:
    """What run.yaml and the weights say about the gradients that `workers` processes exchange.

    Raises:
        UsageError: run.yaml cannot be read, or not shared out.
    """
    from mindferry.training import data_parallel
    from mindferry.training.reduction import BUCKET_MIB, buckets
    from mindferry.training.weights_check import open_model

    content = run_yaml.read(run.yaml)
    accumulation = content["runner_config"]["gradient_accumulation_steps"]
    data_parallel.share_out(content, workers)
    data_parallel.engine_settings(content)
    wrapper = content["runner_wrapper"]
    store = open_model(run.root / "model")
    sizes = [int(np.prod(store.shape(name))) for name in store.names()]
    pieces = buckets(sizes, int(wrapper.get("bucket_mib", BUCKET_MIB) * 2**20 / 4))
    return Exchange(
        gradient_bytes=4 * sum(sizes),
        pieces=len(pieces),
        wire=wrapper.get("gradient_wire_dtype", "float32"),
        accumulation=accumulation,
        cpu=content["context"]["device_target"] == "CPU",
    )


def from_record(run: RunDirectory) -> Examination:
    """Judge what `train --workers N` recorded; trains nothing.

    Raises:
        UsageError: no such record.
    """
    found = recorded(run)
    return Examination([found], causes(found, exchange_of(run, found.workers)))


def examine(
    run: RunDirectory,
    scratch: RunDirectory,
    counts: list[int],
    steps: int,
    try_remedies: bool = False,
    tick: Callable[[str], None] = lambda note: None,
) -> Examination:
    """Train `steps` steps for each number of processes in `counts`, in `scratch`, and judge the largest.

    Raises:
        UsageError: run.yaml cannot be shared out among so many.
        MindferryError: a process failed.
    """
    trials = Trials(scratch, steps, tick)
    done = Examination()
    for workers in counts:
        done.scalings.append(trials.with_alone(workers))
    if done.scalings[-1].workers == 1:
        return done
    exchange = exchange_of(run, done.scalings[-1].workers)
    last = done.scalings[-1] = confirmed(trials, done.scalings[-1], exchange)
    done.collective = probe.measure(Path(scratch.root) / "logs/probe", last.workers)
    tick("collectives alone")
    done.causes = causes(last, exchange, done.collective)
    for remedy in done.remedies if try_remedies else []:
        again = trials.parallel(last.workers, remedy.overrides, remedy.name)
        done.tried.append(Tried(remedy, last.step, again.step / remedy.batches))
    return done


def confirmed(
    trials: Trials, first: Scaling, exchange: Exchange, overrides: dict[str, Any] | None = None
) -> Scaling:
    """`first`, unless it blames a process that a second measurement acquits: then that one.

    Something else that ran for a few seconds makes a process look slow; a fault of its own stays.
    """
    accused = blamed(causes(first, exchange))
    if accused is None:
        return first
    again = trials.parallel(first.workers, overrides, f"once more: rank {accused[1]} was slow")
    if blamed(causes(again, exchange)) == accused:
        return first
    return replace(again, alone=first.alone, alone_compute=first.alone_compute)
