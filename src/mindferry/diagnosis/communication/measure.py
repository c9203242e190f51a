"""Short data-parallel trainings of a run, and the time of their steps in parts, per process.

The parts come from the step itself (training.reduction): each process first meets the others with a few numbers,
and only then averages gradients. So waiting for the slowest shows in the meeting, and the collective's own cost
behind it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mindferry.errors import UsageError
from mindferry.targets import run_yaml
from mindferry.targets.run_directory import RunDirectory

# Steps left out at the beginning: they compile.
WARM_UP = 3
_FIELDS = (
    "step_time",
    "data_time",
    "compute_time",
    "forward_backward_time",
    "wait_time",
    "reduce_time",
    "tokens",
    "reductions",
)
PARTS = ("data", "compute", "wait", "collective", "update", "rest")


@dataclass(frozen=True)
class Split:
    """One process' step in parts: means in seconds over the same typical steps, so that the parts sum to `step`.

    Attributes:
        compute: forward and backward.
        wait: at the meeting, beyond what the process that came last spent there.
        collective: averaging gradients, and the meeting itself.
        rest: between steps: callbacks, metrics, checkpoints.
        tokens: of this process, in a step.
        slowest: share of steps in which it came last to the meeting.
    """

    rank: int
    step: float
    data: float
    compute: float
    wait: float
    collective: float
    update: float
    rest: float
    tokens: float
    reductions: float
    slowest: float = 0.0


@dataclass(frozen=True)
class Scaling:
    """A job of `workers` processes.

    Attributes:
        ranks: a Split each.
        alone: step seconds of one process with one rank's work (the article's T1); None: not measured.
        alone_compute: forward and backward of it.
        steps: that were measured.
    """

    workers: int
    ranks: tuple[Split, ...]
    steps: int
    alone: float | None = None
    alone_compute: float | None = None

    @property
    def step(self) -> float:
        """T_N: seconds of a step, mean over the processes."""
        return float(np.mean([split.step for split in self.ranks]))

    @property
    def tokens_per_second(self) -> float:
        return sum(split.tokens for split in self.ranks) / self.step

    def mean(self, part: str) -> float:
        return float(np.mean([getattr(split, part) for split in self.ranks]))

    def to_json(self) -> dict[str, Any]:
        return {
            "workers": self.workers,
            "steps": self.steps,
            "step_seconds": self.step,
            "alone_seconds": self.alone,
            "tokens_per_second": self.tokens_per_second,
            "parts": {part: self.mean(part) for part in PARTS},
            "ranks": [asdict(split) for split in self.ranks],
        }


def rank_file(root: Path, rank: int) -> Path:
    """Where rank `rank` of a run writes its metrics."""
    return root / ("metrics.jsonl" if rank == 0 else f"logs/metrics.rank_{rank}.jsonl")


def recorded(run: RunDirectory) -> Scaling:
    """What `train --workers N` left in `run`: its last session that several processes ran.

    Raises:
        UsageError: there is none, or a rank's file is missing.
    """
    ranks = 1
    while rank_file(run.root, ranks).is_file():
        ranks += 1
    if ranks == 1:
        raise UsageError(
            f"{run.root}: no logs/metrics.rank_*.jsonl: no several processes have trained it",
            remedy="mindferry train RUN --workers 2, or leave --recorded out: a few steps are trained then",
            id="comm.not-recorded",
        )
    return scaling(run.root, ranks)


def scaling(root: Path, workers: int) -> Scaling:
    """Read the metrics of `workers` processes below `root`.

    Raises:
        UsageError: a rank's file is missing, or the ranks share too few steps.
    """
    by_rank = []
    for rank in range(workers):
        path = rank_file(root, rank)
        if not path.is_file():
            raise UsageError(
                f"{path}: no such file: rank {rank} of {workers} left no metrics",
                remedy="its log is logs/workers/msrun/worker_" + f"{rank}.log",
                id="comm.rank-missing",
            )
        by_rank.append(_records(path))
    shared = sorted(set.intersection(*(set(records) for records in by_rank)))
    table = np.array([[records[step] for step in shared] for records in by_rank], float)
    table = table.reshape(workers, len(shared), len(_FIELDS))[:, WARM_UP:]
    if table.shape[1] < 2:
        raise UsageError(
            f"{root}: the {workers} ranks have {len(shared)} steps in common, expected at least {WARM_UP + 2}",
            remedy="train some steps more",
            id="comm.few-steps",
        )
    return Scaling(workers, _splits(table), table.shape[1])


def _records(path: Path) -> dict[int, list[float]]:
    """step -> the fields that the parts follow from; other lines (torn, of a single process) are passed over."""
    found = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
            found[int(record["step"])] = [float(record[field]) for field in _FIELDS]
        except (ValueError, KeyError, TypeError):
            continue
    return found


def _splits(table: np.ndarray) -> tuple[Split, ...]:
    """[ranks, steps, fields] -> parts; the middle half of the steps by duration counts."""
    step, data, computing, forward_backward, meeting, reduce, tokens, reductions = np.moveaxis(table, 2, 0)
    own = meeting.min(0)
    parts = {
        "step": step,
        "data": data,
        "compute": forward_backward,
        "wait": meeting - own,
        "collective": reduce + own,
        "update": computing - forward_backward - meeting - reduce,
        "rest": step - data - computing,
        "tokens": tokens,
        "reductions": reductions,
    }
    order = np.argsort(step.mean(0))
    count = len(order)
    middle = order[count // 4 : max(count - count // 4, count // 4 + 1)]
    last = meeting.argmin(0)
    return tuple(
        Split(
            rank,
            **{name: float(values[rank, middle].mean()) for name, values in parts.items()},
            slowest=float((last == rank).mean()),
        )
        for rank in range(len(table))
    )


@dataclass
class Trials:
    """Short trainings of one run in a scratch directory; the run is only read.

    Attributes:
        steps: of each, warm-up included.
        tick: called with what was done.
    """

    run: RunDirectory
    steps: int
    tick: Callable[[str], None] = lambda note: None

    def parallel(self, workers: int, overrides: dict[str, Any] | None = None, note: str = "") -> Scaling:
        """`workers` processes, with `overrides` (dotted keys of run.yaml).

        Raises:
            UsageError: run.yaml cannot be shared out among them.
            MindferryError: a process failed; the message is its own.
        """
        from mindferry.training import workers as parent

        parent.train(self.run, self.options(overrides, workers))
        self.tick(note or f"{workers} processes")
        return scaling(self.run.root, workers)

    def with_alone(self, workers: int) -> Scaling:
        """`parallel`, and before it one process with one rank's work."""
        from mindferry.training import data_parallel

        content = run_yaml.read(self.run.yaml)
        if workers > 1:
            data_parallel.share_out(content, workers)
        keys = ("batch_size", "gradient_accumulation_steps")
        share = {f"runner_config.{key}": content["runner_config"][key] for key in keys}
        alone = self._single(share, f"one process with 1/{workers} of the batch")
        if workers == 1:
            return alone
        return replace(self.parallel(workers), alone=alone.step, alone_compute=alone.mean("compute"))

    def _single(self, overrides: dict[str, Any], note: str) -> Scaling:
        """One process, this one; its update counts as compute."""
        from mindferry.training import engine

        records: list[dict[str, Any]] = []
        engine.train(self.run, replace(self.options(overrides, 1), on_step=records.append))
        records = records[WARM_UP:]
        if not records:
            raise UsageError(
                f"{self.run.root}: {self.steps} steps, expected more than {WARM_UP}", id="comm.few-steps"
            )
        self.tick(note)
        step, data, compute, rate = (
            float(np.median([record[key] for record in records]))
            for key in ("step_time", "data_time", "compute_time", "tokens_per_second")
        )
        rest = max(0.0, step - data - compute)
        split = Split(0, step, data, compute, 0.0, 0.0, 0.0, rest, rate * step, 0.0)
        return Scaling(1, (split,), len(records), step, compute)

    def options(self, overrides: dict[str, Any] | None, workers: int) -> Any:
        """engine.Options of a trial that writes no checkpoints; the records of an earlier one are removed."""
        from mindferry.training.engine import Options

        quiet: dict[str, Any] = {"callbacks": [{"type": "MFLossMonitor", "per_print_times": 1}]}
        if run_yaml.read(self.run.yaml)["lr_schedule"]["total_steps"] < self.steps:
            quiet["lr_schedule.total_steps"] = self.steps
        for path in (rank_file(self.run.root, rank) for rank in range(1, 64)):
            path.unlink(missing_ok=True)
        return Options(
            steps=self.steps, restart=True, overrides={**quiet, **(overrides or {})}, workers=workers
        )
