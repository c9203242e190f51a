"""The tuning itself: measures a change against what is kept so far, in turns, and decides by a stated rule."""

from __future__ import annotations

import copy
import hashlib
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mindferry.checking import bench, convergence, memory, speed
from mindferry.checking.curves import Curve
from mindferry.errors import MindferryError, UsageError, did_you_mean
from mindferry.targets import run_yaml
from mindferry.targets.run_directory import RunDirectory, write_text
from mindferry.tuning.changes import CHANGES, WORKERS, Change, Overrides, smallest

RULE = (
    "A change is kept when the loss curve over the measured steps is the reference's (rule of `mindferry compare`) and "
    "the step is faster above the noise, or a process uses less memory and the step is not slower. A change that saves "
    "memory at the cost of time is kept only while the peak is above --memory-limit. Everything else is reverted."
)


# A noise above this is measured once more, and both series are judged as one.
NOISY = 0.25


@dataclass
class Plan:
    """What the person asked for.

    Attributes:
        steps: training steps measured for each change, after warm-up.
        budget_seconds: nothing is started that would not end within it.
        memory_limit: bytes, or None.
        extra: more changes to try, after the list.
    """

    steps: int = 16
    budget_seconds: float = 1800.0
    memory_limit: int | None = None
    extra: list[Change] = field(default_factory=list)


@dataclass
class Tuned:
    """The outcome: what is kept, every record of tune.jsonl, and why it ended ("done" or "budget")."""

    kept: Overrides
    records: list[dict[str, Any]]
    ended: str


def set_keys(content: Any, overrides: Overrides) -> None:
    """Set dotted keys in a YAML mapping, plain or round-trip.

    Raises:
        UsageError: a key that run.yaml does not have.
    """
    for dotted, value in overrides.items():
        *path, last = dotted.split(".")
        node = content
        for part in path:
            if not isinstance(node, dict) or part not in node:
                raise UsageError(f"{dotted}: run.yaml has no such key", id="tune.key")
            node = node[part]
        if not isinstance(node, dict) or last not in node:
            known = node if isinstance(node, dict) else {}
            raise UsageError(
                f"{dotted}: run.yaml has no such key", remedy=did_you_mean(last, known), id="tune.key"
            )
        node[last] = value


def keys_of(overrides: Overrides) -> Overrides:
    """The keys of run.yaml among `overrides`."""
    return {key: value for key, value in overrides.items() if key != WORKERS}


def changed(content: dict[str, Any], overrides: Overrides) -> dict[str, Any]:
    """A copy of `content` with `overrides` set, the number of processes as a key of its own."""
    result = copy.deepcopy(content)
    set_keys(result, keys_of(overrides))
    result[WORKERS] = overrides.get(WORKERS, result.get(WORKERS, 1))
    return result


