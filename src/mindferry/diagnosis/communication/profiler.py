"""MindSpore's profiler output of an Ascend job: where its steps go, and which collective waits or crawls.

Reads step_trace_time.csv and communication.json of each ASCEND_PROFILER_OUTPUT below a directory. Columns and keys
are those that mindspore.profiler.analysis.viewer (2.9.0) writes; times there are microseconds and milliseconds.
Unverified on hardware: the samples of the tests are made by hand, with MindSpore's own names.
"""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindferry.errors import MindferryError, UsageError, printable
from mindferry.findings import Finding

FOLDER = "ASCEND_PROFILER_OUTPUT"
MAX_FILE = 256 << 20
MAX_DEPTH = 6
MAX_RANKS = 4096

# attribute -> column of step_trace_time.csv, microseconds
COLUMNS = {
    "computing": "Computing",
    "exposed": "Communication(Not Overlapped)",
    "overlapped": "Overlapped",
    "communication": "Communication",
    "free": "Free",
    "bubble": "Bubble",
    "preparing": "Preparing",
}
TIMES, BANDWIDTHS = "Communication Time Info", "Communication Bandwidth Info"
_KIND = re.compile(
    r"allreduce|allgather|reducescatter|alltoallv?c?|broadcast|send|receive|reduce|scatter", re.IGNORECASE
)

# Shares that are worth a finding.
_EXPOSED, _WAITING, _BUBBLE, _FREE, _LARGE_PACKETS = 0.10, 0.5, 0.25, 0.20, 0.8


@dataclass
class Collective:
    """All calls of one kind on one rank. Milliseconds; MB as the profiler counts them."""

    kind: str
    calls: int = 0
    elapsed: float = 0.0
    waiting: float = 0.0
    transit: float = 0.0
    megabytes: float = 0.0
    large_packets: float = 0.0
    transports: set[str] = field(default_factory=set)

    @property
    def gigabytes_per_second(self) -> float:
        return self.megabytes / self.transit if self.transit else 0.0


@dataclass
class RankProfile:
    """One rank's profile: microseconds, mean over its steps."""

    rank: int
    folder: Path
    steps: int
    parts: dict[str, float]
    collectives: dict[str, Collective] = field(default_factory=dict)

    @property
    def step(self) -> float:
        return sum(self.parts[name] for name in ("computing", "exposed", "free"))


def read(root: Path) -> list[RankProfile]:
    """The profiles below `root`, by rank.

    Raises:
        UsageError: there is none.
        MindferryError: a file is damaged.
    """
    found: list[RankProfile] = []
    for folder in _folders(root):
        table = folder / "step_trace_time.csv"
        if not table.is_file():
            continue
        steps, parts = _step_trace(table)
        profile = RankProfile(_rank(folder, len(found)), folder, steps, parts)
        if (folder / "communication.json").is_file():
            _communication(folder / "communication.json", profile)
        found.append(profile)
    if not found:
        raise UsageError(
            f"{root}: no {FOLDER}/step_trace_time.csv below it",
            remedy="set profile: True, profile_communication: True, profile_start_step: 5 and profile_stop_step: 7 "
            "in the training YAML; the output is in profile/ of output_dir",
            id="comm.no-profile",
        )
    return sorted(found, key=lambda profile: profile.rank)


def _folders(root: Path) -> Iterator[Path]:
    """Directories named FOLDER at or below `root`; links are not followed."""
    if not root.is_dir():
        raise UsageError(f"{root}: no such directory", id="comm.no-profile")
    count = 0
    for place, names, _ in os.walk(root):
        depth = len(Path(place).relative_to(root).parts)
        names[:] = sorted(names) if depth < MAX_DEPTH else []
        if Path(place).name == FOLDER:
            names[:] = []
            count += 1
            if count > MAX_RANKS:
                return
            yield Path(place)


def _rank(folder: Path, otherwise: int) -> int:
    """From profiler_info_N.json beside the folder."""
    for path in sorted(folder.parent.glob("profiler_info_*.json")):
        match = re.fullmatch(r"profiler_info_(\d{1,6})", path.stem)
        if match:
            return int(match.group(1))
    return otherwise


def _text(path: Path) -> str:
    if path.stat().st_size > MAX_FILE:
        raise MindferryError(
            f"{path}: {path.stat().st_size} bytes, expected at most {MAX_FILE}",
            remedy="profile fewer steps (profile_start_step, profile_stop_step)",
            id="comm.profile-size",
        )
    return path.read_text(encoding="utf-8-sig", errors="replace")


def _step_trace(path: Path) -> tuple[int, dict[str, float]]:
    """Number of steps and the mean of each column."""
    rows = list(csv.DictReader(_text(path).splitlines()))
    sums = dict.fromkeys(COLUMNS, 0.0)
    missing = [column for column in COLUMNS.values() if not rows or column not in rows[0]]
    if missing:
        raise MindferryError(f"{path}: no column {missing[0]!r}, or no steps", id="comm.profile-columns")
    for number, row in enumerate(rows, start=2):
        for name, column in COLUMNS.items():
            try:
                sums[name] += float(row[column] or 0)
            except (TypeError, ValueError):
                raise MindferryError(
                    f"{path}: line {number}: {column}: found {printable(str(row[column]))!r}, expected a number",
                    id="comm.profile-columns",
                ) from None
    return len(rows), {name: value / len(rows) for name, value in sums.items()}


