"""CANN's plog files of an Ascend job: which collectives each process calls, with what, in what order.

The lines are those of the open HCCL sources (op_base, trace of entries): with ASCEND_GLOBAL_LOG_LEVEL=1 and
HCCL_ENTRY_LOG_ENABLE=1 each call leaves `Entry-Hccl<Op>: tag[..], .. count[..], dataType[..], ..` and
`Hccl<Op>:success,take time ..us`. That time is the host's for handing the call over, not the collective's on the
device; the profiler has the latter. Unverified on hardware.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from mindferry.diagnosis.startup.lines import lines_of, log_files, open_log, text_of
from mindferry.errors import UsageError, printable
from mindferry.findings import Finding

# Bytes of an element, by HCCL's names.
SIZES = {
    "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2, "bfp16": 2, "int32": 4, "uint32": 4,
    "float32": 4, "int64": 8, "uint64": 8, "float64": 8,
}  # fmt: skip

_ENTRY = re.compile(
    r"Entry-(?:Hccl)?(?P<op>[A-Z][A-Za-z]{2,30}?)(?:Inner|V2)?:\s{0,4}tag\[(?P<tag>[^\]]{0,300})\]"
)
_FIELD = re.compile(r"\b(count|sendCount|recvCount|dataType)\[([^\]]{0,60})\]")
_TAKEN = re.compile(
    r"Hccl([A-Z][A-Za-z]{2,30}?)(?:Inner|V2)?:success,\s?take time:?\s{0,2}\[?(\d{1,15})\]?\s?us"
)
_PROCESS = re.compile(r"\bHCCL\((\d{1,10}),")
_SMALL, _MANY = 1 << 20, 50
MAX_CALLS = 2_000_000


@dataclass(frozen=True)
class Call:
    op: str
    count: int
    dtype: str

    @property
    def bytes(self) -> int:
        return self.count * SIZES.get(self.dtype, 0)

    def __str__(self) -> str:
        return f"{self.op} of {self.count} {self.dtype}"


@dataclass
class Process:
    """Calls of one process, by the tag of their communicator, in order.

    Attributes:
        host_us: microseconds to hand a call over, summed by operator.
    """

    name: str
    calls: dict[str, list[Call]] = field(default_factory=dict)
    host_us: Counter[str] = field(default_factory=Counter)

    @property
    def count(self) -> int:
        return sum(len(calls) for calls in self.calls.values())


def read(root: Path, tick: Callable[[int], None] = lambda count: None) -> list[Process]:
    """The processes that plog files at `root` tell of.

    Raises:
        UsageError: no file, or no line of a collective in them.
    """
    found: dict[str, Process] = {}
    total = 0
    for file in log_files(root):
        with open_log(file.path) as handle:
            for raw in lines_of(handle):
                tick(len(raw))
                if (b"Entry-" in raw or b"take time" in raw) and total < MAX_CALLS:
                    total += _line(text_of(raw), file.shown, found)
    if not total:
        raise UsageError(
            f"{root}: no line of a collective (Entry-Hccl...) in its logs",
            remedy="turn them on before the training starts: export ASCEND_GLOBAL_LOG_LEVEL=1 HCCL_ENTRY_LOG_ENABLE=1",
            id="comm.no-plog",
        )
    return sorted(found.values(), key=lambda process: process.name)


def _line(text: str, shown: str, found: dict[str, Process]) -> bool:
    """Add a line; whether it was a call."""
    match = _PROCESS.search(text)
    folder = str(Path(shown).parent)
    host = "" if folder == "." else f"{folder}: "  # two hosts may have the same process number
    name = f"{host}process {match.group(1)}" if match else shown
    if entry := _ENTRY.search(text):
        values = dict(_FIELD.findall(text))
        digits = next((values[key] for key in ("count", "sendCount", "recvCount") if key in values), "")
        call = Call(
            entry["op"], int(digits) if digits.isdecimal() else 0, printable(values.get("dataType", "?"))
        )
        process = found.setdefault(name, Process(name))
        process.calls.setdefault(printable(entry["tag"]), []).append(call)
        return True
    if taken := _TAKEN.search(text):
        found.setdefault(name, Process(name)).host_us[taken.group(1)] += int(taken.group(2))
    return False


def judge(processes: list[Process]) -> list[Finding]:
    """Calls that do not match between the processes of a communicator, and many small messages."""
    findings = []
    tags = sorted({tag for process in processes for tag in process.calls})
    for tag in tags:
        members = [process for process in processes if tag in process.calls]
        if len(members) > 1 and (finding := _mismatch(tag, members)):
            findings.append(finding)
    calls = [call for process in processes for group in process.calls.values() for call in group]
    small = [call for call in calls if call.bytes < _SMALL]
    if len(calls) > _MANY and len(small) > 0.8 * len(calls):
        findings.append(
            Finding(
                "comm.small-buckets",
                "warning",
                f"{len(small)} of {len(calls)} collectives carry less than 1 MiB",
                "an unsuitable collective: each call costs its latency whatever its size",
                "fuse them: parallel.comm_fusion, larger buckets",
            )
        )
    return findings


def _mismatch(tag: str, members: list[Process]) -> Finding | None:
    """The first call that one process makes differently, or not at all."""
    longest = max(len(process.calls[tag]) for process in members)
    for number in range(longest):
        made = {
            p.name: (str(p.calls[tag][number]) if number < len(p.calls[tag]) else "nothing") for p in members
        }
        counts = Counter(made.values())
        if len(counts) == 1:
            continue
        common = counts.most_common(1)[0][0]
        odd = next((name for name, call in made.items() if call == "nothing"), None)
        odd = odd or next(name for name, call in made.items() if call != common)
        theirs = next(call for name, call in made.items() if name != odd)
        missing = made[odd] == "nothing"
        return Finding(
            "comm.missing-call" if missing else "comm.mismatch",
            "problem",
            f"{tag}: call {number + 1}: {odd} calls {made[odd]}, others {theirs}",
            "it stopped, hangs elsewhere, or its log ends earlier; the others wait for it"
            if missing
            else "the processes do not run the same program: another shape, order or dtype",
            "look for the first error in that process' log: mindferry doctor startup DIR"
            if missing
            else "give every rank the same batch shapes and the same model",
        )
    return None
