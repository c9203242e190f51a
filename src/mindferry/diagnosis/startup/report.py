"""Which event of which rank was the root, what is known about it, and how that is said."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from mindferry.diagnosis.startup import knowledge
from mindferry.diagnosis.startup.events import Event, Stream, read_stream
from mindferry.diagnosis.startup.knowledge import Match
from mindferry.diagnosis.startup.lines import MAX_BYTES, LogFile, as_bytes, lines_of, log_files, open_log
from mindferry.errors import MindferryError, UsageError, printable
from mindferry.findings import Finding

_SHORT_STACK = 4
_LONG = 300
SIGNS_OF_LIFE = 4


@dataclass(frozen=True)
class Candidate:
    """An event that may be the root, with where it is from and what is known about it."""

    event: Event
    source: str
    rank: int | None
    launcher: bool
    known: Match | None

    @property
    def consequence(self) -> bool:
        return self.known is not None and self.known.entry.consequence

    @property
    def where(self) -> str:
        rank = f"rank {self.rank}, " if self.rank is not None else ""
        return f"{rank}{self.source} line {self.event.line}"


@dataclass
class Picture:
    """What the logs of one start say.

    Attributes:
        root: the event to look at, None when no log holds a failure.
        others: further failures that are no mere consequence, in the order of time.
        consequences: what other processes reported because of it.
        foreign: names of other frameworks, when the logs are theirs and not MindSpore's.
        unread: logs that could not be read, with the reason.
    """

    root: Candidate | None = None
    others: list[Candidate] = field(default_factory=list)
    consequences: list[Candidate] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    lines: int = 0
    progressed: bool = False
    last_line: str = ""
    versions: dict[str, str] = field(default_factory=dict)


def _texts(event: Event) -> list[str]:
    """What to look up, the most telling first: each exception from the root on, then the whole text."""
    texts = [f"{kind}: {message}" for kind, message in event.exceptions]
    return [*texts, event.text]


def _candidate(
    event: Event, source: str, rank: int | None, launcher: bool, scope: knowledge.Scope
) -> Candidate:
    stack = "\n".join(f"{file} {function}" for file, _, function in event.frames)
    known = knowledge.match(_texts(event), event.headline, stack, scope)
    return Candidate(event, source, event.rank if rank is None else rank, launcher, known)


def _weight(item: Candidate) -> tuple[int, int, float, int, int]:
    """Smaller is nearer to the root: failures before consequences, exceptions before bare lines, then time."""
    event = item.event
    telling = 0 if event.kind == "traceback" else 1 if item.known else 2 if event.level == "CRITICAL" else 3
    return (
        2 * item.consequence + (item.launcher and not item.consequence),
        min(telling, 2) if not item.known else 0,
        event.time if event.time is not None else float("inf"),
        event.line,
        telling,
    )


@dataclass
class _Log:
    streams: dict[int | None, Stream]
    shown: str
    launcher: bool


def _collect(logs: list[_Log], unread: list[str]) -> Picture:
    words = set().union(*(s.words for log in logs for s in log.streams.values())) if logs else set()
    foreign = sorted(words - {"own"}) if "own" not in words else []
    scope: knowledge.Scope = "foreign" if foreign else "own"
    picture = Picture(foreign=foreign, sources=[log.shown for log in logs], unread=unread)
    candidates = []
    for log in logs:
        for rank, stream in log.streams.items():
            picture.lines += stream.lines
            for name, version in stream.versions.items():
                picture.versions.setdefault(name, version)
            picture.progressed |= stream.progressed
            picture.last_line = stream.last_line or picture.last_line
            events = stream.events
            # In a joined log another rank may print a line or two after the failure; a run that lives prints more.
            if not any(event.kind == "traceback" for event in events) and stream.signs < SIGNS_OF_LIFE:
                events = [*(event for event in stream.earlier if event.kind == "traceback"), *events]
            candidates += [_candidate(e, log.shown, rank, log.launcher, scope) for e in events]
    candidates.sort(key=_weight)
    if candidates and (candidates[0].known or _failed(candidates[0])):
        root = picture.root = _fullest(candidates)
        rest = [c for c in candidates if c.event.headline != root.event.headline and not _same(c, root)]
        picture.others = _others(rest)
        picture.consequences = [c for c in rest if c.consequence][:4]
    return picture


def _same(one: Candidate, other: Candidate) -> bool:
    """Both are of one process and known as one thing."""
    known = one.known is not None and other.known is not None and one.known.entry.id == other.known.entry.id
    return known and (one.source, one.rank) == (other.source, other.rank)


def _fullest(candidates: list[Candidate]) -> Candidate:
    """The first candidate, or the traceback in which the same process says the same at length."""
    first = candidates[0]
    return next((c for c in candidates if c.event.kind == "traceback" and _same(c, first)), first)


def _others(rest: list[Candidate]) -> list[Candidate]:
    """At most one further failure of each process, four in all."""
    found: dict[tuple[str, int | None], Candidate] = {}
    for item in rest:
        if not item.consequence and not item.launcher and (item.known or item.event.kind == "traceback"):
            found.setdefault((item.source, item.rank), item)
    return list(found.values())[:4]


def _failed(item: Candidate) -> bool:
    """An unmatched line is a failure when it is an exception or a logger called it an error."""
    return item.event.kind == "traceback" or bool(item.event.exceptions) or bool(item.event.level)


def read(source: Path | Iterable[str | bytes] | IO[bytes], progress: Any = None) -> Picture:
    """The picture of a log, of a directory of logs, or of lines.

    Args:
        source: a path; or lines (text or bytes); or an open binary file such as stdin.
        progress: called with the bytes read so far of a file.

    Raises:
        UsageError: nothing there, or nothing of it is a readable log.
    """
    if not isinstance(source, Path):
        lines = lines_of(source) if _is_file(source) else as_bytes(source)  # type: ignore[arg-type]
        return _collect([_Log(read_stream(lines), "the given lines", False)], [])
    files = log_files(source)
    logs, unread = [], []
    for file in files:
        try:
            logs.append(_read_file(file, progress))
        except UsageError as err:
            if len(files) == 1:
                raise
            unread.append(err.message)
    if not logs:
        raise UsageError(
            f"{source}: none of {len(files)} files is a readable log: {unread[0]}", id="startup.no-log"
        )
    return _collect(logs, unread)


def _is_file(source: object) -> bool:
    return hasattr(source, "readline")


def _read_file(file: LogFile, progress: Any) -> _Log:
    handle = open_log(file.path)
    try:
        lines = lines_of(handle, MAX_BYTES)
        if progress is not None:
            lines = _counted(lines, progress)
        return _Log(read_stream(lines, file.rank), file.shown, file.launcher)
    finally:
        handle.close()


def _counted(lines: Iterator[bytes], progress: Any) -> Iterator[bytes]:
    pending = 0
    for line in lines:
        pending += len(line) + 1
        if pending > 1 << 22:
            progress(pending)
            pending = 0
        yield line


def _installed() -> dict[str, str]:
    """Versions on this machine, without importing the packages."""
    from importlib import metadata

    found = {}
    for name in ("mindspore", "mindformers", "numpy"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _short(text: str, limit: int = _LONG) -> str:
    text = printable(" ".join(text.split()))
    return text if len(text) <= limit else text[: limit - 1] + "…"


def stack_of(event: Event) -> str:
    """The root exception and the innermost frames, a few lines, for a person."""
    rows = [f"{file}:{line} in {function}" for file, line, function in event.frames[-_SHORT_STACK:]]
    raised = [f"then raised as {kind}" for kind, _ in event.exceptions[1:] if kind != event.exceptions[0][0]][
        :1
    ]
    return "\n".join(printable(row) for row in (*rows, event.headline[:600], *raised))


def _version_note(picture: Picture) -> str:
    if picture.versions:
        pair = ", ".join(f"{name} {version}" for name, version in sorted(picture.versions.items()))
        return f"versions named in the log: {pair}"
    pair = ", ".join(f"{name} {version}" for name, version in sorted(_installed().items()))
    return (
        f"the log names no versions; installed here: {pair}" if pair else "neither package is installed here"
    )


def findings_of(picture: Picture) -> list[Finding]:
    """The picture as findings: the root first, then what else there is to know."""
    found: list[Finding] = []
    root = picture.root
    if picture.foreign:
        names = " and ".join(picture.foreign)
        found.append(
            Finding(
                "startup.foreign",
                "warning" if root else "info",
                f"this is a log of {names}, not of MindSpore",
                cause="what is known here is about MindSpore and mindformers",
                remedy="only what is true of any framework (ports, memory, disk, files) is named below",
            )
        )
    if root is None:
        found.append(_nothing(picture))
    else:
        found.append(_root_finding(picture, root))
        found += [_other(item) for item in picture.others]
        if picture.consequences:
            shown = "; ".join(f"{c.where}: {_short(c.event.headline, 120)}" for c in picture.consequences[:3])
            found.append(
                Finding("startup.followed", "info", f"what followed from it: {shown}", evidence=shown)
            )
    found += [Finding("startup.unread", "warning", f"not read: {text}") for text in picture.unread]
    return found


def _root_finding(picture: Picture, root: Candidate) -> Finding:
    evidence = stack_of(root.event)
    if root.known is None:
        return Finding(
            "startup.unknown",
            "problem",
            f"{root.where}: {_short(root.event.headline)}",
            cause="not in the knowledge base; this is the bottom of the stack of the first failing process",
            remedy="the innermost frame names the place; search MindSpore's FAQ for the message",
            evidence=evidence,
        )
    entry = root.known.entry
    cause = entry.cause
    if entry.kind == "version":
        cause = f"{cause} ({_version_note(picture)})"
    return Finding(
        f"startup.{entry.id}",
        "problem",
        f"{root.where}: {root.known.title}",
        cause=f"{cause} [{entry.follows}]",
        remedy=root.known.remedy,
        evidence=evidence,
    )


def _other(item: Candidate) -> Finding:
    name = f"startup.{item.known.entry.id}" if item.known else "startup.unknown"
    title = item.known.title if item.known else _short(item.event.headline)
    return Finding(name, "info", f"also, {item.where}: {title}", evidence=stack_of(item.event))


def _nothing(picture: Picture) -> Finding:
    if picture.progressed:
        return Finding(
            "startup.trained",
            "info",
            f"no failure in {picture.lines:,} lines; training steps were made",
            evidence=_short(picture.last_line),
        )
    return Finding(
        "startup.none",
        "info",
        f"no failure in {picture.lines:,} lines, and no training step either",
        cause="the process may still be compiling, or was killed without a word (`dmesg | grep -i kill` tells)",
        evidence=_short(picture.last_line),
    )


def diagnose(source: Path | str | Iterable[str | bytes]) -> list[Finding]:
    """Findings about a log (path, or lines): the root first; never raises for what a log holds.

    Raises:
        UsageError: the path is nothing that can be read as a log.
    """
    if isinstance(source, str):
        source = Path(source)
    return findings_of(read(source))


def diagnose_exception(err: BaseException) -> list[Finding]:
    """Findings about an exception that was just caught, from its own traceback: no log is needed."""
    return diagnose([line for part in traceback.format_exception(err) for line in part.splitlines()])


def explained(err: MindferryError, log: Path | None = None) -> MindferryError:
    """A failure inside the engine with the cause that the knowledge base names, where it knows one.

    Args:
        err: raised from the exception that the engine raised.
        log: where the whole trace is, for the remedy.
    """
    if err.__cause__ is None:
        return err
    found = diagnose_exception(err.__cause__)
    known = next((item for item in found if item.remedy and item.id != "startup.unknown"), None)
    plain = MindferryError(err.message, cause=err.cause, remedy=err.remedy, id=err.id, evidence=err.evidence)
    if known is None:
        return plain
    return MindferryError(
        # Without the place in the lines it was found in: they are this exception's own.
        f"{err.message} [{known.message.partition(': ')[2]}]",
        cause=known.cause,
        remedy=known.remedy + (f" (the whole trace is in {log})" if log else ""),
        id=known.id,
        evidence=known.evidence,
    )


def read_stdin(progress: Any = None) -> Picture:
    """The picture of what stands on standard input."""
    picture = read(sys.stdin.buffer, progress)
    picture.sources = ["stdin"]
    return picture
