"""Operators of a training step, as MindSpore's profiler saw them: time by type, and by place in the model.

Its file cpu_op_execute_timestamp_*.txt has a line an operator: NAME;HostCpuOps;START,DURATION,0 ... with START in
nanoseconds since 1970 and DURATION in milliseconds. In compiled graphs NAME is the path of cells with the operator at
its end (Default/network-GPT2ForTraining/.../layers-CellList/0-TransformerLayer/.../MatMul-op0); in PyNative mode it is
the operator alone, and what MindSpore expands or fuses afterwards has lost its path.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PATTERN = "cpu_op_execute_timestamp_*.txt"
# What a path goes through -> the part of the step; the first that fits counts. {} is the number of the layer.
PLACES = (
    (re.compile(r"/layers-\w+/(\d+)-"), "decoder.layers.{}"),
    (re.compile(r"/final_layernorm-"), "decoder.final_layernorm"),
    (re.compile(r"/(?:train_)?embedding-"), "embedding"),
    (re.compile(r"/output_layer-|/head-"), "head"),
    (re.compile(r"/loss-"), "loss"),
    (re.compile(r"/optimizer-|/learning_rate-"), "optimizer"),
    (re.compile(r"/clip(?:_grad_norm)?-"), "gradient clipping"),
    (re.compile(r"^Expand/|GraphKernel_"), "no place: expanded or fused by MindSpore"),
    (re.compile(r"/network-"), "model, the rest"),
)
REST = "step, the rest"


@dataclass(frozen=True)
class Operator:
    """One execution: full name, start and duration in seconds."""

    name: str
    start: float
    seconds: float

    @property
    def kind(self) -> str:
        """MatMul, BiasAddGrad, ..."""
        return re.sub(r"-op\d+$", "", self.name.rpartition("/")[2])

    @property
    def place(self) -> str:
        """The part of the step that it belongs to; REST where its name does not tell."""
        for pattern, place in PLACES:
            found = pattern.search(self.name)
            if found:
                return place.format(*found.groups())
        return REST


def read(path: Path) -> list[Operator]:
    """Every execution in the file, in the order of time; entries that cannot be read are left out."""
    found = []
    with open(path, encoding="utf-8", errors="replace") as handle:
        for line in handle:
            name, _, rest = line.rstrip("\n").partition(";")
            for entry in rest.partition(";")[2].split():
                try:
                    start, duration = entry.split(",")[:2]
                    found.append(Operator(name, int(start) * 1e-9, float(duration) * 1e-3))
                except ValueError:
                    continue
    return sorted(found, key=lambda operator: operator.start)


def busy(operators: Iterable[Operator]) -> float:
    """Seconds in which at least one operator ran; `operators` in the order of time."""
    total, end = 0.0, 0.0
    for operator in operators:
        stop = operator.start + operator.seconds
        total += max(0.0, stop - max(operator.start, end))
        end = max(end, stop)
    return total


def table(operators: list[Operator], steps: int, step_seconds: float) -> dict[str, Any]:
    """Times a step, by type and by place, greatest first (seconds; the mean of `steps` profiled steps).

    Args:
        step_seconds: mean duration of the profiled steps, from handing over the batch until the results were read.

    Returns:
        "by_type" and "by_place", rows of name, count (executions a step), seconds, share (of the step); "busy_seconds"
        a step in which an operator ran; "between_seconds", what the step took beyond that: starting operators.
    """
    running = busy(operators) / steps
    return {
        "steps": steps,
        "step_seconds": step_seconds,
        "busy_seconds": running,
        "between_seconds": step_seconds - running,
        "by_type": _rows(((o.kind, o.seconds) for o in operators), steps, step_seconds),
        "by_place": _rows(((o.place, o.seconds) for o in operators), steps, step_seconds)
        if any("/network-" in o.name for o in operators)
        else [],
    }


def _rows(pairs: Iterable[tuple[str, float]], steps: int, whole: float) -> list[dict[str, Any]]:
    seconds: dict[str, float] = defaultdict(float)
    count: dict[str, int] = defaultdict(int)
    for name, took in pairs:
        seconds[name] += took
        count[name] += 1
    return [
        {"name": name, "count": count[name] / steps, "seconds": took / steps, "share": took / steps / whole}
        for name, took in sorted(seconds.items(), key=lambda item: -item[1])
    ]


class Profile:
    """MindSpore's profiler over a few training steps.

    It is started and stopped between steps. On a device other than a CPU its files are others, which are not read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def start(self) -> None:
        from mindspore.profiler import ProfilerActivity, profile, tensorboard_trace_handler

        handler = tensorboard_trace_handler(str(self._folder), analyse_flag=False)
        self._profiler = profile(
            activities=[ProfilerActivity.CPU], start_profile=False, on_trace_ready=handler
        )
        self._profiler.start()

    def stop(self) -> list[Operator]:
        """What ran since the start; [] where the profiler left no file of the kind."""
        self._profiler.stop()
        files = sorted(self._folder.rglob(PATTERN))
        return [operator for path in files for operator in read(path)]
