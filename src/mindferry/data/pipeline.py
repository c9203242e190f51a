"""How fast the pipeline of a run is by itself, with which settings it is fastest, and whether the model waits."""

from __future__ import annotations

import copy
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mindferry.errors import MindferryError

# The first steps compile and fill the queues; they say nothing about the pipeline.
_WARM_UP_STEPS = 3

# Metrics looked at: the newest lines, so that a long run costs no memory.
_METRICS_BYTES = 1 << 22


@dataclass(frozen=True)
class Settings:
    """What of train_dataset bears on speed and not on content."""

    num_parallel_workers: int = 1
    prefetch_size: int = 2

    def text(self) -> str:
        return f"num_parallel_workers {self.num_parallel_workers}, prefetch_size {self.prefetch_size}"


@dataclass(frozen=True)
class Timing:
    """Seconds a batch takes when nothing but the pipeline runs, `batches` of them measured."""

    settings: Settings
    seconds_per_batch: float
    batches: int

    def to_json(self) -> dict[str, Any]:
        """Plain data, ready for json.dumps."""
        return {
            **asdict(self.settings),
            "seconds_per_batch": self.seconds_per_batch,
            "batches": self.batches,
        }


@dataclass(frozen=True)
class StepTimes:
    """Medians over the steps of a training, in seconds; `waits` is the share of the step that waits for data."""

    steps: int
    data_time: float
    compute_time: float
    step_time: float

    @property
    def waits(self) -> float:
        return self.data_time / self.step_time if self.step_time > 0 else 0.0


def step_times(metrics: Path) -> StepTimes | None:
    """What metrics.jsonl says of its newest steps; None: no steps behind the warm-up.

    Lines that are torn or lack the times are passed over.
    """
    try:
        with open(metrics, "rb") as handle:
            size = handle.seek(0, os.SEEK_END)
            handle.seek(max(0, size - _METRICS_BYTES))
            lines = handle.read().splitlines()
    except OSError:
        return None
    rows = []
    for line in lines:
        try:
            record = json.loads(line)
            row = [float(record[name]) for name in ("data_time", "compute_time", "step_time")]
            step = int(record["step"])
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        if all(0 <= value < 1e6 for value in row):
            rows.append((step, row))
    rows = rows[_WARM_UP_STEPS:]
    if not rows:
        return None
    medians = [statistics.median(values) for values in zip(*(row for _, row in rows), strict=True)]
    return StepTimes(len(rows), *medians)


def build_pipeline(train_dataset: dict[str, Any], batch_size: int, settings: Settings) -> Any:
    """The mindspore dataset that a run trains on, from the `train_dataset` of its run.yaml (paths absolute).

    Raises:
        MindferryError: mindformers cannot build it.
    """
    from mindformers.dataset import CausalLanguageModelDataset
    from mindformers.tools.register import MindFormerConfig

    content = copy.deepcopy(train_dataset) | asdict(settings)
    content |= {"batch_size": batch_size, "numa_enable": False}
    try:
        return CausalLanguageModelDataset(dataset_config=MindFormerConfig(**content))
    except (RuntimeError, ValueError, TypeError, KeyError, OSError) as err:
        raise MindferryError(
            f"train_dataset: mindformers cannot build it: {_first_line(err)}",
            remedy="check the files and columns that run.yaml names",
            id="data.pipeline",
        ) from None


def _first_line(err: BaseException) -> str:
    """The sentence of an error of mindspore's data pipeline, without its frames."""
    lines = [line.strip(" -") for line in str(err).splitlines()]
    errors = [line for line in lines if line.startswith("[ERROR]")]
    return (errors or [line for line in lines if line] or [type(err).__name__])[0][:300]


def measure(train_dataset: dict[str, Any], batch_size: int, settings: Settings, seconds: float) -> Timing:
    """Seconds a batch, over `seconds` of reading; starting the pipeline is left out.

    Raises:
        MindferryError: the pipeline cannot be built, or gives no batch.
    """
    dataset = build_pipeline(train_dataset, batch_size, settings)
    batches, spent = 0, 0.0
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        iterator = iter(dataset.create_tuple_iterator(num_epochs=1, output_numpy=True))
        if next(iterator, None) is None:
            raise MindferryError(
                f"train_dataset: gives no batch of {batch_size} sequences",
                remedy="lower runner_config.batch_size, or give more data",
                id="data.pipeline",
            )
        begin = time.perf_counter()
        count = sum(1 for _ in _until(iterator, until))
        if not count and not batches:  # one batch in all: its start is all there is to measure
            return Timing(settings, time.perf_counter() - (until - seconds), 1)
        batches, spent = batches + count, spent + time.perf_counter() - begin
    return Timing(settings, spent / max(batches, 1), batches)


def _until(batches: Iterator[Any], until: float) -> Iterator[Any]:
    for batch in batches:
        yield batch
        if time.perf_counter() > until:
            return


def candidates(now: Settings, cores: int | None = None) -> list[Settings]:
    """Settings worth a try, the present ones first.

    MindSpore 2.9.0 takes no more workers than there are cores.
    """
    cores = cores or os.cpu_count() or 1
    workers = sorted({1, 2, cores // 2, cores} & set(range(1, cores + 1)))
    found = [now]
    for count in workers:
        for prefetch in (2, 4):
            each = replace(now, num_parallel_workers=count, prefetch_size=prefetch)
            if each not in found:
                found.append(each)
    return found


def try_settings(
    train_dataset: dict[str, Any],
    batch_size: int,
    now: Settings,
    seconds: float,
    advance: Callable[[int, str], None] = lambda n, note: None,
) -> list[Timing]:
    """Measure `candidates(now)` in two rounds within about `seconds`; the best of each counts, fastest first.

    Two rounds in opposite order, so that a machine that warms up or gets busy does not choose the winner.
    """
    tried = candidates(now)
    each = seconds / (2 * len(tried))
    best: dict[Settings, Timing] = {}
    for order in (tried, tried[::-1]):
        for settings in order:
            timing = measure(train_dataset, batch_size, settings, each)
            known = best.get(settings)
            if known is None or timing.seconds_per_batch < known.seconds_per_batch:
                best[settings] = timing
            advance(1, f"{settings.text()}: {timing.seconds_per_batch * 1e3:.2f} ms")
    return sorted(best.values(), key=lambda timing: timing.seconds_per_batch)