class Session:
    """One tuning of one run; goes on from tune.jsonl where there is one.

    Raises:
        UsageError: tune.jsonl belongs to another run.yaml, and restart is false.
    """

    def __init__(
        self,
        run: RunDirectory,
        plan: Plan,
        restart: bool = False,
        tick: Callable[[str], None] = lambda note: None,
    ) -> None:
        self._run, self._plan, self._tick = run, plan, tick
        self._path = run.root / "tune.jsonl"
        self._content = run_yaml.read(run.yaml)
        self._mark = hashlib.sha256(run.yaml.read_bytes()).hexdigest()[:16]
        self._began = time.monotonic()
        self._longest = 0.0
        self.records: list[dict[str, Any]] = []
        if restart:
            self._path.unlink(missing_ok=True)
        self._resume()

    def _resume(self) -> None:
        if not self._path.is_file():
            return
        for line in self._path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue  # the torn last line of a killed tuning
            if isinstance(record, dict):
                self.records.append(record)
        if not self.records:
            return
        first = self.records[0]
        if first.get("run_yaml") != self._mark or first.get("steps") != self._plan.steps:
            raise UsageError(
                f"{self._path}: belongs to another run.yaml or another --steps",
                remedy="start over with --restart",
                id="tune.other",
            )
        self._save_all()

    def _save_all(self) -> None:
        write_text(self._path, "".join(json.dumps(record) + "\n" for record in self.records))

    def _record(self, **values: Any) -> dict[str, Any]:
        self.records.append(values)
        self._save_all()
        return values

    @property
    def kept(self) -> Overrides:
        """All overrides kept so far, the start included."""
        found: Overrides = {}
        for record in self.records:
            if record.get("decision") in ("start", "kept"):
                found.update(record["overrides"])
        return found

    def _measure(self, tasks: dict[str, Overrides]) -> dict[str, bench.Side]:
        began = time.monotonic()
        log = self._run.logs / "tune.log"
        log.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="mindferry-tune-") as name:
            asked = {
                key: bench.run_task(
                    self._run, self._plan.steps, log, keys_of(value), workers=value.get(WORKERS, 1)
                )
                for key, value in tasks.items()
            }
            sides = bench.measure(asked, self._plan.steps, Path(name), self._tick, parts=False)
        self._longest = max(self._longest, time.monotonic() - began)
        return sides

    def _time_left(self) -> bool:
        return time.monotonic() - self._began + self._longest < self._plan.budget_seconds

    def _curve(self, losses: list[float]) -> Curve:
        return Curve("", "tune", np.arange(1, len(losses) + 1), {"loss": np.array(losses, float)})

    def start(self) -> None:
        """Measure the smallest configuration and see that its loss falls.

        Raises:
            MindferryError: it does not train, or its loss does not fall: nothing is tuned then.
        """
        if self.records:
            return
        overrides = smallest(self._content)
        side = self._measure({"start": overrides})["start"]
        bench.check({"run": side}, "run")
        losses = side.losses
        third = max(2, len(losses) // 3)
        first, last = float(np.mean(losses[:third])), float(np.mean(losses[-third:]))
        if not last < first:
            raise MindferryError(
                f"the loss does not fall in the smallest configuration: {first:.4f} -> {last:.4f} over "
                f"{len(losses)} steps",
                remedy="find out why before tuning (mindferry doctor loss RUN), or watch longer with --steps",
                id="tune.loss",
            )
        self._record(
            change="smallest configuration", decision="start", overrides=overrides, run_yaml=self._mark,
            steps=self._plan.steps, losses=losses, step_seconds=float(np.median(side.times("step"))),
            peak_memory_bytes=side.peak_memory_bytes, why=f"the loss falls from {first:.4f} to {last:.4f}",
        )  # fmt: skip

    def tune(self) -> Tuned:
        """Try what has not been tried yet, within the budget.

        Raises:
            MindferryError: see start.
        """
        self.start()
        for change in (*CHANGES, *self._plan.extra):
            if any(record["change"] == change.name for record in self.records):
                continue
            current = changed(self._content, self.kept)
            proposal = change.propose(current)
            if isinstance(proposal, str):
                self._record(change=change.name, decision="not tried", overrides={}, why=proposal)
                continue
            if change.saves == "memory" and not self._over_limit():
                why = "memory suffices; it would cost time (give --memory-limit to have it tried)"
                self._record(change=change.name, decision="not tried", overrides={}, why=why)
                continue
            if not self._time_left():
                self.write_yaml()
                return Tuned(self.kept, self.records, "budget")
            self._try(change, proposal)
            self.write_yaml()
        if not any(record["decision"] == "result" for record in self.records) and self._time_left():
            self._result()
        self.write_yaml()
        return Tuned(self.kept, self.records, "done")

    def _over_limit(self) -> bool:
        last = [r["peak_memory_bytes"] for r in self.records if r["decision"] in ("start", "kept")][-1]
        return self._plan.memory_limit is not None and last > self._plan.memory_limit

    def _try(self, change: Change, proposal: Overrides) -> None:
        try:
            changed(self._content, proposal)
            sides = self._measure({"current": self.kept, "changed": {**self.kept, **proposal}})
            bench.check({"run": sides["current"]}, "run")
        except UsageError as err:
            self._record(
                change=change.name, decision="reverted", overrides=proposal, why=f"failed: {err.message}"
            )
            return
        trial = sides["changed"]
        if trial.failure:
            self._record(
                change=change.name, decision="reverted", overrides=proposal, why=f"failed: {trial.failure}"
            )
            return
        times = speed.judge(sides["current"].times("step"), trial.times("step"), interleaved=True)
        if hidden(times) and self._time_left():
            again = self._measure({"current": self.kept, "changed": {**self.kept, **proposal}})
            if not any(side.failure for side in again.values()):
                pooled = [
                    np.concatenate([sides[key].times("step"), again[key].times("step")]) for key in sides
                ]
                times = speed.judge(*pooled, interleaved=True)
        kept_memory = memory.judge(sides["current"].peak_memory_bytes, trial.peak_memory_bytes)
        curve = convergence.compare(self._curve(self.records[0]["losses"]), self._curve(trial.losses))
        keep, why = decide(times, kept_memory, curve, change.saves == "memory" and self._over_limit())
        self._record(
            change=change.name, decision="kept" if keep else "reverted", overrides=proposal, why=why,
            ratio=times.ratio if np.isfinite(times.ratio) else None,
            noise=times.noise if np.isfinite(times.noise) else None,
            step_seconds=times.candidate_median, current_step_seconds=times.reference_median,
            peak_memory_bytes=trial.peak_memory_bytes, current_peak_memory_bytes=sides["current"].peak_memory_bytes,
            processes={**self.kept, **proposal}.get(WORKERS, 1), current_processes=self.kept.get(WORKERS, 1),
            convergence=curve.verdict, parted_at=curve.parted_at,
        )  # fmt: skip

    def _result(self) -> None:
        """The start against all that was kept, in turns."""
        start = self.records[0]["overrides"]
        if self.kept == start:
            return
        sides = self._measure({"start": start, "tuned": self.kept})
        if any(side.failure for side in sides.values()):
            return
        times = speed.judge(sides["start"].times("step"), sides["tuned"].times("step"), interleaved=True)
        curve = convergence.compare(
            self._curve(self.records[0]["losses"]), self._curve(sides["tuned"].losses)
        )
        self._record(
            change="all kept changes against the start", decision="result", overrides={}, ratio=times.ratio,
            noise=times.noise if np.isfinite(times.noise) else None, step_seconds=times.candidate_median,
            current_step_seconds=times.reference_median, peak_memory_bytes=sides["tuned"].peak_memory_bytes,
            convergence=curve.verdict, why=f"{times.verdict}, {times.ratio:.2f} times the speed; {curve.sentence}",
        )  # fmt: skip

    def write_yaml(self) -> None:
        """RUN/run.tuned.yaml: run.yaml with the kept keys set, comments and order as they were.

        How many processes to train with is no key of run.yaml; it stands in a comment at the top.
        """
        import io

        from ruamel.yaml import YAML

        yaml = YAML()
        yaml.preserve_quotes = True
        yaml.width = 4096
        content = yaml.load(self._run.yaml.read_text(encoding="utf-8"))
        set_keys(content, keys_of(self.kept))
        text = io.StringIO()
        if WORKERS in self.kept:
            text.write(f"# Tuned for: mindferry train RUN --workers {self.kept[WORKERS]}\n")
        yaml.dump(content, text)
        write_text(self._run.root / "run.tuned.yaml", text.getvalue())


def hidden(times: speed.Speed) -> bool:
    """Whether a difference may hide in the noise of a busy machine, so that measuring once more is worth it."""
    if times.verdict not in ("same", "undecided") or not np.isfinite(times.ratio):
        return False
    return times.noise > NOISY and abs(np.log(times.ratio)) > speed.INTERLEAVED_FLOOR


def decide(
    times: speed.Speed, kept_memory: str, curve: convergence.Convergence, memory_is_short: bool
) -> tuple[bool, str]:
    """Keep or revert, and why, by RULE."""
    if curve.verdict != "same":
        return False, f"the loss curve is not the reference's: {curve.verdict}, {curve.sentence}"
    if times.verdict == "faster":
        return True, f"{times.ratio:.2f} times as fast (noise ±{times.noise:.0%}), memory: {kept_memory}"
    if kept_memory == "less" and (times.verdict != "slower" or memory_is_short):
        return True, f"less memory, step time: {times.verdict}"
    return (
        False,
        f"step time: {times.verdict} ({times.ratio:.2f} times, noise ±{times.noise:.0%}), memory: {kept_memory}",
    )
