"""Benchmark of a run: sides in processes of their own take turns, step by step; then each alone in parts."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mindferry.checking import memory, speed
from mindferry.errors import MindferryError
from mindferry.targets.run_directory import RunDirectory


@dataclass
class Side:
    """What was measured of one side.

    Attributes:
        series: part -> seconds, one entry a round. "backward" of the MindSpore sides is forward and backward;
            "PART/forward" and "PART/both" are parts of the model.
        start_seconds: from the start to the end of the first step: imports aside, building and compiling.
        peak_memory_bytes: high-water mark of the process after the steps.
        runtime_bytes: its resident memory with the libraries loaded and nothing built.
        sizes: parameters, gradients, optimizer in bytes.
        losses: of the measured steps (MindSpore sides).
        operators: see checking.operators.table; {"failed": why} where there are none, {} where not asked for.
        failure: why it gave nothing, or "".
    """

    name: str
    series: dict[str, list[float]] = field(default_factory=dict)
    start_seconds: float = math.nan
    peak_memory_bytes: int = 0
    runtime_bytes: int = 0
    sizes: dict[str, int] = field(default_factory=dict)
    failure: str = ""
    losses: list[float] = field(default_factory=list)
    operators: dict[str, Any] = field(default_factory=dict)

    def times(self, part: str) -> np.ndarray:
        return np.array(self.series.get(part, []))


class _Worker:
    """A running side."""

    def __init__(self, side: Side, task: dict[str, Any], folder: Path) -> None:
        self.side = side
        path = folder / f"{side.name}.json"
        path.write_text(json.dumps(task), encoding="utf-8")
        environment = {"GLOG_v": "3", **os.environ}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mindferry.checking.bench_worker", str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=folder,
            env=environment,
        )

    def answer(self) -> dict[str, Any] | None:
        """The next answer, or None after a failure, which is then in side.failure."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        found: dict[str, Any] = json.loads(line) if line else {"failed": "the process ended without a word"}
        if "failed" in found:
            self.side.failure = found["failed"]
            return None
        return found

    def ask(self, command: str) -> dict[str, Any] | None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(command + "\n")
            self._process.stdin.flush()
        except OSError:
            self.side.failure = self.side.failure or "the process ended"
            return None
        return self.answer()

    def measure(self, command: str) -> None:
        found = self.ask(command)
        for part, seconds in (found or {}).get("took", {}).items():
            self.side.series.setdefault(part, []).append(float(seconds))
        if found is not None and "loss" in found:
            self.side.losses.append(math.nan if found["loss"] is None else float(found["loss"]))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def run_task(
    run: RunDirectory,
    rounds: int,
    log: Path,
    overrides: dict[str, Any] | None = None,
    layers: bool = False,
    operators: bool = False,
    workers: int = 1,
) -> dict[str, Any]:
    """The task of a MindSpore side; `layers`, `operators`: measure those, too (with one worker)."""
    return {
        "layers": layers,
        "operators": operators,
        "workers": workers,
        "kind": "mindspore" if workers == 1 else "workers",
        "run": str(run.root),
        "steps": rounds,
        "overrides": overrides or {},
        "log": str(log),
    }


def torch_task(run: RunDirectory, source: Path, folder: Path, log: Path) -> dict[str, Any]:
    """The task of the source's side, on the first optimizer step's rows of the run's data."""
    from mindferry.checking import sides
    from mindferry.training import engine

    sides.require_torch()
    content = engine.prepare(run, engine.Options())
    runner = content["runner_config"]
    count = runner["gradient_accumulation_steps"]
    batch = sides.first_batch(content, runner["batch_size"] * count)
    np.savez(folder / "batch.npz", **vars(batch))
    optimizer = content["optimizer"]
    return {
        "kind": "torch",
        "source": str(source.resolve()),
        "assume": sides.assumptions(run),
        "batch": str(folder / "batch.npz"),
        "accumulation": count,
        "weight_decay": optimizer["weight_decay"],
        "betas": list(optimizer["betas"]),
        "eps": optimizer["eps"],
        "learning_rate": content["lr_schedule"]["learning_rate"],
        "max_grad_norm": content["runner_wrapper"]["max_grad_norm"],
        "log": str(log),
    }


# What "stock" means: mindformers' GPTModel from MindSpore's own operators, run eagerly.
STOCK = {"model.model_config.layer_spec": "portable", "context.mode": 1}


def measure(
    tasks: dict[str, dict[str, Any]],
    rounds: int,
    folder: Path,
    tick: Callable[[str], None] = lambda note: None,
    parts: bool = True,
) -> dict[str, Side]:
    """Run the sides in turns, `rounds` steps each, the order reversed every other round.

    Args:
        parts: also measure forward and backward alone (MindSpore sides).
    """
    sides = {name: Side(name) for name in tasks}
    with ExitStack() as stack:
        workers = []
        for name, task in tasks.items():
            tick(f"starting {name}")
            worker = _Worker(sides[name], task, folder)
            stack.callback(worker.close)
            ready = worker.answer()
            if ready is not None:
                sides[name].start_seconds = ready["start_seconds"]
                workers.append(worker)
        for turn in range(rounds):
            for worker in workers[:: 1 if turn % 2 == 0 else -1]:
                if not worker.side.failure:
                    worker.measure("step")
            tick(f"round {turn + 1} of {rounds}")
        whole = [w for w in workers if not w.side.failure]
        for worker in whole:
            if tasks[worker.side.name].get("operators"):
                tick(f"operators of {worker.side.name}")
                worker.side.operators = (worker.ask("operators") or {}).get("operators", {})
        if parts:
            _measure_parts([w for w in whole if tasks[w.side.name]["kind"] == "mindspore"], rounds, tick)
            _measure_layers([w for w in whole if tasks[w.side.name].get("layers")], rounds, tick)
        for worker in whole:
            found = worker.ask("end") if not worker.side.failure else None
            if found is not None:
                worker.side.peak_memory_bytes, worker.side.runtime_bytes = found["peak"], found["runtime"]
    return sides