def _communication(path: Path, profile: RankProfile) -> None:
    """Add communication.json: step -> p2p, collective -> operator -> times and bandwidths."""
    try:
        steps = json.loads(_text(path))
        for step in steps.values():
            for group in step.values():
                for name, operator in group.items():
                    if not name.startswith("Total"):
                        _add(profile.collectives, name, operator)
    except (ValueError, AttributeError, TypeError, KeyError) as err:
        raise MindferryError(
            f"{path}: not what MindSpore's profiler writes: {type(err).__name__}", id="comm.profile-json"
        ) from None


def _add(found: dict[str, Collective], name: str, operator: dict[str, Any]) -> None:
    match = _KIND.search(name)
    kind = match.group().lower() if match else printable(name.split("@")[0])[:40]
    entry = found.setdefault(kind, Collective(kind))
    times = operator[TIMES]
    entry.calls += 1
    entry.elapsed += float(times["Elapse Time(ms)"])
    entry.waiting += float(times["Wait Time(ms)"])
    entry.transit += float(times["Transit Time(ms)"])
    for transport, link in operator.get(BANDWIDTHS, {}).items():
        size = float(link.get("Transit Size(MB)", 0))
        if size:
            entry.megabytes += size
            entry.large_packets += size * float(link.get("Large Packet Ratio", 0))
            entry.transports.add(transport)


def judge(profiles: list[RankProfile]) -> list[Finding]:
    """What the profiles say, in the article's terms."""
    return [*_parts(profiles), *_slow(profiles), *_packets(profiles)]


def _parts(profiles: list[RankProfile]) -> Iterator[Finding]:
    step = sum(profile.step for profile in profiles) / len(profiles)

    def share(name: str) -> float:
        return sum(profile.parts[name] for profile in profiles) / len(profiles) / step if step else 0.0

    if share("exposed") >= _EXPOSED:
        hidden = share("overlapped") / max(share("communication"), 1e-12)
        yield Finding(
            "comm.no-overlap",
            "problem",
            f"{share('exposed'):.0%} of a step is communication that no computing hides; {hidden:.0%} of all "
            "communication is hidden",
            "no overlap of communication and computing",
            "several buckets instead of one (parallel.comm_fusion), more micro-batches, mp_comm_recompute: False; "
            "then a strategy that sends less: mindferry plan --check",
        )
    if share("bubble") >= _BUBBLE:
        yield Finding(
            "comm.bubble",
            "problem",
            f"{share('bubble'):.0%} of a step waits for the neighbour stages of the pipeline",
            "too few micro-batches for the stages, or stages of unequal work",
            "raise micro_batch_num to four times pipeline_stage, balance offset: mindferry plan --check run.yaml",
        )
    if share("free") >= _FREE:
        yield Finding(
            "comm.free",
            "warning",
            f"in {share('free'):.0%} of a step the device neither computes nor communicates",
            "it waits for the host: data, or operators that are not dispatched fast enough",
            "mindferry doctor data; graph mode with sink_mode: True",
        )


def _slow(profiles: list[RankProfile]) -> Iterator[Finding]:
    """The rank that the others wait for is the one that waits least."""
    waits = {p.rank: (sum(c.waiting for c in p.collectives.values()), p) for p in profiles if p.collectives}
    elapsed = sum(c.elapsed for _, p in waits.values() for c in p.collectives.values())
    waited = sum(wait for wait, _ in waits.values())
    if len(waits) < 2 or not elapsed or waited / elapsed < _WAITING:
        return
    wait, last = min(waits.values(), key=lambda item: item[0])
    others = [profile for _, profile in waits.values() if profile is not last]
    theirs = sum(profile.parts["computing"] for profile in others) / len(others)
    longer = last.parts["computing"] > 1.05 * theirs
    cause = (
        f"it computes {last.parts['computing'] / 1e3:.1f} ms a step, the others {theirs / 1e3:.1f} ms: more work, or a "
        "slower device"
        if longer
        else "it computes no longer than the others: look at its data and its host"
    )
    yield Finding(
        "comm.slow-rank",
        "problem",
        f"{waited / elapsed:.0%} of the time in collectives is waiting for another rank; rank {last.rank} waits least "
        f"({wait:.1f} ms of {sum(c.elapsed for c in last.collectives.values()):.1f}): the others wait for it",
        cause,
        "give it the same work; compare its machine with the others' (npu-smi info, top)",
    )


def _packets(profiles: list[RankProfile]) -> Iterator[Finding]:
    for kind in sorted({kind for profile in profiles for kind in profile.collectives}):
        rows = [profile.collectives[kind] for profile in profiles if kind in profile.collectives]
        size, large = sum(row.megabytes for row in rows), sum(row.large_packets for row in rows)
        if size and large / size < _LARGE_PACKETS and "send" not in kind and "receive" not in kind:
            calls = sum(row.calls for row in rows)
            yield Finding(
                "comm.small-buckets",
                "warning",
                f"{kind}: {large / size:.0%} of {size:.0f} MB in {calls} calls goes in large packets",
                "many small messages do not fill the links",
                "fuse them: parallel.comm_fusion, fewer and larger tensors",
            )
