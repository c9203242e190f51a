"""One log as a short list of events: tracebacks, error lines, and what the shell said.

A state machine over lines. It keeps a bounded number of events of bounded size, however long the log is.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from mindferry.diagnosis.startup.lines import text_of

KEEP = 48  # of the first and of the last events of a stream
MAX_BLOCK_LINES = 120
MAX_TEXT = 16_000

# [ERROR] ME(1234:140...,MainProcess):2026-12-01-14:36:28.123.456 [mindspore/x.py:12] text
_MINDSPORE = re.compile(
    r"^\[(DEBUG|INFO|WARNING|ERROR|CRITICAL)\] ?([A-Z_]+)\((\d+)[^)]{0,80}\):"
    r"(\d{4}-\d\d-\d\d-\d\d:\d\d:\d\d)\.(\d{1,3})(?:\.\d{1,3})? \[([^\]]{0,300})\] ?(.*)$",
    re.DOTALL,
)
# 2026-12-01 14:42:53,404 - mindformers/output/log[mindformers/models/x.py:31] - ERROR - text
_MINDFORMERS = re.compile(
    r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{1,3}) - ([^\[]{0,300})\[([^\]]{0,300})\] - "
    r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) - (.*)$",
    re.DOTALL,
)
# CANN: [ERROR] RUNTIME(1234,python):2026-12-01-14:36:28.123.456 ...   plain logging: 2026-12-01 14:36:28,123 ERROR x
_PLAIN = re.compile(
    r"^(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:[,.](\d{1,6}))?[^A-Za-z]{0,8}\b(DEBUG|INFO|WARNING|ERROR|CRITICAL)\b(.*)$",
    re.DOTALL,
)
_RANK_PREFIX = re.compile(r"^\[(?:rank|worker)[_ ]?(\d{1,6})\]:? ?", re.IGNORECASE)
_RANK_STARTS = (b"[rank", b"[work")
_TRACEBACK = "Traceback (most recent call last):"
_CHAIN = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_FRAME = re.compile(r'^\s+File "([^"]{0,500})", line (\d{1,9}), in (.{0,200})$')
_EXCEPTION = re.compile(
    r"^([A-Za-z_][\w.]{0,120}(?:Error|Exception|Interrupt|Exit|Warning|Fault)?)(?::\s?(.*))?$", re.DOTALL
)
# Training goes on: what was printed before was no end.
_ALIVE = re.compile(
    r"\{ ?Epoch:\[|\bstep: ?\d+, loss is|\bloss: ?[\d.naif]+, |Training Over!|per_step_time|train epoch time:",
    re.IGNORECASE,
)
# Lines outside any traceback that may be the whole story.
_BARE = re.compile(
    r"(?:^|\s)Killed(?:$|\s{2,})|已杀死|Segmentation fault|段错误|core dumped|核心已转储|Bus error|总线错误"
    r"|terminate called|^ERROR: |command not found|未找到命令|No module named|没有那个文件或目录"
    r"|Permission denied|权限不够|Address already in use|地址已在使用|errno: ?98"
    r"|No space left on device|设备上没有空间|Too many open files|打开的文件过多"
    r"|Cannot allocate memory|无法分配内存|Out of Memory!!!|out of memory|内存不足|\bE[A-Z]\d{4}\b"
    r"|Resource temporarily unavailable|资源暂时不可用|can't start new thread|compiled using NumPy 1"
    r"|Using network Socket|fatal error: |undefined symbol|cannot open shared object"
)
# Whether a line deserves a closer look at all; most lines of a log do not. Plain substrings: a regular
# expression of these alternatives is ten times slower.
_TOKENS = tuple(
    (
        b"Traceback|ERROR|CRITICAL|rror|Exception|illed|fault|dumped|terminate|not found|No module|errno|denied"
        b"|in use|space left|Too many|allocate|emory|EI0|EE1|EE9|EJ0|EL0|EZ9|EH0|Epoch|loss|per_step"
        b"|Training Over|epoch time|NumPy|Socket|fatal|undefined|cannot open|unavailable|new thread|- INFO -"
    ).split(b"|")
)


def _interesting(raw: bytes) -> bool:
    return not raw.isascii() or any(map(raw.__contains__, _TOKENS))


Kind = Literal["traceback", "log", "bare"]


@dataclass
class Event:
    """Something in a log that may be the reason of its end.

    Attributes:
        line: number of its first line in the log, from 1.
        time: seconds (of the log's own clock, no time zone), of it or of the last stamped line before it.
        exceptions: of a traceback, each exception as (type, message), the root first.
        frames: of the root exception, (file, line, function), innermost last.
        text: everything, bounded.
    """

    kind: Kind
    line: int
    time: float | None = None
    level: str = ""
    rank: int | None = None
    exceptions: list[tuple[str, str]] = field(default_factory=list)
    frames: list[tuple[str, int, str]] = field(default_factory=list)
    text: str = ""

    @property
    def headline(self) -> str:
        """One line: the root exception, or the error line itself."""
        if self.exceptions:
            kind, message = self.exceptions[0]
            said = telling_line(message)
            return f"{kind}: {said}" if said else kind
        return next((part.strip() for part in self.text.splitlines() if part.strip()), "")


# MindSpore's messages have ruled sections; these hold what happened, the others where in C++ it was noticed.
_TELLING = ("- Kernel select failed:", "- Dataset Pipeline Error Message:")
_RULE = re.compile(r"^-{8,}\s*$")


def telling_line(message: str) -> str:
    """The line of an exception's message that says what happened."""
    lines = [line.strip() for line in message.splitlines() if line.strip() and not _RULE.match(line.strip())]
    first = message.partition("\n")[0].strip()
    if not first or "Refer to" in first:
        for at, line in enumerate(lines[:-1]):
            if line.startswith(_TELLING):
                return lines[at + 1].removeprefix("[ERROR] ")
    return next((line for line in lines if not line.startswith("- ")), "")


@dataclass
class Stream:
    """What one log, or one rank of a joined log, came to.

    Attributes:
        events: in order, since the last sign that the run went on; `earlier` the few before that.
        signs: how many signs of life came after those of `earlier`.
        progressed: training steps were seen.
    """

    events: list[Event] = field(default_factory=list)
    earlier: list[Event] = field(default_factory=list)
    signs: int = 0
    lines: int = 0
    last_line: str = ""
    progressed: bool = False
    words: set[str] = field(default_factory=set)
    versions: dict[str, str] = field(default_factory=dict)


def _seconds(stamp: str, fraction: str | None) -> float | None:
    for pattern in ("%Y-%m-%d-%H:%M:%S", "%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M:%S"):
        try:
            whole = (datetime.strptime(stamp, pattern) - datetime(1970, 1, 1)).total_seconds()
        except ValueError:
            continue
        return whole + (float(f"0.{fraction}") if fraction else 0.0)
    return None


@dataclass(frozen=True)
class Header:
    """A line that a logger wrote."""

    level: str
    time: float | None
    text: str
    going_on: bool = False  # mindformers tells what it does: the program lives


def header_of(line: str) -> Header | None:
    """The parts of a logger's line, or None for any other line."""
    match = _MINDSPORE.match(line)
    if match:
        level, _, _, stamp, fraction, _, text = match.groups()
        return Header(level, _seconds(stamp, fraction), text)
    match = _MINDFORMERS.match(line)
    if match:
        stamp, fraction, _, _, level, text = match.groups()
        return Header(level, _seconds(stamp, fraction), text, level == "INFO")
    match = _PLAIN.match(line)
    if match:
        stamp, fraction, level, text = match.groups()
        return Header(level, _seconds(stamp, fraction), text.strip(" -:|"))
    return None


# Words that tell whose log it is.
_OWN = re.compile(rb"mindspore|mindformers|MindSpore|msrun|\] ME\(")
FOREIGN = {
    "PyTorch": re.compile(
        rb"site-packages/torch/|torch\.distributed|torchrun|torch\.cuda|\bc10[:d]|ProcessGroupNCCL"
    ),
    "DeepSpeed": re.compile(rb"deepspeed", re.IGNORECASE),
    "Megatron-LM": re.compile(rb"megatron[/.](core|training|model)"),
    "TensorFlow": re.compile(rb"site-packages/tensorflow/|tensorflow\.python"),
    "JAX": re.compile(rb"site-packages/jax(lib)?/|\bjaxlib\b"),
    "PaddlePaddle": re.compile(rb"site-packages/paddle/|paddle\.distributed"),
}
_VERSION = re.compile(
    rb"\b(mindspore|mindformers|MindSpore|MindFormers|numpy|NumPy|CANN)(?: version)?[ =:]{1,3}v?(\d+\.\d+[\w.]{0,16})"
)
_INTRODUCTION = 20_000  # lines in which packages name their versions
_FOREIGN_QUICK = re.compile(rb"torch|c10|NCCL|[Dd]eep[Ss]peed|megatron|tensorflow|jax|paddle")


class Reader:
    """Feeds lines of one stream into events."""

    def __init__(self, rank: int | None = None) -> None:
        self.stream = Stream()
        self._rank = rank
        self._first: list[Event] = []
        self._last: deque[Event] = deque(maxlen=KEEP)
        self._block: list[str] | None = None
        self._block_line = 0
        self._chained = False
        self._event: Event | None = None
        self._stamped = b""
        self._raw_last = b""
        self._in_message = False
        self._own = False
        self._quoted = False
        self._message_lines = 0

    def feed(self, number: int, raw: bytes) -> None:
        """Take one line."""
        self.stream.lines += 1
        if raw:
            self._raw_last = raw
        if self.stream.lines <= _INTRODUCTION:
            for name, version in _VERSION.findall(raw):
                self.stream.versions.setdefault(text_of(name).lower(), text_of(version).rstrip("."))
        if not self._own:
            self._recognise(raw)
        if self._block is not None:
            self._in_block(number, text_of(raw))
            return
        if raw[:1] == b"[" or raw[:2] == b"20":
            self._stamped = raw
        if b"per_step_time" in raw:  # most lines of a long training
            self._alive()
        elif _interesting(raw):
            self._outside(number, text_of(raw))

    def _recognise(self, raw: bytes) -> None:
        """Whose log this is; once it is MindSpore's, nobody else's words matter."""
        if _OWN.search(raw):
            self._own = True
            self.stream.words.add("own")
        elif _FOREIGN_QUICK.search(raw):
            self.stream.words.update(name for name, words in FOREIGN.items() if words.search(raw))

    def finish(self) -> Stream:
        """No more lines."""
        self._close_block()
        self.stream.events = [*self._first, *self._last]
        self.stream.last_line = text_of(self._raw_last[:400]).strip()
        return self.stream

    # -- outside a traceback ---------------------------------------------------------------------------------
    def _outside(self, number: int, line: str) -> None:
        header = header_of(line)
        body = header.text if header else line
        if body.strip().endswith(_TRACEBACK):
            self._begin(number)
            return
        if _ALIVE.search(body):
            self._alive()
            return
        if header is not None:
            if header.level in ("ERROR", "CRITICAL"):
                self._begin_log(number, header)
            elif header.going_on:
                self._went_on()
            elif _SPECIAL_WARNING.search(body):
                self._add(Event("bare", number, header.time, header.level, self._rank, text=body[:MAX_TEXT]))
            return
        exception = _EXCEPTION.match(line)
        named = bool(exception and exception.group(1).lower().endswith(("error", "exception")))
        if named or _BARE.search(line):
            kind = [(exception.group(1), exception.group(2) or "")] if exception and named else []
            self._add(
                Event("bare", number, self._time(), "", self._rank, exceptions=kind, text=line[:MAX_TEXT])
            )

    def _time(self) -> float | None:
        header = header_of(text_of(self._stamped[:400])) if self._stamped else None
        return header.time if header else None

    def _begin(self, number: int) -> None:
        self._block, self._block_line, self._in_message = [], number, False

    def _begin_log(self, number: int, header: Header) -> None:
        event = Event("log", number, header.time, header.level, self._rank, text=header.text[:MAX_TEXT])
        self._add(event)

    # -- inside a traceback ----------------------------------------------------------------------------------
    def _in_block(self, number: int, line: str) -> None:
        assert self._block is not None
        stripped = line.strip()
        if stripped in _CHAIN:
            self._close_block(chained=True)
            return
        if stripped.endswith(_TRACEBACK):
            quoted = self._in_message and any(_QUOTES.search(text) for text in self._block[-12:])
            self._close_block()
            self._begin(number)
            self._quoted = quoted
            return
        header = header_of(line)
        if header is not None and self._in_message:
            self._close_block()
            self.feed(number, line.encode("utf-8", "replace"))
            self.stream.lines -= 1
            return
        if header is not None:
            self._stamped = line[:400].encode("utf-8", "replace")
            return
        if not self._in_message and stripped and not line[:1].isspace() and _EXCEPTION.match(line):
            self._in_message = True
        elif self._in_message and _ALIVE.search(line):
            self._close_block()
            self._alive()
            return
        self._block.append(line)
        if len(self._block) > MAX_BLOCK_LINES * 4:
            # Frames of a very deep stack: its two ends are what matters.
            self._block = self._block[:20] + self._block[-MAX_BLOCK_LINES * 2 :]
        self._message_lines += self._in_message
        if self._message_lines > MAX_BLOCK_LINES:
            self._close_block()

    def _close_block(self, chained: bool = False) -> None:
        """Turn the collected traceback into an event, or join it to the one it was raised from."""
        block, self._block = self._block, None
        self._message_lines = 0
        if block is None:
            return
        joins, self._chained = self._chained, chained
        frames, exceptions = _parse(block)
        if not frames and not exceptions:
            self._chained = False
            return
        text = "\n".join(block)
        quoted, self._quoted = self._quoted, False
        if quoted and self._event is not None:
            self._event.exceptions = exceptions + self._event.exceptions
            self._event.frames = frames[-8:]
            self._event.text = _bounded(self._event.text + "\n" + text)
            return
        if joins and self._event is not None:
            self._event.exceptions += exceptions
            self._event.text = _bounded(self._event.text + "\n" + text)
            return
        self._event = Event(
            "traceback",
            self._block_line,
            self._time(),
            "",
            self._rank,
            exceptions=exceptions,
            frames=frames[-8:],
            text=_bounded(text),
        )
        self._add(self._event)

    # -- keeping ---------------------------------------------------------------------------------------------
    def _add(self, event: Event) -> None:
        if len(self._first) < KEEP:
            self._first.append(event)
        else:
            self._last.append(event)

    def _alive(self) -> None:
        self.stream.progressed = True
        self._went_on(keep="")

    def _went_on(self, keep: str = "WARNING") -> None:
        """The program printed ordinary lines after what was collected: that was not its end.

        A warning such as a taken port may still be the reason of an end that comes later.
        """
        self.stream.signs += 1
        if self._first:
            self.stream.signs = 1
            self.stream.earlier = [*self._first, *self._last][-4:]
            self._first = [event for event in self._first if keep and event.level == keep]
            self._last.clear()


# A message that goes on to quote the traceback it stems from (dataset workers do).
_QUOTES = re.compile(r"Python Call Stack|map operation|Error description|Original error")
_SPECIAL_WARNING = re.compile(r"Using network Socket|Address already in use|地址已在使用")


def _bounded(text: str) -> str:
    half = MAX_TEXT // 2
    return text if len(text) <= MAX_TEXT else f"{text[:half]}\n...\n{text[-half:]}"


def _parse(block: list[str]) -> tuple[list[tuple[str, int, str]], list[tuple[str, str]]]:
    """Frames and the exception of one traceback without its first line."""
    frames = []
    for at, line in enumerate(block):
        match = _FRAME.match(line)
        if match:
            frames.append((match.group(1), int(match.group(2)), match.group(3)))
            continue
        if line[:1].isspace() or not line.strip():
            continue
        exception = _EXCEPTION.match(line)
        if exception:
            message = "\n".join([exception.group(2) or "", *block[at + 1 :]]).strip()
            return frames, [(exception.group(1), _bounded(message))]
    return frames, []


def read_stream(lines: Iterable[bytes], rank: int | None = None) -> dict[int | None, Stream]:
    """Events of a log; a joined log whose lines carry `[rankN]:` is taken apart by rank."""
    readers: dict[int | None, Reader] = {rank: Reader(rank)}
    for number, raw in enumerate(lines, start=1):
        match = _RANK_PREFIX.match(text_of(raw[:24])) if raw[:5].lower() in _RANK_STARTS else None
        if match:
            key: int | None = int(match.group(1))
            raw = raw[match.end() :]
            if key not in readers and len(readers) < 4096:
                readers[key] = Reader(key)
            readers.get(key, readers[rank]).feed(number, raw)
        else:
            readers[rank].feed(number, raw)
    return {key: reader.finish() for key, reader in readers.items()}


def tracebacks(streams: Iterable[Stream]) -> Iterator[Event]:
    """All tracebacks of the streams."""
    for stream in streams:
        yield from (event for event in stream.events if event.kind == "traceback")
