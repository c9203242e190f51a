"""Which of the known causes holds several processes up, what it costs, and what to do about it.

The article names three causes: gradients met too often, no overlap with computing, an unsuitable collective. Met in
practice more often than any of them: one process that the others wait for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mindferry.diagnosis.communication.measure import Scaling, Split
from mindferry.diagnosis.communication.probe import Collective
from mindferry.findings import Finding

# Share of a step that a cause must cost to be worth a word, and to be a problem.
WORTH_SAYING, PROBLEM = 0.05, 0.10
# A process is slow, not unlucky, when chance would have one come last as often with less than this probability.
CHANCE = 0.02
# A collective between the processes of one machine is no problem below this share: small models are so.
COLLECTIVE_PROBLEM = 0.30
# Computing next to the others may take so much longer than alone.
CROWDED = 1.3


@dataclass(frozen=True)
class Remedy:
    """A change of run.yaml against a cause.

    Attributes:
        overrides: dotted keys of run.yaml.
        predicted: seconds for the batch of a step as it is now.
        batches: how many of those a step has afterwards.
        why: where the prediction is from.
    """

    name: str
    overrides: dict[str, Any]
    predicted: float
    why: str
    batches: int = 1

    def text(self) -> str:
        return ", ".join(f"{key}: {value}" for key, value in self.overrides.items())


@dataclass(frozen=True)
class Cause:
    """A finding with the seconds of a step that it costs, and the rank that the others wait for if there is one."""

    seconds: float
    finding: Finding
    remedies: tuple[Remedy, ...] = ()
    rank: int | None = None


@dataclass(frozen=True)
class Exchange:
    """What run.yaml says about the exchange of gradients.

    Attributes:
        gradient_bytes: of float32 gradients.
        pieces: buckets that they go in.
        wire: dtype on the wire.
        accumulation: micro-batches of a step.
        cpu: whether the run is for a CPU, whose step reduces only after the backward pass.
    """

    gradient_bytes: int
    pieces: int = 1
    wire: str = "float32"
    accumulation: int = 1
    cpu: bool = True


def causes(measured: Scaling, exchange: Exchange, collective: Collective | None = None) -> list[Cause]:
    """The causes worth a word, costliest first."""
    found = [
        *_slow_process(measured),
        *_too_often(measured, exchange),
        *_collective(measured, exchange, collective),
        *_crowded(measured),
    ]
    found = [cause for cause in found if cause.seconds >= WORTH_SAYING * measured.step]
    return sorted(found, key=lambda cause: (cause.finding.severity != "problem", -cause.seconds))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _severity(seconds: float, step: float, problem: float = PROBLEM) -> Any:
    return "problem" if seconds >= problem * step else "warning"


def _slow_process(measured: Scaling) -> Iterator[Cause]:
    """One process that the others wait for, steadily; or all for each other in turn."""
    waited = max(split.wait for split in measured.ranks)
    last = max(measured.ranks, key=lambda split: split.slowest)
    share = f"{_ms(waited)} of a step of {_ms(measured.step)} ({waited / measured.step:.0%})"
    if measured.workers < 2 or by_chance(last.slowest, measured.steps, measured.workers) > CHANCE:
        # Half the wait: who waits now makes up for it when another comes last.
        lost = measured.mean("wait")
        text = f"the processes wait for each other in turn: {_ms(lost)} of a step of {_ms(measured.step)}"
        remedy = "look for other programs on these machines (top), and for batches of very different length"
        yield Cause(lost, Finding("comm.in-turn", "warning", text, "none is steadily the slowest", remedy))
        return
    others = [split for split in measured.ranks if split is not last]
    excess = {part: _excess(last, others, part) for part in ("data", "compute", "rest", "update")}
    part = max(excess, key=lambda name: excess[name])
    finding_id, cause, remedy = _why(last, others, part)
    text = f"rank {last.rank} keeps the others waiting: {share}"
    finding = Finding(finding_id, _severity(waited, measured.step), text, cause, remedy)
    yield Cause(waited, finding, rank=last.rank)


def blamed(found: list[Cause]) -> tuple[str, int] | None:
    """Id of the problem and rank of the process that the others wait for; None when there is none."""
    return next(
        (
            (cause.finding.id, cause.rank)
            for cause in found
            if cause.rank is not None and cause.finding.severity == "problem"
        ),
        None,
    )


def by_chance(share: float, steps: int, workers: int) -> float:
    """Probability that some of `workers` equal processes comes last in `share` of `steps` (binomial tail, each)."""
    from math import comb

    least, p = round(share * steps), 1 / workers
    tail = sum(comb(steps, k) * p**k * (1 - p) ** (steps - k) for k in range(least, steps + 1))
    return min(1.0, workers * tail)


def _excess(last: Split, others: list[Split], part: str) -> float:
    return float(getattr(last, part) - np.median([getattr(split, part) for split in others]))


def _why(last: Split, others: list[Split], part: str) -> tuple[str, str, str]:
    """Id, cause and remedy of a process that comes last for the sake of `part`."""
    theirs = float(np.median([getattr(split, part) for split in others]))
    numbers = f"rank {last.rank} {_ms(getattr(last, part))}, the others {_ms(theirs)}"
    tokens = float(np.median([split.tokens for split in others]))
    if part == "data":
        return (
            "comm.slow-data",
            f"it waits for its data: {numbers}",
            "compare the disks that the ranks read from, and the sizes of the files in their share; "
            "mindferry doctor data tries the pipeline's settings",
        )
    if part == "compute" and last.tokens > 1.1 * tokens:
        return (
            "comm.more-tokens",
            f"it has more to do: {last.tokens:,.0f} tokens a step, the others {tokens:,.0f} ({numbers})",
            "give every rank the same number of sequences of the same length (batch_size, num_shards, packing)",
        )
    if part == "compute":
        return (
            "comm.slow-rank",
            f"it computes longer on as many tokens: {numbers}",
            "look at its machine: other programs, fewer cores, a lower clock, swapping; then at code that only this "
            "rank runs",
        )
    return (
        "comm.slow-rank",
        f"it is held up between steps (callbacks, logging, checkpoints): {numbers}",
        "have it log and save less often: CheckpointMonitor save_checkpoint_steps, per_print_times",
    )


def _too_often(measured: Scaling, exchange: Exchange) -> Iterator[Cause]:
    """The article's first cause: gradients averaged more often than once a step."""
    times = max(split.reductions for split in measured.ranks)
    if times <= 1:
        return
    lost = measured.mean("collective") * (times - 1) / times
    remedy = Remedy(
        "average once a step",
        {"runner_wrapper.reduce_every_micro_batch": False},
        measured.step - lost,
        f"{times:.0f} reductions become one",
    )
    finding = Finding(
        "comm.too-often",
        "problem",
        f"gradients are averaged {times:.0f} times in a step: {_ms(lost)} of {_ms(measured.step)} "
        f"({lost / measured.step:.0%}) too much",
        "runner_wrapper.reduce_every_micro_batch: the sum over micro-batches needs only one average",
        f"set {remedy.text()}",
    )
    yield Cause(lost, finding, (remedy,))


