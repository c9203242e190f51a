"""What every command shares: the result object, exit codes, JSON on stdout, progress on stderr."""

from __future__ import annotations

import functools
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mindferry import __version__
from mindferry.errors import MindferryError, printable
from mindferry.findings import Finding

INTERRUPTED = 130


@dataclass
class Result:
    """What a command found out.

    Attributes:
        verdict: "good", or "problem" when the command worked and the answer is bad news.
        extra: the command's own JSON fields, as docs/json.md lists them.
        text: what a person reads on stdout when --json was not given.
    """

    verdict: Literal["good", "problem"] = "good"
    findings: list[Finding] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    text: str = ""
    exit_code: int | None = None


def plain(value: Any) -> Any:
    """JSON-safe copy: paths as text, numpy scalars as numbers, NaN and infinities as strings."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if hasattr(value, "item"):
        return plain(value.item())
    return str(value)


def _emit_json(command: str, verdict: str, findings: list[Finding], extra: dict[str, Any]) -> None:
    payload = {
        "command": command,
        "version": __version__,
        "verdict": verdict,
        "findings": [vars(f) for f in findings],
        **extra,
    }
    sys.stdout.write(json.dumps(plain(payload), ensure_ascii=False) + "\n")
    sys.stdout.flush()


def say(message: str) -> None:
    """One line of progress for a person, on stderr."""
    sys.stderr.write(printable(message) + "\n")
    sys.stderr.flush()


_MARKS = {"info": "note", "warning": "warning", "problem": "problem"}


def _show(findings: list[Finding]) -> None:
    for item in findings:
        sys.stderr.write(f"{_MARKS[item.severity]}: {printable(item.message)}\n")
        for label, text in (("why", item.cause), ("do", item.remedy)):
            if text:
                sys.stderr.write(f"  {label}: {printable(text)}\n")


def _fail(command: str, json_mode: bool, err: BaseException) -> int:
    """Report an exception as the contract asks and return the exit code."""
    if isinstance(err, MindferryError):
        finding = Finding(err.id, "problem", err.message, err.cause, err.remedy, err.evidence)
        code = err.exit_code
    elif isinstance(err, KeyboardInterrupt):
        finding = Finding("interrupted", "problem", "interrupted")
        code = INTERRUPTED
    else:
        where = _save_traceback(err)
        finding = Finding(
            "internal",
            "problem",
            f"{type(err).__name__}: {err}",
            cause="this is a fault in mindferry or in a library it calls, not in your command",
            remedy=f"the full trace is in {where}",
        )
        code = 1
    if json_mode:
        _emit_json(command, "error", [finding], {})
    else:
        sys.stderr.write(f"error: {finding.message}\n")
        for label, text in (("why", finding.cause), ("do", finding.remedy)):
            if text:
                sys.stderr.write(f"  {label}: {text}\n")
    return code


def _save_traceback(err: BaseException) -> str:
    import tempfile

    with tempfile.NamedTemporaryFile("w", prefix="mindferry-trace-", suffix=".log", delete=False) as handle:
        traceback.print_exception(type(err), err, err.__traceback__, file=handle)
    return handle.name


def command(name: str) -> Callable[[Callable[..., Result]], Callable[..., None]]:
    """Turn a function that returns a Result into a command that keeps the contract.

    The wrapped function must take `json_output: bool` among its keyword arguments.
    """

    def wrap(body: Callable[..., Result]) -> Callable[..., None]:
        @functools.wraps(body)
        def run(*args: Any, **kwargs: Any) -> None:
            import typer

            json_mode = bool(kwargs.get("json_output"))
            try:
                with _stdout_reserved():
                    result = body(*args, **kwargs)
            except (Exception, KeyboardInterrupt) as err:
                if os.environ.get("MINDFERRY_DEBUG"):
                    traceback.print_exc()
                raise typer.Exit(_fail(name, json_mode, err)) from None
            if json_mode:
                _emit_json(name, result.verdict, result.findings, result.extra)
            else:
                if result.text:
                    sys.stdout.write(result.text.rstrip("\n") + "\n")
                    sys.stdout.flush()
                _show(result.findings)
            code = result.exit_code if result.exit_code is not None else int(result.verdict != "good")
            raise typer.Exit(code)

        return run

    return wrap


@contextmanager
def _stdout_reserved() -> Iterator[None]:
    """Send whatever libraries print to stdout (also from C++) to stderr while a command works.

    Only the command's own result may stand on stdout, or `--json` could not be parsed.
    """
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)


@contextmanager
def output_to(path: Path) -> Iterator[None]:
    """Send stdout and stderr of this process, C++ libraries included, to the end of file `path`.

    `progress` and `say_through` still reach the terminal, through the saved descriptor.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    saved_out, saved_err = os.dup(1), os.dup(2)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    global _terminal_fd
    previous, _terminal_fd = _terminal_fd, saved_err
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        _terminal_fd = previous
        os.dup2(saved_out, 1)
        os.dup2(saved_err, 2)
        os.close(saved_out)
        os.close(saved_err)


_terminal_fd = 2


class _TerminalFile:
    """A text file that writes to the person's terminal even while `output_to` is in force."""

    encoding = "utf-8"

    def write(self, text: str) -> int:
        os.write(_terminal_fd, text.encode("utf-8", "replace"))
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return os.isatty(_terminal_fd)

    def fileno(self) -> int:
        return _terminal_fd


class Progress:
    """A progress bar on a terminal; a line every few seconds where the output is a file.

    Usage: `with Progress("tokenizing", total=n, unit="B") as bar: bar.advance(k, note="loss 3.2")`.
    """

    def __init__(
        self, title: str, total: int | None = None, unit: str = "", every_seconds: float = 10.0
    ) -> None:
        self._title, self._total, self._unit, self._every = title, total, unit, every_seconds
        self._done, self._note = 0, ""
        self._last_line = 0.0
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        import time

        self._start = self._last_line = time.monotonic()
        file = _TerminalFile()
        if file.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
            from rich.progress import Progress as RichProgress

            self._bar = RichProgress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn(
                    "{task.completed:.0f}/{task.total:.0f}" if self._total else "{task.completed:.0f}"
                ),
                TextColumn(self._unit),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
                console=Console(file=file, force_terminal=True),  # type: ignore[arg-type]
                transient=True,
                # Rich would print what libraries log above the bar; it belongs into the log file.
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._bar.start()
            self._task = self._bar.add_task(self._title, total=self._total, note="")
        return self

    def advance(self, amount: int = 1, note: str = "") -> None:
        import time

        self._done += amount
        self._note = note or self._note
        if self._bar is not None:
            self._bar.update(self._task, advance=amount, note=printable(self._note))
            return
        now = time.monotonic()
        if now - self._last_line >= self._every:
            self._last_line = now
            self._line(now)

    def say(self, message: str) -> None:
        """One line for the person, above the bar; reaches the terminal through `output_to`, too."""
        if self._bar is not None:
            self._bar.console.print(printable(message), markup=False, highlight=False)
        else:
            _TerminalFile().write(printable(message) + "\n")

    def at(self, done: int, note: str = "") -> None:
        """Move to an absolute position."""
        self.advance(done - self._done, note)

    def _line(self, now: float) -> None:
        of = f"/{self._total}" if self._total else ""
        rate = self._done / max(now - self._start, 1e-9)
        left = f", {(self._total - self._done) / rate:.0f} s left" if self._total and rate > 0 else ""
        note = f", {printable(self._note)}" if self._note else ""
        _TerminalFile().write(f"{self._title}: {self._done}{of} {self._unit}{left}{note}\n")

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()
