"""A side of a benchmark in several processes: the same turns as one process, step by step.

The process that `bench_worker` started follows the ranks, which train as those of `mindferry train --workers` do.
Files in the job's folder: TURN holds the number of the step that the ranks may end; rank R appends a line a step to
steps.R.jsonl, and waits there for its turn. Waiting is counted nowhere.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

from mindferry.checking.bench_worker import WARM_STEPS, Ended, Line, linked_copy
from mindferry.targets.run_directory import RunDirectory, write_text
from mindferry.training.memory import status_bytes

TURN = "turn"
_WAIT_SECONDS = 0.002


class Turns:
    """The process that answers for the ranks: a line of the first rank is an answer, a command is the next turn."""

    def __init__(self, line: Line, folder: Path, workers: int, last: int) -> None:
        self._line, self._folder, self._workers, self._last = line, folder, workers, last
        self._start, self._first, self._seen = time.perf_counter(), 0.0, 0

    def poll(self) -> None:
        """Answer for the step that ended, if one did, and hand out the next turn.

        Raises:
            Ended: the asker wants no more.
        """
        rows = read_steps(self._folder, 0)
        if len(rows) <= self._seen:
            return
        self._seen += 1
        row = rows[self._seen - 1]
        step = row["step"]
        if step == 1:
            self._first = time.perf_counter() - self._start
        if step == WARM_STEPS:
            self._line.say(ready=True, start_seconds=self._first)
        elif step > WARM_STEPS:
            self._line.say(took=row["took"], loss=row["loss"])
        if WARM_STEPS <= step < self._last and self._line.asked() != "step":
            raise Ended
        write_text(self._folder / TURN, str(step + 1))

    def memory(self) -> dict[str, int]:
        """The greatest peak of a process, and of the same one what it had before anything was built."""
        rows = [read_steps(self._folder, rank)[-1] for rank in range(self._workers)]
        largest = max(rows, key=lambda row: row["peak"])
        return {"peak": largest["peak"], "runtime": largest["runtime"]}


def read_steps(folder: Path, rank: int) -> list[dict[str, Any]]:
    """The whole lines that rank `rank` has written so far."""
    try:
        text = (folder / f"steps.{rank}.jsonl").read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def ranks_side(task: dict[str, Any], line: Line) -> None:
    """Trains a copy of the run in task["workers"] processes, one step a command."""
    from mindferry.launching.msrun import Job
    from mindferry.training import engine

    with tempfile.TemporaryDirectory(prefix="mindferry-bench-") as scratch:
        copy = linked_copy(RunDirectory(Path(task["run"])), Path(scratch))
        last = WARM_STEPS + int(task["steps"])
        engine.prepare(copy, engine.Options(overrides=task["overrides"], workers=task["workers"]))
        folder = copy.logs / "workers"
        turns = Turns(line, folder, task["workers"], last)
        job = Job(Path(__file__), folder, task["workers"], turns.poll)
        try:
            job.run({**task, "run": str(copy.root), "last": last})
        except Ended:
            return
        while line.asked() != "end":
            pass
        line.say(**turns.memory())


def work(folder: Path, request: dict[str, Any], rank: int) -> dict[str, Any]:
    """Train as rank `rank`, a step a turn."""
    from mindferry.checking.bench_worker import measured_overrides
    from mindferry.training import engine

    run = RunDirectory(Path(request["run"]))
    last = int(request["last"])
    state = {"waited": 0.0, "runtime": 0}

    def on_step(record: dict[str, Any]) -> None:
        data = record["data_time"] - state["waited"]
        row = {
            "step": record["step"],
            "loss": record["loss"],
            "took": {"step": record["compute_time"] + data, "compute": record["compute_time"], "data": data},
            "peak": status_bytes("VmHWM"),
            "runtime": state["runtime"],
        }
        with open(folder / f"steps.{rank}.jsonl", "a", encoding="utf-8") as handle:
            handle.write(json.dumps(row) + "\n")
        before = time.perf_counter()
        while record["step"] < last and _turn(folder) <= record["step"]:
            time.sleep(_WAIT_SECONDS)
        state["waited"] = time.perf_counter() - before

    import mindformers  # noqa: F401

    state["runtime"] = status_bytes("VmRSS")
    options = engine.Options(
        steps=last,
        overrides=measured_overrides(run, last, request["overrides"]),
        on_step=on_step,
        workers=request["workers"],
        rank=rank,
    )
    engine.fit(run, options, engine.prepare(run, options), None, 0, last)
    return {}


def _turn(folder: Path) -> int:
    try:
        return int((folder / TURN).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return 0


if __name__ == "__main__":
    from mindferry.launching.rank import main

    main(work)