def _measure_parts(workers: list[_Worker], rounds: int, tick: Callable[[str], None]) -> None:
    ready = []
    for worker in workers:
        found = worker.ask("parts")
        tick(f"parts of {worker.side.name}")
        if found is not None:
            worker.side.sizes = {k: int(found[k]) for k in ("parameters", "gradients", "optimizer")}
            ready.append(worker)
    for _ in range(rounds):
        for worker in ready:
            for command in ("forward", "backward", "optimizer"):
                if not worker.side.failure:
                    worker.measure(command)


def _measure_layers(workers: list[_Worker], rounds: int, tick: Callable[[str], None]) -> None:
    for worker in workers:
        tick(f"layers of {worker.side.name}")
        if worker.side.failure or worker.ask("layers") is None:
            continue
        for _ in range(rounds):
            if not worker.side.failure:
                worker.measure("layer")


def decompose(side: Side, accumulation: int = 1) -> dict[str, tuple[float, float]]:
    """Part -> (median, spread) in seconds: step, data, forward, backward, optimizer, rest.

    MindSpore sides measure the step, the wait for data, and, each alone, forward, forward with backward of one
    micro-batch, and the update (overflow check, clipping, optimizer). backward is a difference of two; rest is what
    the step takes beyond all of them.
    """
    found = {
        part: (float(np.median(side.times(part))), speed.spread(side.times(part)))
        for part in side.series
        if "/" not in part
    }
    if "compute" not in found or "backward" not in found:
        return found
    forward, both = found["forward"], found["backward"]
    found["forward"] = (accumulation * forward[0], accumulation * forward[1])
    found["backward"] = (accumulation * (both[0] - forward[0]), accumulation * (both[1] + forward[1]))
    compute, update = found["compute"], found["optimizer"]
    found["rest"] = (
        compute[0] - accumulation * both[0] - update[0],
        compute[1] + accumulation * both[1] + update[1],
    )
    return found


def does_not_add_up(parts: dict[str, tuple[float, float]]) -> list[str]:
    """Parts that come out negative beyond their spread: alone they took longer than inside the step."""
    return [
        f"{name}: {median * 1e3:.1f} ms"
        for name, (median, spread) in parts.items()
        if median < -2 * spread - 1e-4
    ]


def memory_parts(side: Side) -> dict[str, int]:
    """The peak by part in bytes; what sizes do not explain is activations and workspace. {} when not measured."""
    if not side.sizes or not side.peak_memory_bytes:
        return {}
    parts = {"runtime and libraries": side.runtime_bytes, **side.sizes}
    rest = side.peak_memory_bytes - sum(parts.values())
    return {**parts, "activations and workspace": max(rest, 0)}


def model_of(run: RunDirectory) -> tuple[Any, int] | None:
    """ModelSpec and sequence length from migration.json; None where it does not tell."""
    from mindferry.spec import ModelSpec

    try:
        migration = json.loads(run.migration.read_text(encoding="utf-8"))
        return ModelSpec(**migration["model"]), int(migration["data"]["seq_length"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def flops_per_token(run: RunDirectory) -> float | None:
    """6 x (parameters in matrix products) + 12 x layers x hidden x sequence: forward and backward, attention whole.

    The formula of PaLM's appendix B (arXiv 2204.02311); recomputed work does not count. None without migration.json.
    """
    found = model_of(run)
    if found is None:
        return None
    spec, length = found
    products = spec.num_parameters()
    if spec.position_embedding == "learned_absolute":
        products -= spec.max_position_embeddings * spec.hidden_size
    if not spec.tie_word_embeddings:
        products -= spec.vocab_size * spec.hidden_size
    return 6.0 * products + 12.0 * spec.num_layers * spec.num_attention_heads * spec.kv_channels * length


def machine_rates() -> tuple[float, float]:
    """FLOP/s of this machine's float32 matrix products, and bytes/s of its memory, measured.

    Raises:
        MindferryError: a measurement failed.
    """
    from mindferry.planning import measure as machine

    with tempfile.TemporaryDirectory(prefix="mindferry-machine-") as folder:
        rate = machine._worker("gemm", {}, Path(folder))["flops"]
        return float(rate), float(machine._worker("bandwidth", {}, Path(folder))["bytes_per_second"])


def ratios(sides: dict[str, Side], ours: str) -> list[dict[str, Any]]:
    """Each other side against ours: above 1 ours is faster."""
    rows = []
    for name, side in sides.items():
        if name == ours or side.failure:
            continue
        found = speed.judge(side.times("step"), sides[ours].times("step"), interleaved=True)
        rows.append(
            {
                "name": f"step vs {name}",
                "ratio": found.ratio,
                "noise": found.noise,
                "verdict": found.verdict,
                "memory_verdict": memory.judge(side.peak_memory_bytes, sides[ours].peak_memory_bytes),
            }
        )
    return rows


def check(sides: dict[str, Side], ours: str) -> None:
    """
    Raises:
        MindferryError: our own side gave nothing.
    """
    if sides[ours].failure:
        raise MindferryError(
            f"the run could not be measured: {sides[ours].failure}",
            remedy="see whether it trains: mindferry train RUN --steps 3",
            id="bench.failed",
        )
