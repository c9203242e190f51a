"""Sides of a comparison as processes that take turns, so that a noisy machine is noisy for all of them."""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Side:
    """Times of one side in seconds, in the order of the rounds; peak resident memory in bytes.

    `cpu_seconds` is what the process computed meanwhile, all its threads together. On a machine that others
    use as well, it says what the work costs where `seconds` says how long the side waited for its turn, too.
    """

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    peak_memory_bytes: int = 0
    failure: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.seconds) if self.seconds else float("nan")

    @property
    def cpu_median(self) -> float:
        return statistics.median(self.cpu_seconds) if self.cpu_seconds else float("nan")


def serve(step: Callable[[], float | None], warm_up: int = 2) -> None:
    """Worker: run `step` once a line on stdin; print its seconds (its own or the wall clock's) and the CPU's."""
    for _ in range(warm_up):
        step()
    print("ready", flush=True)
    for line in sys.stdin:
        if line.strip() == "end":
            break
        start, cpu = time.perf_counter(), time.process_time()
        own = step()
        took = own if own is not None else time.perf_counter() - start
        print(f"took {took} {time.process_time() - cpu}", flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print("end " + json.dumps({"peak_memory_bytes": peak}), flush=True)


def _answer(process: subprocess.Popen, word: str) -> str | None:
    """The rest of the next line that starts with `word`; None when the process ended."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(word):
            return line[len(word) :].strip()
    return None


def measure(commands: dict[str, list[str]], rounds: int, note: Callable[[str], None]) -> dict[str, Side]:
    """Start every command, wait until each is warm, then let them take `rounds` turns each, in order."""
    sides = {name: Side() for name in commands}
    running: dict[str, subprocess.Popen] = {}
    for name, command in commands.items():
        note(f"starting {name}")
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ,
        )
        process_errors = _drain(process)
        if _answer(process, "ready") is None:
            process.wait()
            lines = process_errors()
            sides[name].failure = lines[-1] if lines else "ended without a word"
            note(f"{name} failed: {sides[name].failure}")
        else:
            running[name] = process
    for turn in range(rounds):
        note(f"round {turn + 1} of {rounds}")
        for name, process in running.items():
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
            took = _answer(process, "took")
            if took is None:
                sides[name].failure = "ended early"
            else:
                seconds, cpu_seconds = map(float, took.split())
                sides[name].seconds.append(seconds)
                sides[name].cpu_seconds.append(cpu_seconds)
    for name, process in running.items():
        out, _ = process.communicate("end\n") if process.poll() is None else ("", "")
        for line in (out or "").splitlines():
            if line.startswith("end "):
                sides[name].peak_memory_bytes = json.loads(line[4:])["peak_memory_bytes"]
    return sides


def _drain(process: subprocess.Popen) -> Callable[[], list[str]]:
    """Read stderr in the background; a full pipe would stop the worker."""
    import threading

    lines: list[str] = []
    stream, process.stderr = process.stderr, None
    assert stream is not None
    thread = threading.Thread(
        target=lambda: lines.extend(line.rstrip() for line in stream if line.strip()), daemon=True
    )
    thread.start()
    return lambda: (thread.join(5), lines[-5:])[1]


def quiet_mindspore(mode: int = 0) -> None:
    """Import mindformers without its logs and with the settings of a training run on a CPU."""
    import tempfile

    from mindferry.training import compat

    compat.quiet(Path(tempfile.mkdtemp()))
    import mindspore as ms
    from mindformers.core.context.build_context import build_context

    context = {"mode": mode, "device_target": "CPU", "affinity_cpu_list": []}
    build_context({"context": context, "use_legacy": False, "use_parallel": False, "run_mode": "train"})
    ms.set_context(mode=mode)


def write_results(path: Path, results: dict) -> None:
    """JSON, complete or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)
