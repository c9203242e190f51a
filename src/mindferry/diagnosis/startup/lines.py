"""Lines of logs nobody vouches for: any size, any encoding, gzip, binary noise; bounded memory."""

from __future__ import annotations

import gzip
import io
import os
import re
import stat
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from mindferry.errors import UsageError

MAX_LINE = 1 << 16  # the rest of a longer line is skipped, not kept
MAX_BYTES = 64 << 30  # of one log, after decompression; a gzip bomb ends here
MAX_FILES = 4096
MAX_DEPTH = 4
_SNIFF = 1 << 13

_ANSI = re.compile(rb"\x1b\[[0-9;?]{0,16}[A-Za-z]")
_LOG_NAME = re.compile(
    r"(\.log|\.txt|\.out|\.err)(\.\d+)?(\.gz)?$|^(stdout|stderr|nohup\.out)$", re.IGNORECASE
)
_RANK = re.compile(r"(?:worker|rank|device|mindformer|node)[_.-]?(\d{1,6})(?!\d)", re.IGNORECASE)
_LAUNCHER = re.compile(r"scheduler|msrun|launch|joined", re.IGNORECASE)


@dataclass(frozen=True)
class LogFile:
    """One log of a job.

    Attributes:
        rank: the process that wrote it, as its name or its directory's name tells; None when they do not.
        launcher: msrun or its scheduler wrote it: it reports what happened elsewhere.
    """

    path: Path
    shown: str
    rank: int | None
    launcher: bool


def _regular(path: Path) -> bool:
    """A plain file, itself and not through a link."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False


def _describe(path: Path, root: Path) -> LogFile:
    shown = str(path.relative_to(root)) if path != root else path.name
    rank = None
    for part in reversed(Path(shown).parts):
        match = _RANK.search(part)
        if match:
            rank = int(match.group(1))
            break
    return LogFile(path, shown, rank, bool(_LAUNCHER.search(path.name)) and rank is None)


def log_files(path: Path) -> list[LogFile]:
    """The logs at `path`: the file itself, or every log in the directory (links are not followed).

    Raises:
        UsageError: nothing there, no log in it, or no plain file.
    """
    if path.is_dir():
        found: list[Path] = []
        for folder, folders, names in os.walk(path, followlinks=False):
            depth = len(Path(folder).relative_to(path).parts)
            folders[:] = sorted(folders) if depth < MAX_DEPTH else []
            found += [Path(folder) / name for name in sorted(names) if _LOG_NAME.search(name)]
            if len(found) > MAX_FILES:
                raise UsageError(
                    f"{path}: more than {MAX_FILES} logs",
                    remedy="give the directory of one start (msrun's --log_dir)",
                    id="startup.too-many",
                )
        logs = [_describe(item, path) for item in found if _regular(item)]
        if not logs:
            raise UsageError(
                f"{path}: no log in this directory (*.log, *.txt, *.out, *.err, also .gz)",
                remedy="give msrun's --log_dir, or the file that the output went to",
                id="startup.no-log",
            )
        return logs
    if not path.exists():
        raise UsageError(f"{path}: no such file", remedy="give a log, a directory of logs, or - for stdin")
    if not path.is_file():
        raise UsageError(f"{path}: neither a file nor a directory", remedy="give a log file, or - for stdin")
    return [_describe(path, path)]


def open_log(path: Path) -> IO[bytes]:
    """The bytes of a log, decompressed when it is gzip.

    Raises:
        UsageError: it cannot be read, or is no text.
    """
    try:
        handle: IO[bytes] = open(path, "rb")  # noqa: SIM115 - the caller closes it
        head = handle.read(_SNIFF)
        handle.seek(0)
    except OSError as err:
        raise UsageError(f"{path}: cannot be read: {err.strerror}", id="startup.unreadable") from None
    if head[:2] == b"\x1f\x8b":
        handle = gzip.GzipFile(fileobj=handle, mode="rb")  # type: ignore[assignment]
        try:
            head = handle.read(_SNIFF)
            handle.seek(0)
        except (OSError, EOFError, zlib.error) as err:
            handle.close()
            raise UsageError(f"{path}: damaged gzip file: {err}", id="startup.unreadable") from None
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):  # what PowerShell's > writes
        return _Utf8(io.TextIOWrapper(handle, "utf-16", errors="replace"))  # type: ignore[return-value]
    if not_text(head):
        handle.close()
        raise UsageError(
            f"{path}: found binary data, expected a log",
            remedy="give the text that the run printed (msrun's worker_N.log, or `... 2>&1 | tee run.log`)",
            id="startup.binary",
        )
    return handle


class _Utf8:
    """A text stream as UTF-8 lines of bytes."""

    def __init__(self, text: io.TextIOWrapper) -> None:
        self._text = text

    def readline(self, limit: int = -1) -> bytes:
        return self._text.readline(limit).encode("utf-8", "replace")

    def close(self) -> None:
        self._text.close()


def not_text(head: bytes) -> bool:
    """More than one control character in twenty: no log. A crash may leave a block of NULs in a real one."""
    rest = re.sub(rb"\0{16,}", b"", head)
    odd = sum(rest.count(bytes([code])) for code in range(32) if code not in (8, 9, 10, 12, 13, 27))
    return odd * 20 > len(rest) or (bool(head) and not rest)


def lines_of(handle: IO[bytes], max_bytes: int = MAX_BYTES) -> Iterator[bytes]:
    """Lines without their ends, colours and overwritten progress bars; at most MAX_LINE bytes of each.

    A damaged end (cut gzip) ends the lines without an error: what came before is the log.
    """
    total = 0
    while total < max_bytes:
        try:
            raw = handle.readline(MAX_LINE)
        except (OSError, EOFError, zlib.error):
            return
        if not raw:
            return
        total += len(raw)
        if len(raw) == MAX_LINE and not raw.endswith(b"\n"):
            total += _skip_rest(handle, max_bytes - total)
        line = raw.rstrip(b"\r\n")
        if b"\x1b" in line:
            line = _ANSI.sub(b"", line)
        if b"\r" in line:
            line = line.rsplit(b"\r", 1)[1]
        yield line


def _skip_rest(handle: IO[bytes], budget: int) -> int:
    """Read on to the end of an over-long line; bytes read."""
    skipped = 0
    while skipped < budget:
        try:
            raw = handle.readline(1 << 20)
        except (OSError, EOFError, zlib.error):
            break
        skipped += len(raw)
        if not raw or raw.endswith(b"\n"):
            break
    return skipped


def text_of(line: bytes) -> str:
    """A line as text: UTF-8, else GB18030 (Chinese Windows consoles), else with replacement characters."""
    for encoding in ("utf-8", "gb18030"):
        try:
            return line.decode(encoding)
        except UnicodeDecodeError:
            continue
    return line.decode("utf-8", "replace")


def as_bytes(lines: Iterable[str | bytes]) -> Iterator[bytes]:
    """Lines given as text or bytes, cut as `lines_of` cuts them."""
    for line in lines:
        raw = line.encode("utf-8", "replace") if isinstance(line, str) else line
        for part in raw.splitlines() or [b""]:
            yield _ANSI.sub(b"", part[:MAX_LINE])