def _collective(measured: Scaling, exchange: Exchange, collective: Collective | None) -> Iterator[Cause]:
    """The other two: an unsuitable collective, and nothing that runs beside it."""
    spent = measured.mean("collective")
    times = max(1.0, max(split.reductions for split in measured.ranks))
    once = spent / times
    lost, remedies = 0.0, []
    if collective is not None and exchange.pieces > 1:
        best = collective.seconds(exchange.gradient_bytes)
        lost = max(0.0, (once - best) * times)
        remedy = Remedy(
            "larger buckets",
            {"parallel.comm_fusion": {"allreduce": {"mode": "size", "config": 64}}},
            measured.step - lost,
            f"one call is {_ms(best)} by the probe, {exchange.pieces} are {_ms(once)}",
        )
        finding = Finding(
            "comm.small-buckets",
            _severity(lost, measured.step),
            f"gradients go in {exchange.pieces} small buckets: {_ms(lost)} of {_ms(measured.step)} too much",
            f"an unsuitable collective: each call costs {_ms(collective.latency)} whatever its size",
            f"set {remedy.text()}",
        )
        yield Cause(lost, finding, (remedy,))
    if exchange.wire == "float32" and measured.workers < 4:
        factor = measured.workers / 4
        saved = exchange.gradient_bytes * (1 - factor) / collective.bytes_per_second if collective else 0.0
        if saved > WORTH_SAYING * measured.step:
            remedies.append(
                Remedy(
                    "half precision on the wire",
                    {"runner_wrapper.gradient_wire_dtype": "float16"},
                    measured.step - saved * times,
                    f"an AllGather of halves sends {factor:.2f} times the bytes of an AllReduce of floats",
                )
            )
    work = measured.step - spent - measured.mean("update") - measured.mean("rest")
    remedies.append(
        Remedy(
            "twice the micro-batches a step",
            {"runner_config.gradient_accumulation_steps": 2 * exchange.accumulation},
            (measured.step + work) / 2,
            "two batches share one reduction; the global batch doubles, so does its learning rate question",
            batches=2,
        )
    )
    rest = spent - lost - once * (times - 1)
    hidden = min(rest, measured.mean("compute"))
    overlap = (
        "on a CPU nothing runs beside it; on Ascend, graph mode overlaps buckets with the backward pass "
        f"(parallel.comm_fusion), which could hide up to {_ms(hidden)}"
    )
    finding = Finding(
        "comm.no-overlap",
        _severity(rest, measured.step, COLLECTIVE_PROBLEM),
        f"averaging gradients takes {_ms(rest)} of a step of {_ms(measured.step)} ({rest / measured.step:.0%}) "
        "in which nothing is computed",
        overlap,
        f"larger steps: {remedies[-1].text()}",
    )
    yield Cause(rest, finding, tuple(remedies))


def _crowded(measured: Scaling) -> Iterator[Cause]:
    """Processes that share this machine's cores compute slower than one alone."""
    if measured.alone_compute is None or measured.workers < 2:
        return
    together = measured.mean("compute") + measured.mean("update")
    lost = together - measured.alone_compute
    if together < CROWDED * measured.alone_compute:
        return
    finding = Finding(
        "comm.crowded",
        "info",
        f"computing takes {together / measured.alone_compute:.1f} times as long beside the others as alone: "
        f"{_ms(together)} instead of {_ms(measured.alone_compute)}",
        "the processes share this machine's cores and memory bandwidth; on a cluster each has a device of its own",
        "take no speed-up from this machine's figures beyond its cores",
    )
    yield Cause(lost, finding)
